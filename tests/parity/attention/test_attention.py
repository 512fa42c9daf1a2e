"""Every method and backend against the float64 oracle: values and all gradients. The tolerance follows from the error
of a plain run in the same precision.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_coca.attention.inputs import AttentionInputs, bias_of_pairs
from tests.parity.attention_cases import (
    BACKENDS,
    CASES,
    CHOSEN,
    FAST,
    FORMS,
    SERVED,
    Case,
    Layout,
    assert_as_exact_as_plain,
    check,
    error,
    exact,
    production,
    served,
)

DIFFERENTIABLE = [(name, backend) for name, backend in SERVED if backend != "flex"]


@pytest.mark.parametrize(("name", "backend"), CHOSEN)
def test_float32(name: str, backend: str) -> None:
    check(CASES[name], backend, Layout(111))


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize(("name", "backend"), FAST)
def test_one_and_two_tokens(name: str, backend: str, length: int) -> None:
    check(CASES[name], backend, Layout(length))


@pytest.mark.parametrize(("name", "backend"), [(name, backend) for name, backend in FAST if backend != "flex"])
def test_float32_in_several_blocks(name: str, backend: str) -> None:
    """More queries than one block of a backend holds, in groups of heads."""
    check(CASES[name], backend, Layout(600, batch=1, kv_heads=2))


@pytest.mark.parametrize(("name", "backend"), DIFFERENTIABLE)
def test_float64(name: str, backend: str) -> None:
    """Nothing but rounding separates production from the oracle."""
    layout = Layout(75)
    ours = production(CASES[name], layout, torch.float64, BACKENDS[backend].attend).all
    for what, expected in exact(CASES[name], layout, torch.float64).all.items():
        allowed = 1e-10 if what in ("out", "q", "k", "v") else 1e-6  # learned weights and their gradients are float32
        assert error(ours[what], expected) < allowed, what


@pytest.mark.parametrize("name", CASES)
def test_backends_say_what_they_serve(name: str) -> None:
    for backend, instance in BACKENDS.items():
        needs = CASES[name].method.needs("cuda" if backend == "flex" else "cpu", 0.0)
        assert (instance.supports(needs) is None) == served(backend, replace(CASES[name], training=True)), backend


@pytest.mark.parametrize(
    ("name", "backend", "length"),
    [(n, b, 63) for n, b in CHOSEN if b != "flex"]
    # Blocks are tested in float32, and what is summed over them once with each kind of operands here.
    + [(n, b, 600) for n, b in FAST if b != "flex" and n in ("coca", "alibi", "rerope-coca")],
)
def test_bfloat16(name: str, backend: str, length: int) -> None:
    """The plain run rounds operands, scores and weights as eager attention in bfloat16 does."""
    case, layout = CASES[name], Layout(length, batch=1)
    true = exact(case, layout, torch.bfloat16).all
    plain = production(case, layout, torch.bfloat16, eager).all
    ours = production(case, layout, torch.bfloat16, BACKENDS[backend].attend).all
    for what, expected in true.items():
        allowed = error(plain[what], expected)
        assert error(ours[what], expected) <= 2 * allowed, f"{what}: against {allowed:.2e} of a plain run"


def eager(inputs: AttentionInputs) -> Tensor:
    """Textbook attention with every intermediate rounded to the operands' dtype (the bias apart)."""
    length, dtype = inputs.value.shape[2], inputs.value.dtype
    distance = torch.arange(length)[:, None] - torch.arange(length)[None]
    scores = torch.full((), -math.inf, dtype=dtype)
    for segment in inputs.segments:
        high = length if segment.band.high is None else segment.band.high
        inside = (distance >= segment.band.low) & (distance < high)
        if segment.band.first_keys is not None:
            inside = inside & (torch.arange(length) < segment.band.first_keys)
        scores = torch.where(inside, segment.query @ segment.key.transpose(-1, -2) * inputs.scale, scores)
    if inputs.bias is not None:
        query = torch.arange(length)[:, None].float()
        scores = scores + bias_of_pairs(inputs.bias, distance.clamp(min=0).float(), query).to(dtype)
    return torch.softmax(scores, dim=-1) @ inputs.value


@pytest.mark.parametrize("name", ["learned", "sinusoidal"])
def test_embedded_positions_leave_attention_alone(name: str) -> None:
    layout = Layout(40)
    ours = production(replace(FORMS["none"], pos_emb=name), layout, torch.float64, BACKENDS["sdpa"].attend)
    for what, expected in exact(FORMS["none"], layout, torch.float64).all.items():
        assert error(ours.all[what], expected) < 1e-12


class Unbounded(Case):
    """KERPLE with weights beyond their bounds: below 0.01, and an exponent above 2."""

    def learned(self) -> dict[str, Tensor]:
        return {"p": torch.tensor([-1.0, 0.0, 0.5, 3.0]).double(), "a": torch.tensor([0.5, -2.0, 0.0, 0.25]).double()}


@pytest.mark.parametrize("name", ["kerple_log", "kerple_power"])
@pytest.mark.parametrize("backend", ["reference", "sdpa", "flex"])
def test_kerple_bounds_its_weights(name: str, backend: str) -> None:
    case, layout = Unbounded(name), Layout(40)
    ours = production(case, layout, torch.float32, BACKENDS[backend].attend, gradients=False)
    assert_as_exact_as_plain(case, layout, torch.float32, ours)


@pytest.mark.parametrize(("name", "backend"), FAST)
def test_nothing_is_read_before_it_is_written(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is handed out unwritten holds NaN here."""
    case, layout = CASES[name], Layout(111)
    poisoned = 0

    def poison(make):
        def empty(*args: object, **options: object) -> Tensor:
            nonlocal poisoned
            poisoned += 1
            out = make(*args, **options)
            return out.fill_(math.nan) if out.is_floating_point() else out

        return empty

    def attend(inputs: AttentionInputs) -> Tensor:
        for owner, method in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
            monkeypatch.setattr(owner, method, poison(getattr(owner, method)))
        return BACKENDS[backend].attend(inputs)

    ours = production(case, layout, torch.float32, attend, gradients=backend != "flex")
    assert torch.empty(1).isnan().all() and poisoned
    monkeypatch.undo()
    assert_as_exact_as_plain(case, layout, torch.float32, ours)


def test_dropout_is_in_the_contract() -> None:
    torch.manual_seed(0)
    for backend in ("reference", "sdpa"):

        def attend(inputs: AttentionInputs, backend: str = backend) -> Tensor:
            return BACKENDS[backend].attend(inputs.replace(dropout=0.5))

        first, second = (production(FORMS["none"], Layout(50), torch.float32, attend).out for _ in range(2))
        assert not torch.allclose(first, second)
