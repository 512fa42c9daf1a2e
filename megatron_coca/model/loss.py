"""The training objective."""

import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean negative log-likelihood in float32 of labels [batch, length] under logits [batch, length, vocabulary], in
    nats per token.
    """
    return F.cross_entropy(logits.float().flatten(0, -2), labels.flatten())


class LanguageModelLoss(nn.Module):
    """A model with its objective: samples [batch, length + 1] int64 -> the scalar loss of predicting each token from
    those before it.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, samples: Tensor) -> Tensor:
        return next_token_loss(self.model(samples[:, :-1]), samples[:, 1:])
