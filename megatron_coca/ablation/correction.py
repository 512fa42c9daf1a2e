"""Collect the declared contrasts of several studies for one correction over all studies."""

from collections.abc import Sequence
from pathlib import Path

from megatron_coca.ablation.figures import Figures
from megatron_coca.evaluation.contrasts import ContrastEntry, Corrected, corrected_once
from megatron_coca.evaluation.results import EvaluationError
from megatron_coca.evaluation.stretch.plans import outcome_of, paired_differences, read_plan, sequence
from megatron_coca.evaluation.stretch.records import read_results

UNITS = {"perplexity": "perplexity, nats per byte", "margin": "margin, nats", "loss": "loss, nats per token"}
"""Names of quantities with the units of their differences. In all studies, the tokens of perplexities are bytes."""


def entries_of(study: str, figures: Figures) -> list[ContrastEntry]:
    """Return the declared contrasts of a study, or an empty list until all of its cells are finished."""
    if figures.finished < figures.planned:
        return []
    entries = []
    for each, pairs, verdict in figures.judged():
        quantity = UNITS.get(each.quantity, each.quantity)
        entries.append(ContrastEntry(study, each.sides, each.at, quantity, pairs, verdict))
    return entries


def entries_of_stretch(study: str, plan: str | Path, results: str | Path) -> list[ContrastEntry]:
    """Return the declared contrasts of a study of `megatron-coca stretch`, paired by fact or by document.

    `results` is the folder of its results. Raises EvaluationError if a contrast is not measured.
    """
    planned = read_plan(Path(plan))
    result = read_results(Path(results), planned.methods)
    found = []
    for step in sequence(result, planned):
        each, differences = step.contrast, paired_differences(result, planned, step.contrast)
        if differences is None:
            raise EvaluationError(f"{results}: {each.name}, {each.quantity}: not measured; run the plan {plan} again")
        name = f"{each.method} against {each.other}"
        found.append(ContrastEntry(study, name, each.at, UNITS[each.quantity], differences, outcome_of(step)))
    return found


def pooled(studies: Sequence[Figures], quantity: str, label: str, other: str, at: float) -> Corrected:
    """Return one contrast over the seeds of all studies, as if they were one study. Its p-value is not corrected.

    Raises EvaluationError if the studies have fewer than two seeds together.
    """
    pairs = [pair for figures in studies for pair in figures.paired(quantity, label, other, at)]
    return corrected_once([ContrastEntry("", f"{label} against {other}", at, quantity, pairs, "not declared")])[0]
