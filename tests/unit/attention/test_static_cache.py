"""Attention of one token over slots against the dense formula, and the buffers of layers with a window.

tests/unit/model/test_static_decoding.py compares whole models with the growing cache, for every method.
"""

from dataclasses import replace

import pytest
import torch

from megatron_coca.attention.backends.reference import ReferenceBackend
from megatron_coca.attention.inputs import AttentionInputs, Band, Segment
from megatron_coca.attention.layer import LayerCache
from megatron_coca.attention.static_cache import HIDDEN, attend_token

KEYS = 11


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("softcap", "sinks"), [(None, False), (2.0, True)])
def test_one_token_is_the_last_row_of_the_formula(kv_heads: int, softcap: float | None, sinks: bool) -> None:
    bands = (Band(high=4), Band(low=4, first_keys=5))
    segments = tuple(
        Segment(drawn(2, 4, 1, 8) + number, drawn(2, kv_heads, KEYS, 8) - number, band)
        for number, band in enumerate(bands)
    )
    inputs = AttentionInputs(segments, drawn(2, kv_heads, KEYS, 6), 0.4, softcap=softcap)
    inputs = replace(inputs, sinks=drawn(4) if sinks else None)
    wanted = ReferenceBackend().attend(inputs)
    behind = 3  # slots of tokens to come
    later = tuple(replace(each, key=torch.cat((each.key, drawn(2, kv_heads, behind, 8)), 2)) for each in segments)
    value = torch.cat((inputs.value, drawn(2, kv_heads, behind, 6)), 2)
    of_slots = torch.tensor([1] * 5 + [HIDDEN] * 2 + [0] * 4 + [HIDDEN] * behind)
    found = attend_token(inputs.replace(segments=later, value=value), of_slots, None)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-14)


def test_a_window_keeps_a_slot_for_each_token_that_a_query_sees() -> None:
    layer, x = LayerCache(window=4), drawn(1, 1, 30, 2)
    layer.append(x[:, :, :9])
    layer.hold(30)
    assert layer.buffers[0].shape[2] == 4 and layer.first == 6
    torch.testing.assert_close(layer.buffers[0][:, :, :3], x[:, :, 6:9])
    for token in range(9, 15):
        layer.buffers[0][:, :, (token - layer.first) % 4] = x[:, :, token]
    layer.release(15)
    assert layer.first == 11 and torch.equal(layer.buffers[0], x[:, :, 11:15])
    (view,) = layer.append(x[:, :, 15:17])
    assert torch.equal(view, x[:, :, 12:17]), "the new tokens and those that the first of them sees"


def test_whole_buffers_grow_to_the_capacity_once() -> None:
    layer, x = LayerCache(), drawn(1, 2, 5, 3)
    layer.append(x)
    layer.hold(12)
    (buffer,) = layer.buffers
    assert buffer.shape[2] == 12 and torch.equal(buffer[:, :, :5], x) and not buffer[:, :, 5:].any()
    layer.hold(12)
    assert layer.buffers[0] is buffer
