"""The position tables of a rank are those of its tokens."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_coca.attention.build import build_methods
from megatron_coca.attention.context import assign_shard
from megatron_coca.attention.inputs import documents_from_ids
from megatron_coca.attention.method import PositionEncoding
from megatron_coca.attention.ring.exchange import Ring
from megatron_coca.attention.ring.shard import RingShard
from megatron_coca.config import load_config

SHAPE: dict[str, Any] = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 16}
IDS = torch.tensor([[0] * 9 + [1] * 20])


def tables(keys: dict[str, Any], ring: Ring | None, reached: int | None) -> tuple[list[Tensor], int]:
    """All tables, [rows, length, width], and the length of the whole sequence."""
    (method,) = build_methods(load_config([], SHAPE | keys)).values()
    encoding = PositionEncoding(method).eval()
    if ring is not None:
        assign_shard(encoding, RingShard(ring=ring))
    context = encoding(torch.arange(29), 29, torch.float64, documents=documents_from_ids(IDS), reached=reached)
    pairs = [pair for each in context.segments for pair in (each.query, each.key) if pair is not None]
    found = [table.reshape(-1, *table.shape[-2:]) for pair in pairs for table in pair]
    factor = [] if context.query_factor is None else [context.query_factor[None]]
    return [*found, *factor], context.length


@pytest.mark.parametrize("reached", [29, None])
@pytest.mark.parametrize(
    "keys",
    [
        {"pos_emb": "xpos"},
        {"pos_emb": "coca", "logit_scaling": "log_n", "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        {"pos_emb": "rotary", "relative_positions": {"type": "streaming", "window": 4, "sinks": 3}},
    ],
    ids=str,
)
def test_tables_of_the_own_tokens(keys: dict[str, Any], reached: int | None) -> None:
    whole, length = tables(keys, None, reached)
    assert length == 29 and len(whole) >= 4
    for rank in range(3):
        ring = Ring(None, rank, 3)  # type: ignore[arg-type]  # tables need no messages
        own, of_rank = tables(keys, ring, reached)
        assert of_rank == 29
        for part, table in zip(own, whole, strict=True):
            expected = ring.division(29).held(table.transpose(1, 2), rank).transpose(1, 2)
            assert torch.equal(part, expected)
