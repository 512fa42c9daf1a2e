"""A norm and an embedding for the CPU that sum their gradients over tokens in float32.

PyTorch's CPU kernels sum in the dtype of the weights, so a half-precision sum over thousands of tokens loses most small
terms. PyTorch's CUDA kernels already sum in float32. The forward pass is unchanged.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class SummedLayerNorm(torch.autograd.Function):
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
