"""The Ray engine on a test cluster of two nodes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.test_cluster_slurm import everything, submit, write_corpus

pytestmark = pytest.mark.slow


@pytest.fixture
def address() -> Iterator[str]:
    pytest.importorskip("ray", reason="the Ray engine needs ray: pip install 'megatron-coca[cluster]'")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1)
        yield str(cluster.address)
    finally:
        cluster.shutdown()


def test_a_preparation_equals_that_of_one_process(address: str, tmp_path: Path) -> None:
    recipe = write_corpus(tmp_path)
    for name in ("one", "many"):
        (tmp_path / name).mkdir()
    submit(None, tmp_path / "one", "prepare", recipe, "--workers", 0)
    submit(None, tmp_path / "many", "prepare", recipe, "--engine", "ray", "--address", address)
    assert everything(tmp_path / "many/prepared") == everything(tmp_path / "one/prepared")
    assert len(list((tmp_path / "many").rglob("part_*.txt"))) == 6, "three tasks for blocks and three for shards"
