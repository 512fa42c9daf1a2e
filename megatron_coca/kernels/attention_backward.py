"""Flash attention backward: one kernel for dK' and dV, one for dQ' and the bias's coefficients, no atomics.

With P the weights and D = rowsum(dO * O), dS = P * (dO V^T - D); each segment's gradients take the pairs in its band.
Every number is summed by one program in a fixed order, so equal inputs give equal bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_coca.kernels.key_gradients import key_gradients
from megatron_coca.kernels.plan import Operands, Plan, padded
from megatron_coca.kernels.query_gradients import query_gradients
from megatron_coca.kernels.tiles import OPTIONS, load_tile, operand, plane

ROWS = 64


def backward(
    operands: Operands, plan: Plan, out: Tensor, lse: Tensor, grad: Tensor, with_coefficients: bool
) -> tuple[Operands, Tensor | None]:
    """The gradients of all operands, and those of the coefficients [heads, 2] where they are asked for.

    `out` and `lse` are what `forward` gave, `grad` is the gradient of `out` with a contiguous last dimension.
    """
    results = Operands(
        query=torch.empty_like(operands.query),
        key=torch.empty_like(operands.key),
        far_query=None if operands.far_query is None else torch.empty_like(operands.far_query),
        far_key=None if operands.far_key is None else torch.empty_like(operands.far_key),
        value=torch.empty_like(operands.value),
        coefficients=None,
        starts=None,
    )
    saved = grad, lse, _output_products(out, grad)
    key_gradients(operands, plan, results, saved)
    return results, query_gradients(operands, plan, results, saved, with_coefficients)


def _output_products(out: Tensor, grad: Tensor) -> Tensor:
    """rowsum(dO * O), float32 [batch, heads, length]."""
    batch, heads, length, head_dim = out.shape
    delta = torch.empty(out.shape[:3], dtype=torch.float32, device=out.device)
    _delta[(triton.cdiv(length, ROWS), batch * heads)](
        operand(out),
        operand(grad),
        delta,
        heads,
        length,
        WIDTH=head_dim,
        COLUMNS=padded(head_dim),
        BLOCK=ROWS,
        **OPTIONS,
    )
    return delta


@triton.jit
def _delta(out, grad, delta, heads, length, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK
    batch = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    o = load_tile(plane(out, batch, head), row, length, WIDTH, BLOCK, COLUMNS).to(tl.float32)
    g = load_tile(plane(grad, batch, head), row, length, WIDTH, BLOCK, COLUMNS).to(tl.float32)
    rows = row + tl.arange(0, BLOCK)
    tl.store(delta + tl.program_id(1).to(tl.int64) * length + rows, tl.sum(o * g, 1), mask=rows < length)
