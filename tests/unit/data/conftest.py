"""Two shards that several files read."""

import pytest

from megatron_coca.data import Shard
from tests.unit.data.shard_files import make_shard


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Shard]:
    folder = tmp_path_factory.mktemp("shards")
    return [make_shard(folder / "text", [100, 1, 57, 4000]), make_shard(folder / "code", [900, 33], first=10000)]
