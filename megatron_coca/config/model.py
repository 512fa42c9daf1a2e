"""Keys of the network (shape, activations, norms, initialization) and of its position method."""

from typing import Any, Literal

from pydantic import Field

from megatron_coca.config.base import (
    ConfigError,
    ConfigGroup,
    Count,
    Positive,
    Probability,
    WholeNumber,
    follows,
    key,
    required,
)

Activation = Literal["gelu", "geglu", "relu", "softsign", "swish", "mish", "silu", "reglu", "swiglu", "bilinear", "glu"]
Norm = Literal["layernorm", "rmsnorm", "non_parametric_layernorm", "scalenorm"]
InitMethod = Literal[
    "normal",
    "scaled_normal",
    "orthogonal",
    "scaled_orthogonal",
    "xavier_uniform",
    "xavier_normal",
    "wang_init",
    "small_init",
]
GATED_ACTIVATIONS = frozenset({"geglu", "reglu", "swiglu", "bilinear", "glu"})

LOSS_CHUNK_TOKENS, LOSS_CHUNK_BYTES = 1024, 1 << 30
"""`loss_chunk_size: auto`: tokens, or bytes of logits for the Triton kernel. With fewer chunks the weight and its
gradient are read less often.
"""


class ModelConfig(ConfigGroup):
    """Shape of the network. Lengths are in tokens, widths in features."""

    num_layers: Count = required("Number of transformer blocks.")
    hidden_size: Count = required("Width of the residual stream.")
    num_attention_heads: Count = required("Number of query heads.")
    num_kv_heads: Count = follows(
        "num_attention_heads",
        "Number of key and value heads; fewer than num_attention_heads means grouped-query attention.",
    )
    intermediate_size: Count | None = key(
        None,
        "Inner width of the MLP. As in GPT-NeoX, a gated activation uses two thirds of it for value and gate together.",
    )
    mlp_multiple_of: Count = key(1, "Round the inner width of the MLP up to a multiple of this.")
    expansion_factor: Positive | None = key(
        None, "Inner width of the MLP as a multiple of hidden_size; replaces intermediate_size."
    )
    seq_length: Count = required(
        "Training length in tokens. Extensions are relative to it, unless"
        " rope_scaling.original_max_position_embeddings is set."
    )
    max_position_embeddings: Count = follows(
        "seq_length",
        "Rows of the learned position table, at least seq_length; other position methods do not read it.",
    )
    vocab_size: Count | None = key(None, "Rows of the embedding before padding; null uses the tokenizer's size.")
    make_vocab_size_divisible_by: Count = key(128, "Pad the embedding to a multiple of this many rows.")
    no_weight_tying: bool = key(False, "Use a separate output head instead of tying it to the embedding.")
    attention_config: list[Any] | None = key(
        None, "Attention type per layer. Only `global` and `flash` are supported; both mean full causal attention."
    )
    activation: Activation = key("gelu", "Activation of the MLP.")
    bias_gelu_fusion: bool = key(
        False, "With activation gelu, use the tanh approximation, as GPT-NeoX's fused kernel does."
    )
    use_bias_in_norms: bool = key(True, "Biases in the norms.")
    use_bias_in_attn_linear: bool = key(True, "Biases in the attention projections.")
    use_bias_in_mlp: bool = key(True, "Biases in the MLP.")
    gpt_j_residual: bool = key(False, "Parallel residual: attention and MLP read the same input.")
    gpt_j_tied: bool = key(False, "With gpt_j_residual, one norm for attention and MLP.")
    norm: Norm = key("layernorm", "Normalization layer.")
    layernorm_epsilon: Positive = key(1.0e-5, "Epsilon of layernorm.")
    rms_norm_epsilon: Positive = key(1.0e-8, "Epsilon of rmsnorm.")
    scalenorm_epsilon: Positive = key(1.0e-8, "Epsilon of scalenorm.")
    hidden_dropout: Probability = key(0.0, "Dropout probability after embedding, attention and MLP.")
    attention_dropout: Probability = key(0.0, "Dropout probability of attention weights.")
    init_method: InitMethod = key("normal", "Initialization of weight matrices.")
    output_layer_init_method: InitMethod = key(
        "scaled_normal", "Initialization of the output projections of attention and MLP."
    )
    init_method_std: Positive = key(0.02, "Standard deviation of the normal initializations.")
    checkpoint_activations: bool = key(False, "Recompute the activations of the blocks in the backward pass.")
    checkpoint_num_layers: Count = key(1, "With checkpoint_activations, number of blocks recomputed together.")
    checkpoint_policy: Literal["full", "selective"] = key(
        "full",
        "With checkpoint_activations, full: recompute everything within a group of blocks; selective: recompute"
        " everything except matrix products and attention.",
    )
    loss_chunk_size: WholeNumber | Literal["auto"] = key(
        "auto",
        "Tokens whose logits are in memory at once during the loss; 0 disables chunking. auto: 1,024, with loss_kernel"
        " triton as many as have 1 GiB of logits if these are more.",
    )
    loss_kernel: Literal["auto", "torch", "triton"] = key(
        "auto",
        "Losses and gradients of a chunk's logits by PyTorch operations or one Triton kernel in place; auto: triton on"
        " a GPU, torch on a CPU.",
    )
    torch_compile: bool | Literal["auto"] = key(
        "auto",
        "Compile the blocks with torch.compile for training; needs a C++ compiler, on a GPU also Triton. auto: on a"
        " GPU, unless the log gives a reason against it.",
    )
    cuda_graphs: bool = key(
        False,
        "Capture forward and backward of a micro-batch as one CUDA graph and replay it (Megatron's cuda_graph_impl"
        " full_iteration, without the optimizer); refused with the reason where this cannot work.",
    )

    @property
    def head_dim(self) -> int:
        """Features per attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: vocab_size rounded up to make_vocab_size_divisible_by.

        Raises:
            ConfigError: vocab_size is not set, and no tokenizer has set it.
        """
        if self.vocab_size is None:
            raise ConfigError(
                "vocab_size: not set, and no tokenizer has been read; set it, for example `vocab_size=50304`"
            )
        return _round_up(self.vocab_size, self.make_vocab_size_divisible_by)

    @property
    def ffn_hidden_size(self) -> int:
        """Inner width of the MLP (input width of its second matrix), by GPT-NeoX's rule.

        A gated activation packs value and gate into two thirds of the nominal width, so that it has as many
        parameters as a plain one; the packed width is rounded so that each half is a multiple of mlp_multiple_of.
        """
        nominal = self.intermediate_size or int((self.expansion_factor or 4) * self.hidden_size)
        if self.activation not in GATED_ACTIVATIONS:
            return _round_up(nominal, self.mlp_multiple_of)
        return _round_up(int(nominal * 2 / 3), 2 * self.mlp_multiple_of) // 2


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


PositionMethod = Literal[
    "rotary",
    "coca",
    "coca_strict",
    "xpos",
    "alibi",
    "kerple_log",
    "kerple_power",
    "rpe",
    "learned",
    "sinusoidal",
    "none",
]
ROTATED_METHODS = frozenset({"rotary", "coca", "coca_strict", "xpos"})
BIASED_METHODS = frozenset({"alibi", "kerple_log", "kerple_power", "rpe"})
RopeType = Literal[
    "default",
    "linear",
    "ntk",
    "ntk_fixed",
    "ntk_mixed",
    "dynamic",
    "dynamic_max",
    "yarn",
    "dynamic_yarn",
    "longrope",
    "llama3",
    "clex",
]
MapType = Literal["rerope", "leaky_rerope", "inv_leaky_rerope", "self_extend", "lm_infinite", "streaming"]

_YARN = ("beta_fast", "beta_slow", "attention_factor", "ramp", "truncate")
SCALING_OPTIONS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "ntk": ("factor",),
    "ntk_fixed": ("factor",),
    "ntk_mixed": ("factor", "b"),
    "dynamic": ("factor",),
    "dynamic_max": ("target_length",),
    "yarn": ("factor", *_YARN),
    "dynamic_yarn": _YARN,
    "longrope": ("factor", "short_factor", "long_factor", "attention_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "clex": ("max_factor", "ode_step"),
}
"""Options of `rope_scaling` that each rope_type reads; any other is an error."""

SCALING_REQUIRED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("linear", "ntk", "ntk_fixed", "ntk_mixed", "dynamic", "yarn", "llama3"), ("factor",)),
    "dynamic_max": ("target_length",),
    "longrope": ("factor", "short_factor", "long_factor"),
}
"""Options that a rope_type requires."""

MAP_OPTIONS: dict[str, tuple[str, ...]] = {
    "rerope": ("window",),
    "leaky_rerope": ("window", "leak"),
    "inv_leaky_rerope": ("window", "target_length"),
    "self_extend": ("window", "group_size"),
    "lm_infinite": ("window", "sinks"),
    "streaming": ("window", "sinks"),
}
MAP_REQUIRED: dict[str, tuple[str, ...]] = {"inv_leaky_rerope": ("target_length",)}
LM_INFINITE_SINKS, STREAMING_SINKS = 10, 4


class RopeScaling(ConfigGroup):
    """Frequency extension of rotary positions; names follow Hugging Face's `rope_scaling` where it has them."""

    rope_type: RopeType = key("default", "Extension; docs/attention.md has the formulas.")
    factor: float = Field(default=1.0, ge=1.0, le=1.0e6, description="Scaling factor s.")
    original_max_position_embeddings: Count | None = key(
        None,
        "L in the extension's formula; null uses seq_length. For a model fine-tuned at seq_length, the length of its"
        " pretraining.",
    )
    target_length: Count | None = key(None, "dynamic_max: largest evaluation length L'.")
    beta_fast: Positive = key(32.0, "yarn: frequencies with at least this many rotations within L are unchanged.")
    beta_slow: Positive = key(1.0, "yarn: frequencies with at most this many rotations within L are divided by s.")
    attention_factor: Positive | None = key(
        None, "yarn, longrope: multiplier of cos and sin; null uses the method's formula."
    )
    ramp: Literal["dimension", "rotations"] = key(
        "dimension",
        "yarn: interpolate linearly in the dimension (as the authors' code does) or in the number of rotations (as the"
        " paper does).",
    )
    truncate: bool = key(True, "yarn: round the ends of the ramp to whole dimensions.")
    b: Positive = key(0.625, "ntk_mixed: exponent of the mix.")
    low_freq_factor: Positive = key(1.0, "llama3: wavelengths longer than L / low_freq_factor are divided by s.")
    high_freq_factor: Positive = key(4.0, "llama3: wavelengths shorter than L / high_freq_factor are unchanged.")
    short_factor: list[Positive] | None = key(None, "longrope: one divisor per frequency, up to length L.")
    long_factor: list[Positive] | None = key(None, "longrope: one divisor per frequency, beyond length L.")
    max_factor: Count = key(16, "clex: largest scaling factor in training and evaluation.")
    ode_step: Positive = key(0.1, "clex: step of the Runge-Kutta solver in units of the scaling factor.")

    def rules(self) -> dict[str, Any]:
        """Options of the frequency formula besides L, with lists as tuples; not for clex."""
        values = self.model_dump(exclude={"original_max_position_embeddings", "max_factor", "ode_step"})
        return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


class RelativePositions(ConfigGroup):
    """Distance map: rotary positions beyond a window are scored at a mapped distance."""

    type: MapType = Field(description="Distance map; docs/attention.md has the formulas.")
    window: Count | None = key(
        None,
        "Distances below the window are unchanged. Default, for the training length L: L/2 (rerope, leaky_rerope), L/4"
        " (inv_leaky_rerope, self_extend), L (lm_infinite), L - sinks (streaming).",
    )
    leak: Positive = key(16.0, "leaky_rerope: k; distances beyond the window grow by 1/k per token.")
    group_size: Count = key(8, "self_extend: group size G of positions beyond the window.")
    sinks: WholeNumber | None = key(
        None, "Initial tokens that every query attends to. Default: 10 (lm_infinite), 4 (streaming)."
    )
    target_length: Count | None = key(None, "inv_leaky_rerope: largest evaluation length L'.")

    def settings(self, training_length: int) -> dict[str, Any]:
        """Parameters of the map with defaults for the training length L."""
        sinks = {"lm_infinite": LM_INFINITE_SINKS, "streaming": STREAMING_SINKS}.get(self.type, 0)
        sinks = sinks if self.sinks is None else self.sinks
        windows = {
            "rerope": training_length // 2,
            "leaky_rerope": training_length // 2,
            "inv_leaky_rerope": training_length // 4,
            "self_extend": training_length // 4,
            "lm_infinite": training_length,
            "streaming": training_length - sinks,
        }
        leak = self.leak
        if self.type == "inv_leaky_rerope" and self.target_length is not None:
            leak = training_length / (2 * self.target_length)
        window = max(windows[self.type], 1) if self.window is None else self.window
        return {"window": window, "leak": leak, "group_size": self.group_size, "sinks": sinks}


class PositionConfig(ConfigGroup):
    """The position method and the attention backend."""

    pos_emb: PositionMethod = key(
        "learned",
        "Position method. Positions count from 0, as in the CoCA authors' code (from 1 in their paper). Among the "
        "rotary methods only `coca` (CoCA-Slack) is not shift-invariant: its scores depend on the first position.",
    )
    rotary_pct: float = Field(default=1.0, gt=0.0, le=1.0, description="Fraction of each head's features to rotate.")
    rotary_emb_base: float = Field(default=10000.0, gt=1.0, description="Base of the rotary frequencies.")
    rope_scaling: RopeScaling | None = key(None, "Frequency extension beyond the training length.")
    relative_positions: RelativePositions | None = key(None, "Distance map beyond a window.")
    logit_scaling: Literal["none", "log_n", "log_n_trained"] = key(
        "none",
        "Factor on the logits of position m, for the training length L: log_n: max(1, ln(m+1)/ln L), for evaluation;"
        " log_n_trained: ln(m+1)/ln L, also in training.",
    )
    rpe_num_buckets: int = Field(default=32, ge=4, description="rpe: number of distance buckets.")
    rpe_max_distance: int = Field(
        default=128, ge=2, description="rpe: distances from this one on share the last bucket."
    )
    attention_backend: Literal["auto", "sdpa", "merge", "flash", "flex", "triton", "reference"] = key(
        "auto", "Attention backend."
    )
    operand_kernel: Literal["auto", "torch", "triton"] = key(
        "auto",
        "Rotate queries and keys with PyTorch operations or one fused Triton kernel; auto: triton on a GPU where it"
        " can, torch otherwise.",
    )

    def original_length(self, seq_length: int) -> int:
        """Return L of the frequency extension: rope_scaling.original_max_position_embeddings or seq_length.

        Distance maps, logit scaling and evaluation always use seq_length, the last training length.
        """
        return (self.rope_scaling and self.rope_scaling.original_max_position_embeddings) or seq_length
