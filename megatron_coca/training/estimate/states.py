"""Weights, gradients and optimizer states of one rank, as DeepSpeed holds them under ZeRO, pipelines and tensor ranks."""

from typing import Any, NamedTuple

from megatron_coca.config import Config
from megatron_coca.model.cost import ParameterCount, norm_parameters, norms_per_block, parameter_count, trained_count
from megatron_coca.model.memory import BYTES
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
