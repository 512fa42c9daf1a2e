"""Rotary tables against known values, in the precision that long contexts need."""

import math

import pytest
import torch

from megatron_coca import Attention, attention_maps
from megatron_coca.attention.positions.forms import polar, rotary_tables, rotate, softplus
from megatron_coca.attention.positions.frequencies import Rotary
from megatron_coca.config import load_config
from megatron_coca.model import build_model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_tables_are_precise_at_32k(dtype: torch.dtype) -> None:
    positions = torch.arange(32768 - 100, 32768)
    theta = Rotary(64).inverse_frequencies(32768)
    tables = rotary_tables(positions, theta, dtype)
    assert tables.cos.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for row in (0, 57, 99):
        for j in (0, 1, 15, 31):
            phase = int(positions[row]) * 10000.0 ** (-2 * j / 64)
            assert abs(float(tables.cos[row, j]) - math.cos(phase)) < 1e-7
            assert abs(float(tables.sin[row, j]) - math.sin(phase)) < 1e-7


def test_rotation_turns_dimension_i_with_i_plus_half() -> None:
    x = torch.tensor([1.0, 0.0, 0.0, 2.0]).view(1, 1, 1, 4)
    tables = rotary_tables(torch.tensor([1]), torch.tensor([math.pi / 2, math.pi / 2], dtype=torch.float64), x.dtype)
    torch.testing.assert_close(rotate(x, tables).flatten(), torch.tensor([0.0, -2.0, 1.0, 0.0]))


def tiny(**keys: object) -> torch.nn.Module:
    shape = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 16, "vocab_size": 64}
    return build_model(load_config([], shape | keys)).eval()


def test_tables_survive_a_cast_of_the_model() -> None:
    model = tiny(pos_emb="rotary").bfloat16()
    tables = model.positions(torch.arange(32768), 32768, torch.bfloat16).segments[0].query
    phase = torch.arange(32768, dtype=torch.float64)
    assert float((tables.cos[:, 0].double() - phase.cos()).abs().max()) < 1e-7
    assert not list(model.buffers()), "a buffer could be cast"


def test_autocast_leaves_phases_alone() -> None:
    model = tiny(pos_emb="rotary")
    far = torch.arange(30000, 30016)
    plain = model.positions(far, 16, torch.bfloat16).segments[0].query
    with torch.autocast("cpu", torch.bfloat16):
        cast = model.positions(far, 16, torch.bfloat16).segments[0].query
    assert torch.equal(cast.cos, plain.cos) and torch.equal(cast.sin, plain.sin) and cast.cos.dtype == torch.float32


@pytest.mark.parametrize("rope_type", ["linear", "ntk", "dynamic", "dynamic_yarn", "longrope"])
@pytest.mark.parametrize("pos_emb", ["rotary", "coca", "coca_strict"])
@torch.no_grad()
def test_a_short_input_is_the_same_after_a_long_one(pos_emb: str, rope_type: str) -> None:
    options = {
        "dynamic_yarn": {},
        "longrope": {"factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
    }
    model = tiny(pos_emb=pos_emb, rope_scaling={"rope_type": rope_type} | options.get(rope_type, {"factor": 4.0}))
    short, long = torch.arange(12)[None], torch.arange(64)[None]
    before = model(short)
    beyond = model(long)
    assert torch.equal(model(short), before)
    assert torch.equal(model(long), beyond)


def test_imported_models_extend_from_the_length_of_their_weights() -> None:
    scaling = {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 64}
    rotary = tiny(pos_emb="rotary", rope_scaling=scaling).methods["global"].rotary
    assert rotary.original_length == 64
    assert torch.equal(rotary.inverse_frequencies(64), Rotary(16).inverse_frequencies(64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_softplus_and_its_gradient_are_as_exact_as_their_dtype(dtype: torch.dtype) -> None:
    """From the smallest inputs to the largest: nothing overflows, and the gradient is the sigmoid."""
    x = torch.tensor([-200.0, -12.0, -8.0, -1.0, -0.01, 0.0, 1.0, 8.0, 15.0, 39.0, 41.0, 3e4], dtype=dtype)
    exact = x.double()
    expected = torch.where(exact < 30, exact.clamp(max=30).exp().log1p(), exact)
    leaf = x.clone().requires_grad_()
    got = softplus(leaf)
    (gradient,) = torch.autograd.grad(got.sum(), leaf)
    info = torch.finfo(dtype)
    slack = {"rtol": 4 * info.eps, "atol": 4 * info.smallest_normal * info.eps}
    torch.testing.assert_close(got.double(), expected, **slack)
    torch.testing.assert_close(gradient.double(), exact.sigmoid(), **slack)


@pytest.mark.parametrize("magnitude", ["softplus", "relu_mean"])
@pytest.mark.parametrize("power", [1, 2])
def test_gradients_of_magnitudes_are_finite_at_zero(magnitude: str, power: int) -> None:
    """The length of a pair has no derivative at 0; its gradient is 0."""
    form = polar({"magnitude": magnitude, "power": power, "frequencies": "feature"})
    tables = rotary_tables(torch.arange(3), torch.ones(8), torch.float32)
    zeros = torch.zeros(1, 1, 3, 8, requires_grad=True)
    for operand in (form.query_operand(zeros, tables), form.key_operand(zeros, tables)):
        (gradient,) = torch.autograd.grad(operand.sum(), zeros)
        assert gradient.isfinite().all()
        assert bool(gradient.any()) == (magnitude == "softplus")


def test_squares_of_queries_overflow_in_float16_only() -> None:
    """|q|^2 of a pair is at most 65,504 in float16, so |q| is at most 255; the squares are computed in float32."""
    form = polar({"magnitude": "relu_mean", "power": 2, "frequencies": "pair"})
    for dtype, size, fits in ((torch.float16, 255, True), (torch.float16, 257, False), (torch.bfloat16, 1e4, True)):
        tables = rotary_tables(torch.zeros(1), torch.ones(1), dtype)
        operand = form.query_operand(torch.tensor([size, 0.0], dtype=dtype).expand(1, 1, 1, 2), tables)
        assert bool(operand.isfinite().all()) == fits


@pytest.mark.parametrize("frequencies", ["pair", "feature"])
@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("magnitude", ["relu_mean", "softplus"])
def test_unrotated_features_of_a_polar_form(magnitude: str, power: int, frequencies: str) -> None:
    """docs/attention.md: |q|^power relu(t) with `relu_mean`, q k as in RoFormer with `softplus`. Pair by pair."""
    length, width, rotated, base = 5, 16, 8, 10000.0
    chosen = {"magnitude": magnitude, "power": power, "frequencies": frequencies, "offset": "none"}
    config = load_config(
        {"num_layers": 1, "hidden_size": width, "num_attention_heads": 1, "seq_length": length, "vocab_size": 16},
        {
            "pos_emb": "polar",
            "pos_emb_options": chosen,
            "rotary_pct": rotated / width,
            "rotary_emb_base": base,
            "softmax_scale": 1.0,
            "attention_backend": "reference",
        },
    )
    torch.manual_seed(0)
    attention, x = Attention(config).double(), torch.randn(1, length, width, dtype=torch.float64)
    weights = dict(attention.named_parameters())
    name = next(name for name in weights if name.endswith("query_key_value.weight"))
    with torch.no_grad():
        weights[name].normal_()
    q, k, _ = (x[0] @ weights[name].T + weights[name.replace("weight", "bias")]).detach().chunk(3, dim=-1)
    found = attention_maps(attention, x)[0].scores[0, 0].detach()

    def score(i: int, j: int) -> float:
        total, half = 0.0, rotated // 2
        terms = half if (magnitude, frequencies) == ("relu_mean", "pair") else rotated
        for c in range(terms):
            pair = c % half
            step = 2 * pair if frequencies == "pair" else c
            if magnitude == "relu_mean":
                size = math.hypot(q[i, pair], q[i, pair + half])
                other = max(0.0, float(k[j, pair] + k[j, pair + half]) / 2)
            else:
                size, other = math.log1p(math.exp(q[i, c])), math.log1p(math.exp(k[j, c]))
            total += size**power * other * math.cos((i - j) * base ** (-step / rotated))
        for c in range(rotated, width):
            a, b = float(q[i, c]), float(k[j, c])
            total += abs(a) ** power * max(0.0, b) if magnitude == "relu_mean" else a * b
        return total

    for i in range(length):
        for j in range(i + 1):
            assert float(found[i, j]) == pytest.approx(score(i, j), rel=1e-9, abs=1e-9)
