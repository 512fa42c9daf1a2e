"""The soak: plans follow from the seed, the preloaded library works as documented, and deviations are found."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("moto.server", reason="needs the S3 server of moto, which is in requirements-dev.txt")

from megatron_coca.config import load_config
from tests.checkpoint_files import TINY, write_checkpoint
from tests.integration.hooks import Hook
from tests.soak.__main__ import chosen
from tests.soak.evaluation import disturbed_evaluation
from tests.soak.events import CHANGE, ELASTIC, EVALUATE, FIXED, KINDS, draw
from tests.soak.runs import DeviationError, Launcher
from tests.soak.shim import READS, WRITES, Shim
from tests.soak.soak import soak
from tests.soak.table import markdown


def test_the_seed_determines_the_plans() -> None:
    kinds = chosen("")
    plans = [draw(7, number, kinds) for number in range(1, 500)]
    assert plans == [draw(7, number, kinds) for number in range(1, 500)] != [draw(8, n, kinds) for n in range(1, 500)]
    assert {plan.kind for plan in plans} == set(KINDS) - {CHANGE}
    assert {(plan.ranks, plan.stage) for plan in plans if plan.run == ELASTIC} == {
        (r, s) for r in (1, 2) for s in range(4)
    }
    assert {(plan.ranks, plan.stage) for plan in plans if plan.run == FIXED} == {(1, 0)}
    assert chosen("-outage,-cache") == [kind for kind in KINDS if kind not in ("outage", "cache")]
    with pytest.raises(SystemExit, match="EVENTS: kil: not known"):
        chosen("kil")


@pytest.fixture
def shim(tmp_path: Path) -> Shim:
    return Shim(tmp_path)


def python(shim: Shim, code: str, *arguments: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-S", "-c", code, *map(str, arguments)]
    environment = os.environ | shim.environment
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, start_new_session=True)


WRITE = "import sys\nwith open(sys.argv[1], 'wb', 0) as file:\n for _ in range(9): file.write(b'x')"


def test_chosen_file_operations_fail_in_one_folder_only(shim: Shim, tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "insider"
    inside.mkdir()
    outside.mkdir()
    shim.arm(inside, WRITES, errno.ENOSPC, 5, 1)
    assert python(shim, WRITE, outside / "file").returncode == 0
    assert "No space left" in python(shim, WRITE, inside / "file").stderr
    assert (inside / "file").read_bytes() == b"xxx", "the first operation opened the file"
    assert shim.disarm() == (5, 1)
    assert python(shim, WRITE, inside / "file").returncode == 0
    shim.arm(inside, READS, errno.EIO, 1, None)
    assert "Input/output error" in python(shim, "import sys; open(sys.argv[1])", inside / "file").stderr
    shim.arm(inside, WRITES, 0, 3, 1)
    assert python(shim, WRITE, inside / "file").returncode == -signal.SIGKILL
    assert (inside / "file").read_bytes() == b"x"


def test_the_wall_clock_is_shifted_and_nothing_else(shim: Shim) -> None:
    shim.shift_clock(-1e6)
    code = "import time, threading; print(time.time(), time.monotonic()); threading.Event().wait(0.1)"
    wall, monotonic = map(float, python(shim, code).stdout.split())
    assert abs(wall - time.time() + 1e6) < 60 and abs(monotonic - time.monotonic()) < 60


EVENTS = ["kill", "kill-io", "term", "enospc", "clock", EVALUATE, CHANGE]
LAUNCHES, SEED, SCALE = 6, 3, 0.1


@pytest.mark.slow
def test_a_short_soak_is_survived(tmp_path: Path) -> None:
    with soak(tmp_path / "soak", SEED, EVENTS) as running:
        running.disturb(0.0, LAUNCHES, SCALE)
        result = running.complete()
    assert len(result.outcomes) == LAUNCHES and set(result.last) <= {FIXED, ELASTIC}
    events = [json.loads(line) for line in (tmp_path / "soak/events.jsonl").read_text().splitlines()]
    assert [line["launch"] for line in events if line["what"] == "planned"] == list(range(1, LAUNCHES + 1))
    text = markdown(result, SEED)
    assert f"Seed {SEED}: {LAUNCHES} launches" in text and "| count |" in text


@pytest.mark.slow
def test_a_killed_evaluation_is_completed_and_a_deviation_is_found(tmp_path: Path) -> None:
    (tmp_path / "save").mkdir()
    (tmp_path / "outputs").mkdir()
    launcher = Launcher(None, os.environ, tmp_path / "outputs")  # type: ignore[arg-type]
    plan = draw(SEED, 1, [EVALUATE])
    assert disturbed_evaluation(launcher, plan, tmp_path / "save", tmp_path / "none") == ([], False)
    write_checkpoint(tmp_path / "save", load_config([], TINY))
    statuses, _ = disturbed_evaluation(launcher, plan, tmp_path / "save", tmp_path / "one")
    assert statuses in ([0], [-signal.SIGKILL])

    class Other(Launcher):
        """The undisturbed evaluation reads another text."""

        def evaluate(self, checkpoint: Path, text: Path, output: Path, jobs: int) -> Any:
            if jobs == 1:
                text.write_text(json.dumps({"text": "It is a truth. " * 40}) + "\n")
            return super().evaluate(checkpoint, text, output, jobs)

    other = Other(None, os.environ, tmp_path / "outputs")  # type: ignore[arg-type]
    with pytest.raises(DeviationError, match="differ from those of an undisturbed evaluation"):
        disturbed_evaluation(other, plan, tmp_path / "save", tmp_path / "two")


def hooked(monkeypatch: pytest.MonkeyPatch, hook: Hook) -> None:
    """Let the hook act in every disturbed launch; `undisturbed` ones are without."""

    def fork(self: Launcher, keys: Any, layout: tuple[int, int]) -> Any:
        hooks = [] if "exit_interval" in keys else [hook]
        return self._server.start({**keys, "zero_stage": layout[1]}, layout[0], hooks)

    monkeypatch.setattr(Launcher, "fork", fork)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "found"),
    # Some of the first passes have no labels, and a loss of 0 does not change.
    [(Hook("backward", "spike", list(range(2, 20))), "undisturbed"), (Hook("step", "raise", [2]), "a traceback")],
)
def test_a_deviation_is_found(hook: Hook, found: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hooked(monkeypatch, hook)
    with soak(tmp_path / "soak", SEED, ["term"]) as running, pytest.raises(DeviationError, match=found):
        running.disturb(0.0, LAUNCHES, SCALE)
        running.complete()
