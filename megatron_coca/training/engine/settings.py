"""What DeepSpeed is told."""

from collections.abc import Mapping
from typing import Any

from megatron_coca.config import BatchSizes, Config, ConfigError
from megatron_coca.training.topology import effective_stage

RESERVED = frozenset(
    {
        "train_batch_size",
        "tensor_parallel",
        "sequence_parallel_size",
        "data_parallel_size",
        "bf16",
        "bfloat16",
        "fp16",
        "torch_autocast",
        "optimizer",
        "scheduler",
        "checkpoint",
    }
)
"""Keys of DeepSpeed that keys of our own stand for. The total batch is left to DeepSpeed's arithmetic, which takes
tensor ranks for ranks that read samples of their own in some places and not in others, and uses the product for
nothing.
"""


def deepspeed_config(config: Config, sizes: BatchSizes, division: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """DeepSpeed's own configuration. Every value that matters is spelled out, so that its defaults never decide a
    result. `division` is the section of what divides the model among ranks, if anything does.
    """
    data = sizes.total // (sizes.micro * sizes.accumulation)
    stage = effective_stage(config, data * config.parallel.sequence_parallel_size)
    section: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": sizes.micro,
        "gradient_accumulation_steps": sizes.accumulation,
        # Without ZeRO the engine clips: it needs the norm in any case, which DeepSpeed would compute again.
        "gradient_clipping": config.optimizer.gradient_clipping if stage else 0.0,
        "zero_optimization": {**(config.parallel.zero_optimization or {}), "stage": stage},
        "zero_allow_untested_optimizer": True,
        # PyTorch's fused AdamW serves offloaded states too; DeepSpeed's own needs a compiler on every host.
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**62,
        **(division or {}),
    }
    if config.precision.dtype == "bf16":
        section["bf16"] = {**(config.precision.bf16 or {}), "enabled": True}
    if config.precision.dtype == "fp16":
        section["fp16"] = {**(config.precision.fp16 or {}), "enabled": True}
    extra = config.parallel.deepspeed_extra_args or {}
    taken = sorted((section.keys() | RESERVED) & extra.keys())
    if taken:
        raise ConfigError(
            [f"deepspeed_extra_args: {', '.join(taken)}: set by keys of their own; use those (docs/config.md)"]
        )
    return section | extra
