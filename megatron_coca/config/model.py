"""Keys that fix the network: its shape, activations, norms and initialisation."""

from typing import Any, Literal

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


class ModelConfig(ConfigGroup):
    """Shape of the network. Lengths are in tokens, widths in features."""

    num_layers: Count = required("Number of transformer blocks.")
    hidden_size: Count = required("Width of the residual stream.")
    num_attention_heads: Count = required("Number of query heads.")
    num_kv_heads: Count = follows(
        "num_attention_heads",
        "Number of key and value heads; fewer than the query heads means grouped-query attention.",
    )
    intermediate_size: Count | None = key(
        None,
        "Inner width of the MLP. For a gated activation, as in GPT-NeoX, two"
        " thirds of it is the width of value and gate together.",
    )
    mlp_multiple_of: Count = key(1, "The inner width of the MLP is rounded up to a multiple of this.")
    expansion_factor: Positive | None = key(
        None, "Inner width of the MLP as a multiple of hidden_size, instead of intermediate_size."
    )
    seq_length: Count = required(
        "Length in tokens that the weights are trained at. Extensions measure against it, unless"
        " rope_scaling.original_max_position_embeddings names another."
    )
    max_position_embeddings: Count = follows("seq_length", "Rows of the learned position table; at least seq_length.")
    vocab_size: Count | None = key(None, "Rows of the embedding before padding; null means the tokenizer's size.")
    make_vocab_size_divisible_by: Count = key(128, "The embedding is padded to a multiple of this many rows.")
    no_weight_tying: bool = key(False, "Give the output head its own matrix instead of the embedding's.")
    attention_config: list[Any] | None = key(
        None, "Attention type per layer. Only `global` and `flash` are known, and both mean full causal attention."
    )
    activation: Activation = key("gelu", "Activation of the MLP.")
    bias_gelu_fusion: bool = key(
        False, "With activation gelu, use its tanh approximation, as GPT-NeoX's fused kernel does."
    )
    use_bias_in_norms: bool = key(True, "Biases in the norms.")
    use_bias_in_attn_linear: bool = key(True, "Biases in the attention projections.")
    use_bias_in_mlp: bool = key(True, "Biases in the MLP.")
    gpt_j_residual: bool = key(False, "Add attention and MLP to the residual stream side by side.")
    gpt_j_tied: bool = key(False, "With gpt_j_residual, feed attention and MLP from one norm.")
    norm: Norm = key("layernorm", "Normalisation layer.")
    layernorm_epsilon: Positive = key(1.0e-5, "Epsilon of layernorm.")
    rms_norm_epsilon: Positive = key(1.0e-8, "Epsilon of rmsnorm.")
    scalenorm_epsilon: Positive = key(1.0e-8, "Epsilon of scalenorm.")
    hidden_dropout: Probability = key(0.0, "Dropout probability after embedding, attention and MLP.")
    attention_dropout: Probability = key(0.0, "Dropout probability of attention weights.")
    init_method: InitMethod = key("normal", "Initialisation of weight matrices.")
    output_layer_init_method: InitMethod = key(
        "scaled_normal", "Initialisation of the last matrix of attention and MLP."
    )
    init_method_std: Positive = key(0.02, "Standard deviation of the normal initialisations.")
    checkpoint_activations: bool = key(False, "Recompute activations of the blocks in the backward pass.")
    checkpoint_num_layers: Count = key(1, "With checkpoint_activations, blocks that are recomputed together.")
    checkpoint_policy: Literal["full", "selective"] = key(
        "full",
        "With checkpoint_activations, what is recomputed: everything within a group of blocks, or everything but"
        " matrix products and attention.",
    )
    loss_chunk_size: WholeNumber = key(
        1024, "Tokens whose logits are held at a time while the loss is computed; 0 means all of a micro batch."
    )
    torch_compile: bool = key(
        False, "Compile the blocks with torch.compile for training; needs a C++ compiler, on a GPU also Triton."
    )

    @property
    def head_dim(self) -> int:
        """Features of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: vocab_size rounded up to make_vocab_size_divisible_by.

        Raises:
            ConfigError: vocab_size is not known yet.
        """
        if self.vocab_size is None:
            raise ConfigError(
                ["vocab_size: not set, and no tokenizer has been read; set it, for example `vocab_size=50304`"]
            )
        return _round_up(self.vocab_size, self.make_vocab_size_divisible_by)

    @property
    def ffn_hidden_size(self) -> int:
        """Real inner width of the MLP (the input width of its second matrix), by GPT-NeoX's rule.

        A gated activation packs value and gate into two thirds of the nominal width, so that it has as many
        parameters as a plain one; the packed width is rounded so that each half is a multiple of mlp_multiple_of.
        """
        nominal = self.intermediate_size or int((self.expansion_factor or 4) * self.hidden_size)
        if self.activation not in GATED_ACTIVATIONS:
            return _round_up(nominal, self.mlp_multiple_of)
        return _round_up(int(nominal * 2 / 3), 2 * self.mlp_multiple_of) // 2


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
