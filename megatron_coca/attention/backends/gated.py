"""Forgetting gates by kernels that know none: in blocks of queries, as features of the operands.

The bias of query m and key n is F_m - F_n with F the running sum of log gates. Softmax cancels what is the same for all
keys of a row, so that c - F_n serves as well for any c of the row. F grows with the length, so a block of queries has
its own c, the F of its middle: numbers near the diagonal, where a key counts, stay as small as half a block's sum.

Q' gets features that are constant, and K' features whose products with them are c - F_n: a kernel's own gradients then
are those of the gates, and its memory stays linear. Half precision gets the number as a sum of three.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_coca.attention.inputs import GATE_PARTS, AttentionInputs, gate_features, query_block

QUERY_ROWS = 256
"""Queries of a call: the kernels' float32 sums have errors of 6e-8 times half the sum of a block's log gates."""
LOWEST = -(2.0**14)
"""Bound of the bias, which float16 holds; keys below it have no weight."""


def attend_gated(attend: Callable[[AttentionInputs], Tensor], inputs: AttentionInputs) -> Tensor:
    """`attend` of inputs with gates, for an `attend` that knows none: [batch, heads, query_length, head_dim].

    With several blocks, the backward pass computes each again.
    """
    assert inputs.gates is not None
    total, outputs = inputs.gates.double().cumsum(-1), []
    several = inputs.query.shape[2] > QUERY_ROWS
    for start in range(0, inputs.query.shape[2], QUERY_ROWS):
        block, keys = query_block(inputs, start, QUERY_ROWS)
        run = partial(_attend_block, attend, block, total[:, :, keys])
        again = several and torch.is_grad_enabled()
        outputs.append(checkpoint(run, use_reentrant=False, preserve_rng_state=inputs.dropout > 0) if again else run())
    return torch.cat(outputs, dim=2) if several else outputs[0]


def _attend_block(attend: Callable[[AttentionInputs], Tensor], block: AttentionInputs, total: Tensor) -> Tensor:
    width = block.value.shape[-1]
    return attend(_with_features(block, total))[..., :width]


def _with_features(block: AttentionInputs, total: Tensor) -> AttentionInputs:
    """The block with its gates in the operands; `total` is F of its keys, [batch, heads, keys] float64."""
    kv_heads, dtype = block.value.shape[1], block.value.dtype
    groups = block.query.shape[1] // kv_heads
    width = gate_features(groups)
    constant = 8 * 2.0 ** round(-math.log2(block.scale))  # a power of two, exact in every precision
    middle = total.shape[-1] - (block.query.shape[2] + 1) // 2
    bias = (total[:, :, middle, None] - total).clamp(min=LOWEST) / (constant * block.scale)
    of_key = torch.stack(_parts(bias, dtype), dim=-1).unflatten(1, (kv_heads, groups))
    of_key = F.pad(of_key.transpose(2, 3).flatten(3), (0, width - GATE_PARTS * groups))
    chosen = torch.eye(groups, width // GATE_PARTS, dtype=dtype, device=bias.device).repeat_interleave(
        GATE_PARTS, dim=1
    )
    chosen = F.pad(chosen * constant, (0, width - chosen.shape[1])).repeat(kv_heads, 1)[:, None]
    of_query = chosen.expand(len(block.value), -1, block.query.shape[2], -1)
    segments = tuple(
        replace(each, query=torch.cat((each.query, of_query), -1), key=torch.cat((each.key, of_key), -1))
        for each in block.segments
    )
    return block.replace(segments=segments, value=F.pad(block.value, (0, width)), gates=None)


def _parts(x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """`GATE_PARTS` numbers of `dtype` whose sum is x, float64; the gradient is that of the first."""
    parts = [x.to(dtype)]
    for _ in range(GATE_PARTS - 1):
        x = x.detach() - parts[-1].detach()
        parts.append(x.to(dtype))
    return parts
