"""Forgetting gates: each token after the key, up to and including the query, lowers the score by a learned amount.

Token t has a log gate g_t <= 0 for each head. The bias of query m and key n is the sum of g_t for n < t <= m.
"""

from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

LogGate = Callable[[Tensor], Tensor]
"""Maps a token's projection, in float32 or better, to its log gate, which is at most 0."""


def _cable(x: Tensor) -> Tensor:
    """Return -softplus(x), as in the code of Veisi et al. 2025, "Context-aware Biases for Length Extrapolation". This
    is FoX's gate with weights of the opposite sign, because softplus(x) = -ln sigmoid(-x).
    """
    return F.logsigmoid(-x)


GATES: dict[str, LogGate] = {"fox": F.logsigmoid, "cable": _cable}
"""Gates by `forgetting_gate`. `fox` is from Lin et al. 2025, "Forgetting Transformer: Softmax Attention with a Forget
Gate".
"""


class HeadGates(nn.Module):
    """The log gates of all query heads of a layer: hidden states [..., hidden_size] -> [..., heads], float32 or better.

    The linear layer `projection` has a weight [heads, hidden_size] and a bias [heads]; tensor parallelism splits them
    by heads.
    """

    def __init__(self, hidden_size: int, heads: int, std: float, log_gate: LogGate) -> None:
        """`std` is the standard deviation of the initial weights."""
        super().__init__()
        self.projection, self._std, self._log_gate = nn.Linear(hidden_size, heads), std, log_gate
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw normal weights and set the bias to 0, as in the code of both papers. Gates start near 1/2."""
        self.projection.weight.normal_(0.0, self._std)
        self.projection.bias.zero_()

    def forward(self, hidden: Tensor) -> Tensor:
        projected = self.projection(hidden)
        return self._log_gate(projected.to(torch.promote_types(projected.dtype, torch.float32)))
