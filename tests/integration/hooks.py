"""Hooks disturb a training process at chosen visits of a named point in the code."""

import errno
import importlib
import math
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HOOKED = (str(Path(__file__).with_name("hooked_train.py")),)
"""In the place of train.py; the hooks lie in the variable HOOKS, as JSON."""


class Hook(NamedTuple):
    """`action` (of ACTIONS) at the `visits` of `point` (of POINTS), counted from 1; none for every visit.

    `ranks` are those that it happens on; none for all.
    """

    point: str
    action: str
    visits: Sequence[int] = (1,)
    ranks: Sequence[int] = ()


class Point(NamedTuple):
    """A function, by its module and its name there, before or after it has run."""

    module: str
    name: str
    after: bool = False


ENGINE = "megatron_coca.training.engine"
SAVING, NATIVE = "megatron_coca.training.checkpointing.saving", "megatron_coca.checkpoints.native"
WRITE = f"{NATIVE}.write"
POINTS: dict[str, Point] = {
    "forward": Point("deepspeed.runtime.engine", "DeepSpeedEngine.forward", after=True),
    "backward": Point("deepspeed.runtime.engine", "DeepSpeedEngine.backward"),
    "backward done": Point("deepspeed.runtime.engine", "DeepSpeedEngine.backward", after=True),
    "native backward done": Point(
        "megatron_coca.training.engine.native_engine", "NativeEngine._run_micro_batch", after=True
    ),
    "step": Point("megatron_coca.training.trainer", "Trainer.train_step"),
    "stage done": Point("megatron_coca.model.pipeline", "PipelineStage.forward", after=True),
    "evaluation": Point("megatron_coca.training.trainer", "Trainer._mean_loss"),
    "background group": Point(SAVING, "Checkpoints.__init__"),
    "restore": Point(SAVING, "Checkpoints.restore"),
    "snapshot": Point(SAVING, "Checkpoints._snapshot", after=True),
    "save begun": Point(NATIVE, "begin", after=True),
    "own files": Point(SAVING, "_write_own"),
    "own files done": Point(SAVING, "_write_own", after=True),
    "weights": Point(SAVING, "write_safetensors"),
    "weights done": Point(SAVING, "write_safetensors", after=True),
    "commit": Point(NATIVE, "commit"),
    "manifest done": Point(WRITE, "write_json", after=True),
    "renamed": Point(WRITE, "write_file"),
    "latest done": Point(WRITE, "write_file", after=True),
    "removal": Point("shutil", "rmtree"),
    "uploaded file": Point("megatron_coca.support.remote_files", "RemoteFiles.put", after=True),
    "transfer": Point("megatron_coca.support.remote_files", "RemoteFiles._attempt"),
    "clock": Point("time", "time", after=True),
    "host": Point("socket", "gethostname", after=True),
}

Action = Callable[[Callable[..., Any], Point, tuple[Any, ...], dict[str, Any]], Any]
"""Calls a function that a Point names, with arguments, and does what it is there for before or after."""


def _does(effect: Callable[[], object]) -> Action:
    def act(function: Callable[..., Any], point: Point, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if not point.after:
            effect()
        result = function(*given, **named)
        if point.after:
            effect()
        return result

    return act


def _changes(change: Callable[[Any], Any]) -> Action:
    """`change` of a function's result, or before the function of the first argument after self."""

    def act(function: Callable[..., Any], point: Point, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if point.after:
            return change(function(*given, **named))
        return function(given[0], change(given[1]), *given[2:], **named)

    return act


def _away(attempts: float) -> Action:
    """Uploads that fail for a number of attempts each, as if the object store did not answer."""

    def act(function: Callable[..., Any], point: Point, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        store, problem, transfer = given
        failures = 0

        def fail_first() -> Any:
            nonlocal failures
            failures += 1
            if failures <= attempts:
                raise TimeoutError("no answer")
            return transfer()

        return function(store, problem, fail_first if "cannot be uploaded" in problem else transfer)

    return act


def _signals(*numbers: int) -> Action:
    return _does(lambda: [os.kill(os.getpid(), number) for number in numbers])


def _fail() -> None:
    raise RuntimeError("a fault that nobody foresaw")


def _fill_disk() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _spin() -> None:
    while True:
        pass


def _wait() -> None:
    while True:
        time.sleep(1.0)


ACTIONS: dict[str, Action] = {
    "kill": _signals(signal.SIGKILL),
    "suspend": _signals(signal.SIGSTOP),
    "interrupt": _signals(signal.SIGINT),
    "terminate twice": _signals(signal.SIGTERM, signal.SIGTERM),
    "ask to leave": _signals(signal.SIGUSR1),
    "raise": _does(_fail),
    "full disk": _does(_fill_disk),
    "no answer": _away(math.inf),
    "late answer": _away(2),
    "spin": _does(_spin),
    "wait": _does(_wait),
    "nan": _changes(lambda value: value * float("nan")),
    "inf": _changes(lambda value: value * float("inf")),
    "spike": _changes(lambda value: value * 1e3),
    "jump": _changes(lambda seconds: seconds + random.Random(seconds).choice((-1e7, -1e3, 1e3, 1e7))),
    "rename": _changes(lambda name: f"{name}-{os.getpid()}"),
}


def install(hooks: Sequence[Hook], rank: int) -> None:
    """Put the hooks into the modules of this process, which is `rank`."""
    for hook in hooks:
        if rank in (hook.ranks or [rank]):
            _install(hook, POINTS[hook.point], ACTIONS[hook.action])


def found(point: Point) -> tuple[Any, str]:
    """Return the module or class that has the function of a point, and the function's name there."""
    owner: Any = importlib.import_module(point.module)
    *path, name = point.name.split(".")
    for step in path:
        owner = getattr(owner, step)
    return owner, name


def _install(hook: Hook, point: Point, action: Action) -> None:
    owner, name = found(point)
    function, visits = getattr(owner, name), 0

    def hooked(*given: Any, **named: Any) -> Any:
        nonlocal visits
        visits += 1
        if hook.visits and visits not in hook.visits:
            return function(*given, **named)
        return action(function, point, given, named)

    setattr(owner, name, hooked)
