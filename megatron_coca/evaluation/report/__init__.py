"""`evaluate.py report`: result files as tables, plots and one page, with the numbers of the papers beside ours."""

from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Sequence
from pathlib import Path

HELP = "tables, plots and one page out of many results, beside the papers'"
TITLE = "Evaluation"


def add_arguments(parser: ArgumentParser) -> None:
    """Declares the options of the subcommand."""
    add = parser.add_argument
    add("results", nargs="+", type=Path, metavar="RESULTS", help="result files of evaluate.py, or folders of them")
    add("--output", required=True, type=Path, metavar="DIR", help="where report.html, .md, .json and the plots go")
    add("--title", default=TITLE, help="title of the report")
    papers = "put the numbers of the CoCA paper and of Su's pages beside ours"
    add("--papers", action=BooleanOptionalAction, default=True, help=papers)


def run(args: Namespace) -> int:
    """Writes the report and prints the tables of our results."""
    print(build_report(args.results, args.output, args.title, args.papers))
    print(f"\n{args.output / 'report.html'} is written, with report.md, report.json and the plots beside it.")
    return 0


def build_report(
    result_files: Sequence[str | Path], output_dir: str | Path, title: str = TITLE, papers: bool = True
) -> str:
    """Writes report.html, report.md, report.json and the plots as PNG into `output_dir`.

    `result_files` are files of `evaluate.py TASK --output`, or folders of them. `papers` adds published numbers. Returns
    the tables of our results as Markdown. Raises EvaluationError for files that are not results, for labels that stand
    for two models, where there is nothing to report, and where nothing can be written.
    """
    # Not at the top: `evaluate.py report --help` needs neither PyTorch nor matplotlib, which take seconds to import.
    from megatron_coca.evaluation.report.command import build_report as write_report

    return write_report(result_files, output_dir, title, papers)
