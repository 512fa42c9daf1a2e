"""The decay of xPos (Sun et al. 2022, "A Length-Extrapolatable Transformer", section 3)."""

import torch
from torch import Tensor

GAMMA = 0.4
SCALE_BASE = 512


def growth(positions: Tensor, dim: int, centre: float) -> Tensor:
    """zeta_j^((p - c)/512), zeta_j = (2j/d + gamma)/(1 + gamma): what multiplies a query; a key is divided by it.

    float64 `positions` [...] -> [..., dim/2]. A score depends on the difference of two positions alone, so the centre
    c only keeps the factors of one operand small; uncentred they overflow at 32k.
    """
    pair = torch.arange(dim // 2, dtype=torch.float64, device=positions.device)
    zeta = (2 * pair / dim + GAMMA) / (1 + GAMMA)
    return zeta ** ((positions[..., None] - centre) / SCALE_BASE)
