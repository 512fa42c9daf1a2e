"""The shipped batch script on a Slurm of this machine with three node daemons: random kills, restarts, exclusion."""

import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megatron_coca.training.launches import REQUEUED, START, read_launches
from tests.conftest import Run, command_line
from tests.slurm_cluster import Cluster, Unavailable, cluster

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BATCH = ROOT / "configs/cluster/slurm.sbatch"
STEPS, KILLS = 40, 3
KEYS: dict[str, Any] = {
    "train_iters": STEPS,
    "train_batch_size": 8,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "checkpoint_factor": 2,
    "eval_iters": 0,
    "distributed_backend": "gloo",
}
TWO_NODES = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=0", "--cpus-per-task=1", "--time=30")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    try:
        with cluster(tmp_path_factory.mktemp("slurm"), 3) as running:
            yield running
    except Unavailable as reason:
        pytest.skip(f"Slurm cannot run here, so pretraining on two nodes was not tested: {reason}")


def submit(slurm: Cluster, keys: dict[str, Any], output: Path, **variables: str) -> str:
    variables = {"MASTER_ADDR": "127.0.0.1", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"} | variables
    options = (*TWO_NODES, f"--output={output}")
    return slurm.submit(BATCH, *options, folder=ROOT, variables=variables, after=command_line(keys))


def tasks(job: str) -> dict[str, int]:
    """Return the process id of the training on each node of a job."""
    found = {}
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            pid = int(folder.name)
            if b"train.py" not in (folder / "cmdline").read_bytes().split(b"\0"):
                continue
            variables = dict(text.partition("=")[::2] for text in (folder / "environ").read_text().split("\0"))
            if variables.get("SLURM_JOB_ID") == job and "SLURM_PROCID" in variables:
                found[variables["SLURMD_NODENAME"]] = pid
    return found


def await_step(run: Path, job: str, slurm: Cluster, step: int) -> None:
    """Wait until a run has reported `step`. A job that waits after its requeue starts at once."""
    deadline = time.monotonic() + 240
    metrics = run / "metrics.jsonl"
    while not (metrics.is_file() and f'{{"step": {step},' in metrics.read_text()):
        assert time.monotonic() < deadline, slurm.job(job)
        if slurm.job(job)["Reason"] == "BeginTime":
            slurm.command("scontrol", "update", f"JobId={job}", "StartTime=now", check=False)
        time.sleep(0.2)


def test_a_run_whose_tasks_are_killed_goes_on(
    slurm: Cluster, small: dict[str, Any], train: Any, tmp_path: Path
) -> None:
    """The node that failed twice is left out, and the run ends as one that nobody killed."""
    run, output = tmp_path / "run", tmp_path / "job.out"
    job = submit(slurm, small | KEYS | {"save": str(run)}, output)
    draw, step = random.Random(5), 0
    for kill in range(KILLS):
        step = min(STEPS - 4, step + draw.randint(4, 10))
        await_step(run, job, slurm, step)
        victim = "n1" if kill < 2 else draw.choice(sorted(tasks(job)))
        os.kill(tasks(job)[victim], draw.choice([signal.SIGKILL, signal.SIGSEGV]))
    await_step(run, job, slurm, STEPS)
    fields = slurm.finished(job, 60)
    text = output.read_text()[-2000:]
    assert (fields["JobState"], fields["ExitCode"], fields["Restarts"]) == ("COMPLETED", "0:0", str(KILLS)), text[
        -2000:
    ]
    assert fields["ExcNodeList"] == "n1" and fields["NodeList"] == "n[0,2]", text
    lines = read_launches(run)
    assert [line["node"] for line in lines if line["event"] == REQUEUED][:2] == ["n1", "n1"]
    starts = [line for line in lines if line["event"] == START]
    assert [line["nodes"] for line in starts] == [["n0", "n1"]] * 2 + [["n0", "n2"]] * 2
    assert starts[0]["why"] == "first start" and all("(n" in line["why"] for line in starts[1:]), starts
    assert all(later["step"] > earlier["step"] for earlier, later in pairwise(starts))
    whole = tmp_path / "whole"
    finished = train(KEYS | {"save": str(whole)}, options=("--num_gpus", "2"))
    assert finished.status == 0, finished.output
    assert Run(run).losses == Run(whole).losses and Run(run).weights(STEPS) == Run(whole).weights(STEPS)


def test_a_run_without_progress_ends(slurm: Cluster, small: dict[str, Any], tmp_path: Path) -> None:
    """An error at every start: RESTARTS restarts, and then the job fails."""
    broken = tmp_path / "srun"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    run, output = tmp_path / "run", tmp_path / "job.out"
    variables = {"RESTARTS": "1", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    job = submit(slurm, small | KEYS | {"save": str(run)}, output, **variables)
    deadline = time.monotonic() + 60
    while slurm.job(job)["Reason"] != "BeginTime":
        assert time.monotonic() < deadline, slurm.job(job)
        time.sleep(0.2)
    slurm.command("scontrol", "update", f"JobId={job}", "StartTime=now")
    fields = slurm.finished(job, 60)
    assert (fields["JobState"], fields["ExitCode"], fields["Restarts"]) == ("FAILED", "1:0", "1")
    assert [line["event"] for line in read_launches(run)] == [REQUEUED, "gave up"]
