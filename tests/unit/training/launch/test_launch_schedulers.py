"""The scripts for schedulers start processes in a way that the launch understands."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_coca.config import load_config
from megatron_coca.training.launch.environment import find_location
from megatron_coca.training.launch.start import ranks_of_host
from megatron_coca.training.launches import GAVE_UP, REQUEUED, read_launches
from megatron_coca.work.statuses import EXIT_STATUSES, FAILED, FINAL, HUNG, PREEMPTED, UNAVAILABLE, UNJOINED

ROOT = Path(__file__).parents[4]
BATCH = ROOT / "configs/cluster/slurm.sbatch"
MANIFEST = ROOT / "configs/cluster/kubernetes.yaml"


def executable(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


RUN = ["configs/350M/roformer_coca.yml", "wandb_run_name=a b"]
STARTED_AGAIN = [FAILED, UNAVAILABLE, PREEMPTED, HUNG, UNJOINED, 135, 137, 139]


def submit(folder: Path, status: int, errors: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the batch script with stand-ins for Slurm's commands: srun writes `errors` and exits with `status`."""
    (folder / "errors").write_text(errors)
    executable(folder / "srun", f'printf "%s\\n" "$@" > "{folder}/arguments"; cat "{folder}/errors" >&2; exit {status}')
    executable(
        folder / "scontrol", f'echo "$@" >> "{folder}/scontrol.log"; echo "JobId=7 ExcNodeList=n9 NodeList=n[0-1]"'
    )
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "PYTHON": sys.executable}
    command = ["bash", str(BATCH), *RUN, f"save={folder}/run"]
    return subprocess.run(command, cwd=ROOT, env=environment | variables, capture_output=True, text=True, check=False)


def scontrol(folder: Path) -> list[str]:
    log = folder / "scontrol.log"
    return log.read_text().splitlines() if log.exists() else []


@pytest.mark.parametrize("status", [*EXIT_STATUSES, 135, 137, 139])
def test_the_batch_script_requeues_unless_a_restart_is_useless(tmp_path: Path, status: int) -> None:
    """Python is missing here, so that the script decides without the run's folder, by the number of restarts."""
    for restarts, again in (("", True), ("4", True), ("5", False)):
        done = submit(tmp_path, status, PYTHON="no-such-python", SLURM_RESTART_COUNT=restarts)
        assert done.returncode == status, done.stderr
        assert scontrol(tmp_path) == (["requeue 7"] if status in STARTED_AGAIN and again else [])
        (tmp_path / "scontrol.log").unlink(missing_ok=True)
    arguments = (tmp_path / "arguments").read_text().splitlines()
    program = arguments[arguments.index("no-such-python") :]
    assert program == ["no-such-python", "-u", "train.py", *RUN, f"save={tmp_path}/run", "--auto-resume"]


def test_the_two_lists_of_final_statuses_agree() -> None:
    assert set(EXIT_STATUSES) - set(STARTED_AGAIN) == set(FINAL)
    assert f"    {' | '.join(map(str, sorted(FINAL)))}) requeue=no ;;" in BATCH.read_text().splitlines()


def test_a_node_that_failed_twice_is_excluded_and_restarts_without_progress_end(tmp_path: Path) -> None:
    killed = "step 3\nsrun: error: n1: task 1: Killed\nsrun: error: n0: task 0: Exited with exit code 1\n"
    for _ in range(2):
        done = submit(tmp_path, 137, killed, RESTARTS="2")
        assert killed in done.stderr, "the messages stay in the job's log"
    assert scontrol(tmp_path) == ["requeue 7", "requeue 7", "--oneliner show job 7", "update JobId=7 ExcNodeList=n1,n9"]
    done = submit(tmp_path, 137, killed, RESTARTS="2")
    assert "requeued 2 times without a checkpoint after step 0" in done.stderr
    assert len(scontrol(tmp_path)) == 4
    lines = read_launches(tmp_path / "run")
    assert [line["event"] for line in lines] == [REQUEUED, REQUEUED, GAVE_UP]
    assert {(line["why"], line["node"], line["step"]) for line in lines[:2]} == {
        ("status 137, SIGKILL (n1: Killed)", "n1", 0)
    }


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
