"""The tables and the picture of `megatron-coca stretch`, which both forms of its page show."""

import statistics

from megatron_coca.evaluation.report.charts import Figure, Line, Panel, panels
from megatron_coca.evaluation.report.document import EMPTY, Table, TableCell, TableRow
from megatron_coca.evaluation.report.looks import Member, apart, look_of
from megatron_coca.evaluation.stretch.choices import PLAIN
from megatron_coca.evaluation.stretch.measuring import FOILS
from megatron_coca.evaluation.stretch.plans import Plan, contrast_rows
from megatron_coca.evaluation.stretch.records import HOLDS, StretchResult

PICTURE = "stretch"
"""Name of the picture, without the end of its file name."""


def main_table(result: StretchResult) -> Table:
    """Return one row for each method, best first: perplexity, and facts found with the mean margin, by length."""
    lengths = result.lengths()
    hidden = [length for length in lengths if any(result.found(name, length) for name in result.ranked())]
    header = ["method", "holds to", *(f"perplexity {length:,}" for length in lengths)]
    header += [f"facts {length:,}" for length in hidden]
    rows = []
    for name in result.ranked():
        cells = [TableCell(f"{result.reach(name):,}", result.reach(name))]
        for length in lengths:
            perplexity = result.perplexity(name, length)
            cells.append(EMPTY if perplexity is None else TableCell(f"{perplexity:.2f}", perplexity))
        rows.append(TableRow(name, (*cells, *(_facts(result, name, length) for length in hidden))))
    for each in (each for each in result.methods if each.error):
        absent = TableCell("not supported", note=f"{each.name}: {each.error}", absent=True)
        rows.append(TableRow(each.name, (absent, *[EMPTY] * (len(header) - 2))))
    return Table("methods", "Perplexity and hidden facts by length", tuple(header), tuple(rows), tuple(notes(result)))


def _facts(result: StretchResult, method: str, length: int) -> TableCell:
    found = result.found(method, length)
    if found is None:
        return EMPTY
    margins = [case.margin for case in found.cases]
    error = statistics.stdev(margins) / len(margins) ** 0.5 if len(margins) > 1 else 0.0
    mean = statistics.fmean(margins)
    return TableCell(f"{hits(result, method, length)}/{len(margins)}", mean, f"{mean:+.2f} ± {error:.2f}")


def hits(result: StretchResult, method: str, length: int) -> int:
    """Return the number of facts that greedy decoding finds."""
    found = result.found(method, length)
    return 0 if found is None else sum(case.found for case in found.cases)


def notes(result: StretchResult) -> list[str]:
    """Explain the columns of the table."""
    settings = result.settings
    prompts = "in the model's chat template" if settings.chat else "plain text"
    return [
        f"Perplexity is of the last {settings.scored:,} tokens of each document ({settings.count}), given the tokens "
        "before them within the length. All lengths score the same tokens.",
        f"Facts are passkeys and needles in filler ({prompts}). A cell shows how many greedy decoding finds, and the "
        "mean margin with its standard error. The margin is the log-probability of the answer minus that of the "
        f"likeliest of {FOILS} foils, in nats.",
        f"A method holds to a length if up to it its perplexity is at most {HOLDS:.2f} times that of the plain model "
        "at 1x, and the mean margin is above 0.",
        f"Computed in {settings.environment.dtype} on {settings.environment.device}, torch "
        f"{settings.environment.torch}.",
    ]


def time_table(result: StretchResult) -> Table:
    lengths = sorted({each.length for each in result.losses if each.complete})
    header = ("method", *(f"{length:,} tokens" for length in lengths), "facts (all prompts)")
    rows = []
    for name in result.ranked():
        losses = [result.loss(name, length) for length in lengths]
        seconds = [None if loss is None else loss.seconds / len(loss.nlls) for loss in losses]
        facts = [each.seconds for each in result.retrieval if each.method == name and each.complete]
        cells = [EMPTY if each is None else TableCell(f"{each:.2f}", each) for each in seconds]
        rows.append(TableRow(name, (*cells, TableCell(f"{sum(facts):.1f}", sum(facts)) if facts else EMPTY)))
    return Table("times", "Seconds for each input", header, tuple(rows))


def contrast_table(result: StretchResult, plan: Plan) -> Table:
    header = ("contrast", "quantity", "declared power", "difference", "95% interval", "verdict")
    rows = [TableRow(name, tuple(map(TableCell, cells))) for name, *cells in contrast_rows(result, plan)]
    note = (
        "Mean differences of margins (nats), paired by case, or of losses (nats per token), paired by document, with t "
        "intervals. The contrasts are tested in this order until the first one that is not decided. The declared power "
        "follows from the expected difference and deviation, which were declared before the run."
    )
    return Table("contrasts", "Contrasts, in the declared order", header, tuple(rows), (note,))


def figure(result: StretchResult) -> Figure:
    """Return the picture: perplexity and mean margin by length, one line for each method."""
    names = result.ranked()
    kinds = {name: "rotary" if name == PLAIN else name.partition(":")[0] for name in names}
    looks = {
        member.label: member.look for member in apart([Member(each, "", "", look_of(kinds[each])) for each in names])
    }
    trained, made = result.trained, []
    for label, values, more in (
        ("perplexity", result.perplexity, {"log_y": True}),
        ("margin of hidden facts (nats)", result.margin, {"level": 0.0, "level_name": "right and wrong are equal"}),
    ):
        lines = []
        for name in names:
            points = [(length, value) for length in result.lengths() if (value := values(name, length)) is not None]
            if points:
                x, y = zip(*points, strict=True)
                lines.append(Line(name, tuple(map(float, x)), y, look=looks[name], name=name))
        if lines:
            marks = {float(trained): "training length"}
            made.append(Panel(tuple(lines), "length (tokens)", label, marks=marks, **more))
    alt = f"Perplexity and margin of hidden facts by length for {', '.join(names)}"
    caption = "Perplexity (lower is better), and the mean margin of hidden facts (higher is better), by input length."
    return Figure(PICTURE, caption, alt, *panels(made, common_y=False))
