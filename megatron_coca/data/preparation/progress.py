"""How far a preparation is, how fast it goes, and when it will end."""

from collections.abc import Sequence

from tqdm import tqdm

from megatron_coca.data.preparation.pipeline import Step, UnitDone
from megatron_coca.data.readers.source import Unit


class Progress:
    """A bar over the bytes of all units, or over their number where no size is known."""

    def __init__(self, units: Sequence[tuple[int, Unit]], names: Sequence[str], first: int, shown: bool) -> None:
        self._names, self._by_size = names, any(unit.size for _, unit in units)
        sizes = [unit.size if self._by_size else 1 for _, unit in units]
        self._bar = tqdm(
            total=sum(sizes),
            initial=sum(sizes[:first]),
            unit="B" if self._by_size else " units",
            unit_scale=self._by_size,
            smoothing=0.05,
            disable=not shown,
        )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def update(self, step: Step, tokens: int) -> None:
        """Move on by a step; ``tokens`` have been written so far."""
        self._bar.set_description(f"tokenize {self._names[step.source]}", refresh=False)
        self._bar.set_postfix_str(f"{tokens / 1e6:,.1f}M tokens", refresh=False)
        if isinstance(step, UnitDone):
            self._bar.update(0 if self._by_size else 1)
        elif self._by_size:
            self._bar.update(step.read)
