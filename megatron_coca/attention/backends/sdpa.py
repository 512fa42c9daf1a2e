"""PyTorch's scaled_dot_product_attention: flash kernels in O(N) memory, on CPU and, without a bias, on CUDA.

Its kernels have no soft-capping, and no bias of more than the distance: both are computed in blocks of dense scores.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_coca.attention.backends.cpu_bias import biased_attention, diagonals, reversed_mask
from megatron_coca.attention.backends.gated import attend_gated
from megatron_coca.attention.backends.reference import attend_in_blocks, missing_einsum
from megatron_coca.attention.inputs import (
    CAUSAL,
    PAIRWISE,
    AttentionInputs,
    Band,
    DistanceBias,
    Needs,
    attend_by_document,
)

aten = torch.ops.aten
GROUPED = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 5)
"""PyTorch supports fewer key heads than query heads; the CPU kernel of 2.3 reads beyond them."""
Gradients = tuple[Tensor, Tensor, Tensor]


class FlashOp(Protocol):
    """One flash kernel. Operands are [batch, heads, length, head_dim], the log-sum-exp [batch, heads, length]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """(output, log-sum-exp of the scaled scores, natural base)."""
        ...

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> Gradients:
        """Gradients of q, k and v."""
        ...


class CpuFlash:
    """The CPU kernel: float64, float32, bfloat16, float16, grouped heads."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> Gradients:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=scale
        )


class CudaFlash:
    """PyTorch's FlashAttention-2: bfloat16 and float16, grouped heads."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> Gradients:
        lengths = (q.shape[2], k.shape[2])
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
        offset = torch.zeros((), dtype=torch.uint64, device=q.device)
        return aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse.contiguous(), None, None, *lengths, 0.0, causal, seed, offset, scale=scale
        )


class EqualHeads:
    """A kernel without grouped heads; keys and values are repeated for it."""

    def __init__(self, kernel: FlashOp) -> None:
        self._kernel = kernel

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        return self._kernel.forward(q, k, v, causal, scale)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> Gradients:
        groups = q.shape[1] // k.shape[1]
        wide_k, wide_v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        dq, dk, dv = self._kernel.backward(grad, q, wide_k, wide_v, out, lse, causal, scale)
        return dq, *(x.unflatten(1, (-1, groups)).sum(2) for x in (dk, dv))


class CudaCudnn:
    """cuDNN's kernel where PyTorch offers it for these operands, from Hopper on, and FlashAttention-2 elsewhere.

    Both kernels have the same log-sum-exp, so a backward pass need not know which was used. cuDNN's gradients differ
    in bits between runs, so `deterministic: true` leaves it out.
    """

    OLDEST = (9, 0)
    ROWS = 128
    """Queries of the smallest call: below it cuDNN gains nothing."""

    def __init__(self) -> None:
        self._flash = CudaFlash()

    def serves(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
        """cuDNN is preferred, and nothing speaks against it: its library's version, a shape, `enable_cudnn_sdp`."""
        if q.shape[2] < self.ROWS or torch.are_deterministic_algorithms_enabled():
            return False
        if torch.cuda.get_device_capability(q.device) < self.OLDEST:
            return False
        if not hasattr(torch.backends.cuda, "can_use_cudnn_attention"):  # PyTorch 2.3, with which the plugin runs too
            return False
        parameters = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, causal, q.shape[1] != k.shape[1])
        return torch.backends.cuda.can_use_cudnn_attention(parameters)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        if not self.serves(q, k, v, causal):
            return self._flash.forward(q, k, v, causal, scale)
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, scale=scale)
        return out, lse.view(q.shape[:3])

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> Gradients:
        if not self.serves(q, k, v, causal):
            return self._flash.backward(grad, q, k, v, out, lse, causal, scale)
        lengths, seed = (q.shape[2], k.shape[2]), torch.zeros((), dtype=torch.int64, device=q.device)
        return aten._scaled_dot_product_cudnn_attention_backward(
            grad,
            q,
            k,
            v,
            out,
            lse.contiguous()[..., None],
            seed,
            seed,
            None,
            None,
            None,
            *lengths,
            0.0,
            causal,
            scale=scale,
        )


_HALF: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
_CPU: dict[tuple[str, torch.dtype], FlashOp] = {
    ("cpu", dtype): CpuFlash() for dtype in (torch.float64, torch.float32, *_HALF)
}
_PLANNED = _CPU | {("cuda", dtype): CudaCudnn() for dtype in _HALF}
_UNPLANNED = _CPU | {("cuda", dtype): CudaFlash() for dtype in _HALF}


def flash_op(x: Tensor, repeated: bool = True) -> FlashOp:
    """The kernel for the device and dtype of `x`, for shapes that are `repeated` (see `varying_lengths`) or not.

    Raises:
        TypeError: there is none.
    """
    kernel = (_PLANNED if repeated else _UNPLANNED).get((x.device.type, x.dtype))
    if kernel is None:
        raise TypeError(
            f"attention_backend merge has no kernel for {x.dtype} on {x.device.type}; "
            "set attention_backend: triton on CUDA or reference, or use another precision"
        )
    return kernel if GROUPED else EqualHeads(kernel)


BANDS_REASON = "it takes one query and one key operand, and every key up to the query's own"


class SdpaBackend:
    """Causal flash attention; on the CPU with a distance bias, in linear memory too."""

    def supports(self, needs: Needs) -> str | None:
        """None, or the reason why the model is not supported."""
        if needs.softcap is not None or needs.bias in PAIRWISE:
            return missing_einsum()
        if not _served(needs.bands, needs.bias is not None and needs.device_type == "cpu"):
            return BANDS_REASON
        if needs.bias and needs.device_type != "cpu":
            return "off the CPU its kernels take a bias only as a dense mask in the operands' dtype"
        return None

    def attend(self, inputs: AttentionInputs) -> Tensor:
        """[batch, heads, query_length, head_dim] in the query's dtype.

        Raises:
            ValueError: the bands are none that `supports` accepts. A map that only trains brings them to a model that
                was built for evaluation.
            RuntimeError: there is a bias, off the CPU.
        """
        if inputs.softcap is not None or (inputs.bias is not None and inputs.bias.formula in PAIRWISE):
            return attend_by_document(attend_in_blocks, inputs)
        if inputs.gates is not None:
            return attend_gated(self.attend, inputs)
        if not _served(tuple(segment.band for segment in inputs.segments), inputs.bias is not None):
            raise ValueError(
                f"attention_backend sdpa: {BANDS_REASON}; a training-only relative-position map needs a "
                "model built with training=True, or attention_backend: reference"
            )
        if inputs.bias is not None and inputs.query.device.type != "cpu":
            raise RuntimeError(
                "this model was built for the CPU; build it with the device it runs on: build_model(config, device=...)"
            )
        return attend_by_document(_attend_row, inputs)


def _served(bands: tuple[Band, ...], biased: bool) -> bool:
    """Return whether SDPA computes these bands: one of all distances or, with a bias to hide keys, a window."""
    return bands == (CAUSAL,) or (biased and bands == (Band(high=bands[0].high),))


def _attend_row(inputs: AttentionInputs) -> Tensor:
    window = inputs.segments[0].band.high
    if inputs.bias is not None and inputs.dropout == 0:
        return biased_attention(inputs.query, inputs.key, inputs.value, inputs.scale, inputs.bias, window)
    if inputs.bias is not None:
        return _sdpa(inputs, mask=_dense_mask(inputs, inputs.bias))
    if inputs.past == 0:
        return _sdpa(inputs, causal=True)
    if inputs.query.shape[2] == 1:
        return _sdpa(inputs)
    if inputs.query.device.type == "cpu" and inputs.dropout == 0:  # a mask without its rows x keys numbers
        return biased_attention(inputs.query, inputs.key, inputs.value, inputs.scale, None)
    from torch.nn.attention.bias import causal_lower_right  # imports TorchDynamo, 2 seconds

    return _sdpa(inputs, mask=causal_lower_right(inputs.query.shape[2], inputs.key.shape[2]))


def _dense_mask(inputs: AttentionInputs, bias: DistanceBias) -> Tensor:
    """The bias of every pair: with dropout, PyTorch's CPU attention is dense in any case."""
    rows, columns = inputs.query.shape[2], inputs.key.shape[2]
    along = diagonals(bias, columns, rows, inputs.query, inputs.segments[0].band.high)
    return reversed_mask(along, rows, columns, columns).flip(2)


@contextmanager
def varying_lengths() -> Iterator[None]:
    """Keep PyTorch from cuDNN, its first choice from Hopper on, for the shapes of evaluation and decoding.

    cuDNN plans every shape anew, which in decoding is every token, and was reported to give wrong results there with
    few key heads (github.com/pytorch/pytorch/issues/193893).
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def _sdpa(inputs: AttentionInputs, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or not GROUPED:  # without the switch before 2.5
        return _call_sdpa(inputs, mask, causal)
    with varying_lengths():
        return _call_sdpa(inputs, mask, causal)


def _call_sdpa(inputs: AttentionInputs, mask: Tensor | None, causal: bool) -> Tensor:
    key, value, options = inputs.key, inputs.value, {}
    groups = inputs.query.shape[1] // key.shape[1]
    if groups > 1 and GROUPED:
        options["enable_gqa"] = True
    elif groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    return F.scaled_dot_product_attention(
        inputs.query,
        key,
        value,
        attn_mask=mask,
        dropout_p=inputs.dropout,
        is_causal=causal,
        scale=inputs.scale,
        **options,
    )
