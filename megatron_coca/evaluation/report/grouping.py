"""Which results may stand in one table: those that measure the same thing, on the same data, in the same way."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from megatron_coca.evaluation.report.reading import Loaded
from megatron_coca.evaluation.results import Cell, EvaluationError, Missing, Result
from megatron_coca.evaluation.store import Cost

R = TypeVar("R", bound=Result)

Comparable = Mapping[str, Callable[[R], Any]]
"""What must agree before results may stand in one table: how it is called, and where a result has it."""


_LENGTH = re.compile(r"\b(?:window|length) (\d+)")
"""How tasks name a length in what is missing."""
_HASH = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{20,}\b")
_SHOWN = 100


@dataclass(frozen=True)
class Series(Generic[R]):
    """All that one label stands for in a group: its cells may come out of several files."""

    label: str
    header: R  # of the first file
    cells: dict[tuple[Any, ...], Any]
    missing: dict[str, Missing]
    costs: dict[str, Cost]

    def why(self, at: str) -> Missing:
        """Why there is no cell `at`."""
        unknown = Missing(at=at, kind="not run", reason="")
        return self.missing.get(at) or self.missing.get("all") or unknown


@dataclass(frozen=True)
class Group(Generic[R]):
    """Comparable series; `differs` names in what it is another than the other groups of its task."""

    series: tuple[Series[R], ...]
    differs: str = ""

    @property
    def first(self) -> R:
        """The header whose protocol is that of all."""
        return self.series[0].header

    @property
    def measured(self) -> tuple[Series[R], ...]:
        """Those that have a cell at all."""
        return tuple(each for each in self.series if each.cells)

    def cell_keys(self) -> list[Any]:
        """Of all cells, sorted."""
        return sorted({key for each in self.series for key in each.cells})

    def lengths(self) -> list[int]:
        """All that were asked for, measured or missing, ascending. In keys it is the first whole number."""
        missing = [at for each in self.series for at in each.missing]
        named = {int(found[1]) for at in missing if (found := _LENGTH.search(at))}
        return sorted(named | {_first_int(key) for key in self.cell_keys()})


def _first_int(key: tuple[Any, ...]) -> int:
    return next(part for part in key if isinstance(part, int))


def groups(loaded: Sequence[Loaded], comparable: Comparable[R]) -> list[Group[R]]:
    """Comparable results together, in the order of the files.

    Raises EvaluationError where one label of a group would stand for two models, or for two values of one cell.
    """
    found: dict[str, list[Loaded]] = {}
    for each in loaded:
        identity = repr([read(cast(R, each.result)) for read in comparable.values()])
        found.setdefault(identity, []).append(each)
    differing = _differing([members[0] for members in found.values()], comparable)
    return [Group(_series(members), _described(members[0], differing, comparable)) for members in found.values()]


def _differing(firsts: Sequence[Loaded], comparable: Comparable[Any]) -> list[str]:
    return [name for name, read in comparable.items() if len({repr(read(each.result)) for each in firsts}) > 1]


def _described(loaded: Loaded, differing: Iterable[str], comparable: Comparable[Any]) -> str:
    shown = {name: _HASH.sub(r"\1", str(comparable[name](loaded.result)))[:_SHOWN] for name in differing}
    return ", ".join(f"{name} {text}" for name, text in shown.items())


def _series(members: Sequence[Loaded]) -> tuple[Series[Any], ...]:
    by_label: dict[str, list[Loaded]] = {}
    for each in members:
        by_label.setdefault(each.result.label, []).append(each)
    return tuple(_merged(label, files) for label, files in by_label.items())


def _merged(label: str, files: Sequence[Loaded]) -> Series[Any]:
    cells: dict[tuple[Any, ...], Cell] = {}
    origin: dict[tuple[Any, ...], str] = {}
    missing: dict[str, Missing] = {}
    for each in files:
        result: Any = each.result
        _check_same_model(label, files[0], each)
        for cell in result.results:
            if origin.setdefault(cell.key, each.file) != each.file:
                key = " ".join(map(str, cell.key))
                raise EvaluationError(
                    f"label `{label}` has the cell {key} of {result.task} both in {origin[cell.key]} and in "
                    f"{each.file}; report only one of them"
                )
            cells[cell.key] = cell
        missing |= {entry.at: entry for entry in result.missing}
    costs = {cost.at: cost for each in files for cost in each.costs}
    return Series(label, files[0].result, dict(sorted(cells.items())), missing, costs)


def _check_same_model(label: str, known: Loaded, other: Loaded) -> None:
    models = [(each.result.checkpoint.identity, each.result.overrides) for each in (known, other)]
    if models[0] != models[1]:
        raise EvaluationError(
            f"label `{label}` stands for different models in {known.file} and {other.file}; evaluate one of them again "
            "with another --label"
        )
