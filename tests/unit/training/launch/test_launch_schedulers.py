"""The scripts for schedulers start processes in a way that the launch understands."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_coca.config import load_config
from megatron_coca.training.exit_status import EXIT_STATUSES, PREEMPTED, UNAVAILABLE
from megatron_coca.training.launch.environment import find_location
from megatron_coca.training.launch.start import ranks_of_host

ROOT = Path(__file__).parents[4]
BATCH = ROOT / "configs/cluster/slurm.sbatch"
MANIFEST = ROOT / "configs/cluster/kubernetes.yaml"


def executable(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("status", "requeued"), [(0, False), (1, False), (2, False), (UNAVAILABLE, True), (PREEMPTED, True)]
)
def test_the_batch_script_requeues_preempted_jobs(tmp_path: Path, status: int, requeued: bool) -> None:
    executable(tmp_path / "srun", f'printf "%s\\n" "$@" > "{tmp_path}/arguments"; exit {status}')
    executable(tmp_path / "scontrol", f'echo "$@" > "{tmp_path}/requeued"')
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "PYTHON": "python3"}
    done = subprocess.run(
        ["bash", str(BATCH), "a b.yml", "lr=1"], cwd=ROOT, env=environment, capture_output=True, check=False
    )
    assert done.returncode == status, done.stderr
    arguments = (tmp_path / "arguments").read_text().splitlines()
    assert arguments[arguments.index("python3") :] == ["python3", "-u", "train.py", "a b.yml", "lr=1", "--auto-resume"]
    assert (tmp_path / "requeued").exists() is requeued
    if requeued:
        assert (tmp_path / "requeued").read_text() == "requeue 7\n"


def test_the_batch_script_asks_for_one_task_for_each_gpu() -> None:
    lines = [line.removeprefix("#SBATCH --") for line in BATCH.read_text().splitlines() if line.startswith("#SBATCH")]
    options = dict(line.partition("=")[::2] for line in lines)
    assert options["ntasks-per-node"] == options["gpus-per-node"] and options["signal"] == "USR1@120"
    assert "requeue" in options
    ranks = int(options["nodes"]) * int(options["ntasks-per-node"])
    config = load_config([ROOT / "configs/350M/roformer_coca.yml", ROOT / "configs/cluster/slurm.yml"])
    assert config.batch.resolve(ranks).total == 256
    assert (config.launch.num_nodes, config.launch.num_gpus) == (int(options["nodes"]), ranks // int(options["nodes"]))


@pytest.fixture(scope="module")
def job() -> dict[str, Any]:
    service, job = yaml.safe_load_all(MANIFEST.read_text())
    assert (service["kind"], job["kind"]) == ("Service", "Job") and service["spec"]["clusterIP"] == "None"
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    return job["spec"]


def test_the_pods_of_the_manifest_find_each_other(job: dict[str, Any]) -> None:
    pod = job["template"]["spec"]["containers"][0]
    given = {each["name"]: each["value"] for each in pod["env"] if "value" in each}
    (number,) = [each["valueFrom"]["fieldRef"]["fieldPath"] for each in pod["env"] if each["name"] == "RANK"]
    assert number == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    files = [ROOT / text for text in pod["args"] if text.endswith(".yml")]
    config = load_config(files, [text for text in pod["args"] if "=" in text])
    assert job["completions"] == job["parallelism"] == int(given["WORLD_SIZE"])
    assert config.launch.num_gpus == pod["resources"]["limits"]["nvidia.com/gpu"]
    ranks = []
    for index in range(job["completions"]):
        location = find_location(given | {"RANK": str(index)})
        assert location is not None and config.launch.num_gpus is not None
        own = ranks_of_host(location, config.launch.num_gpus)
        assert (own.master, own.port, own.world_size) == ("coca-0.coca", 29500, 32)
        ranks += [own.first_rank + local for local in range(own.count)]
    assert ranks == list(range(32)) and config.batch.resolve(32).total == 256


def test_the_manifest_knows_the_exit_statuses(job: dict[str, Any]) -> None:
    rules = {rule["action"]: rule for rule in job["podFailurePolicy"]["rules"] if "onExitCodes" in rule}
    assert rules["Ignore"]["onExitCodes"]["values"] == [UNAVAILABLE, PREEMPTED]
    assert set(rules["FailJob"]["onExitCodes"]["values"]) < set(EXIT_STATUSES)
