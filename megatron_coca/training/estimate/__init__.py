"""What a run will take, before anything is started: memory of a GPU by part, and time. Knows no DeepSpeed."""

from megatron_coca.training.estimate.changes import Change, changes_that_fit
from megatron_coca.training.estimate.plan import GIB, GPUS, RESERVE, Estimate, Gpu, Memory, estimate, fits

__all__ = ["GIB", "GPUS", "RESERVE", "Change", "Estimate", "Gpu", "Memory", "changes_that_fit", "estimate", "fits"]
