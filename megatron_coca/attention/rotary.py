"""Cosine and sine tables.

Pairing is that of GPT-NeoX and Hugging Face: dimension i turns with dimension i + d/2 (pairs.py). Tables are made in float64
and rounded once, because a float32 phase at position 32k is already off by 1e-3, and they are never module buffers,
which `.bfloat16()` or an engine could cast.

Every score form is linear in its query's and in its key's tables. So whatever multiplies the scores of a row, a
column or a frequency (log n, YaRN's temperature, the decay of xPos) is multiplied into the tables, once for all
layers, and costs the operands nothing.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class RotaryTables(NamedTuple):
    """cos and sin of position times frequency, times an amplitude; each [length, d/2] or [batch, 1, length, d/2]."""

    cos: Tensor
    sin: Tensor


def rotary_tables(
    positions: Tensor, inverse_frequencies: Tensor, dtype: torch.dtype, amplitude: Tensor | float = 1.0
) -> RotaryTables:
    """Tables in at least float32 (float64 where `dtype` is).

    `positions` is [length] or [batch, length], of any real type; `amplitude` broadcasts to [..., length, d/2].
    """
    phases = positions.to(torch.float64)[..., None] * inverse_frequencies.to(positions.device)
    cos, sin = phases.cos() * amplitude, phases.sin() * amplitude
    if positions.dim() == 2:
        cos, sin = cos[:, None], sin[:, None]
    table_dtype = torch.promote_types(dtype, torch.float32)
    return RotaryTables(cos.to(table_dtype), sin.to(table_dtype))
