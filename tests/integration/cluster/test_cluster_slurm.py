"""Preparations, suites and grids as arrays of a real Slurm. The tests kill tasks at random moments."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_coca.config import load_config
from tests.checkpoint_files import TINY, write_checkpoint
from tests.conftest import ROOT, clean_environment
from tests.patience import patience
from tests.slurm_cluster import Cluster, processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
WORDS = [f"word{number}" for number in range(40)]
SECONDS = patience(900)
COMMAND, TASK, SCRIPT, NODE = "the command", "the task", "the batch script", "the node"
Kills = Counter[tuple[str, str]]


@pytest.fixture(autouse=True)
def _needs_datatrove() -> None:
    pytest.importorskip("datatrove", reason="the Slurm engine needs datatrove: pip install 'megatron-coca[cluster]'")


def submit(cluster: Cluster | None, folder: Path, *arguments: object) -> str:
    """Run a command of this program and return its messages. With a cluster, it can submit jobs."""
    command = [sys.executable, "-u", "-m", "megatron_coca", *map(str, arguments)]
    found = cluster.environment if cluster else os.environ
    variables = {"PYTHONPATH": str(ROOT), "SLURM_CONF": found.get("SLURM_CONF", ""), "PATH": found["PATH"]}
    options: Any = {"capture_output": True, "text": True, "timeout": SECONDS}
    done = subprocess.run(command, cwd=folder, env=clean_environment(variables), check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr


def kill_tasks(cluster: Cluster, work: str, kills: Mapping[str, int], seed: int, killed: Kills) -> None:
    """Kill something of a random task at random moments, until everything in `kills` was killed as often as it says.

    Then wait until no job is left.
    """
    chosen, deadline = random.Random(seed), time.monotonic() + SECONDS
    waiting = [kind for kind, number in kills.items() for _ in range(number)]
    chosen.shuffle(waiting)
    while jobs := cluster.jobs():
        assert time.monotonic() < deadline, f"{jobs}; not killed: {waiting}"
        running = sorted(name for name, state in jobs.items() if state.startswith("RUNNING") and "_" in name)
        if running and waiting:
            time.sleep(chosen.uniform(0, 2))
            if KILL[waiting[0]](cluster, *chosen.choice(running).split("_"), chosen):
                killed[work, waiting.pop(0)] += 1
        cluster.start_requeued()
        time.sleep(0.3)
    assert not waiting, f"the work ended before these were killed: {waiting}"


def _kill_command(cluster: Cluster, array: str, task: str, chosen: random.Random) -> bool:
    """Kill the command of a task, or a process that it has started."""
    variables = {"SLURM_CONF": cluster.environment["SLURM_CONF"], "SLURM_ARRAY_JOB_ID": array}
    return _kill(processes(MAIN, SLURM_ARRAY_TASK_ID=task, **variables), chosen)


def _kill_task(cluster: Cluster, array: str, task: str, chosen: random.Random) -> bool:
    """Kill all processes of the step, but not the batch script."""
    line = ["scancel", "--signal=KILL", f"{array}_{task}.0"]
    return subprocess.run(line, env=cluster.environment, capture_output=True, check=False).returncode == 0


def _kill_script(cluster: Cluster, array: str, task: str, chosen: random.Random) -> bool:
    """Kill the batch script, so that nothing requeues the task."""
    line = ["scancel", "--signal=KILL", "--full", f"{array}_{task}"]
    return subprocess.run(line, env=cluster.environment, capture_output=True, check=False).returncode == 0


def _kill_node(cluster: Cluster, array: str, task: str, chosen: random.Random) -> bool:
    """Kill the node daemon and all processes of the node on which the task runs."""
    node = cluster.command("squeue", "--noheader", f"--jobs={array}_{task}", "--format=%N", check=False)
    if not node:
        return False
    cluster.lose(node)
    return True


def _kill(found: list[int], chosen: random.Random) -> bool:
    with suppress(ProcessLookupError):
        os.kill(chosen.choice(found or [0x7FFFFFF]), signal.SIGKILL)
        return True
    return False


MAIN = str(ROOT / "megatron_coca/__main__.py")
KILL: dict[str, Callable[[Cluster, str, str, random.Random], bool]] = {
    COMMAND: _kill_command,
    TASK: _kill_task,
    SCRIPT: _kill_script,
    NODE: _kill_node,
}


def write_corpus(folder: Path, sources: str = "abc") -> Path:
    chosen = random.Random(1)
    for name in sources:
        texts = (" ".join(chosen.choices(WORDS, k=20)) for _ in range(60_000))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    paths = {name: {"paths": [f"{name}.jsonl"]} for name in sources}
    recipe = {"root": str(folder), "sources": paths, "tokenizer_type": "CharLevelTokenizer", "output": "prepared"}
    recipe["shard_gib"] = 0.005  # a task for each source
    (folder / "recipe.yml").write_text(yaml.dump(recipe))
    return folder / "recipe.yml"


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def results(folder: Path) -> dict[str, bytes]:
    """The result files of evaluations, without the costs, which contain times."""
    found = {path.relative_to(folder): path for path in folder.rglob("*.json") if not path.name.endswith(".cost.json")}
    tasks = ("perplexity", "passkey")
    return {str(name): path.read_bytes() for name, path in found.items() if path.name.startswith(tasks)}


def test_a_preparation_with_killed_tasks(slurm: Cluster, tmp_path: Path, kills: Kills) -> None:
    """The shipped settings, two tasks at a time; an array for blocks, one for shards, and the end have the bytes of one
    process.
    """
    recipe = write_corpus(tmp_path, "abcdef")
    (tmp_path / "one").mkdir()
    submit(None, tmp_path / "one", "prepare", recipe, "--workers", 0)
    (tmp_path / "many").mkdir()
    engine = yaml.safe_load((ROOT / "configs/cluster/prepare_slurm.yaml").read_text())
    (tmp_path / "engine.yml").write_text(yaml.dump(engine | {"workers": 2, "cpus": 1}))
    shown = submit(slurm, tmp_path / "many", "prepare", recipe, "--engine", tmp_path / "engine.yml")
    assert "6 tasks, then 6 tasks" in shown and ": 6 tasks, second step" in shown and ": the end" in shown
    kill_tasks(slurm, "preparation", {COMMAND: 8, TASK: 8, SCRIPT: 1, NODE: 3}, 3, kills)
    assert everything(tmp_path / "many/prepared") == everything(tmp_path / "one/prepared")
    second = "".join(path.read_text() for path in (tmp_path / "many").rglob("second/output/part_*.txt"))
    assert "tasks that write shards are done" in second
    logs = "".join(path.read_text() for path in (tmp_path / "many").rglob("slurm_logs/*.out"))
    assert "scontrol requeue" in logs and "+ scontrol requeue 1\n" not in logs, "one task is requeued, not the array"


def test_a_suite_with_killed_tasks(slurm: Cluster, tmp_path: Path, kills: Kills) -> None:
    """Documents, variants and lengths are divided; the merged results are those of one process, bit for bit."""
    write_checkpoint(tmp_path / "run", load_config([], TINY))
    chosen = random.Random(2)
    texts = (" ".join(chosen.choices(WORDS, k=2000)) for _ in range(6))
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    suite = {
        "title": "Two variants",
        "checkpoints": {"CoCA": {"path": str(tmp_path / "run"), "variants": {"": [], "+ NTK": [*NTK]}}},
        "tasks": {
            "perplexity": {"data": [str(tmp_path / "text.jsonl")], "windows": ["1L", "16L"], "stride": "1L"},
            "passkey": {"lengths": ["16L", "32L"], "cases": 4},
        },
    }
    (tmp_path / "suite.yml").write_text(yaml.dump(suite))
    for name in ("one", "many"):
        (tmp_path / name).mkdir()
    line = ("evaluate", "suite", tmp_path / "suite.yml", "--output", "results", "--device", "cpu")
    submit(None, tmp_path / "one", *line)
    engine = ROOT / "configs/cluster/evaluate_slurm.yaml"
    submit(slurm, tmp_path / "many", *line, "--engine", engine, "--tasks", 3, "--gpus", 0, "--cpus", 1)
    kill_tasks(slurm, "evaluation", {COMMAND: 4, TASK: 3, NODE: 1}, 5, kills)
    found = results(tmp_path / "many/results/results")
    assert found == results(tmp_path / "one/results/results") and len(found) == 4
    assert (tmp_path / "many/results/report/report.html").is_file()


NTK = ("rope_scaling.rope_type=dynamic", "rope_scaling.factor=4")


def test_a_grid_with_killed_tasks(
    slurm: Cluster, small: dict[str, Any], corpus: Path, tmp_path: Path, kills: Kills
) -> None:
    """A task for each cell, the report last, and the numbers of one process."""
    changes = {"train_iters": 40, "checkpoint_factor": 10, "eval_interval": 20, "train_micro_batch_size_per_gpu": 4}
    (tmp_path / "base.json").write_text(json.dumps(small | changes))
    options = {"data": [f"{corpus}/words_test"], "windows": ["1L"], "stride": "1L"}
    grid = {
        "title": "Two methods",
        "base": [str(tmp_path / "base.json")],
        "seeds": [7],
        "results": "results",
        "runs": "runs",
        "models": {"RoFormer": ["pos_emb=rotary"], "ALiBi": ["pos_emb=alibi", "rotary_pct=1.0"]},
        "tasks": {"perplexity": options},
    }
    (tmp_path / "grid.yml").write_text(yaml.dump(grid))
    for name in ("one", "many"):
        (tmp_path / name).mkdir()
    line = ("ablate", tmp_path / "grid.yml", "--device", "cpu")
    submit(None, tmp_path / "one", *line)
    engine = ROOT / "configs/cluster/ablate_slurm.yaml"
    submit(slurm, tmp_path / "many", *line, "--engine", engine, "--gpus", 0, "--cpus", 1)
    kill_tasks(slurm, "grid", {COMMAND: 3, TASK: 2, NODE: 1}, 4, kills)
    found = results(tmp_path / "many/results")
    assert found == results(tmp_path / "one/results") and len(found) == 2
    assert (tmp_path / "many/results/report/report.html").is_file()


def test_an_array_without_datatrove(slurm: Cluster, tmp_path: Path) -> None:
    """The shipped batch script: an array of parts with a killed command, another part, and the job that finishes."""
    recipe = write_corpus(tmp_path)
    for name in ("one", "many"):
        (tmp_path / name).mkdir()
    program = tmp_path / "megatron-coca"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {MAIN} "$@"\n')
    program.chmod(0o755)
    variables = {"PARTS": "3", "PATH": f"{tmp_path}:{slurm.environment['PATH']}", "PYTHONPATH": str(ROOT)}

    def job(*options: str) -> str:
        options = ("--cpus-per-task=1", f"--output={tmp_path}/%A_%a.out", *options)
        after = ["prepare", str(recipe), "--workers", "0"]
        return slurm.submit(
            ROOT / "configs/cluster/parts.sbatch", *options, folder=tmp_path / "many", variables=variables, after=after
        )

    array = job("--array=0-1")
    deadline = time.monotonic() + SECONDS
    while not _kill(processes(MAIN, str(recipe), SLURM_ARRAY_JOB_ID=array), random.Random(1)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    again = job("--array=2")
    last = job(f"--dependency=afterany:{array}:{again}")
    assert slurm.finished(last, SECONDS)["ExitCode"] == "0:0"
    logs = {path.name: path.read_text() for path in tmp_path.glob("*.out")}
    assert {f"{array}_0.out", f"{array}_1.out", f"{again}_2.out"} < logs.keys()
    assert [text.count("exit status 137: job") for name, text in logs.items() if name.startswith(array)].count(1) == 1
    assert any("3 of 3 blocks are built" in text for text in logs.values()), "the parts did all of the work"
    submit(None, tmp_path / "one", "prepare", recipe, "--workers", 0)
    assert everything(tmp_path / "many/prepared") == everything(tmp_path / "one/prepared")
