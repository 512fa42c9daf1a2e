"""The subcommands of `megatron-coca evaluate`. The module of a task is imported only when it runs."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from megatron_coca.evaluation import options
from megatron_coca.evaluation.declaration import Task
from megatron_coca.evaluation.results import Result
from megatron_coca.evaluation.tasks import TASKS
from megatron_coca.support.plain_text import plain


def show(*results: Result) -> None:
    """Print results as the tables that a report shows, with one row for each result."""
    from megatron_coca.evaluation.report import tables_of_results

    print(plain(tables_of_results(results)), end="\n\n", flush=True)


@dataclass(frozen=True)
class Subcommand:
    """One subcommand of `megatron-coca evaluate`.

    Attributes:
        help: description in the command's help.
        add_arguments: function that declares the options.
        example: options for the example in the help.
        function: the function that runs on the parsed options and returns the exit status, as `module.function` of this
            package. The module is imported only when the subcommand runs.
        shows: whether the function also takes `show`, which it calls with its results.
    """

    help: str
    add_arguments: Callable[[ArgumentParser], None]
    example: str
    function: str
    shows: bool = False

    def run(self, args: Namespace) -> int:
        """Return the exit status. Raises one of the errors that `main` reports."""
        module, _, name = self.function.rpartition(".")
        function = getattr(import_module(f"megatron_coca.evaluation.{module}"), name)
        return int(function(args, show) if self.shows else function(args))


OTHERS = {
    "report": Subcommand(
        "a page of results, and figures, tables and numbers for papers",
        options.add_report_options,
        "results --output results/report",
        "report.run",
    ),
    "suite": Subcommand(
        "all tasks of a suite file on all of its checkpoints, and the report",
        options.add_suite_options,
        "configs/evaluation/checkpoint.yml --checkpoint CoCA=runs/350M_roformer_coca --output results/coca",
        "suite.run",
    ),
}
"""The subcommands that measure nothing themselves."""


def measurements() -> dict[str, Task]:
    """Return the tasks that measure a checkpoint. A suite can run any of them."""
    return {name: task for name, task in TASKS.items() if task.of_checkpoint}


def subcommands() -> dict[str, Subcommand]:
    """Return all subcommands, in the order of the help."""
    tasks = {
        name: Subcommand(task.help, task.add_options, task.example, f"tasks.{task.measure}", shows=True)
        for name, task in TASKS.items()
    }
    return tasks | OTHERS
