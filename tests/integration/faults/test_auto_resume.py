"""`auto_resume`: one command for the first start and every later one."""

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from megatron_coca.checkpoints import native
from megatron_coca.config import load_config
from megatron_coca.training.checkpointing.resume import ResumePoint, first_valid
from tests.checkpoint_files import run_alone
from tests.integration.hooks import Hook

STEPS = 8
KEYS = {"auto_resume": True, "checkpoint_factor": 2, "train_iters": STEPS, "eval_iters": 0}
STOPPED = 6


@pytest.fixture(scope="module")
def whole(live: Any, open_run: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The run that never stopped. Not to be changed."""
    folder = tmp_path_factory.mktemp("auto")
    live(KEYS | {"save": str(folder / "run")})
    return open_run(folder / "run")


@pytest.fixture
def stopped(whole: Any, tmp_path: Path) -> Path:
    """The run's folder as it was after step 6."""
    shutil.copytree(whole.folder, tmp_path / "run")
    shutil.rmtree(native.step_folder(tmp_path / "run", STEPS))
    (tmp_path / "run" / native.LATEST).write_text(f"global_step{STOPPED}")
    return tmp_path / "run"


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate_state(folder: Path) -> None:
    path = next((folder / native.STATE).iterdir())
    path.write_bytes(path.read_bytes()[:-4])


Damage = Callable[[Path], object]
DAMAGES: dict[str, tuple[Damage, str]] = {
    "a bit of the weights": (lambda folder: flip_bit(folder / native.WEIGHTS), "content has changed"),
    "truncated state": (truncate_state, "bytes, but was written with"),
    "no meta.json": (lambda folder: (folder / native.META).unlink(), "meta.json: not found"),
    "garbled manifest": (lambda folder: flip_bit(folder / native.MANIFEST), "global_step6"),
    "manifest without a sense": (
        lambda folder: (folder / native.MANIFEST).write_text('{"format": 2, "files": {"meta.json": 3}}'),
        "damaged (lists no files)",
    ),
    "no manifest": (lambda folder: (folder / native.MANIFEST).unlink(), "manifest.json: not found"),
    "empty folder": (lambda folder: [shutil.rmtree(folder), folder.mkdir()], "manifest.json: not found"),
}


def assert_same_end(run: Any, whole: Any, assert_same_state: Any) -> None:
    assert run.records == whole.records and run.weights(STEPS) == whole.weights(STEPS)
    assert_same_state(run.state(STEPS), whole.state(STEPS))


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_not_chosen(
    name: str, stopped: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run_alone(monkeypatch)
    damage, message = DAMAGES[name]
    newest, before = (native.step_folder(stopped, step) for step in (STOPPED, 4))
    damage(newest)
    logging.getLogger("megatron_coca").setLevel(logging.NOTSET)
    assert first_valid([newest, before]) == ResumePoint(before)
    assert any(message in line and "falling back to the previous checkpoint" in line for line in caplog.messages)


def plant_strays(folder: Path) -> None:
    """Add a rank's file of another run, whose name sorts before this run's, and a link out of the folder."""
    own = folder / native.STATE / "rank_00000.safetensors"
    with safe_open(own, "pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) + 1.0 for name in file.keys()}  # noqa: SIM118
    save_file(tensors, own.with_name("rank_0000.safetensors"), metadata)
    (folder / "more").symlink_to(folder.parent.parent)


def test_a_damaged_checkpoint_and_files_of_another_run(
    live: Any, stopped: Path, whole: Any, open_run: Any, assert_same_state: Any
) -> None:
    flip_bit(native.step_folder(stopped, STOPPED) / native.WEIGHTS)
    plant_strays(native.step_folder(stopped, 4))
    output = live(KEYS | {"save": str(stopped)}).output
    assert "falling back to the previous checkpoint" in output and "resuming at step 4" in output
    assert (stopped / native.QUARANTINE / "global_step6").is_dir(), "the damaged one is kept"
    for name in ("state/rank_0000.safetensors", "more"):
        assert f"global_step4/{name}: not listed in manifest.json, and therefore ignored" in output
    assert_same_end(open_run(stopped), whole, assert_same_state)


def test_only_damaged_checkpoints_are_no_fresh_start(live: Any, stopped: Path) -> None:
    for step, (damage, _) in zip(native.steps(stopped), DAMAGES.values(), strict=False):
        damage(native.step_folder(stopped, step))
    (native.step_folder(stopped, 2) / native.MANIFEST).unlink()
    before = sorted(stopped.rglob("*"))
    finished = live(KEYS | {"save": str(stopped)}, expected=2)
    assert "global_step2" in finished.output.splitlines()[-1] and "Traceback" not in finished.output
    assert sorted(stopped.rglob("*")) == before


def test_first_start_partial_save_and_finished_run(
    live: Any, whole: Any, open_run: Any, assert_same_state: Any, tmp_path: Path
) -> None:
    run = tmp_path / "new" / "run"
    killed = live(KEYS | {"save": str(run)}, [Hook("commit", "kill")], expected=-9)
    assert "from step 0" in killed.output and list(run.glob(".*.partial")) and not native.steps(run)
    assert "from step 0" in live(KEYS | {"save": str(run), "load": str(run)}).output
    assert_same_end(open_run(run), whole, assert_same_state)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file() and path.name != native.LOCK}
    assert "nothing to do: step 8 has already been reached" in live(KEYS | {"save": str(run)}).output
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())


def test_keys_that_may_change_and_keys_that_may_not(live: Any, stopped: Path, whole: Any, open_run: Any) -> None:
    refused = live(KEYS | {"save": str(stopped), "hidden_dropout": 0.0, "seed": 8}, expected=2)
    for key in ("hidden_dropout (saved 0.1, now 0.0)", "seed (saved 7, now 8)"):
        assert key in refused.output
    allowed = live(KEYS | {"save": str(stopped), "log_interval": 2, "num_workers": 0, "zero_stage": 1})
    assert "resuming at step 6" in allowed.output
    mean = sum(whole.losses[STOPPED:]) / 2  # of the interval
    assert open_run(stopped).losses == [*whole.losses[:STOPPED], mean]


def test_weights_of_another_run_begin_this_one_once(live: Any, whole: Any, open_run: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    keys = KEYS | {"save": str(run), "load": str(whole.folder), "finetune": True}
    first = live(keys, [Hook("commit", "kill", [2])], expected=-9)
    assert "from step 0" in first.output and open_run(run).losses[0] < whole.losses[0]
    assert "resuming at step 2" in live(keys).output, "its own checkpoint comes before the given weights"
    straight = tmp_path / "straight"
    live(keys | {"save": str(straight)})
    assert open_run(run).records == open_run(straight).records
    assert open_run(run).weights(STEPS) == open_run(straight).weights(STEPS)


def test_the_default_rate_of_such_a_run_is_printed_and_saved(
    live: Any, whole: Any, open_run: Any, tmp_path: Path
) -> None:
    keys = KEYS | {"load": str(whole.folder), "finetune": True, "train_iters": 2}
    plain, given = (keys | {"save": str(tmp_path / name)} for name in ("plain", "given"))
    printed = live(plain | {"optimizer.params.lr": None}).output
    assert "optimizer.params.lr: not set; uses 0.0001, the default" in printed
    saved = load_config(tmp_path / "plain" / "global_step2" / native.CONFIG)
    assert saved.optimizer.lr == 1e-4
    assert "uses 0.0001" not in live(given | {"optimizer.params.lr": 1e-4}).output
    assert open_run(tmp_path / "plain").weights(2) == open_run(tmp_path / "given").weights(2)


def test_clocks_and_host_names_do_not_matter(
    live: Any, whole: Any, open_run: Any, assert_same_state: Any, tmp_path: Path
) -> None:
    hooks = [Hook("clock", "jump", ()), Hook("host", "rename", ())]
    keys = KEYS | {"save": str(tmp_path), "watchdog_timeout": 60.0}
    live(keys, [*hooks, Hook("step", "kill", [6])], expected=-9)
    live(keys, hooks)
    assert_same_end(open_run(tmp_path), whole, assert_same_state)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(0 <= line["eta_seconds"] < 300 for line in lines if "eta_seconds" in line)


def put_folder(path: Path) -> None:
    """Replace a file by a folder, which root cannot open either."""
    path.unlink()
    path.mkdir()


def test_an_unreadable_newest_checkpoint_gives_way_and_stays(
    live: Any, stopped: Path, whole: Any, open_run: Any, assert_same_state: Any
) -> None:
    folder, name = native.step_folder(stopped, STOPPED), "state/rank_00000.safetensors"
    put_folder(folder / name)
    first = live(KEYS | {"save": str(stopped), "exit_interval": 5})
    assert f"global_step6/{name}: cannot be read" in first.output and "resuming at step 4" in first.output
    assert "falling back to the previous checkpoint" in first.output
    assert (folder / name).is_dir() and not (stopped / native.QUARANTINE).exists(), "it may be as it was written"
    second = live(KEYS | {"save": str(stopped)})
    assert f"global_step6/{name}: cannot be read" in second.output, "the next start looks at it again"
    assert "resuming at step 5" in second.output and "already exists; the existing folder was moved to" in second.output
    assert (stopped / native.QUARANTINE / "global_step6" / name).is_dir()
    assert_same_end(open_run(stopped), whole, assert_same_state)


def test_an_unreadable_checkpoint_and_nothing_older(live: Any, stopped: Path) -> None:
    for step in (2, 4):
        shutil.rmtree(native.step_folder(stopped, step))
    put_folder(native.step_folder(stopped, STOPPED) / native.STATE / "rank_00000.safetensors")
    before = sorted(stopped.rglob("*"))
    finished = live(KEYS | {"save": str(stopped)}, expected=2)
    last = finished.output.splitlines()[-1]
    assert "rank_00000.safetensors: cannot be read" in last and "Traceback" not in finished.output
    assert sorted(stopped.rglob("*")) == before


def test_two_ranks_verify_and_agree(live: Any, stopped: Path) -> None:
    keys = KEYS | {"save": str(stopped), "train_batch_size": 4, "train_micro_batch_size_per_gpu": 1}
    put_folder(native.step_folder(stopped, STOPPED) / native.RNG / "rank_0.pt")
    flip_bit(next((native.step_folder(stopped, 4) / native.STATE).iterdir()))
    output = live(keys, ranks=2).output
    assert "global_step6/rng/rank_0.pt: cannot be read" in output and "content has changed" in output
    assert re.search(r"verified .*global_step2: \d\.\d+ of .* GB/s with 2 process\(es\)", output), output
    assert "resuming at step 2" in output and (stopped / native.QUARANTINE / "global_step4").is_dir()


@pytest.mark.slow
def test_a_disk_that_fills_up_on_the_first_of_two_ranks(live: Any, tmp_path: Path) -> None:
    """The other one, which gives its weights to the first, must not wait for ever."""
    keys = KEYS | {"save": str(tmp_path), "zero_stage": 1, "train_batch_size": 8}
    finished = live(keys, [Hook("weights", "full disk", [2], [0])], ranks=2, expected=2)
    assert "step 4 cannot be written (No space left" in finished.output
    assert native.steps(tmp_path) == [2] and not list(tmp_path.glob(".*.partial"))
