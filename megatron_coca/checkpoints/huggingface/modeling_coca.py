"""Decoders with other position methods, for Hugging Face transformers: CoCA, xPos, ALiBi, KERPLE and others.

This file is saved with the weights, is loaded with `trust_remote_code=True`, and needs only torch and transformers.
The mapping `position` in config.json describes the position method. The model has LLaMA's attention and LLaMA's names
of weights; the mapping `network` describes the norms, the MLP and the residual of its blocks.

Every method is ordinary attention, softmax(Q' K'^T / sqrt(head_dim) + bias) V. Q' and K' are formed here and passed to
the attention function that transformers is configured with. Notation: m position of a query, n of a key, r = m - n,
theta_j the frequencies, L the length that extensions measure against (the training length, unless
original_max_position_embeddings is given), l the length of a row so far.

The cache keeps keys before any rotation, and all of them are rotated at every step. So frequencies that depend on the
length stay correct while a sequence grows. Positions and lengths of a row begin at its first token that is not padding.
Nothing is kept between calls.
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
from megatron_coca.attention.positions.forms import LOGIT_SCALINGS, PLAIN, SCORE_FORMS
from megatron_coca.attention.positions.frequencies import EXTENSIONS, multiplier, resonant
from megatron_coca.checkpoints.huggingface.model_source import CHOICES
from megatron_coca.model.layers import (
    GATED,
    HeadRMSNorm,
    LearnedPositions,
    ScaleNorm,
    SinusoidalPositions,
    ZeroCenteredRMSNorm,
    build_activation,
    build_norm,
    qk_norms,
    soft_capped,
)


class CocaDenseConfig(LlamaConfig):
    """LLaMA's configuration with `position`, the position method, and `network`, which describes the block."""

    model_type = "coca_dense"
    position: dict | None = None
    network: dict | None = None


# Formulas -------------------------------------------------------------------------------------------------------------


class MissingOption(AttributeError, ValueError):
    """A formula or a block reads an option that config.json does not have."""


class Options(dict):
    """A section of config.json, its keys also as attributes."""

    def __missing__(self, name: str) -> Any:
        raise MissingOption(f"config.json: {dict(self)} has no {name}")

    def __getattr__(self, name: str) -> Any:
        return self[name]


ModelConfig = Options
"""Keys of the network, as norms and activations read them."""


def network_of(config: CocaDenseConfig) -> Options:
    """Return the mapping `network` with the sizes of the model that norms need."""
    if not config.network:
        raise ValueError(f"this {config.model_type} has no `network` in its config.json; export the model again")
    heads = {"num_attention_heads": config.num_attention_heads, "num_kv_heads": config.num_key_value_heads}
    return Options(config.network, hidden_size=config.hidden_size, head_dim=config.head_dim, **heads)


class Rotary(NamedTuple):
    """Inputs of frequency formulas: the rotary dimension d, the base, L, and the options of the extension."""

    dim: int
    base: float
    original_length: int
    scaling: Options
    device: Any = None


# ASSEMBLED


# Positions ------------------------------------------------------------------------------------------------------------


def choose(table: dict[str, Any], name: str, key: str) -> Any:
    """Return a row of a table, or raise an error that names the rows."""
    if name not in table:
        raise ValueError(f"config.position: {key} {name!r} is not known; known are {', '.join(table)}")
    return table[name]


def read_choice(key: str, given: Any, selector: str = "type") -> tuple[Options, Options]:
    """Return the declaration of a choice and its options; `given` is its name, or a mapping with name and options."""
    given = {selector: given} if isinstance(given, str) else given
    declared = Options(choose(CHOICES[key], given.get(selector, "default"), selector if selector != "type" else key))
    return declared, Options(declared.options | {name: value for name, value in given.items() if value is not None})


class TokenPlaces(NamedTuple):
    """Positions of queries and of keys [batch or 1, ...], the length of each row, and the tokens in the cache."""

    queries: Tensor
    keys: Tensor
    lengths: Tensor
    past: int


class SharedPositions(NamedTuple):
    """Values shared by all layers of one forward pass.

    Attributes:
        segments: for each band the tables of queries and keys; None for non-rotary forms.
        factor: logit scaling of features that are not rotated, [batch or 1, 1, queries, 1], or None.
        distance: m - n, float32 or better [batch or 1, queries, keys], if a bias or a map needs it, else None.
        causal: True if a key comes no later than the query, bool [queries, keys], if `distance` is given, else None.
        inside: True for the pairs that each segment scores, bool [segments, batch or 1, 1, queries, keys], or None.
        seen: True for the pairs within a sliding window or a chunk, bool [batch or 1, 1, queries, keys], or None.
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
    """Return the type of every layer; the position keys of the type `global` are the model's."""
    return (config.position or {}).get("layers") or ["global"] * config.num_hidden_layers


class Positions:
    """The position method of a type of layer, by the configuration."""

    def __init__(self, config: Any, layer_type: str = "global") -> None:
        if not config.position:
            raise ValueError(f"this {config.model_type} has no `position` in its config.json; export the model again")
        own = config.position["layer_types"][layer_type] if layer_type != "global" else {}
        given = self.given = Options(config.position | own)
        theirs = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
        if theirs.get("rope_type", "default") != "default":
            raise ValueError("an extension is set as config.position['rope_scaling'], not as rope_scaling")
        self.method, self.trained = given["pos_emb"], config.max_position_embeddings
        heads, head_dim = config.num_attention_heads, config.head_dim
        embedding, options = read_choice("pos_emb", {"type": self.method, **(given.get("pos_emb_options") or {})})
        self.form = SCORE_FORMS[self.method] if embedding.rotary else PLAIN
        self.biased, make_bias = embedding.biased, BIASES.get(self.method)
        self.bias = make_bias(heads, head_dim, Options(given | options)) if self.biased else BiasSource()
        self.extension, scaling = read_choice("rope_scaling", given.get("rope_scaling") or {}, "rope_type")
        scaling.setdefault("rope_type", "default")
        original = scaling.get("original_max_position_embeddings") or self.trained
        rotated = int(head_dim * given.get("rotary_pct", 1.0)) if self.form.rotary else 0
        self.rotary = Rotary(rotated, float(given.get("rotary_emb_base", 10000.0)), original, scaling)
        self.by_length = self.form.rotary and self.extension.length_dependent
        self.switch = original if self.by_length and self.extension.get("switches") else None
        self.window, self.chunk = given.get("sliding_window_width"), given.get("attention_chunk_size")
        self.limited = self.window is not None or self.chunk is not None
        self.softcap = config.network["attn_logit_softcapping"]
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
        """True if scores have their own mask, at least in training: a bias, a map, a window, chunks or a cap."""
        return self.biased or self.limited or self.softcap is not None or self.trained_bands != UNMAPPED

    def shared(self, where: TokenPlaces, dtype: torch.dtype, bias: Any, training: bool) -> SharedPositions:
        """Return the values that the layers of a forward pass share, for operands of `dtype`."""
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
        """Return the frequencies of each row, [rows or 1, 1, d/2], and `factor` times the multiplier's square.

        They are computed on the device of the positions, because a CUDA graph cannot copy from the host.
        """
        rotary = self.rotary._replace(device=where.queries.device)
        lengths = where.lengths.tolist() if self.by_length else [rotary.original_length]
        theta = {length: self._theta(rotary, length).to(rotary.device) for length in set(lengths)}
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
        solved = self.given["clex_frequencies"]  # of the lengths L, 2 L, ...
        solved = solved[min(max(length - 1, 0) // rotary.original_length, len(solved) - 1)]
        return torch.tensor(solved, dtype=torch.double)


def token_places(
    mask: Tensor | None, position_ids: Tensor | None, past: int, new: int, total: int, device: Any, cached: bool = False
) -> TokenPlaces:
    """Return the positions of `new` queries after `past` tokens, among `total` keys.

    The given positions of queries may differ from 0, 1, ... in a row. The cache has no positions, so its tokens then
    count back from the first query.

    A mask [batch, keys] marks keys that are padding. Of a mask [batch, 1, queries, keys], the row of the last query is
    used.
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
    """Raise ValueError if the positions of tokens without padding do not go up by 1. The cache does not keep them."""
    if torch.compiler.is_compiling():  # compiled code cannot wait for the result
        return
    if ((positions.diff(dim=-1) != 1) & (real[:, :-1] & real[:, 1:]).bool()).any():
        raise ValueError("position_ids do not go up by 1, which a cache does not keep; set use_cache=False")


# Attention ------------------------------------------------------------------------------------------------------------

STOCK = frozenset({"eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention"})
"""Attention functions that get all keys of a call. Others belong to engines that keep K' themselves."""
WITH_MASK = frozenset({"eager", "sdpa"})


def own_attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float, dropout: float, **_: Any
) -> tuple[Tensor, Tensor]:
    """Compute attention under a map, or with a cap of the scores.

    Under a map, the features of q and k are the concatenated operands of all segments, and the mask [segments, ...]
    hides each pair from all segments but its own. Products are rounded to the operands' dtype once, as in `eager`.
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    mask, cap = mask if mask.dim() == 5 else mask[None], module.positions.softcap
    mask = mask.to(torch.promote_types(mask.dtype, torch.float32))
    segments = zip(q.chunk(len(mask), dim=-1), k.chunk(len(mask), dim=-1), mask, strict=True)
    products = [((a @ b.transpose(2, 3)).to(hidden) * scaling, hidden) for a, b, hidden in segments]
    scores = torch.stack([soft_capped(product, cap) + hidden for product, hidden in products])
    weights = nn.functional.dropout(scores.amax(dim=0).softmax(dim=-1).to(v.dtype), dropout, module.training)
    return (weights @ v).transpose(1, 2), weights


class CocaDenseAttention(LlamaAttention):
    """LLaMA's attention with operands of the position method; `k_proj` computes CoCA's t.

    Queries and keys may have norms. q, k and v may have biases without a bias of the output projection.
    """

    def __init__(self, config: CocaDenseConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        network = network_of(config)
        heads = {"q": network.num_attention_heads, "k": network.num_kv_heads, "v": network.num_kv_heads}
        bias = config.attention_bias if network.use_bias_in_qkv is None else network.use_bias_in_qkv
        for name, count in heads.items():
            setattr(self, f"{name}_proj", nn.Linear(config.hidden_size, count * self.head_dim, bias=bias))
        self.scaling = network.softmax_scale or self.scaling
        norms = qk_norms(network)
        self.names = (*norms, *norms)[:2]  # of the query's norm and the key's
        for name, norm in norms.items():
            self.add_module(name, norm)
        self.layer_type = layer_names(config)[layer_idx]
        self.positions = Positions(config, self.layer_type)
        if self.positions.bias.by_layer is not None:
            self.position_bias = self.positions.bias.by_layer()

    def prepare(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, shared: SharedPositions, cache: Any, cache_position: Any
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        """Return Q', K' and v of all keys, [batch, heads, ..., head_dim], and the mask, from projections of new tokens.

        The static cache of transformers 4 reads `cache_position`.
        """
        form = self.positions.form
        if cache is not None:
            now = [] if cache_position is None else [{"cache_position": cache_position}]
            k, v = cache.update(k, v, self.layer_idx, *now)
        if shared.distance is not None:
            mask = self._additive_mask(mask, shared, q.dtype)
        queries = [form.query_operand(q, segment.query, shared.factor) for segment in shared.segments]
        keys = [form.key_operand(k, segment.key) for segment in shared.segments]
        q, k = (operands[0] if len(operands) == 1 else torch.cat(operands, dim=-1) for operands in (queries, keys))
        return q, k, v, mask

    def own_function(self, shared: SharedPositions, mask: Any, dtype: torch.dtype) -> Any:
        """Return the attention function that must replace the configured one, else None."""
        if shared.inside is not None or self.positions.softcap is not None:
            return own_attention
        # Fused kernels need a mask in the dtype of the operands, and half precision has few values for far distances.
        eager = self.config._attn_implementation == "eager" or (self.positions.biased and mask.dtype != dtype)
        return eager_attention_forward if eager else None

    def _additive_mask(self, mask: Tensor | None, shared: SharedPositions, dtype: torch.dtype) -> Tensor:
        """Return the mask to add to scores, in float32 or better: the bias, and a large negative number for other keys.

        The number fits into float32 even for float64, because `eager` computes the softmax in float32.
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

    # vLLM reads the source of this method. The attention function must be looked up and called here, and each
    # projection must be called here separately.
    def forward(
        self,
        hidden_states: Tensor,
        shared: dict[str, SharedPositions],
        attention_mask: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """Compute attention as LLaMA's layer does, with the positions from `CocaDenseModel`."""
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k = self.normed(self.q_proj(hidden_states).view(shape), self.k_proj(hidden_states).view(shape))
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        own = shared[self.layer_type]
        q, k, v, mask = self.prepare(q, k, v, attention_mask, own, past_key_values, kwargs.get("cache_position"))
        function: Any = self.own_function(own, mask, q.dtype)
        if function is None:
            function = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        dropout = self.attention_dropout if self.training else 0.0
        output, weights = function(self, q, k, v, mask, scaling=self.scaling, dropout=dropout, **kwargs)
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1)), weights

    def normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys [batch, length, heads, head_dim] after their norms, if there are any."""
        if not self.names:
            return q, k
        of_query, of_key = (getattr(self, name) for name in self.names)
        return of_query(q), of_key(k)


# Blocks ---------------------------------------------------------------------------------------------------------------


class GatedMLP(LlamaMLP):
    """LLaMA's MLP, down(act(gate x) * up x), with another activation."""

    def __init__(self, config: CocaDenseConfig) -> None:
        super().__init__(config)
        if config.network["activation"] != "swiglu":  # inference engines know LLaMA's module
            del self.act_fn
            self.act_fn = build_activation(network_of(config))


class PlainMLP(nn.Module):
    """down(act(up x)): GPT-NeoX's MLP with LLaMA's names."""

    def __init__(self, config: CocaDenseConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.act_fn = build_activation(network_of(config))

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] -> the same."""
        return self.down_proj(self.act_fn(self.up_proj(x)))


class CocaDenseLayer(LlamaDecoderLayer):
    """A block, sequential or parallel.

    Sequential: x += attention(norm1 x), x += mlp(norm2 x). Parallel: x + attention(norm1 x) + mlp(norm2 x); with
    `gpt_j_tied` norm2 is norm1. `norm_position: post` has norms after attention and MLP in place of these, and
    `sandwich` has both.
    """

    def __init__(self, config: CocaDenseConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        network = network_of(config)
        self.parallel, self.dropout = network.gpt_j_residual, network.hidden_dropout
        self.one_norm = self.parallel and network.gpt_j_tied
        self.self_attn = CocaDenseAttention(config, layer_idx)
        self.mlp = (GatedMLP if network.activation in GATED else PlainMLP)(config)
        norm = partial(build_norm, network)
        before, after = (nn.Identity if network.norm_position == place else norm for place in ("post", "pre"))
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
        hidden_states = hidden_states + attended
        return hidden_states + self._feed(self.post_attention_layernorm(hidden_states))

    def _feed(self, x: Tensor) -> Tensor:
        return self._drop(self.mlp_output_layernorm(self.mlp(x)))

    def _drop(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, self.dropout, self.training)


# Models ---------------------------------------------------------------------------------------------------------------


class NoTables(nn.Module):
    """Replaces the stock model's rotary tables."""

    def forward(self, *_: Any, **__: Any) -> None:
        return None


class InitWeights:
    """Draw the weights that a position method learns."""

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LearnedBias):
            module.reset_parameters()
        if isinstance(module, ScaleNorm):
            nn.init.ones_(module.g)
        if isinstance(module, HeadRMSNorm):
            nn.init.ones_(module.weight)
        if isinstance(module, ZeroCenteredRMSNorm):
            module.reset_parameters()


class CocaDenseModel(InitWeights, LlamaModel):
    """The network without its head."""

    config_class = CocaDenseConfig
    _no_split_modules = ["CocaDenseLayer"]

    def __init__(self, config: CocaDenseConfig) -> None:
        super().__init__(config)
        network, positions = network_of(config), Positions(config)
        self.positions = {name: Positions(config, name) for name in layer_names(config)}
        self.rotary_emb = NoTables()
        self.layers = nn.ModuleList(CocaDenseLayer(config, n) for n in range(config.num_hidden_layers))
        self.norm = build_norm(network)
        if network.use_embedding_norm:
            self.embedding_layernorm = build_norm(network)
        self.position_bias = positions.bias.shared() if positions.bias.shared is not None else None
        self.clex = self.position_embeddings = None
        if positions.form.rotary and positions.extension.learned:
            # config.json has the solved frequencies; the weights are only kept.
            up = torch.zeros(positions.rotary.dim // 2, positions.rotary.dim)
            self.clex = nn.ParameterDict({"up": up, "down": up.T.clone()}).requires_grad_(False)
        if positions.method == "learned":
            self.position_embeddings = LearnedPositions(positions.given["max_position_embeddings"], config.hidden_size)
        if positions.method == "sinusoidal":
            self.position_embeddings = SinusoidalPositions(config.hidden_size)
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
        """Run the model as the stock class does. Positions are `position_ids`, else from the mask, else 0, 1, ..."""
        self._check(past_key_values)
        embeds = self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds
        new, past, total = embeds.shape[1], 0, embeds.shape[1]
        if past_key_values is not None:
            past = int(past_key_values.get_seq_length())
            # The size of a static cache in keys, -1 for a growing cache; transformers 4 has another name for it.
            size = getattr(past_key_values, "get_max_length", None) or past_key_values.get_max_cache_shape
            total = max(past + new, size(0))
        cached = past_key_values is not None
        where = token_places(attention_mask, position_ids, past, new, total, embeds.device, cached)
        shared = {}
        for name, positions in self.positions.items():
            learned = positions.bias.shared is not None  # only if all layers are equal
            bias = self.position_bias if learned else positions.bias.fixed
            shared[name] = positions.shared(where, embeds.dtype, bias, self.training)
        kwargs |= {"shared": shared}
        kwargs |= {"inputs_embeds": self._embedded(embeds, where.queries), "position_ids": where.queries}
        return super().forward(attention_mask=attention_mask, past_key_values=past_key_values, **kwargs)

    def _embedded(self, embeds: Tensor, queries: Tensor) -> Tensor:
        """Scale and normalize the embedding, and add absolute positions to it."""
        network = self.config.network
        if network["embedding_scale"] != 1.0:
            embeds = embeds * torch.tensor(network["embedding_scale"], dtype=embeds.dtype, device=embeds.device)
        if network["use_embedding_norm"]:
            embeds = self.embedding_layernorm(embeds)
        if self.position_embeddings is not None:
            reached = 0 if torch.compiler.is_compiling() else None  # compiled code cannot wait for the largest position
            embeds = embeds + self.position_embeddings(queries, reached).to(embeds.dtype)
        return nn.functional.dropout(embeds, network["hidden_dropout"], self.training)

    def _check(self, cache: Any) -> None:
        """Raise ValueError if the configured attention function would compute wrong results."""
        name = self.config._attn_implementation or "eager"
        kept_elsewhere = name not in STOCK and cache is None and "/" not in name
        for method in self.positions.values():
            if method.masked and name not in WITH_MASK:
                raise ValueError(
                    f"attn_implementation: {name} cannot use the model's own mask (pos_emb {method.method}, "
                    "relative_positions, a window, chunks or a cap); use eager or sdpa"
                )
            if kept_elsewhere and (method.by_length or method.form.decay):
                raise ValueError(
                    f"attn_implementation: {name} keeps rotated keys, but rotations change with the length (pos_emb "
                    f"{method.method}, rope_scaling {dict(method.rotary.scaling)}); set a rope_scaling that does not "
                    "depend on the length"
                )


class DenseHead(nn.Linear):
    """A head with a factor on the hidden states and a cap of the logits."""

    scale: float = 1.0
    cap: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] -> [..., vocabulary]."""
        return soft_capped(super().forward(x if self.scale == 1.0 else x * self.scale), self.cap)


class CocaDenseForCausalLM(InitWeights, LlamaForCausalLM):
    """The network with its head."""

    config_class = CocaDenseConfig
    _no_split_modules = ["CocaDenseLayer"]

    def __init__(self, config: CocaDenseConfig) -> None:
        super().__init__(config)
        self.model = CocaDenseModel(config)
        self.lm_head = DenseHead(config.hidden_size, config.vocab_size, bias=False)
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
        """Prepare a step as the stock class does.

        If LongRoPE switches to the factors of long texts, the cache is dropped and all tokens are computed again, as in
        Phi 3's class. This is not possible for a prompt that was given as embeddings.
        """
        if past_key_values is not None and self._outgrown(past_key_values, input_ids, attention_mask):
            past_key_values = None
            if "next_sequence_length" in kwargs:
                kwargs["next_sequence_length"] = None
            if kwargs.get("cache_position") is not None:  # of transformers 4
                kwargs["cache_position"] = torch.arange(input_ids.shape[1], device=input_ids.device)
        return super().prepare_inputs_for_generation(
            input_ids,
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )

    def _outgrown(self, cache: Any, input_ids: Tensor, mask: Any) -> bool:
        """Return whether a row becomes longer than a switch after the cached tokens, without counting padding."""
        switches = {positions.switch for positions in self.model.positions.values()} - {None}
        past = int(cache.get_seq_length()) if switches else 0
        if not 0 < past < input_ids.shape[1]:
            return False
        real = torch.ones_like(input_ids) if mask is None or mask.dim() != 2 else mask.ne(0).long()
        before, now = real[:, :past].sum(-1), real.sum(-1)
        return any(bool(((before <= switch) & (now > switch)).any()) for switch in switches)
