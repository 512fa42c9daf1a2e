"""The gradient norm and clipping, computed on the device without a wait of the host.

DeepSpeed's ZeRO 1 and 2 read the norm on the host three times for each parameter group, and launch two kernels for each
parameter; the functions here compute the same bits in a few launches.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import deepspeed.comm as dist
import torch
import torch.nn as nn
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
    """Clip gradients in place to the norm `limit`, unless it is 0; returns their norm before, a scalar on the device.

    For training without ZeRO, where the gradients, reduced already, are in the parameters.
    """
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    if limit > 0:
        nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return norm


def keep_norms_on_device(optimizer: Any) -> None:
    """Let DeepSpeed's optimizer of ZeRO 1 and 2 compute norms here; other kinds are left as they are.

    Clipping too, except with fp16, whose loss scaling needs the norm on the host anyway.
    """
    if not isinstance(optimizer, DeepSpeedZeroOptimizer) or optimizer.cpu_offload:
        return
    optimizer.get_grad_norm_direct = partial(_group_norm, optimizer)
    if optimizer.dtype != torch.float16:
        optimizer.unscale_and_clip_grads = partial(_clip, optimizer.clip_grad)


def _group_norm(
    optimizer: DeepSpeedZeroOptimizer, gradients: Iterable[Tensor], params: Iterable[nn.Parameter], norm_type: int = 2
) -> Tensor:
    """The norm of a parameter group over all ranks, -1 if it is not finite, as `get_grad_norm_direct` returns it."""
    own = [
        gradient
        for gradient, parameter in zip(
            (gradient for gradient in gradients if not getattr(gradient, "_zero_padding", False)), params, strict=False
        )
        # Of parameters that several ranks of a model hold, one counts.
        if not getattr(parameter, "ds_pipe_replicated", False)
        and (is_model_parallel_parameter(parameter) or optimizer.model_parallel_rank == 0)
    ]
    if own:
        norms = torch.stack(torch._foreach_norm(own, norm_type, dtype=torch.float64))
        total = norms.square().sum().float()
    else:
        total = torch.zeros((), device=optimizer.device)
    dist.all_reduce(total, op=dist.ReduceOp.SUM, group=optimizer.dp_process_group)
    optimizer._model_parallel_all_reduce(total, dist.ReduceOp.SUM)
    total = total.sqrt()
    return total.where(total.isfinite(), -1.0)


def _clip(limit: float, gradients: Sequence[Tensor], norm: Tensor) -> None:
    """Clip flat gradients in place to the global norm `limit`, unless it is 0, as `unscale_and_clip_grads` does."""
    if limit > 0:
        factor = 1.0 / torch.clamp((norm + 1e-6) / limit, min=1.0)
        for gradient in gradients:
            gradient.mul_(factor)
