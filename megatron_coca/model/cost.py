"""The cost of a model from its configuration: parameters, FLOPs per token, memory; and peak FLOP/s of GPUs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_coca.attention.build import build_method
from megatron_coca.config import Config, ModelConfig, PositionConfig
from megatron_coca.config.model import GATED_ACTIVATIONS, GAU, LOSS_CHUNK_BYTES, LOSS_CHUNK_TOKENS
from megatron_coca.config.optimization import TrainablePart

NORM_VECTORS: dict[str, int] = {"layernorm": 2, "rmsnorm": 1, "non_parametric_layernorm": 0}
"""Learned vectors of size hidden_size per norm (including its bias); scalenorm has one scalar."""


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of a model by part.

    `embedding` includes padding; with tied weights it is also the output head, and `head` is 0. `norms` includes the
    final norm. `position` counts the table, bias or network of the position method.
    """

    embedding: int
    attention: int
    mlp: int
    norms: int
    position: int
    head: int

    @property
    def total(self) -> int:
        """The sum of `numel()` over the parameters of `build_model`."""
        return self.embedding + self.non_embedding + self.head

    @property
    def non_embedding(self) -> int:
        """Parameters without the embedding and the output head, as in Kaplan et al. 2020."""
        return self.attention + self.mlp + self.norms + self.position


@dataclass(frozen=True)
class Flops:
    """Floating-point operations per trained token; a multiplication with its addition counts as two.

    Attributes:
        model: 6N + 12 L h n, the basis of model FLOPs utilisation (MFU) (Chowdhery et al. 2022, "PaLM", appendix B): N
            counts the weights of matrix products, including the output head but not the embedding; n queries and n keys
            in L layers of width h. It ignores causality and recomputation, which makes programs comparable.
        executed: the work of a causal kernel, with (n + 1) / 2 keys per query on average, and a second forward pass of
            the blocks if activations are recomputed.
        forward: the forward part of `executed`, once.
    """

    model: float
    executed: float
    forward: float


def parameter_count(config: Config) -> ParameterCount:
    """Count the parameters of the model that `build_model(config)` builds.

    Raises:
        ConfigError: `vocab_size` is not known.
    """
    model = config.model
    table = model.padded_vocab_size * model.hidden_size
    return ParameterCount(
        embedding=table,
        attention=sum(sum(_projections(model, name).values()) for name in model.layer_names),
        mlp=(model.num_layers - model.layer_names.count(GAU)) * _mlp(model),
        norms=(sum(norms_per_block(model, name) for name in model.layer_names) + 1 + model.use_embedding_norm)
        * norm_parameters(model)
        + model.num_layers * _qk_norm_parameters(model),
        position=_position(config),
        head=table if model.no_weight_tying else 0,
    )


def trained_count(config: Config) -> ParameterCount:
    """Count parameters as `parameter_count` does, but only those that are trained (`trainable`).

    Raises:
        ConfigError: `vocab_size` is not known.
    """
    count, trains, model = parameter_count(config), config.optimizer.trains, config.model
    numbers = [item for name in model.layer_names for item in _projections(model, name).items()]
    return ParameterCount(
        embedding=count.embedding * trains("embedding"),
        attention=sum(size for part, size in numbers if trains(part)),
        mlp=count.mlp * trains("mlp"),
        norms=count.norms * trains("norms"),
        position=count.position * trains("positions"),
        head=count.head * trains("output_head"),
    )


def flops_per_token(config: Config, length: int | None = None) -> Flops:
    """The mean cost of a token in samples of `length` tokens (default: seq_length); see `Flops`.

    Only matrix products and attention count: norms, activations, rotations and the loss add a few percent, and
    relative-position maps with several bands cost more.

    Raises:
        ConfigError: `vocab_size` is not known.
    """
    model = config.model
    length = length or model.seq_length
    names, positions = model.layer_names, config.layer_types
    gates = model.hidden_size * model.num_attention_heads
    blocks = sum(_weights_per_block(model, name) + gates * (positions[name].gate is not None) for name in names)
    head = model.padded_vocab_size * model.hidden_size
    gau = (
        (model.gau_key_width + model.gau_features) / 2,
        model.gau_features,
    )  # scores as counted in `model`, and as executed
    widths = {name: gau if name == GAU else (model.attention_width,) * 2 for name in positions}
    square = sum(4.0 * widths[name][0] for name in names) * length  # q k^T and its product with v
    causal = sum(4.0 * widths[name][1] * positions[name].mean_keys(length) for name in names)
    forward = 2.0 * (blocks + head) + causal
    again = 2.0 * (blocks - _not_repeated(model)) + causal if recomputes_blocks(model) else 0.0
    return Flops(model=3 * (2.0 * (blocks + head) + square), executed=3 * forward + again, forward=forward)


def _mean_over_layers(config: Config, value: Callable[[PositionConfig], float]) -> float:
    """The mean over all layers of a quantity that depends on their position keys."""
    values, names = {name: value(position) for name, position in config.layer_types.items()}, config.model.layer_names
    return sum(values[name] for name in names) / len(names)


def recomputes_blocks(model: ModelConfig) -> bool:
    """True if the backward pass recomputes complete blocks (selective checkpointing keeps the matrix products)."""
    return model.checkpoint_activations and getattr(model, "checkpoint_policy", "full") == "full"


def _not_repeated(model: ModelConfig) -> int:
    """PyTorch ends the recomputation at the last tensor that a gradient needs. That excludes the last matrix product of
    the group, unless dropout follows it.
    """
    size, last = getattr(model, "checkpoint_num_layers", 1), model.num_layers - 1
    ends = [model.layer_names[min(first + size - 1, last)] for first in range(0, model.num_layers, size)]
    widths = (model.gau_features if name == GAU else model.ffn_hidden_size for name in ends)
    return 0 if model.hidden_dropout else model.hidden_size * sum(widths)


def norms_per_block(model: ModelConfig, name: str) -> int:
    """Number of norms in one type of layers: of the inputs of attention and MLP, which may share one, and of their
    outputs.

    Gated attention units have no MLP.
    """
    if name == GAU:
        return (model.norm_position != "post") + (model.norm_position != "pre")
    inputs = 1 if model.gpt_j_residual and model.gpt_j_tied else 2
    return inputs * (model.norm_position != "post") + 2 * (model.norm_position != "pre")


def packed_mlp_width(model: ModelConfig) -> int:
    """Rows of the MLP's first matrix; with a gated activation, value and gate together."""
    return model.ffn_hidden_size * (2 if model.activation in GATED_ACTIVATIONS else 1)


def packed_attention_width(model: ModelConfig) -> int:
    """Rows of query_key_value."""
    return (model.num_attention_heads + 2 * model.num_kv_heads) * model.head_dim


def _weights_per_block(model: ModelConfig, name: str) -> int:
    """Numbers in the matrices of one block that a token is multiplied with."""
    h = model.hidden_size
    if name == GAU:
        return h * (3 * model.gau_features + model.gau_key_width)
    return h * (packed_attention_width(model) + model.attention_width) + h * (
        packed_mlp_width(model) + model.ffn_hidden_size
    )


def _projections(model: ModelConfig, name: str) -> dict[TrainablePart, int]:
    """Numbers in one layer's attention by part. Each row of a matrix has hidden_size numbers.

    Queries, keys, values and gate of a gated attention unit are trained together and counted as queries.
    """
    if name == GAU:
        width, key, bias = model.gau_features, model.gau_key_width, int(model.use_bias_in_attn_linear)
        packed = (2 * width + key) * (model.hidden_size + bias) + 2 * key * (1 + bias)
        return {"query": packed, "attention_output": model.hidden_size * (width + bias)}
    keys, h, bias = model.num_kv_heads * model.head_dim, model.hidden_size, int(model.use_bias_in_qkv)
    rows: dict[TrainablePart, int] = {"query": model.attention_width, "key": keys, "value": keys}
    numbers = {part: count * (h + bias) for part, count in rows.items()}
    return numbers | {"attention_output": h * (model.attention_width + model.use_bias_in_attn_linear)}


def _qk_norm_parameters(model: ModelConfig) -> int:
    """Parameters of the norms of queries and keys of one layer."""
    if model.use_qk_layernorm:
        return 1 if model.norm == "scalenorm" else norm_parameters(model) * model.attention_width // model.hidden_size
    heads = {None: 0, "head": 2, "projection": model.num_attention_heads + model.num_kv_heads}[model.qk_norm]
    return heads * model.head_dim


def _mlp(model: ModelConfig) -> int:
    width, h = packed_mlp_width(model), model.hidden_size
    return h * (width + model.ffn_hidden_size) + (width + h if model.use_bias_in_mlp else 0)


def norm_parameters(model: ModelConfig) -> int:
    """Parameters of one norm."""
    if model.norm == "scalenorm":
        return 1
    without_bias = model.norm == "layernorm" and not model.use_bias_in_norms
    return model.hidden_size * (NORM_VECTORS[model.norm] - without_bias)


def _position(config: Config) -> int:
    """Learned numbers of the position methods, both those of each layer and those that all layers of a type share."""
    model, total = config.model, 0
    if config.position.embedding.weights == "table":
        total += model.max_position_embeddings * model.hidden_size
    for name, position in config.layer_types.items():
        method = build_method(position, model.of_type(name))
        makers = method.learned() * model.layer_names.count(name) + [method.bias.shared, method.clex]
        # Counting must not draw random numbers: a resumed run counts after it has restored the generators.
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            made = [make() for make in makers if make is not None]
        total += sum(weight.numel() for part in made if part is not None for weight in part.parameters())
    return total


PEAKS: tuple[tuple[str, float], ...] = (
    ("B200", 2250e12),
    ("H200 NVL", 835e12),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("RTX 6000 Ada", 364e12),
    ("L40S", 362e12),
    ("A6000", 155e12),
    ("A10", 125e12),
    ("V100", 125e12),
    ("RTX 4090", 165e12),
)
"""(part of the device name, FLOP/s), with more specific names first. The figures are for dense bfloat16 with float32
accumulation, from the vendors' data sheets; for V100, which has no bfloat16, they are for float16. Set
`peak_theoretical_tflops` for other devices.
"""


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 peak in FLOP/s by PyTorch's device name, such as "NVIDIA A100-SXM4-80GB"; None if unknown."""
    words = device_name.lower().replace("-", " ").replace("_", " ")
    return next((peak for name, peak in PEAKS if f" {name.lower()}" in f" {words}"), None)


BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes per number by dtype."""

COEFFICIENTS = {"coca": 0.65, "coca_strict": 0.5}
"""Additional activations of CoCA in units of hidden_size numbers: rectified or squared coefficients in float32."""


class Activations(NamedTuple):
    """Bytes on one rank.

    Attributes:
        kept: kept for the backward pass by one block, on average over the groups that are recomputed together.
        working: needed in addition while the backward pass of one group runs.
        ends: kept by the embedding and the final norm.
    """

    kept: float
    working: float
    ends: float


def activations(config: Config, micro: int, tensor: int = 1, sequence: int = 1) -> Activations:
    """The saved activations of `micro` samples of seq_length tokens. `tensor` ranks share the heads and the MLP width,
    `sequence` ranks share the tokens.

    This is for fused attention (SDPA); the reference backend and attention dropout on the CPU also save N x N tensors.
    Dropout masks count as on the CPU, in the dtype of the activations.
    """
    model, size = config.model, BYTES[config.precision.dtype]
    tokens = micro * model.seq_length / sequence
    block = tokens * _kept_by_block(config, size, tensor)
    hidden = tokens * model.hidden_size * size
    ends = tokens * model.hidden_size * (2 * size + _norm_extra(model, size)) + hidden * bool(model.hidden_dropout)
    if not model.checkpoint_activations:
        return Activations(block, 0.0, ends)
    group = min(model.checkpoint_num_layers, model.num_layers)
    selected = tokens * _kept_products(model, size, tensor) if model.checkpoint_policy == "selective" else 0.0
    return Activations(hidden / group + selected, group * (block - selected), ends)


def loss_bytes(config: Config, micro: int, sequence: int = 1) -> float:
    """Peak memory of the logits of `micro` samples and of the gradients computed with the loss, on one rank."""
    model, size = config.model, BYTES[config.precision.dtype]
    tokens, vocabulary = micro * model.seq_length / sequence, model.padded_vocab_size
    auto = model.loss_chunk_size == "auto"
    chunk = LOSS_CHUNK_TOKENS if auto else int(model.loss_chunk_size)
    if chunk == 0:
        # The logits, their float32 copy (in half precision), the log-probabilities and their gradient.
        return tokens * vocabulary * (size + 8 + (4 if size < 4 else 0))
    head = vocabulary * model.hidden_size
    scored = min(chunk, tokens) * vocabulary * (size + 4 + (size if size < 4 else 0))
    if auto:  # on a GPU the logits become their gradient in place
        scored = max(scored, min(LOSS_CHUNK_BYTES, tokens * vocabulary * size))
    return scored + tokens * model.hidden_size * size + head * (8 + size)


def _kept_by_block(config: Config, size: int, tensor: int) -> float:
    """Bytes per token saved by the norms, projections, attention and MLP of one block."""
    names = config.model.layer_names
    return sum(_kept_by_type(config, size, tensor, name) for name in names) / len(names)


def _kept_by_type(config: Config, size: int, tensor: int, name: str) -> float:
    model, norms = config.model, norms_per_block(config.model, name)
    hidden = model.hidden_size
    # The input and output of every norm; in parallel blocks both norms have the same input.
    streams = norms + (norms - 1 if model.gpt_j_residual and norms > 1 else norms)
    dropout = (1 if name == GAU else 2) * hidden * size if model.hidden_dropout else 0
    saved = hidden * streams * size + norms * hidden * _norm_extra(model, size) + dropout
    if name == GAU:
        # The projection before and after SiLU, attention's output and its product with the gate; queries and keys as
        # scaled, and rotated copies for every piece of the values.
        return saved + (8 * model.gau_features + 4 * model.gau_key_width) * size
    inner = packed_attention_width(model) + model.attention_width + _mlp_numbers(model)
    return saved + (inner * size + _operand_bytes(config, size)) / tensor


def _norm_extra(model: ModelConfig, size: int) -> float:
    """Bytes per feature that a norm saves in addition to its input and output; RMSNorm and ScaleNorm save float32
    tensors.
    """
    return 0 if model.norm in ("layernorm", "non_parametric_layernorm") else 4 if size == 4 else 6


def _mlp_numbers(model: ModelConfig) -> int:
    """Numbers saved by the MLP per token; relu saves only its output."""
    gated = model.activation in GATED_ACTIVATIONS
    first = 0 if model.activation == "relu" else packed_mlp_width(model)
    return first + model.ffn_hidden_size * (2 if gated else 1)


def _operand_bytes(config: Config, size: int) -> float:
    """Rotated queries and keys and the activations of computing them, mean over layers; 0 for non-rotary methods."""
    model = config.model
    operands = (2 * model.num_attention_heads + model.num_kv_heads) * model.head_dim * size

    def of_type(position: PositionConfig) -> float:
        coefficients = COEFFICIENTS.get(position.pos_emb, 0.0) * position.rotary_pct
        return (operands + coefficients * model.attention_width * 4) * position.embedding.rotary

    return _mean_over_layers(config, of_type)


def _kept_products(model: ModelConfig, size: int, tensor: int) -> float:
    """Bytes per token that selective checkpointing keeps: results of matrix products and attention."""
    shared = packed_attention_width(model) + model.attention_width + packed_mlp_width(model)
    units = model.layer_names.count(GAU) / model.num_layers
    unit = 3 * model.gau_features + model.gau_key_width + model.hidden_size
    return ((1 - units) * (shared / tensor + 2 * model.hidden_size) + units * unit) * size
