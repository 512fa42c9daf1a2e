"""Norms and embeddings whose gradients are summed over tokens in float32 on the CPU.

PyTorch's CPU kernels sum them in the dtype of the weights. In half precision the sum of thousands of tokens then loses
most small terms. Its CUDA kernels sum in float32, and are used as they are. Values of the forward pass stay the same.
"""

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

HALF = (torch.bfloat16, torch.float16)


def _sums_in_half(weight: Tensor | None) -> bool:
    """True if PyTorch would sum the gradient of `weight` in half precision."""
    return weight is not None and weight.device.type == "cpu" and weight.dtype in HALF and weight.requires_grad


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm`."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and _sums_in_half(self.weight):
            return _LayerNorm.apply(x, self.weight, self.bias, self.normalized_shape, self.eps)
        return super().forward(x)


class _LayerNorm(torch.autograd.Function):
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


class RowEmbedding(nn.Embedding):
    """`torch.nn.Embedding` with its plain options."""

    def forward(self, ids: Tensor) -> Tensor:
        if torch.is_grad_enabled() and _sums_in_half(self.weight):
            return _Rows.apply(ids, self.weight)
        return super().forward(ids)


class _Rows(torch.autograd.Function):
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
