"""What to change in a run that does not fit."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from megatron_coca.config import Config, ConfigError
from megatron_coca.training.estimate.plan import Memory, estimate, fits
from megatron_coca.training.topology import Topology, effective_stage


class Change(NamedTuple):
    """Keys to set, and the bytes that the run then takes."""

    keys: str
    memory: Memory


def changes_that_fit(config: Config, gpus: int, gib: float) -> list[Change]:
    """What makes a run fit that does not: single changes, from those that cost nothing to those that cost time; where
    none suffices, two of them together.
    """
    single = list(_single_changes(config, gpus))
    pairs = [
        (f"{one} {other}", changed | more)
        for index, (one, changed) in enumerate(single)
        for other, more in single[index + 1 :]
        if not changed.keys() & more.keys()
    ]
    return _fitting(config, single, gpus, gib) or _fitting(config, pairs, gpus, gib)


def _fitting(config: Config, changes: list[tuple[str, dict[str, Any]]], gpus: int, gib: float) -> list[Change]:
    found = []
    for keys, changed in changes:
        try:
            memory = estimate(config.override(changed), gpus, 1.0, 1.0).memory
        except ConfigError:  # not for this number of GPUs or this shape
            continue
        if fits(memory, gib):
            found.append(Change(keys, memory))
    return found


def _single_changes(config: Config, gpus: int) -> Iterator[tuple[str, dict[str, Any]]]:
    section, topology = config.parallel.zero_optimization or {}, Topology.of(config.parallel, gpus)
    present = effective_stage(config, topology.data * topology.sequence)
    for stage in range(present + 1, 4) if config.parallel.model_copies == 1 else ():
        yield f"zero_optimization.stage={stage}", {"zero_optimization": {**section, "stage": stage}}
    if (config.model.loss_chunk_size or 10**9) > 1024:
        yield "loss_chunk_size=1024", {"loss_chunk_size": 1024}
    sizes = config.batch.resolve(topology.data)
    for divisor in (2, 4, 8, 16, 32):
        if sizes.micro % divisor == 0:
            batch = {
                "train_micro_batch_size_per_gpu": sizes.micro // divisor,
                "gradient_accumulation_steps": sizes.accumulation * divisor,
            }
            yield " ".join(f"{key}={value}" for key, value in batch.items()), batch
    if not config.model.checkpoint_activations:
        yield (
            "checkpoint_activations=true checkpoint_policy=selective",
            {
                "checkpoint_activations": True,
                "checkpoint_policy": "selective",
            },
        )
        yield "checkpoint_activations=true", {"checkpoint_activations": True, "checkpoint_policy": "full"}
    offload = {**section, "stage": max(1, present), "offload_optimizer": {"device": "cpu"}}
    yield "zero_optimization.offload_optimizer.device=cpu", {"zero_optimization": offload}
