"""`evaluate.py report`: result files as tables, plots and one page, with published numbers next to ours."""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import Field

from megatron_coca.evaluation.options import dynamic_length_text
from megatron_coca.evaluation.report.charts import pdf, png, svg
from megatron_coca.evaluation.report.curves import Curve, find_curves
from megatron_coca.evaluation.report.document import (
    Report,
    console_text,
    csv_table,
    html_page,
    latex_table,
    markdown,
    table_record,
)
from megatron_coca.evaluation.report.reading import REPORT_FILE, LoadedResult, read_results
from megatron_coca.evaluation.report.result_tables import ReportOptions
from megatron_coca.evaluation.report.sections import report_document
from megatron_coca.evaluation.results import (
    EvaluationError,
    Record,
    Result,
    check_writable,
    read_yaml_file,
    validated,
    write_atomically,
    write_record,
)


class FigureOptions(Record):
    """Figures for a document: inches, points, and the labels in the order of the report; the others are left out."""

    width: float | None = Field(default=None, gt=0, le=50)
    font_size: float | None = Field(default=None, gt=0, le=72)
    labels: list[str] | None = Field(default=None, min_length=1)


def read_figure_options(path: Path) -> FigureOptions:
    """Read the file of `--figures`. Raises EvaluationError that names every wrong key."""
    return validated(path, read_yaml_file(path), FigureOptions, "a file of figures")


def run(args: Namespace) -> int:
    figures = None if args.figures is None else read_figure_options(args.figures)
    print(build_report(args.results, args.output, args.title, args.papers, baseline=args.baseline, figures=figures))
    print(f"\n{args.output / 'report.html'} written, with report.md, report.json, plots and tables in the same folder.")
    return 0


def tables_of_result(result: Result) -> str:
    """Return the tables of one result for the console, without published numbers."""
    title = f"{result.label}: {result.setting}"
    if (seen := getattr(getattr(result, "protocol", None), "dynamic_length", None)) is not None:
        title += f"\n{dynamic_length_text(seen)}"
    return console_text(report_document([LoadedResult("", result)], title, ReportOptions(papers=False)))


def build_report(
    result_files: Sequence[str | Path],
    output_dir: str | Path,
    title: str = "Evaluation",
    papers: bool = True,
    curves: Mapping[str, Sequence[Curve]] | None = None,
    baseline: str | None = None,
    figures: FigureOptions | None = None,
) -> str:
    """Write report.html, .md and .json, the plots (NAME.png, figures/NAME.svg, with `figures` figures/NAME.pdf) and the
    tables (tables/NAME.csv, .tex).

    `result_files` are files of `evaluate.py TASK --output`, or folders of them. `papers` adds published numbers;
    `curves` are learning curves by label, one for each seed, by default those that `find_curves` finds; `baseline` is
    the label that perplexities are compared with.
    Returns the tables of our results as Markdown. Raises EvaluationError for files that are not results, for labels
    that stand for two models, for a baseline without results, where there is nothing to report, and where nothing can
    be written.
    """
    folder = Path(output_dir)
    check_writable(folder / REPORT_FILE)
    loaded = read_results(result_files)
    if figures is not None and figures.labels is not None:
        known, order = {item.result.label for item in loaded}, figures.labels
        if missing := sorted(set(order) - known):
            raise EvaluationError(f"labels: {', '.join(missing)}: no such result; there are {', '.join(sorted(known))}")
        chosen = [item for item in loaded if item.result.label in order]
        loaded = sorted(chosen, key=lambda item: order.index(item.result.label))
    curves = find_curves(loaded) if curves is None else curves
    document = report_document(loaded, title, ReportOptions(papers, baseline, curves))
    report = Report(
        title=title,
        tables=[table_record(table) for table in document.tables()],
        figures=[f"{figure.name}.png" for figure in document.figures()],
        curves={label: list(of_seeds) for label, of_seeds in curves.items()},
        results={item.file: item.result for item in loaded},
    )
    drawings = {
        figure.name: {style: svg(figure, style) for style in ("light", "dark")} for figure in document.figures()
    }
    for figure in document.figures():
        write_atomically(folder / f"{figure.name}.png", png(figure))
        write_atomically(folder / "figures" / f"{figure.name}.svg", drawings[figure.name]["light"])
        if figures is not None:
            write_atomically(folder / "figures" / f"{figure.name}.pdf", pdf(figure, figures.width, figures.font_size))
    for table in document.tables():
        write_atomically(folder / "tables" / f"{table.name}.csv", csv_table(table).encode())
        write_atomically(folder / "tables" / f"{table.name}.tex", latex_table(table).encode())
    write_record(folder / REPORT_FILE, report)
    write_atomically(folder / "report.md", markdown(document).encode())
    # The page last, so that it exists only if everything else does.
    write_atomically(folder / "report.html", html_page(document, drawings).encode())
    return console_text(document)
