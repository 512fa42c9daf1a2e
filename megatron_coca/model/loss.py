"""The training objective."""

import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from megatron_coca.attention.heads import Shared

_IGNORED = -100


def next_token_loss(logits: Tensor, labels: Tensor, loss_mask: Tensor | None = None) -> Tensor:
    """Mean negative log-likelihood in float32 of labels [batch, length] under logits [batch, length, vocabulary], in
    nats per token.

    With `loss_mask`, bool [batch, length], the mean is over the labels where it holds, as in GPT-NeoX and Megatron; 0
    where it holds nowhere.
    """
    if loss_mask is None:
        return F.cross_entropy(logits.float().flatten(0, -2), labels.flatten())
    kept = labels.masked_fill(~loss_mask, _IGNORED)
    total = F.cross_entropy(logits.float().flatten(0, -2), kept.flatten(), ignore_index=_IGNORED, reduction="sum")
    return total / loss_mask.sum().clamp(min=1)


class LanguageModelLoss(Shared):
    """A model with its objective: samples [batch, length + 1] int64 -> the scalar loss of predicting each token from
    those before it, in nats per token.

    `documents` and `positions`, integer [batch, length], are the model's own arguments; `loss_mask`, bool [batch,
    length], says at which inputs the loss is taken.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        samples: Tensor,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
        loss_mask: Tensor | None = None,
    ) -> Tensor:
        logits = self.model(samples[:, :-1], positions=positions, documents=documents)
        own_mask = None if loss_mask is None else self.share.split(loss_mask)
        return self.share.mean(next_token_loss(logits, self.share.split(samples[:, 1:]), own_mask), loss_mask)
