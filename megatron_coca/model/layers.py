"""The embedding, norms, MLP and transformer block of GPT-NeoX and LLaMA."""

from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from megatron_coca.attention.context import PositionContext
from megatron_coca.attention.gated_unit import GatedAttentionUnit
from megatron_coca.attention.inputs import Backend
from megatron_coca.attention.latent import LatentAttention
from megatron_coca.attention.layer import CachedTokens, SelfAttention
from megatron_coca.attention.method import PositionMethod
from megatron_coca.attention.positions import PositionRangeError
from megatron_coca.config import ModelConfig
from megatron_coca.config.model import GAU, GLOBAL
from megatron_coca.model.summed_gradients import SummedLayerNorm, SummedRows


def sums_in_half(weight: Tensor | None) -> bool:
    """Return True if PyTorch would sum the gradient of `weight` in half precision, as its CPU kernels do."""
    if weight is None or weight.device.type != "cpu" or weight.dtype not in (torch.bfloat16, torch.float16):
        return False
    return weight.requires_grad and torch.is_grad_enabled()


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm`, except that gradients on the CPU are summed in float32."""

    def forward(self, x: Tensor) -> Tensor:
        if sums_in_half(self.weight):
            return SummedLayerNorm.apply(x, self.weight, self.bias, self.normalized_shape, self.eps)
        return super().forward(x)


class RowEmbedding(nn.Embedding):
    """`torch.nn.Embedding` with default options, except that gradients on the CPU are summed in float32."""

    def forward(self, ids: Tensor) -> Tensor:
        return SummedRows.apply(ids, self.weight) if sums_in_half(self.weight) else super().forward(ids)


class LearnedPositions(RowEmbedding):
    """A table with a learned vector for each position. A position beyond the table raises PositionRangeError."""

    def __init__(self, positions: int, hidden_size: int) -> None:
        super().__init__(positions, hidden_size, _weight=torch.empty(positions, hidden_size))

    def forward(self, positions: Tensor, reached: int | None = None) -> Tensor:
        """Look up the vectors [..., hidden_size] of integer positions [...]. Pass `reached` (largest position + 1) if
        it is known, to avoid waiting for the device.

        Raises:
            PositionRangeError: a position is beyond the table.
        """
        reached = int(positions.max()) + 1 if reached is None else reached
        if reached > self.num_embeddings:
            raise PositionRangeError(
                f"max_position_embeddings: position {reached - 1} is beyond the {self.num_embeddings} learned "
                "positions; use shorter texts, or train a model with a larger max_position_embeddings"
            )
        return super().forward(positions)


class SinusoidalPositions(nn.Module):
    """sin and cos of position * base^(-2j/hidden_size) (Vaswani et al. 2017). All sines come first, as in GPT-NeoX."""

    def __init__(self, hidden_size: int, base: float = 10000.0) -> None:
        super().__init__()
        self.hidden_size, self.base = hidden_size, base

    def forward(self, positions: Tensor, reached: int | None = None) -> Tensor:
        """Return vectors [..., hidden_size], float64, for integer positions [...] of any size."""
        pair = torch.arange(0, self.hidden_size, 2, dtype=torch.float64, device=positions.device)
        phases = positions.to(torch.float64)[..., None] * self.base ** (-pair / self.hidden_size)
        return torch.cat((phases.sin(), phases.cos()), dim=-1)[..., : self.hidden_size]


ABSOLUTE: dict[str, Callable[[ModelConfig], nn.Module]] = {
    "learned": lambda model: LearnedPositions(model.max_position_embeddings, model.hidden_size),
    "sinusoidal": lambda model: SinusoidalPositions(model.hidden_size, model.sinusoidal_base),
}


def absolute(methods: Iterable[PositionMethod], model: ModelConfig) -> nn.Module | None:
    """Build the module of absolute positions, or return None if no position method needs it. All layers share this
    module.
    """
    named = next((method.name for method in methods if method.name in ABSOLUTE), None)
    return ABSOLUTE[named](model) if named is not None else None


class Embedding(nn.Module):
    """Map input_ids [batch, length] to [batch, length, hidden_size] in the dtype of the weights.

    The weights are created empty and initialised later, because PyTorch's own initialisation of an embedding on the
    meta device imports TorchDynamo, which takes 2 seconds.
    """

    def __init__(self, model: ModelConfig, positions: nn.Module | None = None) -> None:
        super().__init__()
        rows, width = model.padded_vocab_size, model.token_width
        self.word_embeddings = RowEmbedding(rows, width, _weight=torch.empty(rows, width))
        self.position_embeddings, self.dropout, self.scale = positions, model.embedding_dropout, model.embedding_scale
        self.offset = model.opt_pos_emb_offset
        self.projection = nn.Linear(width, model.hidden_size, bias=False) if model.embedding_width else None
        self.embedding_layernorm = build_norm(model) if model.use_embedding_norm else None

    def forward(self, input_ids: Tensor, positions: Tensor, reached: int | None = None) -> Tensor:
        """`positions` is [length] or [batch, length]; `reached` is the largest position + 1, if known."""
        x = self.word_embeddings(input_ids)
        if self.scale != 1.0:
            x = x * torch.full((), self.scale, dtype=x.dtype, device=x.device)  # no copy from the host
        if self.projection is not None:
            x = self.projection(x)
        if self.embedding_layernorm is not None:
            x = self.embedding_layernorm(x)
        if self.position_embeddings is not None:
            if self.offset:
                positions, reached = positions + self.offset, None if reached is None else reached + self.offset
            x = x + self.position_embeddings(positions, reached).to(x.dtype)
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class ScaleNorm(nn.Module):
    """g * x / |x| with one learned scalar g (Nguyen and Salazar 2019), for x [..., hidden_size]. |x| is computed in
    float32 or better.
    """

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(1))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.g * (x / wide.norm(dim=-1, keepdim=True).clamp(min=self.eps)).to(x.dtype)


class ZeroCenteredRMSNorm(nn.RMSNorm):
    """RMSNorm multiplied by 1 + weight, computed in float32 or better (Gemma)."""

    def reset_parameters(self) -> None:
        """Set the weight to 0, so that the norm multiplies by 1."""
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return F.rms_norm(wide, self.normalized_shape, 1.0 + self.weight.to(wide.dtype), self.eps).to(x.dtype)


class ZeroCenteredLayerNorm(nn.LayerNorm):
    """LayerNorm multiplied by 1 + weight (Nemotron)."""

    def reset_parameters(self) -> None:
        """Set the weight to 0, so that the norm multiplies by 1, and the bias to 0."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight + 1.0, self.bias, self.eps)


def _rms_norm(model: ModelConfig, width: int) -> nn.RMSNorm:
    if model.norm == "non_parametric_rmsnorm":
        return nn.RMSNorm(width, model.rms_norm_epsilon, elementwise_affine=False)
    kind = ZeroCenteredRMSNorm if model.zero_centered_norms else nn.RMSNorm
    return kind(width, model.rms_norm_epsilon)


def _layer_norm(model: ModelConfig) -> nn.LayerNorm:
    kind = ZeroCenteredLayerNorm if model.zero_centered_norms else LayerNorm
    return kind(model.hidden_size, model.layernorm_epsilon, bias=model.use_bias_in_norms)


NORMS: dict[str, Callable[[ModelConfig], nn.Module]] = {
    "layernorm": _layer_norm,
    "rmsnorm": lambda m: _rms_norm(m, m.hidden_size),
    "non_parametric_rmsnorm": lambda m: _rms_norm(m, m.hidden_size),
    "scalenorm": lambda m: ScaleNorm(m.hidden_size, m.scalenorm_epsilon),
    "non_parametric_layernorm": lambda m: LayerNorm(m.hidden_size, m.layernorm_epsilon, elementwise_affine=False),
}


def build_norm(model: ModelConfig) -> nn.Module:
    """Build the configured norm for hidden states [..., hidden_size]."""
    return NORMS[model.norm](model)


class HeadRMSNorm(nn.Module):
    """RMSNorm over each head of x [..., heads, head_dim], with a separate weight for every head and feature."""

    def __init__(self, heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads, head_dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=self.eps) * self.weight


class HeadLayerNorm(nn.Module):
    """LayerNorm over each head of x [..., heads, head_dim], with a separate weight for every head and feature."""

    def __init__(self, heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads, head_dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], eps=self.eps) * self.weight


QK_NORMS: dict[str, Callable[[ModelConfig], nn.Module]] = {
    "layernorm": lambda m: LayerNorm(_heads(m), m.layernorm_epsilon, bias=m.use_bias_in_norms),
    "rmsnorm": lambda m: HeadRMSNorm(*_heads(m), m.rms_norm_epsilon),
    "scalenorm": lambda m: ScaleNorm(m.head_dim, m.scalenorm_epsilon),
    "non_parametric_layernorm": lambda m: LayerNorm(_heads(m), m.layernorm_epsilon, elementwise_affine=False),
    "non_parametric_rmsnorm": lambda m: _rms_norm(m, m.head_dim),
}
"""The norm that `use_qk_layernorm` adds, by the value of `norm`. Queries and keys share one norm, as in GPT-NeoX.
LayerNorm uses the mean and variance of all heads together; RMSNorm and ScaleNorm normalise each head separately.
"""


def _heads(model: ModelConfig) -> tuple[int, int]:
    return model.num_attention_heads, model.head_dim


class AllHeadsNorm(nn.Module):
    """A norm over all heads of a token together, for x [..., heads, head_dim]."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(-2)).view(x.shape)


def qk_norms(model: ModelConfig) -> dict[str, nn.Module]:
    """Build the norms for queries and keys [..., heads, head_dim]. The result maps names in SelfAttention to norms."""
    if model.use_qk_layernorm:
        return {"qk_layernorm": QK_NORMS[model.norm](model)}
    if model.qk_norm == "head":
        return {name: _rms_norm(model, model.head_dim) for name in ("query_layernorm", "key_layernorm")}
    if model.qk_norm == "layernorm":
        return {
            name: LayerNorm(model.head_dim, model.layernorm_epsilon) for name in ("query_layernorm", "key_layernorm")
        }
    heads = {"query_layernorm": model.num_attention_heads, "key_layernorm": model.num_kv_heads}
    if model.qk_norm == "projection":
        return {name: AllHeadsNorm(_rms_norm(model, count * model.head_dim)) for name, count in heads.items()}
    if model.qk_norm == "layernorm_by_head":
        return {name: HeadLayerNorm(count, model.head_dim, model.layernorm_epsilon) for name, count in heads.items()}
    return {}


def unweighted_qk_norms(model: ModelConfig, method: PositionMethod) -> dict[str, nn.Module]:
    """Build norms without weights for queries and keys. The result maps names in SelfAttention to norms. Only layers
    with a rotary method have these norms.
    """
    if not (model.unweighted_qk_norm and method.form.rotary):
        return {}
    names = ("query_layernorm", "key_layernorm")
    return {name: nn.RMSNorm(model.head_dim, model.rms_norm_epsilon, elementwise_affine=False) for name in names}


def value_norms(model: ModelConfig) -> dict[str, nn.Module]:
    """Build the norm without weights for values [..., heads, head_dim]. The result maps a name in SelfAttention to the
    norm.
    """
    norm = nn.RMSNorm(model.head_dim, model.rms_norm_epsilon, elementwise_affine=False)
    return {"value_layernorm": norm} if model.value_norm else {}


ActivationFunction = Callable[[Tensor], Tensor]


class XIELU(nn.Module):
    """The expanded integral of the ELU (Huang and Schlag 2024, arXiv:2411.13010), as in Apertus.

    The result is a x^2 + beta x for x > 0, else c (expm1(min(x, eps)) - x) + beta x. Here a = softplus(weight[0]),
    c = beta + softplus(weight[1]) and (beta, eps) = weight[2:]. beta and eps are not trained.
    """

    def __init__(self) -> None:
        super().__init__()
        beta, slope = 0.5, 0.8
        trained = torch.tensor([slope, slope - beta]).expm1().log()
        self.weight = nn.Parameter(torch.cat((trained, torch.tensor([beta, -1e-6]))))

    def forward(self, x: Tensor) -> Tensor:
        positive, negative = F.softplus(self.weight[:2]).unbind()
        beta, eps = self.weight[2:].detach().unbind()
        below = (torch.expm1(torch.minimum(x, eps)) - x) * (beta + negative)
        return torch.where(x > 0, positive * x * x, below) + beta * x


def scaled_silu(x: Tensor, alpha: float) -> Tensor:
    """x sigmoid(alpha x)."""
    return x * torch.sigmoid(alpha * x)


UNGATED: dict[str, ActivationFunction] = {
    "gelu": F.gelu,
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
    "silu": F.silu,
    "swish": F.silu,
    "mish": F.mish,
    "softsign": F.softsign,
}
GATED: dict[str, ActivationFunction] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": partial(F.gelu, approximate="tanh"),
    "reglu": F.relu,
    "glu": torch.sigmoid,
    "bilinear": lambda gate: gate,
    "clamped_swiglu": F.silu,
}

LEARNED: dict[str, type[nn.Module]] = {"xielu": XIELU}
"""Activations with learned parameters, without a gate."""

TOKENS_AT_ONCE = 8192
"""Number of tokens that an MLP processes at once if no gradients are needed. This limits the memory for the inner
features.
"""


def clamped(value: Tensor, gate: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Return (value + 1, gate) of `clamped_swiglu`. First the value is clamped to [-limit, limit], and the gate is
    clamped to at most `limit`.
    """
    return value.clamp(-limit, limit) + 1, gate.clamp(max=limit)


class FeedForward(nn.Module):
    """The part that MLPs and mixtures of experts share: the activation between two linear maps, with its gate."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.gated = model.activation in GATED
        self.limit = model.swiglu_limit if model.activation == "clamped_swiglu" else None
        self.activation = build_activation(model)

    def inner(self, packed: Tensor) -> Tensor:
        """Return the inner features. `packed` is the output of the first linear map; if the activation is gated, it has
        value and gate side by side.
        """
        if not self.gated:
            return self.activation(packed)
        value, gate = packed.chunk(2, dim=-1)
        if self.limit is not None:
            value, gate = clamped(value, gate, self.limit)
        return value * self.activation(gate)

    def forward(self, x: Tensor) -> Tensor:
        """Map hidden states [..., hidden_size] to the same shape. Without gradients, map at most TOKENS_AT_ONCE tokens
        at a time.
        """
        if torch.is_grad_enabled() or x.numel() // x.shape[-1] <= TOKENS_AT_ONCE:
            return self._feed(x)
        parts = [self._feed(part) for part in x.flatten(0, -2).split(TOKENS_AT_ONCE)]
        return torch.cat(parts).view(x.shape)

    def _feed(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class MLP(FeedForward):
    """linear2(act(linear1 x)) or, with a gated activation, linear2(value * act(gate)). Then (value | gate) = linear1 x,
    packed as in GPT-NeoX.

    Input and output are hidden states [..., hidden_size].
    """

    def __init__(self, model: ModelConfig, width: int | None = None) -> None:
        """`width` is the number of inner features, by default `ffn_hidden_size`."""
        super().__init__(model)
        width = model.ffn_hidden_size if width is None else width
        self.linear1 = nn.Linear(model.hidden_size, 2 * width if self.gated else width, bias=model.use_bias_in_mlp)
        self.linear2 = nn.Linear(width, model.hidden_size, bias=model.use_bias_in_mlp)

    def _feed(self, x: Tensor) -> Tensor:
        return self.linear2(self.inner(self.linear1(x)))


def build_activation(model: ModelConfig) -> ActivationFunction:
    """Return the configured activation function. For a gated activation, this is the activation of the gate."""
    if model.activation in LEARNED:
        return LEARNED[model.activation]()
    if model.activation == "clamped_swiglu":
        return partial(scaled_silu, alpha=model.swiglu_alpha)
    if model.activation == "gelu" and model.bias_gelu_fusion:
        return partial(F.gelu, approximate="tanh")  # GPT-NeoX's fused kernel uses this approximation
    return GATED.get(model.activation) or UNGATED[model.activation]


class OutputTransform(nn.Module):
    """norm(act(dense x)) for hidden states x [..., hidden_size], with the activation and biases of the MLP."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(model.hidden_size, model.hidden_size, bias=model.use_bias_in_mlp)
        self.activation, self.norm = build_activation(model), build_norm(model)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.activation(self.dense(x)))


def build_output_transform(model: ModelConfig) -> nn.Module | None:
    """Build the layer between the final norm and the output head, if the model has one. The layer maps
    [..., hidden_size] to [..., token_width].
    """
    if model.embedding_width:
        return nn.Linear(model.hidden_size, model.embedding_width, bias=False)
    return OutputTransform(model) if model.use_output_transform else None


def build_attention(
    model: ModelConfig, method: PositionMethod, backend: Backend, layer_type: str = GLOBAL
) -> SelfAttention:
    """Build the attention module of one layer type, with PyTorch's initial weights."""
    bias = model.use_bias_in_attn_linear
    if layer_type == GAU:
        return GatedAttentionUnit(model.hidden_size, model.gau_features, method, backend, bias)
    model = model.with_heads(layer_type)
    if method.latent is not None:
        return LatentAttention(
            model.hidden_size,
            model.num_attention_heads,
            method,
            backend,
            bias,
            model.attention_dropout,
            down_bias=model.use_bias_in_qkv,
            query_rank=model.q_lora_rank,
            epsilon=model.latent_norm_epsilon,
            output_gates=model.output_gates,
        )
    return SelfAttention(
        model.hidden_size,
        model.num_attention_heads,
        model.num_kv_heads,
        method,
        backend,
        bias,
        model.attention_dropout,
        qkv_bias=model.use_bias_in_qkv,
        norms=qk_norms(model) | unweighted_qk_norms(model, method) | value_norms(model),
        clip=model.clip_qkv,
        norms_rotated=model.qk_norm_after_rotation,
        output_gates=model.output_gates,
        values_from_keys=model.values_from_keys,
    )


class LayerScale(nn.Module):
    """Multiply hidden states by one learned number, initially 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Block(nn.Module):
    """A transformer block. Input and output are hidden states [batch, length, hidden_size].

    Sequential: x += attention(norm1 x); x += mlp(norm2 x). Parallel (`gpt_j_residual`): x + attention(norm1 x) +
    mlp(norm2 x); with `gpt_j_tied`, the MLP also uses norm1. `norm_position: post` normalises the outputs of attention
    and MLP instead of the inputs, `sandwich` normalises inputs and outputs, and `residual` normalises the sums:
    x = norm1(x + attention(x)); x = norm2(x + mlp(x)). Layers of type `gau` have a gated attention unit and no MLP:
    x += attention(norm1 x). With `layer_scale`, a learned number multiplies the output.
    """

    def __init__(
        self,
        model: ModelConfig,
        method: PositionMethod,
        backend: Backend,
        layer_type: str,
        mlp: type[FeedForward] = MLP,
    ) -> None:
        """`mlp` is the class of the MLP. Layers of type `gau` have no MLP."""
        super().__init__()
        self.layer_type = layer_type
        self.parallel, self.tied_norm, self.dropout = model.gpt_j_residual, model.gpt_j_tied, model.hidden_dropout
        self.residual_scale = model.residual_scale
        before, after = (model.norm_position in (place, "sandwich") for place in ("pre", "post"))
        of_sums = model.norm_position == "residual"
        self.input_layernorm = build_norm(model) if before else nn.Identity()
        self.attention = build_attention(model, method, backend, layer_type)
        self.attention_output_layernorm = build_norm(model) if after else nn.Identity()
        self.attention_sum_layernorm = build_norm(model) if of_sums else nn.Identity()
        self.layer_scale = LayerScale() if model.layer_scale else nn.Identity()
        if layer_type == GAU:
            self.mlp: FeedForward | None = None
            return
        if not (self.parallel and self.tied_norm):
            self.post_attention_layernorm = build_norm(model) if before else nn.Identity()
        self.mlp = mlp(model)
        self.mlp_output_layernorm = build_norm(model) if after else nn.Identity()
        self.mlp_sum_layernorm = build_norm(model) if of_sums else nn.Identity()

    def forward(
        self, x: Tensor, context: PositionContext, cache: CachedTokens | None = None, last: int | None = None
    ) -> Tensor:
        """Run the block. With `last`, return only the hidden states of the last tokens, [batch, last, hidden_size]."""
        normed = self.input_layernorm(x)
        attended = self._drop(self.attention_output_layernorm(self.attention(normed, context, cache)))
        if last is not None:
            x, normed, attended = x[:, -last:], normed[:, -last:], attended[:, -last:]
        if self.mlp is None:
            return self.layer_scale(self.attention_sum_layernorm(x + attended))
        if self.parallel:
            fed = self._feed(normed if self.tied_norm else self.post_attention_layernorm(x))
            return self.layer_scale(x + attended + fed)
        x = self.attention_sum_layernorm(x + attended)
        x = self.mlp_sum_layernorm(x + self._feed(self.post_attention_layernorm(x)))
        return self.layer_scale(x)

    def _feed(self, x: Tensor) -> Tensor:
        assert self.mlp is not None
        return self._drop(self.mlp_output_layernorm(self.mlp(x)))

    def _drop(self, x: Tensor) -> Tensor:
        x = F.dropout(x, self.dropout, self.training) if self.dropout else x
        return x if self.residual_scale == 1.0 else x * self.residual_scale


def soft_capped(logits: Tensor, cap: float | None) -> Tensor:
    """Return cap * tanh(logits / cap), computed in float32 or better and rounded once. Without a cap, return the
    logits.
    """
    if cap is None:
        return logits
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (cap * torch.tanh(wide / cap)).to(logits.dtype)
