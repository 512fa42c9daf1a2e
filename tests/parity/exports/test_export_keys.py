"""Every key of the network and its positions has its effect in an export, or an error names the key."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_coca import build_model, load_config, load_model
from megatron_coca.checkpoints.exporting import export, export_neox
from megatron_coca.checkpoints.files import CheckpointError
from megatron_coca.checkpoints.unsupported import WITHOUT_EFFECT
from megatron_coca.config import KEYS, Config
from tests.checkpoint_files import write_checkpoint
from tests.parity.exported import modules_cache

pytestmark = pytest.mark.usefixtures("modules_cache")
__all__ = ["modules_cache"]

BASE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 16,
    "vocab_size": 48,
    "pos_emb": "rotary",
    "init_method_std": 0.3,
    "output_layer_init_method": "normal",
}
LLAMA = BASE | {"norm": "rmsnorm", "activation": "swiglu", "use_bias_in_attn_linear": False, "use_bias_in_mlp": False}
OTHER: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_kv_heads": 2,
    "kv_channels": 12,
    "kv_lora_rank": 12,
    "q_lora_rank": 10,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 6,
    "v_head_dim": 5,
    "latent_norm_epsilon": 0.5,
    "intermediate_size": 96,
    "mlp_multiple_of": 40,
    "expansion_factor": 2.0,
    "seq_length": 24,
    "max_position_embeddings": 40,
    "opt_pos_emb_offset": 2,
    "vocab_size": 50,
    "make_vocab_size_divisible_by": 7,
    "no_weight_tying": True,
    "attention_config": ["flash", "global"],
    "mlp_config": ["dense", "experts"],
    "moe_num_experts": 4,
    "moe_top_k": 2,
    "moe_expert_interval": 2,
    "moe_intermediate_size": 24,
    "moe_shared_intermediate_size": 16,
    "moe_shared_gate": True,
    "moe_router_type": "topk",
    "moe_router_scores": "sigmoid",
    "moe_router_bias": True,
    "moe_weights_on_input": True,
    "moe_norm_topk_prob": False,
    "moe_routed_scaling_factor": 2.0,
    "moe_correction_bias": True,
    "moe_num_groups": 4,
    "moe_top_k_groups": 2,
    "moe_group_scores": "max",
    "swiglu_limit": 2.0,
    "swiglu_alpha": 1.5,
    "gau_width": 16,
    "gau_key_width": 8,
    "activation": "relu",
    "bias_gelu_fusion": True,
    "use_bias_in_norms": False,
    "use_bias_in_attn_linear": False,
    "use_bias_in_qkv": False,
    "use_bias_in_mlp": False,
    "norm_position": "post",
    "zero_centered_norms": True,
    "qk_norm": "head",
    "qk_norm_after_rotation": True,
    "clip_qkv": 0.05,
    "residual_scale": 0.5,
    "use_bias_in_output_head": True,
    "embedding_dropout": 0.1,
    "embedding_width": 40,
    "use_output_transform": True,
    "skip_first_norm": True,
    "sinusoidal_base": 300.0,
    "attention_output_gate": "head",
    "head_shapes": {"own": {"kv_channels": 12}},
    "values_from_keys": True,
    "value_norm": True,
    "unweighted_qk_norm": True,
    "layer_scale": True,
    "use_embedding_norm": True,
    "embedding_scale": 2.0,
    "softmax_scale": 0.5,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 2.0,
    "final_logit_scale": 0.5,
    "gpt_j_residual": True,
    "gpt_j_tied": True,
    "norm": "scalenorm",
    "use_qk_layernorm": True,
    "layernorm_epsilon": 0.5,
    "rms_norm_epsilon": 0.5,
    "scalenorm_epsilon": 0.5,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "pos_emb": "alibi",
    "pos_emb_options": {},
    "rotary_pct": 0.5,
    "rotary_emb_base": 50.0,
    "rotary_frequencies": {"type": "rope_id"},
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "relative_positions": {"type": "rerope", "window": 5},
    "logit_scaling": "log_n",
    "sink_logits": True,
    "forgetting_gate": "fox",
    "attention_chunk_size": 5,
    "sliding_window_width": 4,
    "rpe_num_buckets": 8,
    "rpe_max_distance": 20,
    "alibi_slope_scale": 2.0,
    "layer_types": {"nope": {"pos_emb": "none"}},
}
"""A value other than the default for every key that can change what the model computes."""
EXPERTS = [name for name in OTHER if name == "mlp_config" or name.startswith(("moe_", "swiglu_"))]
"""Keys of mixtures of experts. An error may name `moe_num_experts`, without which they have no effect."""
LATENT = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "latent_norm_epsilon")
"""Keys of latent attention. An error may name `kv_lora_rank`, without which they have no effect."""
WITH: dict[str, dict[str, Any]] = {
    **{name: {"kv_lora_rank": 12} for name in LATENT},
    **{name: {"moe_num_experts": 8} for name in EXPERTS},
    # transformers' product of groups needs widths of 16 bytes
    "moe_shared_gate": {"moe_num_experts": 8, "moe_shared_intermediate_size": 16, "moe_intermediate_size": 24},
    "moe_top_k_groups": {"moe_num_experts": 8, "moe_num_groups": 4},
    "moe_group_scores": {"moe_num_experts": 8, "moe_num_groups": 4, "moe_top_k_groups": 2, "moe_top_k": 2},
    "swiglu_limit": {"activation": "clamped_swiglu", "moe_num_experts": 8},
    "swiglu_alpha": {"activation": "clamped_swiglu", "moe_num_experts": 8},
    "head_shapes": {"attention_config": [[["own", "global"], 1]], "layer_types": {"own": {}}},
    "gau_width": {"attention_config": [[["gau", "global"], 1]], "gau_key_width": 8},
    "gau_key_width": {"attention_config": [[["gau", "global"], 1]]},
    "gpt_j_tied": {"gpt_j_residual": True},
    "rms_norm_epsilon": {"norm": "rmsnorm"},
    "zero_centered_norms": {"norm": "rmsnorm"},
    "qk_norm_after_rotation": {"qk_norm": "head", "pos_emb": "rotary"},
    "unweighted_qk_norm": {"pos_emb": "rotary"},
    "sinusoidal_base": {"pos_emb": "sinusoidal"},
    "scalenorm_epsilon": {"norm": "scalenorm"},
    "rpe_num_buckets": {"pos_emb": "rpe"},
    "rpe_max_distance": {"pos_emb": "rpe", "rpe_num_buckets": 8},
    "layer_types": {"attention_config": [[["nope", "global"], 1]]},
    "max_position_embeddings": {"pos_emb": "learned"},
    "opt_pos_emb_offset": {"pos_emb": "learned", "max_position_embeddings": 40},
    "alibi_slope_scale": {"pos_emb": "alibi"},
}
"""Further keys, without which a key has no effect or is not valid."""
CHANGING = [name for name, place in KEYS.items() if place.group in ("model", "position") and name not in WITHOUT_EFFECT]


def test_every_key_has_a_value_to_try() -> None:
    assert sorted(OTHER) == sorted(CHANGING), "a key is new: give it a value above, or name it in WITHOUT_EFFECT"


def configured(base: dict[str, Any], name: str) -> Config:
    value = not base.get("use_bias_in_attn_linear", True) if name == "use_bias_in_qkv" else OTHER[name]
    return load_config([], base | WITH.get(name, {}) | {name: value})


def drawn(config: Config) -> torch.nn.Module:
    """A model whose biases and norms are not at their initial values, which would hide that they are lost."""
    model = build_model(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def check(config: Config, name: str, tmp_path: Path, write: Any, read: Any) -> None:
    model, ids = drawn(config), torch.randint(48, (2, 30), generator=torch.Generator().manual_seed(0))
    saved = write_checkpoint(tmp_path / "saved", config, model.state_dict(), tokenizer=None)
    if config.position.pos_emb == "learned":
        ids = ids[:, :16]
    refused = None
    try:
        write(saved, tmp_path / "exported")
    except CheckpointError as error:
        refused = str(error)
    assert (refused is None) == (tmp_path / "exported").exists()
    if refused is not None:
        of_group = (name in EXPERTS and "moe_num_experts" in refused) or (name in LATENT and "kv_lora_rank" in refused)
        assert name in refused or of_group
        return
    with torch.no_grad():
        torch.testing.assert_close(read(tmp_path / "exported")(ids), model(ids), rtol=1e-4, atol=2e-4)


def from_transformers(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
    return lambda ids: model(ids).logits


@pytest.mark.parametrize("name", CHANGING)
def test_hugging_face(name: str, tmp_path: Path) -> None:
    check(configured(BASE, name), name, tmp_path, export, from_transformers)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CHANGING if name != "expansion_factor"])
def test_hugging_face_llama(name: str, tmp_path: Path) -> None:
    check(configured(LLAMA, name), name, tmp_path, export, from_transformers)


@pytest.mark.parametrize("base", [BASE, LLAMA], ids=["neox", "llama"])
@pytest.mark.parametrize("name", CHANGING)
def test_gpt_neox(name: str, base: dict[str, Any], tmp_path: Path) -> None:
    check(configured(base, name), name, tmp_path, export_neox, load_model)


MUP = {"use_mup": True, "mup_base_hidden_size": 8, "mup_output_temp": 0.5, "mup_embedding_mult": 3.0}
MUP |= {"mup_attn_temp": 0.25, "mup_init_scale": 1.5}


@pytest.mark.parametrize("keys", [LLAMA, BASE, LLAMA | {"pos_emb": "coca"}], ids=["llama", "neox", "coca"])
def test_the_factors_of_mup_are_exported(keys: dict[str, Any], tmp_path: Path) -> None:
    """As keys of the exported configuration. GPT-NeoX's layout has none for them."""
    for tied in (False, True):
        config = load_config([], keys | MUP | {"no_weight_tying": not tied})
        check(config, "", tmp_path / str(tied), export, from_transformers)
        assert (tmp_path / str(tied) / "exported").exists()
        check(config, "use_mup", tmp_path / f"neox {tied}", export_neox, load_model)
        assert not (tmp_path / f"neox {tied}" / "exported").exists()


SINKS, SHARED = {"nope": {"pos_emb": "none", "sink_logits": True}}, {"nope": {"pos_emb": "rpe"}}
GATES = {"nope": {"pos_emb": "none", "forgetting_gate": "fox"}}


@pytest.mark.parametrize(
    ("write", "types", "message"),
    [
        (export_neox, {"nope": {"pos_emb": "none"}}, r"layer_types: layers differ \(global, nope\)"),
        *((export, types, "layer_types: layers of type nope have weights") for types in (SINKS, SHARED, GATES)),
    ],
)
def test_layers_that_differ_are_errors(write: Any, types: dict[str, Any], message: str, tmp_path: Path) -> None:
    """A model with every fourth layer without positions was once written as a stock GPT-NeoX."""
    config = load_config(
        [],
        BASE
        | {"num_layers": 4, "attention_config": [[["global", "global", "global", "nope"], 1]]}
        | {"layer_types": types},
    )
    saved = write_checkpoint(tmp_path / "saved", config, tokenizer=None)
    with pytest.raises(CheckpointError, match=message):
        write(saved, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()
