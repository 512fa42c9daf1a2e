"""The shipped batch script on a local Slurm with three node daemons: random kills, restarts, exclusion of nodes."""

import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megatron_coca.training.launches import REQUEUED, START, read_launches
from tests.conftest import Run, command_line
from tests.patience import patience
from tests.slurm_cluster import UNFINISHED, Cluster, processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[3]
BATCH = ROOT / "configs/cluster/slurm.sbatch"
STEPS = 300
KEYS: dict[str, Any] = {
    "train_iters": STEPS,
    "train_batch_size": 8,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "checkpoint_factor": 5,
    "eval_iters": 0,
    "distributed_backend": "gloo",
}
TWO_NODES = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=0", "--cpus-per-task=1", "--time=30")


def submit(slurm: Cluster, keys: dict[str, Any], output: Path, **variables: str) -> str:
    variables = {"MASTER_ADDR": "127.0.0.1", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"} | variables
    options = (*TWO_NODES, f"--output={output}")
    return slurm.submit(BATCH, *options, folder=ROOT, variables=variables, after=command_line(keys))


def ranks(slurm: Cluster, job: str) -> dict[str, int]:
    """Return the process id of the training on each node of a job."""
    found = {}
    for pid in processes("train.py", SLURM_CONF=slurm.environment["SLURM_CONF"], SLURM_JOB_ID=job):
        with suppress(OSError):
            variables = dict(text.partition("=")[::2] for text in Path(f"/proc/{pid}/environ").read_text().split("\0"))
            if "SLURM_PROCID" in variables:
                found[variables["SLURMD_NODENAME"]] = pid
    return found


def _kill_rank(slurm: Cluster, job: str, chosen: random.Random, number: int = signal.SIGKILL) -> None:
    os.kill(chosen.choice(sorted(ranks(slurm, job).items()))[1], number)


def _crash_rank(slurm: Cluster, job: str, chosen: random.Random) -> None:
    _kill_rank(slurm, job, chosen, signal.SIGSEGV)


def _kill_all_ranks(slurm: Cluster, job: str, chosen: random.Random) -> None:
    for pid in ranks(slurm, job).values():
        with suppress(ProcessLookupError):  # the first kill may have ended it
            os.kill(pid, signal.SIGKILL)


def _kill_node(slurm: Cluster, job: str, chosen: random.Random) -> None:
    slurm.lose(chosen.choice(sorted(ranks(slurm, job))))


def _requeue(slurm: Cluster, job: str, chosen: random.Random) -> None:
    slurm.command("scontrol", "requeue", job)


KILL: dict[str, tuple[int, Callable[[Cluster, str, random.Random], None]]] = {
    "a rank, SIGKILL": (4, _kill_rank),
    "a rank, SIGSEGV": (3, _crash_rank),
    "all ranks, SIGKILL": (2, _kill_all_ranks),
    "the node": (2, _kill_node),
    "the job, `scontrol requeue`": (1, _requeue),
}
"""The kills of the run, and their numbers."""


def await_progress(run: Path, job: str, slurm: Cluster, starts: int, step: int = 0) -> None:
    """Wait until a run has started `starts` times and has reported `step`. A requeued job starts at once."""
    deadline = time.monotonic() + patience(240)
    while len(starts_of(run)) < starts or last_step(run) < step:
        fields = slurm.job(job)
        assert time.monotonic() < deadline and fields["JobState"] in UNFINISHED, fields
        slurm.start_requeued()
        time.sleep(0.2)


def starts_of(run: Path) -> list[dict[str, Any]]:
    return [line for line in read_launches(run) if line["event"] == START]


def last_step(run: Path) -> int:
    return max((record["step"] for record in Run(run).records), default=0) if (run / "metrics.jsonl").is_file() else 0


def test_a_run_on_two_nodes_with_random_kills(
    slurm: Cluster, small: dict[str, Any], train: Any, tmp_path: Path, kills: Counter[tuple[str, str]]
) -> None:
    """Nodes that failed twice are left out, and the run ends as one that nobody killed."""
    run, output = tmp_path / "run", tmp_path / "job.out"
    job = submit(slurm, small | KEYS | {"save": str(run)}, output)
    chosen = random.Random(5)
    waiting = [kind for kind, (number, _) in KILL.items() for _ in range(number)]
    chosen.shuffle(waiting)
    for number, kind in enumerate(waiting, 1):
        await_progress(run, job, slurm, number)
        await_progress(run, job, slurm, number, last_step(run) + chosen.randint(1, 15))
        KILL[kind][1](slurm, job, chosen)
        kills["pretraining", kind] += 1
    await_progress(run, job, slurm, len(waiting) + 1)
    fields = slurm.finished(job, 240)
    text = output.read_text()[-2000:]
    assert (fields["JobState"], fields["ExitCode"]) == ("COMPLETED", "0:0"), text
    assert int(fields["Restarts"]) == len(waiting), text
    lines, starts = read_launches(run), starts_of(run)
    assert len(starts) == len(waiting) + 1 and starts[0]["why"] == "first start"
    assert all(later["step"] >= earlier["step"] for earlier, later in pairwise(starts))
    blamed = Counter(line["node"] for line in lines if line["event"] == REQUEUED and line["node"])
    excluded = {node for node, number in blamed.items() if number >= 2}
    assert excluded and set(slurm.command("scontrol", "show", "hostnames", fields["ExcNodeList"]).split()) == excluded
    assert not excluded & set(starts[-1]["nodes"])
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
    fields = slurm.finished(job, 240)
    assert (fields["JobState"], fields["ExitCode"], fields["Restarts"]) == ("FAILED", "1:0", "1")
    assert [line["event"] for line in read_launches(run)] == [REQUEUED, "gave up"]
