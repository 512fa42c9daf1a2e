"""Models for which GPT-NeoX with the plugin and this package must give the same logits: keys, and length of the input.

The training length is 32 (tests/neox/inside/models.py), so most inputs are longer.
"""

from typing import Any

SCALINGS: dict[str, dict[str, Any]] = {
    **{name: {"factor": 4.0} for name in ("linear", "ntk", "ntk_fixed", "ntk_mixed", "yarn", "llama3")},
    "dynamic": {"factor": 2.0},
    "dynamic_max": {"target_length": 96},
    "dynamic_yarn": {},
    "longrope": {"factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [1.0 + i / 2 for i in range(8)]},
}
MAPS: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("rerope", "leaky_rerope", "self_extend", "lm_infinite")},
    "inv_leaky_rerope": {"target_length": 96},
}
GROUPED = {"num_kv_heads": 2}
LLAMA: dict[str, Any] = {
    **{"norm": "rmsnorm", "activation": "swiglu", "intermediate_size": 192},
    **{"gpt_j_residual": True, "use_bias_in_attn_linear": False},
}


def _cases() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {name: {"pos_emb": name} for name in ("coca", "coca_strict", "pope", "xpos")}
    found |= {
        "pope dynamic": {"pos_emb": "pope", "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        "pope grouped": {"pos_emb": "pope", "pos_emb_options": {"offset": "uniform"}} | GROUPED,
        "polar pairs": {"pos_emb": "polar", "pos_emb_options": {"frequencies": "pair", "offset": "none"}},
        "coca_strict angle": {"pos_emb": "coca_strict", "pos_emb_options": {"initial_angle": -0.7}},
    }
    for method in ("coca", "rotary"):
        found |= {
            f"{method} {name}": {"pos_emb": method, "rope_scaling": {"rope_type": name} | options}
            for name, options in SCALINGS.items()
        }
        found |= {
            f"{method} {name}": {"pos_emb": method, "relative_positions": {"type": name} | options}
            for name, options in MAPS.items()
        }
    found["coca_strict streaming"] = {
        "pos_emb": "coca_strict",
        "relative_positions": {"type": "streaming", "window": 20},
    }
    for method in ("coca", "rotary", "none", "learned"):
        found |= {f"{method} {name}": {"pos_emb": method, "logit_scaling": name} for name in ("log_n", "log_n_trained")}
    found["grouped"] = GROUPED
    found["partial"] = {"rotary_pct": 0.5, "rotary_emb_base": 500000}
    found["rotary, grouped, partial, dynamic"] = found["rotary dynamic"] | GROUPED | {"rotary_pct": 0.5}
    found["LLaMA's layers"] = LLAMA
    return found


CASES = {name: {"keys": keys, "length": 80} for name, keys in _cases().items()}
CASES["rotary"] = {"keys": {"pos_emb": "rotary"}, "length": 32}
"""GPT-NeoX's own attention, up to the length that it goes to."""

DIVIDED = (
    "coca",
    "coca_strict",
    "pope grouped",
    "xpos",
    "rotary",
    "coca dynamic",
    "rotary yarn",
    "coca rerope",
    "grouped",
    "partial",
)
"""Those that are run on two tensor ranks too."""
