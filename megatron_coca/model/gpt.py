"""The language model: embedding, blocks, final norm, output head."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_coca.attention.inputs import Backend
from megatron_coca.attention.method import PositionMethod
from megatron_coca.config import ModelConfig
from megatron_coca.model.block import Block
from megatron_coca.model.embedding import Embedding
from megatron_coca.model.norms import build_norm


class GPT(nn.Module):
    """A causal language model; `model(input_ids)` gives logits [batch, length, padded vocabulary].

    `layers` is the list embedding, blocks, final norm; nothing but hidden states and the position tables passes
    between them. Lengths beyond the training length are ordinary.

    Attributes:
        method: the position method, shared by all layers.
        vocab_size: rows of the output head, padding included.
    """

    def __init__(self, model: ModelConfig, method: PositionMethod, backend: Backend) -> None:
        super().__init__()
        self.method, self.vocab_size = method, model.padded_vocab_size
        self.checkpoint_activations = model.checkpoint_activations
        learned = model.max_position_embeddings if method.name == "learned" else None
        self.embedding = Embedding(self.vocab_size, model.hidden_size, learned, model.hidden_dropout)
        self.blocks = nn.ModuleList(Block(model, method, backend) for _ in range(model.num_layers))
        self.norm = build_norm(model)
        self.final_linear = nn.Linear(model.hidden_size, self.vocab_size, bias=False) if model.no_weight_tying else None

    def forward(self, input_ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Logits [batch, length, padded vocabulary] for input_ids [batch, length] int64."""
        return self.logits(self.hidden_states(input_ids, positions))

    def hidden_states(self, input_ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Hidden states after the final norm, [batch, length, hidden_size].

        `positions` ([length] or [batch, length], int64) defaults to 0, 1, ...; length-dependent frequencies look at
        the largest + 1.
        """
        if positions is None:
            positions, length = torch.arange(input_ids.shape[1], device=input_ids.device), input_ids.shape[1]
        else:
            length = int(positions.max()) + 1
        x = self.embedding(input_ids, positions)
        tables = self.method.tables(positions, length, x.dtype)
        for block in self.blocks:
            if self.checkpoint_activations and self.training:
                x = checkpoint(block, x, tables, use_reentrant=False)
            else:
                x = block(x, tables)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the vocabulary for any slice of `hidden_states`, in its dtype."""
        if self.final_linear is not None:
            return self.final_linear(hidden)
        return F.linear(hidden, self.embedding.word_embeddings.weight)
