"""Where an optimizer keeps this rank's weights: the ranges of the parameters in the tensors that it updates.

This file does not import DeepSpeed: the import takes a second, and the native engine does not need it. It reads
attributes of DeepSpeed's optimizers and parameters; the test of deepspeed_internals.py lists these, too.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_coca.training.engine.flat_weights import FlatRange


def whole_shape(parameter: Any) -> tuple[int, ...]:
    """Return a parameter's shape on this rank, even if ZeRO 3 has partitioned the parameter."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def trained_part(parameter: Any) -> tuple[int, Tensor]:
    """Return where this rank's part of a flattened parameter starts, and the part itself without ZeRO 3's padding."""
    if not hasattr(parameter, "ds_tensor"):
        return 0, parameter.detach().view(-1)
    size = parameter.ds_tensor.ds_numel
    start = torch.distributed.get_rank(parameter.ds_process_group) * size
    return start, parameter.ds_tensor.detach().narrow(0, 0, max(0, min(size, parameter.ds_numel - start)))


def _plain(optimizer: torch.optim.Optimizer) -> Iterator[FlatRange]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield FlatRange(parameter, parameter, 0, parameter.numel(), 0)


def _partitioned(optimizer: Any) -> Iterator[FlatRange]:
    """Yield the ranges of ZeRO 1 and 2: a rank's range of each concatenated parameter group is a float32 tensor."""
    for group, flat in zip(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True):
        for parameter in group:
            mapping = parameter._hp_mapping
            if mapping is not None:
                inner, outer = mapping.hp_fragment_address, mapping.lp_fragment_address
                yield FlatRange(parameter, flat, inner.start, inner.numel, outer.start)


def _fully_partitioned(optimizer: Any) -> Iterator[FlatRange]:
    """Yield the ranges of ZeRO 3: a rank's range of each parameter, padded at its end, is part of a sub-group's
    float32 tensor.
    """
    for group, flat in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
        for parameter in group:
            _, begin, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
            start, part = trained_part(parameter)
            if part.numel():
                yield FlatRange(parameter, flat, begin, part.numel(), start)


def _refresh_fully_partitioned(optimizer: Any) -> None:
    optimizer.checkpoint_event_prologue()  # releases gathered copies of the parameters
    for flat, trained in zip(
        optimizer.fp32_partitioned_groups_flat, optimizer.fp16_partitioned_groups_flat, strict=True
    ):
        if flat.numel():
            trained.data.copy_(flat.data)
    optimizer.checkpoint_event_epilogue()  # restores the weights that ZeRO 3 never partitions


class OptimizerLayout(NamedTuple):
    """Functions for one kind of optimizer. `ranges` returns this rank's ranges, and `flat_tensors` the tensors that the
    PyTorch optimizer updates. `refresh` copies the float32 weights to the trained weights. `replicas` returns the group
    of ranks that have all weights and divide the optimizer states among themselves, or None.
    """

    ranges: Callable[[Any], Iterator[FlatRange]]
    flat_tensors: Callable[[Any], list[Tensor]]
    refresh: Callable[[Any], None]
    replicas: Callable[[Any], Any] = lambda optimizer: None


LAYOUTS = {
    "DeepSpeedZeroOptimizer": OptimizerLayout(
        _partitioned,
        lambda zero: zero.single_partition_of_fp32_groups,
        lambda zero: zero.update_lp_params(),
        lambda zero: zero.dp_process_group,
    ),
    "DeepSpeedZeroOptimizer_Stage3": OptimizerLayout(
        _fully_partitioned, lambda zero: zero.fp32_partitioned_groups_flat, _refresh_fully_partitioned
    ),
    "FlatWeights": OptimizerLayout(
        lambda weights: weights.ranges(),
        lambda weights: weights.masters(),
        lambda weights: weights.refresh(),
        lambda weights: torch.distributed.group.WORLD,
    ),
    "Optimizer": OptimizerLayout(
        _plain, lambda plain: [weight for group in plain.param_groups for weight in group["params"]], lambda plain: None
    ),
}
"""Layouts by the name of the class of the object that has the optimizer states: DeepSpeed's optimizer (ZeRO 1 and 2, or
ZeRO 3) or, in the native engine, `FlatWeights`. Without ZeRO and `FlatWeights`, that object is the PyTorch optimizer,
which updates the trained weights directly.
"""


def layout(optimizer: Any) -> OptimizerLayout:
    """Return the functions for `optimizer`, an object of a class in `LAYOUTS` or of a class derived from it."""
    return next(LAYOUTS[kind.__name__] for kind in type(optimizer).__mro__ if kind.__name__ in LAYOUTS)


def torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the PyTorch optimizer inside an object of a class in `LAYOUTS`."""
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer.optimizer


def loss_scaling(optimizer: Any) -> dict[str, Any]:
    """Return the attribute dictionary of the fp16 loss scaler, which the caller may change; empty without ZeRO."""
    return vars(optimizer.loss_scaler) if hasattr(optimizer, "loss_scaler") else {}
