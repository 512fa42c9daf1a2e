"""The two runs of a soak: their configurations, their launches, and their comparison with undisturbed runs."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import moto.server

from megatron_coca.checkpoints import CheckpointError, native
from megatron_coca.checkpoints.native.object_store import RemoteFolder
from megatron_coca.support.remote_files import local_folder
from tests.conftest import Run, _assert_same_state, command_line
from tests.integration.killing import ROOT, TIME_LIMIT, ForkServer, Launch
from tests.soak.events import ELASTIC

SAVE_EVERY = 20
STAGES: list[dict[str, Any]] = [
    {"until": 50},
    {
        "until": 110,
        "seq_length": 16,
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 4,
        "training_positions": {"type": "pose", "max": "4L"},
    },
    {
        "until": 180,
        "pack_impl": "pack_until_overflow",
        "reset_attention_mask": True,
        "reset_position_ids": True,
        "training_positions": None,
    },
    {"until": 300, "training_positions": {"type": "randomized", "max": 128}, "optimizer.params.lr": 5e-4},
    {"until": 500, "train_label_data_paths": None, "reset_optimizer": True},
    {"until": 900, "training_positions": {"type": "stretched", "max": "4L"}, "eval_windows": ["1L", "2L"]},
    {},
]
"""Lengths, batches, drawn positions, labels and packing change; a few minutes reach the first stages."""
KEYS: dict[str, Any] = {
    "auto_resume": True,
    "train_iters": 10**6,
    "lr_decay_style": "constant",
    "warmup": 0.0,
    "optimizer.params.lr": 1e-3,
    "train_batch_size": 8,
    "eval_interval": 50,
    "checkpoint_factor": SAVE_EVERY,
    "keep_last_n_checkpoints": 3,
    "watchdog_timeout": 60.0,
    "join_timeout": 60.0,
    "stages": STAGES,
    "training_positions": {"type": "shifted", "max": "2L"},
    "eod_mask_loss": True,
}
"""Beside those of the small run of the tests; `exit_interval` says where the soak ends."""
PLAIN = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
"""Without dropout, whose masks are drawn anew where the layout changes."""
RELATIVE = 1e-5
"""As in tests/integration/faults/test_elastic.py: sums in another order."""
COMPARED = 4
"""Steps after a change of the layout whose losses are compared with those of the layout before."""
ACCESS = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
URL = "s3://soak/run"

VARIANTS = ("--variant", "plain", "--variant", "NTK", "rope_scaling.rope_type=dynamic", "rope_scaling.factor=4")
Layout = tuple[int, int]
"""Processes and ZeRO stage."""


class DeviationError(Exception):
    """Something that the documents do not promise; it ends the soak."""


class Store:
    """An S3 server on this machine that can be stopped and started again, with what it holds."""

    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # which prints every request
        self._server = moto.server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        host, self._port = self._server.get_host_and_port()
        self.environment = ACCESS | {"AWS_ENDPOINT_URL": f"http://{host}:{self._port}"}
        os.environ.update(self.environment)
        self.up = True
        RemoteFolder(URL)._fs.mkdir("soak")

    def stop(self) -> None:
        """Let connections be refused."""
        if self.up:
            self._server.stop()
            self.up = False

    def start(self) -> None:
        """Answer again, at the same address."""
        if not self.up:
            self._server = moto.server.ThreadedMotoServer(ip_address="127.0.0.1", port=self._port, verbose=False)
            self._server.start()
            self.up = True

    def steps(self) -> list[int]:
        """Ascending steps of the complete checkpoints."""
        return RemoteFolder(URL).steps()

    def copy_to(self, folder: Path) -> None:
        """Download everything."""
        remote = RemoteFolder(URL)
        if remote._fs.find(remote._root):
            remote._fs.get(remote._root, str(folder), recursive=True)

    def copy_from(self, folder: Path) -> None:
        """Upload everything."""
        remote = RemoteFolder(URL)
        for path in (path for path in folder.rglob("*") if path.is_file()):
            remote._fs.put_file(str(path), f"{remote._root}/{path.relative_to(folder)}")


class CommandLaunch:
    """train.py in a process that starts the ranks; as `killing.Launch`."""

    def __init__(self, command: list[str], environment: Mapping[str, str], output: Path) -> None:
        self._output = output
        with output.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                cwd=output.parent,
                start_new_session=True,
            )

    def wait(self, timeout: float) -> list[int] | None:
        """The exit status of the launching process, or None if it still runs after `timeout` seconds."""
        try:
            return [self._process.wait(timeout)]
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """Send SIGKILL to the launching process; its ranks end with it."""
        self.send(signal.SIGKILL)

    def send(self, number: int) -> None:
        """Send a signal to the launching process."""
        self._process.send_signal(number)

    def ranks(self) -> list[int]:
        """The process numbers of the ranks, or of an evaluation's processes, that run."""
        found: list[int] = []
        for children in Path(f"/proc/{self._process.pid}/task").glob("*/children"):  # of every thread
            with suppress(OSError):
                found += map(int, children.read_text().split())
        return found

    def output(self) -> str:
        """The output of all processes."""
        return self._output.read_text(errors="replace")


class Change(NamedTuple):
    """A layout from the step after `start` on."""

    start: int
    layout: Layout


class SoakRun:
    """One of the two runs: its folders, its keys, and the layouts that its steps were taken in."""

    def __init__(self, name: str, folder: Path, small: Mapping[str, Any], store: Store | None) -> None:
        """`store` keeps the checkpoints of the run, if given."""
        self.name, self.folder, self.store = name, folder, store
        self.cache = folder / "cache"
        self.keys = {**small, **KEYS, **(PLAIN if name == ELASTIC else {})}
        if store is not None:
            self.save = local_folder(URL, self.cache, CheckpointError)
            self.log = folder / "log"  # the cache may be deleted
            self.launch_keys = {"save": URL, "checkpoint_cache": str(self.cache), "log_dir": str(self.log)}
        else:
            self.save = self.log = folder / "save"
            self.launch_keys = {"save": str(self.save)}
        self.launch_keys = self.keys | self.launch_keys
        self.changes: list[Change] = []
        self.reached = 0
        folder.mkdir()

    def complete(self) -> int:
        """The highest step of a complete checkpoint, wherever it is."""
        steps = {0, *native.steps(self.save)}
        return max(steps | set(self.store.steps() if self.store is not None else ()))

    def last_step(self) -> int:
        """The last step that metrics.jsonl reports."""
        metrics = self.log / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.is_file() else []
        for line in reversed(lines):
            try:
                return int(json.loads(line)["step"])
            except ValueError:  # half a line, left by a kill
                continue
        return 0

    def began(self, step: int, layout: Layout) -> bool:
        """Record that a launch has resumed at `step`; whether its layout is another than that of the steps before."""
        self.changes = [change for change in self.changes if change.start < step]
        if self.changes and self.changes[-1].layout == layout:
            return False
        self.changes.append(Change(step, layout))
        return len(self.changes) > 1


class Launcher:
    """Starts launches of both runs by fork or by command; `environment` is that of the disturbed ones."""

    def __init__(self, server: ForkServer, environment: Mapping[str, str], folder: Path) -> None:
        self._server, self._environment, self._folder = server, dict(environment), folder
        self._config = folder / "empty.json"
        self._config.write_text("{}")

    def fork(self, keys: Mapping[str, Any], layout: Layout) -> Launch:
        """Start the ranks of `layout` without a launching process."""
        ranks, stage = layout
        return self._server.start({**keys, "zero_stage": stage}, ranks)

    def command(self, keys: Mapping[str, Any], layout: Layout, number: int) -> CommandLaunch:
        """Start `train.py --num_gpus`."""
        ranks, stage = layout
        arguments = command_line({**keys, "zero_stage": stage})
        command = [sys.executable, str(ROOT / "train.py"), str(self._config), *arguments, "--num_gpus", str(ranks)]
        return CommandLaunch(command, self._environment, self._folder / f"command_{number}.txt")

    def evaluate(self, checkpoint: Path, text: Path, output: Path, jobs: int) -> CommandLaunch:
        """Start `megatron-coca evaluate perplexity --jobs` of the newest checkpoint in the folder `checkpoint`."""
        files = ["--checkpoint", str(checkpoint), "--data", str(text), "--output", str(output)]
        sizes = ["--windows", "16,128", "--stride", "8", "--device", "cpu", "--jobs", str(jobs)]
        command = [sys.executable, str(ROOT / "evaluate.py"), "perplexity", *files, *sizes, *VARIANTS]
        return CommandLaunch(command, self._environment, self._folder / f"{output.name}.txt")

    def undisturbed(self, keys: Mapping[str, Any], layout: Layout) -> str:
        """Run to the end; returns the output."""
        launch = self.fork(keys, layout)
        statuses = launch.wait(max(TIME_LIMIT, 4 * 3600.0))
        if statuses is None or any(statuses):
            raise DeviationError(f"an undisturbed launch ended with {statuses}: {launch.output()[-3000:]}")
        return launch.output()


def finish(run: SoakRun, launcher: Launcher, layout: Layout, last: int) -> None:
    """Let a run train to step `last` without disturbance. Raises DeviationError where its checkpoint is missing."""
    output = launcher.undisturbed(run.launch_keys | {"exit_interval": last}, layout)
    run.began(resumed_at(output) or 0, layout)
    if run.complete() != last or native.steps(run.save)[-1] != last:
        raise DeviationError(f"{run.name}: step {last} is not saved: {native.steps(run.save)}")
    if run.store is not None and run.store.steps()[-1] != last:
        raise DeviationError(f"{run.name}: step {last} did not reach the store, which has {run.store.steps()}")


def resumed_at(output: str) -> int | None:
    """The step at which a launch has begun to train, by its output; None if it did not come so far."""
    for line in output.splitlines():
        if "resuming at step " in line:
            return int(line.rpartition("resuming at step ")[2])
        if line.endswith("from step 0") and "tokens a step" in line:
            return 0
    return None


def compare(run: SoakRun, launcher: Launcher, last: int, sampled: int) -> dict[str, float]:
    """Train a run again without disturbance, with the same changes of the layout, and compare every bit.

    For at most `sampled` changes, the losses after it are also compared with those of the layout before.

    Returns the largest relative difference of these, by what changed. Raises DeviationError.
    """
    folder = run.folder / "undisturbed"
    keys = run.keys | {"save": str(folder)}
    changes, differences = run.changes, dict[str, float]()
    stride = max(1, len(changes) // sampled)
    ends = [change.start for change in changes[1:]] + [last]
    continued: list[tuple[str, int, Path]] = []
    for number, (change, end) in enumerate(zip(changes, ends, strict=True)):
        launcher.undisturbed(keys | {"exit_interval": end}, change.layout)
        if end == last or number % stride or end + COMPARED > last:
            continue
        other = folder.with_name(f"continued_{number}")
        shutil.copytree(folder, other)
        launcher.undisturbed(keys | {"save": str(other), "exit_interval": end + COMPARED}, change.layout)
        continued.append((_describe_change(change.layout, changes[number + 1].layout), end, other))
    undisturbed = Run(folder)
    losses = undisturbed.losses
    for name, end, other in continued:
        pairs = list(zip(losses[end : end + COMPARED], Run(other).losses[end : end + COMPARED], strict=True))
        if any((one is None) != (two is None) for one, two in pairs):
            raise DeviationError(f"{run.name}: steps without labels depend on the layout: {pairs}")
        labelled = (abs(one / two - 1.0) for one, two in pairs if one is not None)
        differences[name] = max(differences.get(name, 0.0), *labelled, 0.0)
        shutil.rmtree(other)
    if differences and max(differences.values()) > RELATIVE:
        raise DeviationError(f"{run.name}: losses after a change of the layout differ by {differences}")
    _assert_same_run(run, undisturbed, last)
    return differences


def _describe_change(before: Layout, after: Layout) -> str:
    if before[0] == after[0]:
        return f"ZeRO stage in {before[0]} process(es)"
    return f"{before[0]} to {after[0]} processes"


def _assert_same_run(run: SoakRun, whole: Run, last: int) -> None:
    """Compare the records of every step, the final weights, optimizer states and random states, bit for bit.

    A validation at a change of the layout may be taken in the layout before or after it: it is compared within
    `RELATIVE`.
    """
    disturbed, log = Run(run.save), Run(run.log)
    boundaries = {change.start for change in run.changes}
    records, expected = log.records, whole.records
    if len(records) != len(expected) or len(log.losses) != last:
        raise DeviationError(f"{run.name}: {len(records)} records of {last} steps, undisturbed {len(expected)}")
    for one, two in zip(records, expected, strict=True):
        at_boundary = one["step"] in boundaries and "loss" not in one and one.keys() == two.keys()
        close = at_boundary and all(abs(value - two[name]) <= RELATIVE * abs(value) for name, value in one.items())
        if one != two and not close:
            raise DeviationError(f"{run.name}: {one}, undisturbed {two}")
    if log.events != whole.events:
        raise DeviationError(f"{run.name}: notes in metrics.jsonl: {log.events}, undisturbed {whole.events}")
    if disturbed.weights(last) != whole.weights(last):
        raise DeviationError(f"{run.name}: the weights of step {last} differ")
    try:
        _assert_same_state(*(_compared(of.state(last), run.store is not None) for of in (disturbed, whole)))
    except AssertionError as error:
        raise DeviationError(f"{run.name}: the state of step {last} differs: {error}") from error


def _compared(state: dict[str, Any], with_store: bool) -> dict[str, Any]:
    """Leave out the state of Python's generator for a run on an object store: the store's library draws its delays
    between repeated requests from it (botocore), and training draws nothing.
    """
    return {name: value for name, value in state.items() if not (with_store and name.endswith(".pt/python"))}


def wait_until_ended(folder: Path, alive: Any, timeout: float = 15.0) -> list[str]:
    """What still trains into `folder` after `timeout` seconds; `alive` lists command lines."""
    end = time.monotonic() + timeout
    while (left := alive(folder)) and time.monotonic() < end:
        time.sleep(0.1)
    return left
