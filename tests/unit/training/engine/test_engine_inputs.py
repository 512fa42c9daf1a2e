"""The arrays of a batch become the keyword arguments of the trained module."""

import numpy as np
import torch

from megatron_coca.data import Batch
from megatron_coca.training.engine.inputs import module_inputs
from megatron_coca.training.engine.label_weights import StepLabels


def test_each_micro_batch_has_its_arrays_and_its_weight() -> None:
    tokens = np.arange(12).reshape(2, 6)
    masked = Batch(tokens, loss_mask=tokens[:, 1:] % 2 == 0)
    first, second = module_inputs([Batch(tokens), masked], StepLabels(10, [0.5, 1.5]), torch.device("cpu"))
    assert first.keys() == {"samples", "loss_weight"} and first["loss_weight"] == 0.5
    assert torch.equal(first["samples"], torch.from_numpy(tokens))
    assert second.keys() == {"samples", "loss_mask", "loss_weight"} and second["loss_weight"] == 1.5
    assert second["loss_mask"].sum() == masked.loss_mask.sum()
