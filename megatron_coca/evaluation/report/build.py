"""Build a report with a page, tables, figures and a notebook, or only the tables for a console."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megatron_coca.evaluation.options import dynamic_length_text
from megatron_coca.evaluation.report import notebook
from megatron_coca.evaluation.report.curves import Curve, find_curves
from megatron_coca.evaluation.report.document import ReportDocument, console_text, csv_table, html_page, markdown
from megatron_coca.evaluation.report.plots.figures import FILES, images
from megatron_coca.evaluation.report.reading import LoadedResult, read_results
from megatron_coca.evaluation.report.records import json_text
from megatron_coca.evaluation.report.result_tables import ReportOptions
from megatron_coca.evaluation.report.sections import report_document, tidy
from megatron_coca.evaluation.report.tidy import TidyRow, csv_text
from megatron_coca.evaluation.results import EvaluationError, Result, check_writable, write_atomically
from megatron_coca.evaluation.tasks.lm_eval.section import limit_text
from megatron_coca.evaluation.tasks.lm_eval.task import HarnessResult
from megatron_coca.support.regular_files import inside, read_regular

PAGE = "report.html"


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
    papers: bool | None = None,
    curves: Mapping[str, Sequence[Curve]] | None = None,
    baseline: str | None = None,
    claim: str = "",
) -> str:
    """Write report.html, report.md, the figures, the tables, results.csv, results.json and the notebook.

    `result_files` are files of `megatron-coca evaluate TASK --output`, or folders of such files. If `papers` is True,
    all published numbers are added; if it is False, none. By default, a published table is added if its training length
    and protocol are those of the results. `curves` contains one learning curve per seed for each label; by default
    `find_curves` finds them. Perplexities are compared with those of the label `baseline`. `claim` replaces the
    sentence at the top.

    Return the tables of our results as Markdown. Raises EvaluationError if a file is not a result, a label has two
    models, the baseline has no results, the folder is not writable, or there is nothing to report.
    """
    folder = Path(output_dir)
    check_writable(folder / PAGE)
    loaded = read_results(result_files)
    curves = find_curves(loaded) if curves is None else curves
    options = ReportOptions(papers, baseline, curves, claim=claim)
    document, rows = report_document(loaded, title, options), tidy(loaded)
    drawings = {figure.name: images(figure) for figure in document.figures()}
    files = {
        "results.csv": csv_text(rows).encode(),
        "results.json": json_text(document, rows).encode(),
        "report.md": markdown(document).encode(),
        **{f"figures/{name}{end}": image for name, found in drawings.items() for end, image in found.items()},
        **_table_files(document),
    }
    for kind in ("figures", "tables"):  # in a folder from somebody else, these may be links
        inside(folder, kind, EvaluationError, "remove the link, or name another folder with --output")
    _remove_earlier(folder, files)
    for name, content in files.items():
        write_atomically(folder / name, content)
    write_atomically(folder / notebook.NAME, _notebook(document, rows, folder).encode())
    # The page is written last, so that it exists only if all other files do.
    write_atomically(folder / PAGE, html_page(document, drawings).encode())
    return console_text(report_document(loaded, title, replace(options, papers=False)))


def _remove_earlier(folder: Path, files: Collection[str]) -> None:
    """Remove the page of an earlier report, and those of its tables and figures that are not among the new `files`.

    A paper that includes these files would otherwise still show the old numbers. Files that the earlier report did not
    write are not removed.
    """
    (folder / PAGE).unlink(missing_ok=True)
    try:
        earlier = json.loads(read_regular(folder / "results.json"))
        tables = {"headline", *(table["name"] for table in earlier["tables"])}
        figures = {figure["name"] for figure in earlier["figures"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return
    ends = {"tables": TABLE_ENDS, "figures": [end for kinds in FILES.values() for end in kinds.values()]}
    for kind, names in (("tables", tables), ("figures", figures)):
        known = {f"{name}{end}" for name in names for end in ends[kind]}
        for path in (folder / kind).glob("*"):
            if path.name in known and f"{kind}/{path.name}" not in files:
                path.unlink()


TABLE_ENDS = (".csv", ".tex")


def _table_files(document: ReportDocument) -> dict[str, bytes]:
    from megatron_coca.evaluation.report.latex import latex_table  # pandas takes a second to import

    tables = [*document.tables(), *([document.headline.table] if document.headline is not None else [])]
    files = {f"tables/{table.name}.csv": csv_table(table).encode() for table in tables}
    return files | {f"tables/{table.name}.tex": latex_table(table).encode() for table in tables}


def _notebook(document: ReportDocument, rows: Sequence[TidyRow], folder: Path) -> str:
    from megatron_coca.evaluation.report.redrawn import measured

    claim = "" if document.headline is None else document.headline.sentence
    first = dict(reversed(measured(rows)))  # the first metric of each task
    return notebook.executed(notebook.report_cells(document.title, claim, [*first.items()][::-1]), folder)
