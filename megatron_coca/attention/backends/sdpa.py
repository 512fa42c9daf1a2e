"""PyTorch's scaled_dot_product_attention: flash kernels in O(N) memory, on CPU and, without a bias, on CUDA."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_coca.attention.backends.documents import attend_by_document
from megatron_coca.attention.inputs import CAUSAL, AttentionInputs, DistanceBias, Needs

QUERY_BLOCK = 512
"""Query rows per call where a bias is present: longer blocks spend more on hidden keys, shorter ones more on calls
(docs/attention.md).
"""


class SdpaBackend:
    """Causal flash attention; a distance bias enters as a Toeplitz view, never as an N x N tensor."""

    def supports(self, needs: Needs) -> str | None:
        """None, or why such a model cannot be served."""
        if needs.bands != (CAUSAL,):
            return "it takes one query and one key operand, and every key up to the query's own"
        if needs.bias and needs.device_type != "cpu":
            return "off the CPU its kernels take a bias only as a dense mask in the operands' dtype"
        return None

    def attend(self, inputs: AttentionInputs) -> Tensor:
        """[batch, heads, query_length, head_dim] in the query's dtype."""
        if inputs.bias is not None and inputs.query.device.type != "cpu":
            raise RuntimeError(
                "this model was built for the CPU; build it with the device it runs on: build_model(config, device=...)"
            )
        return attend_by_document(_attend_row, inputs)


def _attend_row(inputs: AttentionInputs) -> Tensor:
    if inputs.bias is not None:
        return _attend_in_blocks(inputs)
    if inputs.query.shape[2] in (1, inputs.key.shape[2]):
        return _sdpa(inputs, inputs.query, inputs.key, inputs.value, causal=inputs.past == 0)
    return _attend_in_blocks(inputs)


def _attend_in_blocks(inputs: AttentionInputs) -> Tensor:
    """Blocks of queries against the keys that they can see, with the bias and the causal mask in one strided view.

    A bias b(r) of the distance r = m - n is constant along diagonals. With the rows of a block reversed, entry
    (row, column) lies at offset row + column of one vector per head, so the mask of every block is a view of that
    vector with strides (1, 1): exact in float32, O(N) memory, and autograd keeps only the vector.
    """
    query_length, key_length = inputs.query.shape[2], inputs.key.shape[2]
    diagonals = _diagonals(inputs.bias, key_length, min(QUERY_BLOCK, query_length), inputs.query)
    outputs = []
    for start in range(0, query_length, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, query_length)
        visible = key_length - query_length + stop
        mask = _reversed_mask(diagonals, stop - start, visible, offset=key_length - visible)
        block = inputs.query[:, :, start:stop].flip(2)
        out = _sdpa(inputs, block, inputs.key[:, :, :visible], inputs.value[:, :, :visible], mask=mask)
        outputs.append(out.flip(2))
    return torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0]


def _diagonals(bias: DistanceBias | None, key_length: int, rows: int, query: Tensor) -> Tensor:
    """The bias at distances key_length - 1, ..., 0 and then `rows - 1` times -inf (keys to come), [heads or 1, ...]."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    distance = torch.arange(key_length - 1, -rows, -1, device=query.device)
    values = bias.at(distance.to(dtype)) if bias is not None else torch.zeros(1, len(distance), dtype=dtype)
    return values.to(query.device).masked_fill(distance < 0, -math.inf)


def _reversed_mask(diagonals: Tensor, rows: int, columns: int, offset: int) -> Tensor:
    """The additive mask [1, heads or 1, rows, columns] of a block whose last row sees `columns` keys, rows reversed."""
    heads, length = diagonals.shape
    return diagonals.as_strided((1, heads, rows, columns), (0, length, 1, 1), storage_offset=offset)


def _sdpa(
    inputs: AttentionInputs, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=inputs.dropout,
        is_causal=causal,
        scale=inputs.scale,
        enable_gqa=grouped,
    )
