"""Seeds, the states of all generators on disk, and the deterministic algorithms of `deterministic: true`."""

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_coca.training import randomness


def draw() -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        float(torch.rand(1)),
    ]


def test_every_generator_continues(tmp_path: Path) -> None:
    randomness.seed_everything(5, 0)
    draw()  # leaves half of a Gaussian pair in Python's and NumPy's generator
    torch.save(randomness.rng_states(), tmp_path / "rank_0.pt")
    expected = [draw() for _ in range(3)]
    randomness.seed_everything(99, 0)
    assert draw() != expected[0]
    randomness.load_rng_states(tmp_path / "rank_0.pt")
    assert [draw() for _ in range(3)] == expected


def test_states_need_no_pickled_code(tmp_path: Path) -> None:
    torch.save(randomness.rng_states(), tmp_path / "state.pt")
    assert set(torch.load(tmp_path / "state.pt", weights_only=True)) == {"python", "numpy", "torch", "cuda"}


def test_ranks_and_seeds_differ_and_repeat() -> None:
    def first(seed: int, rank: int) -> list[float]:
        randomness.seed_everything(seed, rank)
        return draw()

    assert first(5, 0) == first(5, 0)
    assert all(a != b for a, b in zip(first(5, 0), first(5, 1), strict=True))
    assert all(a != b for a, b in zip(first(5, 0), first(9, 0), strict=True))
    first(2**32 + 5, 3)  # NumPy takes 32 bits only


@pytest.mark.parametrize(("gpu", "wanted"), [(True, True), (True, False), (False, True)])
def test_settings_of_pytorch(gpu: bool, wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that it is removed again
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    try:
        randomness.compute_deterministically(wanted)
        assert torch.are_deterministic_algorithms_enabled() == (gpu and wanted)
        assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) == (gpu and wanted)
        assert torch.utils.deterministic.fill_uninitialized_memory != (gpu and wanted), "filling costs a write"
    finally:
        torch.use_deterministic_algorithms(False)
