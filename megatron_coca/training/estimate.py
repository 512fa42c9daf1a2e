"""Estimate the time of a run and its memory per GPU without starting it. This module does not import DeepSpeed."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_coca.config import BatchSizes, Config
from megatron_coca.config.model import GAU
from megatron_coca.model import gpu_backends
from megatron_coca.model.cost import (
    BYTES,
    Flops,
    ParameterCount,
    activations,
    adapter_count,
    flops_per_token,
    loss_bytes,
    norm_parameters,
    norms_of_ends,
    parameter_count,
    trained_count,
)
from megatron_coca.training.sent_bytes import SentBytes, sent_by_attention
from megatron_coca.training.topology import Topology, zero_section

STATES = {"Adam": 2, "AdamW": 2, "cpu_adam": 2, "sgd": 0, "lion": 1, "Muon": 1}
"""Number of float32 moments that each optimizer keeps per parameter. For Muon, this is the number for the matrices; its
other parameters have AdamW's moments.
"""

LIVE_PARAMETERS = 1e9
"""The maximum number of parameters that ZeRO 3 gathers at a time; DeepSpeed's default."""

GIB = 2.0**30
RESERVE = 0.06
"""Share of a GPU's memory that the formulas do not include: allocator fragmentation and library workspaces."""
FILLING_TOKENS = 32_768
"""A micro-batch with more tokens than this is hardly faster per token. The estimated MFU of the 350M models on an
H100 is 40% with 8,192 tokens and 47% with 32,768; neither has been measured.
"""
CONTEXT = 1.5 * GIB
"""Bytes for the CUDA context with PyTorch's kernels, and for NCCL's buffers."""


@dataclass(frozen=True)
class Memory:
    """Peak memory of a step in bytes, on the rank that needs the most. `host` is CPU memory; all others are GPU memory.

    Attributes:
        weights: weights in the training dtype, including those of other ranks that ZeRO 3 gathers.
        gradients: gradients of all trained weights or, with ZeRO 2 and 3, of this rank's partition. They are in the
            training dtype or, with `grad_accum_dtype: fp32`, in float32.
        optimizer: moments and, with ZeRO, float32 copies of the weights.
        buffers: gradient buckets for communication.
        activations: activations saved for the backward pass.
        loss: logits and their gradients.
        step: float32 gradients of this rank's partition in the optimizer step, when activations are already freed.
        context: the CUDA context, kernels and NCCL.
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
        """Peak GPU memory in bytes, without the reserve."""
        constant = self.weights + self.gradients + self.optimizer + self.buffers + self.context
        return constant + max(self.activations + self.loss, self.step)


def states_bytes(config: Config, topology: Topology, numbers: int, trained: int | None = None) -> Memory:
    """Return the memory of a rank without activations and loss: the weights of `numbers` parameters, and the gradients
    and optimizer states of the `trained` parameters (None: all), partitioned according to the ZeRO stage.
    """
    trained = numbers if trained is None else trained
    ranks = topology.data * topology.sequence_ranks
    if config.parallel.engine == "native":
        return _native_states(config, ranks, numbers, trained)
    section, size = zero_section(config, ranks, cuda=True), BYTES[config.precision.dtype]
    stage = section["stage"]

    def is_offloaded(key: str) -> bool:
        offload = section.get(key)
        return isinstance(offload, dict) and offload.get("device") in ("cpu", "nvme")

    own_weights = size * numbers / (ranks if stage == 3 else 1)
    master_bytes = 4 if stage else 0  # even in float32, because ZeRO updates a flat copy
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


def _native_states(config: Config, ranks: int, numbers: int, trained: int) -> Memory:
    """Return the memory of a rank of the native engine. Each rank has all weights and gradients, and a part of the
    optimizer states. On one rank in float32, the optimizer needs no copy of the weights and gradients.
    """
    size, reduces = BYTES[config.precision.dtype], ranks > 1
    bucket = float(zero_section(config, ranks, cuda=True)["reduce_bucket_size"])
    own, in_float32 = trained / ranks, size == 4
    sums = 4 * own if config.parallel.accumulates_in_fp32 and not in_float32 else 0.0
    moments, step = 4 * STATES[config.optimizer.type] * own, 0.0 if in_float32 or sums else 4 * own
    if config.optimizer.type == "Muon":
        count = trained_count(config)
        matrices = trained * (count.attention + count.mlp) / max(count.total, 1)
        moments += 4 * (trained - matrices) / ranks  # AdamW has two moments
        # A step also needs the weighted means of gradients and momenta, for this rank's part and for a whole bucket.
        step += 4 * matrices / ranks + (4 * min(bucket, matrices) if reduces else 0.0)
    # The largest bucket is copied before its gradients are freed, and the reduced parts are kept until all buckets are
    # reduced.
    buffers = size * (min(bucket, trained) + own) if reduces else 0.0
    # A graph never frees its activations, so the step cannot use their memory. Sums of gradients need another copy.
    if config.parallel.cuda_graphs:
        adds = not sums and config.batch.gradient_accumulation_steps != 1
        buffers, step = buffers + step + (size * trained if adds else 0), 0.0
    return Memory(
        weights=size * numbers,
        gradients=size * trained + sums,
        optimizer=(0 if in_float32 else 4) * own + moments,
        buffers=buffers,
        activations=0.0,
        loss=0.0,
        step=step,
        context=CONTEXT,
        host=0.0,
    )


def stage_parameters(config: Config, topology: Topology) -> list[tuple[int, int]]:
    """Return, for every pipeline stage, the number of its parameters on one tensor rank and the number of its blocks.

    Blocks are divided evenly. The first stage also has the embedding; the last stage also has the head or, with tied
    weights, a copy of the embedding.
    """
    model, pipe = config.model, topology.pipe
    blocks = [model.num_layers // pipe + (stage < model.num_layers % pipe) for stage in range(pipe)]
    # The biases of the projections to the residual stream are replicated on every tensor rank.
    replicated = model.hidden_size * (model.use_bias_in_attn_linear + model.use_bias_in_mlp)
    count = replace(parameter_count(config), adapters=adapter_count(config))
    numbers = _stage_numbers(config, topology, count, replicated, blocks)
    return list(zip(numbers, blocks, strict=True))


def stage_trained(config: Config, topology: Topology) -> list[int]:
    """Return, for every pipeline stage, the number of trained parameters on one tensor rank."""
    model, trains = config.model, config.optimizer.trains
    blocks = [count for _, count in stage_parameters(config, topology)]
    attention = model.use_bias_in_attn_linear and trains("attention_output")
    replicated = model.hidden_size * (attention + (model.use_bias_in_mlp and trains("mlp")))
    return _stage_numbers(config, topology, trained_count(config), replicated, blocks)


def _stage_numbers(
    config: Config, topology: Topology, count: ParameterCount, replicated: int, blocks: list[int]
) -> list[int]:
    """Divide `count` among pipeline stages and tensor ranks. In each block, `replicated` parameters are copied to all
    tensor ranks.
    """
    model = config.model
    if GAU in model.layer_names or model.mixtures:  # these models have one pipeline stage and one tensor rank
        return [count.total]
    norm = norm_parameters(model) if count.norms else 0
    divided = (count.attention + count.mlp) // model.num_layers - replicated
    first = (model.use_embedding_norm - model.skip_first_norm) * norm
    last = norms_of_ends(model) * norm - first
    norms = (count.norms - last - first) // model.num_layers  # including query and key norms
    block = divided // topology.tensor + replicated + norms
    numbers = [block * number for number in blocks]
    numbers[0] += count.embedding + count.position + count.adapters + first  # with adapters, there is one stage
    numbers[-1] += last + count.head
    if topology.pipe > 1 and not model.no_weight_tying and count.embedding:
        numbers[-1] += model.padded_vocab_size * model.token_width
    return numbers


@dataclass(frozen=True)
class RunEstimate:
    """The estimate for a run on `topology.world_size` GPUs. Times are in seconds, or None if train_iters is not set.
    `backends` are the attention backends of the layer types.
    """

    backends: dict[str, str]
    parameters: ParameterCount
    flops: Flops
    topology: Topology
    sizes: BatchSizes
    memory: Memory
    tokens_per_step: int
    total_tokens: int | None
    tokens_per_second: float
    seconds: float | None
    sent: SentBytes


def estimate(config: Config, gpus: int, peak: float, mfu: float) -> RunEstimate:
    """Estimate the run on `gpus` GPUs with `peak` FLOP/s each and a model FLOP utilization of `mfu`.

    Raises:
        ConfigError: the processes or the batch cannot be divided as configured, or vocab_size is unknown.
        BackendError: no attention backend supports the model.
    """
    backends = gpu_backends(config)
    topology = Topology.of(config.parallel, gpus)
    sizes = config.batch.resolve(topology.data)
    flops = flops_per_token(config, backends=backends)
    rate = gpus * peak * mfu / flops.model
    steps, tokens = config.schedule.train_iters, sizes.total * config.model.seq_length
    return RunEstimate(
        backends=backends,
        parameters=parameter_count(config),
        flops=flops,
        topology=topology,
        sizes=sizes,
        memory=max(_stages(config, topology, sizes, backends), key=lambda memory: memory.total),
        tokens_per_step=tokens,
        total_tokens=None if steps is None else steps * tokens,
        tokens_per_second=rate,
        seconds=None if steps is None else steps * tokens / rate,
        sent=sent_by_attention(config, topology),
    )


def fits(memory: Memory, gib: float) -> bool:
    """Return whether the run, including the reserve, fits on a GPU with `gib` GiB."""
    return memory.total <= gib * GIB * (1 - RESERVE)


def larger_micro_batch(config: Config, gpus: int, gib: float) -> tuple[BatchSizes, Memory] | None:
    """Return the sizes of a step with a larger micro-batch that still fits on a GPU with `gib` GiB, and the memory of
    the step. Return None if the configured micro-batch is large enough or no larger one fits.

    The micro-batch is the smallest one with FILLING_TOKENS or, if that does not fit, the largest one that does. The
    number of samples per step does not change. With pipeline stages the result is None, because a pipeline needs many
    micro-batches per step.
    """
    topology, length = Topology.of(config.parallel, gpus), config.model.seq_length
    sizes, best = config.batch.resolve(topology.data), None
    if topology.pipe > 1:
        return None
    backends = gpu_backends(config)
    for steps in (each for each in range(sizes.accumulation - 1, 0, -1) if sizes.accumulation % each == 0):
        if (best[0] if best else sizes).micro * length >= FILLING_TOKENS:
            break
        wider = BatchSizes(sizes.micro * sizes.accumulation // steps, steps, sizes.total)
        memory = max(_stages(config, topology, wider, backends), key=lambda each: each.total)
        if not fits(memory, gib):
            break
        best = wider, memory
    return best


def _stages(config: Config, topology: Topology, sizes: BatchSizes, backends: dict[str, str]) -> Iterator[Memory]:
    trained = stage_trained(config, topology)
    saved, working, ends = activations(config, sizes.micro, topology.tensor, topology.sequence_ranks, backends)
    loss = loss_bytes(config, sizes.micro, topology.sequence_ranks)
    for stage, (numbers, blocks) in enumerate(stage_parameters(config, topology)):
        # In the 1F1B schedule, a stage keeps one more micro-batch than there are stages after it.
        waiting = min(topology.pipe - stage, sizes.accumulation)
        yield replace(
            states_bytes(config, topology, numbers, trained[stage]),
            activations=waiting * (saved * blocks + ends) + working,
            loss=loss if stage == topology.pipe - 1 else 0.0,
        )
