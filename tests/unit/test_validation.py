"""Which samples a validation reads, and what its losses are called."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_coca.config import load_config
from megatron_coca.data import Batch, Blend, Shard
from megatron_coca.data.shards import ShardWriter
from megatron_coca.training.corpus import Corpus
from megatron_coca.training.validation import validate

SHAPE = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "seq_length": 4, "vocab_size": 512}
LAYOUT = (4, 2, 0, 1)


def shard(prefix: Path, token: int) -> Shard:
    """Of one token only, so that a mean over tokens tells the share of its samples."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    writer = ShardWriter(prefix, 512)
    writer.add(np.full(400, token))
    writer.finish()
    return Shard(prefix)


class Mean:
    """Stands for the engine: the loss is the mean token; keeps what it was given."""

    def __init__(self) -> None:
        self.seen: list[np.ndarray] = []

    def mean_loss(self, micro_batches: Sequence[Batch]) -> float:
        tokens = np.concatenate([batch.tokens for batch in micro_batches])
        self.seen.append(tokens)
        return float(tokens.mean())


def losses_of(shards: list[Shard], weights: list[float], **keys: Any) -> tuple[dict[str, float], Mean]:
    blend = Blend(shards, weights, 4, seed=0)
    corpus = Corpus(load_config([], SHAPE | {"num_workers": 0} | keys), Blend(shards[:1], [1], 4, 0), blend, None)
    engine = Mean()
    return validate(corpus, engine.mean_loss, LAYOUT), engine


@pytest.fixture
def two(tmp_path: Path) -> list[Shard]:
    return [shard(tmp_path / "text", 1), shard(tmp_path / "code", 5)]


def test_the_blend_and_every_source(two: list[Shard]) -> None:
    losses, engine = losses_of(two, [3.0, 1.0], eval_iters=8)
    assert losses == {"validation_loss": 2.0, "validation_loss/text": 1.0, "validation_loss/code": 5.0}
    assert len(engine.seen) == 8 + 6 + 2, "sources share the number of batches by weight"


def test_the_blend_reads_its_first_samples_every_time(two: list[Shard]) -> None:
    for _ in range(2):
        _, engine = losses_of(two, [3.0, 1.0], eval_iters=8)
        wanted = Blend(two, [3.0, 1.0], 4, seed=0).batch(range(32))
        assert np.array_equal(np.concatenate(engine.seen[:8]), wanted)


def test_a_small_source_has_a_batch(two: list[Shard]) -> None:
    _, engine = losses_of(two, [1000.0, 1.0], eval_iters=2)
    assert [int(tokens[0, 0]) for tokens in engine.seen[2:]] == [1, 1, 5]


@pytest.mark.parametrize(
    ("number", "keys", "names"),
    [
        (2, {"eval_per_source": False}, ["validation_loss"]),
        (1, {}, ["validation_loss"]),
        (2, {"eval_iters": 0}, []),
    ],
)
def test_what_is_left_out(two: list[Shard], number: int, keys: dict[str, Any], names: list[str]) -> None:
    losses, _ = losses_of(two[:number], [1.0] * number, **({"eval_iters": 2} | keys))
    assert list(losses) == names


def test_no_validation_data_no_losses(two: list[Shard]) -> None:
    corpus = Corpus(load_config([], SHAPE), Blend(two, [1, 1], 4, 0), None, None)
    assert validate(corpus, Mean().mean_loss, LAYOUT) == {}


def test_sources_of_one_name_keep_their_prefixes(tmp_path: Path) -> None:
    same = [shard(tmp_path / folder / "text", token) for folder, token in (("a", 1), ("b", 5))]
    losses, _ = losses_of(same, [1.0, 1.0], eval_iters=2)
    assert list(losses)[1:] == [f"validation_loss/{tmp_path}/{folder}/text" for folder in "ab"]
