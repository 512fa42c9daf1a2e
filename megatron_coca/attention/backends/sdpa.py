"""PyTorch's scaled_dot_product_attention: flash kernels in O(N) memory on the CPU and, without a bias, on CUDA.

These kernels support neither soft-capping nor a bias that depends on more than the distance. Inputs with either are
computed with dense scores, one query block at a time.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

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
    attend_padded,
)

aten = torch.ops.aten
_VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
GROUPED = _VERSION >= (2, 5)
"""Whether PyTorch supports fewer key heads than query heads. With fewer, the CPU kernel of PyTorch 2.3 reads out of
bounds.
"""
WINDOWED = _VERSION >= (2, 11)
"""Whether FlashAttention-2 is called with windows. The plugin also supports older versions of PyTorch, some of which
have no windows.
"""
Gradients = tuple[Tensor, Tensor, Tensor]


def folded_query(query: Tensor, key: Tensor) -> Tensor:
    """For decoding in half precision on the CPU, regroup the single queries [batch, heads, 1, head_dim]: the queries of
    a key head become its rows, [batch, kv_heads, heads / kv_heads, head_dim]. Return all other queries unchanged.

    PyTorch's CPU kernel is several times slower if each head has a single row in bfloat16. In float32, a single row is
    not slower, and regrouping would change the order of the sums.
    """
    half = query.dtype in (torch.bfloat16, torch.float16) and query.device.type == "cpu"
    grouped = query.shape[1] > key.shape[1]
    if not half or not grouped or query.shape[2] != 1 or torch.is_grad_enabled():
        return query
    return query.reshape(query.shape[0], key.shape[1], -1, query.shape[3])


class CpuFlash:
    """PyTorch's CPU kernel, which supports float64, float32, bfloat16, float16 and grouped heads.

    Operands are [batch, heads, length, head_dim]; the log-sum-exp is [batch, heads, length].

    Attributes:
        windows: whether `forward` and `backward` support a window above 0.
    """

    windows = False

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return the output and the natural log-sum-exp of the scaled scores.

        Causal attention needs as many queries as keys. With a window, the last query sees the last `window` keys, and
        the query i before it sees the `window` keys that end i keys earlier.
        """
        folded, heads = folded_query(q, k), q.shape[1]
        causal = causal and folded is q  # a single query sees all keys
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(folded, k, v, 0.0, causal, scale=scale)
        return out.reshape(-1, heads, q.shape[2], v.shape[-1]), lse.reshape(-1, heads, q.shape[2])

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
        window: int = 0,
    ) -> Gradients:
        """Return the gradients of q, k and v."""
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=scale
        )


class CudaFlash:
    """PyTorch's FlashAttention-2 with the interface of `CpuFlash`. It supports bfloat16, float16 and grouped heads."""

    @property
    def windows(self) -> bool:
        """Whether the kernel is called with windows. Deterministic runs use no windows, because no test on a GPU has
        shown yet that the gradients with windows repeat bit for bit.
        """
        return WINDOWED and not torch.are_deterministic_algorithms_enabled()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: int = 0
    ) -> tuple[Tensor, Tensor]:
        if window:
            given, options = self._windowed(q, k, window)
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            out, lse, *_ = aten._flash_attention_forward(q, k, v, *given, False, scale=scale, **options)
            return out.transpose(1, 2), lse
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
        return out, lse

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
        window: int = 0,
    ) -> Gradients:
        seed = torch.empty(2, dtype=torch.uint64, device=q.device)  # nothing reads it without dropout
        offset = torch.empty((), dtype=torch.uint64, device=q.device)
        lse = lse.contiguous()
        if window:
            given, options = self._windowed(q, k, window)
            grad, q, k, v, out = (x.transpose(1, 2) for x in (grad, q, k, v, out))
            found = aten._flash_attention_backward(
                grad, q, k, v, out, lse, *given, seed, offset, scale=scale, **options
            )
            dq, dk, dv = (x.transpose(1, 2) for x in found)
            return dq, dk, dv
        lengths = (q.shape[2], k.shape[2])
        return aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, None, None, *lengths, 0.0, causal, seed, offset, scale=scale
        )

    @staticmethod
    def _windowed(q: Tensor, k: Tensor, window: int) -> tuple[tuple[Any, ...], dict[str, int]]:
        """Return the arguments that both passes share: the lengths, the window, and arguments that turn off packing,
        dropout and the causal mask. The window already hides the keys that a causal mask would hide.
        """
        queries, keys = q.shape[2], k.shape[2]
        left = -1 if window >= keys else window - 1  # the kernel counts the keys before the query's own
        return (None, None, queries, keys, 0.0, False), {"window_size_left": left, "window_size_right": 0}


_KERNELS: dict[tuple[str, torch.dtype], CpuFlash | CudaFlash] = {
    **{("cpu", dtype): CpuFlash() for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)},
    **{("cuda", dtype): CudaFlash() for dtype in (torch.bfloat16, torch.float16)},
}


def flash_op(x: Tensor) -> CpuFlash | CudaFlash:
    """Return the kernel for the device and dtype of `x`.

    Raises:
        TypeError: no such kernel exists.
    """
    kernel = _KERNELS.get((x.device.type, x.dtype))
    if kernel is None:
        raise TypeError(
            f"attention_backend: merge has no kernel for {x.dtype} on {x.device.type}; set triton (on CUDA) or "
            "reference, or use another precision"
        )
    return kernel


def with_key_heads(inputs: AttentionInputs) -> AttentionInputs:
    """Before PyTorch 2.5, repeat keys and values for every query head; otherwise return the inputs unchanged."""
    groups = inputs.query.shape[1] // inputs.value.shape[1]
    if GROUPED or groups == 1:
        return inputs
    segments = tuple(replace(each, key=each.key.repeat_interleave(groups, dim=1)) for each in inputs.segments)
    return inputs.replace(segments=segments, value=inputs.value.repeat_interleave(groups, dim=1))


BANDS_REASON = "it takes a single query and key operand, and every query sees all keys up to its own"


class SdpaBackend:
    """Causal flash attention. On the CPU it also supports a distance bias, in linear memory."""

    def supports(self, needs: Needs) -> str | None:
        """Return None, or the reason why the model is not supported."""
        if needs.softcap is not None or needs.bias in PAIRWISE:
            return missing_einsum()
        if not _served(needs.bands, needs.bias is not None and needs.device_type == "cpu"):
            return BANDS_REASON
        if needs.bias and needs.device_type != "cpu":
            return "except on the CPU, its kernels accept a bias only as a dense mask in the operands' dtype"
        return None

    def attend(self, inputs: AttentionInputs) -> Tensor:
        """Compute attention, [batch, heads, query_length, width of V], in the query's dtype.

        Raises:
            ValueError: the bands are not supported, for example because a model built for evaluation trains with a
                training-only map.
            RuntimeError: the inputs have a bias and are not on the CPU.
        """
        inputs = with_key_heads(inputs)
        if inputs.softcap is not None or (inputs.bias is not None and inputs.bias.formula in PAIRWISE):
            return attend_by_document(attend_in_blocks, inputs)
        if inputs.gates is not None:
            return attend_gated(self.attend, inputs)
        if not _served(tuple(segment.band for segment in inputs.segments), inputs.bias is not None):
            raise ValueError(
                f"attention_backend: sdpa does not support the map ({BANDS_REASON}); build the model with "
                "training=True for a training-only map, or set attention_backend to reference"
            )
        if inputs.bias is not None and inputs.query.device.type != "cpu":
            raise RuntimeError(
                "device: this model was built for the CPU; build it for the device on which it runs, "
                "build_model(config, device=...)"
            )
        return attend_padded(partial(attend_by_document, _attend_row), inputs)


def _served(bands: tuple[Band, ...], biased: bool) -> bool:
    """Return whether SDPA supports these bands: one band of all distances or, if a bias mask hides keys, a window."""
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
        return _decoded(inputs)
    if inputs.query.device.type == "cpu" and inputs.dropout == 0:  # a strided view as the mask, in linear memory
        return biased_attention(inputs.query, inputs.key, inputs.value, inputs.scale, None)
    from torch.nn.attention.bias import causal_lower_right  # importing TorchDynamo takes 2 seconds

    return _sdpa(inputs, mask=causal_lower_right(inputs.query.shape[2], inputs.key.shape[2]))


def _decoded(inputs: AttentionInputs) -> Tensor:
    """Compute attention of one query that sees all keys."""
    folded = folded_query(inputs.query, inputs.key)
    if folded is inputs.query:
        return _sdpa(inputs)
    out = F.scaled_dot_product_attention(folded, inputs.key, inputs.value, scale=inputs.scale)
    return out.reshape(*inputs.query.shape[:3], out.shape[-1])


def _dense_mask(inputs: AttentionInputs, bias: DistanceBias) -> Tensor:
    """Return the bias of every pair as a dense mask, for attention with dropout, which PyTorch computes densely on the
    CPU.
    """
    rows, columns = inputs.query.shape[2], inputs.key.shape[2]
    along = diagonals(bias, columns, rows, inputs.query, inputs.segments[0].band.high)
    return reversed_mask(along, rows, columns, columns).flip(2)


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Disable cuDNN attention, PyTorch's first choice on Hopper and newer GPUs, for decoding.

    cuDNN makes a new plan for every shape, which means for every decoded token. It has also been reported to return
    wrong results in decoding with few key heads (github.com/pytorch/pytorch/issues/193893).
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def _sdpa(inputs: AttentionInputs, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    decodes = inputs.past > 0 or inputs.query.shape[2] == 1
    # PyTorch before 2.5 has no switch for cuDNN attention.
    if not decodes or torch.is_grad_enabled() or torch.compiler.is_compiling() or not GROUPED:
        return _call_sdpa(inputs, mask, causal)
    with without_cudnn():
        return _call_sdpa(inputs, mask, causal)


def _call_sdpa(inputs: AttentionInputs, mask: Tensor | None, causal: bool) -> Tensor:
    grouped = inputs.query.shape[1] > inputs.key.shape[1]
    options = {"enable_gqa": True} if grouped else {}  # the option exists from 2.5 on; `grouped` is False before
    return F.scaled_dot_product_attention(
        inputs.query,
        inputs.key,
        inputs.value,
        attn_mask=mask,
        dropout_p=inputs.dropout,
        is_causal=causal,
        scale=inputs.scale,
        **options,
    )


CUDA_KERNELS = ("PyTorch's operations", "FlashAttention-2", "memory-efficient attention", "cuDNN")
"""Names of the kernels of `scaled_dot_product_attention`, in the order of PyTorch's numbers for them."""


def cuda_kernel(
    heads: int, kv_heads: int, length: int, head_dim: int, dtype: torch.dtype, trains: bool, decodes: bool = False
) -> str:
    """Return the name of the kernel that PyTorch chooses on the current GPU for causal attention, and the version of
    cuDNN. With `decodes`, there is a single query, which sees `length` cached keys.

    PyTorch does not report its choice. If a library path contains another cuDNN that is too old, PyTorch silently runs
    FlashAttention-2.
    """
    query, key, value = (
        torch.empty(1, count, rows, head_dim, dtype=dtype, device="cuda").requires_grad_(trains)
        for count, rows in ((heads, 1 if decodes else length), (kv_heads, length), (kv_heads, length))
    )
    options = {"enable_gqa": True} if heads > kv_heads else {}
    with torch.set_grad_enabled(trains), without_cudnn() if decodes and GROUPED else nullcontext():
        number = torch._fused_sdp_choice(query, key, value, None, 0.0, not decodes, **options)
    kernel, version = CUDA_KERNELS[number], cudnn_version()
    return version if kernel == "cuDNN" else f"{kernel}, with {version}"


def cudnn_version() -> str:
    """Return the version of the cuDNN library that PyTorch has loaded, or the reason why it cannot be used."""
    try:
        version = torch.backends.cudnn.version()
    except RuntimeError as error:  # the library is older than the one that PyTorch was built with
        return f"cuDNN unusable ({' '.join(str(error).split()).partition('. ')[0]})"
    return "no cuDNN" if version is None else f"cuDNN {version // 10000}.{version // 100 % 100}.{version % 100}"
