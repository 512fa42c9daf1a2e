"""The rounds of all ranks, computed in one process without messages, are the attention of the whole sequence."""

import pytest
import torch
from torch import Tensor

from megatron_coca.attention.backends.merge import MergeBackend
from megatron_coca.attention.backends.reference import ReferenceBackend
from megatron_coca.attention.inputs import AttentionInputs, Backend, Band, Segment, documents_from_ids
from megatron_coca.attention.ring.attend import KERNELS, Kernel
from megatron_coca.attention.ring.dense import DenseForward
from megatron_coca.attention.ring.flash import FlashForward
from megatron_coca.attention.ring.plan import Division, ring_plan
from megatron_coca.attention.ring.rounds import Attended, Keys, Queries, Scoring

LENGTH, RANKS = 29, 3
BANDS = (Band(high=5), Band(low=5))


def make(dtype: torch.dtype) -> AttentionInputs:
    """Two segments, values half as wide as the operands, two key heads, and documents in one of two rows."""
    generator = torch.Generator().manual_seed(1)

    def drawn(heads: int, width: int) -> Tensor:
        return torch.randn(2, heads, LENGTH, width, generator=generator).to(dtype).double().requires_grad_()

    ids = torch.tensor([[0] * 11 + [1] * 18, [0] * 29])
    segments = tuple(Segment(drawn(4, 16), drawn(2, 16), band) for band in BANDS)
    return AttentionInputs(segments, drawn(2, 8), 0.25, documents=documents_from_ids(ids))


def by_rounds(kernel: Kernel, inputs: AttentionInputs, grad: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """The output, and the gradients of V and of every operand, in float64."""
    tensors = [
        x.detach().to(dtype) for x in (inputs.value, *(x for each in inputs.segments for x in (each.query, each.key)))
    ]
    value, *operands = tensors
    scoring, division = Scoring(inputs.scale, BANDS), Division(LENGTH, RANKS)
    out, sums = torch.zeros(grad.shape).double(), [torch.zeros_like(x, dtype=torch.float64) for x in tensors]
    for rank in range(RANKS):
        plan = ring_plan(division, rank, BANDS, inputs.documents)
        own = torch.tensor([token for chunk in division.chunks(rank) for token in chunk])
        queries = Queries([x[:, :, own] for x in operands[::2]])
        rounds = []
        for each in plan.rounds:
            tokens = torch.tensor([token for part in each.received.ranges for token in part], dtype=torch.long)
            used = each.received.segments
            keys = [x[:, :, tokens] if index in used else None for index, x in enumerate(operands[1::2])]
            rounds.append((each, tokens, Keys(value[:, :, tokens], keys)))
        forward = kernel.forward(scoring, plan, queries, value.shape[-1])
        for each, _, keys in rounds:
            forward.add(each, keys)
        own_out, lse = forward.finished()
        own_out = own_out.to(dtype)
        out[:, :, own] = own_out.double()
        backward = kernel.backward(scoring, plan, queries, Attended(own_out, grad[:, :, own].to(dtype), lse))
        for each, tokens, keys in rounds:
            found = backward.add(each, keys)
            for index, part in zip((0, 2, 4), (found.value, *found.operands), strict=True):
                if part is not None:
                    sums[index].index_add_(2, tokens, part.double())
        for index, part in zip((1, 3), backward.finished()[0], strict=True):
            sums[index][:, :, own] = part.double()
    return [out, *sums]


def whole(backend: Backend, inputs: AttentionInputs, grad: Tensor, dtype: torch.dtype) -> list[Tensor]:
    leaves = [inputs.value, *(x for each in inputs.segments for x in (each.query, each.key))]
    value, *operands = (x.to(dtype) for x in leaves)
    pairs = zip(operands[::2], operands[1::2], BANDS, strict=True)
    out = backend.attend(inputs.replace(value=value, segments=tuple(Segment(*each) for each in pairs)))
    return [out.detach().double(), *torch.autograd.grad(out, leaves, grad.to(dtype))]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", [MergeBackend(), ReferenceBackend()], ids=lambda backend: type(backend).__name__)
def test_rounds_add_up_to_attention(backend: Backend, dtype: torch.dtype) -> None:
    """With at most twice the error of the backend on the whole sequence; in float64, up to rounding."""
    inputs, kernel = make(dtype), KERNELS[type(backend)]
    assert kernel.forward is {MergeBackend: FlashForward, ReferenceBackend: DenseForward}[type(backend)]
    grad = torch.randn(2, 4, LENGTH, 8, generator=torch.Generator().manual_seed(2)).to(dtype).double()
    exact, plain = whole(ReferenceBackend(), inputs, grad, torch.float64), whole(backend, inputs, grad, dtype)
    for got, expected, other in zip(by_rounds(kernel, inputs, grad, dtype), exact, plain, strict=True):
        allowed = 2 * float((other - expected).norm()) if dtype != torch.float64 else 1e-13 * float(expected.norm())
        assert float((got - expected).norm()) <= allowed
