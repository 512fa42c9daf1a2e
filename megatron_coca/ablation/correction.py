"""The declared contrasts of many studies, corrected once for all of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_coca.ablation.declared import LEVEL, Differences
from megatron_coca.ablation.figures import Figures
from megatron_coca.evaluation.results import EvaluationError
from megatron_coca.evaluation.statistics import Estimate, estimate, p_value
from megatron_coca.evaluation.stretch.plans import contrast_rows, paired_differences, pairs_of, read_plan
from megatron_coca.evaluation.stretch.records import StretchResult


class ContrastEntry(NamedTuple):
    """A declared contrast of a study, with its paired differences.

    Attributes:
        name: the two sides, as in "CoCA-Slack against RoFormer".
        at: the length as a multiple of the training length.
        quantity: what is compared, with the unit of the differences unless they are shares of right answers.
        verdict: the result of the contrast in its own study.
    """

    study: str
    name: str
    at: float
    quantity: str
    differences: Differences
    verdict: str


class Corrected(NamedTuple):
    """An entry whose interval and p-value are both corrected for the number of all entries.

    With n entries, `difference` has an interval at a confidence of 1 - 5%/n, so that all intervals together contain the
    true differences in 95% of cases; `corrected` is n times `p`, at most 1. So an interval excludes 0 if and only if
    `corrected` is below 5%. Both p-values are NaN if the t test is undefined.
    """

    entry: ContrastEntry
    difference: Estimate
    p: float
    corrected: float

    @property
    def significant(self) -> bool:
        return self.corrected < LEVEL


def corrected_once(entries: Sequence[ContrastEntry]) -> list[Corrected]:
    """Return all entries, each corrected for the number of all (Bonferroni), in the given order.

    Raises EvaluationError if an entry has fewer than two differences: it would count without a test.
    """
    short = [f"{entry.study}: {entry.name}" for entry in entries if len(entry.differences) < 2]
    if short:
        raise EvaluationError(f"{short[0]}: fewer than two pairs; leave the study out until it is finished")
    count, found = len(entries), []
    for entry in entries:
        p = p_value(entry.differences)
        found.append(Corrected(entry, estimate(entry.differences, 1.0 - LEVEL / count), p, min(count * p, 1.0)))
    return found


UNITS = {"perplexity": "perplexity, nats per byte", "margin": "margin, nats", "loss": "loss, nats per token"}
"""Names of quantities with the unit of their differences. All studies measure perplexities of texts read as bytes."""


def entries_of(study: str, figures: Figures) -> list[ContrastEntry]:
    """Return the declared contrasts of a study; empty as long as not all of its models are finished."""
    if figures.finished < figures.planned:
        return []
    entries = []
    for each, pairs, verdict in figures.judged():
        quantity = UNITS.get(each.quantity, each.quantity)
        entries.append(ContrastEntry(study, each.sides, each.at, quantity, pairs, verdict))
    return entries


def entries_of_stretch(study: str, plan: str | Path, results: str | Path) -> list[ContrastEntry]:
    """Return the declared contrasts of a study of `megatron-coca stretch`, paired by fact or by document.

    Raises EvaluationError if a contrast is not measured.
    """
    planned = read_plan(Path(plan))
    result = StretchResult.model_validate_json(Path(results).read_text(encoding="utf-8"))
    found = []
    for each, row in zip(planned.contrasts, contrast_rows(result, planned), strict=True):
        differences = paired_differences(result, each, pairs_of(planned, each))
        if differences is None:
            raise EvaluationError(f"{results}: {row[0]}, {each.quantity}: not measured; run the plan {plan} again")
        name = f"{each.method} against {each.other}"
        found.append(ContrastEntry(study, name, each.at, UNITS[each.quantity], differences, row[-1]))
    return found


def pooled(studies: Sequence[Figures], quantity: str, label: str, other: str, at: float) -> Corrected:
    """Return one contrast over the seeds of several studies, without a correction, as if they were one study.

    Raises EvaluationError if the studies have fewer than two seeds together.
    """
    pairs = [pair for figures in studies for pair in figures.paired(quantity, label, other, at)]
    return corrected_once([ContrastEntry("", f"{label} against {other}", at, quantity, pairs, "not declared")])[0]
