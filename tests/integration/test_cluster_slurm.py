"""Preparation and grids as arrays of a real Slurm with two nodes. The tests kill tasks."""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT, clean_environment
from tests.integration.slurm_cluster import CannotStart, Slurm, slurm

pytestmark = pytest.mark.slow
WORDS = [f"word{number}" for number in range(40)]
SECONDS = 280


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    pytest.importorskip("datatrove", reason="the Slurm engine needs datatrove: pip install 'megatron-coca[cluster]'")
    try:
        with slurm(tmp_path_factory.mktemp("slurm") / "cluster") as started:
            yield started
    except CannotStart as reason:
        pytest.skip(f"Slurm cannot be started here: {reason}")


def submit(cluster: Slurm | None, folder: Path, *arguments: object) -> str:
    command = [sys.executable, "-u", "-m", "megatron_coca", *map(str, arguments)]
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(cluster.environment if cluster else {})}
    environment = clean_environment(variables)
    options: Any = {"capture_output": True, "text": True, "timeout": SECONDS}
    done = subprocess.run(command, cwd=folder, env=environment, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr


def kill_tasks(cluster: Slurm, kills: int, chosen: random.Random, seconds: float) -> int:
    """Kill the steps of running tasks at random moments until no job is left. Return the number of kills."""
    killed, deadline = 0, time.monotonic() + seconds
    while (jobs := cluster.jobs()) and time.monotonic() < deadline:
        running = sorted(name for name, state in jobs.items() if state == "RUNNING")
        if running and killed < kills:
            time.sleep(chosen.uniform(0.5, 2))
            line = ["scancel", "--signal=KILL", f"{chosen.choice(running)}.0"]
            environment = {**os.environ, **cluster.environment}
            killed += subprocess.run(line, env=environment, capture_output=True, check=False).returncode == 0
        time.sleep(0.3)
    assert not cluster.jobs()
    return killed


def write_corpus(folder: Path) -> Path:
    chosen = random.Random(1)
    for name in ("a", "b", "c"):
        texts = (" ".join(chosen.choices(WORDS, k=20)) for _ in range(100_000))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    sources = {name: {"paths": [f"{name}.jsonl"]} for name in ("a", "b", "c")}
    recipe = {"root": str(folder), "sources": sources, "tokenizer_type": "CharLevelTokenizer", "output": "prepared"}
    recipe["shard_gib"] = 0.005  # a task for each source
    (folder / "recipe.yml").write_text(yaml.dump(recipe))
    return folder / "recipe.yml"


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_preparation_with_killed_tasks(cluster: Slurm, tmp_path: Path) -> None:
    """The shipped settings; an array for blocks, one for shards, and the end have the bytes of one process."""
    recipe = write_corpus(tmp_path)
    (tmp_path / "one").mkdir()
    submit(None, tmp_path / "one", "prepare", recipe, "--workers", 0)
    (tmp_path / "many").mkdir()
    engine = ROOT / "configs/cluster/prepare_slurm.yaml"
    shown = submit(cluster, tmp_path / "many", "prepare", recipe, "--engine", engine, "--cpus", 1)
    assert "3 tasks, then 3 tasks" in shown and ": 3 tasks, second step" in shown and ": the end" in shown
    assert kill_tasks(cluster, 8, random.Random(3), SECONDS) >= 5
    second = "".join(path.read_text() for path in (tmp_path / "many").rglob("second/output/part_*.txt"))
    assert "tasks of shards are done" in second
    assert everything(tmp_path / "many/prepared") == everything(tmp_path / "one/prepared")
    logs = "".join(path.read_text() for path in (tmp_path / "many").rglob("slurm_logs/*.out"))
    assert "scontrol requeue" in logs and "+ scontrol requeue 1\n" not in logs, "one task is requeued, not the array"


def test_a_grid_with_killed_tasks(cluster: Slurm, small: dict[str, Any], corpus: Path, tmp_path: Path) -> None:
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
    submit(cluster, tmp_path / "many", *line, "--engine", "slurm")
    kill_tasks(cluster, 3, random.Random(4), SECONDS)
    results = [
        {
            path.relative_to(tmp_path / name): path.read_bytes()
            for path in (tmp_path / name / "results").rglob("perplexity_*.json")
            if not path.name.endswith(".cost.json")
        }
        for name in ("one", "many")
    ]
    assert results[0] == results[1] and len(results[0]) == 2
    assert (tmp_path / "many/results/report/report.html").is_file()
