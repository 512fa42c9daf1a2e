"""The next-token loss, computed chunk by chunk from the hidden states and the output matrix."""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_coca.config.model import LOSS_CHUNK_BYTES, LOSS_CHUNK_TOKENS
from megatron_coca.kernels import missing_triton
from megatron_coca.model.layers import soft_capped

IGNORED = -100
"""The label of tokens that do not count in the loss, as in PyTorch."""
CHUNK_MULTIPLE = 128
"""The number of tokens per chunk is a multiple of this number, because the tiles of matrix products have no more rows.
"""


def next_token_loss(logits: Tensor, labels: Tensor, loss_mask: Tensor | None = None) -> Tensor:
    """Return the mean cross-entropy in nats per token, in float32 or better, of labels [batch, length] given logits
    [batch, length, vocabulary].

    With `loss_mask`, bool [batch, length], the mean is over the labels that the mask selects, as in GPT-NeoX and
    Megatron. If the mask selects no label, the loss is 0.
    """
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    if loss_mask is None:
        return F.cross_entropy(scores, labels.flatten())
    kept = labels.masked_fill(~loss_mask, IGNORED)
    total = F.cross_entropy(scores, kept.flatten(), ignore_index=IGNORED, reduction="sum")
    return total / loss_mask.sum().clamp(min=1)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunk: int | Literal["auto"] | None,
    kernel: str = "auto",
    cap: float | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return the mean cross-entropy in nats of the logits hidden @ weight^T, computed for `chunk` tokens at a time. If
    `chunk` is None, all tokens are computed at once.

    `hidden` is [tokens, width], `weight` is [vocabulary, width] with the same dtype, and `labels` is int64 [tokens].
    Labels with the value `IGNORED` do not count; if no label counts, the loss is 0. Logits have the dtype of `hidden`.
    The softmax, the losses, their sum, and the weight gradient summed over chunks are in float32, or in float64 if
    `hidden` is float64. `kernel` is a value of `loss_kernel`. The chunk size "auto" is 1,024 tokens; with the Triton
    kernel it is larger if more tokens fit into 1 GiB of logits, and all chunks have about the same size. `cap` is
    passed to `soft_capped`; it requires the kernel "torch". `bias` [vocabulary] is added to the logits.
    """
    count = (labels != IGNORED).sum().clamp(min=1)
    trained = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    if kernel == "auto" or not trained:
        fused = trained and hidden.is_cuda and hidden.dtype != torch.float64 and cap is None
        fused = fused and missing_triton("cuda") is None
        kernel = "triton" if fused else "torch"
    if chunk == "auto":
        fitting = LOSS_CHUNK_BYTES // (len(weight) * weight.element_size())
        chunk = _even_chunk(len(labels), max(fitting, LOSS_CHUNK_TOKENS)) if kernel == "triton" else LOSS_CHUNK_TOKENS
    size = min(chunk or len(labels), len(labels))
    if trained:
        return _SummedLoss.apply(hidden, weight, labels, size, kernel, cap, bias) / count
    chunks = zip(hidden.split(size), labels.split(size), strict=True)
    logits = ((_logits(states, weight, bias), targets) for states, targets in chunks)
    return sum(_losses(soft_capped(part, cap), targets)[0].sum() for part, targets in logits) / count


def _even_chunk(tokens: int, most: int) -> int:
    """Return the size of chunks that divide `tokens` about equally, with at most `most` tokens in each and as few
    chunks as possible. A small last chunk would use only a small part of a GPU, but it would read and write the whole
    gradient of the head.
    """
    chunks = max(1, -(-tokens // most))
    each = -(-tokens // chunks)
    return min(most, -(-each // CHUNK_MULTIPLE) * CHUNK_MULTIPLE)


def _logits(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return states @ weight.t() if bias is None else F.linear(states, weight, bias)


def _losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return (losses [tokens], log-probabilities [tokens, vocabulary]) in float32 or better. The loss of an ignored
    token is 0.
    """
    logs = F.log_softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    return F.nll_loss(logs, targets, ignore_index=IGNORED, reduction="none"), logs


def _gradient_with_torch(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    losses, logs = _losses(logits, targets)
    kept = (targets != IGNORED)[:, None]
    index = targets[:, None].clamp(min=0)
    target_grad = logs.gather(1, index).expm1()
    return losses, logs.exp_().scatter_(1, index, target_grad).mul_(kept).to(logits.dtype)


def _gradient_with_triton(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    # Imported here, because triton exists only on some platforms.
    from megatron_coca.kernels.cross_entropy import cross_entropy_in_place

    return cross_entropy_in_place(logits, targets, IGNORED), logits


LOSS_KERNELS = {"torch": _gradient_with_torch, "triton": _gradient_with_triton}
"""Functions by `loss_kernel`: (logits [tokens, vocabulary], targets [tokens]) -> (losses [tokens], gradient of the loss
with respect to the logits). The gradient is softmax - onehot, or 0 for ignored tokens, in the dtype of the logits.
"""


class _SummedLoss(torch.autograd.Function):
    """Sum the losses. The forward pass also computes the gradients of `hidden` and `weight`; the backward pass
    multiplies these gradients by the gradient of the sum.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        size: int,
        kernel: str,
        cap: float | None,
        bias: Tensor | None,
    ) -> Tensor:
        wide, trained = torch.promote_types(weight.dtype, torch.float32), ctx.needs_input_grad[1]
        bias_grad = None if bias is None else torch.zeros(bias.shape, dtype=wide, device=bias.device)
        weight_grad = torch.empty(weight.shape if trained else (0,), dtype=wide, device=weight.device)
        total, hidden_grad = torch.zeros((), dtype=wide, device=weight.device), torch.empty_like(hidden)
        for start in range(0, len(labels), size):
            tokens = slice(start, start + size)
            states = hidden[tokens]
            logits = _logits(states, weight, bias)
            capped = None if cap is None else soft_capped(logits.to(wide), cap)
            logits = logits if capped is None else capped.to(logits.dtype)
            losses, logit_grad = LOSS_KERNELS[kernel](logits, labels[tokens])
            if cap is not None and capped is not None:
                logit_grad = (logit_grad * (1 - (capped / cap).square())).to(logit_grad.dtype)
            total = total + losses.sum()
            torch.mm(logit_grad, weight, out=hidden_grad[tokens])
            if bias_grad is not None:
                bias_grad += logit_grad.sum(0, dtype=wide)
            if trained:
                _add_product(weight_grad, logit_grad.t(), states, start == 0)
        ctx.dtype = weight.dtype
        ctx.save_for_backward(hidden_grad, weight_grad, bias_grad)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad, bias_grad = ctx.saved_tensors
        # The factor is a matrix, so that the products are computed in float32. PyTorch would round a scalar to half
        # precision.
        factor, rounded = grad.view(1, 1), torch.empty_like(hidden_grad)
        torch.mul(hidden_grad, factor, out=rounded)
        of_bias = None if bias_grad is None else (bias_grad * factor[0]).to(ctx.dtype)
        if not ctx.needs_input_grad[1]:
            return rounded, None, None, None, None, None, of_bias
        weight_rounded = torch.empty_like(weight_grad, dtype=ctx.dtype)
        return rounded, torch.mul(weight_grad, factor, out=weight_rounded), None, None, None, None, of_bias


def _add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """Add the matrix product a b to `total`, or set `total` to the product if it is the `first` one. The dtype of
    `total` may be wider than the dtype of a and b.
    """
    if a.dtype != total.dtype and not a.is_cuda:
        product = a @ b
        total.copy_(product) if first else total.add_(product)
    elif first:
        torch.mm(a, b, **_result(a, total), out=total)
    else:
        torch.addmm(total, a, b, **_result(a, total), out=total)


def _result(a: Tensor, total: Tensor) -> dict[str, Any]:
    """Return the arguments with which `torch.mm` and `torch.addmm` on CUDA write a product of half-precision matrices
    to a float32 `total`.
    """
    return {"out_dtype": total.dtype} if a.dtype != total.dtype else {}
