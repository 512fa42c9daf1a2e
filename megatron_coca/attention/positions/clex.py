"""CLEX (Chen et al. 2024, "CLEX: Continuous Length Extrapolation for Large Language Models", sections 3.2-3.4).

The log-frequencies z(t) are the solution of a learned differential equation in the scaling factor t. All layers share
the equation:

    dz/dt = tanh([z + ln theta_ntk(t)] W_up) W_down + d/dt ln theta_ntk(t),   z(1) = ln theta

theta_ntk(t) are the NTK-aware frequencies with alpha = 2t - 1. Their part of the derivative is known in closed form, so
only the rest is integrated numerically: y = z - ln theta_ntk obeys dy/dt = tanh([y + 2 ln theta_ntk(t)] W_up) W_down,
y(1) = 0.

The authors' code uses base 10000 for theta_ntk regardless of the model's base; here theta and theta_ntk both use the
model's base.

In training, `training_positions: {type: stretched}` (data/training_positions.py) determines t and the positions.
"""

import math

import torch
import torch.nn as nn
from torch import Tensor

from megatron_coca.attention.positions.frequencies import geometric, ntk_base


class Clex(nn.Module):
    """Learned frequencies for an even rotary dimension `dim` >= 2, a `base` and a training length L in tokens.

    The parameters are `up` [dim/2, dim] and `down` [dim, dim/2]. The equation is small and its solution is sequential,
    so it is solved on the CPU in float64.

    Attributes:
        max_factor: the largest t, an integer.
        ode_step: the step in t of the fourth-order Runge-Kutta method. The authors use 0.01. A step of 0.1 takes a
            tenth of the time, and its relative error is at most 2e-8, which is below float32 precision. This was
            measured at dim 64 and 128, up to t = 16, with a `down` of standard deviation 0.02, which changes
            frequencies by factors of e^-10 to e^7.
    """

    def __init__(
        self, dim: int, base: float, original_length: int, max_factor: int = 16, ode_step: float = 0.1
    ) -> None:
        super().__init__()
        self.dim, self.base, self.original_length = dim, base, original_length
        self.max_factor, self.ode_step = max_factor, ode_step
        self.up = nn.Parameter(torch.empty(dim // 2, dim))
        self.down = nn.Parameter(torch.empty(dim, dim // 2))
        self._solved: dict[int, Tensor] = {}
        self._solved_for: tuple[Tensor, Tensor] | None = None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw `up` uniformly within 1/sqrt(dim) and set `down` to zero, as the authors do. Training therefore starts
        from the NTK-aware frequencies.
        """
        bound = 1 / math.sqrt(self.dim)
        self.up.uniform_(-bound, bound)
        self.down.zero_()

    def factor_for(self, length: int) -> int:
        """Return t for an input of `length` tokens l: ceil(l/L), at least 1 and at most `max_factor`."""
        return max(1, min(math.ceil(length / self.original_length), self.max_factor))

    def in_training(self, positions: Tensor, length: int, reached: int) -> tuple[int, Tensor]:
        """Return t and the float64 positions to rotate by, for `length` training tokens at `positions` below `reached`.

        If the positions go up to t times the length, the factor is t. If floor(length/L) is above 1, positions are
        divided by it. In the authors' code, the last position is t*length/floor(length/L) - 1, which can be smaller
        than the position before it; here the last position is divided like all others.
        """
        t = min(math.ceil(reached / length), self.max_factor)
        return t, positions.to(torch.float64) / max(1, length // self.original_length)

    def inverse_frequencies(self, t: int) -> Tensor:
        """Return exp(z(t)) for an integer t >= 1: [dim/2] float64, in radians per position, on the weights' device.

        While gradients are recorded, the result is differentiable in both parameters; otherwise it is cached.
        """
        return self(t)  # calls the module, so that ZeRO stage 3 gathers the weights

    def forward(self, t: int) -> Tensor:
        """See `inverse_frequencies`.

        The cache is valid as long as the weights' values are unchanged. Version counters are not sufficient to detect
        changes, because DeepSpeed writes parameters through other tensors with the same storage.
        """
        if torch.is_grad_enabled() and (self.up.requires_grad or self.down.requires_grad):
            return self._solve(t)
        with torch.inference_mode(False), torch.no_grad():  # an inference tensor cannot be used in a later backward
            if not self._still_solved():
                self._solved_for = self.up.detach().clone(), self.down.detach().clone()
                self._solved = {}
            if t not in self._solved:
                self._solved[t] = self._solve(t)
            return self._solved[t]

    def _still_solved(self) -> bool:
        if self._solved_for is None or self._solved_for[0].device != self.up.device:
            return False
        return all(
            old.dtype == new.dtype and torch.equal(old, new)
            for old, new in zip(self._solved_for, (self.up, self.down), strict=True)
        )

    def _solve(self, t: int) -> Tensor:
        """Solve for exp(z(t)). At t = 1 the gradients are zero but exist, so that all ranks reduce the same gradients
        even if they draw different t.
        """
        up, down = (weight.to("cpu", torch.float64) for weight in (self.up, self.down))
        theta = geometric(self.dim, ntk_base(self.dim, self.base, 2 * t - 1))
        return (theta * self._excess(t, up, down).exp()).to(self.up.device)

    def _excess(self, t: int, up: Tensor, down: Tensor) -> Tensor:
        """Compute y(t) [dim/2] by the classical Runge-Kutta method in equal steps of at most `ode_step`.

        The method integrates w = y W_up, which obeys dw/dt = tanh(w + drive(t)) W_down W_up. Each evaluation then needs
        only one small matrix product, and W_down is applied only once, to the sum of all steps, to get y.
        """
        steps = max(1, math.ceil((t - 1) / self.ode_step - 1e-9))  # 1e-9: rounding must not add a step
        step = (t - 1) / steps
        drive = (self._log_ntk(1 + step / 2 * torch.arange(2 * steps + 1, dtype=torch.float64)) @ (2 * up)).unbind(0)
        matrix = (down @ up).T
        w = total = torch.zeros(self.dim, dtype=torch.float64)
        for i in range(steps):
            middle = w + drive[2 * i + 1]
            first = torch.tanh(w + drive[2 * i])
            second = torch.tanh(torch.addmv(middle, matrix, first, alpha=step / 2))
            third = torch.tanh(torch.addmv(middle, matrix, second, alpha=step / 2))
            fourth = torch.tanh(torch.addmv(w + drive[2 * i + 2], matrix, third, alpha=step))
            stages = first + 2 * (second + third) + fourth
            total = total + stages
            w = torch.addmv(w, matrix, stages, alpha=step / 6)
        return step / 6 * (total @ down)

    def _log_ntk(self, times: Tensor) -> Tensor:
        """Return ln theta_ntk at `times` [n]: [n, dim/2] float64; theta_ntk,j = theta_j (2t - 1)^(-2j/(dim-2))."""
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float64) / max(self.dim - 2, 1)
        return geometric(self.dim, self.base).log() - torch.log(2 * times - 1)[:, None] * exponents
