"""Settings of an engine, from a YAML file or from the name of an engine, and the command-line options that set them."""

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron_coca.support.errors import InputError
from megatron_coca.support.safe_yaml import YamlFault, read_yaml

EngineName = Literal["local", "slurm", "ray"]
NAMES: tuple[str, ...] = get_args(EngineName)
MOST_TASKS = 1 << 20
TaskCount = Annotated[int, Field(ge=1, le=MOST_TASKS)]

SUPPORTED: dict[str, tuple[str, ...]] = {
    "local": ("tasks", "workers", "cpus"),
    "slurm": ("tasks", "workers", "cpus", "gpus", "time", "partition", "sbatch_args"),
    "ray": ("tasks", "workers", "cpus", "gpus", "address"),
}
"""The keys that each engine supports, besides `engine`."""


class ClusterError(InputError):
    """Invalid settings of an engine, a missing library, or a scheduler that does not answer."""


class EngineSettings(BaseModel):
    """How to run the tasks of a command. The file of `--engine` has these keys.

    Attributes:
        engine: `local` (this machine), `slurm` or `ray`.
        tasks: number of tasks; None: one for each block, cell or result file.
        workers: largest number of tasks at the same time; None: as many as the engine has room for.
        cpus: cores of a task.
        gpus: GPUs of a task.
        time: time limit of a task, as sbatch reads it. Two minutes before the limit, the task saves and is requeued.
        partition: Slurm's partition.
        address: address of the Ray cluster; `auto` finds the cluster of this machine.
        sbatch_args: further options of sbatch, without their leading dashes. They override all other settings.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    engine: EngineName
    tasks: TaskCount | None = None
    workers: TaskCount | None = None
    cpus: TaskCount = 1
    gpus: Annotated[int, Field(ge=0, le=1024)] = 0
    time: str | None = None
    partition: str | None = None
    address: str = "auto"
    sbatch_args: dict[str, str | int] = {}


OPTIONS = {
    "tasks": (int, "N", "number of tasks; default: one for each block, cell or result file"),
    "cpus": (int, "N", "cores of a task; default: 1"),
    "gpus": (int, "N", "GPUs of a task; default: 0"),
    "time": (str, "TIME", "Slurm's time limit of a task, such as 12:00:00"),
    "partition": (str, "NAME", "Slurm's partition"),
    "address": (str, "ADDRESS", "address of the Ray cluster; default: auto"),
}
"""Options that replace keys of the settings: type, metavar and help."""


def add_engine_options(parser: ArgumentParser) -> None:
    """Declare `--engine` and the options that belong to it."""
    group = parser.add_argument_group("engine: run as many tasks on this machine or on a cluster (docs/cluster.md)")
    engine = f"{', '.join(NAMES)}, or a YAML file with the settings of one, such as configs/cluster/evaluate_slurm.yaml"
    group.add_argument("--engine", type=_name_or_file, metavar="NAME|FILE", help=engine)
    for name, (kind, metavar, text) in OPTIONS.items():
        group.add_argument(f"--{name}", type=kind, metavar=metavar, help=text)


def _name_or_file(text: str) -> str:
    if text not in NAMES and not text.endswith((".yml", ".yaml")):
        raise ArgumentTypeError(f"{text!r} is not one of {', '.join(NAMES)}, and not a .yml file")
    return text


def engine_of(options: Namespace) -> EngineSettings | None:
    """Return the settings that the options select, or None without `--engine`. Raises ClusterError."""
    given: dict[str, Any] = {name: value for name in OPTIONS if (value := getattr(options, name)) is not None}
    if options.engine is None:
        if given:
            raise ClusterError(f"--{next(iter(given))}: has no effect without --engine; add --engine, or leave it out")
        return None
    is_file = options.engine not in NAMES
    place = options.engine if is_file else "--engine"
    values = _read(Path(options.engine)) if is_file else {"engine": options.engine}
    try:
        settings = EngineSettings.model_validate(values | given)
    except ValidationError as error:
        raise ClusterError("\n".join(_problems(place, error))) from error
    known = SUPPORTED[settings.engine]
    for name in values | given:
        if name != "engine" and name not in known:
            raise ClusterError(
                f"{place}: {name}: not supported by the engine {settings.engine}; remove it, or use one of "
                f"{', '.join(known)}"
            )
    return settings


def _read(path: Path) -> dict[str, Any]:
    try:
        values = read_yaml(path)
    except YamlFault as error:
        raise ClusterError(f"{error.at(str(path))}; give the YAML file of an engine") from error
    except (OSError, ValueError) as error:
        raise ClusterError(f"{path}: cannot be read ({error}); give the YAML file of an engine") from error
    if not isinstance(values, dict):
        raise ClusterError(f"{path}: has no keys; set at least engine: {' or '.join(NAMES)}")
    return values


def _problems(place: str, error: ValidationError) -> list[str]:
    """Return a line for each invalid key."""
    lines = []
    for problem in error.errors():
        name = ".".join(str(part) for part in problem["loc"] if part not in ("str", "int"))
        remedy = 'put it in quotes, such as "12:00:00"' if name == "time" else f"known keys: {', '.join(_KEYS)}"
        lines.append(f"{place}: {name}: {problem['msg'].lower()}; {remedy}")
    return list(dict.fromkeys(lines))


_KEYS = tuple(EngineSettings.model_fields)


def without_engine(arguments: Sequence[str]) -> list[str]:
    """Return a command line without the options of `add_engine_options`: the command line of a task."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    add_engine_options(parser)
    return parser.parse_known_args(list(arguments))[1]
