"""Training runs one after the other, each from the weights of the one before it."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_coca.checkpoints import CheckpointError, native, open_checkpoint
from megatron_coca.checkpoints.object_store import save_folder
from megatron_coca.config import Config, ConfigError, load_config
from megatron_coca.training.launch.processes import CaughtSignals, LocalProcess, supervise
from megatron_coca.training.resume import differing_run

Start = Callable[[Sequence[str]], int]
"""Runs a command line and gives its exit status."""


@dataclass(frozen=True)
class ChainedRun:
    """One run of a chain: its name, what train.py is given, and what that amounts to."""

    name: str
    arguments: tuple[str, ...]
    config: Config

    @property
    def save(self) -> Path:
        """Where its checkpoints are."""
        folder = save_folder(self.config.checkpoint)
        assert folder is not None, "every run of a chain names one"
        return folder

    @property
    def reached(self) -> int:
        """The step of its newest checkpoint, 0 where there is none."""
        return max(native.steps(self.save), default=0)

    @property
    def finished(self) -> bool:
        """Whether the checkpoint of its last step is there."""
        return self.reached == self.config.schedule.train_iters

    def refuse_another(self) -> None:
        """Raise a CheckpointError where what is in its folder is not of this run: has other keys, goes further, or began
        with other weights than those that `load` holds now.
        """
        if not self.reached:
            return
        folder = native.step_folder(self.save, self.reached)
        problems = differing_run(load_config([folder / native.CONFIG]), self.config)
        if self.reached > (self.config.schedule.train_iters or 0):
            problems.append(f"train_iters (reached {self.reached}, now {self.config.schedule.train_iters})")
        if problems:
            raise CheckpointError(
                f"{folder}: is of another run than {self.name}: {', '.join(problems)}; restore these, or move {self.save} away"
            )
        self._refuse_other_weights(folder)

    def _refuse_other_weights(self, folder: Path) -> None:
        began, load = native.read_json(folder / native.META).get("origin"), self.config.checkpoint.load
        if began is None or load is None or not Path(load).exists():
            return
        if began != open_checkpoint(load, verify=False, step=self.config.checkpoint.iteration).identity:
            raise CheckpointError(
                f"{folder}: began with other weights than {load} holds now; move {self.save} away to train it anew"
            )


def plan(files: Sequence[str], shared: Sequence[str] = ()) -> list[ChainedRun]:
    """The runs of `files`, in their order.

    Args:
        files: a YAML file for each run.
        shared: what is given after each file: YAML files and texts `key=value`.

    Raises:
        ConfigError: a run is not valid, or does not start from the weights of one before it; all of it at once.
    """
    runs, problems = [], []
    for file in files:
        try:
            runs.append(ChainedRun(Path(file).stem, (file, *shared, "auto_resume=true"), _configured(file, shared)))
        except ConfigError as error:
            problems += [line if line.startswith(file) else f"{file}: {line}" for line in error.problems]
    problems += [line for number in range(len(runs)) for line in _problems(runs, number)]
    if problems:
        raise ConfigError(problems)
    return runs


def _configured(file: str, shared: Sequence[str]) -> Config:
    files = [text for text in shared if "=" not in text]
    return load_config([file, *files], [text for text in shared if "=" in text])


def _problems(runs: Sequence[ChainedRun], number: int) -> list[str]:
    run, keys, before = runs[number], runs[number].config.checkpoint, runs[:number]
    found = [f"{name}: not set" for name in ("save", "load") if getattr(keys, name) is None]
    found += ["train_iters: not set"] if run.config.schedule.train_iters is None else []
    found += [] if keys.finetune else ["finetune: a run of a chain starts from weights; set finetune=true"]
    if keys.save is not None and any(_same(keys.save, other.config.checkpoint.save) for other in before):
        found.append(f"save: {keys.save} is the folder of a run before it; each needs its own")
    if before and not any(_same(keys.load, other.config.checkpoint.save) for other in before):
        saves = ", ".join(str(other.config.checkpoint.save) for other in before)
        found.append(f"load: {keys.load} is the save folder of no run before it ({saves})")
    return [f"{run.name}: {line}" for line in found]


def _same(one: str | None, other: str | None) -> bool:
    return one is not None and other is not None and Path(one).resolve() == Path(other).resolve()


def run_chain(runs: Sequence[ChainedRun], start: Start) -> int:
    """Train every run that is not finished; returns 0, or the exit status of the one that did not reach its last step.

    The same call goes on where it ended: finished runs are left alone, and one that was begun is resumed.

    Raises:
        CheckpointError: a folder holds another run than the one that is to train into it, or one that began with other
            weights.
    """
    for number, run in enumerate(runs, 1):
        run.refuse_another()
        what = f"# {number} of {len(runs)}: {run.name}"
        if run.finished:
            print(f"{what}: step {run.config.schedule.train_iters} is there already", flush=True)
            continue
        print(f"{what}: {run.config.checkpoint.load} -> {run.save}", flush=True)
        status = start(run.arguments)
        if status:
            return status
        if not run.finished:
            print(
                f"{run.name}: ended before step {run.config.schedule.train_iters}; the same command goes on", flush=True
            )
            return 0
    return 0


def train_in_a_process(script: Path) -> Start:
    """Starts `script` (train.py) with Python for every run, passes signals on to it, and waits."""

    def start(arguments: Sequence[str]) -> int:
        signals = CaughtSignals()
        try:
            process = LocalProcess("train.py", [sys.executable, str(script), *arguments], os.environ)
            return supervise([process], signals)
        finally:
            signals.release()

    return start
