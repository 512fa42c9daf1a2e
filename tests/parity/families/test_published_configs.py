"""Configurations of published models: every folder is described without an error, as transformers describes it.

The sizes and keys are facts about the models, written by hand. Keys without an effect are those that the authors
published.
"""

from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from megatron_coca.checkpoints.compare import comparable
from megatron_coca.checkpoints.huggingface.config_json import parse_config
from megatron_coca.checkpoints.huggingface.wrappers import find_network
from megatron_coca.config import Config


def sizes(vocabulary: int, hidden: int, mlp: int, layers: int, heads: int, keys: int, length: int) -> dict[str, Any]:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return dict(zip(names, (vocabulary, hidden, mlp, layers, heads), strict=True)) | {
        "num_key_value_heads": keys,
        "max_position_embeddings": length,
    }


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
OLMO3 = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "beta_fast": 32.0}
OLMO3 |= {"beta_slow": 1.0, "attention_factor": 1.2079441541679836}
MINISTRAL3 = {"rope_type": "yarn", "type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384}
MINISTRAL3 |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 1e6}
MINISTRAL3 |= {"llama_4_scaling_beta": 0.1}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0] * 24 + [60.0] * 24}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}
STATIC = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None, "dequantize": False}

PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 2 7B": (
        "llama",
        sizes(32000, 4096, 11008, 32, 32, 32, 4096)
        | {"rms_norm_eps": 1e-5, "pretraining_tp": 1, "rope_scaling": None, "_name_or_path": "meta-llama"},
    ),
    "Llama 3.1 8B": (
        "llama",
        sizes(128256, 4096, 14336, 32, 32, 8, 131072)
        | {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "rope_scaling": LLAMA3, "mlp_bias": False},
    ),
    "SmolLM2 135M": (
        "llama",
        sizes(49152, 576, 1536, 30, 9, 3, 8192)
        | {"rms_norm_eps": 1e-5, "rope_theta": 1e5, "tie_word_embeddings": True, "is_llama_config": True}
        | {"rope_interleaved": False, "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}},
    ),
    "Mistral 7B": ("mistral", sizes(32000, 4096, 14336, 32, 32, 8, 32768) | {"rms_norm_eps": 1e-5}),
    "Mistral Nemo": (
        "mistral",
        sizes(131072, 5120, 14336, 40, 32, 8, 131072)
        | {"rms_norm_eps": 1e-5, "head_dim": 128, "rope_theta": 1e6, "sliding_window": None},
    ),
    "Qwen 2.5 7B": (
        "qwen2",
        sizes(152064, 3584, 18944, 28, 28, 4, 131072)
        | {"rope_theta": 1e6, "use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28}
        | {"use_mrope": False},
    ),
    "Qwen 3 0.6B": (
        "qwen3",
        sizes(151936, 1024, 3072, 28, 16, 8, 40960)
        | {"head_dim": 128, "rope_theta": 1000000, "tie_word_embeddings": True, "sliding_window": None}
        | {"use_sliding_window": False, "max_window_layers": 28, "attention_bias": False},
    ),
    "Qwen 3 8B FP8": (
        "qwen3",
        sizes(151936, 4096, 12288, 36, 32, 8, 40960)
        | {"head_dim": 128, "rope_theta": 1000000, "quantization_config": FP8},
    ),
    "Gemma 2 9B": (
        "gemma2",
        sizes(256000, 3584, 14336, 42, 16, 8, 8192)
        | {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096, "sliding_window_size": 4096}
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "cache_implementation": "hybrid"}
        | {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "rope_theta": 10000.0},
    ),
    "Gemma 3 1B": (
        "gemma3_text",
        sizes(262144, 1152, 6912, 26, 4, 1, 32768)
        | {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 512, "sliding_window_pattern": 6}
        | {
            "rope_theta": 1000000,
            "rope_local_base_freq": 10000,
            "rope_scaling": None,
            "cache_implementation": "hybrid",
        },
    ),
    "SmolLM3 3B": (
        "smollm3",
        sizes(128256, 2048, 11008, 36, 16, 4, 65536)
        | {"rope_theta": 5e6, "no_rope_layers": [1, 1, 1, 0] * 9, "no_rope_layer_interval": 4}
        | {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 28, "pretraining_tp": 2},
    ),
    "OLMo 2 7B": ("olmo2", sizes(100352, 4096, 11008, 32, 32, 32, 4096) | {"rope_theta": 500000, "rms_norm_eps": 1e-6}),
    "OLMo 3 7B": (
        "olmo3",
        sizes(100278, 4096, 11008, 32, 32, 32, 65536)
        | {"rope_theta": 500000, "rms_norm_eps": 1e-6, "sliding_window": 4096, "rope_scaling": OLMO3}
        | {"layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8},
    ),
    "Phi 3.5 mini": (
        "phi3",
        sizes(32064, 3072, 8192, 32, 32, 32, 131072)
        | {"rope_scaling": LONGROPE, "original_max_position_embeddings": 4096, "sliding_window": 262144}
        | {"rms_norm_eps": 1e-5, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "attention_bias": False},
    ),
    "Command R7B": (
        "cohere2",
        sizes(256000, 4096, 14336, 32, 32, 8, 8192)
        | {"logit_scale": 0.25, "sliding_window": 4096, "sliding_window_pattern": 4, "rope_theta": 50000}
        | {"head_dim": 128, "layer_norm_eps": 1e-5, "layer_switch": 4, "use_parallel_block": True, "rotary_pct": 1.0}
        | {"use_gated_activation": True, "use_qk_norm": False, "use_embedding_sharing": True}
        | {"order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj"}
        | {"use_parallel_embedding": True, "_sliding_window_pattern": 4},
    ),
    "Pythia 410M": (
        "gpt_neox",
        {name: value for name, value in sizes(50304, 1024, 4096, 24, 16, 16, 2048).items() if "key" not in name}
        | {"rotary_pct": 0.25, "rotary_emb_base": 10000, "use_parallel_residual": True, "layer_norm_eps": 1e-5},
    ),
    "GPT-2": (
        "gpt2",
        {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "n_ctx": 1024, "vocab_size": 50257}
        | {"activation_function": "gelu_new", "summary_type": "cls_index", "summary_use_proj": True}
        | {"task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}},
    ),
    "MPT 7B": (
        "mpt",
        {"d_model": 4096, "n_layers": 32, "n_heads": 32, "max_seq_len": 2048, "vocab_size": 50432, "no_bias": True}
        | {"attn_config": {"alibi": True, "alibi_bias_max": 8, "attn_impl": "torch", "clip_qkv": None, "qk_ln": False}}
        | {"expansion_ratio": 4, "norm_type": "low_precision_layernorm", "learned_pos_emb": True, "verbose": 0},
    ),
    "BLOOM 560M": (
        "bloom",
        {"n_embed": 1024, "n_layer": 24, "num_attention_heads": 16, "vocab_size": 250880, "seq_length": 2048}
        | {"offset_alibi": 100, "bias_dropout_fusion": True, "masked_softmax_fusion": True, "unk_token_id": 0},
    ),
    "Falcon 7B": (
        "falcon",
        {"hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71, "vocab_size": 65024, "alibi": False}
        | {"multi_query": True, "parallel_attn": True, "bias": False, "new_decoder_architecture": False},
    ),
    "Gemma 3 4B": (
        "gemma3",
        {"text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240}}
        | {"vision_config": {"model_type": "siglip_vision_model"}, "mm_tokens_per_image": 256},
    ),
    "LLaVA 1.5 7B": (
        "llava",
        {"image_token_index": 32000, "tie_word_embeddings": False, "vision_feature_layer": -2}
        | {"vision_config": {"model_type": "clip_vision_model"}},
    ),
    "Mistral Small 3.1": (
        "mistral3",
        {"spatial_merge_size": 2, "multimodal_projector_bias": False, "tie_word_embeddings": False}
        | {"vision_config": {"model_type": "pixtral"}},
    ),
    "Ministral 3 3B": (
        "mistral3",
        {"tie_word_embeddings": True, "quantization_config": STATIC, "vision_config": {"model_type": "pixtral"}},
    ),
    "Qwen 2.5 VL 7B": (
        "qwen2_5_vl",
        sizes(152064, 3584, 18944, 28, 28, 4, 128000)
        | {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False, "vision_token_id": 151654}
        | {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "use_sliding_window": False}
        | {"sliding_window": 32768, "max_window_layers": 28, "image_token_id": 151655, "vision_config": {}},
    ),
    "Qwen 3 VL 4B": ("qwen3_vl", {"tie_word_embeddings": True, "image_token_id": 151655, "vision_config": {}}),
    "Llama 3.2 11B Vision": ("mllama", {"image_token_index": 128256, "vision_config": {}}),
}
"""Name -> `model_type`, and the other keys of config.json."""
TEXTS: dict[str, dict[str, Any]] = {
    "Gemma 3 4B": {"num_hidden_layers": 34, "sliding_window": 1024}
    | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "LLaVA 1.5 7B": {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "vocab_size": 32064},
    "Mistral Small 3.1": {"model_type": "mistral", "head_dim": 128, "sliding_window": None, "rope_theta": 1e9}
    | sizes(131072, 5120, 32768, 40, 32, 8, 131072)
    | {"rms_norm_eps": 1e-5},
    "Ministral 3 3B": {
        "model_type": "ministral3",
        "head_dim": 128,
        "rope_parameters": MINISTRAL3,
        "sliding_window": None,
    }
    | sizes(131072, 3072, 9216, 26, 32, 8, 262144),
    "Qwen 3 VL 4B": {"model_type": "qwen3_vl_text", "head_dim": 128, "rope_theta": 5000000, "attention_bias": False}
    | sizes(151936, 2560, 9728, 36, 32, 8, 262144)
    | {"rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}},
    "Llama 3.2 11B Vision": {"model_type": "mllama_text_model", "cross_attention_layers": [*range(3, 40, 5)]}
    | sizes(128256, 4096, 14336, 40, 32, 8, 131072)
    | {"rope_theta": 5e5, "rope_scaling": LLAMA3, "rms_norm_eps": 1e-5, "tie_word_embeddings": False},
}
"""The section `text_config` of the models that also read images."""

SHAPES = {
    "Gemma 3 4B": (34, 2560, 8, 4, 256, 262208, 131072),
    "LLaVA 1.5 7B": (32, 4096, 32, 32, 128, 32064, 4096),
    "Llama 3.2 11B Vision": (32, 4096, 32, 8, 128, 128256, 131072),
    "Falcon 7B": (32, 4544, 71, 1, 64, 65024, 2048),
    "GPT-2": (12, 768, 12, 12, 64, 50257, 1024),
    "MPT 7B": (32, 4096, 32, 32, 128, 50432, 2048),
    "BLOOM 560M": (24, 1024, 16, 16, 64, 250880, 2048),
    "Qwen 2.5 VL 7B": (28, 3584, 28, 4, 128, 152064, 128000),
    "Ministral 3 3B": (26, 3072, 32, 8, 128, 131072, 262144),
}
"""Layers, width, query heads, key heads, head width, rows of the embedding and length, if not all are in the file."""


def described(values: dict[str, Any]) -> Config:
    network = find_network(values, Path("config.json"))
    return parse_config(network.settings, Path("config.json"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_describes_its_model(name: str) -> None:
    kind, keys = PUBLISHED[name]
    keys = keys | ({"text_config": keys.get("text_config", {}) | TEXTS[name]} if name in TEXTS else {})
    common = {"architectures": ["X"], "torch_dtype": "bfloat16", "transformers_version": "4.50.0", "use_cache": True}
    found = described({"model_type": kind} | common | keys)
    model = found.model
    text = keys.get("text_config", keys)
    shape = (model.num_layers, model.hidden_size, model.num_attention_heads, model.num_kv_heads, model.head_dim)
    expected = SHAPES.get(name) or (text["num_hidden_layers"], text["hidden_size"])
    assert (*shape, model.padded_vocab_size, model.seq_length)[: len(expected)] == expected
    rewritten = CONFIG_MAPPING[kind](**keys).to_dict()
    assert comparable(described(rewritten)) == comparable(found), "as transformers 5 writes the same configuration"
