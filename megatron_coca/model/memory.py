"""Memory that one micro batch takes for its backward pass, from the configuration alone."""

from typing import NamedTuple

from megatron_coca.config import Config, ModelConfig
from megatron_coca.config.model import GATED_ACTIVATIONS
from megatron_coca.config.position import ROTATED_METHODS
from megatron_coca.model.cost import norms_per_block, packed_attention_width, packed_mlp_width

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Of one number in each format."""

COEFFICIENTS = {"coca": 0.65, "coca_strict": 0.5}
"""What CoCA keeps beside rotated queries and keys: rectified or squared coefficients in float32, in hidden widths of
four bytes.
"""


class Activations(NamedTuple):
    """Bytes on one rank.

    Attributes:
        kept: for the backward pass by one block, on average over the groups that are recomputed together.
        working: beside that, while the backward pass of one group runs.
        ends: by the embedding and the final norm.
    """

    kept: float
    working: float
    ends: float


def activations(config: Config, micro: int, tensor: int = 1, sequence: int = 1) -> Activations:
    """What autograd keeps for `micro` samples of seq_length tokens, where `tensor` ranks share the heads and the inner
    width of the MLP, and `sequence` ranks the tokens.

    Counted are the tensors that PyTorch saves for fused attention (SDPA); the reference backend and dropout of
    attention on the CPU keep squares of the length beside. Dropout masks are counted as on the CPU, with full numbers.
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


def loss_bytes(config: Config, micro: int, tensor: int = 1, sequence: int = 1) -> float:
    """What the logits of `micro` samples and the gradients that the loss forms take on one rank at their peak."""
    model, size = config.model, BYTES[config.precision.dtype]
    tokens, vocabulary = micro * model.seq_length / sequence, model.padded_vocab_size
    chunk = model.loss_chunk_size
    if chunk == 0:
        # Logits, in half precision their float32 copy, log-probabilities, and the gradient of these.
        return tokens * vocabulary * (size + 8 + (4 if size < 4 else 0))
    head = vocabulary * model.hidden_size
    scored = min(chunk, tokens) * vocabulary * (size + 4 + (size if size < 4 else 0))
    return scored + tokens * model.hidden_size * size + head * (8 + size)


def _kept_by_block(config: Config, size: int, tensor: int) -> float:
    """Bytes for each token: what the norms, projections, attention and the MLP of one block save."""
    model, norms = config.model, norms_per_block(config.model)
    hidden = model.hidden_size
    # The input of every norm and its output; in parallel blocks both norms see one input.
    streams = norms + (1 if model.gpt_j_residual else norms)
    inner = packed_attention_width(model) + hidden + _mlp_numbers(model)
    dropout = 2 * hidden * size if model.hidden_dropout else 0
    saved = hidden * streams * size + norms * hidden * _norm_extra(model, size) + dropout
    return saved + (inner * size + _operand_bytes(config, size)) / tensor


def _norm_extra(model: ModelConfig, size: int) -> float:
    """Bytes for each feature that a norm keeps beside its input and output; RMSNorm and ScaleNorm have float32 parts."""
    return 0 if model.norm in ("layernorm", "non_parametric_layernorm") else 4 if size == 4 else 6


def _mlp_numbers(model: ModelConfig) -> int:
    """Results of both matrices' inputs: a relu's derivative follows from its result, so its input is not kept."""
    gated = model.activation in GATED_ACTIVATIONS
    first = 0 if model.activation == "relu" else packed_mlp_width(model)
    return first + model.ffn_hidden_size * (2 if gated else 1)


def _operand_bytes(config: Config, size: int) -> float:
    """Rotated queries and keys, and what forming them keeps; nothing where the method rotates nothing."""
    model, method = config.model, config.position.pos_emb
    if method not in ROTATED_METHODS:
        return 0.0
    operands = (2 * model.num_attention_heads + model.num_kv_heads) * model.head_dim * size
    return operands + COEFFICIENTS.get(method, 0.0) * model.hidden_size * config.position.rotary_pct * 4


def _kept_products(model: ModelConfig, size: int, tensor: int) -> float:
    """Bytes for each token that selective checkpointing keeps: results of the matrix products and of attention."""
    shared = packed_attention_width(model) + model.hidden_size + packed_mlp_width(model)
    return (shared / tensor + 2 * model.hidden_size) * size
