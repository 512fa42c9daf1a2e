"""Extensions against hand-computed values, their definitions and Hugging Face's functions."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_coca import methods
from megatron_coca.attention.positions.frequencies import (
    EXTENSIONS,
    FREQUENCIES,
    MULTIPLIERS,
    Rotary,
    Scaling,
    geometric,
)


def complete(rope_type: str, dim: int, factor: float = 4.0) -> Scaling:
    """A scaling that fits rotary dimension `dim` and any training length up to 128."""
    short = tuple(1 + j / 2 for j in range(dim // 2))
    long = tuple(2 * x for x in short)
    return chosen(rope_type, factor=factor, target_length=128, short_factor=short, long_factor=long, proportion=0.5)


def chosen(rope_type: str, **options: Any) -> Scaling:
    """The extension with those of the options that it has."""
    own = {option.name for option in methods.find("rope_scaling", rope_type).options}
    return Scaling(rope_type, **{name: value for name, value in options.items() if name in own})


def rotary(rope_type: str, dim: int = 64, length: int = 512, **scaling: object) -> Rotary:
    return Rotary(dim, 10000.0, length, Scaling(rope_type, **scaling))


def test_the_tables_agree() -> None:
    declared = methods.names("rope_scaling", compute=None)
    assert EXTENSIONS.keys() == set(declared) - {"clex"} and MULTIPLIERS.keys() <= EXTENSIONS.keys()
    assert FREQUENCIES.keys() == set(methods.names("rotary_frequencies", compute=None))
    with_attention = {name for name in declared if methods.find("rope_scaling", name).option("attention_factor")}
    assert with_attention == MULTIPLIERS.keys(), "an option that replaces the multiplier"


@pytest.mark.parametrize("rope_type", methods.names("rope_scaling"))
def test_an_extension_takes_its_own_options_alone(rope_type: str) -> None:
    options = methods.find("rope_scaling", rope_type).options
    scaling = complete(rope_type, 32)
    assert [getattr(scaling, option.name) for option in options] == list(scaling.options.values())
    assert scaling == complete(rope_type, 32) and hash(scaling) == hash(complete(rope_type, 32))
    assert (scaling == complete(rope_type, 32, 5.0)) == ("factor" not in scaling.options)
    with pytest.raises(AttributeError, match="window"):
        scaling.window  # noqa: B018


def test_dynamic_ntk_at_64_times_the_training_length() -> None:
    theta = rotary("dynamic", factor=4.0).inverse_frequencies(32768)
    alpha = 4 * 32768 / 512 - 3
    assert alpha == 253
    base = float(theta[1]) ** (-64 / 2)
    assert base == pytest.approx(3.02e6, rel=1e-2) and base == pytest.approx(10000 * 253 ** (64 / 62), rel=1e-9)
    assert float(theta[0]) == 1.0
    assert float(theta[-1]) == pytest.approx(10000 ** (-62 / 64) / 253, rel=1e-12)


@pytest.mark.parametrize("rope_type", ["dynamic", "dynamic_yarn"])
def test_dynamic_extensions_are_plain_up_to_the_training_length(rope_type: str) -> None:
    extended, plain = Rotary(32, 1e4, 512, chosen(rope_type, factor=4.0)), geometric(32, 1e4)
    for length in (1, 511, 512):
        torch.testing.assert_close(extended.inverse_frequencies(length), plain, rtol=1e-15, atol=0)
        assert extended.multiplier(length) == 1.0
    beyond = extended.inverse_frequencies(2048)
    assert (beyond <= plain).all() and beyond[-1] < plain[-1] / 2


def test_ntk_keeps_the_fastest_and_divides_the_slowest_frequency() -> None:
    plain, ntk = geometric(64, 1e4), rotary("ntk", factor=4.0).inverse_frequencies(1)
    assert float(ntk[0]) == 1.0
    assert float(plain[-1] / ntk[-1]) == pytest.approx(4.0, rel=1e-12)
    assert (ntk.diff() < 0).all()


def test_linear_divides_every_frequency() -> None:
    assert torch.equal(rotary("linear", factor=8.0).inverse_frequencies(9), geometric(64, 1e4) / 8)


def test_ntk_fixed_spreads_the_factor_over_all_frequencies() -> None:
    ratio = geometric(64, 1e4) / rotary("ntk_fixed", factor=12.0).inverse_frequencies(1)
    expected = [12 ** (2 * (j + 1) / 64) for j in range(32)]
    assert ratio.tolist() == pytest.approx(expected, rel=1e-13) and expected[-1] == pytest.approx(12)


@pytest.mark.parametrize("b", [0.625, 0.75])
def test_ntk_mixed_follows_its_two_equations(b: float) -> None:
    ratio = geometric(64, 1e4) / rotary("ntk_mixed", factor=12.0, b=b).inverse_frequencies(1)
    a = math.log(12) / 32**b
    assert ratio.tolist() == pytest.approx([math.exp(a * (j + 1) ** b) for j in range(32)], rel=1e-13)


def test_dynamic_max_serves_every_input_with_the_frequencies_of_its_target() -> None:
    extended = rotary("dynamic_max", target_length=4096)
    target = extended.inverse_frequencies(4096)
    alpha = 4 * 4096 / 512 - 3  # s = 4096 / (2 * 512)
    assert float(geometric(64, 1e4)[-1] / target[-1]) == pytest.approx(alpha, rel=1e-12)
    assert torch.equal(extended.inverse_frequencies(1), target)
    assert extended.inverse_frequencies(8192)[-1] < target[-1]


@pytest.mark.parametrize(("dim", "length", "first", "last"), [(64, 512, 3, 16), (128, 2048, 16, 41)])
def test_yarn_ramps_over_these_dimensions(dim: int, length: int, first: int, last: int) -> None:
    ratio = geometric(dim, 1e4) / rotary("yarn", dim, length, factor=4.0).inverse_frequencies(1)
    assert ratio[: first + 1].tolist() == pytest.approx([1.0] * (first + 1), rel=1e-14)
    assert ratio[last:].tolist() == pytest.approx([4.0] * (dim // 2 - last), rel=1e-14)
    assert (ratio[first : last + 1].diff() > 0).all()


def test_yarn_ramps_linearly_in_rotations_where_asked() -> None:
    theta, extended = geometric(64, 1e4), rotary("yarn", factor=8.0, ramp="rotations").inverse_frequencies(1)
    for j, plain in enumerate(theta.tolist()):
        gamma = min(max((512 * plain / (2 * math.pi) - 1) / 31, 0.0), 1.0)
        assert float(extended[j]) == pytest.approx((1 - gamma) * plain / 8 + gamma * plain, rel=1e-13)


def test_dynamic_yarn_takes_its_factor_from_the_length() -> None:
    dynamic, fixed = rotary("dynamic_yarn"), rotary("yarn", factor=6.0)
    assert torch.equal(dynamic.inverse_frequencies(3072), fixed.inverse_frequencies(3072))
    assert dynamic.multiplier(3072) == fixed.multiplier(1) == pytest.approx(0.1 * math.log(6) + 1)


TURNS = 16 / (2 * math.pi)
RAMPED_AT_TWO = {"llama3": (1 - (TURNS - 1) / 3) / 4 + (TURNS - 1) / 3}
DIVIDED_BY_FOUR = {"linear", "ntk_fixed", "ntk_mixed", "longrope", "proportional"}


@pytest.mark.parametrize("rope_type", EXTENSIONS)
def test_a_rotary_dimension_of_two_has_one_frequency_which_a_new_base_keeps(rope_type: str) -> None:
    scaling = chosen(rope_type, factor=4.0, target_length=128, short_factor=(2.0,), long_factor=(4.0,), proportion=1.0)
    theta = Rotary(2, 1e4, 16, scaling).inverse_frequencies(64)
    expected = RAMPED_AT_TWO.get(rope_type, 0.25 if rope_type in DIVIDED_BY_FOUR else 1.0)
    assert theta.tolist() == pytest.approx([expected], rel=1e-15), "correct, or add to the two tables above"


@pytest.mark.parametrize("rope_type", EXTENSIONS)
def test_length_dependence_is_declared(rope_type: str) -> None:
    extended = Rotary(16, 1e4, 64, complete(rope_type, 16, 2.0))
    assert extended.inverse_frequencies(64).dtype == torch.float64
    differs = not torch.equal(extended.inverse_frequencies(64), extended.inverse_frequencies(256))
    assert differs == extended.depends_on_length == methods.find("rope_scaling", rope_type).length_dependent


HUGGING_FACE = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 8.0},
    "yarn betas": {"factor": 16.0, "beta_fast": 24.0, "beta_slow": 2.0, "truncate": False},
    "yarn attention": {"factor": 8.0, "attention_factor": 1.5},
    "longrope": {
        "factor": 4.0,
        "short_factor": [1 + j / 50 for j in range(16)],
        "long_factor": [1 + j for j in range(16)],
    },
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "llama3 other": {"factor": 32.0, "low_freq_factor": 2.0, "high_freq_factor": 8.0},
}


def hugging_face(rope_type: str, numbers: dict, base: float, trained: int, length: int) -> tuple[Tensor, float]:
    parameters = {"rope_type": rope_type, "rope_theta": base, "original_max_position_embeddings": trained} | numbers
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=2, max_position_embeddings=trained, rope_parameters=parameters
    )
    return ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), seq_len=length)


@pytest.mark.parametrize("length", [100, 1024, 5000])
@pytest.mark.parametrize(("base", "trained"), [(1e4, 512), (5e5, 2048)])
@pytest.mark.parametrize("case", HUGGING_FACE)
def test_frequencies_and_multiplier_are_those_of_hugging_face(
    case: str, base: float, trained: int, length: int
) -> None:
    rope_type, numbers = case.split()[0], HUGGING_FACE[case]
    theirs, attention_factor = hugging_face(rope_type, numbers, base, trained, length)
    ours = Rotary(
        32, base, trained, Scaling(rope_type, **{k: tuple(v) if isinstance(v, list) else v for k, v in numbers.items()})
    )
    torch.testing.assert_close(ours.inverse_frequencies(length), theirs.double(), rtol=1e-6, atol=0)
    assert ours.multiplier(length) == pytest.approx(attention_factor, rel=1e-12)


def test_multipliers() -> None:
    assert rotary("default").multiplier(9) == rotary("ntk", factor=8.0).multiplier(9) == 1.0
    assert rotary("yarn", factor=0.5).multiplier(9) == 1.0
    growing = tuple(range(1, 33))
    longrope = rotary("longrope", factor=8.0, short_factor=growing, long_factor=growing)
    assert longrope.multiplier(9) == longrope.multiplier(9999) == pytest.approx(math.sqrt(1 + 3 / 9))  # 2^3 of 2^9


ROPE_ID = methods.find("rotary_frequencies", "rope_id")


def in_distribution(length: int, dim: int = 32, scaling: Scaling | None = None, **options: float) -> Rotary:
    fastest, base = FREQUENCIES["rope_id"](dim, ROPE_ID.resolved(options, length), length)
    return Rotary(dim, base, length, scaling or Scaling(), fastest)


@pytest.mark.parametrize(
    ("length", "options", "longest", "shortest"),
    [
        (4096, {}, 2048, 32),  # the paper's numbers
        (8192, {}, 4096, 32),
        (2048, {}, 1024, 16),
        (64, {}, 32, 2 * math.pi),
        (64, {"turns": 1.0, "period": 4.0}, 64, 4),
    ],
)
def test_every_pair_of_rope_id_rotates_within_the_training_length(
    length: int, options: dict[str, float], longest: float, shortest: float
) -> None:
    wavelengths = 2 * math.pi / in_distribution(length, **options).inverse_frequencies(1)
    assert wavelengths[[0, -1]].tolist() == pytest.approx([shortest, longest], rel=1e-12)
    ratios = wavelengths[1:] / wavelengths[:-1]
    torch.testing.assert_close(ratios, torch.full_like(ratios, (longest / shortest) ** (1 / 15)), rtol=1e-12, atol=0)


def test_a_single_pair_of_rope_id_has_the_fastest_frequency() -> None:
    assert in_distribution(4096, dim=2).inverse_frequencies(1).tolist() == pytest.approx([2 * math.pi / 32])


def test_ntk_keeps_the_fastest_pair_of_rope_id_and_divides_the_slowest() -> None:
    plain, ntk = (
        in_distribution(4096, scaling=scaling).inverse_frequencies(1)
        for scaling in (Scaling(), Scaling("ntk", factor=4.0))
    )
    assert (plain / ntk)[[0, -1]].tolist() == pytest.approx([1.0, 4.0], rel=1e-12)
