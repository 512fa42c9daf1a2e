"""What DeepSpeed is told."""

from typing import Any

from megatron_coca.config import BatchSizes, Config, ConfigError


def effective_stage(config: Config) -> int:
    """The ZeRO stage that DeepSpeed runs.

    In half precision the optimizer keeps float32 copies of the weights in any case; stage 1 divides them among the
    ranks and changes no number, so stage 0 runs as stage 1 there. So it does where several ranks hold one model
    (pipeline, tensor): norms over all of them are taken in DeepSpeed's ZeRO optimizers.
    """
    alone = config.precision.dtype == "fp32" and config.parallel.model_copies == 1
    return max(config.parallel.stage, 0 if alone else 1)


def deepspeed_config(config: Config, sizes: BatchSizes) -> dict[str, Any]:
    """DeepSpeed's own configuration. Every value that matters is spelled out, so that its defaults never decide a
    result.
    """
    section: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": sizes.micro,
        "gradient_accumulation_steps": sizes.accumulation,
        "train_batch_size": sizes.total,
        # Without ZeRO the engine clips: it needs the norm in any case, which DeepSpeed would compute again.
        "gradient_clipping": config.optimizer.gradient_clipping if effective_stage(config) else 0.0,
        "zero_optimization": {**(config.parallel.zero_optimization or {}), "stage": effective_stage(config)},
        "zero_allow_untested_optimizer": True,
        # PyTorch's fused AdamW serves offloaded states too; DeepSpeed's own needs a compiler on every host.
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**62,
    }
    if config.precision.dtype == "bf16":
        section["bf16"] = {**(config.precision.bf16 or {}), "enabled": True}
    if config.precision.dtype == "fp16":
        section["fp16"] = {**(config.precision.fp16 or {}), "enabled": True}
    extra = config.parallel.deepspeed_extra_args or {}
    taken = sorted(section.keys() & extra.keys())
    if taken:
        raise ConfigError(
            [f"deepspeed_extra_args: {', '.join(taken)}: set by keys of their own; use those (docs/config.md)"]
        )
    return section | extra
