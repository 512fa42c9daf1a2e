"""GPT-NeoX's keys that are not in the schema: aliases, keys without effect, and unsupported features.

Names and defaults are those of GPT-NeoX at commit ea7aefd8.
"""

from typing import Any

_KERNEL = "selects a kernel; results are the same"
_RECOMPUTE = "selects how activations are recomputed; results are the same"
_CONSOLE = "console output only"
_LAUNCH = "set by the launcher"
_UNUSED = "has no effect in GPT-NeoX either"

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
}
"""Aliases of keys; both may be set to the same value."""

ALIAS_VALUES: dict[str, dict[Any, Any]] = {"fp32_allreduce": {True: "fp32", False: None}}
"""Values of an alias, translated to those of its key."""

MISPLACED: dict[str, str] = {
    "optimizer.params.weight_decay": "belongs at the top level: set `weight_decay`",
    "optimizer.weight_decay": "belongs at the top level: set `weight_decay`",
    "optimizer.lr": "belongs one level down: set `optimizer.params.lr`",
    "optimizer.betas": "belongs one level down: set `optimizer.params.betas`",
    "optimizer.eps": "belongs one level down: set `optimizer.params.eps`",
}
"""Keys at the wrong level of the file."""

_ALIGNMENT = "preference learning"
_GENERATION = "text generation from a configuration file"
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

UNSUPPORTED: dict[str, tuple[Any, str]] = {
    # attention and model
    "sliding_window_width": (None, "sliding-window attention"),
    "sparsity_config": (None, "sparse attention"),
    "sparse_attention": (None, "sparse attention"),
    "opt_pos_emb_offset": (0, "offset of learned positions"),
    "use_qk_layernorm": (False, "normalization of queries and keys"),
    "num_unique_layers": (None, "layer sharing"),
    "param_sharing_style": ("grouped", "layer sharing"),
    "gmlp_attn_dim": (64, "gMLP"),
    "soft_prompt_tuning": (None, "soft prompt tuning"),
    "mamba_selective_scan_fusion": (False, _MAMBA),
    "mamba_causal_conv_fusion": (False, _MAMBA),
    "mamba_inner_func_fusion": (False, _MAMBA),
    "mamba_selective_fp32_params": (True, _MAMBA),
    "mamba_use_bias_in_conv": (True, _MAMBA),
    "mamba_use_bias_in_linears": (False, _MAMBA),
    "dim_att": (None, "RWKV"),
    "head_size": (None, "RWKV"),
    "ffn_dim": (None, "RWKV"),
    "te_columnparallel": (False, _TE),
    "te_rowparallel": (False, _TE),
    "te_layernorm_mlp": (False, _TE),
    "te_mha": (False, _TE),
    "te_fp8_format": ("hybrid", _TE),
    "te_fp8_wgrad": (True, _TE),
    "te_fp8_amax_history_len": (1, _TE),
    "te_fp8_amax_compute_algo": ("most_recent", _TE),
    "te_fp8_margin": (0, _TE),
    "te_fp8_mha": (False, _TE),
    "moe_num_experts": (1, _MOE),
    "moe_expert_interval": (1, _MOE),
    "moe_top_k": (1, _MOE),
    "moe_router_type": ("sinkhorn", _MOE),
    "moe_lbl_in_fp32": (False, _MOE),
    "moe_jitter_eps": (None, _MOE),
    "use_mup": (False, _MUP),
    "coord_check": (False, _MUP),
    "save_base_shapes": (False, _MUP),
    "base_shapes_file": (None, _MUP),
    "mup_init_scale": (1.0, _MUP),
    "mup_attn_temp": (1.0, _MUP),
    "mup_output_temp": (1.0, _MUP),
    "mup_embedding_mult": (1.0, _MUP),
    "mup_rp_embedding_mult": (1.0, _MUP),
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
    "dynamic_loss_scale": (None, _DERIVED),
    "is_pipe_parallel": (False, _DERIVED),
    "padded_vocab_size": (None, _DERIVED),
    "batch_size": (None, _DERIVED),
    "do_train": (None, _DERIVED),
    "do_valid": (None, _DERIVED),
    "do_test": (None, _DERIVED),
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
    "gradient_predivide_factor": (1.0, _DEEPSPEED),
    "sparse_gradients": (False, _DEEPSPEED),
    "amp": (None, _DEEPSPEED),
    "flops_profiler": (None, _DEEPSPEED),
    "communication_data_type": (None, _DEEPSPEED),
    "activation_checkpointing": (None, _DEEPSPEED),
    "data_efficiency": (None, _DEEPSPEED),
    "tensorboard": (None, _DEEPSPEED),
    "wandb": (None, _DEEPSPEED),
    "csv_monitor": (None, _DEEPSPEED),
    "elasticity": (None, _DEEPSPEED),
    "comms_logger": (None, _DEEPSPEED),
    "compression_training": (None, _DEEPSPEED),
    "checkpoint": (None, _DEEPSPEED),
    "data_types": (None, _DEEPSPEED),
    # data and training targets
    "train_epochs": (None, "training by epochs (set train_iters)"),
    "train_label_data_paths": (None, "separate label data"),
    "valid_label_data_paths": (None, "separate label data"),
    "test_label_data_paths": (None, "separate label data"),
    "weight_by_num_documents": (False, "weighting by number of documents"),
    "weighted_sampler_alpha": (1.0, "weighting by number of documents"),
    "pack_impl": ("packed", "another packing method"),
    "dataset_impl": ("gpt2", "another dataset type"),
    "allow_chopped": (True, "dropping truncated documents"),
    "train_impl": ("normal", _ALIGNMENT),
    "train_reward_data_paths": (None, _ALIGNMENT),
    "valid_reward_data_paths": (None, _ALIGNMENT),
    "test_reward_data_paths": (None, _ALIGNMENT),
    "pos_train_data_paths": (None, _ALIGNMENT),
    "neg_train_data_paths": (None, _ALIGNMENT),
    "pos_train_label_data_paths": (None, _ALIGNMENT),
    "neg_train_label_data_paths": (None, _ALIGNMENT),
    "pos_valid_data_paths": (None, _ALIGNMENT),
    "neg_valid_data_paths": (None, _ALIGNMENT),
    "pos_valid_label_data_paths": (None, _ALIGNMENT),
    "neg_valid_label_data_paths": (None, _ALIGNMENT),
    "pos_test_data_paths": (None, _ALIGNMENT),
    "neg_test_data_paths": (None, _ALIGNMENT),
    "pos_test_label_data_paths": (None, _ALIGNMENT),
    "neg_test_label_data_paths": (None, _ALIGNMENT),
    "dpo_fp32": (True, _ALIGNMENT),
    "dpo_reference_free": (False, _ALIGNMENT),
    "dpo_beta": (0.1, _ALIGNMENT),
    "kto_fp32": (True, _ALIGNMENT),
    "kto_desirable_weight": (1.0, _ALIGNMENT),
    "kto_undesirable_weight": (1.0, _ALIGNMENT),
    "kto_beta": (0.1, _ALIGNMENT),
    "fp32_reinforce": (True, _ALIGNMENT),
    "kl_impl": ("mse", _ALIGNMENT),
    "kl_div_beta": (0.1, _ALIGNMENT),
    "reinforce_leave_one_out": (False, _ALIGNMENT),
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
    "use_comet": (None, _COMET),
    "comet_workspace": (None, _COMET),
    "comet_project": (None, _COMET),
    "comet_experiment_name": (None, _COMET),
    "comet_tags": (None, _COMET),
    "comet_others": (None, _COMET),
    "comet_experiment": (None, _COMET),
    "log_gradient_noise_scale": (False, _STATISTICS),
    "gradient_noise_scale_n_batches": (5, _STATISTICS),
    "gradient_noise_scale_cpu_offload": (False, _STATISTICS),
    "char_level_ppl": (False, _STATISTICS),
    # generation and evaluation
    "text_gen_type": (None, _GENERATION),
    "precompute_model_name": (None, _GENERATION),
    "temperature": (0.0, _GENERATION),
    "top_p": (0.0, _GENERATION),
    "top_k": (0, _GENERATION),
    "return_logits": (False, _GENERATION),
    "maximum_tokens": (64, _GENERATION),
    "prompt_end": ("\n", _GENERATION),
    "sample_input_file": (None, _GENERATION),
    "sample_output_file": ("samples.txt", _GENERATION),
    "num_samples": (1, _GENERATION),
    "recompute": (False, _GENERATION),
    "eval_results_prefix": ("", "evaluation tasks from a configuration file"),
    "eval_tasks": (None, "evaluation tasks from a configuration file"),
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

REMOVED_CHOICES: dict[str, dict[str, str]] = {
    "launcher": {
        "ssh": "this launcher has been removed; use pdsh (over ssh), slurm, or start the processes with torchrun"
        " (docs/launch.md)"
    },
}
"""Values that earlier versions accepted, with the replacement."""


def is_inert(value: Any, default: Any) -> bool:
    """Return whether the value of an unsupported key leaves its feature disabled."""
    off = value is None or value == {} or value == [] or (value is False and default is not True)
    return off or (value == default and isinstance(value, bool) == isinstance(default, bool))
