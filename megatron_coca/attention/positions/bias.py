"""Additive score biases as formulas of the distance r = m - n: no N x N tensor exists outside the reference backend."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AlibiBias:
    """-slope_h * r (Press et al. 2022, section 3), with one slope per query head."""

    slopes: tuple[float, ...]

    def at(self, distance: Tensor) -> Tensor:
        """The bias at float `distance` [...]: [heads, ...] in the dtype of `distance`, which must be float32 or better.

        bfloat16 would keep 4 or 5 different values out of 512 neighbouring distances at 32k.
        """
        slopes = torch.tensor(self.slopes, dtype=distance.dtype, device=distance.device)
        return -slopes.view(-1, *[1] * distance.dim()) * distance


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """2^(-8h/H) for h = 1..H where H is a power of two.

    Otherwise the slopes of the largest power of two p <= H, then every other slope of 2p, as the ALiBi authors
    extend them.
    """
    power = 2 ** int(math.log2(num_heads))
    slopes = _geometric_slopes(power)
    if power < num_heads:
        slopes += _geometric_slopes(2 * power)[::2][: num_heads - power]
    return tuple(slopes)


def _geometric_slopes(count: int) -> list[float]:
    return [2.0 ** (-8.0 * h / count) for h in range(1, count + 1)]
