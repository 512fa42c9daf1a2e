"""The Ray engine on a test cluster of two nodes. The test kills at random moments."""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cluster.test_cluster_slurm import COMMAND, MAIN, NODE, TASK, everything, submit, write_corpus
from tests.slurm_cluster import parent, processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
KILLED = {COMMAND: 2, TASK: 1, NODE: 1}


@pytest.fixture
def ray_cluster() -> Iterator[Any]:
    pytest.importorskip("ray", reason="the Ray engine needs ray: pip install 'megatron-coca[cluster]'")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        yield cluster
    finally:
        cluster.shutdown()


def killed(command: int, worker: bool) -> bool:
    """Kill a command, or the worker process of Ray that has started it. Return False if it has ended."""
    victim = parent(command) if worker else command
    with suppress(ProcessLookupError):
        if victim > 1:
            os.kill(victim, signal.SIGKILL)
            return True
    return False


def test_a_preparation_equals_that_of_one_process(
    ray_cluster: Any, tmp_path: Path, kills: Counter[tuple[str, str]]
) -> None:
    recipe, chosen = write_corpus(tmp_path, "abcde"), random.Random(6)
    for name in ("one", "many"):
        (tmp_path / name).mkdir()
    submit(None, tmp_path / "one", "prepare", recipe, "--workers", 0)
    second = ray_cluster.add_node(num_cpus=1)
    waiting = [kind for kind, number in KILLED.items() for _ in range(number)]
    chosen.shuffle(waiting)
    with ThreadPoolExecutor(1) as pool:
        line = ("prepare", recipe, "--engine", "ray", "--address", ray_cluster.address)
        done = pool.submit(submit, None, tmp_path / "many", *line)
        while not done.done():
            running = processes(MAIN, str(recipe), "--part")
            if running and waiting:
                time.sleep(chosen.uniform(0, 1))
                if waiting[0] == NODE:
                    ray_cluster.remove_node(second, allow_graceful=False)
                    second = ray_cluster.add_node(num_cpus=1)
                elif not killed(chosen.choice(running), waiting[0] == TASK):
                    continue
                kills["preparation on Ray", waiting.pop(0)] += 1
            time.sleep(0.2)
        done.result()
    assert not waiting, f"the work ended before these were killed: {waiting}"
    assert everything(tmp_path / "many/prepared") == everything(tmp_path / "one/prepared")
    (last,) = (tmp_path / "many").rglob("finish.txt")
    assert "manifest.json" in last.read_text(), "the end ran on Ray"
    assert len(list((tmp_path / "many").rglob("part_*.txt"))) == 10, "five tasks for blocks and five for shards"
