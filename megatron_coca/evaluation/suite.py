"""`megatron-coca evaluate suite`: many tasks on many checkpoints, listed in one YAML file, and a report of results."""

import json
import shlex
import sys
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NoReturn

from pydantic import BeforeValidator, Field, field_validator

from megatron_coca.checkpoints import CheckpointError, open_checkpoint
from megatron_coca.config import ConfigError, split_inputs
from megatron_coca.evaluation.labels import full_label, slug
from megatron_coca.evaluation.multiples import changes_in_tokens, in_tokens, is_multiple
from megatron_coca.evaluation.options import resolve_device
from megatron_coca.evaluation.report.build import build_report
from megatron_coca.evaluation.results import EvaluationError, Record, check_writable, read_yaml_file, validated
from megatron_coca.evaluation.tasks import measurements
from megatron_coca.support.console import write
from megatron_coca.support.plain_text import plain
from megatron_coca.support.safe_yaml import as_list
from megatron_coca.work.engines import run as on_engine
from megatron_coca.work.processes import PROGRAM, run_to_its_end
from megatron_coca.work.settings import EngineSettings, without_engine
from megatron_coca.work.statuses import Failure, is_temporary, signal_of, status_of
from megatron_coca.work.tasks import CommandTask

SET_BY_SUITE = ("help", "output", "checkpoint", "label", "variant", "set", "device", "dtype", "jobs", "part")
"""Options that the tasks of a suite must not set, because the suite sets them."""

ANY = "any"
"""The key in a suite's `checkpoints` that has the settings for checkpoints which only the command line names."""


TextList = Annotated[list[str], BeforeValidator(as_list)]
"""A list of strings. A single string becomes a list of one string."""


class CheckpointEntry(Record):
    """A checkpoint. `set` has the overrides for all variants; `variants` maps a variant's name to its own changes."""

    path: str | None = None
    set: TextList = []
    variants: dict[str, TextList | None] = {"": None}


class SuiteFile(Record):
    """A suite. `tasks` maps subcommands to their options, which have the same names as on the command line.

    To run a task twice, add a word after the subcommand: "perplexity", "perplexity repeated". The option `variants`
    limits a task to the named variants.
    """

    title: str
    checkpoints: dict[str, CheckpointEntry]
    tasks: dict[str, dict[str, Any] | None] = Field(min_length=1)

    @field_validator("checkpoints", mode="before")
    @classmethod
    def _paths(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        return {name: {"path": entry} if isinstance(entry, str) else entry or {} for name, entry in given.items()}


@dataclass(frozen=True)
class Command:
    """One `megatron-coca evaluate` command, for the keys `task` and `checkpoint` of a suite, with its result files."""

    task: str
    checkpoint: str
    arguments: tuple[str, ...]
    files: tuple[Path, ...]

    @property
    def name(self) -> str:
        return f"{self.task} of {self.checkpoint}"


def run(args: Namespace) -> int:
    """Run every command of the suite, write the report, and return the exit status.

    The status is 2 if anything is missing. It is 1 if a command was killed, because another run may then succeed.
    """
    suite, planned, unusable = _plan(args)
    page = args.output / "report" / "report.html"
    check_writable(page)
    resolve_device(args.device)
    failures = [Failure(problem) for problem in unusable]
    failures += run_commands([command for command in planned if not args.only or command.task in args.only])
    measured = [file for command in planned for file in command.files if file.is_file()]
    if measured and args.part is None:
        print(plain(f"\n{build_report(measured, page.parent, suite.title)}\n\n{page} is written"))
    for failure in failures:
        print(plain(f"megatron-coca evaluate: {failure.reason}"), file=sys.stderr)
    return status_of(failures)


def run_on(engine: EngineSettings, args: Namespace, given: Sequence[str]) -> int:
    """Run the suite in many tasks of an engine, then merge their results and write the report. Return the status."""
    if args.part is not None or args.jobs > 1:
        raise EvaluationError("--engine: not supported with --part and --jobs; leave them out")
    _, planned, _ = _plan(args)
    parts = engine.tasks or sum(len(command.files) for command in planned)
    line = ("evaluate", *without_engine(given))
    step, finish = CommandTask(line, Path.cwd(), parts, tuple(range(parts))), CommandTask(line, Path.cwd())
    return on_engine(engine, step, finish, args.output.with_name(f".{args.output.name}.tasks"))


def _plan(args: Namespace) -> tuple[SuiteFile, list[Command], list[str]]:
    """Return the suite, its commands, and a line for each unusable checkpoint. Raises EvaluationError."""
    suite = with_checkpoints(read_suite(args.suite), dict(args.checkpoint))
    unknown = sorted(set(args.only or ()) - suite.tasks.keys())
    if unknown:
        raise EvaluationError(f"--only {unknown[0]}: unknown task; name one of {', '.join(suite.tasks)}")
    check_variants(suite.tasks, (entry.variants for entry in suite.checkpoints.values()))
    lengths, unusable = training_lengths(suite)
    shared = ["--jobs", str(args.jobs)] if args.jobs > 1 else []
    shared += ["--part", f"{args.part[0] + 1}/{args.part[1]}"] if args.part is not None else []
    planned = plan_commands(suite, lengths, args.output / "results", args.device, args.dtype, shared)
    return suite, planned, [f"{name}: {problem}" for name, problem in unusable.items()]


def read_suite(path: Path) -> SuiteFile:
    """Read and validate a suite. Raises EvaluationError."""
    return validated(path, read_yaml_file(path), SuiteFile, "a suite")


def with_checkpoints(suite: SuiteFile, paths: Mapping[str, str]) -> SuiteFile:
    """Apply `--checkpoint`: set the path of a checkpoint in the suite, or add a checkpoint with the settings of `any`.

    Raises EvaluationError for a checkpoint without a path and for an unknown name.
    """
    entries = {name: entry for name, entry in suite.checkpoints.items() if name != ANY}
    for name, path in paths.items():
        template = entries.get(name) or suite.checkpoints.get(ANY)
        if template is None:
            raise EvaluationError(f"--checkpoint {name}: unknown checkpoint; name one of {', '.join(entries)}")
        entries[name] = template.model_copy(update={"path": path})
    without_path = [name for name, entry in entries.items() if entry.path is None]
    if without_path or not entries:
        names = ", ".join(without_path) or "the suite"
        raise EvaluationError(f"--checkpoint: no path for {names}; add --checkpoint LABEL=DIR")
    return suite.model_copy(update={"checkpoints": entries})


def training_lengths(suite: SuiteFile) -> tuple[dict[str, int], dict[str, str]]:
    lengths, problems = {}, {}
    for name, entry in suite.checkpoints.items():
        try:
            changes = [*entry.set, *(change for given in entry.variants.values() for change in given or ())]
            files, keys = split_inputs(changes)
            opened = open_checkpoint(str(entry.path), verify=False, overrides=keys, files=files)
            lengths[name] = opened.trained.model.seq_length
        except (CheckpointError, ConfigError) as error:
            problems[name] = str(error)
    return lengths, problems


def plan_commands(
    suite: SuiteFile, lengths: Mapping[str, int], results: Path, device: str, dtype: str, shared: Sequence[str] = ()
) -> list[Command]:
    """Return the commands of a suite, task by task. Their result files are in the folder `results`.

    `lengths` maps the checkpoints to evaluate to their training lengths. `shared` has the options with which every
    command divides its work among processes.

    Raises EvaluationError for unknown tasks and options, and for labels that lead to the same file name.
    """
    planned: list[Command] = []
    for name, options in suite.tasks.items():
        task, _, word = name.partition(" ")
        if task not in measurements():
            raise EvaluationError(f"tasks.{name}: unknown task; known: {', '.join(sorted(measurements()))}")
        for key in options or {}:
            if key.replace("_", "-") in SET_BY_SUITE:
                raise EvaluationError(f"tasks.{name}.{key}: is set by the suite; remove it")
        folder = results / slug(word) if word.strip() else results
        only, options = task_variants(options)
        for label, length in lengths.items():
            entry = suite.checkpoints[label]
            variants = {name: changes for name, changes in entry.variants.items() if only is None or name in only}
            if not variants:
                continue
            arguments = [task, "--checkpoint", str(entry.path), "--label", label]
            arguments += ["--device", device, "--dtype", dtype, "--output", str(folder)]
            arguments += shared
            arguments += ["--set", *changes_in_tokens(entry.set, length)] if entry.set else []
            for variant, changes in variants.items():
                arguments += ["--variant", variant, *changes_in_tokens(changes or [], length)]
            arguments += option_arguments(name, options, length)
            files = [folder / f"{task}_{slug(full_label(label, variant))}.json" for variant in variants]
            planned.append(Command(name, label, tuple(arguments), tuple(files)))
    owners: dict[Path, str] = {}
    for file, checkpoint in ((file, command.checkpoint) for command in planned for file in command.files):
        if file in owners:
            raise EvaluationError(
                f"checkpoints {owners[file]} and {checkpoint}: both would write {file.name}; "
                "rename the checkpoints, their variants or the `tasks` so that the names are more distinct"
            )
        owners[file] = checkpoint
    return planned


def task_variants(options: Mapping[str, Any] | None) -> tuple[list[str] | None, dict[str, Any]]:
    """Return the variants to which a task is limited, or None for all variants, and the task's other options."""
    others = dict(options or {})
    return others.pop("variants", None), others


def check_variants(tasks: Mapping[str, Mapping[str, Any] | None], variants: Iterable[Iterable[str]]) -> None:
    """Raise EvaluationError if a task's option `variants` is not a list of known names.

    `variants` contains the variant names of each checkpoint.
    """
    known = dict.fromkeys(name for names in variants for name in names)
    for task, options in tasks.items():
        only, _ = task_variants(options)
        if not isinstance(only, list | None) or (unknown := [name for name in only or () if name not in known]):
            names = ", ".join(json.dumps(name) for name in known)
            wrong = json.dumps(only if not isinstance(only, list) else unknown[0])
            raise EvaluationError(f"tasks.{task}.variants: {wrong}: must be a list of variants; known: {names}")


class TaskParser(ArgumentParser):
    """A parser that raises an EvaluationError instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise EvaluationError(message)


@cache
def task_parser(task: str) -> TaskParser:
    """Return the parser of a task that measures a checkpoint. It is cached, because a grid needs it for every model."""
    parser = TaskParser(allow_abbrev=False)
    measurements()[task].add_options(parser)
    return parser


def option_arguments(task: str, options: Mapping[str, Any] | None, length: int) -> list[str]:
    """Return a task's options as command-line arguments; "4L" becomes four times the training length `length`.

    Raises EvaluationError for unknown options.
    """
    known: dict[str, Action] = task_parser(
        task.partition(" ")[0]
    )._option_string_actions  # argparse has no public API for this

    def text(value: Any) -> str:
        if isinstance(value, Mapping):
            return json.dumps(value)
        return in_tokens(value, length) if is_multiple(value) else str(value)

    def option(key: str, value: Any) -> list[str]:
        name = f"--{key.replace('_', '-')}"
        if name not in known:
            names = ", ".join(sorted(other.removeprefix("--") for other in known if other.startswith("--")))
            raise EvaluationError(f"tasks.{task}.{key}: unknown option; known: {names}")
        if value is False and known[name].nargs == "?":  # an option that is true by default
            return [name, "false"]
        if value is None or value is False:
            return []
        if value is True:
            return [name]
        if isinstance(value, list) and any(isinstance(item, list) for item in value):  # repeat the option for each list
            return [argument for item in value for argument in option(key, item)]
        texts = [text(item) for item in (value if isinstance(value, list) else [value])]
        return [name, *texts] if known[name].nargs else [name, ",".join(texts)]

    return [argument for key, value in (options or {}).items() for argument in option(key, value)]


def run_commands(commands: Sequence[Command]) -> list[Failure]:
    """Run the commands in order, and return a failure for each command that did not complete."""
    failures = []
    for number, command in enumerate(commands, 1):
        write(f"{number} of {len(commands)}: {command.name}")
        print(plain(f"\n$ {shlex.join(['megatron-coca', 'evaluate', *command.arguments])}"), flush=True)
        status = run_to_its_end([*PROGRAM, "evaluate", *command.arguments])
        if status != 0:  # with status 2, the command has printed the missing entries
            reason = "incomplete; see its messages above" if status == 2 else describe_exit(status)
            failures.append(Failure(f"{command.name}: {reason}", is_temporary(status)))
    return failures


def describe_exit(status: int) -> str:
    """Return a description of an exit status. `status` has the form in which a shell reports it."""
    name = signal_of(status)
    if name is None:
        return f"ended with status {status}"
    return f"killed by {name}" + (" (possibly because the host's memory was exhausted)" if name == "SIGKILL" else "")
