"""Random states of one process, saved without pickled code."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int, stream: int) -> None:
    """Seed this process's generators; ranks of different streams differ, so that their dropout masks do."""
    random.seed(seed + stream)
    np.random.seed((seed + stream) % 2**32)
    torch.manual_seed(seed + stream)


def states() -> dict[str, Any]:
    """The states of Python, NumPy, PyTorch and, where there is one, this process's GPU."""
    kind, keys, *rest = np.random.get_state()
    return {
        "python": json.dumps(random.getstate()),
        "numpy": json.dumps([kind, keys.tolist(), *rest]),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def load_states(path: Path) -> None:
    """Restore what `states` gave, from the file that `torch.save` wrote."""
    states = torch.load(path, weights_only=True, map_location="cpu")
    version, internal, gauss = json.loads(states["python"])
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = json.loads(states["numpy"])
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
