"""The subcommands of `megatron-coca evaluate`. The module of a task is imported only when it runs."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from megatron_coca.evaluation import options
from megatron_coca.evaluation.results import Result
from megatron_coca.support.plain_text import plain


def show(*results: Result) -> None:
    """Print results as the tables that a report shows, with one row for each result."""
    from megatron_coca.evaluation.report import tables_of_results

    print(plain(tables_of_results(results)), end="\n\n", flush=True)


@dataclass(frozen=True)
class Task:
    """One subcommand of `megatron-coca evaluate`.

    Attributes:
        help: description of the task in the command's help.
        add_arguments: function that declares the task's options.
        example: options for the example in the help.
        module: module of this package that defines `function`; imported only when the subcommand runs.
        function: name of the function that runs the task on the parsed options and returns the exit status.
        measures: whether `function` also takes `show`, which it calls with its results.
    """

    help: str
    add_arguments: Callable[[ArgumentParser], None]
    example: str
    module: str
    function: str = "run"
    measures: bool = True

    def run(self, args: Namespace) -> int:
        """Return the exit status. Raises one of the errors that `main` reports."""
        function = getattr(import_module(f"megatron_coca.evaluation.{self.module}"), self.function)
        return int(function(args, show) if self.measures else function(args))


CHECKPOINT = "--checkpoint runs/350M_roformer_coca"
MEASUREMENTS = {
    "perplexity": Task(
        "sliding-window perplexity of a checkpoint",
        options.add_perplexity_options,
        f"{CHECKPOINT} --windows 512,1024,2048 --stride 512 --output results",
        "tasks.perplexity",
    ),
    "longppl": Task(
        "perplexity of the tokens that need a long context, by length",
        options.add_longppl_options,
        f"{CHECKPOINT} --lengths 8192,16384 --evaluator models/llama-3.1-8b --data books --output results",
        "tasks.longppl",
    ),
    "passkey": Task(
        "retrieval of a number hidden in filler, by length",
        options.add_passkey_options,
        f"{CHECKPOINT} --lengths 512,1024,2048 --output results",
        "tasks.retrieval",
        "passkey",
    ),
    "recall": Task(
        "key-value recall by length and shift, and attention scores by head",
        options.add_recall_options,
        "--checkpoint runs/recall --output results",
        "tasks.recall",
    ),
    "needle": Task(
        "retrieval of a sentence hidden in text, by length and depth",
        options.add_needle_options,
        f"{CHECKPOINT} --lengths 512,1024,2048 --output results",
        "tasks.retrieval",
        "needle",
    ),
    "ruler": Task(
        "RULER-style retrieval of several facts or of a chain of facts",
        options.add_ruler_options,
        f"{CHECKPOINT} --tasks multi_key,variable_tracking --output results",
        "tasks.retrieval",
        "ruler",
    ),
    "lm-eval": Task(
        "tasks of lm-evaluation-harness",
        options.add_lm_eval_options,
        f"{CHECKPOINT} --tasks piqa,lambada_openai --output results",
        "tasks.lm_eval",
    ),
    "analyse": Task(
        "initial angles, score decay and entropy of a checkpoint's attention",
        options.add_analyse_options,
        f"{CHECKPOINT} --lengths 512,2048 --output results",
        "tasks.attention_analysis",
    ),
}
"""Tasks that measure a checkpoint and write result files. A suite can run any of them."""

TASKS = {
    **MEASUREMENTS,
    "speed": Task(
        "time and memory of position methods, side by side",
        options.add_speed_options,
        "--config configs/350M/roformer_coca.yml --lengths 512,2048 --methods rotary,coca",
        "tasks.speed",
    ),
    "report": Task(
        "a page of results, and figures, tables and numbers for papers",
        options.add_report_options,
        "results --output results/report",
        "report",
        measures=False,
    ),
    "suite": Task(
        "all tasks of a suite file on all of its checkpoints, and the report",
        options.add_suite_options,
        "configs/evaluation/checkpoint.yml --checkpoint CoCA=runs/350M_roformer_coca --output results/coca",
        "suite",
        measures=False,
    ),
}
