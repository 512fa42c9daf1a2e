"""The division that a configuration asks for."""

from collections.abc import Callable

from megatron_coca.config import Config
from megatron_coca.training.engine.division import Division
from megatron_coca.training.engine.sequence import SequenceDivision
from megatron_coca.training.engine.tensor import TensorDivision

DIVISIONS: dict[str, Callable[[Config, int], Division]] = {
    "model_parallel_size": lambda config, size: TensorDivision(
        config.model, size, config.optimizer.trains("positions")
    ),
    "sequence_parallel_size": lambda config, size: SequenceDivision(size, config.parallel.stage),
}
"""By the key that gives the number of ranks; the configuration's checks let at most one be above 1."""


def division(config: Config) -> Division:
    """How ranks share the model."""
    sizes = {key: getattr(config.parallel, key) for key in DIVISIONS}
    return next((DIVISIONS[key](config, size) for key, size in sizes.items() if size > 1), Division())
