"""The report section on short-context tasks, measured by lm-evaluation-harness."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist, fmean

from megatron_coca.evaluation.report import result_tables as shared
from megatron_coca.evaluation.report.document import Measure, ReportBlock, Table, TableCell, TableRow
from megatron_coca.evaluation.report.metrics import value_cell
from megatron_coca.evaluation.report.published import tables_of
from megatron_coca.evaluation.report.reading import Replicate, ResultGroup, Series
from megatron_coca.evaluation.report.result_tables import ReportOptions
from megatron_coca.evaluation.tasks.lm_eval.scores import Score
from megatron_coca.evaluation.tasks.lm_eval.task import LM_EVAL, TRUNCATED_PARTS, HarnessProtocol

NOT_MEASURED = "not measured"
"""Cell text of a score that a task did not measure, such as a length without samples."""
NORMAL_95 = NormalDist().inv_cdf(0.975)
ScoreKey = tuple[str, str, str]
"""Task, metric and filter of a score."""


def find_score(replicate: Replicate, key: ScoreKey) -> Score | None:
    entry = replicate.entries.get(key[:1])
    scores: Sequence[Score] = entry.scores if entry is not None else []
    return next((score for score in scores if (score.metric, score.filter) == key[1:]), None)


def score_cell(series: Series, key: ScoreKey) -> TableCell:
    """Return the cell of a score. One seed has the harness's standard error, and several seeds have the t interval."""

    def number(replicate: Replicate) -> float | None:
        score = find_score(replicate, key)
        return None if score is None else score.value

    found = [score for replicate in series.replicates if (score := find_score(replicate, key)) is not None]
    if found and all(score.value is None for score in found):
        return TableCell(NOT_MEASURED, absent=True)
    cell = value_cell(series, f"task {key[0]}", number, "{:.3f}".format)
    score = find_score(series.replicates[0], key)
    if len(series.replicates) == 1 and score is not None and score.value is not None and score.stderr is not None:
        reach = NORMAL_95 * score.stderr
        cell = replace(cell, detail=f"± {score.stderr:.3f}", low=score.value - reach, high=score.value + reach)
    return marked_as_cut(cell, series, key)


def first_scores(keys: Sequence[ScoreKey], lowest: Sequence[bool], group: ResultGroup) -> list[ScoreKey]:
    """Return, for each task, the first score for which higher is better; groups of tasks are left out."""
    entries = [entry for series in group.series for entry in series.entries()]
    tasks = {entry.task for entry in entries if entry.documents_sha256 is not None}
    found: dict[str, ScoreKey] = {}
    for key, low in zip(keys, lowest, strict=True):
        if key[0] in tasks and key[1] and not low:
            found.setdefault(key[0], key)
    return list(found.values())


def mean_score_cell(series: Series, keys: Sequence[ScoreKey]) -> TableCell:
    """Return the cell of the mean of several scores. For one seed, the harness's standard errors give its interval."""

    def scores(replicate: Replicate) -> list[Score]:
        return [score for key in keys if (score := find_score(replicate, key)) is not None and score.value is not None]

    def mean(replicate: Replicate) -> float | None:
        found = scores(replicate)
        return fmean(score.value or 0.0 for score in found) if len(found) == len(keys) else None

    cell = value_cell(series, "mean", mean, "{:.3f}".format)
    errors = [score.stderr for score in scores(series.replicates[0])]
    if len(series.replicates) > 1 or cell.value is None or None in errors:
        return cell
    error = math.hypot(*(each or 0.0 for each in errors)) / len(keys)
    reach = NORMAL_95 * error
    return replace(cell, detail=f"± {error:.3f}", low=cell.value - reach, high=cell.value + reach)


def marked_as_cut(cell: TableCell, series: Series, key: ScoreKey) -> TableCell:
    """Return the cell with a note on the number of samples with a truncated prompt and, for chats, a note on the number
    of answers that had not ended. A note is absent if its number is 0.
    """
    tasks = [replicate.entries[key[:1]] for replicate in series.replicates if key[:1] in replicate.entries]
    worst = max(tasks, key=lambda task: task.cut, default=None)
    if worst is None:
        return cell
    cell, protocol = cut_text(cell, worst.cut, worst.samples, series.header.protocol), series.header.protocol
    worst = max(tasks, key=lambda task: task.unfinished)
    if protocol.chat is None or not worst.unfinished:
        return cell
    told = f"{worst.unfinished} of {worst.samples} answers cut"
    return annotated(cell, told, f"{told}: they had not ended after the task's number of new tokens")


def cut_text(cell: TableCell, cut: int, samples: int, protocol: HarnessProtocol) -> TableCell:
    """Return the cell with a note that prompts of `cut` of its samples are truncated, or unchanged if `cut` is 0."""
    if not cut:
        return cell
    told = f"{cut} of {samples} prompts cut"
    why = f"{told}: they exceed the limit of {protocol.max_length} tokens and lost their {protocol.truncate}"
    return annotated(cell, told, why)


def annotated(cell: TableCell, told: str, why: str) -> TableCell:
    """Return the cell with the detail `told` and with the note `why`, which explains the detail."""
    notes = "; ".join(filter(None, (cell.note, why)))
    return replace(cell, detail=", ".join(filter(None, (cell.detail, told))), note=notes)


@shared.grouped("short", LM_EVAL.comparable)
def lm_eval_blocks(group: ResultGroup, name: str, options: ReportOptions) -> ReportBlock:
    """Return a table of all scores, and Table 5 of the CoCA paper, which has means of groups but no scores of tasks."""
    keys = score_keys(group)
    heads = [
        f"{task} {metric}".strip() if filter_name == "none" else f"{task} {metric} ({filter_name})"
        for task, metric, filter_name in keys
    ]
    replicates = [replicate for series in group.series for replicate in series.replicates]
    scores = [[find_score(replicate, key) for replicate in replicates] for key in keys]
    lowest = [any(score is not None and score.higher_is_better is False for score in column) for column in scores]
    rows = [TableRow(series.label, tuple(score_cell(series, key) for key in keys)) for series in group.series]
    notes = [
        "Small print with one seed: the harness's standard error.",
        "Each task's version, samples and hashes are in the result files.",
    ]
    measure = Measure(heads[0], lowest=lowest[0], digits=3, column=0) if keys else None
    if len(averaged := first_scores(keys, lowest, group)) > 1:
        heads.append(f"mean of {len(averaged)} tasks")
        lowest.append(False)
        rows = [
            replace(row, cells=(*row.cells, mean_score_cell(series, averaged)))
            for row, series in zip(rows, group.series, strict=True)
        ]
        notes.append(
            "Mean: the first score of each task, without scores whose lowest number is the best. Its standard error "
            "takes the tasks as independent."
        )
        measure = Measure(f"mean score over {len(averaged)} tasks", digits=3, column=len(keys))
    marked = tuple(shared.mark_best(rows, lowest))
    caption = "Scores of lm-evaluation-harness"
    main = Table(name, caption, ("label", *heads), marked, tuple(notes), measure=measure)
    theirs = tables_of("short context") if options.papers else []
    return ReportBlock(
        (protocol_text(group.first.protocol),),
        (),
        (main, *(shared.published_table(table, name) for table in theirs)),
    )


def limit_text(protocol: HarnessProtocol) -> str:
    longest = "no limit on inputs" if protocol.max_length is None else f"max_length {protocol.max_length}"
    if protocol.truncate != TRUNCATED_PARTS[0]:
        longest += f", longer prompts lose their {protocol.truncate}"
    window = f", rolling windows of {protocol.rolling_window} tokens" if protocol.rolling_window is not None else ""
    return f"{longest}{window}"


def protocol_text(protocol: HarnessProtocol) -> str:
    shots = "each task's own number" if protocol.num_fewshot is None else str(protocol.num_fewshot)
    limit = "" if protocol.limit is None else f", the first {protocol.limit} samples of each task"
    parts = [
        protocol.text,
        f"lm-eval {protocol.lm_eval}, examples: {shots}{limit}, seed {protocol.seed}",
        limit_text(protocol),
        f"metadata {json.dumps(protocol.metadata)}" if protocol.metadata else "",
        "data sets from a local folder" if protocol.local_data else "",
        f"plain prompts for {', '.join(protocol.plain_tasks)}" if protocol.plain_tasks else "",
        "names of special tokens in prompts are encoded as these tokens" if protocol.names_tokens else "",
        "every text has the start and end tokens of the model's own library" if protocol.adds else "",
        f"token {protocol.prefix} before a text without context" if protocol.prefix is not None else "",
        *shared.answer_texts(protocol),
    ]
    return f"Protocol: {'; '.join(filter(None, parts))}."


def score_keys(group: ResultGroup) -> list[ScoreKey]:
    entries = [entry for series in group.series for entry in series.entries()]
    keys = [(entry.task, score.metric, score.filter) for entry in entries for score in entry.scores]
    missing = [
        at.removeprefix("task ") for series in group.series for at in sorted(series.missing()) if at.startswith("task ")
    ]
    known = {entry.task for entry in entries}
    return list(dict.fromkeys([*keys, *((task, "", "none") for task in missing if task not in known)]))
