"""The manifest of an Indexed Job, run as on a cluster: one process for each pod, with the index in its environment."""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT, clean_environment
from tests.integration.cluster.test_cluster_slurm import everything, submit, write_corpus

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
MANIFEST = ROOT / "configs/cluster/parts_kubernetes.yaml"


def start_pod(pod: dict[str, Any], folder: Path, index: int) -> "subprocess.Popen[bytes]":
    """Start the container of a pod with the variable that Kubernetes sets for its index."""
    program, *command = [*pod["command"], *pod["args"]]
    assert program == "megatron-coca"
    environment = clean_environment({"PYTHONPATH": str(ROOT), "JOB_COMPLETION_INDEX": str(index)})
    return subprocess.Popen([sys.executable, "-m", "megatron_coca", *command], cwd=folder, env=environment)


def test_the_pods_do_the_work_of_one_process(tmp_path: Path) -> None:
    """A pod is killed, and its index is started again, as `backoffLimitPerIndex` says. Then the command runs once."""
    job = yaml.safe_load(MANIFEST.read_text())["spec"]
    (pod,) = job["template"]["spec"]["containers"]
    assert f"auto/{job['completions']}" in pod["args"]
    recipe = write_corpus(tmp_path)
    for name in ("one", "many"):
        (tmp_path / name).mkdir()
        shutil.copy(recipe, tmp_path / name)
    pods = {index: start_pod(pod, tmp_path / "many", index) for index in range(3)}
    time.sleep(1)
    pods[1].send_signal(signal.SIGKILL)
    assert pods.pop(1).wait() == -signal.SIGKILL
    for index in (1, *range(3, job["completions"])):
        pods[index] = start_pod(pod, tmp_path / "many", index)
        assert pods[index].wait() == 0
    assert [pod.wait() for pod in pods.values()] == [0] * job["completions"]
    line = ("prepare", "recipe.yml", "--output", "data/prepared")
    submit(None, tmp_path / "many", *line)
    submit(None, tmp_path / "one", *line, "--workers", 0)
    assert everything(tmp_path / "many/data/prepared") == everything(tmp_path / "one/data/prepared")
