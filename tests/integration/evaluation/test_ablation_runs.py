"""Whole grids by tools/ablate.py, up to the report. The processes are killed on the way."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT, TIME_LIMIT, clean_environment
from tests.slurm_cluster import processes

RESULTS, RUNS = "results", "runs"


@pytest.fixture
def file(small: dict[str, Any], corpus: Path, tmp_path: Path) -> Path:
    """Two models with one seed, saved every ten of forty steps, and one task."""
    changes = {"train_iters": 40, "checkpoint_factor": 10, "eval_interval": 20, "train_micro_batch_size_per_gpu": 4}
    (tmp_path / "base.json").write_text(json.dumps(small | changes))
    content = {
        "title": "Two methods",
        "base": [str(tmp_path / "base.json")],
        "seeds": [7],
        "baseline": "RoFormer",
        "results": RESULTS,
        "runs": RUNS,
        "models": {
            "RoFormer": {
                "set": ["pos_emb=rotary"],
                "variants": {"": [], "+ PI": ["rope_scaling={rope_type: linear, factor: 2.0}"]},
            },
            "ALiBi": ["pos_emb=alibi", "rotary_pct=1.0"],
        },
        "tasks": {
            "perplexity": {"data": [f"{corpus}/words_test"], "windows": ["1L", "2L"], "stride": "1L"},
        },
    }
    (tmp_path / "ablation.yml").write_text(yaml.dump(content, sort_keys=False))
    return tmp_path / "ablation.yml"


def start(file: Path, folder: Path, *options: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-u", str(ROOT / "tools" / "ablate.py"), str(file), *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=folder, env=clean_environment({"OMP_NUM_THREADS": "1"}), **pipes)


def finish(file: Path, folder: Path, *options: str) -> str:
    process = start(file, folder, *options)
    output, _ = process.communicate(timeout=TIME_LIMIT)
    assert process.returncode == 0, output
    return output


def kill_when(process: subprocess.Popen[str], reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIME_LIMIT
    while not reached():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def measured(folder: Path) -> dict[str, bytes]:
    """Result files and curves by name; not what has seconds in it, and not the report."""
    files = [file for file in (folder / RESULTS).rglob("*.json") if file.parent.name != "report"]
    kept = [file for file in files if file.name != "cell.json" and not file.name.endswith(".cost.json")]
    return {str(file.relative_to(folder)): file.read_bytes() for file in kept}


def reported_step(folder: Path) -> int:
    steps = [
        json.loads(line)["step"]
        for file in (folder / RUNS).glob("*/metrics.jsonl")
        for line in file.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]
    return max(steps, default=0)


@pytest.mark.slow
def test_a_killed_ablation_goes_on_to_the_same_results(file: Path, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(file, whole, "--jobs", "2")

    def saved() -> bool:  # a slow machine may still be writing the checkpoint of step 10 at step 15
        return reported_step(killed) >= 15 and any((killed / RUNS).glob("*/global_step*/manifest.json"))

    kill_when(start(file, killed), saved)
    assert not list((killed / RESULTS).glob("*/curve.json"))
    kill_when(start(file, killed), lambda: any((killed / RESULTS).glob("*/perplexity_*.json")))
    output = finish(file, killed)
    assert "resuming at step" in "".join(log.read_text() for log in (killed / RUNS).glob("*/log.txt"))

    assert measured(killed) == measured(whole) and len(measured(whole)) == 3 + 2
    cells = [json.loads(path.read_text()) for path in (killed / RESULTS).glob("*/cell.json")]
    assert {cell["status"] for cell in cells} == {"done"} and all(cell["training_seconds"] > 0 for cell in cells)
    assert (killed / RESULTS / "report" / "report.html").is_file() and "RoFormer + PI" in output

    for run in (killed / RUNS).iterdir():  # results are kept without their checkpoints
        run.rename(tmp_path / run.name)
    before = measured(killed)
    assert "training" not in finish(file, killed).partition("| cell")[0] and measured(killed) == before


@pytest.mark.slow
def test_a_killed_training_is_started_again_by_the_engine(file: Path, tmp_path: Path) -> None:
    """As by the kernel when memory runs out: the command survives, says that a repetition helps, and gets one."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(file, whole)
    process = start(file, killed, "--engine", "local")
    deadline = time.monotonic() + TIME_LIMIT
    program = str(ROOT / "megatron_coca/__main__.py")
    while not (trainings := [pid for pid in processes(program, "train") if _is_child_of(killed, pid)]):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(trainings[0], signal.SIGKILL)
    output, _ = process.communicate(timeout=TIME_LIMIT)
    assert process.returncode == 0 and "failed" not in output, output
    logs = "".join(path.read_text() for path in killed.rglob("part_*.txt"))
    assert logs.count("training: killed by SIGKILL") >= 1 and measured(killed) == measured(whole)


@pytest.mark.slow
def test_a_second_runner_skips_the_cell_and_a_terminated_one_saves(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    content = yaml.safe_load(file.read_text())
    file.write_text(yaml.dump(content | {"base": [*content["base"], "train_iters=1000"]}, sort_keys=False))
    first = start(file, folder, "--only", "ALiBi")
    while reported_step(folder) < 1:
        assert first.poll() is None
        time.sleep(0.01)
    second = start(file, folder, "--only", "ALiBi")
    output, _ = second.communicate(timeout=TIME_LIMIT)
    assert second.returncode == 0 and "skipped" in output and "another process runs this cell" in output
    assert first.poll() is None
    first.send_signal(signal.SIGTERM)
    output, _ = first.communicate(timeout=TIME_LIMIT)
    assert first.returncode == 75, output
    assert not [name for name in os.listdir("/proc") if name.isdigit() and _is_child_of(folder, int(name))]


def _is_child_of(folder: Path, process: int) -> bool:
    try:
        return Path(f"/proc/{process}/cwd").resolve() == folder
    except OSError:
        return False
