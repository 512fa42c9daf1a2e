"""Means over seeds, differences paired by seed, and plots of an ablation, for use in page templates."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from megatron_coca.ablation.cells import measured_files, read_cell, read_curve
from megatron_coca.ablation.declared import outcome, plan, steps_of
from megatron_coca.ablation.file import AblationFile, DeclaredContrast
from megatron_coca.ablation.grid import Cell
from megatron_coca.data.synthetic import chances_without_order
from megatron_coca.evaluation.contrasts import LEVEL, Declared, Step, p_value, together
from megatron_coca.evaluation.labels import full_label, slug
from megatron_coca.evaluation.report.plots.figures import Figure
from megatron_coca.evaluation.report.plots.looks import Member, members
from megatron_coca.evaluation.report.plots.panels import SHARES, Line, Panel, arranged, panels
from megatron_coca.evaluation.results import EvaluationError, read_record
from megatron_coca.evaluation.statistics import Estimate, bootstrap_interval, estimate, geometric_estimate
from megatron_coca.evaluation.tasks import TASKS
from megatron_coca.evaluation.tasks.perplexity.task import PERPLEXITY
from megatron_coca.evaluation.tasks.recall.section import head_panels
from megatron_coca.evaluation.tasks.recall.task import accuracy_of

BySeed = Mapping[int, float]
Entries = dict[tuple[Any, ...], Any]
ByLabel = dict[str, dict[int, Entries]]
"""The entries of result files by label, seed and key."""


@dataclass(frozen=True)
class Contrast:
    """A quantity of one label relative to the same quantity of another label.

    Attributes:
        times: the geometric mean of the ratio over the seeds that both labels have, with its t interval.
    """

    times: Estimate

    @property
    def verdict(self) -> str:
        """ "lower" or "higher" if the interval excludes 1, else "not distinguishable"; "no interval" without one."""
        if math.isnan(self.times.low):
            return "no interval"
        return "lower" if self.times.high < 1 else "higher" if self.times.low > 1 else "not distinguishable"


class Figures:
    """The perplexities, recall and validation losses of finished cells, with contrasts and plots of them.

    Perplexities and recall are read by label, seed and multiple of the training length. Validation losses are read by
    model, seed and share of the training steps.
    """

    def __init__(self, file: AblationFile, cells: Sequence[Cell]) -> None:
        self._file, self._cells = file, cells

    def _results(self, task: str) -> Iterator[tuple[str, Cell, Any]]:
        """Yield the label, cell and content of every result file of one entry in `tasks`."""
        name, _, word = task.partition(" ")
        for cell in self._cells:
            folder = cell.results / slug(word) if word else cell.results
            measured = measured_files(cell, read_cell(cell))
            for variant in self._file.models[cell.model].variants:
                label = full_label(cell.model, variant)
                path = folder / f"{name}_{slug(label)}.json"
                if path in measured:
                    yield label, cell, read_record(path, TASKS[name].result, f"a result of {task}")

    def _entries(self, task: str) -> ByLabel:
        """Return the results of one entry in `tasks`. Keys begin with the multiple of the training length."""
        found: ByLabel = {}
        for label, cell, result in self._results(task):
            trained = cell.trained.model.seq_length
            entries = {(entry.key[0] / trained, *entry.key[1:]): entry for entry in result.results}
            found.setdefault(label, {})[cell.seed] = entries
        return found

    @cached_property
    def _windows(self) -> ByLabel:
        return self._entries("perplexity")

    @cached_property
    def _recalls(self) -> ByLabel:
        return self._entries("recall")

    @cached_property
    def _members(self) -> dict[str, Member]:
        """The model, the variant and the look in plots of each label."""
        return members(result for task in ("perplexity", "recall") for _, _, result in self._results(task))

    @property
    def finished(self) -> int:
        return len(self._cells)

    @property
    def planned(self) -> int:
        return len(self._file.models) * len(self._file.seeds)

    @property
    def labels(self) -> list[str]:
        """The labels with perplexities or recall, in the order of the file."""
        return list(self._windows | self._recalls)

    def accuracies(self, label: str, multiple: float = 1, shift: int = 0, part: str = "") -> BySeed:
        """Return the recall accuracy by seed at a multiple of the training length.

        `part` is "inside" or "beyond", a kind of question of ordered recall ("latest", "first", "back"), "kinds" for
        the mean of these three accuracies, or "" for all questions. Raises EvaluationError if this accuracy was not
        measured.
        """
        found = {}
        for seed, entries in self._recalls.get(label, {}).items():
            entry = entries.get((multiple, shift))
            if entry is not None and (accuracy := accuracy_of(entry, part)) is not None:
                found[seed] = accuracy
        if not found:
            raise EvaluationError(
                f"recall of {label}: not measured at {multiple:g}L, shift {shift}{', ' * bool(part)}{part}; add this "
                "length to the file's tasks"
            )
        return found

    def recall(self, label: str, multiple: float = 1, shift: int = 0, part: str = "") -> Estimate:
        """Return the mean recall accuracy over seeds with its t interval."""
        return estimate(list(self.accuracies(label, multiple, shift, part).values()))

    def declared(self) -> list[Declared[DeclaredContrast]]:
        """Return the results of the file's contrasts. Raises EvaluationError if the file tests them in sequence."""
        if self._file.testing == "sequence":
            raise EvaluationError("contrasts: tested in sequence in this file; use figures.sequence()")
        return self.tested(self._file.contrasts)

    def sequence(self) -> list[Step[DeclaredContrast]]:
        """Return the steps of a file with `testing: sequence`, or an empty list until all of its seeds are finished."""
        if self._file.testing != "sequence":
            raise EvaluationError(
                "contrasts: this file tests all of them together; call figures.declared(), or set `testing: sequence`"
            )
        return steps_of([(each, self._differences(each)) for each in self._file.contrasts], len(self._file.seeds))

    def judged(self) -> list[tuple[DeclaredContrast, list[float], str]]:
        """Return the file's contrasts with their paired differences and their verdicts in this study."""
        contrasts = self._file.contrasts
        if self._file.testing == "sequence":
            verdicts: list[str] = [step.verdict for step in self.sequence()]
        else:
            held = [each.contrast for each in self.declared() if each.holm < LEVEL]
            verdicts = ["holds" if each in held else "does not hold" for each in contrasts]
        return [(each, self._differences(each), own) for each, own in zip(contrasts, verdicts, strict=True)]

    def paired(self, quantity: str, label: str, other: str, multiple: float = 1) -> list[float]:
        """Return the difference of two labels for each common seed. Perplexities are compared by their logarithms."""
        return self._differences(DeclaredContrast(label=label, other=other, at=multiple, quantity=quantity))

    @property
    def without_order(self) -> dict[str, float]:
        """The recall of a model that ignores the order of facts, for each kind of question and on average ("kinds").

        Raises EvaluationError if the models were not trained on ordered recall.
        """
        task = self._cells[0].trained.data.synthetic if self._cells else None
        if task is None or task.updates is None:
            raise EvaluationError("recall without order: no model was trained on ordered_recall; use another file")
        chances = chances_without_order(task.facts, task.updates, task.values)
        return chances | {"kinds": sum(chances.values()) / len(chances)}

    def failed(self, label: str, least: float) -> list[int]:
        """Return the seeds with a recall accuracy below `least` at the training length."""
        return [seed for seed, accuracy in sorted(self.accuracies(label).items()) if accuracy < least]

    def sensitivity(self, without: Collection[int]) -> list[Step[DeclaredContrast]]:
        """Return the differences and p-values of all contrasts in a sequence without the seeds in `without`.

        Each contrast gets a p-value, even if one before it does not hold. The file does not declare this analysis.
        """
        found = [(contrast, self._differences(contrast, without)) for contrast in self._file.contrasts]
        return [Step(contrast, estimate(each), p_value(each), "not tested") for contrast, each in found]

    def plan(self) -> list[str]:
        """Return sentences on how the file's contrasts are tested and on the power of each contrast."""
        return plan(self._file)

    def outcome(self) -> list[str]:
        """Return sentences that describe the results of a sequence."""
        return outcome(self._file, self.sequence())

    def compared(
        self, quantity: str, pairs: Sequence[tuple[str, str]], multiples: Sequence[float]
    ) -> list[Declared[DeclaredContrast]]:
        """Compare pairs of labels at several lengths, tested together. Return the results, the smallest p-value first.

        Results with an undefined p-value are last.
        """
        contrasts = [
            DeclaredContrast(label=label, other=other, at=multiple, quantity=quantity)
            for label, other in pairs
            for multiple in multiples
        ]
        return sorted(self.tested(contrasts), key=lambda each: (math.isnan(each.p), each.p))

    def tested(self, contrasts: Sequence[DeclaredContrast]) -> list[Declared[DeclaredContrast]]:
        """Return the results of contrasts with at least two common seeds, corrected for the number of all contrasts."""
        return together([(contrast, self._differences(contrast)) for contrast in contrasts], len(contrasts))

    def _differences(self, contrast: DeclaredContrast, without: Collection[int] = ()) -> list[float]:
        """Return a contrast's difference for each seed that all of its labels have, except for seeds in `without`.

        Perplexities are compared by their logarithms.
        """
        if not contrast.terms.keys() <= set(self.labels):
            return []
        quantity, part = contrast.quantity, contrast.quantity.partition(" ")[2]
        values = partial(self.accuracies, part=part) if contrast.is_recall else partial(self.logarithms, quantity)
        weighted = [(weight, values(label, contrast.at)) for label, weight in contrast.terms.items()]
        common = set.intersection(*(set(by_seed) for _, by_seed in weighted)) - {*without}
        return [sum(weight * by_seed[seed] for weight, by_seed in weighted) for seed in sorted(common)]

    def logarithms(self, quantity: str, label: str, multiple: float = 1) -> BySeed:
        """Return the logarithm of a quantity by seed. Raises EvaluationError for an unknown quantity or label.

        Quantities:
            perplexity: the perplexity at `multiple` times the training length L.
            ratio: this perplexity divided by the perplexity at L.
            perplexity WORD: the perplexity that the task with this name measures.
            validation perplexity: for a model, after the share `multiple` of its training steps.
        """
        if quantity == "validation perplexity":
            return self._validation_losses(label, multiple)
        functions: dict[str, Callable[[Entries], float]] = {
            "perplexity": lambda windows: _logarithm(windows, multiple),
            "ratio": lambda windows: _logarithm(windows, multiple) - _logarithm(windows, 1),
        }
        by_label = self._windows
        if quantity.startswith("perplexity "):
            by_label, functions = self._entries(quantity), functions | {quantity: functions["perplexity"]}
        if quantity not in functions or label not in by_label:
            known = ", ".join([*functions, "validation perplexity"]), ", ".join(self.labels) or "none"
            raise EvaluationError(
                f"{quantity} of {label}: unknown; known quantities: {known[0]}; known labels: {known[1]}"
            )
        try:
            return {seed: functions[quantity](windows) for seed, windows in by_label[label].items()}
        except KeyError as error:
            raise EvaluationError(
                f"{quantity} of {label}: not measured at {error.args[0][0]:g}L; add this length to the file's tasks"
            ) from error

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
        """Return the geometric mean of a quantity over seeds with its t interval."""
        return geometric_estimate(list(self.logarithms(quantity, label, multiple).values()))

    def contrast(self, quantity: str, label: str, other: str, multiple: float = 1) -> Contrast:
        """Compare two labels over their common seeds. Raises EvaluationError if they have no common seed."""
        ours, theirs = (self.logarithms(quantity, name, multiple) for name in (label, other))
        common = sorted(ours.keys() & theirs.keys())
        if not common:
            raise EvaluationError(
                f"{quantity} of {label} and {other}: no seed in common; train both with the same seed"
            )
        return Contrast(geometric_estimate([ours[seed] - theirs[seed] for seed in common]))

    def over_documents(self, label: str, other: str, multiple: float = 1, inside: float = 0.95) -> Estimate:
        """Return the ratio of two labels' perplexities, with its interval over documents at the confidence `inside`.

        The losses of each document are averaged over the seeds that both labels have. Then documents are resampled.
        """
        ours, theirs = self._windows[label], self._windows[other]
        pairs = [(ours[seed][multiple,], theirs[seed][multiple,]) for seed in sorted(ours.keys() & theirs.keys())]
        tokens = pairs[0][0].tokens_scored
        sums = PERPLEXITY.numbers[0].values
        by_seed = [np.subtract(sums(one), sums(another)) for one, another in pairs]
        differences = (np.mean(by_seed, axis=0) / tokens).tolist()
        low, high = map(math.exp, bootstrap_interval(differences, inside))
        return Estimate(math.exp(sum(differences)), low, high, len(differences))

    def chart(self, labels: Sequence[str]) -> Figure:
        """Return a plot of recall, or of perplexity for labels without recall, by length with intervals over seeds."""
        lines = []
        for label in labels:
            recall = label in self._recalls
            by_seed = self._recalls[label].values() if recall else self._windows[label].values()
            multiples = sorted(set.intersection(*(set(_lengths(entries)) for entries in by_seed)))
            of = self.recall if recall else partial(self.estimate, "perplexity")
            found = [of(label, multiple) for multiple in multiples]
            means, low, high = (tuple(getattr(each, end) for each in found) for end in ("mean", "low", "high"))
            lines.append(Line(label, tuple(multiples), means, low, high))
        panel = Panel((), "window as a multiple of the training length L", "perplexity", log_y=True)
        if labels[0] in self._recalls:
            panel = Panel((), "length as a multiple of the training length L", "recall", y_range=SHARES)
        return Figure("perplexity", "", "", *panels(arranged(lines, self._members, panel)))

    def rates(self, groups: Mapping[str, Mapping[str, str]]) -> Figure:
        """Return a plot of the last validation loss against the learning rate, as means over seeds.

        `groups` maps the title of each panel to its lines, and the name of a line to that of its models without their
        rates: `RoFormer, 64` for the models `RoFormer, 64, 1e-3` and `RoFormer, 64, 2e-3`.
        """
        panel = Panel((), "learning rate, in thousandths", "validation loss, in nats")
        made = []
        for title, names in groups.items():
            lines = []
            for name, beginning in names.items():
                losses = self.losses(beginning)
                rates = tuple(sorted(losses))
                lines.append(Line(name, tuple(1e3 * rate for rate in rates), tuple(losses[rate] for rate in rates)))
            made.append(replace(panel, title=title, lines=tuple(lines)))
        return Figure("rates", "", "", *panels(made))

    def losses(self, beginning: str) -> dict[float, float]:
        """Return the last validation losses of the models `BEGINNING, RATE`, as means over seeds, by rate."""
        found = {}
        for label in self.labels:
            model, _, rate = label.rpartition(", ")
            if model == beginning:
                losses = list(self.logarithms("validation perplexity", label).values())
                found[float(rate)] = sum(losses) / len(losses)
        return found

    def heads(self, labels: Sequence[str]) -> Figure:
        """Return a plot of the scores in the retrieval heads of the labels against length, as means over seeds."""
        unshifted = {
            label: [
                {length: entry for (length, shift), entry in sorted(entries.items()) if not shift}
                for entries in self._recalls[label].values()
            ]
            for label in labels
        }
        drawn = head_panels(unshifted, "length as a multiple of L", self._members)
        return Figure("heads", "", "", *panels(drawn, in_pairs=True))


def _logarithm(windows: Entries, multiple: float) -> float:
    """Return the logarithm of the perplexity at a multiple of the training length. Raises KeyError."""
    found = PERPLEXITY.numbers[0].averaged(windows[multiple,])
    assert found is not None, "every window has a perplexity"
    return found


def _lengths(entries: Mapping[tuple[Any, ...], object]) -> list[float]:
    """Return the multiples of the training length at which there are entries without shifted positions."""
    return sorted(multiple for multiple, *shift in entries if not any(shift))
