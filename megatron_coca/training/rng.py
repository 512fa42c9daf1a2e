"""Random states of one process, saved without pickled code."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int, rank: int) -> None:
    """Seed this process's generators; ranks differ, so that their dropout masks do."""
    random.seed(seed + rank)
    np.random.seed((seed + rank) % 2**32)
    torch.manual_seed(seed + rank)


def save_states(path: Path) -> None:
    """Write the states of Python, NumPy, PyTorch and, where there is one, this process's GPU."""
    kind, keys, *rest = np.random.get_state()
    states: dict[str, Any] = {
        "python": json.dumps(random.getstate()),
        "numpy": json.dumps([kind, keys.tolist(), *rest]),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }
    torch.save(states, path)


def load_states(path: Path) -> None:
    """Restore what `save_states` wrote."""
    states = torch.load(path, weights_only=True, map_location="cpu")
    version, internal, gauss = json.loads(states["python"])
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = json.loads(states["numpy"])
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
