"""Tiny models of the families in `families/`: their classes, and values that are not the defaults."""

from typing import Any

TRAINED, LONG = 40, 100
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 500.0}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}
DYNAMIC = LINEAR | {"rope_type": "dynamic"}
BASE = {"rope_type": "default", "rope_theta": 300.0}
P_ROPE = {"rope_type": "proportional", "rope_theta": 300.0, "partial_rotary_factor": 0.67, "factor": 2.0}
GPT = {"n_embd": 36, "n_layer": 3, "n_head": 6, "n_positions": LONG}
IDS = {"bos_token_id": 0, "eos_token_id": 1}
BERT_IDS = IDS | {"pad_token_id": 2}
FREE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings", "intermediate_size")

LIKE_LLAMA: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("Gemma", {"head_dim": 10, "rope_parameters": LINEAR}),
    "gemma untied, biases": ("Gemma", {"head_dim": 6, "tie_word_embeddings": False, "attention_bias": True}),
    "gemma4_text": (
        "Gemma4Text",
        {"head_dim": 6, "global_head_dim": 10, "sliding_window": 9, "num_hidden_layers": 7}
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 2, "final_logit_softcapping": 3.0}
        | {"hidden_size_per_layer_input": 0},
    ),
    "gemma4_text untied, biases, other key heads": (
        "Gemma4Text",
        {"head_dim": 10, "sliding_window": 9, "num_hidden_layers": 4, "attention_bias": True}
        | {"layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"]}
        | {"per_layer_config": {number: {"head_dim": 6, "num_key_value_heads": 6} for number in (0, 3)}}
        | {"rope_parameters": {"full_attention": YARN, "sliding_attention": P_ROPE}}
        | {"hidden_size_per_layer_input": 0, "tie_word_embeddings": False},
    ),
    "gemma4_unified_text": (
        "Gemma4UnifiedText",
        {"head_dim": 6, "global_head_dim": 6, "sliding_window": 9, "num_key_value_heads": 6}
        | {"layer_types": ["full_attention"] * 3, "attention_k_eq_v": True, "attention_bias": True}
        | {"rope_parameters": {"full_attention": P_ROPE, "sliding_attention": BASE}},
    ),
    "vaultgemma": (
        "VaultGemma",
        {"head_dim": 10, "query_pre_attn_scalar": 7, "sliding_window": 9, "rope_parameters": YARN}
        | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "stablelm": ("StableLm", {"use_qkv_bias": True, "rope_parameters": YARN | {"partial_rotary_factor": 0.67}}),
    "stablelm parallel, norms of heads": (
        "StableLm",
        {"use_parallel_residual": True, "qk_layernorm": True, "tie_word_embeddings": True}
        | {"rope_parameters": BASE | {"partial_rotary_factor": 0.67}},
    ),
    "phi": ("Phi", {"rope_parameters": DYNAMIC | {"partial_rotary_factor": 0.67}}),
    "phi norms of heads": ("Phi", {"qk_layernorm": True, "rope_parameters": BASE | {"partial_rotary_factor": 1.0}}),
    "persimmon": ("Persimmon", {"rope_parameters": YARN | {"partial_rotary_factor": 0.67}}),
    "persimmon tied, no norms of heads": (
        "Persimmon",
        {"qk_layernorm": False, "tie_word_embeddings": True, "hidden_size": 24},
    ),
    "starcoder2": ("Starcoder2", {"sliding_window": 9, "rope_parameters": YARN}),
    "starcoder2 untied, no biases": ("Starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    "cohere": ("Cohere", {"rope_parameters": LINEAR, "attention_bias": True}),
    "cohere untied, norms of heads": ("Cohere", {"use_qk_norm": True, "tie_word_embeddings": False}),
    "granite": (
        "Granite",
        {"embedding_multiplier": 12.0, "logits_scaling": 49.0, "residual_multiplier": 0.22}
        | {"attention_multiplier": 0.3, "rope_parameters": YARN},
    ),
    "granite tied, biases": ("Granite", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "granite_swa": (
        "GraniteSWA",
        {"embedding_multiplier": 12.0, "logits_scaling": 49.0, "residual_multiplier": 0.22, "sliding_window": 9}
        | {"attention_multiplier": 0.3, "num_hidden_layers": 5, "layer_rope_theta": [300.0, 300.0, 0, 300.0, 0]},
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {"embedding_multiplier": 12.0, "logits_scaling": 49.0, "residual_multiplier": 0.22, "mamba_n_heads": 3}
        | {"attention_multiplier": 0.3, "num_local_experts": 0, "layer_types": ["attention"] * 3}
        | {"shared_intermediate_size": 50, "position_embedding_type": "rope", "rope_parameters": YARN},
    ),
    "granitemoehybrid without rotation": (
        "GraniteMoeHybrid",
        {"num_local_experts": 0, "layer_types": ["full_attention"] * 3, "tie_word_embeddings": True}
        | {"mamba_n_heads": 1, "attention_bias": True, "shared_intermediate_size": 50},
    ),
    "cohere_compass_text": (
        "CohereCompassText",
        {"sliding_window": 9, "num_hidden_layers": 4, "logit_scale": 0.25, "attention_bias": True}
        | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]}
        | {"rope_parameters": {"sliding_attention": BASE | {"mrope_section": [1, 1, 1]}, "full_attention": None}},
    ),
    "cohere_compass_text untied, without windows": (
        "CohereCompassText",
        {"tie_word_embeddings": False, "rope_parameters": {"full_attention": YARN | {"mrope_section": [1, 1, 1]}}},
    ),
    "glm": ("Glm", {"head_dim": 10, "rope_parameters": LINEAR | {"partial_rotary_factor": 0.4}}),
    "glm tied, no biases": ("Glm", {"head_dim": 12, "attention_bias": False, "tie_word_embeddings": True}),
    "glm4": ("Glm4", {"head_dim": 12, "rope_parameters": YARN | {"partial_rotary_factor": 0.5}}),
    "exaone4": ("Exaone4", {"num_hidden_layers": 5, "sliding_window": 9, "rope_parameters": LLAMA3}),
    "exaone4 without windows": (
        "Exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 3, "tie_word_embeddings": True},
    ),
    "ernie4_5": ("Ernie4_5", {"head_dim": 10, "use_bias": True, "rope_parameters": BASE}),
    "ernie4_5 untied": ("Ernie4_5", {"head_dim": 6, "tie_word_embeddings": False}),
    "seed_oss": ("SeedOss", {"head_dim": 10, "mlp_bias": True, "rope_parameters": LINEAR}),
    "seed_oss other biases": ("SeedOss", {"head_dim": 6, "attention_bias": False, "attention_out_bias": True}),
    "hunyuan": ("HunYuanDenseV1", {"head_dim": 10, "rope_parameters": YARN}),
    "hunyuan with alpha": (
        "HunYuanDenseV1",
        {"head_dim": 6, "attention_bias": True, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 500.0}},
    ),
    "nemotron": ("Nemotron", {"head_dim": 10, "rope_parameters": BASE | {"partial_rotary_factor": 0.4}}),
    "nemotron tied, biases": (
        "Nemotron",
        {"head_dim": 12, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "arcee": ("Arcee", {"head_dim": 10, "mlp_bias": True, "rope_parameters": YARN}),
    "apertus": ("Apertus", {"rope_parameters": LLAMA3, "attention_bias": True}),
    "apertus, silu": ("Apertus", {"rope_parameters": BASE, "hidden_act": "silu", "tie_word_embeddings": True}),
    "helium": ("Helium", {"head_dim": 6, "attention_bias": True, "rope_parameters": LINEAR}),
    "helium tied, biases": ("Helium", {"head_dim": 6, "mlp_bias": True, "tie_word_embeddings": True}),
    "olmo": ("Olmo", {"clip_qkv": 0.3, "attention_bias": True, "rope_parameters": DYNAMIC}),
    "olmo tied": ("Olmo", {"tie_word_embeddings": True}),
    "ministral": (
        "Ministral",
        {"head_dim": 10, "sliding_window": 9, "rope_parameters": YARN}
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ),
    "nanochat": ("NanoChat", {"final_logit_softcapping": 3.0, "rope_parameters": YARN}),
    "nanochat tied, biases": ("NanoChat", {"attention_bias": True, "tie_word_embeddings": True}),
    "hyperclovax": (
        "HyperCLOVAX",
        {"head_dim": 10, "embedding_multiplier": 12.0, "logits_scaling": 0.125, "residual_multiplier": 0.22}
        | {"attention_multiplier": 0.3, "rope_parameters": YARN},
    ),
    "hyperclovax without norms of outputs": ("HyperCLOVAX", {"use_post_norm": False, "mlp_bias": True}),
    "jais2": ("Jais2", {"head_dim": 10, "rope_parameters": LINEAR}),
    "jais2 tied, no biases": ("Jais2", {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True}),
    "cwm": ("Cwm", {"head_dim": 10, "num_hidden_layers": 5, "sliding_window": 9, "rope_parameters": LLAMA3} | IDS),
    "modernbert-decoder": (
        "ModernBertDecoder",
        {"local_attention": 18, "num_hidden_layers": 5, "norm_bias": True, "attention_bias": True}
        | BERT_IDS
        | {"rope_parameters": {"full_attention": YARN, "sliding_attention": BASE}},
    ),
    "modernbert-decoder untied": (
        "ModernBertDecoder",
        {"local_attention": 18, "tie_word_embeddings": False, "mlp_bias": True, "classifier_bias": True}
        | {"layer_types": ["sliding_attention"] * 3}
        | BERT_IDS,
    ),
    "modernbert-decoder without a bias of the head": (
        "ModernBertDecoder",
        {"decoder_bias": False, "hidden_activation": "silu", "classifier_activation": "silu"}
        | {"rope_parameters": {"full_attention": BASE | {"rope_theta": 700.0}, "sliding_attention": BASE}}
        | BERT_IDS,
    ),
    "internlm3": ("InternLM3", {"head_dim": 10, "rope_parameters": DYNAMIC}),
    "iquestcoder": ("IQuestCoder", {"head_dim": 10, "rope_parameters": LINEAR}),
}
LIKE_GPT: dict[str, tuple[str, dict[str, Any]]] = {
    "gptj": ("GPTJ", GPT | {"rotary_dim": 4, "n_inner": 50}),
    "gptj wholly rotated, tied": (
        "GPTJ",
        GPT | {"rotary_dim": 6, "n_embd": 24, "n_head": 4, "tie_word_embeddings": True},
    ),
    "codegen": ("CodeGen", GPT | {"rotary_dim": 4, "n_embd": 48, "n_head": 8, "n_ctx": LONG}),
    "gpt_bigcode": ("GPTBigCode", GPT | {"n_inner": 50}),
    "gpt_bigcode untied, all heads": ("GPTBigCode", GPT | {"multi_query": False, "tie_word_embeddings": False}),
    "gpt_neo": (
        "GPTNeo",
        {"num_layers": 3, "num_heads": 6, "hidden_size": 36, "window_size": 9, "max_position_embeddings": LONG}
        | {"attention_types": [[["global", "local", "local"], 1]]},
    ),
    "gpt_neo untied, no windows": (
        "GPTNeo",
        {"num_layers": 2, "num_heads": 6, "hidden_size": 36, "max_position_embeddings": LONG}
        | {"attention_types": [[["global"], 2]], "intermediate_size": 50, "tie_word_embeddings": False},
    ),
    "opt": ("OPT", {"ffn_dim": 50, "max_position_embeddings": LONG}),
    "opt untied, plain norms": (
        "OPT",
        {"enable_bias": False, "layer_norm_elementwise_affine": False, "tie_word_embeddings": False}
        | {"ffn_dim": 50, "max_position_embeddings": LONG, "word_embed_proj_dim": 36},
    ),
    "opt, norms of sums, a narrow embedding": (
        "OPT",
        {"do_layer_norm_before": False, "word_embed_proj_dim": 20, "ffn_dim": 50, "max_position_embeddings": LONG},
    ),
    "opt untied, norms of sums": (
        "OPT",
        {"do_layer_norm_before": False, "tie_word_embeddings": False, "max_position_embeddings": LONG}
        | {"word_embed_proj_dim": 40, "enable_bias": False, "ffn_dim": 50},
    ),
    "openai-gpt": ("OpenAIGPT", GPT),
    "openai-gpt untied, relu": ("OpenAIGPT", GPT | {"afn": "relu", "tie_word_embeddings": False}),
    "ctrl": ("CTRL", GPT | {"dff": 50}),
    "ctrl untied": ("CTRL", GPT | {"dff": 50, "tie_word_embeddings": False}),
    "xglm": ("XGLM", {"d_model": 36, "num_layers": 3, "attention_heads": 6, "ffn_dim": 50}),
    "xglm untied": (
        "XGLM",
        {"d_model": 24, "num_layers": 2, "attention_heads": 4, "ffn_dim": 50}
        | {"scale_embedding": False, "tie_word_embeddings": False},
    ),
    "biogpt": ("BioGpt", {"max_position_embeddings": LONG}),
    "biogpt untied": (
        "BioGpt",
        {"max_position_embeddings": LONG, "scale_embedding": False, "tie_word_embeddings": False},
    ),
}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 5, "head_dim": 10, "sliding_window": 9, "rope_parameters": YARN}),
    "mixtral tied, one of three": (
        "Mixtral",
        {"num_local_experts": 3, "num_experts_per_tok": 1, "tie_word_embeddings": True, "rope_parameters": LINEAR},
    ),
    "mixtral, gelu": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 3, "hidden_act": "gelu"}),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 3, "rope_parameters": LINEAR}),
    "olmoe tied, weights that sum to one": (
        "Olmoe",
        {"num_experts": 5, "num_experts_per_tok": 2, "norm_topk_prob": True, "tie_word_embeddings": True},
    ),
    "olmoe, biases": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 1, "attention_bias": True}),
    "qwen2_moe": (
        "Qwen2Moe",
        {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "norm_topk_prob": True}
        | {"shared_expert_intermediate_size": 18, "rope_parameters": YARN},
    ),
    "qwen2_moe, some dense layers, windows": (
        "Qwen2Moe",
        {"num_experts": 4, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 12}
        | {"mlp_only_layers": [3], "decoder_sparse_step": 2, "num_hidden_layers": 4, "num_experts_per_tok": 3}
        | {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
    ),
    "qwen2_moe tied, no biases": (
        "Qwen2Moe",
        {"num_experts": 3, "num_experts_per_tok": 1, "moe_intermediate_size": 12, "qkv_bias": False}
        | {"shared_expert_intermediate_size": 7, "tie_word_embeddings": True, "hidden_act": "gelu"},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "norm_topk_prob": True}
        | {"head_dim": 10, "rope_parameters": YARN},
    ),
    "qwen3_moe, some dense layers, a window": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "mlp_only_layers": [0]}
        | {"use_sliding_window": True, "sliding_window": 9, "num_hidden_layers": 4},
    ),
    "qwen3_moe tied, biases": (
        "Qwen3Moe",
        {"num_experts": 3, "num_experts_per_tok": 1, "moe_intermediate_size": 12, "attention_bias": True}
        | {"decoder_sparse_step": 3, "tie_word_embeddings": True, "hidden_act": "relu"},
    ),
}
SCALES = {"embedding_multiplier": 12.0, "logits_scaling": 49.0, "residual_multiplier": 0.22}
MIXTURES |= {
    "flex_olmo": ("FlexOlmo", {"num_experts": 6, "num_experts_per_tok": 3, "rope_parameters": LINEAR}),
    "flex_olmo tied, weights that sum to one": (
        "FlexOlmo",
        {"num_experts": 5, "num_experts_per_tok": 2, "norm_topk_prob": True, "tie_word_embeddings": True},
    ),
    "flex_olmo, biases": (
        "FlexOlmo",
        {"num_experts": 4, "num_experts_per_tok": 1, "attention_bias": True, "rope_parameters": YARN}
        | {"hidden_act": "gelu"},
    ),
    "granitemoe": (
        "GraniteMoe",
        SCALES | {"num_local_experts": 5, "attention_multiplier": 0.3, "rope_parameters": YARN},
    ),
    "granitemoe tied, one of three": (
        "GraniteMoe",
        {"num_local_experts": 3, "num_experts_per_tok": 1, "tie_word_embeddings": True, "rope_parameters": BASE},
    ),
    "granitemoe, biases": (
        "GraniteMoe",
        {"num_local_experts": 4, "num_experts_per_tok": 3, "attention_bias": True, "hidden_act": "gelu"},
    ),
    "granitemoeshared": (
        "GraniteMoeShared",
        SCALES
        | {"num_local_experts": 5, "attention_multiplier": 0.3, "rope_parameters": LINEAR}
        | {"shared_intermediate_size": 18},
    ),
    "granitemoeshared tied, no shared MLP": (
        "GraniteMoeShared",
        {"num_local_experts": 3, "num_experts_per_tok": 1, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "granitemoeshared, gelu": (
        "GraniteMoeShared",
        {"num_local_experts": 4, "num_experts_per_tok": 3, "shared_intermediate_size": 7, "hidden_act": "gelu"},
    ),
    "granitemoe_swa": (
        "GraniteMoeSWA",
        SCALES
        | {"num_local_experts": 5, "shared_intermediate_size": 18, "attention_multiplier": 0.3, "sliding_window": 9}
        | {"num_hidden_layers": 5, "layer_rope_theta": [300.0, 300.0, 0, 300.0, 0]},
    ),
    "granitemoe_swa tied, no shared MLP": (
        "GraniteMoeSWA",
        {"num_local_experts": 3, "num_experts_per_tok": 1, "tie_word_embeddings": True, "sliding_window": 7}
        | {"rope_parameters": LINEAR},
    ),
    "granitemoe_swa, listed windows, biases": (
        "GraniteMoeSWA",
        {"num_local_experts": 4, "shared_intermediate_size": 7, "attention_bias": True, "hidden_act": "gelu"}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 11},
    ),
}
WINDOWS_AND_BASES = {"full_attention": YARN, "sliding_attention": BASE}
EVEN = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12}
FEW = {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 20, "tie_word_embeddings": True}
MIXTURES |= {
    "afmoe": (
        "Afmoe",
        EVEN
        | {"num_shared_experts": 1, "num_dense_layers": 2, "mup_enabled": True, "route_scale": 1.7, "head_dim": 10}
        | {"num_hidden_layers": 5, "sliding_window": 9, "global_attn_every_n_layers": 3, "rope_parameters": YARN},
    ),
    "afmoe tied, no dense layer": (
        "Afmoe",
        FEW | {"num_shared_experts": 2, "num_dense_layers": 0, "head_dim": 6, "sliding_window": 7},
    ),
    "afmoe, listed windows": (
        "Afmoe",
        EVEN
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 11}
        | {"hidden_act": "gelu", "head_dim": 12, "rope_parameters": LINEAR},
    ),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 12, "head_dim": 10, "rope_parameters": YARN}
        | {"num_hidden_layers": 4, "moe_layer_start_index": 1, "moe_layer_end_index": 2},
    ),
    "ernie4_5_moe untied, no shared MLP": (
        "Ernie4_5_Moe",
        {"moe_num_experts": 4, "moe_k": 1, "moe_intermediate_size": 20, "tie_word_embeddings": False}
        | {"moe_num_shared_experts": 0, "moe_layer_start_index": 0},
    ),
    "ernie4_5_moe, every other layer": (
        "Ernie4_5_Moe",
        {"moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 12, "moe_num_shared_experts": 1}
        | {"num_hidden_layers": 5, "moe_layer_interval": 2, "hidden_act": "gelu", "rope_parameters": LINEAR},
    ),
    "exaone_moe": (
        "ExaoneMoe",
        EVEN
        | {"n_group": 3, "topk_group": 2, "num_hidden_layers": 5, "sliding_window": 9, "rope_parameters": LLAMA3}
        | {"num_shared_experts": 2, "head_dim": 10},
    ),
    "exaone_moe tied, no windows": (
        "ExaoneMoe",
        FEW
        | {"sliding_window_pattern": None, "layer_types": ["full_attention"] * 3, "norm_topk_prob": False}
        | {"routed_scaling_factor": 1.2, "sliding_window": 7},
    ),
    "exaone_moe, listed experts": (
        "ExaoneMoe",
        EVEN
        | {"mlp_layer_types": ["sparse", "dense", "sparse"], "sliding_window": 11, "hidden_act": "gelu"}
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "rope_parameters": LINEAR},
    ),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1",
        {"num_experts": 5, "moe_topk": 2, "head_dim": 10, "rope_parameters": YARN},
    ),
    "hunyuan_v1_moe tied, lists of layers": (
        "HunYuanMoEV1",
        {"num_experts": 4, "moe_topk": [1] * 3, "head_dim": 6, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 500.0}},
    ),
    "hunyuan_v1_moe, biases": (
        "HunYuanMoEV1",
        {"num_experts": 4, "moe_topk": 3, "head_dim": 12, "attention_bias": True, "hidden_act": "gelu"}
        | {"rope_parameters": LINEAR},
    ),
    "hy_v3": ("HYV3", EVEN | {"num_shared_experts": 2, "head_dim": 10, "rope_parameters": YARN}),
    "hy_v3 tied, listed experts": (
        "HYV3",
        FEW | {"mlp_layer_types": ["sparse", "dense", "sparse"], "router_scaling_factor": 1.2, "head_dim": 6},
    ),
    "hy_v3, biases": (
        "HYV3",
        EVEN | {"attention_bias": True, "hidden_act": "gelu", "head_dim": 12, "rope_parameters": LINEAR},
    ),
    "mellum": (
        "Mellum",
        EVEN
        | {"sliding_window": 9, "head_dim": 10, "rope_parameters": WINDOWS_AND_BASES}
        | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    ),
    "mellum tied, some dense layers": (
        "Mellum",
        FEW | {"mlp_layer_types": ["dense", "sparse", "dense"], "norm_topk_prob": False, "head_dim": 6},
    ),
    "mellum, biases": (
        "Mellum",
        EVEN
        | {"attention_bias": True, "hidden_act": "gelu", "head_dim": 12, "sliding_window": 7}
        | {"layer_types": ["sliding_attention"] * 3, "rope_parameters": WINDOWS_AND_BASES},
    ),
    "minimax_m2": (
        "MiniMaxM2",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 10, "rope_parameters": YARN},
    ),
    "minimax_m2 tied, partial rotation": (
        "MiniMaxM2",
        {"num_local_experts": 4, "num_experts_per_tok": 1, "head_dim": 12, "tie_word_embeddings": True}
        | {"rope_parameters": BASE | {"partial_rotary_factor": 0.5}},
    ),
    "minimax_m2, gelu": (
        "MiniMaxM2",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 6, "hidden_act": "gelu"},
    ),
    "solar_open": (
        "SolarOpen",
        {"n_routed_experts": 6, "num_experts_per_tok": 3, "n_group": 3, "topk_group": 2, "moe_intermediate_size": 12}
        | {"n_shared_experts": 2, "routed_scaling_factor": 1.7, "head_dim": 10, "rope_parameters": YARN},
    ),
    "solar_open tied, weights that do not sum to one": (
        "SolarOpen",
        {"n_routed_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 20, "tie_word_embeddings": True}
        | {"norm_topk_prob": False, "head_dim": 6},
    ),
    "solar_open, biases": (
        "SolarOpen",
        {"n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "attention_bias": True}
        | {"hidden_act": "gelu", "head_dim": 12, "rope_parameters": LINEAR},
    ),
}
MIXTURES |= {
    "llama4_text": (
        "Llama4Text",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size_mlp": 50, "head_dim": 10}
        | {"num_hidden_layers": 5, "interleave_moe_layer_step": 2, "attention_chunk_size": 13, "floor_scale": 60}
        | {"attn_scale": 0.5, "rope_parameters": LLAMA3},
    ),
    "llama4_text tied, no norms": (
        "Llama4Text",
        {"num_local_experts": 4, "intermediate_size_mlp": 20, "use_qk_norm": False, "tie_word_embeddings": True}
        | {"no_rope_layers": [0, 1, 1], "attn_temperature_tuning": False, "head_dim": 6, "attention_chunk_size": 9},
    ),
    "llama4_text, listed layers, biases": (
        "Llama4Text",
        {"num_local_experts": 3, "num_experts_per_tok": 3, "intermediate_size_mlp": 30, "attention_bias": True}
        | {"moe_layers": [0, 2], "no_rope_layers": [1, 0, 1], "attention_chunk_size": 11, "floor_scale": 60}
        | {"layer_types": ["full_attention", "chunked_attention", "chunked_attention"], "hidden_act": "gelu"}
        | {"head_dim": 12, "rope_parameters": LINEAR},
    ),
}
MIXTURES |= {
    "aria_text": ("AriaText", {"moe_num_experts": 5, "moe_topk": 2, "head_dim": 10, "rope_parameters": YARN}),
    "aria_text tied, one of three": (
        "AriaText",
        {"moe_num_experts": 3, "moe_topk": 1, "moe_num_shared_experts": 1, "tie_word_embeddings": True},
    ),
    "aria_text, biases": (
        "AriaText",
        {"moe_num_experts": 4, "moe_topk": 3, "moe_num_shared_experts": 3, "attention_bias": True}
        | {"rope_parameters": LINEAR},
    ),
    "flint": (
        "Flint",
        EVEN
        | {"shared_expert_intermediate_size": 18, "head_dim": 10, "num_hidden_layers": 7, "sliding_window": 9}
        | {"rope_parameters": YARN},
    ),
    "flint tied, experts in every other layer": (
        "Flint",
        FEW
        | {"shared_expert_intermediate_size": 7, "head_dim": 6, "mlp_only_layers": [], "decoder_sparse_step": 2}
        | {"norm_topk_prob": False, "sliding_window": 7},
    ),
    "flint, listed windows, biases": (
        "Flint",
        EVEN
        | {"shared_expert_intermediate_size": 12, "head_dim": 12, "mlp_only_layers": [1], "attention_bias": True}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 11}
        | {"hidden_act": "gelu", "rope_parameters": LINEAR},
    ),
}
GROUPS = {"n_routed_experts": 6, "num_experts_per_tok": 3, "n_group": 3, "topk_group": 2, "moe_intermediate_size": 12}
MIXTURES |= {
    "glm4_moe": (
        "Glm4Moe",
        GROUPS
        | {"n_shared_experts": 2, "routed_scaling_factor": 1.7, "attention_bias": True, "use_qk_norm": True}
        | {"head_dim": 12, "rope_parameters": YARN | {"partial_rotary_factor": 0.5}},
    ),
    "glm4_moe tied, two dense layers": (
        "Glm4Moe",
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "first_k_dense_replace": 2}
        | {"norm_topk_prob": False, "tie_word_embeddings": True, "head_dim": 8},
    ),
    "glm4_moe, experts in all layers": (
        "Glm4Moe",
        {"n_routed_experts": 3, "num_experts_per_tok": 1, "moe_intermediate_size": 12, "first_k_dense_replace": 0}
        | {"head_dim": 12, "hidden_act": "gelu"},
    ),
    "dots1": (
        "Dots1",
        GROUPS
        | {"n_shared_experts": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "head_dim": 10}
        | {"sliding_window": 9, "max_window_layers": 1, "first_k_dense_replace": 1, "rope_parameters": YARN},
    ),
    "dots1 tied, biases": (
        "Dots1",
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 2, "moe_intermediate_size": 12}
        | {"attention_bias": True, "tie_word_embeddings": True},
    ),
    "dots1, listed windows": (
        "Dots1",
        {"n_routed_experts": 5, "num_experts_per_tok": 1, "n_shared_experts": 1, "moe_intermediate_size": 20}
        | {"sliding_window": 7, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ),
}
MIXTURES |= {
    "gpt_oss": (
        "GptOss",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 10, "sliding_window": 9, "swiglu_limit": 0.5}
        | {"rope_parameters": YARN | {"truncate": False}},
    ),
    "gpt_oss tied, no biases of attention": (
        "GptOss",
        {"num_local_experts": 4, "num_experts_per_tok": 1, "head_dim": 6, "sliding_window": 7, "swiglu_alpha": 1.2}
        | {"attention_bias": False, "tie_word_embeddings": True, "rope_parameters": BASE},
    ),
    "gpt_oss, listed windows": (
        "GptOss",
        {"num_local_experts": 3, "num_experts_per_tok": 3, "head_dim": 12, "sliding_window": 11}
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "rope_parameters": LINEAR},
    ),
}
HEADS = {"num_key_value_heads": 6, "kv_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 6, "v_head_dim": 7}
NO_QUERY_LATENT = HEADS | {"q_lora_rank": None, "qk_rope_head_dim": 4, "v_head_dim": 12, "kv_lora_rank": 14}
BIASED = HEADS | {"q_lora_rank": 22, "attention_bias": True, "qk_nope_head_dim": 5, "qk_rope_head_dim": 10}
STRENGTHS = YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}
OTHERS = {"n_routed_experts": 5, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 20}
LATENT: dict[str, tuple[str, dict[str, Any]]] = {
    "minicpm3": ("MiniCPM3", HEADS | {"q_lora_rank": 18, "rope_parameters": STRENGTHS}),
    "minicpm3 untied, no latent of queries": (
        "MiniCPM3",
        NO_QUERY_LATENT
        | {"tie_word_embeddings": False, "scale_emb": 3, "scale_depth": 0.9, "dim_model_base": 18, "mlp_bias": True}
        | {"v_head_dim": None, "rope_parameters": DYNAMIC},
    ),
    "minicpm3, biases": (
        "MiniCPM3",
        BIASED | {"scale_depth": None, "dim_model_base": None, "hidden_act": "gelu", "rope_parameters": LINEAR},
    ),
    "youtu": ("Youtu", HEADS | {"q_lora_rank": 18, "rope_parameters": STRENGTHS}),
    "youtu untied, no latent of queries": (
        "Youtu",
        NO_QUERY_LATENT | {"tie_word_embeddings": False, "rope_parameters": LLAMA3},
    ),
    "youtu, biases": ("Youtu", BIASED | {"hidden_act": "gelu", "rope_parameters": BASE}),
    "deepseek_v2": (
        "DeepseekV2",
        HEADS
        | GROUPS
        | {"q_lora_rank": 18, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.7}
        | {"first_k_dense_replace": 1, "rope_parameters": STRENGTHS},
    ),
    "deepseek_v2 tied, no latent of queries": (
        "DeepseekV2",
        NO_QUERY_LATENT | OTHERS | {"n_shared_experts": 1, "tie_word_embeddings": True, "rope_parameters": LINEAR},
    ),
    "deepseek_v2, biases, two dense layers": (
        "DeepseekV2",
        BIASED
        | OTHERS
        | {"first_k_dense_replace": 2, "hidden_act": "gelu", "rope_parameters": YARN, "qk_nope_head_dim": 6},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        HEADS | GROUPS | {"q_lora_rank": 18, "first_k_dense_replace": 1, "rope_parameters": STRENGTHS},
    ),
    "deepseek_v3 tied, no latent of queries": (
        "DeepseekV3",
        NO_QUERY_LATENT
        | OTHERS
        | {"first_k_dense_replace": 0, "tie_word_embeddings": True, "norm_topk_prob": False, "n_shared_experts": 2}
        | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.0}},
    ),
    "deepseek_v3, biases, two dense layers": (
        "DeepseekV3",
        BIASED
        | OTHERS
        | {"first_k_dense_replace": 2, "routed_scaling_factor": 1.2, "hidden_act": "gelu"}
        | {"rope_parameters": YARN | {"attention_factor": 1.1, "mscale_all_dim": 0.8}},
    ),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        HEADS | GROUPS | {"q_lora_rank": 18, "rope_parameters": STRENGTHS, "n_shared_experts": 2},
    ),
    "glm4_moe_lite tied, listed experts": (
        "Glm4MoeLite",
        NO_QUERY_LATENT
        | OTHERS
        | {"mlp_layer_types": ["sparse", "dense", "sparse"], "tie_word_embeddings": True, "rope_parameters": BASE},
    ),
    "glm4_moe_lite, biases": (
        "Glm4MoeLite",
        BIASED | OTHERS | {"norm_topk_prob": False, "routed_scaling_factor": 1.2, "rope_parameters": LINEAR},
    ),
}
CASES = LIKE_LLAMA | LIKE_GPT | MIXTURES | LATENT
OWN_NAMES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("GPTJ", "CodeGen", "GPTBigCode", "OpenAIGPT", "CTRL"), (*FREE, "num_key_value_heads")),
    "GPTNeo": (*FREE, "num_key_value_heads"),
    "XGLM": ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "num_key_value_heads"),
    "OPT": ("intermediate_size", "max_position_embeddings", "num_key_value_heads"),
    "BioGpt": ("max_position_embeddings", "num_key_value_heads"),
    **dict.fromkeys(("Persimmon", "ModernBertDecoder"), ("num_key_value_heads",)),
}
"""Names that a class does not have."""


def changed(value: Any) -> Any:
    """Another valid value of a key in config.json; None for lists, sections and names without one."""
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case float():
            return 1.5 * value + 0.25
        case "silu":
            return "relu"
    return None
