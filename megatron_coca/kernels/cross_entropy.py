"""Cross-entropy losses and gradients for a chunk of logits in one kernel launch; the gradients overwrite the logits.

The kernel reads the logits twice and writes them once: the first pass computes the largest logit and the sum of
exponentials (Milakov and Gimelshein 2018), and the second pass computes softmax - onehot. The kernel computes in
float32 and rounds once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_coca.kernels.tiles import OPTIONS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COLUMNS = 4096
"""Number of logits that a program processes at a time."""
WARPS = 8


def cross_entropy_in_place(logits: Tensor, labels: Tensor, ignored: int) -> Tensor:
    """Return the losses in nats, float32 [tokens], and overwrite `logits` with their gradient, softmax - onehot.

    Args:
        logits: contiguous [tokens, vocabulary].
        labels: int64 [tokens]. Tokens with the label `ignored` have loss 0 and gradient 0.

    Raises:
        ValueError: the logits are not contiguous, or their dtype is not in `DTYPES`.
    """
    if logits.dtype not in DTYPES or not logits.is_contiguous():
        raise ValueError(
            f"cross_entropy_in_place: logits must be contiguous and have a dtype in {DTYPES}, not {logits.dtype}"
        )
    losses = torch.empty(len(labels), dtype=torch.float32, device=logits.device)
    columns = min(COLUMNS, triton.next_power_of_2(logits.shape[1]))
    with torch.cuda.device_of(logits):
        _cross_entropy[(len(labels),)](
            logits, labels, losses, logits.shape[1], ignored, COLUMNS=columns, num_warps=WARPS, **OPTIONS
        )
    return losses


@triton.jit
def _cross_entropy(logits, labels, losses, vocabulary, ignored, COLUMNS: tl.constexpr):
    """Run one program per token."""
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * vocabulary
    label = tl.load(labels + token)
    kept = label != ignored
    target = tl.load(row + label, mask=kept, other=0.0).to(tl.float32)
    columns = tl.arange(0, COLUMNS)
    # Every lane has its own peak, so no tile needs a reduction. The initial peak is finite, as -inf - -inf is NaN.
    peak = tl.full([COLUMNS], -1e30, tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, vocabulary, COLUMNS):
        inside = start + columns < vocabulary
        x = tl.load(row + start + columns, mask=inside, other=float("-inf")).to(tl.float32) * 1.4426950408889634
        higher = tl.maximum(peak, x)
        total = total * tl.exp2(peak - higher) + tl.exp2(x - higher)
        peak = higher
    highest = tl.max(peak, 0)
    log_sum = highest + tl.log2(tl.sum(total * tl.exp2(peak - highest), 0))
    tl.store(losses + token, tl.where(kept, log_sum * 0.6931471805599453 - target, 0.0))
    tl.debug_barrier()  # the label's logit is read before it is overwritten
    for start in range(0, vocabulary, COLUMNS):
        inside = start + columns < vocabulary
        x = tl.load(row + start + columns, mask=inside, other=float("-inf")).to(tl.float32) * 1.4426950408889634
        slope = tl.exp2(x - log_sum) - tl.where(start + columns == label, 1.0, 0.0)
        tl.store(row + start + columns, tl.where(kept, slope, 0.0).to(logits.dtype.element_ty), mask=inside)
