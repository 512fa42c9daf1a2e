"""What a run takes from each source."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from megatron_coca.data.errors import DataError
from megatron_coca.data.inspection.table import percent, table
from megatron_coca.data.order.blend import Blend, SourceShare

MOST_SAMPLES = 1 << 62
"""Numbers of samples are 64-bit integers."""
TITLES = ("source", "tokens on disk", "weight", "achieved", "samples", "tokens read", "epochs")


@dataclass(frozen=True)
class SourceMixture:
    """A source's share, and the tokens that it has."""

    tokens_on_disk: int
    share: SourceShare

    def facts(self) -> dict[str, object]:
        """As JSON can hold it."""
        return {"tokens_on_disk": self.tokens_on_disk, **asdict(self.share)}


def check_samples(number: int) -> None:
    """Raise ``DataError`` for a number that the order does not reach."""
    if number > MOST_SAMPLES:
        raise DataError(f"{number}: samples are numbered up to 2^62 only. Take a smaller number.")


def mixture(blend: Blend, samples: int) -> list[SourceMixture]:
    """What the first ``samples`` samples of a run take from each source. ``DataError`` beyond ``MOST_SAMPLES``."""
    check_samples(samples)
    shares = blend.mixture(samples)
    return [SourceMixture(shard.len_tokens, share) for shard, share in zip(blend.shards, shares, strict=True)]


def mixture_table(found: Sequence[SourceMixture]) -> str:
    """One row per source, and their sum."""
    rows: list[list[object]] = [
        [s.source, m.tokens_on_disk, percent(s.weight), percent(s.fraction), s.samples, s.tokens, s.epochs]
        for m in found
        for s in (m.share,)
    ]
    shares = [m.share for m in found]
    total = [sum(m.tokens_on_disk for m in found), percent(sum(s.weight for s in shares))]
    total += [percent(sum(s.fraction for s in shares)), sum(s.samples for s in shares), sum(s.tokens for s in shares)]
    return table(TITLES, [*rows, ["all", *total, None]])
