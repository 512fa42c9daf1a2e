"""Estimate of a run without starting it: memory of a GPU by part, and time. Does not import DeepSpeed."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_coca.config import BatchSizes, Config
from megatron_coca.config.model import GAU
from megatron_coca.model.cost import (
    BYTES,
    Flops,
    ParameterCount,
    activations,
    flops_per_token,
    loss_bytes,
    norm_parameters,
    parameter_count,
    trained_count,
)
from megatron_coca.training.topology import Topology, zero_section

STATES = {"Adam": 2, "AdamW": 2, "cpu_adam": 2, "sgd": 0, "lion": 1}
"""Float32 moments that an optimizer keeps per parameter."""

LIVE_PARAMETERS = 1e9
"""DeepSpeed's default: parameters that ZeRO 3 gathers at a time."""

GIB = 2.0**30
RESERVE = 0.06
"""Share of a GPU's memory that no formula counts: fragmentation of the allocator, and workspaces of libraries."""
CONTEXT = 1.5 * GIB
"""CUDA's context with PyTorch's kernels, and NCCL's buffers."""


@dataclass(frozen=True)
class Memory:
    """Bytes at the peak of a step, on the rank that needs the most. `host` is CPU memory; the others are on its GPU.

    Attributes:
        weights: in the training dtype, and the weights of other ranks that ZeRO 3 gathers.
        gradients: of all trained weights, or of this rank's partition (ZeRO 2, 3), in the training dtype or, with
            `grad_accum_dtype: fp32`, in float32.
        optimizer: moments, and with ZeRO float32 copies of the weights.
        buffers: gradient buckets in communication.
        activations: saved for the backward pass.
        loss: logits and their gradients.
        step: float32 gradients of this rank's partition in the optimizer step, when the activations are freed.
        context: CUDA, kernels and NCCL.
        host: CPU memory for this rank.
    """

    weights: float
    gradients: float
    optimizer: float
    buffers: float
    activations: float
    loss: float
    step: float
    context: float
    host: float

    @property
    def total(self) -> float:
        """Bytes on the GPU, without the reserve."""
        constant = self.weights + self.gradients + self.optimizer + self.buffers + self.context
        return constant + max(self.activations + self.loss, self.step)


def states_bytes(config: Config, topology: Topology, numbers: int, trained: int | None = None) -> Memory:
    """Return the memory of a rank without activations and loss: weights of `numbers` parameters, and gradients and
    optimizer states of the `trained` ones (None: all), partitioned by the ZeRO stage.
    """
    trained = numbers if trained is None else trained
    ranks = topology.data * topology.sequence
    section, size = zero_section(config, ranks, cuda=True), BYTES[config.precision.dtype]
    stage = section["stage"]

    def is_offloaded(key: str) -> bool:
        offload = section.get(key)
        return isinstance(offload, dict) and offload.get("device") in ("cpu", "nvme")

    own_weights = size * numbers / (ranks if stage == 3 else 1)
    master_bytes = 4 if stage else 0  # float32 too: ZeRO steps on a flat copy
    optimizer = (master_bytes + 4 * STATES[config.optimizer.type]) * (trained / ranks if stage else trained)
    summed = max(size, 4) if config.parallel.accumulates_in_fp32 else size
    gradients = summed * (trained / ranks if stage >= 2 else trained)
    step = 4 * trained / ranks if stage else 0.0
    bucket = float(section["reduce_bucket_size"]) if stage and section.get("contiguous_gradients", True) else 0
    buckets = 2 if section["overlap_comm"] and stage in (1, 2) else 1
    weights, host = own_weights, 0.0
    offloads_weights = stage == 3 and is_offloaded("offload_param")
    if offloads_weights:
        weights, host = 0.0, own_weights
    if is_offloaded("offload_optimizer"):
        host += optimizer
        optimizer = step = 0.0
    gathered = 0.0
    if stage == 3 and (ranks > 1 or offloads_weights):
        gathered = size * min(numbers, float(section.get("stage3_max_live_parameters", LIVE_PARAMETERS)))
    return Memory(
        weights=weights + gathered,
        gradients=gradients,
        optimizer=optimizer,
        buffers=bucket * size * buckets,
        activations=0.0,
        loss=0.0,
        step=step,
        context=CONTEXT,
        host=host,
    )


def stage_parameters(config: Config, topology: Topology) -> list[tuple[int, int]]:
    """Return for every pipeline stage its parameters on one tensor rank, and its number of blocks.

    Blocks are divided evenly; the first stage has the embedding too, the last one the head, or with tied weights a
    copy of the embedding.
    """
    model, pipe = config.model, topology.pipe
    blocks = [model.num_layers // pipe + (stage < model.num_layers % pipe) for stage in range(pipe)]
    # Biases of the projections into the residual stream are replicated on every tensor rank.
    replicated = model.hidden_size * (model.use_bias_in_attn_linear + model.use_bias_in_mlp)
    numbers = _stage_numbers(config, topology, parameter_count(config), replicated, blocks)
    return list(zip(numbers, blocks, strict=True))


def stage_trained(config: Config, topology: Topology) -> list[int]:
    """Return for every pipeline stage the trained parameters on one tensor rank."""
    model, trains = config.model, config.optimizer.trains
    blocks = [count for _, count in stage_parameters(config, topology)]
    attention = model.use_bias_in_attn_linear and trains("attention_output")
    replicated = model.hidden_size * (attention + (model.use_bias_in_mlp and trains("mlp")))
    return _stage_numbers(config, topology, trained_count(config), replicated, blocks)


def _stage_numbers(
    config: Config, topology: Topology, count: ParameterCount, replicated: int, blocks: list[int]
) -> list[int]:
    """Divide `count` over stages and tensor ranks; each block has `replicated` parameters on all tensor ranks."""
    model = config.model
    if GAU in model.layer_names:  # one pipeline stage and one tensor rank: nothing is divided
        return [count.total]
    norm = norm_parameters(model) if count.norms else 0
    divided = (count.attention + count.mlp) // model.num_layers - replicated
    of_embedding = model.use_embedding_norm * norm
    norms = (count.norms - norm - of_embedding) // model.num_layers  # those of queries and keys too
    block = divided // topology.tensor + replicated + norms
    numbers = [block * number for number in blocks]
    numbers[0] += count.embedding + count.position + of_embedding
    numbers[-1] += norm + count.head
    if topology.pipe > 1 and not model.no_weight_tying:
        numbers[-1] += count.embedding
    return numbers


@dataclass(frozen=True)
class Estimate:
    """A run on `topology.world_size` GPUs. Times are in seconds, and None if train_iters is not set."""

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
    """Estimate the run on `gpus` GPUs of `peak` FLOP/s, of which the share `mfu` is used.

    Raises:
        ConfigError: the processes or the batch cannot be divided, or vocab_size is not known.
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
    """Return whether the run fits on a GPU of `gib` GiB with the reserve."""
    return memory.total <= gib * GIB * (1 - RESERVE)


def _stages(config: Config, topology: Topology, sizes: BatchSizes) -> Iterator[Memory]:
    trained = stage_trained(config, topology)
    saved, working, ends = activations(config, sizes.micro, topology.tensor, topology.sequence)
    loss = loss_bytes(config, sizes.micro, topology.sequence)
    for stage, (numbers, blocks) in enumerate(stage_parameters(config, topology)):
        # One forward, one backward: a stage keeps one micro-batch more than there are stages after it.
        waiting = min(topology.pipe - stage, sizes.accumulation)
        yield replace(
            states_bytes(config, topology, numbers, trained[stage]),
            activations=waiting * (saved * blocks + ends) + working,
            loss=loss if stage == topology.pipe - 1 else 0.0,
        )
