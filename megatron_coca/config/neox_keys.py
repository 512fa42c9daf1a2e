"""GPT-NeoX's keys that are not in the schema: aliases, keys without effect, and unsupported features.

Names and defaults are those of GPT-NeoX at commit ea7aefd8.
"""

from typing import Any

_KERNEL = "selects a kernel; results are the same"
_RECOMPUTE = "selects how activations are recomputed; results are the same"
_CONSOLE = "console output only"
_LAUNCH = "set by the launcher"
_UNUSED = "has no effect in GPT-NeoX either"
_GENERATION = "read by GPT-NeoX's generate.py; here use `megatron-coca generate`"

INERT: dict[str, str] = {
    "scaled_upper_triang_masked_softmax_fusion": _KERNEL,
    "scaled_masked_softmax_fusion": _KERNEL,
    "bias_dropout_fusion": _KERNEL,
    "rope_fusion": _KERNEL,
    "layernorm_fusion": _KERNEL,
    "rmsnorm_fusion": _KERNEL,
    "use_flashattn_swiglu": _KERNEL,
    "fused_kernels_build_path": _KERNEL,
    "attention_softmax_in_fp32": "every backend computes the softmax in float32",
    "apply_query_key_layer_scaling": "does not change results",
    "rotary_save_freqs_buffer": "the frequencies are computed, not stored",
    "output_layer_parallelism": "has only one valid value",
    "use_cpu_initialization": "selects the device of the initialization; the distribution is the same",
    "partition_activations": _RECOMPUTE,
    "contiguous_checkpointing": _RECOMPUTE,
    "checkpoint_in_cpu": _RECOMPUTE,
    "synchronize_each_layer": _RECOMPUTE,
    "profile_backward": _RECOMPUTE,
    "deepspeed_activation_checkpointing": _RECOMPUTE,
    "mmap_warmup": "selects how files are read; results are the same",
    "use_shared_fs": "no index files are written",
    "s3_chunk_size": "s3_path is not supported",
    "override_lr_scheduler": "the schedule always comes from the configuration",
    "steps_per_print": _CONSOLE,
    "wall_clock_breakdown": _CONSOLE,
    "dump_state": _CONSOLE,
    "log_grad_norm": _CONSOLE,
    "log_param_norm": _CONSOLE,
    "log_grad_pct_zeros": _CONSOLE,
    "log_optimizer_states": _CONSOLE,
    "git_hash": "recorded by GPT-NeoX itself",
    "config_files": "recorded by GPT-NeoX itself",
    "user_script": "recorded by GPT-NeoX itself",
    "short_seq_prob": _UNUSED,
    "onnx_safe": _UNUSED,
    "lazy_mpu_init": _UNUSED,
    "world_size": _LAUNCH,
    "rank": _LAUNCH,
    "local_rank": _LAUNCH,
    "global_num_gpus": _LAUNCH,
    **dict.fromkeys(
        (
            *("text_gen_type", "precompute_model_name", "sample_input_file", "sample_output_file", "num_samples"),
            *("temperature", "top_p", "top_k", "maximum_tokens", "prompt_end", "return_logits", "recompute"),
        ),
        _GENERATION,
    ),
}
"""Keys that are accepted and have no effect, with the reason."""

ALIASES: dict[str, str] = {
    "lr": "optimizer.params.lr",
    "optimizer_type": "optimizer.type",
    "clip_grad": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "zero_reduce_scatter": "zero_optimization.reduce_scatter",
    "zero_contiguous_gradients": "zero_optimization.contiguous_gradients",
    "zero_reduce_bucket_size": "zero_optimization.reduce_bucket_size",
    "zero_allgather_bucket_size": "zero_optimization.allgather_bucket_size",
    "fp32_allreduce": "deepspeed_extra_args.communication_data_type",
    "data_types": "deepspeed_extra_args.data_types",
}
"""Aliases of keys; both may be set to the same value."""

ALIAS_VALUES: dict[str, dict[Any, Any]] = {"fp32_allreduce": {True: "fp32", False: None}}
"""Values of an alias, translated to those of its key."""

HUGGING_FACE: dict[str, str] = {
    "learning_rate": "optimizer.params.lr",
    "max_steps": "train_iters",
    "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
    "per_gpu_train_batch_size": "train_micro_batch_size_per_gpu",
    "adam_beta1": "optimizer.params.betas",
    "adam_beta2": "optimizer.params.betas",
    "adam_epsilon": "optimizer.params.eps",
    "max_grad_norm": "gradient_clipping",
    "optim": "optimizer.type",
    "lr_scheduler_type": "lr_decay_style",
    "warmup_ratio": "warmup",
    "gradient_checkpointing": "checkpoint_activations",
    "output_dir": "save",
    "resume_from_checkpoint": "load",
    "save_steps": "checkpoint_factor",
    "save_total_limit": "keep_last_n_checkpoints",
    "logging_steps": "log_interval",
    "eval_steps": "eval_interval",
    "run_name": "wandb_run_name",
    "num_hidden_layers": "num_layers",
    "num_key_value_heads": "num_kv_heads",
    "hidden_act": "activation",
    "max_seq_length": "seq_length",
    "max_length": "seq_length",
    "block_size": "seq_length",
    "rope_theta": "rotary_emb_base",
    "attn_implementation": "attention_backend",
    "use_flash_attention": "attention_backend",
    "partial_rotary_factor": "rotary_pct",
    "rms_norm_eps": "rms_norm_epsilon",
    "layer_norm_eps": "layernorm_epsilon",
    "tie_word_embeddings": "no_weight_tying",
    "sliding_window": "sliding_window_width",
    "tensor_parallel_size": "model_parallel_size",
    "tensor_model_parallel_size": "model_parallel_size",
}
"""Hugging Face names of keys (TrainingArguments and model configurations), for the error of an unknown key."""

_EPOCHS = "is not a key: training is counted in steps; set `train_iters` to epochs * tokens / (batch * seq_length)"

MISPLACED: dict[str, str] = {
    "epochs": _EPOCHS,
    "num_train_epochs": _EPOCHS,
    "num_experts": "is not supported: there is no mixture of experts",
    "warmup_steps": "is a number of steps; set `warmup` to their share of train_iters",
    "optimizer.params.weight_decay": "belongs at the top level: set `weight_decay`",
    "optimizer.weight_decay": "belongs at the top level: set `weight_decay`",
    "optimizer.lr": "belongs one level down: set `optimizer.params.lr`",
    "optimizer.betas": "belongs one level down: set `optimizer.params.betas`",
    "optimizer.eps": "belongs one level down: set `optimizer.params.eps`",
}
"""Keys at the wrong level of the file, of another unit, or without a counterpart."""

_ALIGNMENT = "preference learning"
_MAMBA = "Mamba"
_MOE = "mixture of experts"
_MUP = "maximal update parametrization"
_TE = "Transformer Engine"
_SERVING = "online training"
_COMET = "Comet"
_STATISTICS = "this statistic"
_DERIVED = "setting this derived value directly"
_LOSS_SCALE = "a top-level loss-scaling key (use the fp16 section)"
_DEEPSPEED = "this DeepSpeed section at the top level (use deepspeed_extra_args)"


def _names(feature: str, names: str, default: Any = None) -> dict[str, tuple[Any, str]]:
    """Return the entries of UNSUPPORTED for several keys of one feature and default."""
    return dict.fromkeys(names.split(), (default, feature))


UNSUPPORTED: dict[str, tuple[Any, str]] = {
    # attention and model
    "sparsity_config": (None, "sparse attention"),
    "sparse_attention": (None, "sparse attention"),
    "opt_pos_emb_offset": (0, "offset of learned positions"),
    "num_unique_layers": (None, "layer sharing"),
    "param_sharing_style": ("grouped", "layer sharing"),
    "gmlp_attn_dim": (64, "gMLP"),
    "soft_prompt_tuning": (None, "soft prompt tuning"),
    **_names(
        _MAMBA,
        "mamba_selective_scan_fusion mamba_causal_conv_fusion mamba_inner_func_fusion mamba_use_bias_in_linears",
        False,
    ),
    "mamba_selective_fp32_params": (True, _MAMBA),
    "mamba_use_bias_in_conv": (True, _MAMBA),
    **_names("RWKV", "dim_att head_size ffn_dim"),
    **_names(_TE, "te_columnparallel te_rowparallel te_layernorm_mlp te_mha te_fp8_mha", False),
    "te_fp8_format": ("hybrid", _TE),
    "te_fp8_wgrad": (True, _TE),
    "te_fp8_amax_history_len": (1, _TE),
    "te_fp8_amax_compute_algo": ("most_recent", _TE),
    "te_fp8_margin": (0, _TE),
    **_names(_MOE, "moe_num_experts moe_expert_interval moe_top_k", 1),
    "moe_router_type": ("sinkhorn", _MOE),
    "moe_lbl_in_fp32": (False, _MOE),
    "moe_jitter_eps": (None, _MOE),
    **_names(_MUP, "use_mup coord_check save_base_shapes", False),
    "base_shapes_file": (None, _MUP),
    **_names(_MUP, "mup_init_scale mup_attn_temp mup_output_temp mup_embedding_mult mup_rp_embedding_mult", 1.0),
    "mup_width_scale": (2, _MUP),
    # optimizer, schedule, precision
    "use_bnb_optimizer": (False, "the bitsandbytes optimizer"),
    "use_checkpoint_lr_scheduler": (False, "loading the schedule from a checkpoint"),
    "z_loss": (0.0, "z-loss"),
    "fp16_lm_cross_entropy": (False, "loss in float16"),
    "loss_scale": (None, _LOSS_SCALE),
    "loss_scale_window": (1000.0, _LOSS_SCALE),
    "hysteresis": (2, _LOSS_SCALE),
    "min_scale": (1.0, _LOSS_SCALE),
    **_names(_DERIVED, "dynamic_loss_scale padded_vocab_size do_train do_valid do_test"),
    "batch_size": (None, f"{_DERIVED} (set train_micro_batch_size_per_gpu or train_batch_size)"),
    "is_pipe_parallel": (False, _DERIVED),
    # DeepSpeed
    "deepspeed": (True, "training without DeepSpeed"),
    "deepscale": (False, "DeepScale"),
    "deepscale_config": (None, "DeepScale"),
    "deepspeed_mpi": (False, "rank discovery by MPI"),
    "autotuning": (None, "autotuning"),
    "autotuning_run": (None, "autotuning"),
    "scheduler": (None, "DeepSpeed's learning-rate scheduler"),
    "curriculum_learning": (None, "curriculum learning"),
    "curriculum_seqlen": (0, "curriculum learning"),
    "prescale_gradients": (False, _DEEPSPEED),
    "sparse_gradients": (False, _DEEPSPEED),
    "gradient_predivide_factor": (1.0, _DEEPSPEED),
    **_names(
        _DEEPSPEED,
        "amp flops_profiler communication_data_type activation_checkpointing data_efficiency tensorboard "
        "wandb csv_monitor elasticity comms_logger compression_training checkpoint",
    ),
    # data and training targets
    "train_epochs": (None, "training by epochs (set train_iters)"),
    **_names("separate label data", "train_label_data_paths valid_label_data_paths test_label_data_paths"),
    "weight_by_num_documents": (False, "weighting by number of documents"),
    "weighted_sampler_alpha": (1.0, "weighting by number of documents"),
    "pack_impl": ("packed", "another packing method"),
    "dataset_impl": ("gpt2", "another dataset type"),
    "allow_chopped": (True, "dropping truncated documents"),
    "train_impl": ("normal", _ALIGNMENT),
    **_names(
        _ALIGNMENT,
        "train_reward_data_paths valid_reward_data_paths test_reward_data_paths pos_train_data_paths "
        "neg_train_data_paths pos_train_label_data_paths neg_train_label_data_paths pos_valid_data_paths "
        "neg_valid_data_paths pos_valid_label_data_paths neg_valid_label_data_paths pos_test_data_paths "
        "neg_test_data_paths pos_test_label_data_paths neg_test_label_data_paths",
    ),
    **_names(_ALIGNMENT, "dpo_fp32 kto_fp32 fp32_reinforce", True),
    "dpo_reference_free": (False, _ALIGNMENT),
    "reinforce_leave_one_out": (False, _ALIGNMENT),
    **_names(_ALIGNMENT, "dpo_beta kto_beta kl_div_beta", 0.1),
    "kto_desirable_weight": (1.0, _ALIGNMENT),
    "kto_undesirable_weight": (1.0, _ALIGNMENT),
    "kl_impl": ("mse", _ALIGNMENT),
    "serve_model_weights": (False, _SERVING),
    "weight_server_port": (6000, _SERVING),
    "online_dataserver_ips": ("localhost", _SERVING),
    "online_dataserver_ports": (10000, _SERVING),
    # checkpoints
    "s3_path": (None, "s3_path (set save to an s3:// URL)"),
    "no_save_optim": (False, "a checkpoint without optimizer state"),
    "no_save_rng": (False, "a checkpoint without random state"),
    "no_load_optim": (False, "resuming without optimizer state (use finetune)"),
    "no_load_rng": (False, "resuming without random state (use finetune)"),
    "checkpoint_validation_with_forward_pass": (False, "validating checkpoints with a forward pass"),
    "adlr_autoresume": (False, "ADLR autoresume"),
    "adlr_autoresume_interval": (1000, "ADLR autoresume"),
    # logging
    "wandb_init_all_ranks": (False, "Weights & Biases on every rank"),
    **_names(
        _COMET,
        "use_comet comet_workspace comet_project comet_experiment_name comet_tags comet_others comet_experiment",
    ),
    **_names(_STATISTICS, "log_gradient_noise_scale gradient_noise_scale_cpu_offload char_level_ppl", False),
    "gradient_noise_scale_n_batches": (5, _STATISTICS),
    "eval_results_prefix": ("", "evaluation tasks during training (use evaluate.py)"),
    "eval_tasks": (None, "evaluation tasks during training (use evaluate.py)"),
}
"""Keys of unsupported features: GPT-NeoX's default, which is accepted, and the feature."""

UNSUPPORTED_CHOICES: dict[str, dict[Any, str]] = {
    "norm": {"te_rmsnorm": _TE, "te_layernorm": _TE},
    "init_method": {"single_residual_scaled_normal": "this initialization"},
    "output_layer_init_method": {"single_residual_scaled_normal": "this initialization"},
    "data_impl": {"cached": "the cached index format"},
    "sequence_parallel": {True: "Megatron's sequence parallelism (set sequence_parallel_size instead)"},
    "optimizer.type": dict.fromkeys(("onebitadam", "cpu_torch_adam", "sm3", "madgrad_wd", "lion"), "this optimizer"),
}
"""Unsupported values of supported keys, in lower case, with the feature."""

RENAMED_CHOICES: dict[str, dict[str, str]] = {"launcher": {"ssh": "pdsh"}}
"""Values of earlier versions, in lower case, with what they mean now; checkpoints hold them in their config.yml."""


def is_inert(value: Any, default: Any) -> bool:
    """Return whether the value of an unsupported key leaves its feature disabled."""
    off = value is None or value == {} or value == [] or (value is False and default is not True)
    return off or (value == default and isinstance(value, bool) == isinstance(default, bool))
