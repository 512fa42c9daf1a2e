"""Many tasks over many checkpoints, from one YAML file, and their report."""

import json
import re
import shlex
import signal
import subprocess
import sys
import threading
from argparse import Action, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from megatron_coca.checkpoints import CheckpointError, open_checkpoint
from megatron_coca.config import ConfigError
from megatron_coca.evaluation.options import DTYPES, full_label, resolve_device, slug
from megatron_coca.evaluation.report import build_report
from megatron_coca.evaluation.results import EvaluationError, check_writable, write_atomically
from megatron_coca.evaluation.subject import Task
from megatron_coca.safe_yaml import YamlFault, read_yaml

MULTIPLES = re.compile(r"\d+L(,\d+L)*")
"""Lengths as multiples of the training length: "4L", or "1L,4L"."""

OWN = ("help", "output", "checkpoint", "label", "variant", "set", "device", "dtype")
"""Options of a task of checkpoints that the suite gives itself."""

RESULTS, REPORT = "results", "report"
"""Folders in the suite's output."""

ANY = "any"
"""The name in a suite's `checkpoints` that stands for whatever checkpoint the command line names."""

Changes = dict[str, list[str] | None]


class Strict(BaseModel):
    """Base of what a suite's file holds."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class CheckpointEntry(Strict):
    """A checkpoint, and the ways in which its weights are used: what is added to its name, and the changes."""

    path: str | None = None
    set: list[str] = Field(default_factory=list)
    variants: Changes = Field(default_factory=lambda: {"": None})


class SuiteFile(Strict):
    """A suite: `tasks` are the subcommands with their options, named as on the command line.

    A task that is run in several ways has an entry for each, told apart by what follows the subcommand: "perplexity",
    "perplexity repeated".
    """

    title: str
    checkpoints: dict[str, CheckpointEntry]
    tasks: dict[str, dict[str, Any] | None] = Field(min_length=1)

    @field_validator("checkpoints", mode="before")
    @classmethod
    def _paths(cls, given: Any) -> Any:
        """A checkpoint may be its path alone."""
        if not isinstance(given, Mapping):
            return given
        return {name: {"path": entry} if isinstance(entry, str) else entry or {} for name, entry in given.items()}


@dataclass(frozen=True)
class Command:
    """One call of evaluate.py: the entry of `tasks`, the name of the checkpoint (None: of no checkpoint), the arguments,
    and the result files that it writes.
    """

    task: str
    checkpoint: str | None
    arguments: tuple[str, ...]
    files: tuple[Path, ...]


def read_suite(path: Path) -> SuiteFile:
    """Raises EvaluationError for a file that cannot be read, or is no suite."""
    try:
        return SuiteFile.model_validate(read_yaml(path))
    except OSError as error:
        raise EvaluationError(f"{path}: cannot be read ({error.strerror})") from error
    except YamlFault as error:
        raise EvaluationError(error.at(str(path))) from error
    except UnicodeDecodeError as error:
        raise EvaluationError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, each['loc'])) or 'file'}: {each['msg']}" for each in error.errors()]
        raise EvaluationError(f"{path}: is not a suite: {'; '.join(lines)}") from error


def with_checkpoints(suite: SuiteFile, named: Mapping[str, str]) -> SuiteFile:
    """The suite with checkpoints named on the command line: those it knows are found there, others are used as its
    `any` says. Raises EvaluationError where a checkpoint stays without a path, or a name means nothing.
    """
    entries = {name: entry for name, entry in suite.checkpoints.items() if name != ANY}
    for name, path in named.items():
        pattern = entries.get(name) or suite.checkpoints.get(ANY)
        if pattern is None:
            raise EvaluationError(f"--checkpoint {name}: the suite knows {', '.join(entries)}; name one of them")
        entries[name] = pattern.model_copy(update={"path": path})
    homeless = [name for name, entry in entries.items() if entry.path is None]
    if homeless or not entries:
        raise EvaluationError(f"no checkpoint for {', '.join(homeless) or 'the suite'}: name --checkpoint LABEL=DIR")
    return suite.model_copy(update={"checkpoints": entries})


@dataclass(frozen=True)
class Place:
    """Where a suite is run: the folder of all that it writes, the device and the dtype of the weights."""

    output: Path
    device: str
    dtype: str

    @property
    def results(self) -> Path:
        """The folder of the result files."""
        return self.output / RESULTS


def training_lengths(suite: SuiteFile) -> tuple[dict[str, int], dict[str, str]]:
    """The training length of every checkpoint by its name, and what is wrong with those that cannot be used."""
    lengths, problems = {}, {}
    for name, entry in suite.checkpoints.items():
        try:
            lengths[name] = open_checkpoint(str(entry.path), verify=False).trained.model.seq_length
        except (CheckpointError, ConfigError) as error:
            problems[name] = str(error)
    return lengths, problems


def commands(suite: SuiteFile, tasks: Mapping[str, Task], lengths: Mapping[str, int], place: Place) -> list[Command]:
    """Every call that the suite stands for, task by task, for the checkpoints that have a length.

    Raises EvaluationError for tasks and options that do not exist, and for labels that would share a file.
    """
    planned: list[Command] = []
    for name, options in suite.tasks.items():
        task, folder = _entry(name, place)
        parser = _parser(tasks, name, task)
        _check_options(name, options or {}, OWN if tasks[task].of_checkpoint else ("help", "output", "device"))
        if not tasks[task].of_checkpoint:
            file = folder / f"{task}.json"
            arguments = (task, "--device", place.device, "--output", str(file), *_options(name, parser, options, None))
            planned.append(Command(name, None, arguments, (file,)))
            continue
        for label, length in lengths.items():
            arguments, files = _subject(task, label, suite.checkpoints[label], place, folder)
            planned.append(Command(name, label, (*arguments, *_options(name, parser, options, length)), files))
    _check_files(planned)
    return planned


def _entry(name: str, place: Place) -> tuple[str, Path]:
    """The task of an entry of `tasks`, and the folder of its results: one of its own if the entry has a further name."""
    task, _, further = name.partition(" ")
    return task, place.results / slug(further) if further.strip() else place.results


def _check_options(task: str, options: Mapping[str, Any], own: Sequence[str]) -> None:
    for key in options:
        if key.replace("_", "-") in own:
            raise EvaluationError(f"tasks.{task}.{key}: is given by the suite itself; leave it out")


def _check_files(planned: Sequence[Command]) -> None:
    owners: dict[Path, str | None] = {}
    for command in planned:
        for file in command.files:
            if file in owners:
                raise EvaluationError(
                    f"checkpoints {owners[file]} and {command.checkpoint}: their results would both be in {file.name}; "
                    "name them, their variants or the entries of `tasks` more differently"
                )
            owners[file] = command.checkpoint


def _parser(tasks: Mapping[str, Task], name: str, task: str) -> ArgumentParser:
    if task not in tasks:
        raise EvaluationError(f"tasks.{name}: there is no such task; known: {', '.join(sorted(tasks))}")
    parser = ArgumentParser(allow_abbrev=False)
    tasks[task].add_arguments(parser)
    return parser


def _subject(
    task: str, label: str, entry: CheckpointEntry, place: Place, folder: Path
) -> tuple[tuple[str, ...], tuple[Path, ...]]:
    """The arguments that say which checkpoint, used how, and the files in `folder` that come out of it."""
    arguments = [task, "--checkpoint", str(entry.path), "--label", label]
    arguments += ["--device", place.device, "--dtype", place.dtype, "--output", str(folder)]
    arguments += ["--set", *entry.set] if entry.set else []
    for name, changes in entry.variants.items():
        arguments += ["--variant", name, *(changes or [])]
    labels = [full_label(label, name) for name in entry.variants]
    return tuple(arguments), tuple(folder / f"{task}_{slug(each)}.json" for each in labels)


def _options(task: str, parser: ArgumentParser, options: Mapping[str, Any] | None, length: int | None) -> list[str]:
    return [part for key, value in (options or {}).items() for part in _option(task, parser, key, value, length)]


def _option(task: str, parser: ArgumentParser, key: str, value: Any, length: int | None) -> list[str]:
    """An option of the file as arguments. Raises EvaluationError for one that the task does not have."""
    known: dict[str, Action] = parser._option_string_actions  # noqa: SLF001 argparse tells it nowhere else
    name = f"--{key.replace('_', '-')}"
    if name not in known:
        names = ", ".join(sorted(each.removeprefix("--") for each in known if each.startswith("--")))
        raise EvaluationError(f"tasks.{task}.{key}: there is no such option; known: {names}")
    if value is None or value is False:
        return []
    if value is True:
        return [name]
    if isinstance(value, list) and any(isinstance(each, list) for each in value):
        return [part for each in value for part in _option(task, parser, key, each, length)]
    texts = [_text(f"tasks.{task}.{key}", each, length) for each in (value if isinstance(value, list) else [value])]
    return [name, *texts] if known[name].nargs else [name, ",".join(texts)]


def _text(place: str, value: Any, length: int | None) -> str:
    """A value as on the command line, "4L" as a number of tokens."""
    if not isinstance(value, str) or not MULTIPLES.fullmatch(value):
        return str(value)
    if length is None:
        raise EvaluationError(f"{place}: {value} is a multiple of a training length, and this task has no checkpoint")
    return ",".join(str(int(part.removesuffix("L")) * length) for part in value.split(","))


INCOMPLETE = 2
"""The exit status of a command that told by itself what is missing."""


def run_commands(commands: Iterable[Command]) -> list[str]:
    """Runs one command after another; returns one line for each that did not end well."""
    problems = []
    for command in commands:
        if command.checkpoint is None and all(file.is_file() for file in command.files):
            print(f"# {command.task}: {command.files[0]} is there already")
            continue
        print(f"\n$ {shlex.join(['python', 'evaluate.py', *command.arguments])}", flush=True)
        status = run_to_its_end([sys.executable, "-m", "megatron_coca.evaluation", *command.arguments])
        what = f"{command.task} of {command.checkpoint}" if command.checkpoint else command.task
        if status == INCOMPLETE:
            problems.append(f"{what}: incomplete, see what it said")
        elif status != 0:
            problems.append(f"{what}: {how_it_ended(status)}")
            note_failure([file for file in command.files if file.is_file()], how_it_ended(status))
    return problems


def run_to_its_end(command: Sequence[str]) -> int:
    """The exit status of a process that does not outlive this one, unless this one is killed outright."""
    before = (
        signal.signal(signal.SIGTERM, _interrupt) if threading.current_thread() is threading.main_thread() else None
    )
    process = subprocess.Popen(command)
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def how_it_ended(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"ended with status {status}"
    name = signal.Signals(-status).name
    return f"killed by {name}" + (" (the host's memory may not have sufficed)" if name == "SIGKILL" else "")


def note_failure(files: Sequence[Path], reason: str) -> None:
    """Write into the last of the result files that a command began why it is not complete: those before it are."""
    if not files:
        return
    try:
        content: Mapping[str, Any] = json.loads(files[-1].read_bytes())
    except ValueError as error:
        raise EvaluationError(f"{files[-1]}: is not JSON ({error}); remove it") from error
    missing = [each for each in content.get("missing", []) if each.get("at") != "all"]
    missing.append({"at": "all", "kind": "failed", "reason": reason})
    text = json.dumps({**content, "missing": missing}, indent=2, ensure_ascii=False)
    write_atomically(files[-1], f"{text}\n".encode())


def label_and_path(text: str) -> tuple[str, str]:
    """An argparse type: "RoFormer + CoCA=runs/coca"."""
    label, equals, path = text.rpartition("=")
    if not (label and equals and path):
        raise ArgumentTypeError(f"{text!r} is not LABEL=DIR")
    return label, path


def add_arguments(parser: ArgumentParser) -> None:
    """The options of the subcommand."""
    add = parser.add_argument
    add("suite", type=Path, metavar="SUITE.yml", help="checkpoints and tasks; configs/evaluation/ has some")
    add("--output", required=True, type=Path, metavar="DIR", help="gets results/ and report/; a second call goes on")
    named = "a checkpoint of the suite, or another name where the suite takes any; give it once for each"
    add("--checkpoint", type=label_and_path, action="append", default=[], metavar="LABEL=DIR", help=named)
    add("--only", nargs="+", metavar="TASK", help="of the entries of the suite's tasks only these")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--dtype", default="float32", choices=DTYPES, help="of weights and computation")


def run_suite(args: Namespace, tasks: Mapping[str, Task]) -> int:
    """Runs every command of the suite and writes the report; 2 where something is missing."""
    suite = with_checkpoints(read_suite(args.suite), dict(args.checkpoint))
    unknown = sorted(set(args.only or ()) - suite.tasks.keys())
    if unknown:
        raise EvaluationError(f"--only {unknown[0]}: the suite has {', '.join(suite.tasks)}")
    page = args.output / REPORT / "report.html"
    check_writable(page)
    resolve_device(args.device)
    lengths, unusable = training_lengths(suite)
    planned = commands(suite, tasks, lengths, Place(args.output, args.device, args.dtype))
    problems = [f"{name}: {problem}" for name, problem in unusable.items()]
    problems += run_commands(command for command in planned if not args.only or command.task in args.only)
    measured = [file for command in planned for file in command.files if file.is_file()]
    if measured:
        print(f"\n{build_report(measured, page.parent, suite.title)}\n\n{page} is written")
    for problem in problems:
        print(f"evaluate.py: {problem}", file=sys.stderr)
    return 2 if problems else 0
