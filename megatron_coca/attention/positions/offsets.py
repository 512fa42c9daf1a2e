"""Constant angles of polar score forms. Each query head has one angle per magnitude, either learned or drawn once."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor


class HeadOffsets(nn.Module):
    """The offsets delta of one layer, in radians, in the parameter `bias` [heads, number of magnitudes].

    Learned offsets that start as `zero` or `uniform` are clamped to [-2 pi, 0], as in PoPE's paper. `free` offsets
    start at 0 without limits. Drawn offsets are uniform in [-pi, pi) and never trained. Offsets have no weight decay.
    """

    def __init__(self, heads: int, magnitudes: int, initial: str) -> None:
        """`initial` is `zero`, `uniform` or `free` for learned offsets, and `random` for drawn offsets."""
        super().__init__()
        self.initial = initial
        self.bias = nn.Parameter(torch.empty(heads, magnitudes), requires_grad=initial != "random")
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the offsets to 0, or draw them."""
        low, high = INITIAL[self.initial]
        self.bias.uniform_(low, high) if low < high else self.bias.fill_(low)

    def forward(self) -> Tensor:
        """Return the offsets, float32 or better."""
        wide = self.bias.to(torch.promote_types(self.bias.dtype, torch.float32))
        return wide.clamp(-2 * math.pi, 0.0) if self.initial in CLAMPED else wide


INITIAL = {"zero": (0.0, 0.0), "uniform": (-2 * math.pi, 0.0), "free": (0.0, 0.0), "random": (-math.pi, math.pi)}
"""Lowest and highest initial offset for each value of `HeadOffsets.initial`."""
CLAMPED = ("zero", "uniform")


def layer_offsets(options: Mapping[str, Any], heads: int, magnitudes: int) -> Callable[[], HeadOffsets] | None:
    """Return the function that builds a layer's offsets for the options of a position embedding, or None."""
    initial = "random" if options.get("initial_angle") == "random" else options.get("offset")
    return None if initial in (None, "none") else lambda: HeadOffsets(heads, magnitudes, initial)
