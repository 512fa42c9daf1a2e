"""What is replaced in DeepSpeed: norms and clipping of ZeRO 1 and 2 give the same bits; no compiler is run."""

import math
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
import torch.nn as nn
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.torch import build_shm_op
from deepspeed.runtime.zero import stage_1_and_2
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_coca.training.engine.deepspeed_internals import stay_on_device, use_gloo

SHAPES = ((1,), (7, 33), (64, 1021), (5,))


class Optimizer(DeepSpeedZeroOptimizer):
    """One rank's optimizer with the attributes that norms and clipping read."""

    loss_scale = 1.0

    def __init__(self, dtype: torch.dtype, limit: float, model_parallel_rank: int = 0) -> None:
        self.cpu_offload = self.overlap_comm = False
        self.dtype, self.clip_grad, self.device = dtype, limit, torch.device("cpu")
        self.dp_process_group = self.model_parallel_group = None
        self.model_parallel_rank = model_parallel_rank


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_1_and_2.dist, "all_reduce", lambda *_, **__: None)


def gradients(dtype: torch.dtype, value: float = 1.0) -> tuple[list[Tensor], list[nn.Parameter]]:
    torch.manual_seed(3)
    own = [torch.randn(shape).to(dtype) for shape in SHAPES]
    own[1][2, 3] = value
    parameters: list[Any] = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    parameters[0].ds_pipe_replicated = True
    parameters[2].model_parallel = True
    return own, parameters


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_parallel_rank", [0, 1])
@pytest.mark.parametrize("value", [1.0, math.inf, math.nan])
def test_norms_have_deepspeeds_bits(dtype: torch.dtype, model_parallel_rank: int, value: float) -> None:
    optimizer = Optimizer(dtype, 1.0, model_parallel_rank)
    own, parameters = gradients(dtype, value)
    expected = optimizer.get_grad_norm_direct(own, parameters)
    stay_on_device(optimizer, "stream")
    got = optimizer.get_grad_norm_direct(own, parameters)
    assert got.dtype == expected.dtype and got.shape == expected.shape and torch.equal(got, expected)
    assert (float(got) == -1.0) == (not math.isfinite(value) and model_parallel_rank == 0)
    assert float(optimizer.get_grad_norm_direct([], [])) == 0.0


@pytest.mark.parametrize("limit", [0.0, 0.5, 1e6])
def test_clipping_has_deepspeeds_bits(limit: float) -> None:
    optimizer, norm = Optimizer(torch.bfloat16, limit), torch.tensor(3.7)
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients(torch.float32)[0]])
    expected, got = flat.clone(), flat.clone()
    optimizer.unscale_and_clip_grads([expected], norm)
    stay_on_device(optimizer, "stream")
    optimizer.unscale_and_clip_grads([got], norm)
    assert torch.equal(got, expected) and torch.equal(got, flat) == (limit != 0.5)


class Conversions(TorchDispatchMode):
    """Counts conversions to another dtype."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_gradients_have_deepspeeds_bits(dtype: torch.dtype) -> None:
    """Of four micro-batches, with small numbers, infinity and a part of a tensor, but without a copy in float32."""
    optimizer, sums, converted = Optimizer(dtype, 1.0), [], []
    for replaced in (False, True):
        if replaced:
            stay_on_device(optimizer, "device")
        torch.manual_seed(5)
        sums.append([torch.zeros(math.prod(shape)) for shape in SHAPES])
        with Conversions() as conversions:
            for scale in (1e-7, 3.0, 1e-3, 50.0):
                for total, shape in zip(sums[-1], SHAPES, strict=True):
                    whole = (torch.randn(math.prod(shape) + 3) * scale).type(dtype)
                    optimizer._add_to_grad_partition_buffer(total, whole[3:])
                optimizer._add_to_grad_partition_buffer(sums[-1][0], torch.full((1,), math.inf).type(dtype))
            optimizer._add_to_grad_partition_buffer(None, whole)
        converted.append(conversions.count)
    assert all(map(torch.equal, *sums)) and all(total.dtype == torch.float32 for total in sums[1])
    assert sums[1][0].isinf().all() and converted[0] - converted[1] == 4 * (len(SHAPES) + 1)


def test_fp16_keeps_deepspeeds_clipping_and_others_everything() -> None:
    half, offloaded = Optimizer(torch.float16, 1.0), Optimizer(torch.float32, 1.0)
    offloaded.cpu_offload = True
    stay_on_device(half, "device")
    assert "get_grad_norm_direct" in vars(half) and "unscale_and_clip_grads" not in vars(half)
    for other in (offloaded, torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)):
        stay_on_device(other, "stream")
        assert not {"get_grad_norm_direct", "unscale_and_clip_grads"} & vars(other).keys()


def test_overlapped_reductions_are_awaited_by_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's epilogue of ZeRO 1 and 2 would make the host wait for the device."""
    accelerator, optimizer = get_accelerator(), object.__new__(DeepSpeedZeroOptimizer)
    waited: list[object] = []
    monkeypatch.setattr(accelerator, "synchronize", lambda: waited.append("host"))
    monkeypatch.setattr(accelerator, "current_stream", lambda: SimpleNamespace(wait_stream=waited.append))
    optimizer.overlap_comm, optimizer.cpu_offload, optimizer.reduction_stream = True, True, "reductions"
    optimizer.dtype, optimizer.clip_grad = torch.bfloat16, 1.0
    epilogue = optimizer.independent_gradient_partition_epilogue = lambda: accelerator.synchronize()
    stay_on_device(optimizer, "stream")
    assert optimizer.independent_gradient_partition_epilogue is epilogue, "the host reads offloaded gradients"
    optimizer.cpu_offload = False
    stay_on_device(optimizer, "device")
    assert optimizer.independent_gradient_partition_epilogue is epilogue, "the default is DeepSpeed's own wait"
    stay_on_device(optimizer, "stream")
    optimizer.independent_gradient_partition_epilogue()
    assert waited == ["reductions"]
    accelerator.synchronize()
    assert waited == ["reductions", "host"]


def test_gloo_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed neither compiles its own all-reduce nor asks the compiler which operations it could compile."""
    monkeypatch.delitem(vars(deepspeed.ops), "__compatible_ops__", raising=False)
    monkeypatch.setattr(deepspeed.ops, "_probe_compatible_ops", lambda: pytest.fail("runs the compiler"))
    use_gloo()
    assert build_shm_op() is None
