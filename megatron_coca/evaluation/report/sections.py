"""The table of report sections, and the sections on short tasks, speed, costs, analysis and checkpoints."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure as Canvas

from megatron_coca.evaluation.analysis.records import FIGURES, LengthAnalysis
from megatron_coca.evaluation.harness.records import Score
from megatron_coca.evaluation.options import dynamic_length_text
from megatron_coca.evaluation.report import length_sections as by_length
from megatron_coca.evaluation.report import tables as shared
from megatron_coca.evaluation.report.charts import Figure, Panel, height, interval_curve, panels
from megatron_coca.evaluation.report.document import EMPTY, ReportBlock, Section, Table, TableCell, TableRow
from megatron_coca.evaluation.report.published import AVERAGED_GROUPS, COST, SHORT_CONTEXT, TABLES, TASKS_BY_GROUP
from megatron_coca.evaluation.report.reading import (
    RESULT_TYPES,
    Comparable,
    LoadedResult,
    ResultGroup,
    Series,
)
from megatron_coca.evaluation.results import Cost, Missing
from megatron_coca.evaluation.speed import CONTRACTION, WHATS, WHOLE_SEQUENCES
from megatron_coca.evaluation.speed.measuring import SpeedCell, SpeedResult

# Short-context tasks

HARNESS_COMPARABLE: Comparable = {
    "version of lm-eval": "protocol.lm_eval",
    "examples": "protocol.num_fewshot",
    "limit": "protocol.limit",
    "seed": "protocol.seed",
    "longest context": "protocol.max_length",
    "dynamic length": "protocol.dynamic_length",
    "protocol": "protocol.text",
}
ScoreKey = tuple[str, str, str]
"""Task, metric and filter of a score."""


def find_score(series: Series, key: ScoreKey) -> Score | None:
    cell = series.cells.get(key[:1])
    scores: Sequence[Score] = cell.scores if cell is not None else []
    return next((score for score in scores if (score.metric, score.filter) == key[1:]), None)


def score_cell(series: Series, key: ScoreKey, scale: float = 1.0, digits: int = 3) -> TableCell:
    score = find_score(series, key)
    if score is None:
        return shared.missing_cell(series.why(f"task {key[0]}"))
    spread = "" if score.stderr is None else f"± {scale * score.stderr:.{digits}f}"
    return shared.number_cell(scale * score.value, f".{digits}f", detail=spread)


@shared.grouped("short", HARNESS_COMPARABLE)
def harness_blocks(group: ResultGroup, name: str, papers: bool) -> ReportBlock:
    """All scores, and the tasks of CoCA Table 5 by group with the means of the groups."""
    keys = score_keys(group)
    heads = [
        f"{task} {metric}".strip() if filter_name == "none" else f"{task} {metric} ({filter_name})"
        for task, metric, filter_name in keys
    ]
    scores = [[find_score(series, key) for series in group.series] for key in keys]
    lowest = [any(score is not None and score.higher_is_better is False for score in column) for column in scores]
    rows = [TableRow(series.label, tuple(score_cell(series, key) for key in keys)) for series in group.series]
    notes = ("Small print: standard errors of the harness. A task's version, samples and hashes are in report.json.",)
    main = Table(
        *(name, "Scores of lm-evaluation-harness", ("label", *heads)), tuple(shared.mark_best(rows, lowest)), notes
    )
    protocol = group.first.protocol
    shots = "as the tasks say" if protocol.num_fewshot is None else str(protocol.num_fewshot)
    limit = "" if protocol.limit is None else f", the first {protocol.limit} samples of each task"
    text = (
        f"Protocol: {protocol.text}; lm-eval {protocol.lm_eval}, examples: {shots}{limit}, seed {protocol.seed}; "
        f"{dynamic_length_text(protocol.dynamic_length)}. {shared.origin_text(group)}"
    )
    paper_tasks = {task for tasks in TASKS_BY_GROUP.values() for task in tasks}
    if paper_tasks.isdisjoint(task for series in group.series for (task,) in series.cells):
        others = [shared.published_table(SHORT_CONTEXT, group, name)] if papers else []
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
    tables = (main, Table(f"{name}-tasks", caption, header, by_task), group_means_table(group, name, papers))
    return ReportBlock((text,), (), tables)


def score_keys(group: ResultGroup) -> list[ScoreKey]:
    cells = [cell for series in group.series for cell in series.cells.values()]
    keys = [(cell.task, score.metric, score.filter) for cell in cells for score in cell.scores]
    missing = [at.removeprefix("task ") for series in group.series for at in series.missing if at.startswith("task ")]
    known = {cell.task for cell in cells}
    return list(dict.fromkeys([*keys, *((task, "", "none") for task in missing if task not in known)]))


def group_means_table(group: ResultGroup, name: str, papers: bool) -> Table:
    """Means of the groups of tasks, with Table 5 below; a mean is a dash where a task has no accuracy."""
    columns = [str(column) for column in dict.fromkeys([*SHORT_CONTEXT.columns, *TASKS_BY_GROUP])]
    rows = []
    for series in group.series:
        means: dict[str, TableCell] = {}
        for title, tasks in TASKS_BY_GROUP.items():
            values = {task: score_cell(series, (task, "acc", "none"), 100, 2).value for task in tasks}
            without = ", ".join(task for task, value in values.items() if value is None)
            means[title] = mean_cell(list(values.values()), f"without an accuracy of {without}")
        averaged = [means[str(title)] for title in AVERAGED_GROUPS]
        notes = "; ".join(dict.fromkeys(cell.note for cell in averaged if cell.note))
        means["Average"] = mean_cell([cell.value for cell in averaged], notes)
        rows.append(TableRow(series.label, tuple(means[column] for column in columns)))
    rows = shared.mark_best(rows, lowest=False)
    rows += shared.published_rows(SHORT_CONTEXT, columns, group) if papers else []
    averaged_groups = ", ".join(map(str, AVERAGED_GROUPS))
    note = f"Average: mean of {averaged_groups}, as in the paper; each task counts the same in its group."
    header, caption = ("mean of accuracies, percent", *columns), "Means of the groups of the CoCA paper's Table 5"
    sources = (shared.source_text(SHORT_CONTEXT),) if papers else ()
    return Table(f"{name}-groups", caption, header, tuple(rows), (note,), sources)


def mean_cell(values: Sequence[float | None], note: str) -> TableCell:
    known = [value for value in values if value is not None]
    return shared.number_cell(fmean(known)) if len(known) == len(values) else TableCell("–", note=note, absent=True)


# Speed and memory


def bytes_text(count: int) -> str:
    for exponent, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**exponent:
            return f"{count / 1024**exponent:.1f} {unit}"
    return f"{count} B"


def speed_blocks(loaded: Sequence[LoadedResult], papers: bool) -> list[ReportBlock]:
    """CoCA Figure 6 and Table 6. Each file is on its own: times of two runs cannot be compared."""
    blocks = []
    for index, item in enumerate(loaded, 1):
        result: Any = item.result
        measured = [what for what in WHATS if any(cell.what == what for cell in result.results)]
        names = {what: f"speed-{index}-{re.sub('[ +]', '-', what)}" for what in measured}
        figures = [figure for what in measured if (figure := speed_figure(result, f"{names[what]}-ratio", what))]
        tables = [speed_table(result, names[what], what) for what in measured]
        shape, machine = result.protocol.shape, result.machine
        versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
        text = (
            f"Protocol: {result.protocol.text}. Shape: {shape.layers} layers, hidden size {shape.hidden_size}, "
            f"{shape.heads} heads ({shape.kv_heads} of keys), {shape.parameters / 1e6:,.1f}M parameters; "
            f"batch {result.protocol.batch}, {result.protocol.rounds} rounds. Measured with "
            f"{shared.environment_text(result)}, "
            f"{machine.processor}, {machine.threads} threads, {versions}."
        )
        heading = f"{result.label} on {result.environment.device}" if len(loaded) > 1 else ""
        blocks.append(ReportBlock((text,), tuple(figures), tuple(tables), heading))
    if papers:
        theirs = tuple(shared.published_table(table, None, "speed") for table in TABLES if table.metric == "complexity")
        blocks.append(ReportBlock((COST,), (), theirs, "Published"))
    return blocks


def speed_table(result: SpeedResult, name: str, what: str) -> Table:
    """Milliseconds of one kind of work by method and length; ratios and memory in small print."""
    cells = {(cell.method, cell.length): cell for cell in result.results if cell.what == what}
    missing = [re.match(rf"{re.escape(what)}, length (\d+)", entry.at) for entry in result.missing]
    lengths = sorted({length for _, length in cells} | {int(match[1]) for match in missing if match})
    # In the order of the file; methods without any cell last.
    without = [entry.at.rpartition(", ")[2] for entry in result.missing]
    rows = []
    for method in dict.fromkeys([*(cell.method for cell in result.results), *without]):
        sizes = [cell.cache_bytes_per_token for (name, _), cell in cells.items() if name == method]
        known = [size for size in sizes if size is not None]
        row = tuple(
            speed_cell(cells[method, length])
            if (method, length) in cells
            else shared.missing_cell(why_not_timed(result, what, method, length))
            for length in lengths
        )
        rows.append(TableRow(method, row, detail=f"cache: {known[0]:,} bytes a token" if known else ""))
    against = next((cell.to_rope.against for cell in cells.values() if cell.to_rope is not None), None)
    small_print = f"Small print: time against {against}, and against the contraction; peak memory."
    caption = f"{what[0].upper()}{what[1:]}: milliseconds by length"
    notes = () if against is None else (small_print,)
    return Table(name, caption, ("method", *map(str, lengths)), tuple(rows), notes)


def speed_cell(cell: SpeedCell) -> TableCell:
    small = [f"×{ratio.median:.2f}" for ratio in (cell.to_rope, cell.to_contraction) if ratio is not None]
    small += [bytes_text(cell.peak_memory_bytes)] if cell.peak_memory_bytes is not None else []
    milliseconds = cell.seconds * 1e3
    return shared.number_cell(milliseconds, ",.1f" if milliseconds >= 10 else ".3g", detail=" · ".join(small))


def why_not_timed(result: SpeedResult, what: str, method: str, length: int) -> Missing:
    known = {missing.at: missing for missing in result.missing}
    places = (f"{what}, length {length}, {method}", method, "all")
    unknown = Missing(at=method, kind="not run", reason="")
    if (what, method) == ("decode", CONTRACTION):
        unknown = Missing(at=method, kind="refused", reason=WHOLE_SEQUENCES)
    return next((known[at] for at in places if at in known), unknown)


def speed_figure(result: SpeedResult, name: str, what: str) -> Figure | None:
    """CoCA Figure 6 as a ratio to RoPE; None where no method has one."""
    ratios: dict[str, dict[int, Any]] = {}
    for cell in result.results:
        if cell.what == what and cell.to_rope is not None and cell.to_rope.against != cell.method:
            ratios.setdefault(cell.method, {})[cell.length] = cell.to_rope
    if not ratios:
        return None
    curves = [interval_curve(method, cells, "median") for method, cells in ratios.items()]
    against = next(ratio.against for cells in ratios.values() for ratio in cells.values())
    panel = Panel(tuple(curves), "length (tokens)", f"time against {against}", what, log_y=True, level=1.0)
    caption = (
        f"Time of {what} as a ratio to {against} in the same rounds, median and quartiles; below 1 is faster. "
        f"{result.label}: {shared.environment_text(result)}, random weights."
    )
    alt = f"Time of {what} against {against} by length for {', '.join(ratios)}; the table has the numbers"
    return Figure(name, caption, alt, panels([panel]), (6.0, height(len(curves))))


MEMORY_CAPTIONS = {
    False: "Peak memory: on CUDA the most that PyTorch held, weights included",
    True: "Peak memory: on the CPU it is the growth of the process's memory, so that only the first label measured in "
    "a process shows the whole",
}
"""By whether a result was measured on the CPU."""
SMALLEST_GROWTH = 1024**2
"""Bytes below which the growth of a process on the CPU says nothing: it keeps the memory that it frees."""


def rate_cell(cost: Cost, on_cpu: bool) -> TableCell:
    rate = cost.tokens_per_second
    return shared.number_cell(rate, ",.0f" if rate >= 10 else ".1f")


def memory_cell(cost: Cost, on_cpu: bool) -> TableCell:
    if cost.peak_memory_bytes is None:
        return TableCell("–", note="the device does not count it")
    if on_cpu and cost.peak_memory_bytes < SMALLEST_GROWTH:
        return TableCell("–", note="the process held what this needed already")
    return TableCell(bytes_text(cost.peak_memory_bytes), float(cost.peak_memory_bytes))


def cost_blocks(loaded: Sequence[LoadedResult], papers: bool) -> list[ReportBlock]:
    """Rates and memory of every task with files of costs, by label and cell."""
    blocks = []
    for task in dict.fromkeys(item.result.task for item in loaded if item.costs):
        items = [item for item in loaded if item.costs and item.result.task == task]
        columns = sorted({cost.at for item in items for cost in item.costs}, key=lambda at: (len(at), at))
        on_cpu = [item.result.environment.device == "cpu" for item in items]
        tables = []
        for kind, caption, cell in (
            ("rate", "Tokens per second", rate_cell),
            ("memory", "; ".join(MEMORY_CAPTIONS[device] for device in sorted(set(on_cpu))), memory_cell),
        ):
            rows = []
            for item, is_cpu in zip(items, on_cpu, strict=True):
                costs = {cost.at: cost for cost in item.costs}
                cells = tuple(cell(costs[at], is_cpu) if at in costs else EMPTY for at in columns)
                environment = item.result.environment
                device = f"{environment.device}, {environment.dtype}, {environment.backend}"
                rows.append(TableRow(item.result.label, cells, detail=device))
            tables.append(Table(f"cost-{task}-{kind}", caption, ("label", *columns), tuple(rows)))
        blocks.append(ReportBlock(tables=tuple(tables), heading=f"evaluate.py {task}"))
    return blocks


# Analysis of attention

ANALYSIS_COMPARABLE: Comparable = {
    "documents (sha256)": "documents.sha256",
    "pairs": "protocol.pairs",
    "queries": "protocol.queries",
    "seed": "protocol.seed",
    "protocol": "protocol.text",
}
FIGURE_TEXTS = {
    "angles": "Initial angles from key to query over all layers, heads and rotated pairs, before rotation.",
    "reach": "Distances at which rotated pairs first cross their borders; k is the reach tau of the anomaly.",
    "decay": "Mean |score| by distance, with the decay bounds.",
    "entropy": "Entropy of the attention weights by how many keys a query sees.",
}
ANALYSIS_COLUMNS: dict[str, Callable[[LengthAnalysis], float | None]] = {
    "anomalous pairs": lambda cell: cell.angles.anomalous if cell.angles is not None else None,
    "collinear pairs": lambda cell: cell.angles.collinear if cell.angles is not None else None,
    "largest angle, rad": lambda cell: cell.angles.largest if cell.angles is not None else None,
    "tau beyond training": lambda cell: cell.borders.k.beyond_training if cell.borders is not None else None,
    "score falls with distance": lambda cell: cell.decay.falling_mean,
    "entropy, nats": lambda cell: cell.entropy.mean,
}


@shared.grouped("analysis", ANALYSIS_COMPARABLE)
def analysis_blocks(group: ResultGroup, name: str, papers: bool) -> ReportBlock:
    """Section 2 and Figures 3 and 7 of the CoCA paper: a table, and the plots of each label."""
    rows = []
    for series in group.series:
        for length in group.lengths():
            cell = series.cells.get((length,))
            if cell is None:
                cells = [shared.missing_cell(series.why(f"length {length}"))] * len(ANALYSIS_COLUMNS)
            else:
                numbers = [number(cell) for number in ANALYSIS_COLUMNS.values()]
                cells = [TableCell("–") if number is None else shared.number_cell(number, ".3f") for number in numbers]
            rows.append(TableRow(f"{series.label}, {length} tokens", tuple(cells)))
    caption = "Anomalous pairs, falling scores and entropy (shares of pairs of tokens, means)"
    table = Table(name, caption, ("label", *ANALYSIS_COLUMNS), tuple(rows))

    def draw(kind: str, result: Any, canvas: Canvas) -> None:
        axes = canvas.subplots()
        FIGURES[kind](axes, result)
        axes.grid()

    figures = []
    for index, series in enumerate(group.series, 1):
        merged = series.header.model_copy(update={"results": list(series.cells.values())})
        for kind in FIGURES if series.cells else ():
            caption = f"{series.label}: {FIGURE_TEXTS[kind]} {shared.series_origin_text(series)}"
            alt = f"{series.label}: {kind}"
            figures.append(Figure(f"{name}-{index}-{kind}", caption, alt, partial(draw, kind, merged)))
    return ReportBlock((f"Protocol: {group.first.protocol.text}.",), tuple(figures), (table,))


# Checkpoints

CHECKPOINT_HEADER = (
    *("label", "task", "checkpoint", "step", "weights", "trained at", "position method", "used with"),
    *("dtype", "backend", "device", "torch", "tokenizer"),
)


def checkpoint_blocks(loaded: Sequence[LoadedResult], papers: bool) -> list[ReportBlock]:
    """A row for each distinct combination of weights, overrides and device."""
    rows = []
    for result in (item.result for item in loaded):
        checkpoint, environment = result.checkpoint, result.environment
        overrides = []
        for key, value in result.overrides.items():
            options = value.items() if isinstance(value, Mapping) else ()
            shown = ", ".join(f"{name} {option}" for name, option in options if option is not None)
            overrides.append(f"{key}: {shown if isinstance(value, Mapping) else value}")
        step = "" if checkpoint.step is None else str(checkpoint.step)
        texts = (
            *(
                result.task,
                checkpoint.path,
                step,
                checkpoint.identity[: shared.HASH_DIGITS],
                str(checkpoint.seq_length),
            ),
            *(checkpoint.pos_emb, "; ".join(overrides) or "as trained", environment.dtype),
            *(environment.backend or "none", environment.device, environment.torch),
            (result.tokenizer or "none")[: shared.HASH_DIGITS],
        )
        rows.append(TableRow(result.label, tuple(TableCell(text, wide=True) for text in texts)))
    caption = "Checkpoints, and how they were used"
    return [ReportBlock(tables=(Table("models", caption, CHECKPOINT_HEADER, tuple(dict.fromkeys(rows))),))]


# All sections

NOT_PRINTED = ("models", "costs")
"""Sections that do not appear on the console."""
SECTIONS: dict[str, tuple[str, tuple[str, ...], shared.Builder]] = {
    "perplexity": ("Perplexity beyond the training length", ("perplexity",), by_length.perplexity_blocks),
    "rerope": ("Loss with windowed relative positions", ("perplexity",), by_length.map_blocks),
    "passkey": ("Passkey retrieval", ("passkey",), by_length.passkey_blocks),
    "strict": ("CoCA-Strict against CoCA-Slack", ("perplexity", "passkey"), by_length.strict_blocks),
    "needle": ("A needle in a haystack", ("needle",), by_length.needle_blocks),
    "ruler": ("RULER-style tasks", ("ruler",), by_length.ruler_blocks),
    "short": ("Short-context tasks", ("lm-eval",), harness_blocks),
    "speed": ("Speed and memory", ("speed",), speed_blocks),
    "analysis": ("Analysis of attention", ("analyse",), analysis_blocks),
    "models": ("What was measured", tuple(task for task in RESULT_TYPES if task != "speed"), checkpoint_blocks),
    "costs": ("What measuring cost", tuple(RESULT_TYPES), cost_blocks),
}
"""Title, tasks whose results are read, and builder of each section, in order. A new task adds a row here and one to
`RESULT_TYPES`."""


def build_sections(loaded: Sequence[LoadedResult], papers: bool) -> tuple[Section, ...]:
    """The sections that have content. Raises EvaluationError for labels that name two models."""
    sections = []
    for name, (title, tasks, build) in SECTIONS.items():
        chosen = [item for item in loaded if item.result.task in tasks]
        if chosen and (blocks := build(chosen, papers)):
            sections.append(Section(name, title, tuple(blocks), name not in NOT_PRINTED))
    return tuple(sections)
