"""Token embedding, with learned absolute positions where the method asks for them."""

import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor


class Embedding(nn.Module):
    """input_ids [batch, length] -> [batch, length, hidden_size].

    With `max_positions` a learned vector per position is added, and a position beyond the table is an error: such a
    model cannot see further.
    """

    def __init__(self, vocab_size: int, hidden_size: int, max_positions: int | None, dropout: float) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab_size, hidden_size)
        self.position_embeddings = nn.Embedding(max_positions, hidden_size) if max_positions else None
        self.max_positions, self.dropout = max_positions, dropout

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x = self.word_embeddings(input_ids)
        if self.position_embeddings is not None:
            if int(positions.max()) >= self.max_positions:
                raise ValueError(
                    f"pos_emb: learned has {self.max_positions} positions (max_position_embeddings); "
                    f"position {int(positions.max())} is beyond them"
                )
            x = x + self.position_embeddings(positions)
        return F.dropout(x, self.dropout, self.training) if self.dropout else x
