"""Invalid input: exit status 2, one message that names it, and no files lost or overwritten.

Most tests run `train` in the test's process, which joins a process group of one as any run does, because starting a
process takes seconds. Tests that train, or that fail on two ranks, start processes: DeepSpeed starts once per process.
"""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock, Timeout

from megatron_coca.checkpoints import native
from megatron_coca.commands.train import main
from megatron_coca.data import DataError
from megatron_coca.data.shards import ShardWriter

LAUNCHER_VARIABLES = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "SLURM_")


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file below a folder, the lock aside, with its bytes and the time of its last change."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != native.LOCK)
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def assert_one_message(status: int, output: str, *parts: str) -> None:
    assert status == 2, output
    assert "Traceback" not in output
    for part in parts:
        assert sum(part in line for line in output.splitlines()) == 1, f"{part!r} in {output}"


@pytest.mark.slow
def test_exit_status_and_message_of_a_process(live: Any, whole: Any, tmp_path: Path) -> None:
    before = contents(whole.folder)
    keys = {"save": str(tmp_path / "new"), "load": str(whole.folder), "num_layers": 3, "hidden_size": 64}
    finished = live(keys, expected=2)
    assert_one_message(
        finished.status,
        finished.output,
        "num_layers (saved 2, now 3)",
        "hidden_size (saved 32, now 64)",
        "finetune=true",
    )
    assert contents(whole.folder) == before and not (tmp_path / "new").exists()


def test_two_processes_fail_together(live: Any, tmp_path: Path) -> None:
    keys = {"train_data_paths": [str(tmp_path / "nothing")], "train_batch_size": 8, "save": str(tmp_path / "run")}
    finished = live(keys, ranks=2, expected=2)
    assert finished.output.count("nothing.bin: no such file") == 2, "each rank; a launcher prints the first one"
    assert "Traceback" not in finished.output and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_an_error_of_an_import_is_told_once(train: Any, tmp_path: Path) -> None:
    """The ranks import more than the launching process, so all of them fail, and it prints the first error."""
    (tmp_path / "statistics.py").write_text('raise ImportError("this one is mine")')
    finished = train({}, options=("--num_gpus", "2"), environment={"PYTHONPATH": str(tmp_path)})
    assert finished.status == 1 and finished.output.count("Traceback") == 1, finished.output
    assert "the first error, of rank " in finished.output
    assert finished.output.count("statistics.py") == 1 and "this one is mine" in finished.output


Attempt = Callable[..., tuple[int, str]]


@pytest.fixture
def attempt(
    small: dict[str, Any], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Attempt]:
    """attempt(changes): status and output of the main of `train` on `small` with changed keys, in this process."""
    environment, threads = dict(os.environ), torch.get_num_threads()
    for name in [name for name in os.environ if name.startswith(LAUNCHER_VARIABLES)]:
        monkeypatch.delenv(name)

    def run(changes: dict[str, Any]) -> tuple[int, str]:
        capfd.readouterr()
        status = main(
            [
                f"{name}={value!r}" if not isinstance(value, str) else f"{name}={value}"
                for name, value in (small | changes).items()
            ]
        )
        captured = capfd.readouterr()
        for name in [name for name in os.environ if name.startswith(LAUNCHER_VARIABLES)]:
            del os.environ[name]
        return status, captured.out + captured.err

    yield run
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(threads)


@pytest.fixture
def run_copy(whole: Any, tmp_path: Path) -> Path:
    return shutil.copytree(whole.folder, tmp_path / "run")


def write_shard(prefix: Path, tokens: int) -> Path:
    prefix.parent.mkdir(parents=True, exist_ok=True)
    writer = ShardWriter(prefix, 512)
    writer.add([1] * tokens)
    writer.finish()
    return prefix


def truncated_shard(folder: Path) -> Path:
    prefix = write_shard(folder / "short", 4000)
    os.truncate(f"{prefix}.bin", 4001)
    return prefix


def empty_shard(folder: Path) -> Path:
    prefix = write_shard(folder / "empty", 10)
    Path(f"{prefix}.bin").write_bytes(b"")
    Path(f"{prefix}.idx").write_bytes(b"")
    return prefix


DATA_FAULTS = {
    "missing": (lambda folder: folder / "absent", "absent.bin: no such file"),
    "empty": (empty_shard, "empty.idx: not an MMIDIDX index"),
    "truncated": (truncated_shard, "short.bin: has 4001 bytes, but its index records 8000"),
    "too short": (
        lambda folder: write_shard(folder / "tiny", 32),
        "tiny: only 32 tokens, fewer than one sample of seq_length + 1 = 33",
    ),
}


@pytest.mark.parametrize("name", DATA_FAULTS)
def test_shards(name: str, attempt: Attempt, tmp_path: Path) -> None:
    make, message = DATA_FAULTS[name]
    status, output = attempt({"train_data_paths": [str(make(tmp_path / "data"))], "save": str(tmp_path / "run")})
    assert_one_message(status, output, message)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 100}, "vocab_size: 100, but the data's tokenizer has 512 tokens"),
        ({"train_batch_size": 5}, "train_batch_size: 5 is not a multiple of micro"),
        ({"num_attention_heads": 3}, "num_attention_heads: 3 heads do not divide"),
        ({"attention_backend": "flex"}, "attention_backend: flex cannot compute this model"),
        ({"train_iters": "null", "lr_decay_iters": 5}, "train_iters: not set; training needs it"),
        ({"optimizer.params.lr": "null"}, "optimizer.params.lr: not set; training needs it"),
        ({"seq_length": 100000}, "fewer than one sample of seq_length + 1 = 100001"),
    ],
)
def test_configurations(changes: dict[str, Any], message: str, attempt: Attempt, tmp_path: Path) -> None:
    status, output = attempt(changes | {"save": str(tmp_path / "run")})
    assert_one_message(status, output, message)
    assert not contents(tmp_path / "run")


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def truncate_optimizer(run: Path) -> None:
    truncate(next((run / "global_step12" / native.STATE).iterdir()))


CHECKPOINT_FAULTS = {
    "truncated weights": (lambda run: truncate(run / "global_step12" / native.WEIGHTS), "model.safetensors: has "),
    "truncated optimizer": (truncate_optimizer, "rank_00000.safetensors: has "),
    "lost random state": (
        lambda run: (run / "global_step12/rng/rank_0.pt").unlink(),
        "rank_0.pt: not found; copy the checkpoint",
    ),
    "altered configuration": (
        lambda run: (run / "global_step12/config.yml").write_bytes(
            (run / "global_step12/config.yml").read_bytes()[:-1] + b" "
        ),
        "config.yml: content has changed",
    ),
    "no manifest": (lambda run: (run / "global_step12/manifest.json").unlink(), "no complete checkpoint"),
    "foreign folder": (
        lambda run: [path.unlink() for path in run.rglob("*") if path.is_file()],
        "no complete checkpoint",
    ),
    "Hugging Face folder": (
        lambda run: (run / "config.json").write_text("{}"),
        "a Hugging Face folder has no optimizer state",
    ),
}


@pytest.mark.fewest
@pytest.mark.parametrize("name", CHECKPOINT_FAULTS)
def test_checkpoints(name: str, attempt: Attempt, run_copy: Path, tmp_path: Path) -> None:
    damage, message = CHECKPOINT_FAULTS[name]
    damage(run_copy)
    before = contents(run_copy)
    status, output = attempt({"load": str(run_copy), "save": str(tmp_path / "new"), "train_iters": 14})
    assert_one_message(status, output, message)
    assert contents(run_copy) == before and not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pos_emb": "rotary"}, "pos_emb (saved 'coca', now 'rotary')"),
        ({"train_batch_size": 8}, "train_batch_size (saved 4, now 8)"),
        ({"precision": "bfloat16"}, "precision (saved 'fp32', now 'bf16')"),
    ],
)
def test_another_run(changes: dict[str, Any], message: str, attempt: Attempt, run_copy: Path) -> None:
    before = contents(run_copy)
    status, output = attempt(changes | {"load": str(run_copy), "save": str(run_copy), "train_iters": 14})
    assert_one_message(status, output, message)
    assert contents(run_copy) == before


def test_other_data_of_equal_size(
    attempt: Attempt, run_copy: Path, small: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another text of as many tokens, from a folder in which nothing says what made it."""
    (prefix,) = small["train_data_paths"]
    (tmp_path / "own").mkdir()
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{prefix}{suffix}", tmp_path / "own" / f"s{suffix}")
    own = tmp_path / "own" / "s"
    tokens = np.memmap(f"{own}.bin", dtype="<u2", mode="r+")
    tokens[100:110] = ord("z")
    keys = {"load": str(run_copy), "save": str(run_copy), "train_data_paths": [str(own)], "train_iters": 14}
    before = contents(run_copy)
    status, output = attempt(keys)
    assert_one_message(status, output, f"cannot be resumed with a different content of {own} (saved ")
    assert len(output) < 500, "the differing entries only"
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert sum(f"no tokenizer is saved with {own}; cannot verify" in line for line in warnings) == 1
    assert contents(run_copy) == before


def test_a_folder_that_already_holds_a_run(attempt: Attempt, run_copy: Path) -> None:
    before = contents(run_copy)
    status, output = attempt({"save": str(run_copy)})
    assert_one_message(status, output, "already contains a run, up to step 12;")
    assert contents(run_copy) == before


def test_a_folder_that_cannot_be_written(attempt: Attempt, tmp_path: Path) -> None:
    """A path below a file, because root may write wherever permission bits say no."""
    (tmp_path / "file").write_text("")
    status, output = attempt({"save": str(tmp_path / "file" / "run"), "train_iters": 2})
    assert_one_message(status, output, "file/run: cannot be written")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of four megabytes, which holds three checkpoints of `small` and part of a fourth."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = (
        os.geteuid() == 0
        and subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4000k", "tmpfs", folder], check=False, capture_output=True
        ).returncode
        == 0
    )
    if not mounted:
        pytest.skip("only root can mount a small file system to fill")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk(live: Any, small_disk: Path, tmp_path: Path, open_run: Any, whole: Any) -> None:
    run = small_disk / "run"
    finished = live({"save": str(run), "checkpoint_factor": 2}, expected=2)
    assert_one_message(finished.status, finished.output, "cannot be written", "earlier checkpoints are intact")
    steps = native.steps(run)
    left = [path.name for path in run.glob(".*")]
    assert steps and left == [native.LOCK], "what could not be completed was removed"
    native.verify(native.locate(run))
    elsewhere = {"load": str(run), "save": str(tmp_path / "elsewhere")}
    finished = live(elsewhere)
    assert finished.status == 0 and f"resuming at step {steps[-1]}" in finished.output, finished.output
    assert open_run(tmp_path / "elsewhere").losses == whole.losses[steps[-1] :]


def test_the_folder_is_locked_before_a_checkpoint_is_chosen(
    attempt: Attempt, run_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise another run could write newer checkpoints in between, and this run would move them away."""
    free = []

    def look(config: Any) -> Any:
        try:
            FileLock(run_copy / native.LOCK, timeout=0).acquire()
            free.append(True)
        except Timeout:
            free.append(False)
        raise DataError("no data")

    monkeypatch.setattr("megatron_coca.training.opened_stages.open_corpus", look)
    status, output = attempt({"save": str(run_copy), "auto_resume": True, "train_iters": 14})
    assert_one_message(status, output, "no data")
    assert free == [False]


def test_a_lock_that_is_a_folder(attempt: Attempt, run_copy: Path) -> None:
    (run_copy / native.LOCK).unlink()
    (run_copy / native.LOCK).mkdir()
    status, output = attempt({"save": str(run_copy), "auto_resume": True})
    assert_one_message(status, output, ".lock: cannot be locked (Is a directory)")
