"""Whole attention layers of every map, extension, norm, temperature and sink against the float64 oracle. Those of
gpt-oss and Llama 4 are compared with transformers.
"""

import pytest
import torch

from tests.parity.layer_oracle import layer_of, oracle_error
from tests.parity.stock_layers import gpt_oss, llama4
from tools.bench_methods import METHODS

LENGTH = 300  # beyond the window and the chunk
ALLOWED = {"clex": 1e-5} | dict.fromkeys(("kerple_log", "kerple_power", "rpe", "fire"), 1e-7)
"""The frequencies of CLEX solve an equation; a step of 0.1 changes them by 1e-8 and phases by more. Learned biases are
computed in float32."""


@pytest.mark.parametrize("name", METHODS)
def test_a_layer_is_that_of_the_oracle(name: str) -> None:
    assert oracle_error(METHODS[name], LENGTH, torch.float64) < ALLOWED.get(name, 1e-12)


COMPOSED = {
    "coca, norms of heads": {"pos_emb": "coca", "qk_norm": "head"},
    "coca, norms of projections, STRING": {
        "pos_emb": "coca",
        "qk_norm": "projection",
        "relative_positions": {"type": "string"},
    },
    "coca_strict, GPT-NeoX's norm, SSMax": {
        "pos_emb": "coca_strict",
        "use_qk_layernorm": True,
        "logit_scaling": "ssmax",
    },
    "coca, partial, SSMax with a bias": {
        "pos_emb": "coca",
        "rotary_pct": 0.5,
        "logit_scaling": {"type": "ssmax", "bias": True},
    },
    "coca, dynamic, norms, SSMax, gates": {
        "pos_emb": "coca",
        "qk_norm": "head",
        "logit_scaling": "ssmax",
        "forgetting_gate": "fox",
        "rope_scaling": {"rope_type": "dynamic", "factor": 4.0},
    },
    "coca, p-RoPE with resonance, dual chunks, a temperature, sinks": {
        "pos_emb": "coca",
        "rope_scaling": {"rope_type": "proportional", "proportion": 0.5, "resonance": True},
        "relative_positions": {"type": "dual_chunk"},
        "logit_scaling": {"type": "temperature", "period": 50, "first": 1},
        "sink_logits": True,
    },
    "sandwich, norms, a window": {"pos_emb": "sandwich", "qk_norm": "head", "sliding_window_width": 100},
    "fire, gates, SSMax": {"pos_emb": "fire", "forgetting_gate": "cable", "logit_scaling": "ssmax"},
}
"""For CoCA, the norm of keys acts on T before its coefficients are formed."""


@pytest.mark.parametrize("name", COMPOSED)
def test_a_composition_is_that_of_the_oracle(name: str) -> None:
    learned_in_float32 = 1e-7 if "fire" in name else 1e-12
    assert oracle_error(COMPOSED[name], LENGTH, torch.float64) < learned_in_float32


@torch.no_grad()
@pytest.mark.parametrize("name", sorted(METHODS.keys() - {"rotary", "gau"}))
def test_no_row_is_rotary_under_another_name(name: str) -> None:
    hidden = torch.randn(1, LENGTH, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (layer, _), (rotary, _) = (layer_of(keys, torch.float64, LENGTH // 4) for keys in (METHODS[name], {}))
    rotary.load_state_dict(layer.state_dict(), strict=False)
    torch.manual_seed(0)
    off = [layer.train(training)(hidden) - rotary(hidden) for training in (True, False)]  # some act in one only
    assert max(float(each.norm() / rotary(hidden).norm()) for each in off) > 1e-4


@pytest.mark.parametrize("rotates", [True, False])
@pytest.mark.parametrize("length", [1, 29])
def test_layers_of_llama4(length: int, rotates: bool) -> None:
    """Chunks of neighbouring pairs, which transformers rotates in float32; and its temperature, float32 too."""
    ours, theirs = llama4(length, rotates, torch.float64)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize("window", [None, 7])
def test_layers_of_gpt_oss(window: int | None) -> None:
    ours, theirs = gpt_oss(29, window, torch.float64)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
