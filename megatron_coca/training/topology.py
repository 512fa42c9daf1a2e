"""The grid of ranks for all kinds of parallelism, and the ZeRO settings that depend on it."""

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from megatron_coca.config import BatchSizes, Config, ConfigError, ParallelConfig


class Coordinates(NamedTuple):
    """A rank's coordinates on the axes of the grid, from 0. `sequence` counts all ranks that share a sequence."""

    pipe: int
    data: int
    tensor: int
    sequence: int


@dataclass(frozen=True)
class Topology:
    """Sizes of the parallel axes. As in DeepSpeed's grids, the sequence coordinate varies fastest with the rank,
    followed by the tensor, data and pipeline coordinates. In attention, `sequence` consecutive ranks divide the
    heads of a sequence, and `sequence` times `context` ranks divide its tokens.
    """

    pipe: int
    data: int
    tensor: int
    sequence: int
    context: int = 1

    @classmethod
    def of(cls, parallel: ParallelConfig, world_size: int) -> "Topology":
        """Return the grid of `world_size` ranks.

        Raises:
            ConfigError: the product of the sizes does not divide the number of ranks.
        """
        pipe, tensor = max(1, parallel.pipe_parallel_size), parallel.model_parallel_size
        sequence, context = parallel.sequence_parallel_size, parallel.context_parallel_size
        ranks = pipe * tensor * sequence * context
        if world_size % ranks:
            ring = f" x context_parallel_size {context}" if context > 1 else ""
            raise ConfigError(
                f"pipe_parallel_size {pipe} x model_parallel_size {tensor} x sequence_parallel_size {sequence}"
                f"{ring} = {ranks} does not divide {world_size} processes; start a multiple of {ranks} processes"
                " (num_gpus), or lower one of these sizes"
            )
        return cls(pipe, world_size // ranks, tensor, sequence, context)

    @property
    def sequence_ranks(self) -> int:
        """Number of ranks that share a sequence."""
        return self.sequence * self.context

    @property
    def world_size(self) -> int:
        """Number of ranks in the grid."""
        return self.pipe * self.data * self.tensor * self.sequence_ranks

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of `rank`."""
        rest, sequence = divmod(rank, self.sequence_ranks)
        rest, tensor = divmod(rest, self.tensor)
        pipe, data = divmod(rest, self.data)
        return Coordinates(pipe, data, tensor, sequence)

    def random_stream(self, rank: int) -> int:
        """Return the index of the random stream of `rank`. Tensor-parallel ranks share a stream, so that they draw the
        same dropout masks.
        """
        pipe, data, _, sequence = self.coordinates(rank)
        return (pipe * self.data + data) * self.sequence_ranks + sequence

    def layout(self) -> dict[str, int]:
        """Return the sizes by name, for the metadata of a checkpoint. `context` is missing if it is 1."""
        sizes = asdict(self)
        return sizes if self.context > 1 else {name: size for name, size in sizes.items() if name != "context"}


def effective_stage(config: Config, ranks: int) -> int:
    """Return the effective ZeRO stage on `ranks` (data times sequence) ranks. It may differ from the configured stage,
    but results then differ at most by rounding.

    Stage 0 runs as stage 1 in half precision, because the optimizer keeps float32 copies of the weights anyway, and
    stage 1 divides them among the ranks. It also runs as stage 1 if several ranks share a model (pipeline or tensor
    parallelism), because only DeepSpeed's ZeRO optimizers compute norms over all of these ranks. On a single rank in
    float32, stages 1 and 2 without offloading run as stage 0, which needs no buffers and copies. With bfloat16 and
    `grad_accum_dtype: fp32`, stage 1 runs as stage 2.
    """
    stage = config.parallel.stage
    if config.precision.dtype != "fp32" or config.parallel.model_copies > 1:
        # To sum bfloat16 gradients in float32, stage 1 would use an optimizer that checkpoints do not support.
        in_float32 = config.parallel.accumulates_in_fp32 and config.precision.dtype == "bf16"
        return max(stage, 2 if in_float32 else 1)
    offloads = "offload_optimizer" in (config.parallel.zero_optimization or {})
    return 0 if ranks == 1 and stage < 3 and not offloads else stage


MANY_MICRO_BATCHES = 16
"""From this number of micro-batches on, the rounding error of a bfloat16 sum of gradients exceeds that of its terms
(docs/training.md).
"""


def rounded_sum(config: Config, sizes: BatchSizes) -> str | None:
    """Return a warning if a step sums the gradients of many micro-batches in bfloat16, otherwise None."""
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
"""Limits of the number of gradients that are reduced at a time. The number is at least 30M (60 MB in half precision)
and at least 1M per rank, so that messages are not latency-bound, as in Megatron-Core's DistributedDataParallelConfig
(which starts at 40M). It is at most 200M, because each buffer has this size and the last bucket is reduced only after
the backward pass. DeepSpeed's default of 500M is more than all gradients of most models.
"""
PREFETCHED_PARAMETERS = 50_000_000
"""Number of parameters that ZeRO 3 gathers ahead of their use; DeepSpeed's default."""


def zero_section(config: Config, ranks: int, cuda: bool) -> dict[str, Any]:
    """Return DeepSpeed's `zero_optimization` section for `ranks` (data times sequence) ranks: the configured keys, plus
    explicit values for the keys that determine how communication overlaps with computation.

    On CUDA, ZeRO 1 and 2 reduce gradients on a separate stream during the backward pass, in two alternating buffers.
    This is off with pipeline stages, because DeepSpeed does not support it, and with offloading, because gradients are
    copied to the host between reductions. The CPU has no streams. ZeRO 3 always gathers and reduces on separate
    streams.

    One rank reduces nothing, so its gradients are not copied to a buffer first (docs/speed.md, "On an H100").
    """
    given, stage = config.parallel.zero_optimization or {}, effective_stage(config, ranks)
    pipelined = config.parallel.pipe_parallel_size > 1
    overlaps = cuda and ranks > 1 and not pipelined and "offload_optimizer" not in given
    bucket = max(REDUCE_BUCKET, REDUCE_BUCKET_PER_RANK * ranks)
    defaults = {
        "overlap_comm": stage == 3 or overlaps,
        "contiguous_gradients": ranks > 1,
        "reduce_bucket_size": min(bucket, LARGEST_REDUCE_BUCKET),
        "stage3_prefetch_bucket_size": PREFETCHED_PARAMETERS,
    }
    return defaults | given | {"stage": stage}
