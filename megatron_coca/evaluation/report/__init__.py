"""`megatron-coca evaluate report`: tables, plots and a page from result files, with published numbers next to ours."""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_coca.evaluation.options import dynamic_length_text
from megatron_coca.evaluation.report.charts import svg
from megatron_coca.evaluation.report.curves import Curve, find_curves
from megatron_coca.evaluation.report.document import console_text, csv_table, html_page, markdown
from megatron_coca.evaluation.report.lm_eval_section import limit_text
from megatron_coca.evaluation.report.reading import LoadedResult, read_results
from megatron_coca.evaluation.report.result_tables import ReportOptions
from megatron_coca.evaluation.report.sections import report_document
from megatron_coca.evaluation.results import Result, check_writable, write_atomically
from megatron_coca.evaluation.tasks.lm_eval import HarnessResult
from megatron_coca.support.plain_text import plain

PAGE = "report.html"


def run(args: Namespace) -> int:
    print(plain(build_report(args.results, args.output, args.title, args.papers, baseline=args.baseline)))
    print(f"\nwrote {args.output / PAGE}, and report.md, plots and tables in the same folder")
    return 0


def tables_of_results(results: Sequence[Result]) -> str:
    """Return the tables of one task's results for the console, without published numbers."""
    lines = [f"{result.label}: {result.setting}" for result in results]
    protocol = getattr(results[0], "protocol", None)  # the results of one task share their protocol
    if (seen := getattr(protocol, "dynamic_length", None)) is not None:
        lines.append(dynamic_length_text(seen))
    if (chat := getattr(protocol, "chat", None)) is not None:
        lines.append(f"prompts are chats ({chat})")
    if isinstance(results[0], HarnessResult):
        lines.append(limit_text(results[0].protocol))
    loaded = [LoadedResult("", result) for result in results]
    return console_text(report_document(loaded, "\n".join(lines), ReportOptions(papers=False)))


def build_report(
    result_files: Sequence[str | Path],
    output_dir: str | Path,
    title: str = "Evaluation",
    papers: bool = True,
    curves: Mapping[str, Sequence[Curve]] | None = None,
    baseline: str | None = None,
) -> str:
    """Write report.html and report.md, the plots (figures/NAME.svg) and the tables (tables/NAME.csv).

    `result_files` are files of `megatron-coca evaluate TASK --output`, or folders of such files. `papers`: whether to
    add published numbers. `curves` are learning curves by label, one for each seed; by default `find_curves` finds
    them. Perplexities are compared with those of the label `baseline`.

    Return the tables of our results as Markdown. Raises EvaluationError for files that are not results, a label with
    two models, a baseline without results, a folder that is not writable, or if there is nothing to report.
    """
    folder = Path(output_dir)
    check_writable(folder / PAGE)
    loaded = read_results(result_files)
    curves = find_curves(loaded) if curves is None else curves
    document = report_document(loaded, title, ReportOptions(papers, baseline, curves))
    drawings = {figure.name: svg(figure, "light") for figure in document.figures()}
    for name, drawing in drawings.items():
        write_atomically(folder / "figures" / f"{name}.svg", drawing)
    for table in document.tables():
        write_atomically(folder / "tables" / f"{table.name}.csv", csv_table(table).encode())
    write_atomically(folder / "report.md", markdown(document).encode())
    # The page is written last, so that it exists only if all other files do.
    write_atomically(folder / PAGE, html_page(document, drawings).encode())
    return console_text(report_document(loaded, title, ReportOptions(False, baseline, curves)))
