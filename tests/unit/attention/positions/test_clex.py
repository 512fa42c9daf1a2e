"""CLEX: the solution against a plain integration of the paper's equation, its memory, and its training draws."""

import copy
import io

import pytest
import torch
from torch import Tensor

from megatron_coca.attention.positions.clex import Clex
from megatron_coca.attention.positions.frequencies import Rotary, Scaling, geometric


def trained(dim: int = 64, base: float = 1e4, seed: int = 0, spread: float = 0.02, **keys: float) -> Clex:
    """With weights as large as training could make them."""
    clex = Clex(dim, base, 512, **keys)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        clex.reset_parameters()
        clex.down.normal_(0, spread)
    return clex


def integrated(clex: Clex, t: float, step: float) -> Tensor:
    """exp z(t) by Runge-Kutta on z itself, derivative of ln theta_ntk included, as the paper writes the equation."""
    up, down, index = clex.up.double(), clex.down.double(), torch.arange(0, clex.dim, 2, dtype=torch.float64)

    def slope(time: float, z: Tensor) -> Tensor:
        alpha = 2 * time - 1
        ntk = clex.base ** (-index / clex.dim) * alpha ** (-index / (clex.dim - 2))
        return torch.tanh((z + ntk.log()) @ up) @ down - 2 * index / (clex.dim - 2) / alpha

    z, steps = geometric(clex.dim, clex.base).log(), max(1, round((t - 1) / step))
    h = (t - 1) / steps
    for i in range(steps):
        time = 1 + i * h
        first = slope(time, z)
        second = slope(time + h / 2, z + h / 2 * first)
        third = slope(time + h / 2, z + h / 2 * second)
        z = z + h / 6 * (first + 2 * second + 2 * third + slope(time + h, z + h * third))
    return z.exp()


@pytest.mark.parametrize(("dim", "base", "t"), [(64, 1e4, 16), (64, 5e5, 4), (16, 1e4, 2), (128, 1e4, 16)])
@torch.no_grad()
def test_frequencies_solve_the_equation(dim: int, base: float, t: int) -> None:
    clex = trained(dim, base)
    expected = integrated(clex, t, 0.01)
    moved = (expected / geometric(dim, base)).log().abs().max()
    assert moved > 0.5, "weights of no consequence"
    torch.testing.assert_close(clex.inverse_frequencies(t), expected, rtol=1e-7, atol=0)
    fine = trained(dim, base, ode_step=0.01)
    torch.testing.assert_close(fine.inverse_frequencies(t), expected, rtol=1e-9, atol=0)


def test_gradients_are_those_of_the_equation() -> None:
    ours, theirs = trained(16, spread=0.1), trained(16, spread=0.1)
    weight = torch.linspace(1, 2, 8, dtype=torch.float64)
    (ours.inverse_frequencies(8).log() * weight).sum().backward()
    (integrated(theirs, 8, 0.01).log() * weight).sum().backward()
    for mine, their in ((ours.up, theirs.up), (ours.down, theirs.down)):
        assert mine.grad is not None and float(mine.grad.abs().max()) > 1e-2
        torch.testing.assert_close(mine.grad, their.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("t", [1, 2, 16])
def test_before_training_it_is_ntk_aware_scaling(t: int) -> None:
    ntk = Rotary(64, 1e4, 512, Scaling("ntk", factor=2 * t - 1)).inverse_frequencies(1)
    assert torch.equal(Clex(64, 1e4, 512).inverse_frequencies(t), ntk)


def test_a_factor_of_one_changes_nothing_and_still_has_gradients() -> None:
    clex = trained()
    frequencies = clex.inverse_frequencies(1)
    assert torch.equal(frequencies, geometric(64, 1e4))
    frequencies.sum().backward()
    assert not clex.up.grad.any() and not clex.down.grad.any()


def test_the_one_frequency_of_a_rotary_dimension_of_two_stays() -> None:
    assert trained(2).inverse_frequencies(8).tolist() == [1.0], "ln 1 = 0 is at rest"


def test_the_factor_covers_the_length() -> None:
    clex = Clex(8, 1e4, 512, max_factor=16)
    lengths = {1: 1, 512: 1, 513: 2, 1024: 2, 1025: 3, 8192: 16, 10**6: 16}
    assert {length: clex.factor_for(length) for length in lengths} == lengths


def test_initial_weights_are_in_the_authors_range() -> None:
    clex = Clex(64, 1e4, 512)
    assert 0.95 / 8 < float(clex.up.detach().abs().max()) <= 1 / 8 and not clex.down.any()


@torch.no_grad()
def test_a_solution_is_remembered_until_the_weights_change() -> None:
    clex = trained()
    first = clex.inverse_frequencies(4)
    assert clex.inverse_frequencies(4) is first
    clex.down.data.mul_(2.0)  # as engines write weights: past the parameter's version counter
    changed = clex.inverse_frequencies(4)
    assert not torch.equal(changed, first)
    clex.load_state_dict(trained().state_dict())
    assert torch.equal(clex.inverse_frequencies(4), first)
    assert torch.equal(clex.bfloat16().inverse_frequencies(4), trained().bfloat16().inverse_frequencies(4))


def test_gradients_flow_after_a_remembered_solution() -> None:
    clex = trained(16)
    with torch.inference_mode():
        remembered = clex.inverse_frequencies(2)
    solved = clex.inverse_frequencies(2)
    assert solved.requires_grad and torch.equal(solved.detach(), remembered)
    clex.requires_grad_(False)
    x = torch.ones(8, dtype=torch.float64, requires_grad=True)
    (x * clex.inverse_frequencies(2)).sum().backward()
    assert torch.equal(x.grad, remembered)


@torch.no_grad()
def test_what_is_remembered_is_not_saved() -> None:
    clex = trained(16)
    before = copy.deepcopy(clex.state_dict())
    clex.inverse_frequencies(3)
    assert not list(clex.buffers()) and clex.state_dict().keys() == before.keys() == {"up", "down"}
    torch.save(clex.state_dict(), stream := io.BytesIO())
    assert stream.tell() < 8000


@pytest.mark.parametrize(("length", "reached", "t", "scale"), [(512, 512, 1, 1), (512, 2048, 4, 1), (1500, 4500, 3, 2)])
def test_the_positions_of_training_name_the_factor(length: int, reached: int, t: int, scale: int) -> None:
    """Beyond L positions are divided by floor(length/L), as in the authors' code."""
    positions = torch.tensor([[0, 7, reached - 1]])
    factor, rotated = Clex(8, 1e4, 512, max_factor=4).in_training(positions, length, reached)
    assert factor == t and rotated.dtype == torch.float64 and torch.equal(rotated * scale, positions.double())
