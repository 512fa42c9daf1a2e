"""Keys and sizes of published models by their names on the hub, as in the config.json of each family."""

from typing import Any

IDS = {"bos_token_id": 1, "eos_token_id": 2, "use_cache": True, "initializer_range": 0.02, "torch_dtype": "bfloat16"}
GPT_KEYS = {
    "gradient_checkpointing": False,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "tokenizer_class": "GPT2Tokenizer",
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50, "temperature": 0.9}},
}


def sizes(vocabulary: int, width: int, inner: int, layers: int, heads: int, keys: int, length: int) -> dict[str, Any]:
    """The keys of most families."""
    return {
        **IDS,
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "max_position_embeddings": length,
    }


LATENT = {"attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu", "kv_lora_rank": 512}
LATENT |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000}
LATENT |= {"tie_word_embeddings": False, "v_head_dim": 128}
YARN_40 = {"type": "yarn", "beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096}
PUBLISHED: dict[str, dict[str, Any]] = {
    "mistralai/Mixtral-8x7B-v0.1": sizes(32000, 4096, 14336, 32, 32, 8, 32768)
    | {"model_type": "mixtral", "hidden_act": "silu", "num_experts_per_tok": 2, "num_local_experts": 8}
    | {"output_router_logits": False, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "router_aux_loss_coef": 0.02}
    | {"sliding_window": None, "tie_word_embeddings": False, "attention_dropout": 0.0},
    "allenai/OLMoE-1B-7B-0924": sizes(50304, 2048, 1024, 16, 16, 16, 4096)
    | {"model_type": "olmoe", "attention_bias": False, "attention_dropout": 0.0, "clip_qkv": None, "num_experts": 64}
    | {"hidden_act": "silu", "norm_topk_prob": False, "num_experts_per_tok": 8, "output_router_logits": False}
    | {"rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000.0, "router_aux_loss_coef": 0.01}
    | {"tie_word_embeddings": False, "pad_token_id": 1},
    "Qwen/Qwen1.5-MoE-A2.7B": sizes(151936, 2048, 5632, 24, 16, 16, 8192)
    | {"model_type": "qwen2_moe", "attention_dropout": 0.0, "decoder_sparse_step": 1, "hidden_act": "silu"}
    | {"max_window_layers": 21, "moe_intermediate_size": 1408, "norm_topk_prob": False, "num_experts": 60}
    | {"num_experts_per_tok": 4, "output_router_logits": False, "rms_norm_eps": 1e-6, "rope_theta": 1e6}
    | {"router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 5632, "sliding_window": 32768}
    | {"tie_word_embeddings": False, "use_sliding_window": False},
    "Qwen/Qwen3-30B-A3B": sizes(151936, 2048, 6144, 48, 32, 4, 40960)
    | {"model_type": "qwen3_moe", "attention_bias": False, "attention_dropout": 0.0, "decoder_sparse_step": 1}
    | {"head_dim": 128, "hidden_act": "silu", "max_window_layers": 48, "mlp_only_layers": [], "num_experts": 128}
    | {"moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts_per_tok": 8, "rms_norm_eps": 1e-6}
    | {"output_router_logits": False, "rope_scaling": None, "rope_theta": 1e6, "router_aux_loss_coef": 0.001}
    | {"sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False},
    "ibm-granite/granite-3.0-1b-a400m-base": sizes(49155, 1024, 512, 24, 16, 8, 4096)
    | {"model_type": "granitemoe", "attention_bias": False, "attention_dropout": 0.1, "attention_multiplier": 0.015625}
    | {"embedding_multiplier": 12.0, "hidden_act": "silu", "logits_scaling": 6.0, "num_experts_per_tok": 8}
    | {"num_local_experts": 32, "output_router_logits": False, "pad_token_id": 0, "residual_multiplier": 0.22}
    | {"rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 10000, "router_aux_loss_coef": 0.0}
    | {"tie_word_embeddings": True},
    "baidu/ERNIE-4.5-21B-A3B-PT": sizes(103424, 2560, 12288, 28, 20, 4, 131072)
    | {"model_type": "ernie4_5_moe", "hidden_act": "silu", "moe_num_experts": 64, "moe_num_shared_experts": 2}
    | {"moe_capacity": [64, 64, 64], "moe_gate": "topk", "moe_intermediate_size": 1536, "moe_k": 6}
    | {"moe_layer_interval": 1, "moe_layer_start_index": 1, "moe_use_aux_free": True, "num_nextn_predict_layers": 1}
    | {"rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 500000.0, "tie_word_embeddings": True}
    | {"use_bias": False},
    "tencent/Hunyuan-A13B-Instruct": sizes(128167, 4096, 3072, 32, 32, 8, 32768)
    | {"model_type": "hunyuan_v1_moe", "attention_bias": False, "head_dim": 128, "hidden_act": "silu"}
    | {"mlp_bias": False, "moe_intermediate_size": [3072] * 32, "moe_topk": [8] * 32, "num_experts": 64}
    | {"num_shared_expert": [1] * 32, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True}
    | {"rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}, "use_cla": False, "use_qk_norm": True},
    "MiniMaxAI/MiniMax-M2": sizes(200064, 3072, 1536, 62, 48, 8, 196608)
    | {"model_type": "minimax_m2", "attn_type_list": [1] * 62, "head_dim": 128, "hidden_act": "silu"}
    | {"num_experts_per_tok": 8, "num_local_experts": 256, "qk_norm_type": "per_layer", "rms_norm_eps": 1e-6}
    | {"rope_theta": 5000000, "rotary_dim": 64, "scoring_func": "sigmoid", "tie_word_embeddings": False}
    | {"use_qk_norm": True, "use_routing_bias": True},
    "zai-org/GLM-4.5-Air": sizes(151552, 4096, 10944, 46, 96, 8, 131072)
    | {"model_type": "glm4_moe", "attention_bias": True, "attention_dropout": 0.0, "first_k_dense_replace": 1}
    | {"head_dim": 128, "hidden_act": "silu", "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128}
    | {"n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8, "num_nextn_predict_layers": 1}
    | {"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 1000000}
    | {"routed_scaling_factor": 1.0, "tie_word_embeddings": False, "topk_group": 1, "use_qk_norm": False},
    "unsloth/gpt-oss-20b-BF16": sizes(201088, 2880, 2880, 24, 64, 8, 131072)
    | {"model_type": "gpt_oss", "attention_bias": True, "attention_dropout": 0.0, "experts_per_token": 4}
    | {"head_dim": 64, "hidden_act": "silu", "initial_context_length": 4096, "num_experts_per_tok": 4}
    | {"layer_types": ["sliding_attention", "full_attention"] * 12, "num_local_experts": 32}
    | {"output_router_logits": False, "rms_norm_eps": 1e-5, "rope_theta": 150000, "router_aux_loss_coef": 0.9}
    | {
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
        | {"original_max_position_embeddings": 4096}
    }
    | {"sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False},
    "deepseek-ai/DeepSeek-V2-Lite": sizes(102400, 2048, 10944, 27, 16, 16, 163840)
    | LATENT
    | {"model_type": "deepseek_v2", "aux_loss_alpha": 0.001, "first_k_dense_replace": 1, "moe_intermediate_size": 1408}
    | {"n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False, "num_experts_per_tok": 6}
    | {"q_lora_rank": None, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True, "topk_group": 1}
    | {"topk_method": "greedy", "rope_scaling": YARN_40 | {"mscale": 0.707, "mscale_all_dim": 0.707}},
    "unsloth/DeepSeek-V3-bf16": sizes(129280, 7168, 18432, 61, 128, 128, 163840)
    | LATENT
    | {"model_type": "deepseek_v3", "first_k_dense_replace": 3, "moe_intermediate_size": 2048, "n_group": 8}
    | {"n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8}
    | {"num_nextn_predict_layers": 1, "q_lora_rank": 1536, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid"}
    | {"topk_group": 4, "topk_method": "noaux_tc", "rope_scaling": YARN_40 | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    "zai-org/GLM-4.7-Flash": sizes(154880, 2048, 10240, 47, 20, 20, 202752)
    | LATENT
    | {"model_type": "glm4_moe_lite", "moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 64}
    | {"n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 4, "num_nextn_predict_layers": 1}
    | {"partial_rotary_factor": 1.0, "q_lora_rank": 768, "qk_nope_head_dim": 192, "rms_norm_eps": 1e-5}
    | {"rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.8, "topk_group": 1, "v_head_dim": 256},
    "tencent/Youtu-LLM-2B": sizes(128256, 2048, 6144, 32, 16, 16, 131072)
    | LATENT
    | {"model_type": "youtu", "q_lora_rank": 1536, "rope_interleave": True, "rope_scaling": None, "rope_theta": 1600000}
    | {"tie_word_embeddings": True},
    "openbmb/MiniCPM3-4B": sizes(73448, 2560, 6400, 62, 40, 40, 32768)
    | {"model_type": "minicpm3", "dim_model_base": 256, "hidden_act": "silu", "kv_lora_rank": 256, "q_lora_rank": 768}
    | {"qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "rms_norm_eps": 1e-5, "scale_depth": 1.4, "scale_emb": 12}
    | {
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [1.05] * 8 + [1.3] * 8}
        | {"original_max_position_embeddings": 32768}
    },
    "google/gemma-2b": sizes(256000, 2048, 16384, 18, 8, 1, 8192)
    | {"model_type": "gemma", "head_dim": 256, "hidden_act": "gelu", "hidden_activation": None, "rope_theta": 10000.0}
    | {"rms_norm_eps": 1e-6, "attention_bias": False, "attention_dropout": 0.0, "rope_scaling": None},
    "google/gemma-4-31B, text": sizes(262144, 5376, 21504, 60, 32, 16, 262144)
    | {"model_type": "gemma4_text", "attention_bias": False, "attention_dropout": 0.0, "attention_k_eq_v": True}
    | {"enable_moe_block": False, "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256}
    | {"hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 0, "moe_intermediate_size": None}
    | {"layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10, "num_global_key_value_heads": 4}
    | {"num_experts": None, "num_kv_shared_layers": 0, "rms_norm_eps": 1e-6, "sliding_window": 1024}
    | {
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        }
    }
    | {"tie_word_embeddings": True, "top_k_experts": None, "use_bidirectional_attention": "vision"}
    | {"use_double_wide_mlp": False, "vocab_size_per_layer_input": 262144},
    "stabilityai/stablelm-2-1_6b": sizes(100352, 2048, 5632, 24, 32, 32, 4096)
    | {"model_type": "stablelm", "hidden_act": "silu", "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25}
    | {"rope_theta": 10000, "tie_word_embeddings": False, "use_qkv_bias": True},
    "stabilityai/stablelm-2-12b": sizes(100352, 5120, 13824, 40, 32, 8, 4096)
    | {"model_type": "stablelm", "hidden_act": "silu", "hidden_dropout": 0.0, "attention_dropout": 0.0}
    | {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "qk_layernorm": True, "rope_theta": 10000}
    | {"use_parallel_residual": True, "use_qkv_bias": False, "tie_word_embeddings": False},
    "microsoft/phi-2": sizes(51200, 2560, 10240, 32, 32, 32, 2048)
    | {"model_type": "phi", "hidden_act": "gelu_new", "embd_pdrop": 0.0, "resid_pdrop": 0.1, "layer_norm_eps": 1e-5}
    | {"partial_rotary_factor": 0.4, "qk_layernorm": False, "rope_theta": 10000.0, "rope_scaling": None}
    | {"tie_word_embeddings": False, "attention_dropout": 0.0},
    "microsoft/Phi-4-mini-instruct": sizes(200064, 3072, 8192, 32, 24, 8, 131072)
    | {"model_type": "phi3", "partial_rotary_factor": 0.75, "original_max_position_embeddings": 4096}
    | {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}}
    | {"attention_bias": False, "attention_dropout": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "mlp_bias": False}
    | {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "rms_norm_eps": 1e-5}
    | {"rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": True, "pad_token_id": 199999},
    "bigcode/starcoder2-3b": sizes(49152, 3072, 12288, 30, 24, 2, 16384)
    | {"model_type": "starcoder2", "hidden_act": "gelu_pytorch_tanh", "norm_type": "layer_norm", "mlp_type": "default"}
    | {"norm_epsilon": 1e-5, "residual_dropout": 0.1, "embedding_dropout": 0.1, "attention_dropout": 0.1}
    | {"rope_theta": 999999.4420358813, "sliding_window": 4096, "use_bias": True},
    "EleutherAI/gpt-j-6b": GPT_KEYS
    | {"model_type": "gptj", "activation_function": "gelu_new", "attn_pdrop": 0.0, "embd_pdrop": 0.0}
    | {"layer_norm_epsilon": 1e-5, "n_embd": 4096, "n_head": 16, "n_inner": None, "n_layer": 28, "n_positions": 2048}
    | {"resid_pdrop": 0.0, "rotary": True, "rotary_dim": 64, "scale_attn_weights": True, "vocab_size": 50400}
    | {"tie_word_embeddings": False},
    "EleutherAI/gpt-neo-125m": GPT_KEYS
    | {"model_type": "gpt_neo", "activation_function": "gelu_new", "attention_dropout": 0, "embed_dropout": 0}
    | {"attention_layers": ["global", "local"] * 6, "attention_types": [[["global", "local"], 6]], "hidden_size": 768}
    | {"intermediate_size": None, "layer_norm_epsilon": 1e-5, "max_position_embeddings": 2048, "num_heads": 12}
    | {"num_layers": 12, "resid_dropout": 0, "vocab_size": 50257, "window_size": 256},
    "Salesforce/codegen-350M-mono": GPT_KEYS
    | {"model_type": "codegen", "activation_function": "gelu_new", "attn_pdrop": 0.0, "embd_pdrop": 0.0}
    | {"layer_norm_epsilon": 1e-5, "n_ctx": 2048, "n_embd": 1024, "n_head": 16, "n_inner": None, "n_layer": 20}
    | {"n_positions": 2048, "resid_pdrop": 0.0, "rotary_dim": 32, "scale_attn_weights": True, "vocab_size": 51200}
    | {"tie_word_embeddings": False},
    "bigcode/starcoderbase-1b": {
        **{
            "model_type": "gpt_bigcode",
            "activation_function": "gelu_pytorch_tanh",
            "attn_pdrop": 0.1,
            "embd_pdrop": 0.1,
        },
        **{
            "attention_softmax_in_fp32": True,
            "inference_runner": 0,
            "layer_norm_epsilon": 1e-5,
            "max_batch_size": None,
        },
        **{
            "max_sequence_length": None,
            "multi_query": True,
            "n_embd": 2048,
            "n_head": 16,
            "n_inner": 8192,
            "n_layer": 24,
        },
        **{"n_positions": 8192, "pad_key_length": True, "pre_allocate_kv_cache": False, "resid_pdrop": 0.1},
        **{"scale_attention_softmax_in_fp32": True, "scale_attn_weights": True, "validate_runner_input": True},
        **{"vocab_size": 49152, "summary_type": "cls_index"},
    },
    "facebook/opt-125m": {
        **{
            "model_type": "opt",
            "_remove_final_layer_norm": False,
            "activation_dropout": 0.0,
            "activation_function": "relu",
        },
        **{"attention_dropout": 0.0, "do_layer_norm_before": True, "dropout": 0.1, "ffn_dim": 3072, "hidden_size": 768},
        **{"init_std": 0.02, "layerdrop": 0.0, "max_position_embeddings": 2048, "num_attention_heads": 12},
        **{"num_hidden_layers": 12, "prefix": "</s>", "vocab_size": 50272, "word_embed_proj_dim": 768},
    },
    "facebook/opt-350m": {
        **{
            "model_type": "opt",
            "_remove_final_layer_norm": False,
            "activation_dropout": 0.0,
            "activation_function": "relu",
        },
        **{"attention_dropout": 0.0, "do_layer_norm_before": False, "dropout": 0.1, "ffn_dim": 4096},
        **{"hidden_size": 1024, "init_std": 0.02, "layerdrop": 0.0, "max_position_embeddings": 2048},
        **{"num_attention_heads": 16, "num_hidden_layers": 24, "prefix": "</s>", "vocab_size": 50272},
        **{"word_embed_proj_dim": 512},
    },
    "openai-community/openai-gpt": {
        **{"model_type": "openai-gpt", "afn": "gelu", "attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1},
        **{"initializer_range": 0.02, "layer_norm_epsilon": 1e-5, "n_ctx": 512, "n_embd": 768, "n_head": 12},
        **{"n_layer": 12, "n_positions": 512, "n_special": 0, "predict_special_tokens": True, "vocab_size": 40478},
        **{"summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True},
        **{"summary_type": "cls_index", "summary_use_proj": True},
    },
    "Salesforce/ctrl": {
        **{"model_type": "ctrl", "attn_pdrop": 0.1, "dff": 8192, "embd_pdrop": 0.1, "from_tf": False},
        **{"initializer_range": 0.02, "layer_norm_epsilon": 1e-6, "n_ctx": 512, "n_embd": 1280, "n_head": 16},
        **{"n_layer": 48, "n_positions": 50000, "num_labels": 1, "output_past": True, "resid_pdrop": 0.1},
        **{"summary_type": "cls_index", "summary_use_proj": True, "use_bfloat16": False, "vocab_size": 246534},
    },
    "facebook/xglm-564M": {
        **{"model_type": "xglm", "activation_dropout": 0, "activation_function": "gelu", "attention_dropout": 0.1},
        **{"attention_heads": 16, "d_model": 1024, "decoder_start_token_id": 2, "dropout": 0.1, "ffn_dim": 4096},
        **{"init_std": 0.02, "layerdrop": 0.0, "max_position_embeddings": 2048, "num_layers": 24},
        **{"scale_embedding": True, "vocab_size": 256008},
    },
    "microsoft/biogpt": {
        **{
            "model_type": "biogpt",
            "activation_dropout": 0.0,
            "attention_probs_dropout_prob": 0.1,
            "hidden_act": "gelu",
        },
        **{"hidden_dropout_prob": 0.1, "hidden_size": 1024, "intermediate_size": 4096, "layer_norm_eps": 1e-12},
        **{"layerdrop": 0.0, "max_position_embeddings": 1024, "num_attention_heads": 16, "num_hidden_layers": 24},
        **{"scale_embedding": True, "vocab_size": 42384},
    },
    "CohereForAI/c4ai-command-r-v01": sizes(256000, 8192, 22528, 40, 64, 64, 8192)
    | {"model_type": "cohere", "hidden_act": "silu", "layer_norm_eps": 1e-5, "logit_scale": 0.0625}
    | {"model_max_length": 131072, "rope_theta": 8000000.0, "use_qk_norm": False, "attention_bias": False},
    "CohereForAI/c4ai-command-r-plus": sizes(256000, 12288, 33792, 64, 96, 8, 8192)
    | {"model_type": "cohere", "hidden_act": "silu", "layer_norm_eps": 1e-5, "logit_scale": 0.8333333333333334}
    | {"model_max_length": 131072, "rope_theta": 75000000.0, "use_qk_norm": True, "attention_dropout": 0.0},
    "ibm-granite/granite-3.1-2b-base": sizes(49152, 2048, 8192, 40, 32, 8, 131072)
    | {"model_type": "granite", "attention_bias": False, "attention_dropout": 0.1, "attention_multiplier": 0.015625}
    | {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "mlp_bias": False, "residual_multiplier": 0.22}
    | {"rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 5000000.0, "tie_word_embeddings": True},
    "ibm-granite/granite-4.0-micro": sizes(100352, 2560, 8192, 40, 40, 8, 131072)
    | {
        "model_type": "granitemoehybrid",
        "attention_bias": False,
        "attention_multiplier": 0.015625,
        "hidden_act": "silu",
    }
    | {"embedding_multiplier": 12, "init_method": "mup", "layer_types": ["attention"] * 40, "logits_scaling": 10}
    | {"mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 256}
    | {"mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 80, "mamba_proj_bias": False, "num_local_experts": 0}
    | {"normalization_function": "rmsnorm", "num_experts_per_tok": 0, "position_embedding_type": "rope"}
    | {"residual_multiplier": 0.22, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000000}
    | {"router_aux_loss_coef": 0.01, "shared_intermediate_size": 8192, "tie_word_embeddings": True},
    "THUDM/glm-4-9b-chat-hf": sizes(151552, 4096, 13696, 40, 32, 2, 131072)
    | {"model_type": "glm", "attention_bias": True, "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu"}
    | {"partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-07, "rope_theta": 10000.0, "tie_word_embeddings": False},
    "THUDM/GLM-4-9B-0414": sizes(151552, 4096, 13696, 40, 32, 2, 32768)
    | {"model_type": "glm4", "attention_bias": True, "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu"}
    | {"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False},
    "LGAI-EXAONE/EXAONE-4.0-1.2B": sizes(102400, 2048, 4096, 30, 32, 8, 65536)
    | {"model_type": "exaone4", "attention_dropout": 0.0, "head_dim": 64, "hidden_act": "silu", "rms_norm_eps": 1e-5}
    | {"layer_types": ["full_attention"] * 30, "rope_theta": 1000000, "sliding_window": None}
    | {
        "rope_scaling": {"rope_type": "llama3", "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0}
        | {"original_max_position_embeddings": 8192}
    }
    | {"sliding_window_pattern": None, "tie_word_embeddings": True},
    "baidu/ERNIE-4.5-0.3B-PT": sizes(103424, 1024, 3072, 18, 16, 2, 131072)
    | {"model_type": "ernie4_5", "head_dim": 128, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 500000.0}
    | {"tie_word_embeddings": True, "use_bias": False},
    "ByteDance-Seed/Seed-OSS-36B-Instruct": sizes(155136, 5120, 27648, 64, 80, 8, 524288)
    | {"model_type": "seed_oss", "attention_bias": True, "attention_dropout": 0.1, "attention_out_bias": False}
    | {"head_dim": 128, "mlp_bias": False, "pretraining_tp": 1, "residual_dropout": 0.1, "rms_norm_eps": 1e-6}
    | {"rope_scaling": {"rope_type": "default"}, "rope_theta": 10000000.0, "tie_word_embeddings": False},
    "tencent/Hunyuan-0.5B-Instruct": sizes(120818, 1024, 3584, 24, 8, 4, 262144)
    | {"model_type": "hunyuan_v1_dense", "attention_bias": False, "attention_dropout": 0.0, "head_dim": 128}
    | {"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True, "use_qk_norm": True, "mlp_bias": False}
    | {
        "rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0}
        | {"mscale_all_dim": 1.0, "type": "dynamic"}
    },
    "nvidia/Minitron-4B-Base": sizes(256000, 3072, 9216, 32, 24, 8, 4096)
    | {"model_type": "nemotron", "attention_bias": False, "attention_dropout": 0.0, "head_dim": 128, "mlp_bias": False}
    | {"hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5, "rope_theta": 10000.0}
    | {"tie_word_embeddings": False},
    "arcee-ai/AFM-4.5B": sizes(128004, 2560, 18432, 36, 20, 4, 65536)
    | {"model_type": "arcee", "attention_bias": False, "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "relu2"}
    | {"mlp_bias": False, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False}
    | {
        "rope_scaling": {"rope_type": "yarn", "factor": 20.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0}
        | {"original_max_position_embeddings": 4096}
    },
    "swiss-ai/Apertus-8B-2509": sizes(131072, 4096, 21504, 32, 32, 8, 65536)
    | {"model_type": "apertus", "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "xielu"}
    | {"mlp_bias": False, "post_norm": False, "qk_norm": True, "rms_norm_eps": 1e-5, "rope_theta": 12000000}
    | {
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0}
        | {"original_max_position_embeddings": 8192}
    }
    | {"tie_word_embeddings": False},
    "kyutai/helium-1-2b": sizes(64000, 2048, 8192, 28, 16, 8, 4096)
    | {"model_type": "helium", "attention_bias": False, "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu"}
    | {"mlp_bias": False, "rms_norm_eps": 1e-8, "rope_theta": 20000.0, "tie_word_embeddings": False},
    "adept/persimmon-8b-base": IDS
    | {"model_type": "persimmon", "attention_dropout": 0.0, "hidden_act": "relu2", "hidden_dropout": 0.0}
    | {"hidden_size": 4096, "intermediate_size": 16384, "layer_norm_eps": 1e-5, "max_position_embeddings": 16384}
    | {"num_attention_heads": 64, "num_hidden_layers": 36, "partial_rotary_factor": 0.5, "qk_layernorm": True}
    | {"rope_theta": 25000.0, "tie_word_embeddings": False, "vocab_size": 262144},
    "allenai/OLMo-7B-hf": sizes(50304, 4096, 11008, 32, 32, 32, 2048)
    | {"model_type": "olmo", "attention_bias": False, "attention_dropout": 0.0, "clip_qkv": None, "hidden_act": "silu"}
    | {"rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False},
    "karpathy/nanochat-d32": sizes(65536, 2048, 8192, 32, 16, 16, 2048)
    | {"model_type": "nanochat", "attention_bias": False, "attention_dropout": 0.0, "final_logit_softcapping": 15.0}
    | {"hidden_act": "relu2", "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
    | {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
    "facebook/cwm": sizes(128256, 6144, 21504, 64, 48, 8, 131072)
    | {"model_type": "cwm", "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "sliding_window": 8192}
    | {
        "rope_scaling": {"rope_type": "llama3", "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0}
        | {"original_max_position_embeddings": 8192}
    }
    | {"tie_word_embeddings": False, "attention_dropout": 0.0},
}
