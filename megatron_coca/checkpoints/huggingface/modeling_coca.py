"""Decoder models for Hugging Face transformers with CoCA, xPos, ALiBi, KERPLE and other position methods.

This file is saved with the weights, is loaded with `trust_remote_code=True`, and needs only torch and transformers. The
mapping `position` in config.json describes the position method. The attention and the weight names are LLaMA's; the
mapping `network` describes the norms, the MLP and the residual connections of the blocks.

Every method is ordinary attention, softmax(Q' K'^T / sqrt(head_dim) + bias) V. This file computes Q' and K' and passes
them to the attention function that is configured in transformers. Notation: m is the position of a query, n the
position of a key, r = m - n, theta_j are the frequencies, l is the current length of a row, and L is the length from
which extensions extend (the training length, unless original_max_position_embeddings is set).

The cache contains keys without rotation, and all keys are rotated at every step. Frequencies that depend on the length
therefore stay correct while a sequence grows. Positions and lengths of a row begin at its first token that is not
padding. No state is kept between calls.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    eager_attention_forward,
)

from megatron_coca.attention.context import RotaryFrequencies, SegmentTables, TokenPositions, column, segment_tables
from megatron_coca.attention.positions.bias import BIASES, BiasSource, LearnedBias
from megatron_coca.attention.positions.distance_maps import DISTANCE_MAPS, UNMAPPED
from megatron_coca.attention.positions.forms import PLAIN, score_form
from megatron_coca.attention.positions.frequencies import EXTENSIONS, FREQUENCIES, multiplier, resonant
from megatron_coca.attention.positions.logit_scalings import LOGIT_SCALINGS
from megatron_coca.attention.positions.offsets import HeadOffsets, layer_offsets
from megatron_coca.checkpoints.huggingface.model_source import CHOICES
from megatron_coca.model.experts import ExpertMixture, ExpertRouter, StackedLinear
from megatron_coca.model.layers import (
    GATED,
    HeadRMSNorm,
    LearnedPositions,
    ScaleNorm,
    SinusoidalPositions,
    ZeroCenteredLayerNorm,
    ZeroCenteredRMSNorm,
    build_activation,
    build_norm,
    clamped,
    qk_norms,
    soft_capped,
)


class CocaDenseConfig(LlamaConfig):
    """LLaMA's configuration plus two mappings: `position` describes the position method, and `network` the blocks."""

    model_type = "coca_dense"
    position: dict | None = None
    network: dict | None = None


# Formulas -------------------------------------------------------------------------------------------------------------


class MissingOption(AttributeError, ValueError):
    """A formula or a block needs an option that is missing in config.json."""


class Options(dict):
    """A section of config.json. Its keys can also be read as attributes."""

    def __missing__(self, name: str) -> Any:
        raise MissingOption(f"config.json: {name} is missing in {dict(self)}; export the model again")

    def __getattr__(self, name: str) -> Any:
        return self[name]


ModelConfig = Options
"""The type of the network keys that norms and activations read."""


def network_of(config: CocaDenseConfig) -> Options:
    """Return the mapping `network`, extended by the model sizes that norms need."""
    if not config.network:
        raise ValueError(f"config.json: `network` is missing for this {config.model_type}; export the model again")
    heads = {"num_attention_heads": config.num_attention_heads, "num_kv_heads": config.num_key_value_heads}
    sizes = {"hidden_size": config.hidden_size, "head_dim": config.head_dim, **heads}
    width = config.network.get("moe_intermediate_size") or config.intermediate_size
    given = {name: value for name, value in config.network.items() if value is not None or LATER.get(name) is None}
    return Options(LATER | given, **sizes, expert_width=width, use_bias_in_mlp=config.mlp_bias)


LATER = {
    "qk_norm_after_rotation": False,
    "clip_qkv": None,
    "residual_scale": 1.0,
    "use_bias_in_output_head": False,
    "sinusoidal_base": 10000.0,
    "opt_pos_emb_offset": 0,
    "attention_output_gate": None,
    "embedding_width": None,
    "use_output_transform": False,
    "skip_first_norm": False,
    "swiglu_limit": 7.0,
    "swiglu_alpha": 1.702,
    "mlps": None,
    "moe_top_k": 1,
    "moe_shared_intermediate_size": None,
    "moe_shared_gate": False,
    "moe_router_scores": "softmax",
    "moe_router_bias": False,
    "moe_correction_bias": False,
    "moe_norm_topk_prob": False,
    "moe_weights_on_input": False,
    "moe_routed_scaling_factor": 1.0,
    "moe_num_groups": 1,
    "moe_top_k_groups": 1,
    "moe_group_scores": "two_best",
}
"""Values of network keys that are missing in config.json."""


class Rotary(NamedTuple):
    """Inputs of frequency formulas: the number of rotated features, the base, L, the extension's options, and the
    fastest frequency of training.
    """

    dim: int
    base: float
    original_length: int
    scaling: Options
    fastest: float = 1.0
    device: Any = None


# ASSEMBLED


# Positions ------------------------------------------------------------------------------------------------------------


def choose(table: dict[str, Any], name: str, key: str) -> Any:
    """Return the entry `name` of a table. If there is none, raise an error that lists the names in the table."""
    if name not in table:
        raise ValueError(f"config.position: {key} {name!r} is not supported; supported values: {', '.join(table)}")
    return table[name]


def read_choice(key: str, given: Any, selector: str = "type") -> tuple[Options, Options]:
    """Return the declaration of a choice and its options. `given` is its name, or a mapping with name and options."""
    given = {selector: given} if isinstance(given, str) else given
    declared = Options(choose(CHOICES[key], given.get(selector, "default"), selector if selector != "type" else key))
    return declared, Options(declared.options | {name: value for name, value in given.items() if value is not None})


class TokenPlaces(NamedTuple):
    """Positions of queries and keys [batch or 1, ...], the length of each row, and the number of cached tokens."""

    queries: Tensor
    keys: Tensor
    lengths: Tensor
    past: int


class SharedPositions(NamedTuple):
    """Values that all layers share in one forward pass.

    Attributes:
        segments: rotary tables of queries and keys for each band of distances; non-rotary forms have empty tables.
        factor: logit scaling of features that are not rotated, [batch or 1, 1, queries, 1], or None.
        distance: m - n in float32 or float64, [batch or 1, queries, keys]; None if nothing needs the distances.
        causal: whether the key does not follow the query, bool [queries, keys]; None if `distance` is None.
        inside: whether a segment scores the pair, bool [segments, batch or 1, 1, queries, keys], or None.
        seen: whether a pair is within the sliding window or chunk, bool [batch or 1, 1, queries, keys], or None.
        bias: the bias that all layers share, or None. A learned bias is a module.
    """

    segments: tuple[SegmentTables, ...]
    factor: Tensor | None
    distance: Tensor | None
    causal: Tensor | None
    inside: Tensor | None
    seen: Tensor | None
    bias: Any


def layer_names(config: Any) -> list[str]:
    """Return the type of every layer. Layers of type `global` use the position keys of the model."""
    return (config.position or {}).get("layers") or ["global"] * config.num_hidden_layers


class Positions:
    """The position method of one layer type, built from the configuration."""

    def __init__(self, config: Any, layer_type: str = "global") -> None:
        if not config.position:
            raise ValueError(f"config.json: `position` is missing for this {config.model_type}; export the model again")
        own = config.position["layer_types"][layer_type] if layer_type != "global" else {}
        given = self.given = Options(config.position | own)
        theirs = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
        if theirs.get("rope_type", "default") != "default":
            raise ValueError("rope_parameters: cannot set an extension; set config.position['rope_scaling'] instead")
        self.method, self.trained = given["pos_emb"], config.max_position_embeddings
        heads, head_dim = config.num_attention_heads, config.head_dim
        embedding, options = read_choice("pos_emb", {"type": self.method, **(given.get("pos_emb_options") or {})})
        self.form = score_form(self.method, options) if embedding.rotary else PLAIN
        self.biased, make_bias = embedding.biased, BIASES.get(self.method)
        self.bias = make_bias(heads, head_dim, Options(given | options)) if self.biased else BiasSource()
        self.extension, scaling = read_choice("rope_scaling", given.get("rope_scaling") or {}, "rope_type")
        scaling.setdefault("rope_type", "default")
        original = scaling.get("original_max_position_embeddings") or self.trained
        rotated = int(head_dim * given.get("rotary_pct", 1.0)) if self.form.rotary else 0
        self.offsets = layer_offsets(options, heads, self.form.operand_features * rotated // 2)
        self.missing_width = self.form.operand_width(head_dim, rotated) - head_dim
        dim = 2 * rotated // self.form.features
        fastest, base = 1.0, float(given.get("rotary_emb_base", 10000.0))
        if self.form.rotary and given.get("rotary_frequencies"):
            frequencies, options = read_choice("rotary_frequencies", given["rotary_frequencies"])
            fastest, base = FREQUENCIES[frequencies.name](dim, options, original)
        self.rotary = Rotary(dim, base, original, scaling, fastest)
        self.by_length = self.form.rotary and self.extension.length_dependent
        self.switch = original if self.by_length and self.extension.get("switches") else None
        self.window, self.chunk = given.get("sliding_window_width"), given.get("attention_chunk_size")
        self.limited = self.window is not None or self.chunk is not None
        self.softcap = config.network["attn_logit_softcapping"]
        self.norms_rotated = bool(config.network.get("qk_norm_after_rotation"))
        factor, options = read_choice("logit_scaling", given.get("logit_scaling") or "none")
        options.pop("type", None)
        self.logit_scaling = partial(LOGIT_SCALINGS[factor.name], **options) if factor.name != "none" else None
        self.scales_training = not factor.get("evaluation_only")
        self.bands = self.trained_bands = UNMAPPED
        if given.get("relative_positions"):
            distances, options = read_choice("relative_positions", given["relative_positions"])
            self.trained_bands = DISTANCE_MAPS[distances.name](options, self.trained)
            self.bands = UNMAPPED if distances.training_only else self.trained_bands

    @property
    def masked(self) -> bool:
        """Whether scores need a mask that this file builds, at least in training: for a bias, map, window, chunks or
        softcap.
        """
        return self.biased or self.limited or self.softcap is not None or self.trained_bands != UNMAPPED

    def shared(self, where: TokenPlaces, dtype: torch.dtype, bias: Any, training: bool) -> SharedPositions:
        """Return the values that all layers share in one forward pass, for operands in `dtype`."""
        bands, wide = self.trained_bands if training else self.bands, torch.promote_types(dtype, torch.float32)
        queries, keys = where.queries.double(), where.keys.double()
        start = torch.zeros_like(queries[:, :1])
        at_query, at_key = TokenPositions(queries, start), TokenPositions(keys, start)
        if where.keys is where.queries:
            at_key = at_query
        factor = None
        if self.logit_scaling is not None and (self.scales_training or not training):
            factor = self.logit_scaling(queries, self.trained)
        rotary, scaled = self._frequencies(where, factor) if self.form.rotary else (None, factor)
        distance = causal = inside = seen = None
        if self.biased or self.limited or self.softcap is not None or bands != UNMAPPED:
            distance = (queries[..., None] - keys[:, None]).clamp(min=0).to(wide)
            causal = torch.ones(distance.shape[1:], dtype=torch.bool, device=keys.device).tril(where.past)
        if bands != UNMAPPED:
            ends = [(b.low, *(math.inf if end is None else end for end in (b.high, b.first_keys))) for b in bands]
            index = keys[:, None]
            apart = [band.apart(queries[..., None], index) for band in bands]
            inside = [(r >= b[0]) & (r < b[1]) & (index < b[2]) for r, b in zip(apart, ends, strict=True)]
            inside = torch.stack(inside)[:, :, None]
        segments = tuple(segment_tables(band, at_query, at_key, rotary, scaled, dtype) for band in bands)
        factor = None if factor is None else column(factor, dtype)
        if self.window is not None:
            seen = (distance <= self.window)[:, None]
        if self.chunk is not None:
            seen = (queries[..., None] // self.chunk == keys[:, None] // self.chunk)[:, None]
        return SharedPositions(segments, factor, distance, causal, inside, seen, bias)

    def _frequencies(self, where: TokenPlaces, factor: Tensor | None) -> tuple[RotaryFrequencies, Tensor | None]:
        """Return the frequencies of each row, [rows or 1, 1, d/2], and `factor` times the square of the extension's
        multiplier.

        The frequencies are computed on the device of the positions, because a CUDA graph cannot copy from the host.
        """
        rotary = self.rotary._replace(device=where.queries.device)
        lengths = where.lengths.tolist() if self.by_length else [rotary.original_length]
        theta = {length: self._theta(rotary, length).to(rotary.device) for length in set(lengths)}
        if self.norms_rotated:  # norms remove the multiplier, but not its effect on their epsilon
            rows = torch.stack([theta[length] for length in lengths])[:, None]
            return RotaryFrequencies(rows, multiplier(rotary, lengths[0]), self.form.decay, True), factor
        squares = [multiplier(rotary, length) ** 2 for length in lengths]
        if set(squares) != {1.0}:
            square = squares[0] if len(lengths) == 1 else where.queries.new_tensor(squares, dtype=torch.double)[:, None]
            factor = (torch.ones_like(where.queries, dtype=torch.double) if factor is None else factor) * square
        rows = torch.stack([theta[length] for length in lengths])[:, None]
        return RotaryFrequencies(rows, 1.0, self.form.decay), factor

    def _theta(self, rotary: Rotary, length: int) -> Tensor:
        if not self.extension.learned:
            theta = EXTENSIONS[self.extension.name](rotary, length)
            return resonant(theta) if rotary.scaling.get("resonance") else theta
        solved = self.given["clex_frequencies"]  # for the lengths L, 2 L, ...
        solved = solved[min(max(length - 1, 0) // rotary.original_length, len(solved) - 1)]
        return torch.tensor(solved, dtype=torch.double)


def token_places(
    mask: Tensor | None, position_ids: Tensor | None, past: int, new: int, total: int, device: Any, cached: bool = False
) -> TokenPlaces:
    """Return the positions of `new` queries after `past` cached tokens, and of all `total` keys.

    `position_ids` may differ from 0, 1, ... The cache does not store positions, so the positions of cached tokens are
    then counted backwards from the first query.

    A mask [batch, keys] is 0 for padding. In a mask [batch, 1, queries, keys], only the last query counts.
    """
    if mask is not None and mask.dim() == 4:
        last = mask[:, 0, -1]
        mask = last if last.dtype == torch.bool else last >= 0
    real = torch.ones(1, total, dtype=torch.long, device=device)
    if mask is not None:
        real = nn.functional.pad(mask.to(device).ne(0).long(), (0, total - mask.shape[1]))
    keys = (real.cumsum(-1) - 1).clamp(min=0)
    queries = keys[:, past : past + new] if position_ids is None else position_ids.to(device)
    if cached and position_ids is not None:
        check_steps(queries, real[:, past : past + new])
    if past == 0:
        keys = queries if total == new else nn.functional.pad(queries, (0, total - new))
    elif position_ids is not None:
        first, index = queries[:, :1], torch.arange(total, device=device)
        keys = torch.where(first == keys[:, past : past + 1], keys, (first + index - past).clamp(min=0))
    return TokenPlaces(queries, keys, (queries * real[:, past : past + new]).amax(dim=-1) + 1, past)


def check_steps(positions: Tensor, real: Tensor) -> None:
    """Raise ValueError if positions do not increase by 1, except in padding. The cache does not store positions."""
    if torch.compiler.is_compiling():  # compiled code cannot read the result
        return
    if ((positions.diff(dim=-1) != 1) & (real[:, :-1] & real[:, 1:]).bool()).any():
        raise ValueError("position_ids: must increase by 1, because the cache stores no positions; set use_cache=False")


# Attention ------------------------------------------------------------------------------------------------------------

STOCK = frozenset({"eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention"})
"""Attention functions that receive all keys in every call. Other functions belong to engines that cache K'."""
WITH_MASK = frozenset({"eager", "sdpa"})


def own_attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float, dropout: float, **_: Any
) -> tuple[Tensor, Tensor]:
    """Compute attention with a relative-position map or with a softcap of the scores.

    With a map, the features of q and k are the concatenated operands of all segments, and the mask [segments, ...]
    hides each pair in all segments except one. Products are rounded to the operands' dtype once, as in `eager`.
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    mask, cap = mask if mask.dim() == 5 else mask[None], module.positions.softcap
    mask = mask.to(torch.promote_types(mask.dtype, torch.float32))
    segments = zip(q.chunk(len(mask), dim=-1), k.chunk(len(mask), dim=-1), mask, strict=True)
    products = [((a @ b.transpose(2, 3)).to(hidden) * scaling, hidden) for a, b, hidden in segments]
    scores = torch.stack([soft_capped(product, cap) + hidden for product, hidden in products])
    weights = nn.functional.dropout(scores.amax(dim=0).softmax(dim=-1).to(v.dtype), dropout, module.training)
    return (weights @ v).transpose(1, 2), weights


GATE_WIDTHS = {None: lambda head_dim: 0, "head": lambda head_dim: 1, "feature": lambda head_dim: head_dim}
"""The number of output gates of each head, by `attention_output_gate`."""


class CocaDenseAttention(LlamaAttention):
    """LLaMA's attention with the operands of the position method. For CoCA, `k_proj` computes t.

    Queries and keys may have norms. q, k and v may have biases even if the output projection has no bias. With an
    output gate, the outputs of the heads are multiplied by sigmoid(g_proj x).
    """

    def __init__(self, config: CocaDenseConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        network = network_of(config)
        heads = {"q": network.num_attention_heads, "k": network.num_kv_heads, "v": network.num_kv_heads}
        bias = config.attention_bias if network.use_bias_in_qkv is None else network.use_bias_in_qkv
        for name, count in heads.items():
            setattr(self, f"{name}_proj", nn.Linear(config.hidden_size, count * self.head_dim, bias=bias))
        self.gate_width = GATE_WIDTHS[network.attention_output_gate](self.head_dim)
        if self.gate_width:
            gates = network.num_attention_heads * self.gate_width
            self.g_proj = nn.Linear(config.hidden_size, gates, bias=bias)
        self.scaling = network.softmax_scale or self.scaling
        self.clip, self.norms_rotated = network.clip_qkv, network.qk_norm_after_rotation
        norms = qk_norms(network)
        self.names = (*norms, *norms)[:2]  # names of the query norm and the key norm
        for name, norm in norms.items():
            self.add_module(name, norm)
        self.layer_type = layer_names(config)[layer_idx]
        self.positions = Positions(config, self.layer_type)
        if self.positions.bias.by_layer is not None:
            self.position_bias = self.positions.bias.by_layer()
        self.position_offsets = self.positions.offsets() if self.positions.offsets is not None else None

    def prepare(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, shared: SharedPositions, cache: Any, cache_position: Any
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        """Return Q' and K' [batch, heads, ..., width], v, and the mask. K' and v include cached tokens.

        `q`, `k` and `v` are the projections of the new tokens. The static cache of transformers 4 needs
        `cache_position`.
        """
        form = self.positions.form
        if cache is not None:
            now = [] if cache_position is None else [{"cache_position": cache_position}]
            k, v = cache.update(k, v, self.layer_idx, *now)
        if shared.distance is not None:
            mask = self._additive_mask(mask, shared, q.dtype)
        offset = None if self.position_offsets is None else self.position_offsets()
        queries = [form.query_operand(q, segment.query, shared.factor, offset) for segment in shared.segments]
        keys = [form.key_operand(k, segment.key) for segment in shared.segments]
        if self.norms_rotated:
            pairs = [self.normed(*pair) for pair in zip(queries, keys, strict=True)]
            queries, keys = [query for query, _ in pairs], [key for _, key in pairs]
        q, k = (operands[0] if len(operands) == 1 else torch.cat(operands, dim=-1) for operands in (queries, keys))
        return q, k, v, mask

    def own_function(self, shared: SharedPositions, mask: Any, dtype: torch.dtype) -> Any:
        """Return the function that must replace the configured attention function, or None."""
        if shared.inside is not None or self.positions.softcap is not None:
            return own_attention
        # Fused kernels need a mask in the operands' dtype, but half precision is too coarse for far distances.
        eager = self.config._attn_implementation == "eager" or (self.positions.biased and mask.dtype != dtype)
        return eager_attention_forward if eager else None

    def _additive_mask(self, mask: Tensor | None, shared: SharedPositions, dtype: torch.dtype) -> Tensor:
        """Return the mask to add to the scores: the bias for visible keys, and a large negative number for hidden keys.

        The number is a float32 number even for float64 operands, because `eager` computes the softmax in float32.
        """
        mask = shared.causal if mask is None else mask
        hidden = max(torch.finfo(dtype).min, torch.finfo(torch.float32).min)
        mask = torch.where(mask, 0.0, hidden) if mask.dtype == torch.bool else mask.clamp(min=hidden)
        mask = mask.to(shared.distance)
        if self.positions.biased:
            bias = self.position_bias if shared.bias is None else shared.bias
            bias = bias.distance_bias() if isinstance(bias, LearnedBias) else bias
            mask = mask + bias.at(shared.distance).transpose(0, 1)
        if shared.inside is not None:
            return torch.where(shared.inside, mask, hidden)
        mask = mask if shared.seen is None else torch.where(shared.seen, mask, hidden)
        return mask if self.positions.biased else mask.to(dtype)

    # vLLM parses the source code of this method. The method itself must look up and call the attention function, and
    # must call each projection separately.
    def forward(
        self,
        hidden_states: Tensor,
        shared: dict[str, SharedPositions],
        attention_mask: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """Compute attention as LLaMA's layer does, but with the position values that `CocaDenseModel` passes."""
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        if self.clip is not None:
            q, k, v = (part.clamp(-self.clip, self.clip) for part in (q, k, v))
        q, k = q.view(shape), k.view(shape)
        q, k = (q, k) if self.norms_rotated else self.normed(q, k)
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        v = v.view(shape).transpose(1, 2)
        own = shared[self.layer_type]
        q, k, v, mask = self.prepare(q, k, v, attention_mask, own, past_key_values, kwargs.get("cache_position"))
        function: Any = self.own_function(own, mask, q.dtype)
        if function is None:
            function = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        dropout = self.attention_dropout if self.training else 0.0
        # Fused kernels need operands and values of the same width, so narrower values are padded with zeros.
        v = nn.functional.pad(v, (0, self.positions.missing_width)) if self.positions.missing_width else v
        output, weights = function(self, q, k, v, mask, scaling=self.scaling, dropout=dropout, **kwargs)
        output = output[..., : self.head_dim]
        if self.gate_width:
            gate = self.g_proj(hidden_states).sigmoid().view(*hidden_states.shape[:-1], -1, self.gate_width)
            output = output.reshape(shape) * gate
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1)), weights

    def normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the norms of queries and keys [batch, length, heads, head_dim], if the model has such norms."""
        if not self.names:
            return q, k
        of_query, of_key = (getattr(self, name) for name in self.names)
        return of_query(q), of_key(k)


# Blocks ---------------------------------------------------------------------------------------------------------------


class GatedMLP(LlamaMLP):
    """LLaMA's MLP, down(act(gate x) * up x), with another activation."""

    def __init__(self, config: CocaDenseConfig) -> None:
        super().__init__(config)
        if config.network["activation"] != "swiglu":  # inference engines expect LLaMA's act_fn
            del self.act_fn
            self.act_fn = build_activation(network_of(config))


class ClampedMLP(GatedMLP):
    """gpt-oss's MLP, down(act(g) * (v + 1)), for the clamped g = gate x and v = up x."""

    def __init__(self, config: CocaDenseConfig) -> None:
        super().__init__(config)
        self.limit = network_of(config).swiglu_limit

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., hidden_size] to the same shape."""
        value, gate = clamped(self.up_proj(x), self.gate_proj(x), self.limit)
        return self.down_proj(self.act_fn(gate) * value)


class PlainMLP(nn.Module):
    """GPT-NeoX's MLP, down(act(up x)), with LLaMA's names."""

    def __init__(self, config: CocaDenseConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.act_fn = build_activation(network_of(config))

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., hidden_size] to the same shape."""
        return self.down_proj(self.act_fn(self.up_proj(x)))


MIXTURES = {
    "mlps": ("dense", "experts"),
    "moe_router_scores": ("softmax", "sigmoid"),
    "moe_group_scores": ("two_best", "max"),
}
"""Network keys of mixtures of experts -> the supported values; `mlps` is a list of them."""


def check_mixtures(network: Options, layers: int) -> None:
    """Raise ValueError if config.json has a value that the mixtures of experts would misread."""
    for key, known in MIXTURES.items():
        values = network[key] if key == "mlps" else [network[key]]
        if unknown := [value for value in values if value not in known]:
            raise ValueError(f"config.network: {key} {unknown[0]!r} is not supported; supported: {', '.join(known)}")
    if len(network.mlps) != layers:
        raise ValueError(f"config.network: mlps has {len(network.mlps)} entries for {layers} layers; export again")


def build_mixture(network: Options) -> ExpertMixture:
    """Return a mixture of experts with the correction as a buffer.

    transformers makes all parameters trainable when it loads them, but the correction is not trained by gradients.
    """
    mixture = ExpertMixture(network)
    if (correction := mixture.router.correction_bias) is not None:
        del mixture.router.correction_bias
        mixture.router.register_buffer("correction_bias", correction.detach())
    return mixture


def mlp_class(activation: str) -> type[nn.Module]:
    """Return the class of dense MLPs with an activation."""
    if activation == "clamped_swiglu":
        return ClampedMLP
    return GatedMLP if activation in GATED else PlainMLP


class CocaDenseLayer(LlamaDecoderLayer):
    """A block, sequential or parallel.

    Sequential: x += attention(norm1 x), then x += mlp(norm2 x). Parallel: x + attention(norm1 x) + mlp(norm2 x); with
    `gpt_j_tied`, norm2 is norm1. With `norm_position: post`, the norms follow attention and the MLP instead of
    preceding them. With `sandwich`, norms precede and follow attention and the MLP. With `residual`, the norms follow
    the sums: x = norm1(x + attention x), then x = norm2(x + mlp x).
    """

    def __init__(self, config: CocaDenseConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        network = network_of(config)
        self.parallel, self.dropout = network.gpt_j_residual, network.hidden_dropout
        self.residual_scale = network.residual_scale
        self.one_norm = self.parallel and network.gpt_j_tied
        self.self_attn = CocaDenseAttention(config, layer_idx)
        kind = "dense" if network.mlps is None else network.mlps[layer_idx]
        self.mlp = build_mixture(network) if kind == "experts" else mlp_class(network.activation)(config)
        norm = partial(build_norm, network)
        place = network.norm_position
        before, after = (norm if place in (name, "sandwich") else nn.Identity for name in ("pre", "post"))
        of_sums = norm if place == "residual" else nn.Identity
        self.attention_sum_layernorm, self.mlp_sum_layernorm = of_sums(), of_sums()
        self.input_layernorm, self.attention_output_layernorm = before(), after()
        self.mlp_output_layernorm = after()
        if self.one_norm:
            del self.post_attention_layernorm
        else:
            self.post_attention_layernorm = before()

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the block as LLaMA's layer does."""
        normed = self.input_layernorm(hidden_states)
        attended = self._drop(self.attention_output_layernorm(self.self_attn(normed, *args, **kwargs)[0]))
        if self.parallel:
            fed = normed if self.one_norm else self.post_attention_layernorm(hidden_states)
            return hidden_states + attended + self._feed(fed)
        hidden_states = self.attention_sum_layernorm(hidden_states + attended)
        return self.mlp_sum_layernorm(hidden_states + self._feed(self.post_attention_layernorm(hidden_states)))

    def _feed(self, x: Tensor) -> Tensor:
        return self._drop(self.mlp_output_layernorm(self.mlp(x)))

    def _drop(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(x, self.dropout, self.training)
        return x if self.residual_scale == 1.0 else x * self.residual_scale


# Models ---------------------------------------------------------------------------------------------------------------


class NoTables(nn.Module):
    """Replaces the module that computes the stock model's rotary tables."""

    def forward(self, *_: Any, **__: Any) -> None:
        return None


class InitWeights:
    """Initializes the weights that LLaMA does not have: learned position weights and other norms."""

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LearnedBias | HeadOffsets):
            module.reset_parameters()
        if isinstance(module, ScaleNorm):
            nn.init.ones_(module.g)
        if isinstance(module, HeadRMSNorm):
            nn.init.ones_(module.weight)
        if isinstance(module, ZeroCenteredRMSNorm | ZeroCenteredLayerNorm):
            module.reset_parameters()
        if isinstance(module, ExpertRouter | StackedLinear):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
            for values in (module.bias, getattr(module, "correction_bias", None)):
                if values is not None:
                    nn.init.zeros_(values)


class OutputTransform(nn.Module):
    """norm(act(dense x)), with the activation and biases of the MLP."""

    def __init__(self, config: CocaDenseConfig) -> None:
        super().__init__()
        network = network_of(config)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=config.mlp_bias)
        self.activation, self.norm = build_activation(network), build_norm(network)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., hidden_size] to the same shape."""
        return self.norm(self.activation(self.dense(x)))


def attention_error(method: Positions, name: str, kept_elsewhere: bool) -> str | None:
    """Return why the attention function `name` would compute wrong results for `method`, or None.

    `kept_elsewhere` means that the function itself keeps the keys that it received for earlier tokens.
    """
    if method.masked and name not in WITH_MASK:
        return (
            f"attn_implementation: {name} does not support the model's own mask (for pos_emb {method.method}, "
            "relative_positions, a window, chunks or a softcap); use eager or sdpa"
        )
    if kept_elsewhere and method.missing_width:
        return (
            f"attn_implementation: {name} caches keys as wide as values, but the operands of pos_emb "
            f"{method.method} are wider; use eager or sdpa"
        )
    if kept_elsewhere and (method.by_length or method.form.decay):
        return (
            f"attn_implementation: {name} caches rotated keys, but rotations change with the length (pos_emb "
            f"{method.method}, rope_scaling {dict(method.rotary.scaling)}); set a rope_scaling that does not "
            "depend on the length"
        )
    return None


class CocaDenseModel(InitWeights, LlamaModel):
    """The model without its output head."""

    config_class = CocaDenseConfig
    _no_split_modules = ["CocaDenseLayer"]
    _keep_in_fp32_modules_strict = frozenset({"correction_bias"})

    def __init__(self, config: CocaDenseConfig) -> None:
        if config.network and config.network.get("attention_output_gate"):
            config.base_model_tp_plan = config.base_model_tp_plan | {"layers.*.self_attn.g_proj": "colwise"}
        super().__init__(config)
        network, positions = network_of(config), Positions(config)
        if network.mlps is not None:
            check_mixtures(network, config.num_hidden_layers)
        self.positions = {name: Positions(config, name) for name in layer_names(config)}
        self.rotary_emb = NoTables()
        self.layers = nn.ModuleList(CocaDenseLayer(config, n) for n in range(config.num_hidden_layers))
        self.norm = build_norm(network) if network.norm_position != "residual" else nn.Identity()
        self.embedding_projection = self.output_transform = None
        if network.skip_first_norm:
            self.layers[0].input_layernorm = nn.Identity()
        if network.use_output_transform:
            self.output_transform = OutputTransform(config)
        if width := network.embedding_width:
            self.embed_tokens = nn.Embedding(config.vocab_size, width, config.pad_token_id)
            self.embedding_projection = nn.Linear(width, config.hidden_size, bias=False)
            self.output_transform = nn.Linear(config.hidden_size, width, bias=False)
        if network.use_embedding_norm:
            self.embedding_layernorm = build_norm(network)
        self.position_bias = positions.bias.shared() if positions.bias.shared is not None else None
        self.clex = self.position_embeddings = None
        if positions.form.rotary and positions.extension.learned:
            # These weights are loaded but not used, because config.json contains the solved frequencies.
            up = torch.zeros(positions.rotary.dim // 2, positions.rotary.dim)
            self.clex = nn.Module()
            self.clex.register_buffer("up", up)
            self.clex.register_buffer("down", up.T.clone())
        if positions.method == "learned":
            self.position_embeddings = LearnedPositions(positions.given["max_position_embeddings"], config.hidden_size)
        if positions.method == "sinusoidal":
            self.position_embeddings = SinusoidalPositions(config.hidden_size, network.sinusoidal_base)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the model as the stock class does.

        Positions are `position_ids` if given, else they follow from the mask if given, else they are 0, 1, ...
        """
        self._check(past_key_values)
        embeds = self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds
        new, past, total = embeds.shape[1], 0, embeds.shape[1]
        if past_key_values is not None:
            past = int(past_key_values.get_seq_length())
            # Both methods return the size of a static cache in tokens, or -1 for a growing cache. transformers 4 has
            # only the second method.
            size = getattr(past_key_values, "get_max_length", None) or past_key_values.get_max_cache_shape
            total = max(past + new, size(0))
        cached = past_key_values is not None
        where = token_places(attention_mask, position_ids, past, new, total, embeds.device, cached)
        shared = {}
        for name, positions in self.positions.items():
            learned = positions.bias.shared is not None  # requires that all layers have one type
            bias = self.position_bias if learned else positions.bias.fixed
            shared[name] = positions.shared(where, embeds.dtype, bias, self.training)
        kwargs |= {"shared": shared}
        kwargs |= {"inputs_embeds": self._embedded(embeds, where.queries), "position_ids": where.queries}
        found = super().forward(attention_mask=attention_mask, past_key_values=past_key_values, **kwargs)
        if self.output_transform is not None:
            found.last_hidden_state = self.output_transform(found.last_hidden_state)
        return found

    def _embedded(self, embeds: Tensor, queries: Tensor) -> Tensor:
        """Scale and normalize the embeddings, and add absolute position embeddings."""
        network = self.config.network
        if network["embedding_scale"] != 1.0:
            embeds = embeds * torch.tensor(network["embedding_scale"], dtype=embeds.dtype, device=embeds.device)
        if self.embedding_projection is not None:
            embeds = self.embedding_projection(embeds)
        if network["use_embedding_norm"]:
            embeds = self.embedding_layernorm(embeds)
        if self.position_embeddings is not None:
            reached = 0 if torch.compiler.is_compiling() else None  # compiled code cannot read the largest position
            positions = queries + network.get("opt_pos_emb_offset", 0)
            embeds = embeds + self.position_embeddings(positions, reached).to(embeds.dtype)
        return nn.functional.dropout(embeds, network.get("embedding_dropout", network["hidden_dropout"]), self.training)

    def _check(self, cache: Any) -> None:
        """Raise ValueError if the configured attention function would compute wrong results."""
        name = self.config._attn_implementation or "eager"
        kept_elsewhere = name not in STOCK and cache is None and "/" not in name
        for method in self.positions.values():
            if reason := attention_error(method, name, kept_elsewhere):
                raise ValueError(reason)


class DenseHead(nn.Linear):
    """An output head with a factor on the hidden states and a softcap of the logits."""

    scale: float = 1.0
    cap: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., hidden_size] to logits [..., vocabulary]."""
        return soft_capped(super().forward(x if self.scale == 1.0 else x * self.scale), self.cap)


class CocaDenseForCausalLM(InitWeights, LlamaForCausalLM):
    """The model with its output head."""

    config_class = CocaDenseConfig
    _no_split_modules = ["CocaDenseLayer"]
    _keep_in_fp32_modules_strict = frozenset({"correction_bias"})

    def __init__(self, config: CocaDenseConfig) -> None:
        super().__init__(config)
        self.model = CocaDenseModel(config)
        bias = bool(config.network.get("use_bias_in_output_head"))
        width = config.network.get("embedding_width") or config.hidden_size
        self.lm_head = DenseHead(width, config.vocab_size, bias=bias)
        self.lm_head.scale = config.network["final_logit_scale"]
        self.lm_head.cap = config.network["final_logit_softcapping"]
        self.post_init()

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: Any = None,
        attention_mask: Any = None,
        inputs_embeds: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Prepare a decoding step as the stock class does.

        If LongRoPE switches to the factors for long texts, the cache is dropped and all tokens are recomputed, as in
        Phi 3's class. This is not possible if the prompt was given as embeddings.
        """
        if past_key_values is not None and self._outgrown(past_key_values, input_ids, attention_mask):
            past_key_values = None
            if "next_sequence_length" in kwargs:
                kwargs["next_sequence_length"] = None
            if kwargs.get("cache_position") is not None:  # in transformers 4
                kwargs["cache_position"] = torch.arange(input_ids.shape[1], device=input_ids.device)
        return super().prepare_inputs_for_generation(
            input_ids,
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )

    def _outgrown(self, cache: Any, input_ids: Tensor, mask: Any) -> bool:
        """Return whether a row has become longer, since the last step, than a length at which LongRoPE switches.

        The length of a row does not include padding.
        """
        switches = {positions.switch for positions in self.model.positions.values()} - {None}
        past = int(cache.get_seq_length()) if switches else 0
        if not 0 < past < input_ids.shape[1]:
            return False
        real = torch.ones_like(input_ids) if mask is None or mask.dim() != 2 else mask.ne(0).long()
        before, now = real[:, :past].sum(-1), real.sum(-1)
        return any(bool(((before <= switch) & (now > switch)).any()) for switch in switches)
