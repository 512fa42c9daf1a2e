"""The formulas of the modelling file that exports carry against those of the package, row by row of their tables."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_coca.attention.positions.bias import LearnedKerpleLog, LearnedKerplePower
from megatron_coca.attention.positions.clex import Clex
from megatron_coca.attention.positions.distance_maps import DISTANCE_MAPS, TRAINING_ONLY, MapSettings
from megatron_coca.attention.positions.forms import LOGIT_SCALINGS, SCORE_FORMS, check_range, growth, rotary_tables
from megatron_coca.attention.positions.frequencies import EXTENSIONS, Rotary, Scaling
from tests.parity.exported import modules_cache, names_in_the_file

pytestmark = pytest.mark.usefixtures("modules_cache")
__all__ = ["modules_cache"]

TRAINED, HEADS, HEAD_DIM, BASE = 64, 2, 16, 5000.0
EXACT = {"rtol": 1e-12, "atol": 0.0}
SHORT, LONG = ([1.0 + rate * j for j in range(HEAD_DIM // 2)] for rate in (0.125, 2.0))
SCALINGS: dict[str, tuple[dict[str, Any], ...]] = {
    "default": ({},),
    "linear": ({"factor": 4.0},),
    "ntk": ({"factor": 4.0},),
    "ntk_fixed": ({"factor": 4.0},),
    "ntk_mixed": ({"factor": 4.0}, {"factor": 4.0, "b": 0.7}),
    "dynamic": ({"factor": 4.0},),
    "dynamic_max": ({"target_length": 256},),
    "yarn": (
        {"factor": 4.0},
        {"factor": 1.0},
        {"factor": 4.0, "ramp": "rotations", "beta_fast": 8.0, "beta_slow": 0.5},
        {"factor": 4.0, "beta_fast": 8.0, "truncate": False, "attention_factor": 1.3},
    ),
    "dynamic_yarn": ({}, {"beta_fast": 4.0, "truncate": False}),
    "longrope": (
        {"factor": 4.0, "short_factor": SHORT, "long_factor": LONG},
        {"factor": 1.0, "short_factor": SHORT, "long_factor": LONG},
        {"factor": 4.0, "short_factor": SHORT, "long_factor": LONG, "attention_factor": 1.3},
    ),
    "llama3": ({"factor": 8.0}, {"factor": 8.0, "low_freq_factor": 0.5, "high_freq_factor": 3.0}),
}


@pytest.fixture(scope="module")
def exported(modules_cache: Any) -> dict[str, Any]:
    return names_in_the_file()


def positions(exported: dict[str, Any], **position: Any) -> Any:
    shape = {"hidden_size": HEADS * HEAD_DIM, "num_attention_heads": HEADS, "max_position_embeddings": TRAINED}
    return exported["Positions"](exported["CocaLlamaConfig"](**shape, position={"rotary_emb_base": BASE} | position))


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_the_tables_have_the_same_rows(exported: dict[str, Any]) -> None:
    assert set(exported["FORMS"]) == set(SCORE_FORMS)
    assert set(exported["EXTENSIONS"]) == {*EXTENSIONS, "clex"} == {*SCALINGS, "clex"}
    assert set(exported["MAPS"]) == set(DISTANCE_MAPS) and exported["TRAINED_MAPS"] == TRAINING_ONLY
    assert set(exported["LOGIT_SCALINGS"]) == set(LOGIT_SCALINGS)


@pytest.mark.parametrize("rotary_pct", [1.0, 0.5])
@pytest.mark.parametrize("name", SCORE_FORMS)
def test_operands(name: str, rotary_pct: float, exported: dict[str, Any]) -> None:
    """Q', what a cache keeps, and K' of that, also on features that are not rotated."""
    form, ours = positions(exported, pos_emb=name, rotary_pct=rotary_pct).form, SCORE_FORMS[name]
    dim = int(HEAD_DIM * rotary_pct)
    q, k, factor = draw(1, HEADS, 9, HEAD_DIM), draw(1, HEADS, 9, HEAD_DIM).flip(2), 1 + draw(9, 1).abs()
    frequencies = Rotary(dim, BASE).inverse_frequencies(9)
    tables = rotary_tables(torch.arange(9) + 3, frequencies, torch.float64, factor)
    mine = exported["Tables"](*tables)
    query, kept = form.query(q[..., :dim], mine), form.kept(k[..., :dim])
    assert positions(exported, pos_emb=name, rotary_pct=rotary_pct).rotary_dim == (dim if ours.rotary else 0)
    if not ours.rotary:
        assert torch.equal(query, q[..., :dim]) and torch.equal(form.key(kept, mine), k[..., :dim])
        assert torch.equal(ours.query_operand(q, None), q) and torch.equal(ours.cached(k, 0), k)
        return
    query = torch.cat((query, form.query_rest(q[..., dim:]) * factor), dim=-1)
    torch.testing.assert_close(query, ours.query_operand(q, tables, factor), **EXACT)
    cached = ours.cached(k, dim)
    torch.testing.assert_close(torch.cat((kept, k[..., dim:]), dim=-1), cached, **EXACT)
    key = torch.cat((form.key(kept, mine), form.key_rest(k[..., dim:])), dim=-1)
    torch.testing.assert_close(key, ours.key_operand_of_cached(cached, tables, HEAD_DIM), **EXACT)


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies(name: str, exported: dict[str, Any]) -> None:
    for options in SCALINGS[name]:
        for rotary_pct, original in ((1.0, None), (1.0, 32), (0.5, 32), (0.125, None)):
            dim = int(HEAD_DIM * rotary_pct)
            lists = {key: value[: dim // 2] if isinstance(value, list) else value for key, value in options.items()}
            scaling = {"rope_type": name} | lists
            p = positions(
                exported,
                pos_emb="rotary",
                rotary_pct=rotary_pct,
                rope_scaling=scaling | {"original_max_position_embeddings": original},
            )
            ours = Rotary(dim, BASE, original or TRAINED, Scaling(**scaling))
            plain = exported["geometric"](dim, BASE, "cpu")
            for length in (1, 32, 33, TRAINED, TRAINED + 1, 200, 1000):
                theirs = p.extension(p, plain, length)
                torch.testing.assert_close(theirs.theta, ours.inverse_frequencies(length), **EXACT)
                assert theirs.multiplier == pytest.approx(ours.multiplier(length), rel=1e-12)
            assert p.by_length == ours.depends_on_length


def test_solved_frequencies_by_length(exported: dict[str, Any]) -> None:
    solved = [[float(t)] * (HEAD_DIM // 2) for t in range(1, 5)]
    p = positions(exported, pos_emb="coca", rope_scaling={"rope_type": "clex"}, clex_frequencies=solved)
    ours, plain = Clex(HEAD_DIM, BASE, TRAINED, max_factor=4), exported["geometric"](HEAD_DIM, BASE, "cpu")
    for length in (1, TRAINED, TRAINED + 1, 2 * TRAINED, 3 * TRAINED + 1, 4 * TRAINED, 9 * TRAINED):
        assert p.extension(p, plain, length).theta[0] == ours.factor_for(length)
    assert p.by_length


@pytest.mark.parametrize("name", DISTANCE_MAPS)
def test_maps(name: str, exported: dict[str, Any]) -> None:
    options = {"window": 12, "leak": 4.0, "group_size": 5, "sinks": 3, "target_length": 256}
    far = positions(exported, pos_emb="rotary", relative_positions={"type": name} | options).far
    leak = TRAINED / (2 * options["target_length"]) if name == "inv_leaky_rerope" else options["leak"]
    near, ours = DISTANCE_MAPS[name](MapSettings(window=12, leak=leak, group_size=5, sinks=3))
    where, first = torch.arange(40, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    assert near.high == far.low == ours.low == 12 and ours.high is None
    assert far.first_keys == (float("inf") if ours.first_keys is None else ours.first_keys)
    assert far.high == float("inf") and near.first_keys is None
    assert torch.equal(near.query_positions(where, first), where)
    assert torch.equal(near.key_positions(where, first), where)
    torch.testing.assert_close(far.query(where), ours.query_positions(where, first), **EXACT)
    torch.testing.assert_close(far.key(where), ours.key_positions(where, first), **EXACT)


@pytest.mark.parametrize("name", LOGIT_SCALINGS)
def test_logit_scalings(name: str, exported: dict[str, Any]) -> None:
    theirs, ours = exported["LOGIT_SCALINGS"][name], LOGIT_SCALINGS[name]
    where = torch.arange(300, dtype=torch.float64)
    assert (theirs is None) == (ours is None)
    if ours is not None:
        torch.testing.assert_close(theirs(where, TRAINED), ours(where, TRAINED), **EXACT)


def test_decay(exported: dict[str, Any]) -> None:
    """xPos: what multiplies queries and keys, and the length at which a dtype ends."""
    p, where = positions(exported, pos_emb="xpos"), torch.arange(101, dtype=torch.float64)
    query, key = p._decay(where[None], where[None], torch.float32)
    torch.testing.assert_close(query[0], growth(where, HEAD_DIM, 50.0), **EXACT)
    torch.testing.assert_close(key[0], 1 / growth(where, HEAD_DIM, 50.0), rtol=1e-10, atol=0.0)
    refused = []
    for centre in (2600.0, 2640.0, 2660.0, 3000.0):
        far = torch.tensor([[2 * centre]], dtype=torch.float64)
        for check, arguments in ((p._decay, (far, far)), (check_range, (centre,))):
            try:
                check(*arguments, torch.float16)
            except ValueError:
                refused.append((centre, check))
    assert [centre for centre, _ in refused] == [2660.0, 2660.0, 3000.0, 3000.0], "the reach is 2650"


@pytest.mark.parametrize(("power", "ours"), [(False, LearnedKerpleLog), (True, LearnedKerplePower)])
def test_kerple(power: bool, ours: Any, exported: dict[str, Any]) -> None:
    """Also where the weights have left their bounds."""
    theirs, bias = exported["KerpleBias"](4, power), ours(4)
    distance = torch.arange(50, dtype=torch.float32)
    with torch.no_grad():
        for module in (theirs, bias):
            module.bias_p.copy_(torch.tensor([0.5, -1.0, 1.9, 3.0]))
            module.bias_a.copy_(torch.tensor([0.3, 1.0, -2.0, 0.7]))
        torch.testing.assert_close(theirs(distance[None, None, None])[0, :, 0], bias.distance_bias().at(distance))
