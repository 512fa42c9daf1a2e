"""The inputs of the trained module, from the batches of the loader."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_coca.data import Batch
from megatron_coca.training.engine.label_weights import StepLabels


def module_inputs(
    micro_batches: Sequence[Batch], counted: StepLabels, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Yield the keyword arguments of the trained module for each micro-batch."""
    for batch, weight in zip(micro_batches, counted.weights, strict=True):
        yield {**_tensors(batch, device), "loss_weight": weight}


def _tensors(batch: Batch, device: torch.device) -> dict[str, Tensor]:
    """Return the arrays of a batch as tensors on the module's device. Documents and positions stay on the host, because
    the model reads their values and would otherwise have to wait for the device.
    """
    tensors = {name: torch.from_numpy(array) for name, array in vars(batch).items() if array is not None}
    tensors["samples"] = tensors.pop("tokens")
    if torch.cuda.is_available():  # only copies from pinned memory overlap with computation
        for name in tensors.keys() - {"documents", "positions"}:
            tensors[name] = tensors[name].pin_memory().to(device, non_blocking=True)
    return tensors
