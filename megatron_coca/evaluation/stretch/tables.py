"""The tables and the picture of `megatron-coca stretch`, for both stretch.md and stretch.html."""

import math
from collections.abc import Callable
from typing import Any

from megatron_coca.evaluation.contrasts import Step, level_text, power_of, simultaneous
from megatron_coca.evaluation.report.document import EMPTY, Table, TableCell, TableRow
from megatron_coca.evaluation.report.plots.figures import Figure
from megatron_coca.evaluation.report.plots.looks import Member, look_of, recoloured
from megatron_coca.evaluation.report.plots.panels import Line, Panel, panels
from megatron_coca.evaluation.statistics import (
    Estimate,
    estimate,
    exponential,
    geometric_estimate,
    wilson_interval,
)
from megatron_coca.evaluation.stretch.choices import PLAIN, TRAINED
from megatron_coca.evaluation.stretch.decision import FEWEST, LOOKS, POWER, Decision, confidence
from megatron_coca.evaluation.stretch.plans import Plan, PlannedContrast, outcome_of, pairs_of, sequence
from megatron_coca.evaluation.stretch.records import HOLDS, StretchResult
from megatron_coca.evaluation.tasks.margin.measure import DIGITS, FOILS

PICTURE = "stretch"
"""File name of the picture without its suffix."""
TASKS = ("passkey", "needle")


def main_table(result: StretchResult) -> Table:
    """Return the table of perplexity and facts found at each length, with intervals. The best method is first."""
    lengths = result.lengths()
    hidden = [length for length in lengths if any(result.facts(name, length) for name in result.supported)]
    header = ["method", "holds to", *(f"perplexity {length:,}" for length in lengths)]
    header += [f"facts {length:,}" for length in hidden]
    rows = []
    for name in result.ranked():
        cells = [TableCell(f"{result.reach(name):,}", result.reach(name))]
        cells += [_perplexity(result, name, length) for length in lengths]
        rows.append(TableRow(name, (*cells, *(_found(result, name, length) for length in hidden))))
    for name, reason in result.unsupported.items():
        absent = TableCell("not supported", note=f"{name}: {reason}", absent=True)
        rows.append(TableRow(name, (absent, *[EMPTY] * (len(header) - 2))))
    return Table("methods", "Perplexity and hidden facts by length", tuple(header), tuple(rows), tuple(notes(result)))


def together(result: StretchResult) -> float:
    """Return the confidence of one method's interval with which the intervals of all methods hold in 95% of cases."""
    return simultaneous(len(result.supported))


def _perplexity(result: StretchResult, method: str, length: int) -> TableCell:
    """Return the perplexity, with its ratio to the perplexity of the plain model at 1x."""
    perplexity, ratios = result.perplexity(method, length), result.loss_ratios(method, length)
    if perplexity is None:
        return EMPTY
    text = f"{perplexity:.2f}"
    if not ratios or (method, length) == (result.plain, result.trained):
        return TableCell(text, perplexity)
    ratio = geometric_estimate(ratios, together(result))
    detail = f"{_ratio(ratio.mean)}x"
    detail += "" if math.isnan(ratio.low) else f", {_ratio(ratio.low)} to {_ratio(ratio.high)}"
    most = result.most_windows
    fewer = f"{len(ratios)} of {most} windows: " if len(ratios) < most else ""
    return TableCell(text, perplexity, fewer + detail)


def _ratio(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.3g}"


def _found(result: StretchResult, method: str, length: int) -> TableCell:
    """Return the number of facts found, with the interval of the share of facts found."""
    share, count = result.share(method, length), len(result.facts(method, length))
    if share is None:
        return EMPTY
    low, high = wilson_interval(share, count, together(result))
    return TableCell(f"{hits(result, method, length)}/{count}", share, f"{low:.0%} to {high:.0%}")


def hits(result: StretchResult, method: str, length: int, task: str = "") -> int:
    """Return the number of facts that greedy decoding finds. `task` limits them to passkeys or needles."""
    return sum(case.found for case in result.facts(method, length) if task in ("", case.task))


def notes(result: StretchResult) -> list[str]:
    """Return the notes below the main table, which explain its columns."""
    scored, most, environment = result.header.protocol.scored, result.most_windows or 1, result.header.environment
    return [
        f"Perplexity is of the last {scored:,} tokens of each document ({most}), given the tokens before them "
        "within the length (a window). All lengths score the same tokens. In brackets: the ratio to the perplexity of "
        f"{result.plain} at {result.trained:,} tokens in the same windows, and its interval. A perplexity of fewer "
        "windows follows from this ratio.",
        "Facts are those that greedy decoding finds, of all that were hidden, with the interval of their share.",
        f"A method holds to a length if up to it its perplexity is at most {HOLDS:.2f} times that of {result.plain} at "
        f"{result.trained:,} tokens, and the mean margin of its facts is above 0.",
        "The intervals of all methods in a column hold together in 95% of cases. They do not compare methods: the "
        "differences between two methods vary less, because all have the same facts and windows.",
        f"Computed in {environment.dtype} on {environment.device}, torch {environment.torch}.",
    ]


def fact_table(result: StretchResult) -> Table:
    """Return the table of passkeys found, needles found and the mean margin, with a row for each method and length."""
    header = ("method", "tokens", "passkeys", "needles", "margin (nats)")
    rows = []
    for name in result.ranked():
        for length in (length for length in result.lengths() if result.facts(name, length)):
            cases = result.facts(name, length)
            margin = estimate(result.margins(name, length), together(result))
            ends = "" if math.isnan(margin.low) else f"{margin.low:+.1f} to {margin.high:+.1f}"
            cells = [TableCell(f"{length:,}", length)]
            for task in TASKS:
                count = sum(case.task == task for case in cases)
                cells.append(TableCell(f"{hits(result, name, length, task)}/{count}" if count else ""))
            rows.append(TableRow(name, (*cells, TableCell(f"{margin.mean:+.1f}", margin.mean, ends))))
    prompts = "in the model's chat template" if result.header.protocol.chat else "plain text"
    return Table(
        "facts",
        "Hidden facts by kind",
        header,
        tuple(rows),
        (
            f"Passkeys and needles are numbers of {DIGITS} digits in filler ({prompts}). Passkeys are easier to find.",
            "The margin is the log-probability of the number minus that of the likeliest of "
            f"{FOILS} foils, on average over both kinds. Near {DIGITS * math.log(10):.0f} nats ({DIGITS} digits times "
            "ln 10) it saturates: there a fact is found, and greater margins say little.",
        ),
    )


def comparison_table(result: StretchResult, decision: Decision) -> Table:
    """Return the table of differences from the leader, with simultaneous intervals. Rows are `decision.compared`."""
    header = ("method", "facts", "found", "margin (nats)", "verdict", "facts that would decide")
    rows = []
    for each in decision.compared:
        needed = "" if each.needed is None else "over 1,000" if math.isinf(each.needed) else f"{each.needed:,.0f}"
        cells = (
            TableCell(f"{each.facts}", each.facts),
            TableCell(f"{each.found.mean:+.0%}", each.found.mean, f"{each.found.low:+.0%} to {each.found.high:+.0%}"),
            TableCell(f"{each.margin.mean:+.1f}", each.margin.mean, _ends(each.margin)),
            TableCell(VERDICTS[each.by]),
            TableCell(needed),
        )
        rows.append(TableRow(each.method, cells))
    inside = confidence(result)
    return Table(
        "comparison",
        f"Methods minus {decision.leader}, at {decision.length:,} tokens",
        header,
        tuple(rows),
        (
            f"Differences from {decision.leader}, paired by fact. Each interval has a confidence of "
            f"{level_text(inside)}. So the intervals of all methods hold together in 95% of cases, also if they are "
            f"looked at {LOOKS} times while facts are added. Methods are compared from {FEWEST} facts on.",
            "A method is excluded if its interval of facts found is below 0. If it is not, and the method does not "
            "find more facts, then it is excluded if its interval of the margin is below 0.",
            "The last column is the number of facts of each method that would show the measured difference with a "
            f"power of {POWER:.0%}.",
        ),
    )


VERDICTS = {"facts found": "finds fewer", "margin": "lower margin", "": "undecided"}


def _ends(found: Estimate) -> str:
    return "" if math.isnan(found.low) else f"{found.low:+.1f} to {found.high:+.1f}"


def time_table(result: StretchResult) -> Table:
    lengths = [length for length in result.lengths() if any(result.windows(name, length) for name in result.supported)]
    header = ("method", *(f"{length:,} tokens" for length in lengths), "facts (all prompts)")
    rows = []
    for name in result.ranked():
        seconds = [result.window_seconds(name, length) for length in lengths]
        timed = ((result.fact_seconds(name, length), result.cases(name, length)) for length in result.lengths())
        facts = [each * count for each, count in timed if each is not None]
        cells = [EMPTY if each is None else TableCell(f"{each:.2f}", each) for each in seconds]
        rows.append(TableRow(name, (*cells, TableCell(f"{sum(facts):.1f}", sum(facts)) if facts else EMPTY)))
    return Table("times", "Seconds for each input", header, tuple(rows))


def contrast_table(result: StretchResult, plan: Plan) -> Table:
    header = ("contrast", "quantity", "declared power", "difference", "95% interval", "verdict")
    rows = [_contrast_row(step, plan) for step in sequence(result, plan)]
    note = (
        "Mean differences of margins (nats), paired by case, or of losses (nats per token), paired by document, with t "
        "intervals. The contrasts are tested in this order until the first one that is not decided. The declared power "
        "follows from the expected difference and deviation, which were declared before the run."
    )
    return Table("contrasts", "Contrasts, in the declared order", header, tuple(rows), (note,))


def _contrast_row(step: Step[PlannedContrast], plan: Plan) -> TableRow:
    contrast, found = step.contrast, step.difference
    declared, mean, interval = power_of(contrast, pairs_of(plan, contrast)), f"{found.mean:+.3f}", "-"
    if not found.count:
        mean = "not measured"
    elif not math.isnan(found.low):
        interval = f"{found.low:+.3f} .. {found.high:+.3f}"
    texts = (contrast.quantity, "-" if declared is None else f"{declared:.2f}", mean, interval, outcome_of(step))
    return TableRow(contrast.name, tuple(map(TableCell, texts)))


Ends = tuple[float, float, float]
"""A value and the two ends of its interval. If there is no interval, the ends are NaN."""


def figure(result: StretchResult) -> Figure:
    """Return the picture of perplexity, facts found and mean margin by length, with a curve for each method."""
    names, inside = result.ranked(), together(result)
    kinds = {name: "rotary" if name == PLAIN else name.partition(":")[0].removesuffix(TRAINED) for name in names}
    shown = recoloured([Member(each, "", "", look_of(kinds[each]), kinds[each]) for each in names])
    looks = {member.label: member.look for member in shown}

    def perplexity(name: str, length: int) -> Ends | None:
        base, ratios = result.perplexity(result.plain, result.trained), result.loss_ratios(name, length)
        value = result.perplexity(name, length)
        if value is None or base is None or not ratios:
            return None if value is None else (value, math.nan, math.nan)
        found = estimate(ratios, inside)
        return value, base * exponential(found.low), base * exponential(found.high)

    def share(name: str, length: int) -> Ends | None:
        value = result.share(name, length)
        return None if value is None else (value, *wilson_interval(value, len(result.facts(name, length)), inside))

    def margin(name: str, length: int) -> Ends | None:
        margins = result.margins(name, length)
        found = estimate(margins, inside) if margins else None
        return None if found is None else (found.mean, found.low, found.high)

    panel_of: list[tuple[str, Callable[[str, int], Ends | None], dict[str, Any]]] = [
        ("perplexity", perplexity, {"log_y": True}),
        ("share of facts found", share, {"y_range": (-0.03, 1.03)}),
        ("margin of hidden facts (nats)", margin, {"level": 0.0, "level_name": "right and wrong are equal"}),
    ]
    made = []
    for label, values, more in panel_of:
        lines = []
        for name in names:
            points = [(length, ends) for length in result.lengths() if (ends := values(name, length)) is not None]
            if points:
                x, three = zip(*points, strict=True)
                y, low, high = zip(*three, strict=True)
                lines.append(Line(name, tuple(map(float, x)), y, low, high, look=looks[name], name=name))
        if lines:
            marks = {float(result.trained): "training length"}
            made.append(Panel(tuple(lines), "length (tokens)", label, marks=marks, side_by_side=True, **more))
    alt = f"Perplexity, facts found and margin of hidden facts by length for {', '.join(names)}"
    caption = (
        "Perplexity (lower is better), the share of hidden facts that are found and their mean margin (higher is "
        "better), by input length. Bars are the intervals of the tables."
    )
    return Figure(PICTURE, caption, alt, *panels(made, common_y=False))
