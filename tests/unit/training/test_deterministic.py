"""`deterministic: true`: what a run on a GPU asks of PyTorch, and that a run on the CPU stays as it is."""

import os

import pytest
import torch

from megatron_coca.training.randomness import compute_deterministically


@pytest.mark.parametrize(("gpu", "wanted"), [(True, True), (True, False), (False, True)])
def test_what_pytorch_is_asked_for(gpu: bool, wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that it is removed again
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    try:
        compute_deterministically(wanted)
        assert torch.are_deterministic_algorithms_enabled() == (gpu and wanted)
        assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) == (gpu and wanted)
        assert torch.utils.deterministic.fill_uninitialized_memory != (gpu and wanted), "filling costs a write"
    finally:
        torch.use_deterministic_algorithms(False)
