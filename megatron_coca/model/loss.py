"""The training objective."""

from torch import Tensor

from megatron_coca.attention.heads import Shared
from megatron_coca.model.gpt import GPT
from megatron_coca.model.head import next_token_loss

__all__ = ["LanguageModelLoss", "next_token_loss"]


class LanguageModelLoss(Shared):
    """A model with its objective: samples [batch, length + 1] int64 -> the scalar loss of predicting each token from
    those before it, in nats per token.

    `documents` and `positions`, integer [batch, length], are the model's own arguments; `loss_mask`, bool [batch,
    length], says at which inputs the loss is taken.
    """

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        samples: Tensor,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
        loss_mask: Tensor | None = None,
    ) -> Tensor:
        hidden = self.model.hidden_states(samples[:, :-1], positions=positions, documents=documents)
        labels = self.share.split(samples[:, 1:])
        own_mask = None if loss_mask is None else self.share.split(loss_mask)
        return self.share.mean(self.model.loss(hidden, labels, own_mask), loss_mask)
