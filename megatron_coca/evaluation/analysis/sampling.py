"""Which pairs, queries and distances are looked at: the same for every checkpoint that is measured alike."""

import numpy as np
import torch
from torch import Tensor

NEAR = 16
"""Every distance up to this one is looked at."""
PER_OCTAVE = 4
"""Distances beyond, in each doubling."""


def draw_pairs(length: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Positions m of queries and n <= m of keys, [count] int64 each: `count` different pairs out of all that a causal
    model of `length` tokens scores, every one equally likely; all of them, in random order, where there are no more.
    """
    total = length * (length + 1) // 2
    chosen = np.random.default_rng(seed).choice(total, size=min(count, total), replace=False)
    # Pair number p is in row m where m (m + 1) / 2 <= p; the square root is exact enough to be off by one at most.
    rows = ((np.sqrt(8.0 * chosen + 1) - 1) / 2).astype(np.int64)
    rows += (rows + 1) * (rows + 2) // 2 <= chosen
    rows -= rows * (rows + 1) // 2 > chosen
    return torch.from_numpy(rows), torch.from_numpy(chosen - rows * (rows + 1) // 2)


def spread(first: int, last: int, count: int) -> Tensor:
    """At most `count` different whole numbers from `first` to `last`, evenly spread with both ends, int64."""
    return torch.linspace(first, last, min(count, last - first + 1), dtype=torch.float64).round().long().unique()


def log_distances(length: int) -> list[int]:
    """0, 1, ... up to 16, then four in each doubling, up to length - 1."""
    octaves = max(0.0, np.log2(max(length - 1, 1) / NEAR))
    steps = np.arange(1, int(octaves * PER_OCTAVE) + 1)
    far = np.round(NEAR * 2.0 ** (steps / PER_OCTAVE)).astype(int).tolist()
    return sorted({distance for distance in [*range(NEAR + 1), *far, length - 1] if 0 <= distance < length})
