"""Forgetting gates: each token after the key, up to the query, lowers the score by its own learned amount.

Token t has a log gate g_t <= 0 for each head. The bias of query m and key n is the sum of g_t for n < t <= m.
"""

from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

LogGate = Callable[[Tensor], Tensor]
"""The projection of a token, in float32 or better -> its log gate, at most 0."""


def _cable(x: Tensor) -> Tensor:
    """-softplus(x) (Veisi et al. 2025, "Context-aware Biases for Length Extrapolation", the authors' code): FoX's gate
    with weights of the opposite sign, because softplus(x) = -ln sigmoid(-x).
    """
    return F.logsigmoid(-x)


GATES: dict[str, LogGate] = {"fox": F.logsigmoid, "cable": _cable}
"""Gates by `forgetting_gate`. `fox` is Lin et al. 2025, "Forgetting Transformer: Softmax Attention with a Forget Gate".
"""


class HeadGates(nn.Module):
    """Log gates of every query head of a layer: hidden states [..., hidden_size] -> [..., heads], float32 or better.

    Weights `projection` [heads, hidden_size] and its bias [heads]; tensor parallelism divides them by heads.
    """

    def __init__(self, hidden_size: int, heads: int, std: float, log_gate: LogGate) -> None:
        """`std` is the standard deviation of the initial weights."""
        super().__init__()
        self.projection, self._std, self._log_gate = nn.Linear(hidden_size, heads), std, log_gate
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set normal weights and a bias of 0, as in both papers' code; gates start near 1/2."""
        self.projection.weight.normal_(0.0, self._std)
        self.projection.bias.zero_()

    def forward(self, hidden: Tensor) -> Tensor:
        projected = self.projection(hidden)
        return self._log_gate(projected.to(torch.promote_types(projected.dtype, torch.float32)))
