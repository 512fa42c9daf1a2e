"""The sections of a report, and the report built from results."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_coca.evaluation.declaration import LAST, Task, TaskSection
from megatron_coca.evaluation.report import overview_sections as overview
from megatron_coca.evaluation.report import result_tables as shared
from megatron_coca.evaluation.report.claim import headline
from megatron_coca.evaluation.report.document import ReportDocument, Section
from megatron_coca.evaluation.report.number_section import number_blocks
from megatron_coca.evaluation.report.plots.looks import members
from megatron_coca.evaluation.report.reading import LoadedResult, group_results
from megatron_coca.evaluation.report.result_tables import ReportOptions
from megatron_coca.evaluation.report.tidy import TidyRow, speed_rows, tidy_rows
from megatron_coca.evaluation.results import EvaluationError
from megatron_coca.evaluation.tasks import TASKS, function_of


@dataclass(frozen=True)
class SectionBuilder:
    """A section of a report before it is built. `build` makes its blocks from the results of `tasks`.

    `place` orders the sections of the page. `sentence` is the order in which they are tried for the sentence at the
    top. `printed`: whether the console shows the section too.
    """

    name: str
    title: str
    place: int
    tasks: tuple[str, ...]
    build: shared.ResultBuilder
    sentence: int = LAST
    printed: bool = True


def section_builders() -> list[SectionBuilder]:
    """Return all sections in the order of the page: those of the tasks, and those that show several tasks."""
    several = [
        SectionBuilder(
            "summary", "Summary", 10, ("perplexity", "passkey", "recall"), overview.summary_blocks, printed=False
        ),
        SectionBuilder("training", "Learning curves", 30, tuple(TASKS), overview.curve_blocks, printed=False),
    ]
    of_tasks = [
        SectionBuilder(each.name, each.title, each.place, (task.name,), builder_of(task, each), each.sentence)
        for task in TASKS.values()
        for each in task.sections
    ]
    return sorted([*several, *of_tasks], key=lambda section: (section.place, section.name))


def builder_of(task: Task, section: TaskSection) -> shared.ResultBuilder:
    """Return the function that makes the blocks of a task's section."""
    if not section.build:
        return number_blocks(task, section)
    builder: shared.ResultBuilder = function_of(section.build)
    return builder


def tidy(loaded: Sequence[LoadedResult]) -> list[TidyRow]:
    """Return all numbers of the results as rows of results.csv."""
    groups = (
        (task.name, group)
        for task in TASKS.values()
        if task.of_checkpoint
        for group in group_results([item for item in loaded if item.result.task == task.name], task.comparable)
    )
    return [*tidy_rows(groups, members(item.result for item in loaded)), *speed_rows(loaded)]


def report_document(loaded: Sequence[LoadedResult], title: str, options: ReportOptions) -> ReportDocument:
    """Return the content of a report: all sections that are not empty.

    Raises EvaluationError if there is nothing to report, a label has two models, or the baseline has no results.
    """
    if not any(item.result.results or item.result.missing for item in loaded):
        raise EvaluationError(
            "results: the files contain no numbers, and no reasons for missing ones; name other files"
        )
    labels = dict.fromkeys(item.result.label for item in loaded)
    if options.baseline is not None and options.baseline not in labels:
        raise EvaluationError(f"baseline `{options.baseline}`: not a label; name one of {', '.join(labels)}")
    weights = {item.result.checkpoint.identity for item in loaded if TASKS[item.result.task].of_checkpoint}
    counts = {"result file": len(loaded), "label": len(labels), "set": len(weights)}
    files, labelled, sets = (f"{count} {noun}{'' if count == 1 else 's'}" for noun, count in counts.items())
    origin = "All numbers were measured with megatron-coca evaluate, unless a paper is named."
    options = replace(options, members=members(item.result for item in loaded))
    sections = []
    for each in section_builders():
        chosen = [item for item in loaded if item.result.task in each.tasks]
        if chosen and (blocks := each.build(chosen, options)):
            noted = [replace(block, tables=tuple(map(shared.with_seeds_note, block.tables))) for block in blocks]
            sections.append(Section(each.name, each.title, tuple(noted), each.printed, each.sentence))
    summary = f"{files}: {labelled}, {sets} of weights. {origin}"
    return ReportDocument(title, summary, tuple(sections), headline=headline(sections, options))
