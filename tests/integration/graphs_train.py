"""`megatron-coca train` on the CPU with imitated CUDA graphs. At its end it prints the number of replays."""

from collections.abc import Sequence

from megatron_coca.commands import train
from megatron_coca.config import Config
from tests.imitated_graphs import Replays

REPLAYS = "replays of graphs: "


def main(arguments: Sequence[str]) -> int:
    """Train, and return the exit status."""
    replays = Replays()
    Config.gpu_keys = property(lambda config: ())  # type: ignore[assignment, method-assign]
    try:
        return train.main(arguments)
    finally:
        print(f"{REPLAYS}{replays.count}")
