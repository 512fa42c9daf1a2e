"""PyTorch's FlexAttention: a compiled CUDA kernel for bands, documents and biases, which computes in float32."""

import inspect
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_coca.attention.backends.reference import ReferenceBackend, missing_einsum
from megatron_coca.attention.inputs import PAIRWISE, AttentionInputs, Band, DistanceBias, Needs, Segment, made_once

if TYPE_CHECKING:  # at run time, imported on first use: this module imports TorchDynamo, which takes 2 seconds
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
"""Queries and keys per block of the mask."""
MOST_SHAPES = 256
"""Maximum number of compiled shapes per process; PyTorch's default is 8. In evaluation, `padded_size` limits the number
of shapes.
"""

BIASED = {"fwd_num_stages": 2, "bwd_num_stages": 2}
"""Options of kernels with a bias. Triton 3.6 prefetches the bias of every stage to shared memory, and an H100 has too
little shared memory for the default of three stages.
"""


class FlexBackend:
    """FlexAttention for one segment. For tests, `compiled=False` runs FlexAttention's dense PyTorch version on any
    device.
    """

    def __init__(self, compiled: bool = True) -> None:
        self._compiled = compiled

    def supports(self, needs: Needs) -> str | None:
        """Return None, or the reason why the model is not supported."""
        if find_spec("torch.nn.attention.flex_attention") is None:  # PyTorch before 2.5, which the plugin supports
            return f"PyTorch {torch.__version__} has no FlexAttention; install 2.5 or newer"
        if needs.device_type != "cuda":
            return "its compiled kernel has a backward pass only on CUDA"
        if len(needs.bands) > 1:
            return "FlexAttention takes a single query and key operand, not one pair per band"
        if needs.bands[0].chunk is not None:
            return "its masks measure distances in tokens, not in chunks"
        if needs.dropout > 0:
            return "FlexAttention has no dropout"
        if needs.bias in PAIRWISE:
            return f"it supports only biases of the distance, but {needs.bias} also depends on the query's position"
        if needs.gates:
            return "it is compiled anew for each length, and forgetting gates need a call per query block"
        return missing_einsum()

    def attend(self, inputs: AttentionInputs) -> Tensor:
        """Compute attention, [batch, heads, query_length, width of V], in the query's dtype.

        A single query does not use the kernel, which would be recompiled for every generated token.

        Raises:
            ValueError: the inputs have dropout or forgetting gates.
        """
        if inputs.dropout > 0 or inputs.gates is not None:
            raise ValueError(
                "attention_backend: flex supports neither dropout nor forgetting_gate; build the model with "
                "training=True"
            )
        (segment,) = inputs.segments
        if self._compiled and segment.query.shape[2] == 1:
            return ReferenceBackend().attend(inputs)
        if not torch.is_grad_enabled() and inputs.documents is None:
            padded = _padded(inputs)
            rows = slice(inputs.past, inputs.value.shape[2])
            return self._call(padded)[: inputs.value.shape[0], :, rows]
        return self._call(inputs)

    def _call(self, inputs: AttentionInputs) -> Tensor:
        kernel: Any = _compiled if self._compiled else _flex_attention()
        (segment,) = inputs.segments
        return kernel(
            segment.query,
            segment.key,
            inputs.value,
            score_mod=_score_mod(inputs),
            block_mask=_block_mask(inputs, segment.band),
            scale=inputs.scale,
            enable_gqa=segment.query.shape[1] != segment.key.shape[1],
            kernel_options=None if inputs.bias is None else BIASED,
        )


def padded_size(size: int, smallest: int) -> int:
    """Round `size` up to the next of four sizes per power of two, and to at least `smallest`."""
    step = max(smallest, 1 << max(0, (size - 1).bit_length() - 3))
    return -(-size // step) * step


def _padded(inputs: AttentionInputs) -> AttentionInputs:
    """Pad rows and tokens with zeros, and add queries up to the number of keys. Otherwise a new kernel would be
    compiled for every length in evaluation.

    Queries are padded at the front, at the positions of cached tokens. Queries and keys are padded at the end, where no
    real token sees the padding.
    """
    (segment,), (batch, _, length, _) = inputs.segments, inputs.value.shape
    behind = padded_size(length, BLOCK) - length
    rows = (1 << (batch - 1).bit_length()) - batch
    query, key, value = (
        F.pad(x, (0, 0, front, behind, 0, 0, 0, rows))
        for x, front in ((segment.query, inputs.past), (segment.key, 0), (inputs.value, 0))
    )
    return inputs.replace(segments=(Segment(query, key, segment.band),), value=value)


def _flex_attention() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


@lru_cache(maxsize=1)
def _compiled_kernel() -> Callable[..., Any]:
    """Return FlexAttention, compiled for each length. A kernel for variable lengths is not possible, because indexing
    captured tensors of variable length fails (PyTorch 2.13 on the CPU).

    With `fullgraph`, too many lengths raise an error, instead of a silent change to the dense version.
    """
    options: dict[str, Any] = {"recompile_limit": MOST_SHAPES} if LIMITS_EACH else {}
    return torch.compile(_flex_attention(), dynamic=False, fullgraph=True, **options)


LIMITS_EACH = "recompile_limit" in inspect.signature(torch.compile).parameters
"""Whether `torch.compile` accepts a limit for one function, as PyTorch 2.13 does. Otherwise every call changes the
common limit, which takes the host 0.05 ms.
"""


def _compiled(*operands: Tensor, **options: Any) -> Any:
    if LIMITS_EACH:
        return _compiled_kernel()(*operands, **options)
    with torch._dynamo.config.patch(recompile_limit=MOST_SHAPES):
        return _compiled_kernel()(*operands, **options)


def _score_mod(inputs: AttentionInputs) -> Callable[..., Tensor] | None:
    """Return the score modification, which is soft-capping followed by the bias, or None if the model has neither."""
    add, cap = None if inputs.bias is None else _bias_mod(inputs.bias, inputs), inputs.softcap
    if cap is None:
        return add

    def capped(score: Tensor, *place: Tensor) -> Tensor:
        bounded = cap * torch.tanh(score / cap)
        return bounded if add is None else add(bounded, *place)

    return capped


def _bias_mod(bias: DistanceBias, inputs: AttentionInputs) -> Callable[..., Tensor]:
    """Return a score_mod that computes the bias from fixed slopes, or looks it up in a table [heads, key_length].

    Both give the same values, but slopes need no memory access per pair. Other biases need the table for two reasons.
    In the kernel, gradients of learned coefficients would need an atomic addition per pair, and tensors created in a
    score_mod are compiled wrongly.
    """
    past = inputs.past
    wide = torch.promote_types(inputs.value.dtype, torch.float32)
    if bias.formula == "linear" and not bias.coefficients.requires_grad:
        slopes = bias.at(torch.ones((), dtype=wide, device=inputs.value.device))  # negative

        def add_slopes(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return score + slopes[head] * (query + past - key).to(wide)

        return add_slopes
    values = bias.at(torch.arange(inputs.value.shape[2], dtype=wide, device=inputs.value.device))

    def add(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + values[head, (query + past - key).clamp(min=0)]

    return add


def _block_mask(inputs: AttentionInputs, band: Band) -> "BlockMask":
    query_length, key_length = inputs.query.shape[2], inputs.value.shape[2]
    if inputs.documents is None:
        return _band_mask(query_length, key_length, band, None, inputs.value.device)
    masks = inputs.documents.masks
    if (query_length, band) not in masks:  # all layers share the mask
        masks[query_length, band] = _mask(query_length, key_length, band, inputs.documents.starts, inputs.value.device)
    return masks[query_length, band]


def _mask(query_length: int, key_length: int, band: Band, starts: Tensor | None, device: torch.device) -> "BlockMask":
    """Build the same mask as `create_block_mask`, but without an N x N tensor. See `PackedDocuments` for `starts`."""
    from torch.nn.attention.flex_attention import BlockMask

    first = torch.zeros(1, key_length, dtype=torch.long, device=device) if starts is None else starts
    seen, whole = _blocks(query_length, key_length, band, first)
    rule = _visible(band, key_length - query_length, starts)
    return BlockMask.from_kv_blocks(
        *_listed(seen & ~whole),
        *_listed(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=rule,
        seq_lengths=(query_length, key_length),
    )


_band_mask = made_once(_mask, evaluated=16)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """For each row of `blocks` [..., columns], return the number of true columns and all column indices, true ones
    first.
    """
    return blocks.sum(-1, dtype=torch.int32), blocks.int().argsort(dim=-1, descending=True, stable=True).int()


def _blocks(query_length: int, key_length: int, band: Band, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Return two masks [batch, 1, query blocks, key blocks]. The first marks every block with visible pairs, and
    possibly also blocks without any. The second marks only blocks in which all pairs are visible, but possibly not all
    such blocks.

    Both use only the edges of a block, because the distances in a block are contiguous and document starts are
    ascending.
    """
    past = key_length - query_length
    high = key_length if band.high is None else band.high
    reach = key_length if band.first_keys is None else band.first_keys
    (first, last), (left, right) = _edges(past, key_length, starts), _edges(0, key_length, starts)
    begin, late_begin = (starts[:, None, rows, None] for rows in (first, last))
    first, last = first[:, None], last[:, None]
    nearest, furthest = first - right, last - left
    nearest_reached = first - right.minimum(late_begin + reach - 1)
    seen = (furthest >= band.low) & (nearest_reached < high) & (right >= begin) & (left < late_begin + reach)
    whole = (nearest >= band.low) & (furthest < high) & (left >= late_begin) & (right < begin + reach)
    return seen, whole & (last - first == BLOCK - 1) & (right - left == BLOCK - 1)


def _edges(start: int, stop: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and the last token of every block between tokens `start` and `stop`."""
    first = torch.arange(start, stop, BLOCK, device=like.device)
    return first, (first + BLOCK).clamp(max=stop) - 1


def _visible(band: Band, past: int, starts: Tensor | None) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def rule(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = query + past - key
        first = torch.zeros_like(query) if starts is None else starts[batch, query + past]
        inside = (distance >= band.low) & (key >= first)
        if band.high is not None:
            inside = inside & (distance < band.high)
        return inside if band.first_keys is None else inside & (key < first + band.first_keys)

    return rule
