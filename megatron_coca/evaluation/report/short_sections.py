"""The section on short-context tasks, by lm-evaluation-harness."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist

from megatron_coca.evaluation.harness.harness_tasks import Score
from megatron_coca.evaluation.options import dynamic_length_text
from megatron_coca.evaluation.report import result_tables as shared
from megatron_coca.evaluation.report.document import ReportBlock, Table, TableCell, TableRow
from megatron_coca.evaluation.report.metrics import value_cell
from megatron_coca.evaluation.report.published import tables_of
from megatron_coca.evaluation.report.reading import Comparable, Replicate, ResultGroup, Series
from megatron_coca.evaluation.report.result_tables import ReportOptions

HARNESS_COMPARABLE: Comparable = {
    "version of lm-eval": "protocol.lm_eval",
    "examples": "protocol.num_fewshot",
    "limit": "protocol.limit",
    "seed": "protocol.seed",
    "longest context": "protocol.max_length",
    "dynamic length": "protocol.dynamic_length",
    "protocol": "protocol.text",
}
NORMAL_95 = NormalDist().inv_cdf(0.975)
ScoreKey = tuple[str, str, str]
"""Task, metric and filter of a score."""


def find_score(replicate: Replicate, key: ScoreKey) -> Score | None:
    cell = replicate.cells.get(key[:1])
    scores: Sequence[Score] = cell.scores if cell is not None else []
    return next((score for score in scores if (score.metric, score.filter) == key[1:]), None)


def score_cell(series: Series, key: ScoreKey) -> TableCell:
    """A score: of one seed with the harness's standard error, of several with their t interval."""

    def number(replicate: Replicate) -> float | None:
        score = find_score(replicate, key)
        return None if score is None else score.value

    cell = value_cell(series, f"task {key[0]}", number, "{:.3f}".format)
    score = find_score(series.replicates[0], key)
    if len(series.replicates) > 1 or score is None or score.stderr is None:
        return cell
    reach = NORMAL_95 * score.stderr
    return replace(cell, detail=f"± {score.stderr:.3f}", low=score.value - reach, high=score.value + reach)


@shared.grouped("short", HARNESS_COMPARABLE)
def harness_blocks(group: ResultGroup, name: str, options: ReportOptions) -> ReportBlock:
    """All scores, and CoCA Table 5, whose means of groups the paper does not take apart into tasks."""
    keys = score_keys(group)
    heads = [
        f"{task} {metric}".strip() if filter_name == "none" else f"{task} {metric} ({filter_name})"
        for task, metric, filter_name in keys
    ]
    replicates = [replicate for series in group.series for replicate in series.replicates]
    scores = [[find_score(replicate, key) for replicate in replicates] for key in keys]
    lowest = [any(score is not None and score.higher_is_better is False for score in column) for column in scores]
    rows = [TableRow(series.label, tuple(score_cell(series, key) for key in keys)) for series in group.series]
    notes = (
        "Small print of one seed: standard errors of the harness.",
        "A task's version, samples and hashes are in the result files.",
    )
    main = Table(
        *(name, "Scores of lm-evaluation-harness", ("label", *heads)), tuple(shared.mark_best(rows, lowest)), notes
    )
    protocol = group.first.protocol
    shots = "as the tasks say" if protocol.num_fewshot is None else str(protocol.num_fewshot)
    limit = "" if protocol.limit is None else f", the first {protocol.limit} samples of each task"
    text = (
        f"Protocol: {protocol.text}; lm-eval {protocol.lm_eval}, examples: {shots}{limit}, seed {protocol.seed}; "
        f"{dynamic_length_text(protocol.dynamic_length)}."
    )
    theirs = tables_of("short context") if options.papers else []
    return ReportBlock((text,), (), (main, *(shared.published_table(table, name) for table in theirs)))


def score_keys(group: ResultGroup) -> list[ScoreKey]:
    cells = [cell for series in group.series for cell in series.cells()]
    keys = [(cell.task, score.metric, score.filter) for cell in cells for score in cell.scores]
    missing = [
        at.removeprefix("task ") for series in group.series for at in sorted(series.missing()) if at.startswith("task ")
    ]
    known = {cell.task for cell in cells}
    return list(dict.fromkeys([*keys, *((task, "", "none") for task in missing if task not in known)]))
