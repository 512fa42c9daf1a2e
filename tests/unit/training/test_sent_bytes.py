"""The bytes that attention sends between the ranks of a sequence."""

from typing import Any

import pytest

from megatron_coca import cli
from megatron_coca.config import load_config
from megatron_coca.training.sent_bytes import sent_by_attention
from megatron_coca.training.topology import Topology

SHAPE: dict[str, Any] = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 8, "num_kv_heads": 4}
SHAPE |= {"seq_length": 4096, "vocab_size": 64, "pos_emb": "rotary", "precision": "bfloat16"}
HEAD, LAYERS, BFLOAT16 = 8, 2, 2


def sent(**keys: Any) -> tuple[float, float]:
    config = load_config([], SHAPE | keys)
    return sent_by_attention(config, Topology.of(config.parallel, config.parallel.sequence_ranks))


@pytest.mark.parametrize("ranks", [2, 4])
def test_ulysses_exchanges_queries_keys_values_and_outputs(ranks: int) -> None:
    heads = 8 + 4 + 4 + 8
    assert sent(sequence_parallel_size=ranks) == (2 * LAYERS * BFLOAT16 * heads * HEAD * (1 - 1 / ranks), 0)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_ring_sends_keys_and_values_and_their_gradients(ranks: int) -> None:
    numbers = (4 + 4) * HEAD * 3 * (ranks - 1) / 4
    assert sent(context_parallel_size=ranks) == (0, 3 * LAYERS * BFLOAT16 * numbers)
    assert sent(context_parallel_size=ranks, checkpoint_activations=True) == (0, 4 * LAYERS * BFLOAT16 * numbers)


def test_latents_are_sent_as_keys_and_values_of_every_head() -> None:
    """16 features of queries and keys, and 6 of values and outputs; a ring sends keys and values."""
    latent = {"num_kv_heads": 8, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 6}
    numbers = 8 * 2 * (16 + 6)
    assert sent(sequence_parallel_size=2, **latent) == (2 * LAYERS * BFLOAT16 * numbers / 2, 0)
    assert sent(context_parallel_size=2, **latent) == (0, 3 * LAYERS * BFLOAT16 * 8 * (16 + 6) * 3 / 4)


def test_both_together() -> None:
    alone = sent(sequence_parallel_size=2)[0], sent(context_parallel_size=2)[1]
    assert sent(sequence_parallel_size=2, context_parallel_size=2) == alone


def test_only_keys_that_a_query_sees() -> None:
    """A window of 65 tokens reads 64 keys at the begin of every chunk but the first; PoPE's keys are twice as wide."""
    plain = sent(context_parallel_size=4)[1]
    boundaries = 2 * 3  # of the 7 between 8 chunks, the middle one is within a rank
    keys = 3 * LAYERS * BFLOAT16 * (4 + 4) * HEAD * boundaries * 64 / 4096
    assert sent(context_parallel_size=4, sliding_window_width=64)[1] == keys < plain / 20
    assert sent(context_parallel_size=4, pos_emb="pope")[1] == 1.5 * plain
    near_and_far = sent(context_parallel_size=4, relative_positions={"type": "rerope", "window": 65})[1]
    assert plain < near_and_far <= 1.25 * plain  # two segments between neighbouring chunks


def test_estimate_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    given = [f"{name}={value}" for name, value in SHAPE.items()]
    assert (
        cli.main(["estimate", *given, "context_parallel_size=2", "sequence_parallel_size=2", "train_batch_size=1"]) == 0
    )
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("sent per token"))
    total, parts = sent(context_parallel_size=2, sequence_parallel_size=2), line.split("all-to-all ")[1]
    assert parts == f"{total[0] / 1024:.1f} KiB, ring {total[1] / 1024:.1f} KiB"
    assert cli.main(["estimate", *given, "train_batch_size=1"]) == 0 and "sent per token" not in capsys.readouterr().out
