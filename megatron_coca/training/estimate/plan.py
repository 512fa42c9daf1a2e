"""What a run will take: memory of a GPU by part, and time, before anything is started. Knows no DeepSpeed."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megatron_coca.config import BatchSizes, Config
from megatron_coca.model.cost import Flops, ParameterCount, flops_per_token, parameter_count
from megatron_coca.model.memory import activations, loss_bytes
from megatron_coca.training.estimate.states import stage_parameters, stage_trained, states_bytes
from megatron_coca.training.topology import Topology

GIB = 2.0**30
RESERVE = 0.06
"""Share of a GPU's memory for what no formula counts: fragments of the allocator, and work space of libraries."""
CONTEXT = 1.5 * GIB
"""CUDA's context with PyTorch's kernels, and NCCL's buffers."""


class Gpu(NamedTuple):
    """A GPU by the name that PyTorch gives it, and the memory that it leaves to programs, in GiB."""

    device: str
    memory: float


GPUS: dict[str, Gpu] = {
    "A100-80": Gpu("NVIDIA A100-SXM4-80GB", 79.2),
    "A100-40": Gpu("NVIDIA A100-SXM4-40GB", 39.4),
    "H100": Gpu("NVIDIA H100 80GB HBM3", 79.2),
    "H100-PCIe": Gpu("NVIDIA H100 PCIe", 79.2),
    "H200": Gpu("NVIDIA H200", 139.8),
    "B200": Gpu("NVIDIA B200", 178.4),
    "V100-32": Gpu("Tesla V100-SXM2-32GB", 31.7),
    "V100-16": Gpu("Tesla V100-SXM2-16GB", 15.8),
    "L40S": Gpu("NVIDIA L40S", 44.4),
    "A6000": Gpu("NVIDIA RTX A6000", 47.5),
    "4090": Gpu("NVIDIA GeForce RTX 4090", 23.5),
}


@dataclass(frozen=True)
class Memory:
    """Bytes at the peak of a step on the rank that holds most, and on the host for what is offloaded.

    Attributes:
        weights: in the training format, and what ZeRO 3 gathers of other ranks' weights while it computes.
        gradients: of all weights that are trained, or of this rank's part (ZeRO 2, 3).
        optimizer: float32 copies of the weights, where ZeRO keeps them, and the optimizer's moments.
        buffers: of gradients on their way to other ranks.
        activations: that the backward pass waits for.
        loss: logits, and the gradients formed with them.
        step: float32 gradients of this rank's part while the optimizer steps, when the activations are gone.
        context: CUDA, kernels and NCCL.
        host: on the machine's own memory, for this rank.
    """

    weights: float
    gradients: float
    optimizer: float
    buffers: float
    activations: float
    loss: float
    step: float
    context: float
    host: float = 0.0

    @property
    def total(self) -> float:
        """On the GPU, without the reserve."""
        lasting = self.weights + self.gradients + self.optimizer + self.buffers + self.context
        return lasting + max(self.activations + self.loss, self.step)


@dataclass(frozen=True)
class Estimate:
    """A run on `topology.world_size` GPUs. Times are in seconds and None where train_iters is not set."""

    parameters: ParameterCount
    flops: Flops
    topology: Topology
    sizes: BatchSizes
    memory: Memory
    tokens_per_step: int
    total_tokens: int | None
    tokens_per_second: float
    seconds: float | None


def estimate(config: Config, gpus: int, peak: float, mfu: float) -> Estimate:
    """What the run takes on `gpus` GPUs of `peak` FLOP/s of which the share `mfu` is used.

    Raises:
        ConfigError: the processes or the batch cannot be divided so, or vocab_size is not known.
    """
    topology = Topology.of(config.parallel, gpus)
    sizes = config.batch.resolve(topology.data)
    flops = flops_per_token(config)
    rate = gpus * peak * mfu / flops.model
    steps, tokens = config.schedule.train_iters, sizes.total * config.model.seq_length
    return Estimate(
        parameters=parameter_count(config),
        flops=flops,
        topology=topology,
        sizes=sizes,
        memory=max(_stages(config, topology, sizes), key=lambda memory: memory.total),
        tokens_per_step=tokens,
        total_tokens=None if steps is None else steps * tokens,
        tokens_per_second=rate,
        seconds=None if steps is None else steps * tokens / rate,
    )


def fits(memory: Memory, gib: float) -> bool:
    """Whether a GPU of `gib` GiB has room for it and for the reserve."""
    return memory.total <= gib * GIB * (1 - RESERVE)


def _stages(config: Config, topology: Topology, sizes: BatchSizes) -> Iterator[Memory]:
    trained = stage_trained(config, topology)
    for stage, (numbers, blocks) in enumerate(stage_parameters(config, topology)):
        states = states_bytes(config, topology, numbers, trained[stage])
        kept, working, ends = activations(config, sizes.micro, topology.tensor, topology.sequence)
        # One forward, one backward: the first stage is ahead of the last by as many micro batches as there are stages.
        waiting = min(topology.pipe - stage, sizes.accumulation)
        last = stage == topology.pipe - 1
        loss = loss_bytes(config, sizes.micro, topology.tensor, topology.sequence) if last else 0.0
        yield Memory(
            weights=states.weights,
            gradients=states.gradients,
            optimizer=states.optimizer,
            buffers=states.buffers,
            activations=waiting * (kept * blocks + ends) + working,
            loss=loss,
            step=states.step,
            context=CONTEXT,
            host=states.host,
        )
