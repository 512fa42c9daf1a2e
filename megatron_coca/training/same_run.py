"""Which keys make a run another run: what may change from launch to launch, and what may not."""

from megatron_coca.checkpoints.compare import differing_keys
from megatron_coca.config import Config
from megatron_coca.training.optimizer import OPTIMIZERS

FREE_GROUPS = frozenset({"schedule", "data", "batch", "parallel", "checkpoint", "logging", "launch", "faults"})
FREE_KEYS = frozenset(
    {
        "attention_backend",
        "operand_kernel",
        "checkpoint_activations",
        "checkpoint_num_layers",
        "checkpoint_policy",
        "loss_chunk_size",
        "torch_compile",
        "optimizer.params.lr",
    }
)
"""What may change when a run is resumed. Of these, data and batch are checked by what they amount to (meta.json); how
the work is divided among processes is free, because the saved state is not divided by it.
"""
BY_MEANING = frozenset({"optimizer.type"})
"""Keys with several words for one thing; what they amount to must be the same."""


def differing_run(saved: Config, wanted: Config) -> list[str]:
    """A line for every key in which a run that is to go on differs from the one that was saved."""
    return differing_keys(saved, wanted, FREE_KEYS | BY_MEANING, FREE_GROUPS) + _differing_optimizer(saved, wanted)


def _differing_optimizer(saved: Config, wanted: Config) -> list[str]:
    before, after = saved.optimizer.type, wanted.optimizer.type
    same = OPTIMIZERS[before] is OPTIMIZERS[after]
    return [] if same else [f"optimizer.type (saved {before!r}, now {after!r})"]
