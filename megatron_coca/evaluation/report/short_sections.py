"""The section on short-context tasks, by lm-evaluation-harness."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist, fmean

from megatron_coca.evaluation.harness.harness_tasks import Score
from megatron_coca.evaluation.options import dynamic_length_text
from megatron_coca.evaluation.report import result_tables as shared
from megatron_coca.evaluation.report.document import ReportBlock, Table, TableCell, TableRow
from megatron_coca.evaluation.report.metrics import value_cell
from megatron_coca.evaluation.report.published import AVERAGED_GROUPS, SHORT_CONTEXT, TASKS_BY_GROUP
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


def score_cell(series: Series, key: ScoreKey, scale: float = 1.0, digits: int = 3) -> TableCell:
    """A score: of one seed with the harness's standard error, of several with their t interval."""

    def number(replicate: Replicate) -> float | None:
        score = find_score(replicate, key)
        return None if score is None else scale * score.value

    cell = value_cell(series, f"task {key[0]}", number, f"{{:.{digits}f}}".format)
    score = find_score(series.replicates[0], key)
    if len(series.replicates) > 1 or score is None or score.stderr is None:
        return cell
    value, stderr = scale * score.value, scale * score.stderr
    reach = NORMAL_95 * stderr
    return replace(cell, detail=f"± {stderr:.{digits}f}", low=value - reach, high=value + reach)


@shared.grouped("short", HARNESS_COMPARABLE)
def harness_blocks(group: ResultGroup, name: str, options: ReportOptions) -> ReportBlock:
    """All scores, and the tasks of CoCA Table 5 by group with the means of the groups."""
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
        "A task's version, samples and hashes are in report.json.",
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
    paper_tasks = {task for tasks in TASKS_BY_GROUP.values() for task in tasks}
    if paper_tasks.isdisjoint(task for series in group.series for (task,) in series.keys):
        others = [shared.published_table(SHORT_CONTEXT, group, name)] if options.papers else []
        return ReportBlock((text,), (), (main, *others))
    by_task = tuple(
        TableRow(
            f"{title}: {task}", tuple(score_cell(series, (task, "acc", "none"), 100, 2) for series in group.series)
        )
        for title, tasks in TASKS_BY_GROUP.items()
        for task in tasks
    )
    caption = "Accuracy in percent on the tasks of the CoCA paper's Table 5, by group"
    header = ("group and task", *(series.label for series in group.series))
    tables = (main, Table(f"{name}-tasks", caption, header, by_task), group_means_table(group, name, options.papers))
    return ReportBlock((text,), (), tables)


def score_keys(group: ResultGroup) -> list[ScoreKey]:
    cells = [cell for series in group.series for cell in series.cells()]
    keys = [(cell.task, score.metric, score.filter) for cell in cells for score in cell.scores]
    missing = [
        at.removeprefix("task ") for series in group.series for at in sorted(series.missing()) if at.startswith("task ")
    ]
    known = {cell.task for cell in cells}
    return list(dict.fromkeys([*keys, *((task, "", "none") for task in missing if task not in known)]))


def group_means_table(group: ResultGroup, name: str, papers: bool) -> Table:
    """Means of the groups of tasks, with Table 5 below; a mean is a dash where a task has no accuracy."""
    columns = [str(column) for column in dict.fromkeys([*SHORT_CONTEXT.columns, *TASKS_BY_GROUP])]
    rows = [
        TableRow(series.label, tuple(group_mean_cell(series, column) for column in columns)) for series in group.series
    ]
    rows = shared.mark_best(rows, lowest=False)
    rows += shared.published_rows(SHORT_CONTEXT, columns, group) if papers else []
    averaged_groups = ", ".join(map(str, AVERAGED_GROUPS))
    note = f"Average: mean of {averaged_groups}, as in the paper; each task counts the same in its group."
    header, caption = ("mean of accuracies, percent", *columns), "Means of the groups of the CoCA paper's Table 5"
    sources = (shared.source_text(SHORT_CONTEXT),) if papers else ()
    return Table(f"{name}-groups", caption, header, tuple(rows), (note,), sources)


def group_mean_cell(series: Series, column: str) -> TableCell:
    """The mean accuracy of a group in percent, or of the averaged groups; a dash where a task has none."""
    titles = list(map(str, AVERAGED_GROUPS)) if column == "Average" else [column]

    def group_mean(replicate: Replicate, title: str) -> float | None:
        scores = [find_score(replicate, (task, "acc", "none")) for task in TASKS_BY_GROUP[title]]
        values = [100 * score.value for score in scores if score is not None]
        return fmean(values) if len(values) == len(scores) else None

    def mean(replicate: Replicate) -> float | None:
        means = [group_mean(replicate, title) for title in titles]
        known = [value for value in means if value is not None]
        return fmean(known) if len(known) == len(means) else None

    cell = value_cell(series, "", mean)
    if not cell.absent:
        return cell
    lacking = [
        [task for task in TASKS_BY_GROUP[title] if score_cell(series, (task, "acc", "none")).absent] for title in titles
    ]
    return replace(
        cell, text="–", note="; ".join(f"without an accuracy of {', '.join(tasks)}" for tasks in lacking if tasks)
    )
