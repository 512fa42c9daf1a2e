"""The kernel for one query per row in Triton's interpreter (or on a GPU, if there is one), against float64."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from megatron_coca.attention.inputs import CAUSAL, AttentionInputs, Segment
from megatron_coca.attention.static_cache import HIDDEN, attend_token

pytest.importorskip("triton")

from megatron_coca.kernels import token_attention as kernel
from megatron_coca.kernels.token_attention import token_attention, unsupported

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Call:
    """Shapes and terms of one call. `bias`: the dimensions of the bias, 0 for none."""

    slots: int
    index: int
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 16
    value_dim: int = 16
    batch: int = 1
    segments: int = 1
    bias: int = 0
    softcap: float | None = None
    sinks: bool = False


CALLS = [
    Call(1, 0),
    Call(130, 129),
    Call(130, 64, heads=4, kv_heads=2, bias=2),
    Call(300, 17, batch=2, segments=2, bias=3),
    Call(200, 150, heads=6, kv_heads=1, head_dim=40, value_dim=24, segments=3, softcap=3.0, bias=2, sinks=True),
    Call(100, 99, batch=2, head_dim=24, sinks=True),
]


def operands(call: Call, dtype: torch.dtype) -> tuple[AttentionInputs, Tensor, Tensor | None]:
    """The inputs in `dtype` out of longer buffers, the segments of the slots, and the bias."""
    generator = torch.Generator().manual_seed(call.slots)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    def buffer(width: int) -> Tensor:
        x = drawn(call.batch, call.kv_heads, call.slots + 7, width)
        x[:, :, call.index + 1 :] = torch.nan  # nothing there may be read
        return x[:, :, : call.slots]

    segments = tuple(
        Segment(drawn(call.batch, call.heads, 1, call.head_dim), buffer(call.head_dim), CAUSAL)
        for _ in range(call.segments)
    )
    sinks = drawn(call.heads) if call.sinks else None
    inputs = AttentionInputs(segments, buffer(call.value_dim), 0.3, softcap=call.softcap, sinks=sinks)
    of_slots = torch.randint(HIDDEN, call.segments, (call.slots,), generator=generator, dtype=torch.int32)
    of_slots[call.index] = 0
    of_slots[call.index + 1 :] = HIDDEN
    along = None
    if call.bias:
        along = torch.randn([call.batch, call.heads, call.slots][-call.bias :], generator=generator).to(DEVICE)
    return inputs, of_slots.to(DEVICE), along


def exact(inputs: AttentionInputs, of_slots: Tensor, along: Tensor | None) -> Tensor:
    segments = tuple(Segment(x.query.double(), x.key.nan_to_num().double(), x.band) for x in inputs.segments)
    return attend_token(inputs.replace(segments=segments, value=inputs.value.nan_to_num().double()), of_slots, along)


@pytest.mark.parametrize("programs", [1, 512], ids=["one part", "many parts"])
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_the_kernel_is_the_formula(call: Call, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "PROGRAMS", programs)
    inputs, of_slots, along = operands(call, torch.float32)
    index = torch.tensor([call.index], device=DEVICE)
    pairs = [(segment.query, segment.key) for segment in inputs.segments]
    found = token_attention(pairs, inputs.value, inputs.scale, of_slots, along, index, call.softcap, inputs.sinks)
    assert found.shape == (call.batch, call.heads, 1, call.value_dim)
    torch.testing.assert_close(found.double(), exact(inputs, of_slots, along), rtol=1e-5, atol=2e-6)


def test_operands_that_the_kernel_does_not_support() -> None:
    query, key = torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 4, 8)
    assert unsupported([(query, key)] * 3, key) is None
    assert "4 segments" in (unsupported([(query, key)] * 4, key) or "")
    assert "float64" in (unsupported([(query.double(), key.double())], key.double()) or "")
    wide = torch.zeros(1, 1, 4, 300)
    with pytest.raises(ValueError, match="more than 256 features"):
        token_attention([(query, key)], wide, 1.0, torch.zeros(4, dtype=torch.int32), None, torch.tensor([0]))
