"""Compute the cost of a model from its configuration (parameters, FLOPs per token, memory), and look up the peak FLOP/s
of GPUs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_coca.attention.build import BACKENDS, build_method
from megatron_coca.attention.method import PositionMethod
from megatron_coca.config import Config, ModelConfig, PositionConfig
from megatron_coca.config.model import EXPERTS, GATED_ACTIVATIONS, GAU, LOSS_CHUNK_BYTES, LOSS_CHUNK_TOKENS
from megatron_coca.config.optimization import AdapterTarget, TrainablePart

Backends = Mapping[str, str]
"""Maps each layer type to its attention backend. A layer type that is missing uses `sdpa`."""
PADDING = frozenset({"sdpa", "merge"})
"""Backends that pad values to the width of Q' and K', because their kernels need equal widths."""

NORM_VECTORS: dict[str, int] = {
    "layernorm": 2,
    "rmsnorm": 1,
    "non_parametric_layernorm": 0,
    "non_parametric_rmsnorm": 0,
}
"""Number of learned vectors of size hidden_size in one norm, including its bias. ScaleNorm is not in this table,
because it has a single scalar.
"""


@dataclass(frozen=True)
class ParameterCount:
    """Parameter counts of the parts of a model.

    `embedding` includes the padded rows. If the weights are tied, the embedding is also the output matrix, and `head`
    counts only the bias of the output head and a layer before it. `norms` includes the final norm and the factors of
    `layer_scale`. `position` counts the table, bias or network of the position methods. `idle` counts the parameters of
    the experts that do not process a token; `mlp` includes these parameters too. `adapters` counts the parameters of
    the adapters that a run adds.
    """

    embedding: int
    attention: int
    mlp: int
    norms: int
    position: int
    head: int
    idle: int = 0
    adapters: int = 0

    @property
    def active(self) -> int:
        """Parameters that process a token: all except `idle`."""
        return self.total - self.idle

    @property
    def total(self) -> int:
        """Number of parameters of the model that `build_model` returns, plus the parameters of adapters."""
        return self.embedding + self.non_embedding + self.head + self.adapters

    @property
    def non_embedding(self) -> int:
        """Parameters except those of the embedding and the output head, as in Kaplan et al. 2020."""
        return self.attention + self.mlp + self.norms + self.position


@dataclass(frozen=True)
class Flops:
    """Floating-point operations per trained token. A multiply-add counts as two operations.

    Attributes:
        model: 6N + 12 L h n, the basis of model FLOPs utilisation (MFU) (Chowdhery et al. 2022, "PaLM", appendix B). N
            is the number of weights in matrix products, including the output head but not the embedding; L is the
            number of layers, h their width, and n the number of queries and of keys. In mixtures of experts, N counts
            only the experts that process a token. N includes adapters. A frozen weight adds 4 operations instead of 6,
            because its gradient is not computed. This count ignores causality and recomputation, so that MFU is
            comparable between training frameworks.
        executed: the operations that a causal kernel runs, with (n + 1) / 2 keys per query on average, plus a second
            forward pass of the blocks if activations are recomputed.
        forward: the part of `executed` that one forward pass runs.
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
    table = model.padded_vocab_size * model.token_width
    projection = model.hidden_size * (model.embedding_width or 0)
    transform = model.use_output_transform * model.hidden_size * (model.hidden_size + model.use_bias_in_mlp)
    return ParameterCount(
        embedding=table + projection,
        attention=sum(sum(_projections(model, name).values()) for name in model.layer_names),
        mlp=sum(_mlp(model, mlp) for name, mlp in _layers(model) if name != GAU),
        norms=(sum(norms_per_block(model, name) for name in model.layer_names) + norms_of_ends(model))
        * norm_parameters(model)
        + sum(_qk_norm_parameters(model.with_heads(name)) for name in model.layer_names)
        + model.num_layers * model.layer_scale,
        position=_position(config),
        head=projection
        + transform
        + model.no_weight_tying * table
        + model.use_bias_in_output_head * model.padded_vocab_size,
        idle=model.mixtures * (model.moe_num_experts - model.moe_top_k) * _matrices(model, model.expert_width),
    )


def trained_count(config: Config) -> ParameterCount:
    """Count the parameters as `parameter_count` does, but only those that `trainable` selects. With `lora`, these are
    the adapters and the parts in `also`.

    Raises:
        ConfigError: `vocab_size` is not known.
    """
    count, trains, model = parameter_count(config), config.optimizer.trains, config.model
    numbers = [item for name in model.layer_names for item in _projections(model, name).items()]
    corrections = model.mixtures * model.moe_correction_bias * model.moe_num_experts
    routers = model.mixtures * model.moe_num_experts * (model.hidden_size + model.moe_router_bias)
    return ParameterCount(
        embedding=count.embedding * trains("embedding"),
        attention=sum(size for part, size in numbers if trains(part)),
        mlp=(count.mlp - routers - corrections) * trains("mlp") + routers * trains("router"),
        norms=count.norms * trains("norms"),
        position=(count.position - _position(config, frozen=True)) * trains("positions"),
        head=count.head * trains("output_head"),
        adapters=adapter_count(config),
    )


def adapter_count(config: Config) -> int:
    """Count the parameters of the adapters that a run adds to the model. Each adapted matrix adds rank (inputs +
    outputs) parameters. With DoRA, it also adds one parameter for each output.
    """
    lora = config.optimizer.lora
    if lora is None:
        return 0
    matrices = [size for name in config.model.layer_names for size in _adapted_matrices(config, name)]
    return sum(lora.rank * (inputs + outputs) + lora.dora * outputs for inputs, outputs in matrices)


def _adapted_matrices(config: Config, name: str) -> list[tuple[int, int]]:
    """Return the numbers of inputs and outputs of each matrix that has an adapter in one block of a layer type."""
    lora, model = config.optimizer.lora, config.model.with_heads(name)
    keys, hidden, inner = model.num_kv_heads * model.head_dim, model.hidden_size, model.ffn_hidden_size
    sizes: dict[AdapterTarget, list[tuple[int, int]]] = {
        "query": [(hidden, model.attention_width)],
        "key": [(hidden, keys)],
        "value": [] if model.values_from_keys else [(hidden, keys)],
        "dense": [(model.attention_width, hidden)],
        "mlp": [(hidden, packed_mlp_width(model)), (inner, hidden)],
    }
    if model.kv_lora_rank is not None:
        heads, rank, queries = model.num_attention_heads, model.kv_lora_rank, model.q_lora_rank
        scored, up = heads * model.score_dim, heads * (model.unrotated_dim + model.value_dim)
        sizes["query"] = [(hidden, scored)] if queries is None else [(hidden, queries), (queries, scored)]
        # The matrices of keys also compute the values.
        sizes |= {"key": [(hidden, rank + model.head_dim), (rank, up)], "value": []}
    return [size for target in (lora.targets if lora is not None else ()) for size in sizes[target]]


def flops_per_token(config: Config, length: int | None = None, backends: Backends | None = None) -> Flops:
    """Return the mean cost of a token in samples of `length` tokens, by default seq_length. Attention uses `backends`,
    by default sdpa.

    Only matrix products and attention are counted. Norms, activations, rotations and the loss add a few percent.
    Relative-position maps with several bands cost more than this count.

    Raises:
        ConfigError: `vocab_size` is not known.
    """
    model = config.model
    length = length or model.seq_length
    names, positions = model.layer_names, config.layer_types
    gates = model.hidden_size * model.num_attention_heads
    blocks = sum(sum(_weights_per_block(model, *kinds).values()) for kinds in _layers(model))
    blocks += sum(gates * (positions[name].gate is not None) for name in names)
    head = model.padded_vocab_size * model.token_width + 2 * model.hidden_size * (model.embedding_width or 0)
    head += model.use_output_transform * model.hidden_size**2
    # The mean width of q k^T and of the product with v, as a pair (for `Flops.model`, for `Flops.executed`).
    gau = ((model.gau_key_width + model.gau_features) / 2, model.gau_features)
    wider = {name: _operand_width(model.of_type(name), position) for name, position in positions.items()}
    mean = {name: (wider[name] + model.with_heads(name).attention_width) / 2 for name in positions}
    padding = {name: (backends or {}).get(name, "sdpa") in PADDING for name in positions}
    executed = {name: wider[name] if padding[name] else mean[name] for name in positions}
    widths = {name: gau if name == GAU else (mean[name], executed[name]) for name in positions}
    square = sum(4.0 * widths[name][0] for name in names) * length  # q k^T and its product with v
    causal = sum(4.0 * widths[name][1] * positions[name].mean_keys(length) for name in names)
    frozen = 2.0 * _frozen_weights(config, head)
    blocks += adapter_count(config)
    forward = 2.0 * (blocks + head) + causal
    again = 2.0 * (blocks - _not_repeated(model)) + causal if recomputes_blocks(model) else 0.0
    needed = 3 * (2.0 * (blocks + head) + square) - frozen
    return Flops(model=needed, executed=3 * forward + again - frozen, forward=forward)


def _frozen_weights(config: Config, head: int) -> int:
    """Count the frozen weights, without adapters, among the weights that each token is multiplied with. `head` is the
    number of weights in the output head.
    """
    model, trains = config.model, config.optimizer.trains
    frozen = 0 if trains("output_head" if model.no_weight_tying else "embedding") else head
    for kinds in _layers(model):
        frozen += sum(count for part, count in _weights_per_block(model, *kinds).items() if not trains(part))
        if not trains("positions") and config.layer_types[kinds[0]].gate is not None:
            frozen += model.hidden_size * model.num_attention_heads
    return frozen


def _operand_width(model: ModelConfig, position: PositionConfig) -> int:
    """Return the number of features of Q' in all heads together. Backends in `PADDING` pad values to this width."""
    return model.num_attention_heads * build_method(position, model).operand_dim


def recomputes_blocks(model: ModelConfig) -> bool:
    """Return True if the backward pass recomputes complete blocks. With selective checkpointing, it does not recompute
    the matrix products.
    """
    return model.checkpoint_activations and getattr(model, "checkpoint_policy", "full") == "full"


def _not_repeated(model: ModelConfig) -> int:
    """Count the weights of the matrix products that recomputation does not repeat. PyTorch ends the recomputation at
    the last tensor that a gradient needs, so it skips the last matrix product of each group of blocks, unless dropout
    follows it.
    """
    size, last = getattr(model, "checkpoint_num_layers", 1), model.num_layers - 1
    ends = [_layers(model)[min(first + size - 1, last)] for first in range(0, model.num_layers, size)]
    return 0 if model.hidden_dropout else model.hidden_size * sum(_last_width(model, *kinds) for kinds in ends)


def _last_width(model: ModelConfig, name: str, mlp: str) -> int:
    """Return the number of input features of a block's last matrix product if no gradient needs its result, else 0."""
    if name == GAU:
        return model.gau_features
    if mlp == EXPERTS:
        # The router's gradient needs the experts' results. The shared gate's gradient needs the shared MLP's result.
        return 0 if model.moe_shared_gate else model.moe_shared_intermediate_size or 0
    return model.ffn_hidden_size


def _layers(model: ModelConfig) -> list[tuple[str, str]]:
    """Return the layer type and the type of the MLP of every layer."""
    return list(zip(model.layer_names, model.mlp_names, strict=True))


def norms_per_block(model: ModelConfig, name: str) -> int:
    """Return the number of norms in one block of a layer type. Norms can be on the inputs of attention and MLP, on
    their outputs, and on the residual sums. Attention and MLP may share the norm on their inputs.

    Gated attention units have no MLP, so they have at most one norm on the input and one on the output.
    """
    if name == GAU:
        return 2 if model.norm_position == "sandwich" else 1
    inputs = 1 if model.gpt_j_residual and model.gpt_j_tied else 2
    return inputs * (model.norm_position in ("pre", "sandwich")) + 2 * (model.norm_position != "pre")


def norms_of_ends(model: ModelConfig) -> int:
    """Return the number of norms outside the blocks, after the embedding and before the output head. The result is one
    less if the first block lacks a norm.
    """
    head = (model.norm_position != "residual") + model.use_output_transform
    return head + model.use_embedding_norm - model.skip_first_norm


def packed_mlp_width(model: ModelConfig, width: int | None = None) -> int:
    """Return the number of rows of the first matrix of an MLP with `width` inner features, by default
    ffn_hidden_size. With a gated activation, these are the rows of value and gate together.
    """
    width = model.ffn_hidden_size if width is None else width
    return width * (2 if model.activation in GATED_ACTIVATIONS else 1)


def _weights_per_block(model: ModelConfig, name: str, mlp: str) -> dict[TrainablePart, int]:
    """Count the weights that one block multiplies each token with, for each trainable part of the block."""
    h = model.hidden_size
    if name == GAU:
        return {"query": h * (2 * model.gau_features + model.gau_key_width), "attention_output": h * model.gau_features}
    shape = model.with_heads(name)
    width, keys = shape.attention_width, shape.num_kv_heads * shape.head_dim
    values = 0 if shape.values_from_keys else keys
    attention: dict[TrainablePart, int] = {"query": h * width, "key": h * keys, "value": h * values}
    if shape.kv_lora_rank is not None:
        attention = _latent_weights(shape, bias=0)
    router = model.moe_num_experts if mlp == EXPERTS else 0
    others: dict[TrainablePart, int] = {"attention_output": width + shape.output_gates, "router": router}
    return attention | {part: h * count for part, count in {**others, "mlp": _mlp_rows(model, mlp)}.items()}


def _mlp_rows(model: ModelConfig, mlp: str) -> int:
    """Return the number of weights, divided by hidden_size, in the matrices of an MLP. For a mixture of experts, count
    only the matrices that each token is multiplied with, without the router.
    """
    if mlp != EXPERTS:
        return packed_mlp_width(model) + model.ffn_hidden_size
    used = model.moe_top_k * model.expert_width + (model.moe_shared_intermediate_size or 0)
    return packed_mlp_width(model, used) + used + model.moe_shared_gate


def _latent_weights(model: ModelConfig, bias: int) -> dict[TrainablePart, int]:
    """Count the weights of queries, keys and values in latent attention. `bias` is 1 if the maps to latents have a
    bias, else 0. The map to the latent of keys and values counts as a part of the keys.
    """
    rank, heads, h = model.kv_lora_rank or 0, model.num_attention_heads, model.hidden_size + bias
    queries = heads * model.score_dim
    from_latent = None if model.q_lora_rank is None else model.q_lora_rank * (h + queries)
    return {
        "query": model.hidden_size * queries if from_latent is None else from_latent,
        "key": (rank + model.head_dim) * h + rank * heads * model.unrotated_dim,
        "value": rank * heads * model.value_dim,
    }


def _product_rows(model: ModelConfig) -> int:
    """Count the features per token that attention and its matrix products, except the output projection, return."""
    outputs = model.attention_width + model.output_gates
    if model.kv_lora_rank is None:
        return model.packed_attention_width + outputs
    return (
        outputs
        + _latent_rows(model)
        + model.num_attention_heads * (model.score_dim + model.unrotated_dim + model.value_dim)
    )


def _latent_rows(model: ModelConfig) -> int:
    """Return the number of features of the latents and of the shared key."""
    return (model.kv_lora_rank or 0) + model.head_dim + (model.q_lora_rank or 0)


def _projections(model: ModelConfig, name: str) -> dict[TrainablePart, int]:
    """Count the parameters of one layer's attention by trainable part. Each row of a matrix has hidden_size weights.

    Queries, keys, values and the gate of a gated attention unit are trained together, so all of them count as "query".
    """
    if name == GAU:
        width, key, bias = model.gau_features, model.gau_key_width, int(model.use_bias_in_attn_linear)
        packed = (2 * width + key) * (model.hidden_size + bias) + 2 * key * (1 + bias)
        return {"query": packed, "attention_output": model.hidden_size * (width + bias)}
    model = model.with_heads(name)
    keys, h, bias = model.num_kv_heads * model.head_dim, model.hidden_size, int(model.use_bias_in_qkv)
    values = 0 if model.values_from_keys else keys
    rows: dict[TrainablePart, int] = {"query": model.attention_width, "key": keys, "value": values}
    latent = model.kv_lora_rank is not None
    numbers = _latent_weights(model, bias) if latent else {part: count * (h + bias) for part, count in rows.items()}
    output = h * (model.attention_width + model.use_bias_in_attn_linear) + model.output_gates * (h + bias)
    return numbers | {"attention_output": output}


def _qk_norm_parameters(model: ModelConfig) -> int:
    """Count the parameters of the norms of queries and keys, or of latents, of one layer."""
    if model.kv_lora_rank is not None:
        return model.kv_lora_rank + (model.q_lora_rank or 0)
    if model.use_qk_layernorm:
        return 1 if model.norm == "scalenorm" else norm_parameters(model) * model.attention_width // model.hidden_size
    if model.norm == "non_parametric_rmsnorm" and model.qk_norm in ("head", "projection"):
        return 0
    every = model.num_attention_heads + model.num_kv_heads
    vectors = {None: 0, "head": 2, "projection": every, "layernorm": 4, "layernorm_by_head": every}[model.qk_norm]
    return vectors * model.head_dim


def _mlp(model: ModelConfig, mlp: str) -> int:
    """Count the parameters of the MLP or of the mixture of experts of one layer."""
    if mlp != EXPERTS:
        return _matrices(model, model.ffn_hidden_size) + (4 if model.activation == "xielu" else 0)
    router = model.hidden_size + model.moe_router_bias + model.moe_correction_bias
    shared = model.moe_shared_intermediate_size
    every = 0 if shared is None else _matrices(model, shared) + model.hidden_size * model.moe_shared_gate
    return model.moe_num_experts * (_matrices(model, model.expert_width) + router) + every


def _matrices(model: ModelConfig, width: int) -> int:
    """Count the weights and biases of an MLP with `width` inner features."""
    packed, h = packed_mlp_width(model, width), model.hidden_size
    return h * (packed + width) + (packed + h if model.use_bias_in_mlp else 0)


def norm_parameters(model: ModelConfig) -> int:
    """Count the parameters of one norm."""
    if model.norm == "scalenorm":
        return 1
    without_bias = model.norm == "layernorm" and not model.use_bias_in_norms
    return model.hidden_size * (NORM_VECTORS[model.norm] - without_bias)


def _position(config: Config, frozen: bool = False) -> int:
    """Count the parameters of the position methods, both those of each layer and those that all layers of a type share.
    With `frozen`, count only those that are never trained.
    """
    model, total = config.model, 0
    if config.position.embedding.weights == "table" and not frozen:
        total += model.max_position_embeddings * model.hidden_size
    for name, position in config.layer_types.items():
        method = build_method(position, model.of_type(name))
        makers = method.learned() * model.layer_names.count(name) + [method.bias.shared, method.clex]
        # Counting must not draw random numbers, because a resumed run counts after it has restored the generators.
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            made = [make() for make in makers if make is not None]
        weights = [weight for part in made if part is not None for weight in part.parameters()]
        total += sum(weight.numel() for weight in weights if not (frozen and weight.requires_grad))
    return total


PEAKS: tuple[tuple[str, float], ...] = (
    ("B200", 2250e12),
    ("GH200", 989e12),
    ("H200 NVL", 835e12),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H800", 989e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("RTX 6000 Ada", 364e12),
    ("L40S", 362e12),
    ("A6000", 155e12),
    ("A10", 125e12),
    ("V100", 125e12),
    ("RTX 4090", 165e12),
)
"""Pairs (words of the device name, peak FLOP/s); more specific names come first. The peaks are from the vendors' data
sheets, for dense bfloat16 products with float32 accumulation. V100 has no bfloat16, so its peak is for float16. Set
`peak_theoretical_tflops` for other devices.
"""


def peak_flops(device_name: str) -> float | None:
    """Return the dense bfloat16 peak of a device in FLOP/s, or None if it is unknown. `device_name` is the name that
    PyTorch reports, such as "NVIDIA A100-SXM4-80GB". Only whole words count, so an A10G is not an A10.
    """
    words = " ".join(device_name.lower().replace("-", " ").replace("_", " ").split())
    return next((peak for name, peak in PEAKS if f" {name.lower()} " in f" {words} "), None)


BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Size of a number in bytes, by dtype."""

COEFFICIENTS = {"coca": 0.65, "coca_strict": 0.5}
"""Number of additional float32 activations that CoCA saves per token, divided by hidden_size. They are its rectified or
squared coefficients.
"""


class Activations(NamedTuple):
    """Activation memory on one rank, in bytes.

    Attributes:
        kept: bytes that one block keeps for the backward pass, averaged over the blocks of a group that is recomputed
            together.
        working: further bytes in use while the backward pass of one group runs.
        ends: bytes that the embedding and the final norm keep.
    """

    kept: float
    working: float
    ends: float


def activations(
    config: Config, micro: int, tensor: int = 1, sequence: int = 1, backends: Backends | None = None
) -> Activations:
    """Estimate the activations saved for `micro` samples of seq_length tokens. The heads and the MLP width are divided
    among `tensor` ranks, the tokens among `sequence` ranks.

    The estimate is for fused attention with these backends (default: sdpa). The reference backend, and attention
    dropout on the CPU, also save N x N tensors. Dropout masks are counted in the dtype of the activations, in which the
    CPU stores them.
    """
    model, size = config.model, BYTES[config.precision.dtype]
    tokens = micro * model.seq_length / sequence
    block = tokens * _kept_by_block(config, size, tensor, backends or {})
    hidden = tokens * model.hidden_size * size
    ends = tokens * model.hidden_size * (2 * size + _norm_extra(model, size)) + hidden * bool(model.embedding_dropout)
    if not model.checkpoint_activations:
        return Activations(block, 0.0, ends)
    group = min(model.checkpoint_num_layers, model.num_layers)
    selected = tokens * _kept_products(model, size, tensor) if model.checkpoint_policy == "selective" else 0.0
    return Activations(hidden / group + selected, group * (block - selected), ends)


def loss_bytes(config: Config, micro: int, sequence: int = 1) -> float:
    """Estimate the peak memory on one rank, in bytes, of the logits of `micro` samples and of the gradients that the
    loss computes.
    """
    model, size = config.model, BYTES[config.precision.dtype]
    tokens, vocabulary = micro * model.seq_length / sequence, model.padded_vocab_size
    auto = model.loss_chunk_size == "auto"
    chunk = LOSS_CHUNK_TOKENS if auto else int(model.loss_chunk_size)
    if chunk == 0:
        # The logits, the log-probabilities, their gradient and, in half precision, the float32 copy of the logits.
        return tokens * vocabulary * (size + 8 + (4 if size < 4 else 0))
    trained = config.optimizer.trains("output_head" if model.no_weight_tying else "embedding")
    head = vocabulary * model.token_width * trained  # a frozen head has no gradient
    scored = min(chunk, tokens) * vocabulary * (size + 4 + (size if size < 4 else 0))
    if auto:  # on a GPU the gradient overwrites the logits
        scored = max(scored, min(LOSS_CHUNK_BYTES, tokens * vocabulary * size))
    return scored + tokens * model.hidden_size * size + head * (8 + size)


def _kept_by_block(config: Config, size: int, tensor: int, backends: Backends) -> float:
    """Return the bytes per token that the norms, projections, attention and MLP of one block save, averaged over all
    blocks.
    """
    kinds = _layers(config.model)
    return sum(_kept_by_type(config, size, tensor, *each, backends) for each in kinds) / len(kinds)


def _kept_by_type(config: Config, size: int, tensor: int, name: str, mlp: str, backends: Backends) -> float:
    model, norms = config.model, norms_per_block(config.model, name)
    hidden = model.hidden_size
    # Every norm saves its input and output. In parallel blocks both norms have the same input, which is saved once.
    streams = norms + (norms - 1 if model.gpt_j_residual and norms > 1 else norms)
    dropout = (1 if name == GAU else 2) * hidden * size if model.hidden_dropout else 0
    saved = hidden * streams * size + norms * hidden * _norm_extra(model, size) + dropout
    if name == GAU:
        # The saved tensors are the projection before and after SiLU, the attention output, its product with the gate,
        # the scaled queries and keys, and their rotated copies for every piece of the values.
        return saved + (8 * model.gau_features + 4 * model.gau_key_width) * size
    shape = model.with_heads(name)
    gated = shape.output_gates and shape.output_gates + shape.attention_width  # the gates, and the gated outputs
    normed = shape.num_kv_heads * shape.head_dim * model.value_norm  # the normalised values
    if shape.kv_lora_rank is None:
        projected = shape.packed_attention_width
    else:  # the latents with the shared key, the normalised latents, and keys and values without positions
        latents = shape.kv_lora_rank + (shape.q_lora_rank or 0)
        projected = _latent_rows(shape) + latents
        projected += shape.num_attention_heads * (shape.unrotated_dim + shape.value_dim)
        saved += latents * (4 if size == 4 else 6)
    inner = projected + shape.attention_width + gated + normed + _mlp_numbers(model, mlp, size)
    inner += _adapter_numbers(config, name, mlp, size)
    saved += hidden * size * model.layer_scale
    return saved + (inner * size + _operand_bytes(config, size, backends)) / tensor


def _adapter_numbers(config: Config, name: str, mlp: str, size: int) -> float:
    """Count the additional numbers of `size` bytes per token that one block saves with adapters. The result is usually
    negative, because frozen matrices do not save their inputs.

    An adapter saves the product of its input with A. With dropout, it also saves its input after dropout and the mask.
    With DoRA, it also saves the outputs of the weight and of the adapter.
    """
    lora, model = config.optimizer.lora, config.model.with_heads(name)
    if lora is None:
        return 0
    saved: float = sum(
        lora.rank + (2 * inputs if lora.dropout else 0) + (2 * outputs if lora.dora else 0)
        for inputs, outputs in _adapted_matrices(config, name)
    )
    projections = {"query", "key", "value"}
    if projections & {*lora.targets, *lora.also}:
        saved -= _not_kept(config, name)
    reading = {*lora.also, *(() if lora.dropout else lora.targets)}  # parts with matrices that save their inputs
    routed = mlp == EXPERTS and "router" in reading
    # Whether attention and the MLP save their inputs.
    inputs = [bool(reading & projections), "mlp" in reading or (routed and size == 4)]
    if model.gpt_j_residual and model.gpt_j_tied:
        inputs = [any(inputs)]  # both have the same input
    saved -= inputs.count(False) * model.hidden_size
    if model.kv_lora_rank is not None and not reading & projections:  # the normalised latents
        saved -= model.kv_lora_rank + (model.q_lora_rank or 0)
    if mlp != EXPERTS:
        return saved - model.ffn_hidden_size * ("mlp" not in reading)
    if not routed and size < 4:
        saved -= model.hidden_size * 4 / size  # the router's copy in float32
    rows = model.moe_top_k * (model.expert_width + model.hidden_size) + (model.moe_shared_intermediate_size or 0)
    return saved - rows * ("mlp" not in reading)


def _not_kept(config: Config, name: str) -> int:
    """Count the numbers per token in the queries and keys that a block does not save if queries, keys and values are
    separate tensors. A rotation saves neither queries nor keys. Polar forms save the inputs of their magnitudes.
    """
    model, position = config.model.with_heads(name), config.layer_types[name]
    normed = model.use_qk_layernorm or model.qk_norm is not None or model.unweighted_qk_norm
    if normed or not position.embedding.rotary or build_method(position, model).form.by_magnitudes:
        return 0
    return model.attention_width + (0 if position.pos_emb in COEFFICIENTS else model.num_kv_heads * model.head_dim)


def _norm_extra(model: ModelConfig, size: int) -> float:
    """Return the bytes per feature that a norm saves in addition to its input and output. Only RMSNorm and ScaleNorm
    save additional tensors, in float32.
    """
    return 0 if model.norm in ("layernorm", "non_parametric_layernorm") else 4 if size == 4 else 6


def _mlp_numbers(model: ModelConfig, mlp: str, size: int) -> float:
    """Count the numbers of `size` bytes that the MLP or the mixture of experts saves per token."""
    if mlp != EXPERTS:
        return _inner_numbers(model, model.ffn_hidden_size)
    h, shared = model.hidden_size, model.moe_shared_intermediate_size
    # Every chosen expert has a copy of the token and a result. The router saves its scores in float32, and in half
    # precision also the token in float32.
    chosen = model.moe_top_k * (_inner_numbers(model, model.expert_width) + 2 * h)
    router = (3 * model.moe_num_experts + h * (size < 4)) * 4 / size
    every = 0 if shared is None else _inner_numbers(model, shared) + h * model.moe_shared_gate
    return chosen + router + every


def _inner_numbers(model: ModelConfig, width: int) -> int:
    """Count the numbers that an MLP with `width` inner features saves per token. ReLU saves only its output."""
    gated = model.activation in GATED_ACTIVATIONS
    first = 0 if model.activation == "relu" else packed_mlp_width(model, width)
    return first + width * (2 if gated else 1) + width * (2 if model.activation == "clamped_swiglu" else 0)


def _operand_bytes(config: Config, size: int, backends: Backends) -> float:
    """Return the bytes per token of the rotated queries and keys and of the activations saved to compute them, averaged
    over all layers. Non-rotary methods save no such tensors.
    """
    types = config.layer_types

    def of_type(name: str) -> float:
        model, position, backend = config.model.with_heads(name), types[name], backends.get(name, "sdpa")
        method = operand_method(position, model, backend)
        queries = model.num_attention_heads
        operands = (queries + model.num_kv_heads) * saved_width(method)
        if backend in PADDING:
            # The padded output and its copy without padding. With latents, the padded values are also saved.
            operands += queries * method.operand_dim * (1 + (method.latent is not None))
        elif backend != "triton":  # its output needs no copy
            operands += queries * model.value_dim
        coefficients = COEFFICIENTS.get(position.pos_emb, 0.0) * position.rotary_pct
        copied = position.embedding.rotary or method.latent is not None
        return (operands * size + coefficients * queries * model.head_dim * 4) * copied

    return sum(map(of_type, config.model.layer_names)) / config.model.num_layers


def operand_method(position: PositionConfig, model: ModelConfig, backend: str) -> PositionMethod:
    """Build the position method for `backend`. The backend determines whether it receives magnitudes or operands."""
    return build_method(position, model).with_backend(BACKENDS[backend])


def saved_width(method: PositionMethod) -> int:
    """Return the number of features per head that attention saves and caches. They are features of Q' or K', or
    magnitudes.
    """
    return method.head_dim if method.magnitudes else method.operand_dim


def _kept_products(model: ModelConfig, size: int, tensor: int) -> float:
    """Return the bytes per token that selective checkpointing keeps: the results of matrix products and attention."""
    h = model.hidden_size
    rows = sum(_product_rows(model.with_heads(name)) for name in model.layer_names) / model.num_layers
    mixed = model.mixtures / model.num_layers
    experts = model.moe_top_k * (packed_mlp_width(model, model.expert_width) + h) + model.moe_num_experts
    experts += packed_mlp_width(model, model.moe_shared_intermediate_size or 0)
    shared = rows + (1 - mixed) * packed_mlp_width(model) + mixed * experts
    units = model.layer_names.count(GAU) / model.num_layers
    unit = 3 * model.gau_features + model.gau_key_width + h
    return ((1 - units) * (shared / tensor + 2 * h) + units * unit) * size
