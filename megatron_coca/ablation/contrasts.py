"""Figures of an ablation over its seeds, and their differences paired by seed, for the sentences of a page."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_coca.ablation.cells import measured_files, read_cell, read_curve
from megatron_coca.ablation.plan import AblationFile, Cell
from megatron_coca.evaluation.options import full_label, slug
from megatron_coca.evaluation.perplexity import PerplexityResult, WindowResult
from megatron_coca.evaluation.report.charts import Figure, Line, Panel, panels, size_with_legend
from megatron_coca.evaluation.report.intervals import Estimate, geometric_estimate
from megatron_coca.evaluation.report.published import LENGTHS, TABLES
from megatron_coca.evaluation.results import EvaluationError, read_record

BySeed = Mapping[int, float]


@dataclass(frozen=True)
class Contrast:
    """A quantity of one label against that of another.

    Attributes:
        times: how many times as large it is, the geometric mean over the seeds that both have, with its t interval.
    """

    times: Estimate

    @property
    def verdict(self) -> str:
        """ "lower" or "higher" where the interval excludes 1; "no interval" where there is none, as of one seed."""
        if math.isnan(self.times.low):
            return "no interval"
        return "lower" if self.times.high < 1 else "higher" if self.times.low > 1 else "not distinguishable"


class Figures:
    """The perplexities and losses of finished cells, by label, seed and multiple of the training length."""

    def __init__(self, file: AblationFile, cells: Sequence[Cell]) -> None:
        self._file, self._cells = file, cells

    @cached_property
    def _windows(self) -> dict[str, dict[int, dict[float, WindowResult]]]:
        found: dict[str, dict[int, dict[float, WindowResult]]] = {}
        for cell in self._cells:
            measured = {path.name: path for path in measured_files(cell, read_cell(cell))}
            for variant in self._file.models[cell.model].variants:
                label = full_label(cell.model, variant)
                path = measured.get(f"perplexity_{slug(label)}.json")
                if path is not None:
                    result = read_record(path, PerplexityResult, "a result of perplexity")
                    length = cell.config.model.seq_length
                    windows = {window.window / length: window for window in result.results}
                    found.setdefault(label, {})[cell.seed] = windows
        return found

    @property
    def labels(self) -> list[str]:
        """The labels that have perplexities, in the order of the file."""
        return list(self._windows)

    def logarithms(self, quantity: str, label: str, multiple: float = 1) -> BySeed:
        """Return the logarithm of a quantity by seed. Raises EvaluationError for an unknown quantity or label.

        The quantities: "perplexity" at `multiple` times the training length L; "ratio", that over the perplexity at L;
        "validation perplexity" of a model after `multiple` (at most 1) times its training steps.
        """
        if quantity == "validation perplexity":
            return self._validation_losses(label, multiple)
        functions: dict[str, Callable[[Mapping[float, WindowResult]], float]] = {
            "perplexity": lambda windows: windows[multiple].nll,
            "ratio": lambda windows: windows[multiple].nll - windows[1].nll,
        }
        if quantity not in functions or label not in self._windows:
            known = ", ".join([*functions, "validation perplexity"]), ", ".join(self.labels) or "none"
            raise EvaluationError(f"{quantity} of {label}: the quantities are {known[0]}, the labels {known[1]}")
        try:
            return {seed: functions[quantity](windows) for seed, windows in self._windows[label].items()}
        except KeyError as error:
            raise EvaluationError(f"{quantity} of {label}: was not measured at {error.args[0]:g}L") from error

    def _validation_losses(self, model: str, share: float) -> BySeed:
        found: dict[int, float] = {}
        for cell in (cell for cell in self._cells if cell.model == model):
            curve = read_curve(cell)
            points = curve.points if curve is not None else []
            until = [each.validation_loss for each in points if each.step <= share * cell.steps]
            losses = [loss for loss in until if loss is not None]
            found |= {cell.seed: losses[-1]} if losses else {}
        return found

    def estimate(self, quantity: str, label: str, multiple: float = 1) -> Estimate:
        """Return the geometric mean over seeds with its t interval."""
        return geometric_estimate(list(self.logarithms(quantity, label, multiple).values()))

    def contrast(self, quantity: str, label: str, other: str, multiple: float = 1) -> Contrast:
        """Compare two labels by the seeds that both have. Raises EvaluationError without a common seed."""
        ours, theirs = (self.logarithms(quantity, name, multiple) for name in (label, other))
        common = sorted(ours.keys() & theirs.keys())
        if not common:
            raise EvaluationError(f"{quantity} of {label} and {other}: have no seed in common")
        return Contrast(geometric_estimate([ours[seed] - theirs[seed] for seed in common]))

    def ordered(self, quantity: str, multiple: float, labels: Sequence[str]) -> list[str]:
        """Return the labels by their means, the lowest first."""
        return sorted(labels, key=lambda label: self.estimate(quantity, label, multiple).mean)

    def chart(self, labels: Sequence[str]) -> Figure:
        """Return a plot of the perplexity of labels against the window, with intervals over seeds."""
        lines = []
        for label in labels:
            multiples = sorted(set.intersection(*(set(windows) for windows in self._windows[label].values())))
            found = [self.estimate("perplexity", label, multiple) for multiple in multiples]
            means, low, high = (tuple(getattr(each, end) for each in found) for end in ("mean", "low", "high"))
            lines.append(Line(label, tuple(multiples), means, low, high))
        panel = Panel(tuple(lines), "window as a multiple of the training length L", "perplexity", log_y=True)
        return Figure("perplexity", "", "", panels([panel]), size_with_legend(labels))


def published_order(table: str, names: Mapping[str, str], multiple: int) -> list[str]:
    """Return our labels in the order of a published table at a multiple of its training length, the lowest first.

    `names` has our labels by the names of the rows; rows without a number there are left out. Raises EvaluationError
    for what the table does not have.
    """
    found = next((each for each in TABLES if each.name == table), None)
    length = found.training_length * multiple if found is not None else 0
    if found is None or length not in found.columns:
        raise EvaluationError(f"{table} at {multiple}L: is not among the published tables of lengths {LENGTHS}")
    column = found.columns.index(length)
    values = {row.name: row.numbers[column] for row in found.rows}
    if unknown := sorted(names.keys() - values.keys()):
        raise EvaluationError(f"{table}: has no row {', '.join(unknown)}; it has {', '.join(values)}")
    measured = [name for name in names if not math.isnan(values[name])]
    return [names[name] for name in sorted(measured, key=values.__getitem__)]
