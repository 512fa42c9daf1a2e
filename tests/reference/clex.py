"""CLEX (Chen et al. 2023): ln theta as the solution of a learned differential equation, integrated as in the paper."""

import math

import torch
from torch import Tensor


def clex_frequencies(up: Tensor, down: Tensor, t: float, base: float = 10000.0, step: float = 0.01) -> Tensor:
    """theta at t >= 1, [d/2] float64, from weights `up` [d/2, d] and `down` [d, d/2] of any floating type.

    z(1) = ln theta and dz/dt = tanh([z + ln theta_ntk(t)] W_up) W_down + d/dt ln theta_ntk(t), by the classical
    fourth-order Runge-Kutta method with steps of at most `step`. theta_ntk has the base B alpha^(d/(d-2)), alpha =
    2t - 1. Differentiable in the weights.
    """
    up, down = up.double(), down.double()
    dim = 2 * up.shape[0]
    pair = torch.arange(up.shape[0], dtype=torch.float64, device=up.device)

    def ntk(time: float) -> Tensor:
        return -2 * pair / dim * (math.log(base) + dim / (dim - 2) * math.log(2 * time - 1))

    def slope(time: float, z: Tensor) -> Tensor:
        drift = -2 * pair / (dim - 2) * 2 / (2 * time - 1)
        return torch.tanh((z + ntk(time)) @ up) @ down + drift

    z, steps = ntk(1.0), math.ceil(round((t - 1) / step, 9))
    h = (t - 1) / max(steps, 1)
    for i in range(steps):
        time = 1 + i * h
        k1 = slope(time, z)
        k2 = slope(time + h / 2, z + h / 2 * k1)
        k3 = slope(time + h / 2, z + h / 2 * k2)
        k4 = slope(time + h, z + h * k3)
        z = z + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return z.exp()
