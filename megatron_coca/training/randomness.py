"""Randomness of a process: seeds, the states of all random generators, and deterministic algorithms."""

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_coca.checkpoints import CheckpointError
from megatron_coca.checkpoints.weights import load_pickle


def seed_everything(seed: int, stream: int) -> None:
    """Seed the generators of this process. Ranks with different values of `stream` draw different dropout masks."""
    random.seed(seed + stream)
    np.random.seed((seed + stream) % 2**32)
    torch.manual_seed(seed + stream)


def compute_deterministically(wanted: bool) -> None:
    """If `wanted`, make PyTorch operations bitwise reproducible. Operations without such a version raise errors."""
    if wanted and torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # otherwise cuBLAS may change the order of sums
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(wanted and torch.cuda.is_available())


def rng_states() -> dict[str, Any]:
    """Return the generator states of Python, NumPy, PyTorch and this process's GPU. `torch.load` can read them with
    `weights_only`.
    """
    kind, keys, *rest = np.random.get_state()
    return {
        "python": json.dumps(random.getstate()),
        "numpy": json.dumps([kind, np.asarray(keys).tolist(), *rest]),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def load_rng_states(path: Path) -> None:
    """Restore the generators from a file with `rng_states`. Raises CheckpointError if it contains anything else."""
    states = load_pickle(path)
    try:
        version, internal, gauss = json.loads(states["python"])
        random.setstate((version, tuple(internal), gauss))
        kind, keys, position, *rest = json.loads(states["numpy"])
        if not 0 <= position <= len(keys):  # NumPy does not check this
            raise ValueError(f"position {position} is outside the {len(keys)} numbers")
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, *rest))
        torch.set_rng_state(states["torch"])
        if states["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"{path}: not the random state of a rank ({error}); the checkpoint is damaged, so resume from another one"
        ) from error
