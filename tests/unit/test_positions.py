"""Slopes, frequencies and tables against known values, in the precision that long contexts need."""

import math

import pytest
import torch

from megatron_coca.attention.positions.bias import AlibiBias, alibi_slopes
from megatron_coca.attention.positions.frequencies import EXTENSIONS, LENGTH_DEPENDENT, Rotary
from megatron_coca.attention.rotary import rotary_tables, rotate
from megatron_coca.config import load_config
from megatron_coca.model import build_model

KNOWN_SLOPES = {
    8: [2.0**-h for h in range(1, 9)],
    16: [2.0 ** (-h / 2) for h in range(1, 17)],
    12: [2.0**-h for h in range(1, 9)] + [2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5],
}


@pytest.mark.parametrize("heads", KNOWN_SLOPES)
def test_alibi_slopes(heads: int) -> None:
    assert alibi_slopes(heads) == pytest.approx(KNOWN_SLOPES[heads], rel=1e-15)


def test_alibi_bias_keeps_every_distance_at_32k_apart() -> None:
    distance = torch.arange(32768 - 512, 32768, dtype=torch.float32)
    bias = AlibiBias(alibi_slopes(8)).at(distance)
    assert bias.shape == (8, 512) and bias.dtype == torch.float32
    assert all(len(row.unique()) == 512 for row in bias)
    assert torch.equal(bias[0], -0.5 * distance)


def test_dynamic_ntk_at_64_times_the_training_length() -> None:
    rotary = Rotary(64, 10000.0, "dynamic", 4.0, training_length=512)
    theta = rotary.inverse_frequencies(32768)
    alpha = 4 * 32768 / 512 - 3
    assert alpha == 253
    base = float(theta[1]) ** (-64 / 2)
    assert base == pytest.approx(3.02e6, rel=1e-2) and base == pytest.approx(10000 * 253 ** (64 / 62), rel=1e-9)
    assert float(theta[0]) == 1.0
    assert float(theta[-1]) == pytest.approx(10000 ** (-62 / 64) / 253, rel=1e-12)


def test_dynamic_ntk_is_plain_up_to_the_training_length() -> None:
    rotary, plain = Rotary(32, 1e4, "dynamic", 4.0, 512), Rotary(32, 1e4)
    for length in (1, 511, 512):
        assert torch.equal(rotary.inverse_frequencies(length), plain.inverse_frequencies(length))
    assert (rotary.inverse_frequencies(513)[1:] < plain.inverse_frequencies(513)[1:]).all()


def test_ntk_keeps_the_fastest_and_divides_the_slowest_frequency() -> None:
    plain = Rotary(64).inverse_frequencies(1)
    ntk = Rotary(64, rope_type="ntk", factor=4.0).inverse_frequencies(1)
    assert float(ntk[0]) == 1.0
    assert float(plain[-1] / ntk[-1]) == pytest.approx(4.0, rel=1e-12)
    assert (ntk.diff() < 0).all()


def test_linear_divides_every_frequency() -> None:
    plain = Rotary(64).inverse_frequencies(1)
    assert torch.equal(Rotary(64, rope_type="linear", factor=8.0).inverse_frequencies(9), plain / 8)


@pytest.mark.parametrize("rope_type", EXTENSIONS)
def test_a_rotary_dimension_of_two_has_one_finite_frequency(rope_type: str) -> None:
    theta = Rotary(2, 1e4, rope_type, 4.0, 16).inverse_frequencies(64)
    assert theta.tolist() == [0.25 if rope_type == "linear" else 1.0]


@pytest.mark.parametrize("rope_type", EXTENSIONS)
def test_length_dependence_is_declared(rope_type: str) -> None:
    rotary = Rotary(16, 1e4, rope_type, 2.0, 64)
    assert rotary.inverse_frequencies(64).dtype == torch.float64
    differs = not torch.equal(rotary.inverse_frequencies(64), rotary.inverse_frequencies(256))
    assert differs == rotary.depends_on_length == (rope_type in LENGTH_DEPENDENT)


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
    tables = model.method.tables(torch.arange(32768), 32768, torch.bfloat16)
    phase = torch.arange(32768, dtype=torch.float64)
    assert float((tables.cos[:, 0].double() - phase.cos()).abs().max()) < 1e-7
    assert not list(model.buffers()), "a buffer could be cast"


@pytest.mark.parametrize("rope_type", sorted(EXTENSIONS.keys() - {"default"}))
@pytest.mark.parametrize("pos_emb", ["rotary", "coca", "coca_strict"])
@torch.no_grad()
def test_a_short_input_is_the_same_after_a_long_one(pos_emb: str, rope_type: str) -> None:
    model = tiny(pos_emb=pos_emb, rope_scaling={"rope_type": rope_type, "factor": 4.0})
    short, long = torch.arange(12)[None], torch.arange(64)[None]
    before = model(short)
    beyond = model(long)
    assert torch.equal(model(short), before)
    assert torch.equal(model(long), beyond)


def test_imported_models_extend_from_the_length_of_their_weights() -> None:
    scaling = {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 64}
    rotary = tiny(pos_emb="rotary", rope_scaling=scaling).method.rotary
    assert rotary.training_length == 64
    assert torch.equal(rotary.inverse_frequencies(64), Rotary(16).inverse_frequencies(64))
