"""Forgetting gates for kernels that have no gates: the gates become extra operand features, one query block at a time.

The bias of query m and key n is F_m - F_n, where F is the running sum of log gates. A term that is the same for all
keys of a row cancels in softmax, so c - F_n works for any constant c of the row. This c is called the row's origin. F
grows with the length, so each query block has its own origins, which are the F of a few of its tokens. Near the
diagonal, where most attention weight is, |c - F_n| then stays as small as the sum of log gates between a row and its
origin.

Q' gets constant features, and K' gets features whose products with these constants are c - F_n. The kernel therefore
also computes the gradients of the gates, in linear memory. In half precision, c - F_n is the sum of three features. In
other precisions, one feature is enough, so the same number of features allows more origins. On the CPU, half-precision
inputs are converted to float32, because a gate's gradient is a running sum of key gradients, and the kernel would round
each of them.

Strong gates are bounded: once the sum of log gates between a key and its query is below `_closed`, the key has no
weight and the exact sum makes no difference.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_coca.attention.backends.reference import recomputed, widened
from megatron_coca.attention.inputs import GATE_PARTS, AttentionInputs, gate_features, query_block

QUERY_ROWS = 256
"""Queries per call. The error of the kernels' float32 sums is 6e-8 times the sum of log gates between a row and its
origin.
"""


def attend_gated(attend: Callable[[AttentionInputs], Tensor], inputs: AttentionInputs) -> Tensor:
    """Apply `attend`, which does not support gates, to inputs with gates: [batch, heads, query_length, width of V].

    With several query blocks, the backward pass recomputes each block.
    """
    dtype = inputs.query.dtype
    if inputs.query.device.type == "cpu":  # on other devices, kernels may not support float32
        inputs = widened(inputs)
    assert inputs.gates is not None
    closed, outputs = _closed(inputs), []
    total = inputs.gates.double().clamp(min=closed).cumsum(-1)
    several = inputs.query.shape[2] > QUERY_ROWS
    for start in range(0, inputs.query.shape[2], QUERY_ROWS):
        block, keys = query_block(inputs, start, QUERY_ROWS)
        run = partial(_attend_block, attend, block, total[:, :, keys], closed)
        again = several and torch.is_grad_enabled()
        outputs.append(recomputed(run, block) if again else run())
    return (torch.cat(outputs, dim=2) if several else outputs[0]).to(dtype)


@torch.no_grad()
def _closed(inputs: AttentionInputs) -> Tensor:
    """Return a sum of log gates [batch, heads, 1] below which a key has no weight relative to the query's own key,
    regardless of the scores.

    Scores differ by at most twice the product of the largest norms; biases differ by at most the largest bias minus the
    bias at distance 0. exp(-128) is 0 in float32 (exp(-768) in float64). The range of float16 limits the result.
    """
    (batch, heads), keys = inputs.query.shape[:2], inputs.value.shape[2]
    wide = torch.promote_types(inputs.query.dtype, torch.float32)
    spread = torch.zeros(batch, heads, dtype=torch.float64, device=inputs.query.device)
    for segment in inputs.segments:
        query, key = (torch.linalg.vector_norm(x, dim=-1, dtype=wide).amax(-1) for x in (segment.query, segment.key))
        reach = query.unflatten(1, (key.shape[1], -1)) * key[..., None] * abs(inputs.scale)
        spread = torch.maximum(spread, 2 * reach.flatten(1))
    if inputs.bias is not None:
        along = inputs.bias.at(torch.arange(keys, dtype=wide, device=inputs.query.device))
        spread = spread + (along.amax(-1) - along[:, 0])
    margin = 768.0 if wide == torch.float64 else 128.0
    held = torch.finfo(inputs.query.dtype).max * 8 / QUERY_ROWS
    return -(spread + margin).clamp(max=held)[..., None]


def _attend_block(
    attend: Callable[[AttentionInputs], Tensor], block: AttentionInputs, total: Tensor, closed: Tensor
) -> Tensor:
    width = block.value.shape[-1]
    return attend(_with_features(block, total, closed))[..., :width]


def _with_features(block: AttentionInputs, total: Tensor, closed: Tensor) -> AttentionInputs:
    """Add the gates of a block to its operands as features; `total` is F of the block's keys, [batch, heads, keys]
    float64.
    """
    kv_heads, dtype, rows = block.value.shape[1], block.value.dtype, block.query.shape[2]
    groups = block.query.shape[1] // kv_heads
    width, parts = gate_features(groups), GATE_PARTS if dtype.itemsize == 2 else 1
    constant = 8 * 2.0 ** round(-math.log2(block.scale))  # a power of two, exact in every precision
    size = -(-rows // (width // (groups * parts)))  # rows that share an origin
    bias = _biases(total, rows, size, closed) / (constant * block.scale)
    used = bias.shape[2] * parts
    of_key = torch.stack(_parts(bias, dtype, parts), dim=-1).transpose(2, 3).flatten(3).unflatten(1, (kv_heads, groups))
    of_key = F.pad(of_key.transpose(2, 3).flatten(3), (0, width - groups * used))
    row, origin = (torch.arange(count, device=total.device) for count in (rows, bias.shape[2]))
    own = (row[:, None] // size == origin).repeat_interleave(parts, dim=1)
    chosen = torch.eye(groups, device=total.device)[:, None, :, None] * own[:, None] * constant
    chosen = F.pad(chosen.flatten(2), (0, width - groups * used)).to(dtype).repeat(kv_heads, 1, 1)
    of_query = chosen.expand(len(block.value), -1, -1, -1)
    segments = tuple(
        replace(each, query=torch.cat((each.query, of_query), -1), key=torch.cat((each.key, of_key), -1))
        for each in block.segments
    )
    return block.replace(segments=segments, value=F.pad(block.value, (0, width)), gates=None)


def _biases(total: Tensor, rows: int, size: int, closed: Tensor) -> Tensor:
    """Compute c - F_n of all keys for every group of `size` tokens in the last `rows` tokens, [batch, heads, origins,
    keys]. c is the F of the group's middle token. Values are clamped from below to the value at which a key has no
    weight in the group's first row, and therefore in none of its rows.
    """
    first = torch.arange(total.shape[-1] - rows, total.shape[-1], size, device=total.device)
    stop = (first + size).clamp(max=total.shape[-1])
    origin = total[:, :, (first + stop) // 2, None]
    low, high = (origin.detach() - total[:, :, place, None].detach() for place in (first, stop - 1))
    return (origin - total[:, :, None]).clamp(low + closed[..., None], high)


def _parts(x: Tensor, dtype: torch.dtype, count: int) -> list[Tensor]:
    """Split x, a float64 tensor, into `count` tensors of `dtype` that sum to x. Only the first passes gradients on."""
    parts = [x.to(dtype)]
    for _ in range(count - 1):
        x = x.detach() - parts[-1].detach()
        parts.append(x.to(dtype))
    return parts
