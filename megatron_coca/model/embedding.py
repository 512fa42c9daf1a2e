"""Token embedding, with absolute positions added where the method asks for them."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_coca.attention.method import PositionMethod
from megatron_coca.attention.positions import PositionRangeError
from megatron_coca.config import ModelConfig


class LearnedPositions(nn.Embedding):
    """A learned vector per position; a position beyond the table is an error, because such a model sees no further."""

    def forward(self, positions: Tensor, reached: int | None = None) -> Tensor:
        """[..., hidden_size] for integer positions [...]. `reached`, the largest + 1, spares asking the device for it.

        Raises:
            PositionRangeError: a position has no vector.
        """
        reached = int(positions.max()) + 1 if reached is None else reached
        if reached > self.num_embeddings:
            raise PositionRangeError(
                f"pos_emb: learned has {self.num_embeddings} positions (max_position_embeddings); "
                f"position {reached - 1} is beyond them"
            )
        return super().forward(positions)


class SinusoidalPositions(nn.Module):
    """sin and cos of position * 10000^(-2j/hidden_size), all sines first (Vaswani et al. 2017, in GPT-NeoX's order)."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size

    def forward(self, positions: Tensor, reached: int | None = None) -> Tensor:
        """[..., hidden_size] float32 for integer positions [...] of any size; phases are taken in float64."""
        pair = torch.arange(0, self.hidden_size, 2, dtype=torch.float64, device=positions.device)
        phases = positions.to(torch.float64)[..., None] * 10000.0 ** (-pair / self.hidden_size)
        return torch.cat((phases.sin(), phases.cos()), dim=-1)[..., : self.hidden_size].float()


ABSOLUTE: dict[str, Callable[[ModelConfig], nn.Module]] = {
    "learned": lambda model: LearnedPositions(model.max_position_embeddings, model.hidden_size),
    "sinusoidal": lambda model: SinusoidalPositions(model.hidden_size),
}


def absolute(method: PositionMethod, model: ModelConfig) -> nn.Module | None:
    """What the embedding adds by position for this method, or None."""
    return ABSOLUTE[method.name](model) if method.name in ABSOLUTE else None


class Embedding(nn.Module):
    """input_ids [batch, length] -> [batch, length, hidden_size], in the dtype of the weights."""

    def __init__(self, vocab_size: int, hidden_size: int, dropout: float, positions: nn.Module | None = None) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab_size, hidden_size)
        self.position_embeddings, self.dropout = positions, dropout

    def forward(self, input_ids: Tensor, positions: Tensor, reached: int | None = None) -> Tensor:
        """`positions` [length] or [batch, length] of the tokens; `reached` the largest + 1, where it is known."""
        x = self.word_embeddings(input_ids)
        if self.position_embeddings is not None:
            x = x + self.position_embeddings(positions, reached).to(x.dtype)
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


IGNORED = -100
"""The label of a token that takes no part in the loss, as in PyTorch."""


def next_token_loss(logits: Tensor, labels: Tensor, loss_mask: Tensor | None = None) -> Tensor:
    """Mean negative log-likelihood, in float32 or better, of labels [batch, length] under logits [batch, length, vocabulary], in
    nats per token.

    With `loss_mask`, bool [batch, length], the mean is over the labels where it holds, as in GPT-NeoX and Megatron; 0
    where it holds nowhere.
    """
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    if loss_mask is None:
        return F.cross_entropy(scores, labels.flatten())
    kept = labels.masked_fill(~loss_mask, IGNORED)
    total = F.cross_entropy(scores, kept.flatten(), ignore_index=IGNORED, reduction="sum")
    return total / loss_mask.sum().clamp(min=1)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int | None) -> Tensor:
    """Mean negative log-likelihood of labels [tokens] int64 under the logits hidden @ weight^T, in nats, a scalar in
    float32 or better; labels of `IGNORED` do not count, and without others the loss is 0.

    Args:
        hidden: [tokens, width], of any floating dtype.
        weight: [vocabulary, width], of the same dtype.
        labels: int64 [tokens], each below `vocabulary` or `IGNORED`.
        chunk: tokens scored at a time; None means all.

    Logits are rounded to the dtype of `hidden` as a linear layer does; softmax, losses and their sum are in float32
    (float64 where `hidden` is), and so is the sum of the weight's gradient over chunks.
    """
    count = (labels != IGNORED).sum().clamp(min=1)
    size = min(chunk or len(labels), len(labels))
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _SummedLoss.apply(hidden, weight, labels, size) / count
    return sum(losses.sum() for losses, _ in _chunks(hidden, weight, labels, size)) / count


def _chunks(hidden: Tensor, weight: Tensor, labels: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """For every `size` tokens their losses [size], 0 where ignored, and log-probabilities [size, vocabulary]."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    for states, targets in zip(hidden.split(size), labels.split(size), strict=True):
        logs = F.log_softmax(states @ weight.t(), dim=-1, dtype=wide)
        yield F.nll_loss(logs, targets, ignore_index=IGNORED, reduction="none"), logs


class _SummedLoss(torch.autograd.Function):
    """The sum of the losses; both gradients are ready when it is, but for a factor."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, size: int) -> Tensor:
        wide, trained = torch.promote_types(weight.dtype, torch.float32), ctx.needs_input_grad[1]
        of_weight = torch.zeros(weight.shape if trained else (0,), dtype=wide, device=weight.device)
        total, of_hidden = of_weight.new_zeros(()), []
        parts = zip(_chunks(hidden, weight, labels, size), hidden.split(size), labels.split(size), strict=True)
        for (losses, logs), states, targets in parts:
            total = total + losses.sum()
            of_logits = _gradient(logs, targets).to(hidden.dtype)
            of_hidden.append(of_logits @ weight)
            if not trained:
                continue
            if wide == weight.dtype:
                of_weight.addmm_(of_logits.t(), states)
            else:
                of_weight += of_logits.t() @ states
        ctx.dtype = weight.dtype
        ctx.save_for_backward(torch.cat(of_hidden), of_weight)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        of_hidden, of_weight = ctx.saved_tensors
        # In float32 first: a factor such as 1 / count would itself be rounded to half precision.
        scaled = (of_hidden.to(of_weight.dtype) * grad).to(ctx.dtype)
        return scaled, (of_weight * grad).to(ctx.dtype) if ctx.needs_input_grad[1] else None, None, None


def _gradient(logs: Tensor, targets: Tensor) -> Tensor:
    """d loss / d logits = softmax - onehot, in place of the log-probabilities; 0 for tokens that are ignored."""
    kept = (targets != IGNORED)[:, None]
    index = targets[:, None].clamp(min=0)
    of_target = logs.gather(1, index).expm1()
    return logs.exp_().scatter_(1, index, of_target).mul_(kept)


class OutputHead(nn.Linear):
    """A vocabulary's own matrix: hidden states [..., width] -> logits [..., vocabulary], or with labels their loss.

    The loss is taken inside the module's own call, because an engine that shards weights (ZeRO 3) has them whole only
    while the module that owns them runs.
    """

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__(width, vocabulary, bias=False)

    def forward(self, hidden: Tensor, labels: Tensor | None = None, chunk: int | None = None) -> Tensor:
        """Logits, or with `labels` [tokens] for `hidden` [tokens, width] what `linear_cross_entropy` says."""
        if labels is None:
            return super().forward(hidden)
        return linear_cross_entropy(hidden, self.weight, labels, chunk)
