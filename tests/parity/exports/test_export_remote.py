"""Exports with a modelling file: logits of transformers equal ours for every position method, and weights are equal
when read back.
"""

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from megatron_coca import methods
from megatron_coca.checkpoints import CheckpointError, load_model, open_checkpoint
from megatron_coca.checkpoints.exporting import export
from megatron_coca.checkpoints.huggingface.write import MODELLING_FILE
from megatron_coca.checkpoints.importing import import_checkpoint
from megatron_coca.config.model import Activation, Norm
from tests.parity.exported import (
    DENSE,
    GROUPED,
    LLAMA,
    NEOX,
    TRAINED,
    modules_cache,
    names_in_the_file,
    random_checkpoint,
    remote,
    tokens,
)

pytestmark = pytest.mark.usefixtures("modules_cache")
__all__ = ["modules_cache"]

UNTRAINED = dict.fromkeys(
    ("make_vocab_size_divisible_by", "intermediate_size", "attention_config", "mlp_config", "moe_expert_interval")
)
"""What a folder says in another way: rows of the vocabulary, the inner width, and the type of every layer and MLP."""
SHAPES = {"neox": NEOX, "grouped llama": GROUPED}
EXPORTED = {
    name
    for name in methods.names("pos_emb", compute=None)
    if methods.find("pos_emb", name).huggingface in ("stock", "file")
}
_FIRST = ("alibi", "kerple_log", "kerple_power", "rpe", "learned", "sinusoidal", "none", "sandwich")
PLAIN = (*_FIRST, *sorted(EXPORTED - {*_FIRST, *methods.names("pos_emb", rotary=True)}))
"""Methods without rotation. The order of the first ones chooses their shapes."""
LONGROPE = {"factor": 4.0, "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]}
EXTENSIONS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "ntk": {"factor": 4.0},
    "ntk_fixed": {"factor": 4.0},
    "ntk_mixed": {"factor": 4.0, "b": 0.7},
    "dynamic": {"factor": 4.0},
    "dynamic_max": {"target_length": 64},
    "yarn": {"factor": 4.0, "ramp": "rotations", "beta_fast": 8.0},
    "dynamic_yarn": {"truncate": False, "beta_fast": 4.0},
    "longrope": LONGROPE,
    "llama3": {"factor": 8.0},
    "proportional": {"proportion": 0.5, "factor": 2.0},
    "clex": {"max_factor": 4},
}
MAPS: dict[str, dict[str, Any]] = {
    "rerope": {},
    "leaky_rerope": {"leak": 4.0},
    "inv_leaky_rerope": {"target_length": 64},
    "self_extend": {"group_size": 3},
    "string": {"window": 9, "local": 3},
    "dual_chunk": {"chunk_size": 5, "max_position": 8},
    "lm_infinite": {"window": 12, "sinks": 3},
    "streaming": {"window": 12},
}
KERPLE = {"pos_emb": "kerple_log"}
OTHERS: dict[str, dict[str, Any]] = {
    "rotary, partial, log n": LLAMA | {"rotary_pct": 0.5, "logit_scaling": "log_n"},
    "rotary, log n": NEOX | {"logit_scaling": "log_n"},
    "coca, temperature": NEOX | {"pos_emb": "coca", "logit_scaling": {"type": "temperature", "period": 5}},
    "rotary, resonance": LLAMA | {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0, "resonance": True}},
    "alibi, log n": LLAMA | {"pos_emb": "alibi", "logit_scaling": "log_n"},
    "coca, trained log n, partial": NEOX | {"pos_emb": "coca", "logit_scaling": "log_n_trained"},
    "coca, tied, biases": GROUPED
    | {"pos_emb": "coca", "no_weight_tying": False, "use_bias_in_attn_linear": True, "use_bias_in_mlp": True},
    "coca, another base, trained at less": LLAMA
    | {
        "pos_emb": "coca",
        "rotary_emb_base": 500.5,
        "rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16},
    },
    "coca, yarn, rerope, log n": LLAMA
    | {
        "pos_emb": "coca",
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
        "relative_positions": {"type": "rerope"},
        "logit_scaling": "log_n",
    },
    "kerple beyond its bounds": LLAMA | {"pos_emb": "kerple_power", "num_attention_heads": 8},
    "coca, chunks": NEOX | {"pos_emb": "coca", "attention_chunk_size": 7},
    "coca, a window": LLAMA | {"pos_emb": "coca", "sliding_window_width": 5},
    "coca, gemma 3's layers": LLAMA
    | {"pos_emb": "coca", "attention_config": [[["local", "local", "global"], 1]], "num_layers": 3}
    | {"layer_types": {"local": {"sliding_window_width": 6, "rotary_emb_base": 500.0}}}
    | {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    "coca, biases by layer, and maps": LLAMA
    | {"pos_emb": "coca", "attention_config": [[["biased", "global"], "all"]], "layer_types": {"biased": KERPLE}}
    | {"relative_positions": {"type": "rerope"}},
    "pope": NEOX | {"pos_emb": "pope"},
    "pope, partial, uniform, dynamic": GROUPED
    | {"pos_emb": "pope", "pos_emb_options": {"offset": "uniform"}, "rotary_pct": 0.5}
    | {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    "polar, pairs, rerope": LLAMA
    | {"pos_emb": "polar", "pos_emb_options": {"frequencies": "pair", "power": 2, "offset": "none"}}
    | {"relative_positions": {"type": "rerope"}},
    "coca_strict, an angle": LLAMA | {"pos_emb": "coca_strict", "pos_emb_options": {"initial_angle": -0.7}},
    "coca_strict, random angles": GROUPED | {"pos_emb": "coca_strict", "pos_emb_options": {"initial_angle": "random"}},
    "rotary, rope_id, partial": LLAMA | {"rotary_pct": 0.5, "rotary_frequencies": {"type": "rope_id"}},
    "coca, rope_id, ntk, log n": NEOX
    | {"pos_emb": "coca", "rotary_frequencies": {"type": "rope_id", "turns": 1.5, "period": 3.0}}
    | {"rope_scaling": {"rope_type": "ntk", "factor": 4.0}, "logit_scaling": "log_n"},
    "alibi, six heads": NEOX | {"pos_emb": "alibi", "num_attention_heads": 6, "hidden_size": 48},
}


BLOCKS: dict[str, dict[str, Any]] = {
    "rmsnorm, grouped, parallel, partial, tied head": DENSE | {"rotary_pct": 0.5, "no_weight_tying": False},
    "layernorm, grouped, sequential": {"num_kv_heads": 1, "layernorm_epsilon": 1e-3, "hidden_dropout": 0.1},
    "layernorm without bias, geglu, parallel": {"use_bias_in_norms": False, "activation": "geglu"}
    | {"gpt_j_residual": True, "use_bias_in_attn_linear": False},
    "layernorm, geglu_tanh": {"num_kv_heads": 1, "activation": "geglu_tanh"},
    "rmsnorm, tanh gelu, no biases": LLAMA | {"activation": "gelu", "bias_gelu_fusion": True},
    "scalenorm, mish, rotary": {"norm": "scalenorm", "activation": "mish", "scalenorm_epsilon": 1e-3}
    | {"pos_emb": "rotary", "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "non-parametric, softsign, one norm": {"norm": "non_parametric_layernorm", "activation": "softsign"}
    | {"gpt_j_residual": True, "gpt_j_tied": True},
    "rmsnorm, relu, one norm, learned": {"norm": "rmsnorm", "activation": "relu", "gpt_j_residual": True}
    | {"gpt_j_tied": True, "pos_emb": "learned", "max_position_embeddings": 4 * TRAINED},
    "rmsnorm, silu, clex": {"norm": "rmsnorm", "activation": "silu"}
    | {"rope_scaling": {"rope_type": "clex", "max_factor": 4}},
    "rmsnorm, swish, no MLP bias": {"norm": "rmsnorm", "activation": "swish", "use_bias_in_mlp": False},
    "layernorm, swiglu, rerope": {"activation": "swiglu", "relative_positions": {"type": "rerope"}},
    "layernorm, reglu, odd width, kerple": {"activation": "reglu", "intermediate_size": 99, "pos_emb": "kerple_log"},
    "rmsnorm, glu, parallel, rpe": GROUPED | {"activation": "glu", "gpt_j_residual": True, "pos_emb": "rpe"},
    "rmsnorm, bilinear": LLAMA | {"activation": "bilinear"},
    "qwen3's": LLAMA | {"qk_norm": "head", "kv_channels": 24, "num_kv_heads": 2},
    "qwen2's, kerple": LLAMA | {"use_bias_in_qkv": True, "pos_emb": "kerple_log"},
    "norms of projections, zero-centred": GROUPED | LLAMA | {"qk_norm": "projection", "zero_centered_norms": True},
    "gpt-neox's norm of queries and keys": {"use_qk_layernorm": True, "relative_positions": {"type": "rerope"}},
    "scalenorm, norm of queries and keys": {"norm": "scalenorm", "use_qk_layernorm": True},
    "rmsnorm, norm of queries and keys": {"norm": "rmsnorm", "use_qk_layernorm": True},
    "gemma 2's": GROUPED
    | LLAMA
    | {"norm_position": "sandwich", "zero_centered_norms": True, "embedding_scale": 5.0, "softmax_scale": 0.2}
    | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},
    "a cap, rerope": {"attn_logit_softcapping": 2.0, "relative_positions": {"type": "rerope"}},
    "a gate of heads, biases, yarn": {"num_kv_heads": 1, "attention_output_gate": "head", "kv_channels": 24}
    | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "a gate of features, rerope": LLAMA
    | {"attention_output_gate": "feature", "relative_positions": {"type": "rerope"}},
    "olmo 2's, alibi": LLAMA | {"norm_position": "post", "qk_norm": "projection", "pos_emb": "alibi"},
    "cohere 2's": {"gpt_j_residual": True, "gpt_j_tied": True, "final_logit_scale": 0.2, "use_bias_in_norms": False},
    "nanochat's": {"norm": "non_parametric_rmsnorm", "activation": "relu_squared", "qk_norm": "head"},
    "apertus's": GROUPED | LLAMA | {"activation": "xielu", "qk_norm": "head"},
    "granite's, clipped, a head with a bias": {"residual_scale": 0.3, "clip_qkv": 0.05, "no_weight_tying": True}
    | {"use_bias_in_output_head": True},
    "opt 350M's": {"norm_position": "residual", "embedding_width": 24, "activation": "relu"},
    "ctrl's": {"pos_emb": "sinusoidal", "use_bias_in_output_head": True, "embedding_scale": 5.0},
    "modernbert's": {"use_output_transform": True, "skip_first_norm": True, "use_embedding_norm": True}
    | {"use_bias_in_output_head": True, "activation": "geglu"},
    "phi's norms": {"qk_norm": "layernorm"},
    "stablelm's norms": GROUPED | {"qk_norm": "layernorm_by_head", "zero_centered_norms": True, "norm": "layernorm"},
    "norms after rotation": {"qk_norm": "head", "qk_norm_after_rotation": True, "pos_emb": "rotary"}
    | {"norm": "rmsnorm", "rope_scaling": {"rope_type": "dynamic_yarn"}},
    "a norm of the embedding": {"use_embedding_norm": True, "num_kv_heads": 1, "attn_logit_softcapping": 4.0},
    "mixtral's experts": GROUPED | {"moe_num_experts": 4, "moe_top_k": 2, "moe_norm_topk_prob": True},
    "deepseek 3's experts": LLAMA
    | {"mlp_config": [[["dense", "experts", "experts"], 1]], "num_layers": 3, "moe_num_experts": 8, "moe_top_k": 3}
    | {"moe_num_groups": 4, "moe_top_k_groups": 2, "moe_router_scores": "sigmoid", "moe_correction_bias": True}
    | {"moe_routed_scaling_factor": 2.5, "moe_shared_intermediate_size": 24, "moe_intermediate_size": 20}
    | {"moe_norm_topk_prob": True},
    "deepseek 2's groups, in every second layer": {"moe_num_experts": 8, "moe_num_groups": 4, "moe_top_k_groups": 2}
    | {"moe_group_scores": "max", "moe_top_k": 2, "moe_expert_interval": 2, "num_layers": 4},
    "qwen 2's experts, biases, rerope": {"moe_num_experts": 4, "moe_top_k": 2, "moe_shared_intermediate_size": 24}
    | {"moe_shared_gate": True, "activation": "geglu", "relative_positions": {"type": "rerope"}},
    "gpt-oss's experts": {"activation": "clamped_swiglu", "moe_num_experts": 4, "moe_top_k": 2, "swiglu_limit": 0.5}
    | {"swiglu_alpha": 1.1, "moe_router_bias": True, "moe_norm_topk_prob": True, "norm": "rmsnorm"}
    | {"mlp_config": [[["dense", "experts"], 1]]},
    "llama 4's experts": {"moe_num_experts": 3, "moe_weights_on_input": True, "moe_router_scores": "sigmoid"}
    | {"moe_shared_intermediate_size": 24, "moe_intermediate_size": 20},
    "llama 4's layers": {"attention_config": [[["chunked", "global"], "all"]], "pos_emb": "none", "num_layers": 4}
    | {"norm": "rmsnorm", "layer_types": {"chunked": {"attention_chunk_size": 9, "pos_emb": "coca_strict"}}},
}
"""Of `coca_dense`; CoCA where nothing is said."""


FORMS = ("coca", "coca_strict", "xpos")
MAPPED = ("coca", "coca_strict", "rotary")


def cases() -> dict[str, dict[str, Any]]:
    """Pairs: each extension and each map with one form, each form with one shape, CoCA with both.

    test_modelling_file.py compares the source of each formula.
    """
    found = {f"coca, {name}": shape | {"pos_emb": "coca"} for name, shape in SHAPES.items()}
    for number, form in enumerate((*FORMS[1:], *PLAIN)):
        name = tuple(SHAPES)[number % 2]
        more = {"max_position_embeddings": 4 * TRAINED} if form == "learned" else {}
        full = {} if form in FORMS else {"rotary_pct": 1.0}
        found[f"{form}, {name}"] = SHAPES[name] | {"pos_emb": form} | full | more
    for number, (name, options) in enumerate(EXTENSIONS.items()):
        form = "coca" if name == "clex" else FORMS[number % 3]
        found[f"{form}, {name}"] = GROUPED | {"pos_emb": form, "rope_scaling": {"rope_type": name} | options}
    for number, (name, options) in enumerate(MAPS.items()):
        form = "coca" if name == "rerope" else "rotary" if name == "streaming" else MAPPED[number % 3]
        found[f"{form}, {name}"] = GROUPED | {"pos_emb": form, "relative_positions": {"type": name} | options}
    return found | OTHERS | {f"dense, {name}": {"pos_emb": "coca"} | keys for name, keys in BLOCKS.items()}


CASES = cases()


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_logits_and_weights(name: str, tmp_path: Path) -> None:
    """A short input after a long one, as if it were the first; then the weights that are read back."""
    checkpoint = random_checkpoint(tmp_path / "run", **CASES[name])
    theirs, ours = remote(checkpoint, tmp_path / "exported"), load_model(checkpoint)
    assert theirs.config.model_type == "coca_dense"
    assert ("model.layers.*.self_attn.g_proj" in theirs.tp_plan) == ("attention_output_gate" in CASES[name])
    for attention in ("sdpa", "eager"):
        theirs.set_attn_implementation(attention)
        for length in (3 * TRAINED, TRAINED // 2):
            logits = theirs(tokens(length)).logits
            assert logits.std() > 0.05 and logits.shape[-1] == 512
            torch.testing.assert_close(logits, ours(tokens(length)), rtol=1e-5, atol=1e-5)
    opened = [open_checkpoint(place) for place in (checkpoint, tmp_path / "exported")]
    before, after = (dict(each.weights()) for each in opened)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[weight], before[weight]) for weight in before)
    again = opened[1].load().model
    shapes = [each.trained.model.model_copy(update=UNTRAINED) for each in opened]
    assert opened[0].trained.model.layer_names == opened[1].trained.model.layer_names
    assert opened[0].trained.model.mlp_names == opened[1].trained.model.mlp_names
    assert not name.startswith("dense") or shapes[0] == shapes[1]
    torch.testing.assert_close(again(tokens(3 * TRAINED)), ours(tokens(3 * TRAINED)), rtol=0, atol=1e-6)


def test_every_choice_is_covered(tmp_path: Path) -> None:
    """The modelling file's tables have no row that no case above uses, nor a case that they lack."""
    tables = names_in_the_file(tmp_path)
    declared = {key: set(rows) for key, rows in tables["CHOICES"].items()}
    assert declared == {key: set(rows) for key, rows in methods.TABLES.items()}
    assert {keys.get("pos_emb") for keys in CASES.values()} >= EXPORTED
    assert declared["rope_scaling"] == {*EXTENSIONS, "default"}, "add a case to EXTENSIONS"
    assert declared["relative_positions"] == set(MAPS), "add a case to MAPS"
    used = {key: {keys.get(key, "") for keys in BLOCKS.values()} for key in ("norm", "activation")}
    assert set(tables["NORMS"]) - {"layernorm"} <= used["norm"] and set(tables["NORMS"]) == set(get_args(Norm))
    activations = tables["UNGATED"] | tables["GATED"] | tables["LEARNED"]
    assert set(activations) <= used["activation"] and set(activations) == set(get_args(Activation))


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        *(("coca", "bfloat16"), ("coca", "float16"), ("kerple_log", "bfloat16"), ("rpe", "float16")),
        *(("alibi", "bfloat16"), ("coca, a window", "bfloat16"), ("coca, gemma 3's layers", "float16")),
        ("dense, mixtral's experts", "bfloat16"),
    ],
)
def test_half_precision(form: str, dtype: str, tmp_path: Path) -> None:
    """As close to float32 as ours is in that dtype; nothing of positions is rounded with the weights."""
    checkpoint = random_checkpoint(tmp_path / "run", **CASES.get(form, LLAMA | {"pos_emb": form}))
    theirs = remote(checkpoint, tmp_path / "exported", dtype=getattr(torch, dtype))
    opened = open_checkpoint(checkpoint)
    exact, ours = opened.load().model, opened.load(dtype=getattr(torch, dtype)).model
    batch = tokens(4 * TRAINED)
    with torch.no_grad():
        error = [(model.float() - exact(batch)).abs().mean() for model in (theirs(batch).logits, ours(batch))]
    assert error[0] < 1.2 * error[1] + 1e-4
    assert theirs.dtype == getattr(torch, dtype)


def test_exported_weights_are_read_by_their_dtype(tmp_path: Path) -> None:
    checkpoint = random_checkpoint(tmp_path / "run", **CASES["coca, clex"])
    folder = export(checkpoint, tmp_path / "exported", dtype="bfloat16").folder
    theirs = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = open_checkpoint(folder).load().model(tokens(3 * TRAINED))
        torch.testing.assert_close(theirs(tokens(3 * TRAINED)).logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        *("coca, neox", "coca, clex", "coca, tied, biases", "dense, scalenorm, mish, rotary"),
        *("dense, rmsnorm, grouped, parallel, partial, tied head", "dense, deepseek 3's experts"),
    ],
)
def test_save_pretrained_loads_again(name: str, tmp_path: Path) -> None:
    """By transformers and by us; the modelling file goes with it."""
    theirs = remote(random_checkpoint(tmp_path / "run", **CASES[name]), tmp_path / "exported")
    theirs.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / MODELLING_FILE).is_file()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", trust_remote_code=True).eval()
    with torch.no_grad():
        assert torch.equal(again(tokens(50)).logits, theirs(tokens(50)).logits)
        ours = load_model(tmp_path / "saved")(tokens(50))
    torch.testing.assert_close(ours, theirs(tokens(50)).logits, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", ["dense, deepseek 3's experts", "coca, clex"])
def test_what_no_gradient_trains_is_not_trainable(name: str, tmp_path: Path) -> None:
    """With several processes, a trainable parameter without a gradient is an error in the second step."""
    checkpoint = random_checkpoint(tmp_path / "run", **CASES[name])
    theirs = remote(checkpoint, tmp_path / "exported")
    before = {key: value.clone() for key, value in theirs.state_dict().items()}
    names = [key for key in before if "correction_bias" in key or "clex" in key]
    assert names and not {*names} & {key for key, _ in theirs.named_parameters()}
    folder = export(checkpoint, tmp_path / "half", dtype="bfloat16").folder
    half = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.bfloat16)
    exact = [key for key in names if "correction_bias" in key]
    assert all(torch.equal(half.state_dict()[key], before[key]) for key in exact)


def test_missing_weights_of_experts_are_drawn(tmp_path: Path) -> None:
    """Biases are 0, not what the memory holds."""
    keys = CASES["dense, deepseek 3's experts"] | {"moe_router_bias": True, "use_bias_in_mlp": True}
    folder = export(random_checkpoint(tmp_path / "run", **keys), tmp_path / "exported").folder
    weights = load_file(folder / "model.safetensors")
    kept = {name: value for name, value in weights.items() if ".mlp." not in name or not name.endswith("bias")}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    missing = weights.keys() - kept.keys()
    assert len(missing) > 10 and not any(theirs.state_dict()[name].any() for name in missing)


STRANGE: dict[str, tuple[dict[str, Any], str, str]] = {
    "a type": ({"mlps": ["dense", "expert", "experts"]}, "network.mlps: expected a list", "mlps 'expert' is not"),
    "too few": ({"mlps": ["dense", "experts"]}, "for each of 3 layers", "2 entries for 3 layers"),
    "too many": ({"mlps": ["dense", *["experts"] * 3]}, "for each of 3 layers", "4 entries for 3 layers"),
    "scores": ({"moe_router_scores": "SIGMOID"}, "moe_router_scores", "moe_router_scores 'SIGMOID' is not supported"),
    "groups": ({"moe_group_scores": "best"}, "moe_group_scores", "moe_group_scores 'best' is not supported"),
}


@pytest.mark.parametrize("name", STRANGE)
def test_strange_mixtures_are_errors(name: str, tmp_path: Path) -> None:
    changed, ours, theirs = STRANGE[name]
    folder = export(
        random_checkpoint(tmp_path / "run", **CASES["dense, deepseek 3's experts"]), tmp_path / "out"
    ).folder
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"network": config["network"] | changed}))
    with pytest.raises(CheckpointError, match=ours):
        load_model(folder)
    with pytest.raises(ValueError, match=theirs):
        AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)


@pytest.mark.parametrize("section", ["network", "position"])
def test_keys_of_a_newer_version_are_errors(section: str, tmp_path: Path) -> None:
    folder = export(random_checkpoint(tmp_path / "run", **CASES["coca, neox"]), tmp_path / "out").folder
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {section: config[section] | {"turns": 2}}))
    with pytest.raises(CheckpointError, match=rf"{section}\.turns: not known; update megatron_coca"):
        load_model(folder)


@pytest.mark.parametrize("name", ["coca, neox", "rpe, grouped llama"])
def test_without_the_head(name: str, tmp_path: Path) -> None:
    theirs = remote(random_checkpoint(tmp_path / "run", **CASES[name]), tmp_path / "exported")
    bare, told = AutoModel.from_pretrained(tmp_path / "exported", trust_remote_code=True, output_loading_info=True)
    assert not told["missing_keys"]
    with torch.no_grad():
        hidden = bare.eval()(tokens(40)).last_hidden_state
        assert torch.equal(theirs.get_output_embeddings()(hidden), theirs(tokens(40)).logits)


@pytest.mark.parametrize(
    "name",
    [
        *("coca, neox", "kerple_power, neox", "rpe, grouped llama", "coca, clex", "dense, scalenorm, mish, rotary"),
        "dense, deepseek 3's experts",
    ],
)
def test_a_fresh_model_is_drawn(name: str, tmp_path: Path) -> None:
    folder = export(random_checkpoint(tmp_path / "run", **CASES[name]), tmp_path / "exported").folder
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    fresh = AutoModelForCausalLM.from_config(config, trust_remote_code=True).eval()
    with torch.no_grad():
        assert fresh(tokens(40)).logits.isfinite().all()
    drawn = [weight for weight_name, weight in fresh.named_parameters() if "position" in weight_name]
    assert all(0 < weight.std() < 2 for weight in drawn) and (drawn or "coca" in name or "dense" in name)


@pytest.mark.parametrize("name", ["coca, clex", "rpe, grouped llama", "coca, rerope", "dense, rmsnorm, bilinear"])
def test_an_exported_folder_is_exported_again(name: str, tmp_path: Path) -> None:
    once = export(random_checkpoint(tmp_path / "run", **CASES[name]), tmp_path / "once").folder
    again = export(once, tmp_path / "again").folder
    for file in once.iterdir():
        same = (again / file.name).read_bytes() == file.read_bytes()
        assert same or file.name == "README.md", file.name


@pytest.mark.parametrize(
    "block",
    [*list(BLOCKS)[:3], "non-parametric, softsign, one norm", "scalenorm, mish, rotary", "rmsnorm, swish, no MLP bias"],
)
def test_a_dense_folder_is_imported_and_exported_bit_by_bit(block: str, tmp_path: Path) -> None:
    checkpoint = random_checkpoint(tmp_path / "run", **{"pos_emb": "coca"} | BLOCKS[block])
    once = export(checkpoint, tmp_path / "once").folder
    imported = import_checkpoint(once, tmp_path / "imported").folder
    before, after = (dict(open_checkpoint(place).weights()) for place in (checkpoint, imported))
    assert before.keys() == after.keys() and all(torch.equal(after[name], before[name]) for name in before)
    again = export(imported, tmp_path / "again").folder
    for file in ("config.json", "model.safetensors"):
        assert (again / file).read_bytes() == (once / file).read_bytes()


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (None, "`network` is missing for this coca_dense"),
        ({"norm": "batchnorm"}, "batchnorm"),
        ({"activation": "tanh"}, "tanh"),
    ],
)
def test_what_a_dense_network_has_to_say(network: Any, message: str, tmp_path: Path) -> None:
    folder = export(random_checkpoint(tmp_path / "run", **DENSE), tmp_path / "exported").folder
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    config.network = network and config.network | network
    with pytest.raises((ValueError, KeyError), match=message):
        AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    content = json.loads((folder / "config.json").read_text())
    content["network"] = network and content["network"] | network
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(
        CheckpointError, match="'network' is missing" if network is None else "network.* is not supported"
    ):
        load_model(folder)


def test_stock_stays_stock(tmp_path: Path) -> None:
    done = export(random_checkpoint(tmp_path / "run", **LLAMA), tmp_path / "exported")
    assert not done.remote and not (done.folder / MODELLING_FILE).exists()
    assert "auto_map" not in json.loads((done.folder / "config.json").read_text())


def test_an_extension_chosen_when_it_is_loaded(tmp_path: Path) -> None:
    """The lines of the model card."""
    checkpoint = random_checkpoint(tmp_path / "run", **CASES["coca, neox"])
    folder = export(checkpoint, tmp_path / "exported").folder
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    config.position["rope_scaling"] = {"rope_type": "dynamic", "factor": 4.0}
    theirs = AutoModelForCausalLM.from_pretrained(folder, config=config, trust_remote_code=True).eval()
    ours = load_model(checkpoint, {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}})
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens(99)).logits, ours(tokens(99)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("rope_scaling", {"rope_type": "dynamik", "factor": 4.0}, "rope_type 'dynamik' is not supported.*default, "),
        ("rope_scaling", {"rope_type": "linear"}, "factor is missing"),
        ("rope_scaling", {"rope_type": "clex"}, "clex_frequencies is missing"),
        ("pos_emb", "cope", "pos_emb 'cope' is not supported"),
        ("relative_positions", {"type": "rerope"}, "window is missing"),
    ],
)
def test_errors_of_the_modelling_file(key: str, value: Any, message: str, tmp_path: Path) -> None:
    folder = export(random_checkpoint(tmp_path / "run", **CASES["coca, neox"]), tmp_path / "exported").folder
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    config.position[key] = value
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_config(config, trust_remote_code=True)(tokens(5))


def test_stock_scaling_is_an_error_and_no_code_without_trust(tmp_path: Path) -> None:
    folder = export(random_checkpoint(tmp_path / "run", **CASES["coca, neox"]), tmp_path / "exported").folder
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    config.rope_parameters = config.rope_parameters | {"rope_type": "linear", "factor": 4.0}
    with pytest.raises(ValueError, match=r"set config.position\['rope_scaling'\]"):
        AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    config.position = None
    with pytest.raises(ValueError, match="`position` is missing for this"):
        AutoModelForCausalLM.from_config(config, trust_remote_code=True)


LENGTHS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0},
    "clex": {"rope_type": "clex", "max_factor": 4},
}


LOG_N = GROUPED | {"pos_emb": "coca", "logit_scaling": "log_n"}
REROPE = LLAMA | {"pos_emb": "coca", "relative_positions": {"type": "rerope"}}


@torch.no_grad()
@pytest.mark.parametrize(
    ("keys", "name"),
    [(LOG_N, "clex"), (LOG_N, "dynamic"), (REROPE, "linear"), (REROPE, "yarn"), *((LLAMA, name) for name in LENGTHS)],
    ids=str,
)
def test_two_lengths_are_written_apart(keys: dict[str, Any], name: str, tmp_path: Path) -> None:
    """Trained at 32 tokens with an extension from 8: logits are those of transformers, and both lengths come back."""
    scaling = LENGTHS[name] | {"original_max_position_embeddings": 8}
    checkpoint = random_checkpoint(tmp_path / "run", **keys, rope_scaling=scaling)
    done = export(checkpoint, tmp_path / "exported")
    settings = {"trust_remote_code": done.remote, "attn_implementation": "eager"}
    ours, back = load_model(checkpoint), load_model(done.folder)
    for length in (3 * TRAINED, TRAINED // 2):
        # Loaded anew, because stock dynamic scaling keeps the frequencies of the longest input.
        theirs = AutoModelForCausalLM.from_pretrained(done.folder, **settings).eval()
        logits = theirs(tokens(length)).logits
        torch.testing.assert_close(logits, ours(tokens(length)), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(back(tokens(length)), ours(tokens(length)), rtol=0, atol=1e-6)
    assert open_checkpoint(done.folder).trained.model.seq_length == TRAINED
    assert done.remote or "| training length | 32 tokens |" in (done.folder / "README.md").read_text()
    if done.remote or name in ("linear", "yarn"):
        assert theirs.config.max_position_embeddings == TRAINED
