"""The grid of ranks: pipeline stages, data-parallel copies, tensor-parallel and sequence-parallel ranks."""

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from megatron_coca.config import BatchSizes, Config, ConfigError, ParallelConfig


class Coordinates(NamedTuple):
    """A rank's coordinate on each axis of the grid, from 0."""

    pipe: int
    data: int
    tensor: int
    sequence: int


@dataclass(frozen=True)
class Topology:
    """Sizes of the parallel axes. Consecutive ranks differ first in their place in the sequence, then in that of the
    tensor, data and pipeline axes, as in DeepSpeed's grids.
    """

    pipe: int
    data: int
    tensor: int
    sequence: int

    @classmethod
    def of(cls, parallel: ParallelConfig, world_size: int) -> "Topology":
        """Return the grid of `world_size` ranks.

        Raises:
            ConfigError: the sizes do not divide the ranks.
        """
        pipe, tensor = max(1, parallel.pipe_parallel_size), parallel.model_parallel_size
        sequence = parallel.sequence_parallel_size
        ranks = pipe * tensor * sequence
        if world_size % ranks:
            raise ConfigError(
                f"pipe_parallel_size {pipe} x model_parallel_size {tensor} x sequence_parallel_size {sequence} = "
                f"{ranks} does not divide {world_size} processes; start a multiple of {ranks} (num_gpus), or lower one"
                " of them"
            )
        return cls(pipe, world_size // ranks, tensor, sequence)

    @property
    def world_size(self) -> int:
        """Ranks in the grid."""
        return self.pipe * self.data * self.tensor * self.sequence

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of `rank`."""
        rest, sequence = divmod(rank, self.sequence)
        rest, tensor = divmod(rest, self.tensor)
        pipe, data = divmod(rest, self.data)
        return Coordinates(pipe, data, tensor, sequence)

    def random_stream(self, rank: int) -> int:
        """Return the random stream's index of `rank`; tensor-parallel ranks share one, for equal dropout masks."""
        pipe, data, _, sequence = self.coordinates(rank)
        return (pipe * self.data + data) * self.sequence + sequence

    def layout(self) -> dict[str, int]:
        """Return the sizes by name, for a checkpoint's metadata."""
        return asdict(self)


def effective_stage(config: Config, ranks: int) -> int:
    """Return the ZeRO stage that runs on `ranks` (data times sequence ranks); it changes results by rounding at most.

    In half precision the optimizer keeps float32 copies of the weights in any case, and stage 1 divides them among the
    ranks, so stage 0 runs as 1. Stage 0 also runs as 1 if several ranks hold one model (pipeline, tensor), because only
    DeepSpeed's ZeRO optimizers compute norms over all of them. On one rank in float32, stages 1 and 2 run as 0, without
    their buffers and copies, unless they offload. With bfloat16 and `grad_accum_dtype: fp32`, stage 1 runs as 2.
    """
    stage = config.parallel.stage
    if config.precision.dtype != "fp32" or config.parallel.model_copies > 1:
        # Stage 1 would sum bfloat16's gradients in float32 with an optimizer that checkpoints do not support.
        in_float32 = config.parallel.accumulates_in_fp32 and config.precision.dtype == "bf16"
        return max(stage, 2 if in_float32 else 1)
    offloads = "offload_optimizer" in (config.parallel.zero_optimization or {})
    return 0 if ranks == 1 and stage < 3 and not offloads else stage


MANY_MICRO_BATCHES = 16
"""With this many, the rounding of a bfloat16 sum becomes larger than that of its terms (docs/training.md)."""


def rounded_sum(config: Config, sizes: BatchSizes) -> str | None:
    """Return a warning if a step sums the gradients of many micro-batches in bfloat16, else None."""
    parallel = config.parallel
    if config.precision.dtype != "bf16" or parallel.accumulates_in_fp32 or sizes.accumulation < MANY_MICRO_BATCHES:
        return None
    remedies = ["a larger train_micro_batch_size_per_gpu", "more data-parallel processes"]
    remedies += ["data_types={grad_accum_dtype: fp32}"] if parallel.pipe_parallel_size <= 1 else []
    return (
        f"gradient_accumulation_steps: the gradients of {sizes.accumulation} micro-batches are summed in bfloat16, "
        f"which loses small terms; set {' or '.join(reversed(remedies))} (docs/training.md)"
    )


REDUCE_BUCKET = 30_000_000
REDUCE_BUCKET_PER_RANK = 1_000_000
LARGEST_REDUCE_BUCKET = 200_000_000
"""Number of gradients that are reduced at a time: at least 30M (60 MB in half precision), and 1M for each rank, so that
messages do not become latency-bound, as in Megatron-Core's DistributedDataParallelConfig (which starts at 40M). At most
200M, because a buffer has this size. The last bucket is reduced only after the backward pass. DeepSpeed's default of
500M is the whole gradient of most models.
"""
PREFETCHED_PARAMETERS = 50_000_000
"""Weights that ZeRO 3 gathers before they are used; DeepSpeed's default."""


def zero_section(config: Config, ranks: int, cuda: bool) -> dict[str, Any]:
    """Return DeepSpeed's `zero_optimization` for `ranks` (data times sequence) ranks: the configured keys, and a value
    for each that decides how communication runs beside computation.

    On CUDA, ZeRO 1 and 2 reduce gradients on a stream of their own during the backward pass, in two alternating
    buffers. They do not if DeepSpeed does not support it (pipeline stages), or copies gradients to the host between the
    reductions (offload). The CPU has no streams. ZeRO 3 always gathers and reduces in streams.
    """
    given, stage = config.parallel.zero_optimization or {}, effective_stage(config, ranks)
    pipelined = config.parallel.pipe_parallel_size > 1
    overlaps = cuda and ranks > 1 and not pipelined and "offload_optimizer" not in given
    bucket = max(REDUCE_BUCKET, REDUCE_BUCKET_PER_RANK * ranks)
    defaults = {
        "overlap_comm": stage == 3 or overlaps,
        "reduce_bucket_size": min(bucket, LARGEST_REDUCE_BUCKET),
        "stage3_prefetch_bucket_size": PREFETCHED_PARAMETERS,
    }
    return defaults | given | {"stage": stage}
