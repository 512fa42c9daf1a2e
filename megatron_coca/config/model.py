"""Keys of the network: shape, activations, norms, initialization."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_serializer

from megatron_coca.config.base import (
    ConfigError,
    ConfigGroup,
    Count,
    Positive,
    Probability,
    Size,
    WholeNumber,
    derived,
    follows,
    key,
    required,
)

Activation = Literal[
    "gelu",
    "geglu",
    "geglu_tanh",
    "relu",
    "relu_squared",
    "xielu",
    "softsign",
    "swish",
    "mish",
    "silu",
    "reglu",
    "swiglu",
    "clamped_swiglu",
    "bilinear",
    "glu",
]
Norm = Literal["layernorm", "rmsnorm", "non_parametric_layernorm", "non_parametric_rmsnorm", "scalenorm"]
InitMethod = Literal[
    "normal",
    "scaled_normal",
    "orthogonal",
    "scaled_orthogonal",
    "xavier_uniform",
    "xavier_normal",
    "wang_init",
    "small_init",
    "single_residual_scaled_normal",
]
GATED_ACTIVATIONS = frozenset({"geglu", "geglu_tanh", "reglu", "swiglu", "clamped_swiglu", "bilinear", "glu"})
DENSE, EXPERTS = "dense", "experts"
"""The types of an MLP."""

GLOBAL = "global"
"""The layer type with the model's own position keys."""
GAU = "gau"
"""The layer type of gated attention units."""

ASSUMED_VOCABULARY = 50304
"""The vocabulary size in estimates of costs if no tokenizer is known. It is the number of embedding rows with the
tokenizer of GPT-2 or of GPT-NeoX-20B.
"""

LOSS_CHUNK_TOKENS, LOSS_CHUNK_BYTES = 1024, 1 << 30
"""Chunk size with `loss_chunk_size: auto`, in tokens, and for the Triton kernel in bytes of logits. With larger chunks,
the weight of the output head and its gradient are read less often.
"""


class HeadShape(ConfigGroup):
    """Keys of the attention heads in one layer type. A key that is not set has the model's value."""

    num_kv_heads: Size | None = key(None, "Replaces the model's key.")
    kv_channels: Size | None = key(None, "Replaces the model's key.")
    values_from_keys: bool | None = key(None, "Replaces the model's key.")

    @model_serializer(mode="wrap")
    def _only_set(self, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        return {name: value for name, value in handler(self).items() if value is not None}


def _from_widths(name: str) -> Callable[[Mapping[str, Any]], Any]:
    """Return a function that computes the property `name` from the earlier fields of the model."""
    later = {"embedding_scale": 1.0, "softmax_scale": None, "final_logit_scale": 1.0}
    return lambda fields: getattr(ModelConfig.model_construct(**{**later, **fields}), name)


class ModelConfig(ConfigGroup):
    """Shape of the network. Lengths are in tokens, widths in features."""

    num_layers: Annotated[int, Field(ge=1, le=2**14)] = required("Number of transformer blocks.")
    hidden_size: Size = required("Width of the residual stream.")
    num_attention_heads: Size = required("Number of query heads.")
    num_kv_heads: Size = follows(
        "num_attention_heads",
        "Number of key and value heads. A number below num_attention_heads means grouped-query attention.",
    )
    kv_channels: Size | None = key(
        None, "Features per attention head, as in Megatron; null: hidden_size / num_attention_heads."
    )
    head_shapes: dict[str, HeadShape] = key(
        {},
        "Layer types of `attention_config` with other heads than the model's, each with the keys that differ:"
        " num_kv_heads, kv_channels or values_from_keys. Example: `{sliding: {kv_channels: 256, num_kv_heads: 16}}`.",
    )
    kv_lora_rank: Size | None = key(
        None,
        "Latent attention, as in DeepSeek 2: keys and values are linear maps of a latent with this many features, and a"
        " cache keeps the latent instead of keys and values; null: attention with heads of keys and values.",
    )
    q_lora_rank: Size | None = key(
        None,
        "With kv_lora_rank: features of the latent of queries; null: queries are a linear map of the layer's input.",
    )
    qk_nope_head_dim: Size | None = key(
        None,
        "With kv_lora_rank: features of every query and key that have no position; null: hidden_size /"
        " num_attention_heads.",
    )
    qk_rope_head_dim: Size | None = key(
        None,
        "With kv_lora_rank: features on which pos_emb acts, in every query and in the key that all heads share; null:"
        " half of qk_nope_head_dim.",
    )
    v_head_dim: Size | None = key(None, "With kv_lora_rank: features of every value; null: qk_nope_head_dim.")
    latent_norm_epsilon: Positive = key(1.0e-6, "With kv_lora_rank: epsilon of the RMSNorms of the latents.")
    intermediate_size: Size | None = key(
        None,
        "Inner width of the MLP. As in GPT-NeoX, value and gate of a gated MLP together have two thirds of this width.",
    )
    mlp_multiple_of: Size = key(
        1,
        "Round the inner width of the MLP up to a multiple of this. GPUs need 8 for 16-bit dtypes, and 16 for float8.",
    )
    expansion_factor: Annotated[float, Field(gt=0.0, le=1024.0)] | None = key(
        None, "Inner width of the MLP as a multiple of hidden_size, instead of intermediate_size."
    )
    mlp_config: list[Any] | None = key(
        None,
        "Type of the MLP of every layer, `dense` or `experts`, in the format of `attention_config`:"
        " `[[[dense], 1], [[experts], 11]]`; null: moe_expert_interval determines the types.",
    )
    moe_num_experts: Size = key(
        1, "Experts in a mixture of experts, which replaces the MLP of a layer; 1: all MLPs are dense."
    )
    moe_top_k: Size = key(1, "Experts that process each token. No token is dropped.")
    moe_expert_interval: Count = key(
        1, "Distance between layers with a mixture of experts, beginning with the first layer, as in GPT-NeoX."
    )
    moe_intermediate_size: Size | None = key(
        None,
        "Inner width of each expert; with a gated activation, both value and gate have this width. null: the inner"
        " width of a dense MLP.",
    )
    moe_shared_intermediate_size: Size | None = key(
        None, "Inner width of an MLP beside the experts that processes every token, as in DeepSeek; null: none."
    )
    moe_shared_gate: bool = key(
        False, "Multiply the output of the shared MLP by sigmoid(x w), one number for each token, as in Qwen 2 MoE."
    )
    moe_router_type: Literal["topk", "sinkhorn"] = key(
        "topk", "How the router chooses experts. Each token is sent to the moe_top_k experts with the largest scores."
    )
    moe_router_scores: Literal["softmax", "sigmoid"] = key(
        "softmax",
        "Function from the router's logits to scores. sigmoid scores each expert by itself, as in DeepSeek 3.",
    )
    moe_router_bias: bool = key(False, "Use a bias in the router, as in gpt-oss.")
    moe_norm_topk_prob: bool = key(
        False,
        "Divide the weights of a token's experts by their sum, as in Mixtral. Without it, the weights are the scores,"
        " as in GPT-NeoX.",
    )
    moe_weights_on_input: bool = key(
        False, "Multiply the input of each expert, not its output, by the expert's weight, as in Llama 4."
    )
    moe_routed_scaling_factor: Positive = key(1.0, "Factor on the weights of the experts, as in DeepSeek.")
    moe_correction_bias: bool = key(
        False,
        "Add a number for each expert to the scores that choose experts, but not to the weights, as in DeepSeek 3. Only"
        " moe_bias_update_rate changes these numbers.",
    )
    moe_num_groups: Size = key(
        1, "Groups of experts. A token is sent only to experts in its best groups, as in DeepSeek 3; 1: one group."
    )
    moe_top_k_groups: Size = key(1, "Number of groups that a token can be sent to: the groups with the best scores.")
    moe_group_scores: Literal["two_best", "max"] = key(
        "two_best",
        "Score of a group of experts. two_best: the sum of its two largest scores, as in DeepSeek 3; max: its largest"
        " score, as in DeepSeek 2.",
    )
    seq_length: Count = required(
        "Training length in tokens. It is also the L of position extensions, unless"
        " rope_scaling.original_max_position_embeddings is set."
    )
    max_position_embeddings: Count = follows(
        "seq_length",
        "Rows of the learned position table, at least seq_length. Only pos_emb learned reads it.",
    )
    opt_pos_emb_offset: WholeNumber = key(
        0,
        "Offset that is added to the positions with pos_emb learned or sinusoidal; 2 in OPT. The learned table needs as"
        " many additional rows.",
    )
    sinusoidal_base: Positive = key(10000.0, "Base of the frequencies with pos_emb sinusoidal.")
    vocab_size: Count | None = key(None, "Rows of the embedding before padding; null: the tokenizer's vocabulary size.")
    embedding_width: Size | None = key(
        None,
        "Width of the embedding and of the output head, with a projection to hidden_size after the embedding and one"
        " back before the head, as in OPT 350M; null: hidden_size, without projections.",
    )
    make_vocab_size_divisible_by: Size = key(128, "Pad the embedding to a multiple of this many rows.")
    no_weight_tying: bool = key(False, "Use a separate output head instead of tying it to the embedding.")
    attention_config: list[Any] | None = key(
        None,
        "Type of every layer, as in GPT-NeoX: `[[[sliding, sliding, global], 4]]`. `global` and `flash` are layers with"
        " the model's position keys. `gau` is a gated attention unit, which replaces attention and MLP. All other names"
        " are keys of `layer_types`.",
    )
    gau_width: Size | None = key(
        None, "Features of the gate and the values of a gated attention unit; null: 2 hidden_size."
    )
    gau_key_width: Size = key(128, "Features of the queries and keys of a gated attention unit; must divide gau_width.")
    activation: Activation = key(
        "gelu",
        "Activation of the MLP. relu_squared is max(x, 0)^2, as in Nemotron; xielu has two learned parameters for each"
        " layer, as in Apertus; clamped_swiglu is (v + 1) g sigmoid(swiglu_alpha g) for value v and gate g, which"
        " swiglu_limit limits, as in gpt-oss.",
    )
    swiglu_limit: Positive = key(
        7.0, "With activation clamped_swiglu: largest absolute value of the value, and largest value of the gate."
    )
    swiglu_alpha: Positive = key(1.702, "With activation clamped_swiglu: the factor in the sigmoid.")
    bias_gelu_fusion: bool = key(
        False, "With activation gelu: use the tanh approximation, as GPT-NeoX's fused kernel does."
    )
    use_bias_in_norms: bool = key(True, "Use biases in the norms.")
    use_bias_in_attn_linear: bool = key(True, "Use biases in the attention projections.")
    use_bias_in_qkv: bool = follows(
        "use_bias_in_attn_linear",
        "Use biases for queries, keys and values. Set this key only if it differs from use_bias_in_attn_linear.",
    )
    use_bias_in_mlp: bool = key(True, "Use biases in the MLP.")
    use_bias_in_output_head: bool = key(
        False, "Use a bias in the output head, as in GPT-J or, with tied weights, as in CTRL."
    )
    use_output_transform: bool = key(
        False,
        "Use a square matrix, the activation and a norm between the final norm and the output head, as in ModernBERT.",
    )
    gpt_j_residual: bool = key(False, "Parallel residual: attention and MLP read the same input.")
    gpt_j_tied: bool = key(False, "With gpt_j_residual: use the same norm for attention and MLP.")
    norm: Norm = key("layernorm", "Normalization layer.")
    norm_position: Literal["pre", "post", "sandwich", "residual"] = key(
        "pre",
        "pre: norms on the inputs of attention and MLP; post: norms on their outputs, before the residual sum, as in"
        " OLMo 2; sandwich: both, as in Gemma 2; residual: norms on the residual sums, and no norm before the output"
        " head, as in GPT-1 and OPT 350M.",
    )
    skip_first_norm: bool = key(
        False, "Leave out the norm on the input of the first layer's attention, as in ModernBERT."
    )
    zero_centered_norms: bool = key(
        False,
        "With norm rmsnorm or layernorm: multiply by 1 + weight instead of weight, as in Gemma and Nemotron. Weights"
        " are initially 0.",
    )
    qk_norm: Literal["head", "projection", "layernorm", "layernorm_by_head"] | None = key(
        None,
        "Norm on queries and on keys before rotation. With CoCA, the norm of keys applies to T, before u is computed."
        " head: RMSNorm of every head, with one weight per feature, as in Qwen 3; projection: RMSNorm of all heads"
        " together, as in OLMo 2; layernorm: LayerNorm of every head, with one weight and bias per feature, as in Phi;"
        " layernorm_by_head: LayerNorm of every head, with a weight for every head and feature, as in StableLM.",
    )
    qk_norm_after_rotation: bool = key(
        False, "Apply qk_norm to the rotated queries and keys, as in Hunyuan. Only with pos_emb rotary."
    )
    unweighted_qk_norm: bool = key(
        False,
        "RMSNorm without weights on the queries and keys of every head before rotation, in layers that rotate, as in"
        " Llama 4. Only with pos_emb rotary, or none in some layers.",
    )
    clip_qkv: Positive | None = key(
        None, "Limit the features of queries, keys and values to this absolute value, as in OLMo 1."
    )
    values_from_keys: bool = key(
        False,
        "Use the projected keys, before norm and rotation, as values, instead of a projection of their own, as in the"
        " global layers of Gemma 4.",
    )
    value_norm: bool = key(False, "RMSNorm without weights on the values of every head, as in Gemma 4.")
    layer_scale: bool = key(
        False, "Multiply the output of each block, with its residual, by a learned number, as in Gemma 4. Initially 1."
    )
    attention_output_gate: Literal["head", "feature"] | None = key(
        None,
        "Multiply the output of each attention head by sigmoid(x W) before the output projection, where x is the"
        " layer's input. head: one number for each head; feature: one number for each feature of each head, as in"
        " Qwen3-Next.",
    )
    use_mup: bool = key(
        False,
        "Maximal update parametrization, with which the best learning rate does not depend on the width"
        " (docs/training.md). It sets embedding_scale, softmax_scale and final_logit_scale, and scales initial values"
        " and learning rates of matrices.",
    )
    mup_base_hidden_size: Size | None = key(
        None,
        "With use_mup: hidden_size of the model for which the learning rate and the initial values were chosen. All"
        " other widths of the two models differ by the same factor.",
    )
    mup_init_scale: Positive = key(1.0, "With use_mup: factor on the initial values of matrices and embeddings.")
    mup_attn_temp: Positive = key(
        1.0, "With use_mup: attention scores are divided by this number and by the features per head."
    )
    mup_output_temp: Positive = key(
        1.0, "With use_mup: logits are divided by this number and by hidden_size / mup_base_hidden_size."
    )
    mup_embedding_mult: Positive = key(1.0, "With use_mup: factor on the embedding of the tokens.")
    use_embedding_norm: bool = key(False, "Use a norm after the embedding, as in BLOOM.")
    embedding_scale: Positive = derived(
        1.0,
        _from_widths("derived_embedding_scale"),
        "use_mup",
        "Factor on the embedding, rounded to the dtype of the embedding, as in Gemma.",
    )
    softmax_scale: Positive | None = derived(
        None,
        _from_widths("derived_softmax_scale"),
        "use_mup",
        "Factor on the attention scores; null: 1 / sqrt(features per head).",
    )
    residual_scale: Positive = key(
        1.0, "Factor on the outputs of attention and MLP before the residual sum, as in Granite."
    )
    attn_logit_softcapping: Positive | None = key(
        None, "Replace each attention score s by c tanh(s / c), with c the value of this key, as in Gemma 2."
    )
    final_logit_softcapping: Positive | None = key(
        None, "Like attn_logit_softcapping, but for the logits of the output head."
    )
    final_logit_scale: Positive = derived(
        1.0,
        _from_widths("derived_logit_scale"),
        "use_mup",
        "Factor on the logits of the output head, as in Cohere's models.",
    )
    use_qk_layernorm: bool = key(
        False,
        "Apply the norm selected by `norm` to queries and keys before rotation, as in GPT-NeoX. With CoCA, it applies"
        " to T instead of the keys, before u is computed.",
    )
    layernorm_epsilon: Positive = key(1.0e-5, "Epsilon of layernorm.")
    rms_norm_epsilon: Positive = key(1.0e-8, "Epsilon of rmsnorm.")
    scalenorm_epsilon: Positive = key(1.0e-8, "Epsilon of scalenorm.")
    hidden_dropout: Probability = key(0.0, "Dropout probability after embedding, attention and MLP.")
    embedding_dropout: Probability = follows(
        "hidden_dropout", "Dropout probability after the embedding. Set it only if it differs from hidden_dropout."
    )
    attention_dropout: Probability = key(0.0, "Dropout probability of attention weights.")
    init_method: InitMethod = key("normal", "Initialization of weight matrices.")
    output_layer_init_method: InitMethod = key(
        "scaled_normal", "Initialization of the output projections of attention and MLP."
    )
    init_method_std: Positive = key(0.02, "Standard deviation of the normal initializations.")
    checkpoint_activations: bool = key(False, "Recompute the activations of the blocks in the backward pass.")
    checkpoint_num_layers: Count = key(1, "With checkpoint_activations: number of blocks that are recomputed together.")
    checkpoint_policy: Literal["full", "selective"] = key(
        "full",
        "With checkpoint_activations. full: recompute everything within a group of blocks; selective: recompute"
        " everything except matrix products and attention.",
    )
    loss_chunk_size: WholeNumber | Literal["auto"] = key(
        "auto",
        "Compute the loss in chunks of this many tokens, so that only one chunk's logits are in memory; 0: all tokens"
        " at once. auto: 1,024 tokens, or with loss_kernel triton 1 GiB of logits if that is more.",
    )
    loss_kernel: Literal["auto", "torch", "triton"] = key(
        "auto",
        "Compute the loss and its gradient with PyTorch operations (torch) or with one Triton kernel in place (triton)."
        " auto: triton on a GPU, torch on a CPU.",
    )
    torch_compile: bool | Literal["auto"] = key(
        "auto",
        "Compile the blocks with torch.compile for training. This needs a C++ compiler, and on a GPU also Triton. auto:"
        " compile on a GPU if the model supports it; otherwise the log states the reason.",
    )

    @property
    def width_ratio(self) -> float:
        """With `use_mup`, hidden_size divided by the hidden_size of the base model; otherwise 1."""
        return self.hidden_size / (self.mup_base_hidden_size or self.hidden_size) if self.use_mup else 1.0

    @property
    def derived_embedding_scale(self) -> float:
        """The value of `embedding_scale` if this key is not set."""
        return self.mup_embedding_mult if self.use_mup else 1.0

    @property
    def derived_softmax_scale(self) -> float | None:
        """The value of `softmax_scale` if this key is not set."""
        return 1.0 / (self.mup_attn_temp * self.score_dim) if self.use_mup else None

    @property
    def derived_logit_scale(self) -> float:
        """The value of `final_logit_scale` if this key is not set."""
        return 1.0 / (self.mup_output_temp * self.width_ratio) if self.use_mup else 1.0

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Type of every layer; without `attention_config`, all layers are `global`."""
        return layer_names(self.attention_config, self.num_layers)

    @property
    def mlp_names(self) -> tuple[str, ...]:
        """Type of the MLP of every layer, `DENSE` or `EXPERTS`.

        Raises:
            ValueError: mlp_config is malformed, or does not cover num_layers layers.
        """
        if self.moe_num_experts == 1 and self.mlp_config is None:
            return (DENSE,) * self.num_layers
        if self.mlp_config is None:
            every = self.moe_expert_interval
            return tuple(DENSE if number % every else EXPERTS for number in range(self.num_layers))
        return layer_names(self.mlp_config, self.num_layers)

    @property
    def mixtures(self) -> int:
        """Number of layers with a mixture of experts."""
        return self.mlp_names.count(EXPERTS)

    @property
    def expert_width(self) -> int:
        """Inner width of each expert."""
        return self.moe_intermediate_size or self.ffn_hidden_size

    @property
    def gau_features(self) -> int:
        """Number of features of the gate in a gated attention unit. The values have the same number."""
        return self.gau_width or 2 * self.hidden_size

    def of_type(self, name: str) -> "ModelConfig":
        """Return the shape of one layer type. A gated attention unit has one head of gau_key_width features."""
        one = {"num_attention_heads": 1, "num_kv_heads": 1, "kv_channels": self.gau_key_width}
        return self.model_copy(update=one) if name == GAU else self.with_heads(name)

    def with_heads(self, name: str) -> "ModelConfig":
        """Return the shape with the heads of one layer type according to `head_shapes`."""
        own = self.head_shapes.get(name)
        return self if own is None else self.model_copy(update=own.model_dump())

    @property
    def head_dim(self) -> int:
        """Number of features of an attention head on which the position method acts. With latent attention, queries and
        keys have `unrotated_dim` features in addition.
        """
        if self.kv_lora_rank is not None:
            return self.qk_rope_head_dim or self.unrotated_dim // 2
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def unrotated_dim(self) -> int:
        """Features per query and key without positions in latent attention; otherwise 0."""
        if self.kv_lora_rank is None:
            return 0
        return self.qk_nope_head_dim or self.hidden_size // self.num_attention_heads

    @property
    def score_dim(self) -> int:
        """Features per head of a query or key, with and without positions."""
        return self.head_dim + self.unrotated_dim

    @property
    def value_dim(self) -> int:
        """Features per head of values."""
        return self.head_dim if self.kv_lora_rank is None else self.v_head_dim or self.unrotated_dim

    @property
    def token_width(self) -> int:
        """Features of the embedding of a token, and of the input of the output head."""
        return self.embedding_width or self.hidden_size

    @property
    def attention_width(self) -> int:
        """Features of all heads' outputs together: the input width of the output projection. Without latent attention,
        these are also the features of all query heads.
        """
        return self.num_attention_heads * self.value_dim

    @property
    def packed_attention_width(self) -> int:
        """Rows of the packed projection of queries, keys and values, or of queries and keys if the keys are also the
        values. Latent attention has no such projection.
        """
        return self.attention_width + (1 if self.values_from_keys else 2) * self.num_kv_heads * self.head_dim

    @property
    def output_gates(self) -> int:
        """Rows of the output gate's projection; 0 without an output gate."""
        return {None: 0, "head": self.num_attention_heads, "feature": self.attention_width}[self.attention_output_gate]

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
        """Inner width of the MLP by GPT-NeoX's rule: the input width of its second matrix.

        A gated activation packs value and gate into two thirds of the nominal width, so that it has as many parameters
        as a plain activation. The packed width is rounded so that each half is a multiple of mlp_multiple_of.
        """
        nominal = self.intermediate_size or int((self.expansion_factor or 4) * self.hidden_size)
        if self.activation not in GATED_ACTIVATIONS:
            return _round_up(nominal, self.mlp_multiple_of)
        return _round_up(int(nominal * 2 / 3), 2 * self.mlp_multiple_of) // 2

    @property
    def narrow_mlp(self) -> str | None:
        """A warning if a gated activation has the width that GPT-NeoX's rule gives it by default, else None."""
        if self.activation not in GATED_ACTIVATIONS or self.intermediate_size or self.expansion_factor:
            return None
        return (
            f"activation {self.activation} without intermediate_size: by GPT-NeoX's rule the inner width is "
            f"{self.ffn_hidden_size}, 4/3 of hidden_size; LLaMA's 8/3 is expansion_factor=8 with mlp_multiple_of=8"
        )


def layer_names(attention_config: list[Any] | None, num_layers: int) -> tuple[str, ...]:
    """Return the type of every layer; `flash` is another name for `global`.

    Raises:
        ValueError: the list is malformed, or does not cover num_layers layers.
    """
    names: list[str] = []
    for item in [[[GLOBAL], "all"]] if attention_config is None else attention_config:
        match item:
            case str():
                names.append(item)
            case [[*group], "all"] if group and num_layers % len(group) == 0:
                names += group * (num_layers // len(group))
            case [[*group], "all"] if group:
                raise ValueError(
                    f"a group of {len(group)} layers, repeated by `all`, does not divide num_layers {num_layers}"
                )
            case [[*group], int(repeats)] if group:
                names += group * max(min(repeats, num_layers + 1), 0)
            case _:
                raise ValueError('expected a list such as [[["global"], 12]]')
    if len(names) != num_layers:
        raise ValueError(
            f"covers {len(names)} layers, but num_layers is {num_layers}; change one, or leave this key out"
        )
    return tuple(GLOBAL if name == "flash" else str(name) for name in names)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
