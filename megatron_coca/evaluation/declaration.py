"""The declaration of an evaluation task: everything that other code knows about it. Nothing here imports PyTorch."""

from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_coca.evaluation.numbers import Number, Reading
from megatron_coca.evaluation.results import Result

LAST = 1000
"""The place of a task or section that declares no place: after all that declare one, in the order of their names."""
Comparable = Mapping[str, str]
"""The properties that all results in one table have in common, as a map from names in headings to paths in a result."""


@dataclass(frozen=True)
class TaskSection:
    """A section of the report.

    Attributes:
        name: its name in links, and the beginning of the names of its tables and figures.
        title: its heading.
        build: the function that builds its blocks, as `folder.module.function` below `evaluation.tasks`. By default,
            the section has a table and a plot by length for each number of the task.
        place: its place on the page.
        sentence: its place in the order in which sections are tried for the sentence at the top of a report. The
            sentence is about the first section with a task that some model has learned.
    """

    name: str
    title: str
    build: str = ""
    place: int = LAST
    sentence: int = LAST


@dataclass(frozen=True)
class Task:
    """An evaluation task: a subcommand that measures and writes result files.

    Attributes:
        name: the subcommand, and the field `task` of the result files.
        help: description of the task in the command's help.
        add_options: function that declares the task's options.
        example: options for the example in the help.
        measure: the function that measures, as `folder.module.function` below `evaluation.tasks`. It takes the parsed
            options and a function that shows results, and returns the exit status.
        result: the type of the result files.
        numbers: declarations of the numbers in an entry of a result file, the most important number first.
        readings: function that returns those numbers of an entry that have no declaration, because their names are
            not known beforehand.
        comparable: the properties that all results in one table have in common. By default these are the protocol
            and, if the results record documents, the documents and the tokenizer.
        at: the name of an entry in notes on missing entries. `{}` in it is replaced by the length.
        divided_by: the option that has a list of values, which several processes can measure independently. If empty,
            a task is divided by variant only.
        fits: the function, as `folder.module.function`, that checks whether the task's prompts fit into their lengths.
            It runs before a model is trained. It takes the parsed options, the tokenizer and the folder of the
            built-in corpus, and raises LengthError.
        by_document: whether the task itself divides the documents among the parts (`--part`).
        sections: its sections in the report.
        place: its place in help texts and in results.csv.
        of_checkpoint: whether it measures a checkpoint. Suites and ablations do not accept other tasks.
    """

    name: str
    help: str
    add_options: Callable[[ArgumentParser], None]
    example: str
    measure: str
    result: type[Result]
    numbers: tuple[Number, ...] = ()
    readings: Callable[[Any], Iterable[Reading]] | None = None
    comparable: Comparable = field(default_factory=dict)
    at: str = "length {}"
    divided_by: str = ""
    fits: str = ""
    by_document: bool = False
    sections: tuple[TaskSection, ...] = ()
    place: int = LAST
    of_checkpoint: bool = True

    def __post_init__(self) -> None:
        if not self.comparable:
            measured = "documents" in self.result.model_fields
            documents = {"documents (sha256)": "documents.sha256", "tokenizer": "tokenizer"} if measured else {}
            object.__setattr__(self, "comparable", documents | {"protocol": "protocol"})

    def read(self, entry: Any) -> list[Reading]:
        """Return all numbers of an entry."""
        found = (number.reading(entry) for number in self.numbers)
        return [*filter(None, found), *(self.readings(entry) if self.readings is not None else ())]

    def number(self, name: str) -> Number | None:
        """Return the declaration of the number with this name in results.csv; None if no declaration has the name."""
        return next((number for number in self.numbers if number.is_named(name)), None)
