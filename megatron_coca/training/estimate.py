"""What a run will take, before anything is started: memory of a GPU by part, and time. Knows no DeepSpeed."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_coca.config import BatchSizes, Config, ConfigError
from megatron_coca.model.cost import (
    BYTES,
    Flops,
    ParameterCount,
    activations,
    flops_per_token,
    loss_bytes,
    norm_parameters,
    norms_per_block,
    parameter_count,
    trained_count,
)
from megatron_coca.training.topology import Topology, effective_stage

STATES = {"Adam": 2, "AdamW": 2, "cpu_adam": 2, "sgd": 0}
"""Float32 numbers that an optimizer keeps for every parameter."""

BUCKET = 5e8
LIVE_PARAMETERS = 1e9
PERSISTENT = 1e5
"""DeepSpeed's defaults: numbers in a bucket of gradients; in ZeRO 3, parameters gathered at a time, and the size below
which a parameter is never divided.
"""


class States(NamedTuple):
    """Bytes of one rank that do not depend on the batch; see `Memory`. `step` is what the optimizer needs while it steps,
    `resident` what lies on the GPU between two steps.
    """

    weights: float
    gradients: float
    optimizer: float
    buffers: float
    step: float
    host: float
    resident: float


def states_bytes(config: Config, topology: Topology, numbers: int, trained: int | None = None) -> States:
    """Weights of `numbers` parameters, gradients and optimizer states of the `trained` ones (None: all), divided as the
    ZeRO stage says.
    """
    trained = numbers if trained is None else trained
    ranks = topology.data * topology.sequence
    stage, size = effective_stage(config, ranks), BYTES[config.precision.dtype]
    section = config.parallel.zero_optimization or {}
    share = {True: trained / ranks, False: float(trained)}
    own_weights = size * numbers / (ranks if stage == 3 else 1)
    copies = 4 if stage else 0  # in float32 too: DeepSpeed steps on a flat copy
    optimizer = (copies + 4 * STATES[config.optimizer.type]) * share[stage >= 1]
    gradients = size * share[stage >= 2]
    gathered = size * min(numbers, _number(section, "stage3_max_live_parameters", LIVE_PARAMETERS)) if stage == 3 else 0
    bucket = (
        _number(section, "reduce_bucket_size", BUCKET) if stage and section.get("contiguous_gradients", True) else 0
    )
    doubled = 2 if section.get("overlap_comm", stage == 3) and stage in (1, 2) else 1
    off_optimizer = _is_offloaded(section, "offload_optimizer")
    off_weights = stage == 3 and _is_offloaded(section, "offload_param")
    host = optimizer * off_optimizer + own_weights * off_weights
    weights = own_weights * (not off_weights)
    return States(
        weights=weights + (gathered if ranks > 1 or off_weights else 0.0),
        gradients=gradients,
        optimizer=optimizer * (not off_optimizer),
        buffers=bucket * size * doubled,
        step=4 * share[True] * (not off_optimizer) if stage else 0.0,
        host=host,
        resident=weights + optimizer * (not off_optimizer) + (gradients if stage == 3 else 0.0),
    )


def _number(section: dict[str, Any], key: str, default: float) -> float:
    value = section.get(key, default)
    return float(value) if isinstance(value, int | float) else default


def _is_offloaded(section: dict[str, Any], key: str) -> bool:
    part = section.get(key)
    return isinstance(part, dict) and part.get("device") in ("cpu", "nvme")


def stage_parameters(config: Config, topology: Topology) -> list[tuple[int, int]]:
    """For every pipeline stage the numbers in its weights on one tensor rank, and how many blocks it has.

    Blocks are shared out evenly; the first stage has the embedding too, the last one the head, or with tied weights a
    copy of the embedding.
    """
    model, pipe = config.model, topology.pipe
    blocks = [model.num_layers // pipe + (stage < model.num_layers % pipe) for stage in range(pipe)]
    # Biases of the projections into the residual stream are whole on every tensor rank.
    whole = model.hidden_size * (model.use_bias_in_attn_linear + model.use_bias_in_mlp)
    return list(zip(_numbers(config, topology, parameter_count(config), whole, blocks), blocks, strict=True))


def stage_trained(config: Config, topology: Topology) -> list[int]:
    """For every pipeline stage the numbers on one tensor rank that are trained."""
    model, trains = config.model, config.optimizer.trains
    blocks = [count for _, count in stage_parameters(config, topology)]
    attention = model.use_bias_in_attn_linear and trains("attention_output")
    whole = model.hidden_size * (attention + (model.use_bias_in_mlp and trains("mlp")))
    return _numbers(config, topology, trained_count(config), whole, blocks)


def _numbers(config: Config, topology: Topology, count: ParameterCount, whole: int, blocks: list[int]) -> list[int]:
    """Of `count`, those of every stage on one tensor rank; `whole` of each block's are on all of these."""
    model = config.model
    norm = norm_parameters(model) if count.norms else 0
    divided = (count.attention + count.mlp) // model.num_layers - whole
    block = divided // topology.tensor + whole + norms_per_block(model) * norm
    numbers = [block * each for each in blocks]
    numbers[0] += count.embedding + count.position
    numbers[-1] += norm + count.head
    if topology.pipe > 1 and not model.no_weight_tying:
        numbers[-1] += count.embedding
    return numbers


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
