"""The coordinate check: changes of outputs that do not grow with the width with `use_mup`, and grow without it."""

from typing import Any

import pytest
import torch

from megatron_coca.config import Config, ConfigError, load_config
from megatron_coca.training.coordinate_check import KINDS, at_width, check_coordinates, exponent

KEYS: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16}
KEYS |= {"vocab_size": 64, "pos_emb": "coca", "optimizer.params.lr": 2e-3, "init_method_std": 0.07}
KEYS |= {"output_layer_init_method": "normal", "make_vocab_size_divisible_by": 1}
WIDTHS = (32, 64, 128, 256)
CASES: dict[str, dict[str, Any]] = {
    "CoCA": {},
    "RoFormer, untied": {"pos_emb": "rotary", "no_weight_tying": True},
    "ALiBi, Lion": {"pos_emb": "alibi", "optimizer.type": "lion", "optimizer.params.lr": 1e-3},
    "Muon": {"optimizer.type": "Muon", "engine": "native", "optimizer.params.lr": 1e-2},
    "experts": {"moe_num_experts": 4, "moe_top_k": 2, "activation": "swiglu", "moe_intermediate_size": 48},
    "latents": {"pos_emb": "rotary", "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8},
    "forgetting gates": {"pos_emb": "none", "forgetting_gate": "fox", "attention_output_gate": "head"},
}
STILL, GROWING = 0.25, 0.4
"""Largest exponent of the width with `use_mup`, and smallest without it, of changes after three steps. With an infinite
width they would be 0, and about 1.
"""


def configured(**keys: Any) -> Config:
    return load_config([], KEYS | keys)


@pytest.mark.parametrize("keys", CASES.values(), ids=CASES)
def test_changes_by_width(keys: dict[str, Any]) -> None:
    """In float64. Scores and logits begin with sums of independent numbers, so their first changes may also fall."""
    widths = WIDTHS[:3] if keys.get("optimizer.type") == "Muon" else WIDTHS  # whose products take long on a CPU
    found = check_coordinates(configured(**keys), widths, 3, torch.float64)
    for kind in KINDS:
        exponents = []
        for mup in (True, False):
            points = [(each.width, each.change) for each in found if (each.mup, each.kind, each.step) == (mup, kind, 3)]
            assert [width for width, _ in points] == list(widths)
            exponents.append(exponent(points))
        falls = 0.7 if kind in ("scores", "logits") else STILL
        assert -falls < exponents[0] < STILL, kind
        if kind != "embedding":
            assert exponents[1] > exponents[0] + GROWING, kind
    first = [each.change for each in found if each.step == 0]
    assert len(first) == 2 * len(widths) * len(KINDS) and not any(first)


def test_first_scores_of_coca_have_one_size_at_every_width() -> None:
    """docs/proofs.md: their mean is not 0. Those of RoFormer fall with the root of the width."""
    for method, expected in (("coca", 0.0), ("rotary", -0.5)):
        found = check_coordinates(configured(pos_emb=method), WIDTHS, 1, torch.float64)
        points = [(each.width, each.size) for each in found if (each.mup, each.kind, each.step) == (True, "scores", 0)]
        assert exponent(points) == pytest.approx(expected, abs=0.12), method


def test_widths_change_together() -> None:
    config = configured(intermediate_size=96, num_kv_heads=2, mup_base_hidden_size=16, use_mup=True, mup_init_scale=2.0)
    wide, standard = (at_width(config, 64, mup, 32) for mup in (True, False))
    for model in (wide.model, standard.model):
        assert (model.hidden_size, model.intermediate_size, model.num_attention_heads, model.num_kv_heads) == (
            64,
            192,
            4,
            2,
        )
    assert (wide.model.width_ratio, wide.model.mup_init_scale) == (4.0, 2.0)
    assert (standard.model.use_mup, standard.model.mup_init_scale, standard.model.softmax_scale) == (False, 1.0, None)
    assert at_width(configured(vocab_size=None), 64, True, 32).model.mup_base_hidden_size == 32
    assert at_width(configured(vocab_size=None), 64, True, 32).model.vocab_size == 256


def test_errors() -> None:
    with pytest.raises(ConfigError, match="intermediate_size: 50 at hidden_size 32 .*width 17"):
        at_width(configured(intermediate_size=50), 17, True, 16)
    with pytest.raises(ConfigError, match="num_attention_heads: 4 .*not divide hidden_size 66"):
        check_coordinates(configured(), (64, 66), 1)
    with pytest.raises(ConfigError, match="lr: not set"):
        check_coordinates(configured(**{"optimizer.params.lr": None}), WIDTHS, 1)


def test_the_exponent_of_a_power() -> None:
    assert exponent([(x, 3 * x**1.5) for x in (1, 2, 8)]) == pytest.approx(1.5)
    assert exponent([(1, 1.0)]) != exponent([(1, 1.0)]), "NaN: one point has no exponent"
    assert exponent([(1, 1.0), (2, 0.0)]) != 0
