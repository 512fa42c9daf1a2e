"""Forgetting gates by kernels that know none: in blocks of queries, as features of the operands.

The bias of query m and key n is F_m - F_n with F the running sum of log gates. Softmax cancels what is the same for all
keys of a row, so that c - F_n serves as well for any c of the row, its origin. F grows with the length, so a block of
queries has origins of its own, the F of a few of its tokens: numbers near the diagonal, where a key counts, stay as
small as the sum between a row and its origin.

Q' gets features that are constant, and K' features whose products with them are c - F_n: a kernel's own gradients then
are those of the gates, and its memory stays linear. Half precision gets the number as a sum of three; other precisions
use the same features for more origins. On the CPU half precision is computed in float32: the gradient of a gate is a
running sum of the gradients of keys, which a kernel rounds one by one.

Strong gates are bounded, each by itself: where the sum of the gates between a key and its query is below `_closed`, the
key has no weight, and it makes no difference by how much.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_coca.attention.backends.reference import widened
from megatron_coca.attention.inputs import GATE_PARTS, AttentionInputs, gate_features, query_block

QUERY_ROWS = 256
"""Queries of a call. The kernels' float32 sums have errors of 6e-8 times the log gates between a row and its origin."""


def attend_gated(attend: Callable[[AttentionInputs], Tensor], inputs: AttentionInputs) -> Tensor:
    """`attend` of inputs with gates, for an `attend` that knows none: [batch, heads, query_length, head_dim].

    With several blocks, the backward pass computes each again.
    """
    dtype = inputs.query.dtype
    if inputs.query.device.type == "cpu":  # elsewhere kernels may know no float32
        inputs = widened(inputs)
    assert inputs.gates is not None
    closed, outputs = _closed(inputs), []
    total = inputs.gates.double().clamp(min=closed).cumsum(-1)
    several = inputs.query.shape[2] > QUERY_ROWS
    for start in range(0, inputs.query.shape[2], QUERY_ROWS):
        block, keys = query_block(inputs, start, QUERY_ROWS)
        run = partial(_attend_block, attend, block, total[:, :, keys], closed)
        again = several and torch.is_grad_enabled()
        outputs.append(checkpoint(run, use_reentrant=False, preserve_rng_state=inputs.dropout > 0) if again else run())
    return (torch.cat(outputs, dim=2) if several else outputs[0]).to(dtype)


@torch.no_grad()
def _closed(inputs: AttentionInputs) -> Tensor:
    """A sum of log gates [batch, heads, 1] with which a key has no weight beside the query's own, whatever the scores.

    Scores differ by at most twice the product of the largest norms, biases by the largest one over that of distance 0,
    and exp(-128) is 0 in float32 (exp(-768) in float64). float16 holds the sums of fewer nats.
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
    """The block with its gates in the operands; `total` is F of its keys, [batch, heads, keys] float64."""
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
    """c - F_n of all keys for every `size` of the last `rows` tokens, c that of the token in their middle, [batch,
    heads, origins, keys]; no smaller than what closes a key to the first of these rows, for which it is largest.
    """
    first = torch.arange(total.shape[-1] - rows, total.shape[-1], size, device=total.device)
    stop = (first + size).clamp(max=total.shape[-1])
    origin = total[:, :, (first + stop) // 2, None]
    low, high = (origin.detach() - total[:, :, place, None].detach() for place in (first, stop - 1))
    return (origin - total[:, :, None]).clamp(low + closed[..., None], high)


def _parts(x: Tensor, dtype: torch.dtype, count: int) -> list[Tensor]:
    """`count` numbers of `dtype` whose sum is x, float64; the gradient is that of the first."""
    parts = [x.to(dtype)]
    for _ in range(count - 1):
        x = x.detach() - parts[-1].detach()
        parts.append(x.to(dtype))
    return parts
