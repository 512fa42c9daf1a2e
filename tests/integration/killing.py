"""Training processes started by fork, and random kills of them."""

import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from megatron_coca.checkpoints import native
from tests.integration.hooks import Hook
from tests.patience import patience

ROOT = Path(__file__).parents[2]
TIME_LIMIT = patience(300.0)
"""Seconds for one launch, beyond which something hangs."""
TAIL = 3000
IN_ONE_RUN = 5
"""Kills after which a run is left to finish."""


class Kills(NamedTuple):
    """The kills of one run.

    Attributes:
        hits: kills while it was running.
        inside_saves: those of them that left an incomplete checkpoint.
        seconds: of all launches together.
    """

    hits: int
    inside_saves: int
    seconds: float


class ForkServer:
    """Starts training processes by fork, about ten times faster than a new interpreter. One launch at a time."""

    def __init__(self, environment: Mapping[str, str], folder: Path, file: Path) -> None:
        """`environment` has no launcher's variables; `folder` is for outputs, `file` the config that keys override."""
        self._folder, self._file, self._launches = folder, file, 0
        self._server = subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "integration" / "fork_server.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**environment, "PYTHONPATH": str(ROOT)},
            cwd=folder,
        )
        assert self._answer(TIME_LIMIT) == b"ready"

    def start(
        self,
        keys: Mapping[str, Any],
        ranks: int = 1,
        hooks: Sequence[Hook] = (),
        environment: Mapping[str, str] | None = None,
        program: str = "megatron_coca.commands.train",
    ) -> "Launch":
        """Run train.py, or another `program` with its arguments, with `keys` in `ranks` processes, with `hooks` and
        more environment variables.
        """
        arguments = [str(self._file), *(f"{name}={json.dumps(value)}" for name, value in keys.items())]
        return self.start_program(program, arguments, ranks, hooks, environment)

    def start_program(
        self,
        program: str,
        arguments: Sequence[Any],
        ranks: int = 1,
        hooks: Sequence[Hook] = (),
        environment: Mapping[str, str] | None = None,
    ) -> "Launch":
        """Call `main(arguments)` of the module `program` in `ranks` processes; it returns the exit status."""
        self._launches += 1
        output = self._folder / f"launch_{self._launches}.txt"
        request = {
            "program": program,
            "arguments": list(arguments),
            "environments": [variables | dict(environment or {}) for variables in _environments(ranks)],
            "hooks": [list(hook) for hook in hooks],
            "output": str(output),
        }
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(request).encode() + b"\n")
        self._server.stdin.flush()
        group = self._answer(TIME_LIMIT)
        assert group is not None
        return Launch(int(group), output, self._answer)

    def close(self) -> None:
        """End the server, once every launch has ended."""
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait(TIME_LIMIT)
        self._server.stdout.close()

    def _answer(self, timeout: float) -> bytes | None:
        assert self._server.stdout is not None
        pipe = self._server.stdout.fileno()
        if not select.select([pipe], [], [], timeout)[0]:
            return None
        line = b""
        while not line.endswith(b"\n"):
            piece = os.read(pipe, 1)
            assert piece, "the fork server has ended"
            line += piece
        return line.strip()


class Launch:
    """A running group of training processes; `group` is its process group."""

    def __init__(self, group: int, output: Path, answer: Callable[[float], bytes | None]) -> None:
        self.group, self._output, self._answer = group, output, answer
        self._statuses: list[int] | None = None

    def wait(self, timeout: float) -> list[int] | None:
        """The exit statuses of all ranks, or None if they are still running after `timeout` seconds."""
        if self._statuses is None:
            line = self._answer(timeout)
            self._statuses = None if line is None else json.loads(line)
        return self._statuses

    def kill(self) -> None:
        """Send SIGKILL to all ranks that have not ended."""
        with suppress(ProcessLookupError):
            self.send(signal.SIGKILL)

    def send(self, number: int) -> None:
        """Send a signal to all ranks."""
        os.killpg(self.group, number)

    def end(self) -> list[int]:
        """Wait for all ranks; returns their exit statuses."""
        statuses = self.wait(TIME_LIMIT)
        if statuses is None:
            self.kill()
            self.wait(TIME_LIMIT)
        assert statuses is not None, f"does not end: {self.output()[-TAIL:]}"
        return statuses

    def output(self) -> str:
        """The output of all ranks."""
        return self._output.read_text() if self._output.exists() else ""


@contextmanager
def fork_server(environment: Mapping[str, str], folder: Path, file: Path) -> Iterator[ForkServer]:
    """A ForkServer that ends with the block."""
    server = ForkServer(environment, folder, file)
    try:
        yield server
    finally:
        server.close()


Start = Callable[[Mapping[str, Any]], Launch]


def run_to_end(start: Start, keys: Mapping[str, Any]) -> float:
    """Let a run finish undisturbed; returns its seconds."""
    begin = time.monotonic()
    launch = start(keys)
    statuses = launch.end()
    assert not any(statuses), f"{statuses}: {launch.output()[-TAIL:]}"
    return time.monotonic() - begin


def kill_randomly(start: Start, keys: Mapping[str, Any], seed: int, kills: int, within: float) -> Kills:
    """Start a run, kill it after a random delay, and start it again by the same command, until it finishes.

    Args:
        start: launches the run, which resumes by itself.
        keys: given to `start`; `save` is inspected.
        seed: of the delays.
        kills: hits after which the run is left to finish.
        within: delays are uniform between 0 and this, in seconds; with the time of an undisturbed run, every moment of
            it is equally likely.
    """
    generator = random.Random(seed)
    hits, inside, begin = 0, 0, time.monotonic()
    while hits < kills:
        before = _partials(Path(keys["save"]))
        launch = start(keys)
        if launch.wait(generator.uniform(0, within)) is not None:
            assert not any(launch.end()), launch.output()[-TAIL:]
            return Kills(hits, inside, time.monotonic() - begin)
        launch.kill()
        hits += -signal.SIGKILL in launch.end()  # it may have ended by itself just before
        inside += not _partials(Path(keys["save"])) <= before
    run_to_end(start, keys)
    return Kills(hits, inside, time.monotonic() - begin)


def final_hashes(run: Path, step: int) -> dict[str, str]:
    """The sha256 of the files with weights, optimizer and random states at a step."""
    files = native.read_json(native.step_folder(run, step) / native.MANIFEST)["files"]
    return {name: entry["sha256"] for name, entry in files.items() if name.endswith((".safetensors", ".pt"))}


def assert_kills_change_nothing(
    start: Start, folder: Path, kills: int, open_run: Callable[[Path], Any], steps: int
) -> int:
    """Kill runs `kills` times in all, and compare the files at the last step and the losses with those of a run that is
    never killed. Return the number of kills inside a save.

    `start` launches a run of `steps` steps, which resumes by itself. All runs are in `folder`.
    """
    within = run_to_end(start, {"save": str(folder / "whole")})
    whole, losses = final_hashes(folder / "whole", steps), open_run(folder / "whole").losses
    assert len(whole) > 2 and len(losses) == steps
    hits = inside_saves = 0
    for seed in count():
        run = folder / f"run_{seed}"
        killed = kill_randomly(start, {"save": str(run)}, seed, min(IN_ONE_RUN, kills - hits), within)
        hits, inside_saves = hits + killed.hits, inside_saves + killed.inside_saves
        assert final_hashes(run, steps) == whole and open_run(run).losses == losses, f"run {seed}, {killed}"
        if not killed.hits:  # so this is the time of an undisturbed run, perhaps on a machine that is less busy now
            within = killed.seconds
        if hits >= kills:
            break
    print(f"{hits} kills in {seed + 1} runs, {inside_saves} of them inside a save")
    return inside_saves


def left_alive(folder: Path) -> list[str]:
    """Command lines of processes that train into `folder`."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:  # it has ended
            continue
    return [line for line in lines if str(folder) in line]


def _partials(save: Path) -> set[tuple[str, int, int]]:
    """The incomplete checkpoints in a folder; a kill before the first save of a launch leaves the previous one's."""
    return {(path.name, path.stat().st_ino, path.stat().st_mtime_ns) for path in save.glob(".global_step*.partial")}


def _environments(ranks: int) -> list[dict[str, str]]:
    """The variables that a launcher sets for each rank; none for a single one."""
    if ranks == 1:
        return [{}]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": str(ranks)}
    return [
        shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)} for rank in range(ranks)
    ]
