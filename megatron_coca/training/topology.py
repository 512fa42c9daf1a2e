"""Which rank does what: the grid of pipeline stages, data-parallel copies, tensor and sequence ranks."""

from dataclasses import dataclass
from typing import NamedTuple

from megatron_coca.config import Config, ConfigError, ParallelConfig


class Coordinates(NamedTuple):
    """A rank's place on each axis of the grid, from 0."""

    pipe: int
    data: int
    tensor: int
    sequence: int


@dataclass(frozen=True)
class Topology:
    """Sizes of the axes. Ranks count along the sequence axis first, then tensor, data and pipeline stages, as
    DeepSpeed's own grids do.
    """

    pipe: int
    data: int
    tensor: int
    sequence: int

    @classmethod
    def of(cls, parallel: ParallelConfig, world_size: int) -> "Topology":
        """The grid for `world_size` ranks.

        Raises:
            ConfigError: the ranks cannot be divided so.
        """
        pipe = max(1, parallel.pipe_parallel_size)
        copies = pipe * parallel.model_parallel_size * parallel.sequence_parallel_size
        if world_size % copies:
            raise ConfigError(
                [
                    f"pipe_parallel_size {pipe} x model_parallel_size {parallel.model_parallel_size} x "
                    f"sequence_parallel_size {parallel.sequence_parallel_size} = {copies} does not divide "
                    f"{world_size} processes; start a multiple of {copies} (num_gpus), or lower one of them"
                ]
            )
        return cls(pipe, world_size // copies, parallel.model_parallel_size, parallel.sequence_parallel_size)

    @property
    def world_size(self) -> int:
        """Ranks in the grid."""
        return self.pipe * self.data * self.tensor * self.sequence

    def coordinates(self, rank: int) -> Coordinates:
        """The place of `rank`."""
        rest, sequence = divmod(rank, self.sequence)
        rest, tensor = divmod(rest, self.tensor)
        pipe, data = divmod(rest, self.data)
        return Coordinates(pipe, data, tensor, sequence)

    def random_stream(self, rank: int) -> int:
        """Which random numbers `rank` draws: tensor ranks share what acts on the activations that they share."""
        place = self.coordinates(rank)
        return (place.pipe * self.data + place.data) * self.sequence + place.sequence

    def layout(self) -> dict[str, int]:
        """The sizes by name, for a checkpoint's records."""
        return {"pipe": self.pipe, "data": self.data, "tensor": self.tensor, "sequence": self.sequence}


def effective_stage(config: Config, ranks: int) -> int:
    """The ZeRO stage that is run where `ranks` (data times sequence ranks) share its work; it changes no result beyond
    the last digits.

    In half precision the optimizer keeps float32 copies of the weights in any case; stage 1 divides them among the
    ranks, so stage 0 runs as stage 1 there. So it does where several ranks hold one model (pipeline, tensor): norms
    over all of them are taken in DeepSpeed's ZeRO optimizers. One rank has nothing to divide: in float32 stages 1 and 2
    run as 0, without their buffers and copies, unless they offload.
    """
    stage = config.parallel.stage
    if config.precision.dtype != "fp32" or config.parallel.model_copies > 1:
        return max(stage, 1)
    offloads = "offload_optimizer" in (config.parallel.zero_optimization or {})
    return 0 if ranks == 1 and stage < 3 and not offloads else stage
