"""One table and one plot out of several perplexity results, refused where they do not measure the same thing."""

import io
import math
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, NullLocator

from megatron_coca.evaluation.documents import DocumentsRecord
from megatron_coca.evaluation.markdown import format_table
from megatron_coca.evaluation.perplexity.records import PerplexityResult
from megatron_coca.evaluation.results import (
    EvaluationError,
    Record,
    check_writable,
    read_record,
    write_atomically,
    write_record,
)
from megatron_coca.evaluation.running import Task

# What must agree before results may stand in one table: how an error names it, and where a result has it.
COMPARABLE: dict[str, Callable[[PerplexityResult], Any]] = {
    "protocol": lambda result: result.protocol.text,
    "stride": lambda result: result.protocol.stride,
    "documents (sha256)": lambda result: result.documents.sha256,
}
MARKERS = "osD^vP*X"


class Row(Record):
    """One cell of the table; `extrapolation` is the window over the training length."""

    label: str
    window: int
    extrapolation: float
    perplexity: float
    nll: float
    tokens_scored: int


class Report(Record):
    """The file report.json: the rows of the table, and every result as it was read, by its file."""

    title: str
    protocol: str
    stride: int
    documents: DocumentsRecord
    rows: list[Row]
    results: dict[str, PerplexityResult]


def check_comparable(results: dict[str, PerplexityResult]) -> None:
    """Raises EvaluationError, naming the files, where two results do not measure the same thing."""
    for name, read in COMPARABLE.items():
        groups: dict[Any, list[str]] = {}
        for file, result in results.items():
            groups.setdefault(read(result), []).append(file)
        if len(groups) > 1:
            differing = "\n".join(f"  {value}: {', '.join(files)}" for value, files in groups.items())
            raise EvaluationError(f"results with different {name} cannot stand in one table:\n{differing}")


def check_labels(results: dict[str, PerplexityResult]) -> None:
    """Raises EvaluationError where one label would stand for two models, or for two values of one cell."""
    models: dict[str, tuple[str, Any]] = {}
    cells: dict[tuple[str, int], str] = {}
    for file, result in results.items():
        model = (result.checkpoint.identity, result.overrides)
        known_file, known_model = models.setdefault(result.label, (file, model))
        if model != known_model:
            raise EvaluationError(
                f"label `{result.label}` stands for different models in {known_file} and {file}; evaluate one of them "
                "again with another --label"
            )
        for each in result.results:
            if cells.setdefault((result.label, each.window), file) != file:
                raise EvaluationError(
                    f"label `{result.label}` has window {each.window} both in {cells[result.label, each.window]} and "
                    f"in {file}; report only one of them"
                )


def table_rows(results: Iterable[PerplexityResult]) -> list[Row]:
    """One row for each label and window, labels in the order of the files, windows ascending."""
    rows = [
        Row(
            label=result.label,
            window=each.window,
            extrapolation=each.window / result.checkpoint.seq_length,
            **each.model_dump(include={"perplexity", "nll", "tokens_scored"}),
        )
        for result in results
        for each in result.results
    ]
    order = {label: index for index, label in enumerate(dict.fromkeys(row.label for row in rows))}
    return sorted(rows, key=lambda row: (order[row.label], row.window))


def perplexity_table(rows: Sequence[Row], training_lengths: set[int]) -> str:
    """Labels down, windows across; training lengths are starred, `-` marks what was not measured."""
    windows = sorted({row.window for row in rows})
    cells = {(row.label, row.window): f"{row.perplexity:.2f}" for row in rows}
    starred = [f"{window}*" if window in training_lengths else str(window) for window in windows]
    labels = dict.fromkeys(row.label for row in rows)
    header = ["perplexity at window", *starred]
    return format_table(header, ([label, *(cells.get((label, window), "-") for window in windows)] for label in labels))


def draw_lines(axes: Axes, rows: Sequence[Row]) -> None:
    """One line for each label; a perplexity that is not finite leaves a gap."""
    for label, marker in zip(dict.fromkeys(row.label for row in rows), cycle(MARKERS), strict=False):
        line = [row for row in rows if row.label == label]
        values = [row.perplexity if math.isfinite(row.perplexity) else math.nan for row in line]
        axes.plot([row.window for row in line], values, marker=marker, markersize=5, label=label)


def plot(rows: Sequence[Row], training_lengths: set[int], title: str) -> bytes:
    """A PNG: perplexity against window, both logarithmic, training lengths as dashed lines."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    draw_lines(axes, rows)
    for length in sorted(training_lengths):
        axes.axvline(length, color="grey", linestyle="--", linewidth=1, label=f"training length {length}")
    windows = sorted({row.window for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(windows, [str(window) for window in windows])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 1)))
    axes.set(xlabel="window (tokens)", ylabel="perplexity", title=title)
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    image = io.BytesIO()
    FigureCanvasAgg(figure).print_png(image)
    return image.getvalue()


def build_report(result_files: Sequence[str | Path], output_dir: str | Path, title: str = "Perplexity") -> str:
    """Writes report.json and report.png into `output_dir` and returns the table as Markdown.

    `result_files` are files of `evaluate.py perplexity --output`. Raises EvaluationError for files that are not, for
    results of different documents, strides or protocols, for ambiguous labels, and where nothing can be written.
    """
    folder = Path(output_dir)
    check_writable(folder / "report.json")
    results = {
        str(file): read_record(Path(file), PerplexityResult, "a result of `evaluate.py perplexity`")
        for file in result_files
    }
    check_comparable(results)
    check_labels(results)
    rows = table_rows(results.values())
    if not rows:
        raise EvaluationError("no results to report: the files name no window that was evaluated")
    first = next(iter(results.values()))
    training_lengths = {result.checkpoint.seq_length for result in results.values()}
    report = Report(
        title=title,
        protocol=first.protocol.text,
        stride=first.protocol.stride,
        documents=first.documents,
        rows=rows,
        results=results,
    )
    write_atomically(folder / "report.png", plot(rows, training_lengths, title))
    write_record(folder / "report.json", report)
    starred = ", ".join(map(str, sorted(training_lengths)))
    return f"{title}\n\n{perplexity_table(rows, training_lengths)}\n\n* training length ({starred}); {scored(report)}"


def scored(report: Report) -> str:
    """How much one cell of the table rests on."""
    documents = report.documents
    return f"stride {report.stride}, {documents.count} documents, {report.rows[0].tokens_scored} tokens scored"


def add_arguments(parser: ArgumentParser) -> None:
    """The options of the subcommand."""
    add = parser.add_argument
    add("results", nargs="+", type=Path, metavar="RESULTS.json", help="files of evaluate.py perplexity --output")
    add("--output", required=True, type=Path, metavar="DIR", help="where report.json and report.png go")
    add("--title", default="Perplexity", help="title of table and plot")


def run(args: Namespace) -> int:
    """Merges, draws, prints."""
    print(build_report(args.results, args.output, args.title))
    return 0


REPORT = Task("one table and plot out of several results", add_arguments, run)
