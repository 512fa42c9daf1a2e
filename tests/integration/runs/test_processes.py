"""Training with one process or two, and with every launcher, gives the same results."""

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.integration.hooks import Hook
from tests.patience import patience

pytestmark = pytest.mark.slow

STEPS = 8
RELATIVE = 1e-5
"""Two processes add up their halves of a batch in another order than one process does, and float32 rounds differently.
Over these eight steps that came to 7e-8 of the gradient norm and 2e-8 of the loss; the rest is room for other CPUs.
"""

PLAIN = {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "train_iters": STEPS,
    "train_batch_size": 8,
    "eval_interval": 4,
}
"""Without dropout, whose masks differ from rank to rank by intent. Two micro batches of 2 in each of 2 processes, or
4 in one.
"""

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


def srun(start: Any, keys: dict[str, Any]) -> None:
    """Two tasks as srun starts them: nothing but its environment says that they belong together."""
    common = {
        "SLURM_NTASKS": "2",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_JOB_ID": str(os.getpid()),
    }
    tasks = [start(keys, environment=common | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank}) for rank in "01"]
    for task in tasks:
        output, _ = task.communicate(timeout=patience(300))
        assert task.returncode == 0, output


def by_command(train: Any, keys: dict[str, Any], **options: Any) -> None:
    finished = train(keys, **options)
    assert finished.status == 0, finished.output


@pytest.fixture(scope="module")
def runs(train: Any, start: Any, open_run: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("processes")
    keys = {name: PLAIN | {"save": str(folder / name)} for name in ("one", "deepspeed", "torchrun", "srun")}
    jobs = {
        "one": lambda: by_command(train, keys["one"]),
        "deepspeed": lambda: by_command(train, keys["deepspeed"], options=("--num_gpus", "2")),
        "torchrun": lambda: by_command(train, keys["torchrun"], before=TORCHRUN),
        "srun": lambda: srun(start, keys["srun"]),
    }
    with ThreadPoolExecutor(max_workers=2) as pool:
        for running in [pool.submit(job) for job in jobs.values()]:
            running.result()
    return {name: open_run(folder / name) for name in keys}


def test_two_processes_train_as_one_with_twice_the_accumulation(runs: dict[str, Any]) -> None:
    one, two = runs["one"].records, runs["deepspeed"].records
    assert len(one) == len(two) == STEPS + 2  # and two validations, the last with the mixture
    for each, other in zip(one, two, strict=True):
        assert each == pytest.approx(other, rel=RELATIVE), "loss, gradient norm, learning rate or validation loss"


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_the_launcher_changes_no_bit(runs: dict[str, Any], launcher: str) -> None:
    assert runs[launcher].records == runs["deepspeed"].records
    assert runs[launcher].weights(STEPS) == runs["deepspeed"].weights(STEPS)


def test_all_processes_are_in_the_checkpoint(runs: dict[str, Any]) -> None:
    for name, count in (("one", 1), ("deepspeed", 2), ("torchrun", 2), ("srun", 2)):
        folder: Path = runs[name].folder / f"global_step{STEPS}"
        assert json.loads((folder / "meta.json").read_text())["topology"]["data"] == count
        assert sorted(path.name for path in (folder / "rng").iterdir()) == [f"rank_{rank}.pt" for rank in range(count)]


def listening(group: int) -> list[str]:
    """The addresses, as the kernel writes them, that the processes of a group listen at."""
    states = [(path, path.read_text().rpartition(")")[2].split()) for path in Path("/proc").glob("[0-9]*/stat")]
    sockets = set()
    for path in (path for path, fields in states if fields[2] == str(group)):
        sockets |= {os.readlink(file) for file in (path.parent / "fd").iterdir() if file.is_symlink()}
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return [line[1].split(":")[0] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in sockets]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_on_one_host_listens_on_the_loopback_alone(ranks: int, server: Any, tmp_path: Path) -> None:
    life = server.start(PLAIN | {"save": str(tmp_path)}, ranks, [Hook("step", "wait", [2])])
    try:
        while not (tmp_path / "metrics.jsonl").is_file() and life.wait(0.05) is None:
            pass
        assert set(listening(life.group)) == {"0100007F"}, life.output()
    finally:
        life.kill()
        life.wait(60)


def test_bfloat16_learns(train: Any, open_run: Any, tmp_path: Path) -> None:
    keys = {
        "precision": "bfloat16",
        "train_iters": 30,
        "optimizer.params.lr": 0.01,
        "pos_emb": "coca",
        "save": str(tmp_path),
        "rope_fusion": True,
    }
    finished = train(keys)
    assert finished.status == 0, finished.output
    devices, without_effect = finished.output.splitlines()[:2]
    assert re.search(r"device: CPU, 1 process.* 1 thread.*gloo.*, bf16, .*sdpa$", devices)
    assert without_effect.endswith("keys without effect (docs/config.md): rope_fusion")
    losses = open_run(tmp_path).losses
    assert sum(losses[-5:]) / 5 < 0.6 * losses[0]
