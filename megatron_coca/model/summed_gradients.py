"""Operations of norms and embeddings, whose gradients are summed over tokens in float32 on the CPU.

PyTorch's CPU kernels sum them in the dtype of the weights. In half precision the sum of thousands of tokens then loses
most small terms. Its CUDA kernels sum in float32, and are used as they are. Values of the forward pass stay the same.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

HALF = (torch.bfloat16, torch.float16)


def sums_in_half(weight: Tensor) -> bool:
    """True if a gradient of `weight`, which is of half precision, is asked for and PyTorch would sum it in that."""
    return torch.is_grad_enabled() and weight.requires_grad and weight.device.type == "cpu"


class SummedLayerNorm(torch.autograd.Function):
    """As `F.layer_norm`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, shape: tuple[int, ...], eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.biased, ctx.options = bias is not None, (shape, eps)
        return F.layer_norm(x, shape, weight, bias, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        shape, eps = ctx.options
        wide, factor = x.float(), weight.float()
        zeros = torch.zeros_like(factor) if ctx.biased else None
        _, mean, deviation = torch.native_layer_norm(wide, shape, factor, zeros, eps)
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.biased and ctx.needs_input_grad[2]]
        gradients = torch.ops.aten.native_layer_norm_backward(
            gradient.float(), wide, shape, mean, deviation, factor, zeros, wanted
        )
        rounded = [None if each is None else each.to(x.dtype) for each in gradients]
        return (*(each if asked else None for each, asked in zip(rounded, wanted, strict=True)), None, None)


class SummedRows(torch.autograd.Function):
    """Rows of a weight by their numbers, as `F.embedding`."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape = weight.shape
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        (ids,) = ctx.saved_tensors
        total = torch.zeros(ctx.shape, dtype=torch.float32, device=gradient.device)
        total.index_add_(0, ids.flatten(), gradient.flatten(0, -2).float())
        return None, total.to(gradient.dtype)
