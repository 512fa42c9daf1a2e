"""All DeepSpeed internals (everything beyond its public interface) that the engine reads, calls or replaces, except the
attributes of its optimizers and parameters that layouts.py reads.

Other modules use DeepSpeed only through this module, through layouts.py and through its documented parts: `initialize`,
`init_distributed`, `deepspeed.pipe` and the methods of its engines. INTERNALS in
tests/unit/training/engine/test_deepspeed_internals.py lists each internal name, its use, and the DeepSpeed version in
which its code was read. After an upgrade of DeepSpeed, the test reports which internals changed (docs/parallelism.md,
"Versions of DeepSpeed").
"""

import gc
import logging
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal

import deepspeed
import deepspeed.comm
import torch
import torch.nn as nn
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfigError
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology as PipeDataParallelTopology
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.runtime.utils import partition_balanced as partition_balanced
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.sequence.layer import _SeqAllToAll
from deepspeed.utils.groups import get_tensor_model_parallel_rank as get_tensor_model_parallel_rank
from torch import Tensor

from megatron_coca.training.engine.layouts import torch_optimizer

DEEPSPEED_ERRORS = (DeepSpeedConfigError, AssertionError, ValueError, NotImplementedError)
"""Exceptions that DeepSpeed raises for options it does not support; pydantic's exception is a ValueError."""

get_sequence_parallel_group = parallel_state_sp.get_sequence_parallel_group


def use_gloo() -> None:
    """Stop DeepSpeed from compiling a shared-memory all-reduce for the CPU. Gloo works without a compiler.

    This replaces DeepSpeed's table of operations without reading it. If the table were read, DeepSpeed would fill it,
    and would run the compiler for every operation that it knows. This all-reduce is the only operation that DeepSpeed
    looks up in the table.
    """
    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}


def join() -> None:
    """Let DeepSpeed use the process group of the run, which exists already."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    use_gloo()
    deepspeed.init_distributed(torch.distributed.get_backend(), verbose=False)


def sequence_grid(size: int) -> Any:
    """Return the grid of sequence-parallel ranks, which `deepspeed.initialize` needs as `mpu`; None if `size` is 1."""
    if size > 1 and parallel_state_sp._SEQUENCE_PARALLEL_GROUP is None:  # a second creation fails
        parallel_state_sp.initialize_sequence_parallel(size)
    return parallel_state_sp if size > 1 else None


def all_to_all(group: Any, x: Tensor, scattered: int, gathered: int) -> Tensor:
    """All-to-all on x [batch, ...]: scatter dimension `scattered` over the ranks of `group` and gather dimension
    `gathered` from them.
    """
    return _SeqAllToAll.apply(group, x, scattered, gathered, 0)


def skip_reduction(engine: Any) -> None:
    """Skip the gradient reduction on a single rank, where DeepSpeed would flatten, reduce and copy back all gradients
    for nothing. ZeRO 3, offloaded states and sums in another dtype are not changed: their reduction also moves the
    gradients to the place from which the step reads them.
    """
    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        summed = optimizer.gradient_accumulation_dtype
        if summed == optimizer.dtype and not optimizer.cpu_offload and not optimizer.use_grad_accum_attribute:
            optimizer.reduce_ready_partitions_and_remove_grads = _keep_gradient
    elif isinstance(optimizer, torch.optim.Optimizer):
        engine.enable_backward_allreduce = False


def _keep_gradient(parameter: nn.Parameter, group: int) -> None:
    """Leave the gradient in its parameter, where the end of the backward pass reads it."""


def gradient_norm(optimizer: Any) -> Any:
    """Return the global norm that ZeRO computes before it calls the PyTorch optimizer; -1 if the norm is not finite."""
    return optimizer._global_grad_norm


def stage_losses(engine: Any) -> list[Tensor]:
    """Return the losses of a pipeline engine's last pass, one per micro-batch; empty except on the last stage."""
    return engine.fwd_outputs


def stay_on_device(optimizer: Any, wait: Literal["device", "stream"]) -> None:
    """Replace functions of ZeRO 1 and 2 so that the host does not wait for the device in a step. Other optimizers and
    offloaded states are not changed.

    DeepSpeed reads the norm on the host three times per parameter group and launches two kernels per parameter. The
    functions here compute bitwise equal results in a few launches. With fp16, DeepSpeed still clips, because loss
    scaling needs the norm on the host anyway. Gradients in 16 bits are added directly to their sums in float32;
    DeepSpeed would copy them to float32 first.

    `wait` is the value of `reduction_wait`. With "device", the host waits for overlapped reductions, as in DeepSpeed.
    With "stream", only the optimizer's stream waits for the stream of the reductions. Gradient hooks of compiled blocks
    may run on several streams (DeepSpeed #8061), and "stream" has not been run on several GPUs yet.
    """
    if not isinstance(optimizer, DeepSpeedZeroOptimizer) or optimizer.cpu_offload:
        return
    optimizer.get_grad_norm_direct = partial(_group_norm, optimizer)
    if optimizer.dtype != torch.float16:
        optimizer.unscale_and_clip_grads = partial(_clip, optimizer.clip_grad)
    optimizer._add_to_grad_partition_buffer = _add_to_sum
    if wait == "device" or not optimizer.overlap_comm or optimizer.reduction_stream is None:
        return
    epilogue, accelerator = optimizer.independent_gradient_partition_epilogue, get_accelerator()

    def ordered_epilogue() -> None:
        host_wait = accelerator.synchronize
        accelerator.synchronize = lambda: accelerator.current_stream().wait_stream(optimizer.reduction_stream)
        try:
            epilogue()
        finally:
            accelerator.synchronize = host_wait

    optimizer.independent_gradient_partition_epilogue = ordered_epilogue


def _group_norm(
    optimizer: DeepSpeedZeroOptimizer, gradients: Iterable[Tensor], params: Iterable[nn.Parameter], norm_type: int = 2
) -> Tensor:
    """Return the gradient norm of a parameter group over all ranks or -1 if it is not finite, like
    `get_grad_norm_direct`.
    """
    own = [
        gradient
        for gradient, parameter in zip(
            (gradient for gradient in gradients if not getattr(gradient, "_zero_padding", False)), params, strict=False
        )
        # A parameter that is replicated on several ranks of a model counts once.
        if not getattr(parameter, "ds_pipe_replicated", False)
        and (is_model_parallel_parameter(parameter) or optimizer.model_parallel_rank == 0)
    ]
    if own:
        norms = torch.stack(torch._foreach_norm(own, norm_type, dtype=torch.float64))
        total = norms.square().sum().float()
    else:
        total = torch.zeros((), device=optimizer.device)
    deepspeed.comm.all_reduce(total, op=deepspeed.comm.ReduceOp.SUM, group=optimizer.dp_process_group)
    optimizer._model_parallel_all_reduce(total, deepspeed.comm.ReduceOp.SUM)
    total = total.sqrt()
    return total.where(total.isfinite(), -1.0)


def pair_norms(optimizer: Any, groups: int) -> None:
    """Let ZeRO 1 and 2 compute a gradient norm from `groups` parameter groups, the largest number of groups that any
    pipeline stage has. Other optimizers are not changed.

    DeepSpeed adds the squares of each group over the stages, so stages with different numbers of groups would wait
    forever. Missing groups are empty here. For example, with muP the embedding has its own learning rate and group, so
    a stage without the embedding has fewer groups.
    """
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        optimizer.scaled_global_norm = partial(_norm_of_groups, optimizer, groups)


def _norm_of_groups(optimizer: DeepSpeedZeroOptimizer, groups: int) -> Tensor:
    """Return the global gradient norm or infinity if it is not finite, like `scaled_global_norm`."""
    own = len(optimizer.bit16_groups)
    parameters = [optimizer.params_in_partition[index] for index in range(own)] + [[]] * (groups - own)
    if optimizer.cpu_offload:
        norms = [optimizer.complete_grad_norm_calculation_for_cpu_offload(each) for each in parameters]
    else:
        gradients = [optimizer.averaged_gradients[index] for index in range(own)] + [[]] * (groups - own)
        norms = [optimizer.get_grad_norm_direct(*each) for each in zip(gradients, parameters, strict=True)]
    each = torch.stack(norms)
    return torch.linalg.vector_norm(each).where((each >= 0).all() & each.isfinite().all(), torch.inf)


def _clip(limit: float, gradients: Sequence[Tensor], norm: Tensor) -> None:
    """Clip flat gradients in place to the global norm `limit` (0: no limit), like `unscale_and_clip_grads`."""
    if limit > 0:
        factor = 1.0 / torch.clamp((norm + 1e-6) / limit, min=1.0)
        for gradient in gradients:
            gradient.mul_(factor)


def _add_to_sum(total: Tensor | None, gradient: Tensor) -> None:
    """Add a gradient to this rank's float32 sum, like `_add_to_grad_partition_buffer`. The kernel of the addition
    converts the gradient, without rounding. Parameters of other ranks have no sum here.
    """
    if total is not None:
        total.add_(gradient)


def release(optimizer: Any, weights: Iterable[nn.Parameter]) -> None:
    """Free the `weights` and optimizer states of an engine that is no longer needed.

    Gradient hooks keep ZeRO 3's optimizer in reference cycles through PyTorch's C++ objects, which Python never
    collects.
    """
    for weight in weights:
        weight.grad, weight.data = None, weight.data.new_empty(0)
        vars(weight).clear()
    for holder in (torch_optimizer(optimizer), optimizer):
        vars(holder).clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
