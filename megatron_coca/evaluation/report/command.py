"""`python evaluate.py report`."""

from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import SerializeAsAny

from megatron_coca.evaluation.options import Task
from megatron_coca.evaluation.report import (
    analysis_section,
    charts,
    harness_section,
    html,
    perplexity_section,
    retrieval_section,
    speed_section,
    tables,
)
from megatron_coca.evaluation.report.document import ReportBlock, ReportDocument, Section, Table
from megatron_coca.evaluation.report.reading import REPORT_FILE, RESULT_TYPES, LoadedResult, read_results
from megatron_coca.evaluation.results import (
    EvaluationError,
    Record,
    Result,
    check_writable,
    write_atomically,
    write_record,
)

EVERY = tuple(RESULT_TYPES)


@dataclass(frozen=True)
class Part:
    """A section: the tasks whose results it is made of, and what makes its blocks; none without any."""

    name: str
    title: str
    tasks: tuple[str, ...]
    build: Callable[[Sequence[LoadedResult], bool], list[ReportBlock]]
    printed: bool = True


PARTS = (
    Part("perplexity", "Perplexity beyond the training length", ("perplexity",), perplexity_section.build),
    Part("rerope", "Loss with windowed relative positions", ("perplexity",), perplexity_section.build_rerope),
    Part("passkey", "Passkey retrieval", ("passkey",), retrieval_section.build),
    Part("strict", "CoCA-Strict against CoCA-Slack", ("perplexity", "passkey"), retrieval_section.build_strict),
    Part("needle", "A needle in a haystack", ("needle",), retrieval_section.build_needle),
    Part("ruler", "RULER-style tasks", ("ruler",), retrieval_section.build_ruler),
    Part("short", "Short-context tasks", ("lm-eval",), harness_section.build),
    Part("speed", "Speed and memory", ("speed",), speed_section.build_speed),
    Part("analysis", "Analysis of attention", ("analyse",), analysis_section.build),
    Part(
        "models",
        "What was measured",
        tuple(task for task in EVERY if task != "speed"),
        tables.models,
        printed=False,
    ),
    Part("costs", "What measuring cost", EVERY, speed_section.build, printed=False),
)
"""The sections in their order. A new task adds a row here and one to `RESULT_TYPES`."""


def build_sections(loaded: Sequence[LoadedResult], papers: bool) -> tuple[Section, ...]:
    """Those that there is something for. Raises EvaluationError for labels that stand for two models."""
    sections = []
    for part in PARTS:
        chosen = [each for each in loaded if each.result.task in part.tasks]
        if chosen and (blocks := part.build(chosen, papers)):
            sections.append(Section(part.name, part.title, tuple(blocks), part.printed))
    return tuple(sections)


TITLE = "Evaluation"


class CellRecord(Record):
    """One cell: as it is shown, its number, and why there is none."""

    text: str
    value: float | None
    detail: str
    note: str


class RowRecord(Record):
    """One row; `published` names the paper's table that it is from, empty for ours."""

    name: str
    published: str
    cells: list[CellRecord]


class TableRecord(Record):
    """One table of the report."""

    name: str
    caption: str
    columns: list[str]
    rows: list[RowRecord]
    notes: list[str]

    @classmethod
    def of(cls, table: Table) -> "TableRecord":
        """The same table as a record."""
        rows = [
            RowRecord(
                name=line.name,
                published=line.published,
                cells=[
                    CellRecord(text=entry.text, value=entry.value, detail=entry.detail, note=entry.note)
                    for entry in line.entries
                ],
            )
            for line in table.lines
        ]
        columns, notes = list(table.header[1:]), list(table.notes)
        return cls(name=table.name, caption=table.caption, columns=columns, rows=rows, notes=notes)


class Report(Record):
    """The file report.json: the tables, the names of the plots, and every result as it was read, by its file."""

    title: str
    tables: list[TableRecord]
    figures: list[str]
    results: dict[str, SerializeAsAny[Result]]


def build_report(
    result_files: Sequence[str | Path], output_dir: str | Path, title: str = TITLE, papers: bool = True
) -> str:
    """Writes report.html, report.md, report.json and the plots as PNG into `output_dir`.

    `result_files` are files of `evaluate.py TASK --output`, or folders of them. `papers` puts published numbers beside
    ours. Returns the tables of ours as Markdown. Raises EvaluationError for files that are no results, for labels that
    stand for two models, where there is nothing to report, and where nothing can be written.
    """
    folder = Path(output_dir)
    check_writable(folder / REPORT_FILE)
    loaded = read_results(result_files)
    if not any(_says_something(each) for each in loaded):
        raise EvaluationError("no results to report: the files have neither a number nor a reason why there is none")
    document = ReportDocument(title, _summary(loaded), build_sections(loaded, papers))
    write(folder, document, loaded)
    return document.render_ours(document)


def _says_something(loaded: LoadedResult) -> bool:
    return bool(loaded.result.results or loaded.result.missing)


def _summary(loaded: Sequence[LoadedResult]) -> str:
    labels = len({each.result.label for each in loaded})
    weights = len({each.result.checkpoint.identity for each in loaded if each.result.task != "speed"})
    counts = ((len(loaded), "result file"), (labels, "label"), (weights, "set of weights"))
    shown = [f"{count} {name if count == 1 else _plural(name)}" for count, name in counts]
    return (
        f"{shown[0]}: {shown[1]}, {shown[2]}. Every number is of this project's evaluate.py, unless a paper is named."
    )


def _plural(name: str) -> str:
    first, _, rest = name.partition(" of ")
    return f"{first}s of {rest}" if rest else f"{first}s"


def write(folder: Path, document: ReportDocument, loaded: Sequence[LoadedResult]) -> None:
    """The page last, so that it is there only when all else is. Raises EvaluationError."""
    report = Report(
        title=document.title,
        tables=[TableRecord.of(table) for table in document.tables()],
        figures=[f"{figure.name}.png" for figure in document.figures()],
        results={each.file: each.result for each in loaded},
    )
    for figure in document.figures():
        write_atomically(folder / f"{figure.name}.png", charts.png(figure))
    write_record(folder / REPORT_FILE, report)
    write_atomically(folder / "report.md", document.render(document).encode())
    write_atomically(folder / "report.html", html.render(document).encode())


def add_arguments(parser: ArgumentParser) -> None:
    """The options of the subcommand."""
    add = parser.add_argument
    add("results", nargs="+", type=Path, metavar="RESULTS", help="result files of evaluate.py, or folders of them")
    add("--output", required=True, type=Path, metavar="DIR", help="where report.html, .md, .json and the plots go")
    add("--title", default=TITLE, help="title of the report")
    papers = "put the numbers of the CoCA paper and of Su's pages beside ours"
    add("--papers", action=BooleanOptionalAction, default=True, help=papers)


def run(args: Namespace) -> int:
    """Reads, writes, prints the tables of ours."""
    print(build_report(args.results, args.output, args.title, args.papers))
    print(f"\n{args.output / 'report.html'} is written, with report.md, report.json and the plots beside it.")
    return 0


REPORT = Task("tables, plots and one page out of many results, beside the papers'", add_arguments, run)
