"""LLaMA and GPT-NeoX with other position methods, for Hugging Face transformers: CoCA, xPos, ALiBi, KERPLE and others.

This file is saved with the weights, is loaded with `trust_remote_code=True`, and needs torch and transformers alone.
The position method is the mapping `position` in config.json. `coca_dense` is LLaMA's attention in a block whose norms,
MLP and residual the mapping `network` describes.

Every method is ordinary attention, softmax(Q' K'^T / sqrt(head_dim) + bias) V. Q' and K' are formed here and passed to
the attention function that transformers is configured with. Notation: m position of a query, n of a key, r = m - n, R_p
the rotation by position p of feature i with feature i + d/2, theta_j the frequencies, L the length that extensions
measure against (the training length, unless original_max_position_embeddings is given), l the length of a row so far,
u (of CoCA: Zhu et al. 2024, arXiv 2309.08646) relu of the mean of each pair of a key.

The cache keeps keys before any rotation, of CoCA only u, and all of them are rotated at every step: frequencies that
depend on the length are right while a sequence grows. Positions and lengths of a row begin at its first token that is
not padding. Nothing is kept between calls.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, GPTNeoXModel, LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRMSNorm,
    eager_attention_forward,
)


class CocaLlamaConfig(LlamaConfig):
    """LLaMA's configuration with `position`, the position method."""

    model_type = "coca_llama"
    position: dict | None = None


class CocaGPTNeoXConfig(GPTNeoXConfig):
    """GPT-NeoX's configuration with `position`, the position method."""

    model_type = "coca_gpt_neox"
    position: dict | None = None


class CocaDenseConfig(CocaLlamaConfig):
    """LLaMA's configuration with `position`, and `network`, which describes blocks that are not LLaMA's."""

    model_type = "coca_dense"
    network: dict | None = None


# Operands -------------------------------------------------------------------------------------------------------------


class Tables(NamedTuple):
    """cos and sin of position times frequency, including all factors on scores; [batch or 1, 1, length, d/2]."""

    cos: Tensor
    sin: Tensor


def rotate(x: Tensor, tables: Tables) -> Tensor:
    """R_p x."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * tables.cos - second * tables.sin, second * tables.cos + first * tables.sin), dim=-1)


def slack_query(q: Tensor, tables: Tables) -> Tensor:
    """q * (R_m q)."""
    return q * rotate(q, tables)


def coefficients(t: Tensor) -> Tensor:
    """u, [..., d] -> [..., d/2]."""
    first, second = t.chunk(2, dim=-1)
    return ((first + second) / 2).relu()


def slack_key(u: Tensor, tables: Tables) -> Tensor:
    """R_n (u, u)."""
    return torch.cat((u * (tables.cos - tables.sin), u * (tables.cos + tables.sin)), dim=-1)


def strict_query(q: Tensor, tables: Tables) -> Tensor:
    """R_m (|q|^2, 0), |q|^2 pair by pair."""
    first, second = q.chunk(2, dim=-1)
    return strict_key(first.square() + second.square(), tables)


def strict_key(u: Tensor, tables: Tables) -> Tensor:
    """R_n (u, 0)."""
    return torch.cat((u * tables.cos, u * tables.sin), dim=-1)


def identity(x: Tensor, *_: Any) -> Tensor:
    return x


class Form(NamedTuple):
    """A score form: Q' of q, what a cache keeps of k, K' of that, and Q' and K' on features that are not rotated."""

    query: Callable[[Tensor, Tables], Tensor] = identity
    kept: Callable[[Tensor], Tensor] = identity
    key: Callable[[Tensor, Tables], Tensor] = identity
    query_rest: Callable[[Tensor], Tensor] = identity
    key_rest: Callable[[Tensor], Tensor] = identity


PLAIN, ROTATED = Form(), Form(rotate, identity, rotate)
FORMS = {
    "rotary": ROTATED,
    "xpos": ROTATED,
    "coca": Form(slack_query, coefficients, slack_key, torch.square, torch.relu),
    "coca_strict": Form(strict_query, coefficients, strict_key, torch.square, torch.relu),
    **dict.fromkeys(("alibi", "kerple_log", "kerple_power", "rpe", "learned", "sinusoidal", "none"), PLAIN),
}


def split(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the first `width` features and the others, in float32 or better."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x[..., :width], x[..., width:]


# Frequencies ----------------------------------------------------------------------------------------------------------


class Options(dict):
    """A section of config.json whose errors name a missing key."""

    def __missing__(self, name: str) -> Any:
        raise ValueError(f"config.position: {dict(self)} has no {name}")


class Frequencies(NamedTuple):
    """theta_j, float64 [d/2], and what cos and sin are multiplied by."""

    theta: Tensor
    multiplier: float = 1.0


def geometric(dim: int, base: float, device: Any) -> Tensor:
    """theta_j = base^(-2j/d)."""
    return base ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)


def ntk(p: "Positions", theta: Tensor, alpha: float) -> Frequencies:
    """NTK-aware: base' = base * alpha^(d/(d-2)) divides the slowest frequency by alpha and keeps the fastest."""
    d = p.rotary_dim
    return Frequencies(geometric(d, p.base * alpha ** (d / (d - 2)), theta.device) if d > 2 else theta)


def ntk_mixed(p: "Positions", theta: Tensor, exponent: float) -> Frequencies:
    """theta_j / factor^(((j+1) / (d/2))^exponent)."""
    share = (torch.ones_like(theta).cumsum(0) / len(theta)) ** exponent
    return Frequencies(theta * torch.exp(-math.log(p.scaling["factor"]) * share))


def kept_by_rotations(p: "Positions", theta: Tensor, low: float, high: float) -> Tensor:
    """1 for frequencies with at least `high` rotations within L, 0 with at most `low`, linear between."""
    return ((p.length * theta / (2 * math.pi) - low) / (high - low)).clamp(0, 1)


def kept_by_dimension(p: "Positions", theta: Tensor, low: float, high: float) -> Tensor:
    """The same, linear in the number of the pair (the YaRN authors' code)."""
    d = p.rotary_dim
    first, last = (d * math.log(p.length / (2 * math.pi * turns)) / (2 * math.log(p.base)) for turns in (high, low))
    if p.scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, d - 1)
    pair = torch.arange(d // 2, dtype=torch.float64, device=theta.device)
    return 1 - ((pair - first) / max(last - first, 0.001)).clamp(0, 1)


RAMPS = {"dimension": kept_by_dimension, "rotations": kept_by_rotations}


def yarn(p: "Positions", theta: Tensor, factor: float) -> Frequencies:
    """Peng et al. 2023: slow frequencies divided by the factor, fast ones kept."""
    s = p.scaling
    kept = RAMPS[s.get("ramp") or "dimension"](p, theta, s.get("beta_slow") or 1.0, s.get("beta_fast") or 32.0)
    temperature = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    return Frequencies((1 - kept) * theta / factor + kept * theta, s.get("attention_factor") or temperature)


def longrope(p: "Positions", theta: Tensor, length: int) -> Frequencies:
    """Ding et al. 2024: a divisor for each frequency, one list up to L and one beyond."""
    s = p.scaling
    factors = theta.new_tensor(s["long_factor" if length > p.length else "short_factor"])
    default = math.sqrt(1 + math.log(s["factor"]) / math.log(p.length)) if s["factor"] > 1 else 1.0
    return Frequencies(theta / factors, s.get("attention_factor") or default)


def llama3(p: "Positions", theta: Tensor, length: int) -> Frequencies:
    """Llama 3.1: by its rotations within L a frequency is kept, mixed, or divided by the factor."""
    s = p.scaling
    kept = kept_by_rotations(p, theta, s.get("low_freq_factor") or 1.0, s.get("high_freq_factor") or 4.0)
    return Frequencies((1 - kept) * theta / s["factor"] + kept * theta)


def dynamic(p: "Positions", theta: Tensor, length: int) -> Frequencies:
    """Dynamic NTK: theta_j up to L, beyond it alpha = factor * l/L - (factor - 1)."""
    return ntk(p, theta, p.scaling["factor"] * (max(length, p.length) / p.length - 1) + 1)


def dynamic_max(p: "Positions", theta: Tensor, length: int) -> Frequencies:
    """Dynamic NTK made for a target length, which shorter inputs see too."""
    target = p.scaling["target_length"]
    factor = target / (2 * p.length)
    return ntk(p, theta, factor * max(target, length) / p.length - (factor - 1))


def clex(p: "Positions", theta: Tensor, length: int) -> Frequencies:
    """Chen et al. 2024: the learned equation, solved when the model was exported, at t = ceil(l/L)."""
    solved = p.given["clex_frequencies"]
    return Frequencies(theta.new_tensor(solved[min(max(length - 1, 0) // p.length, len(solved) - 1)]))


EXTENSIONS: dict[str, Callable[["Positions", Tensor, int], Frequencies]] = {
    "default": lambda p, theta, _: Frequencies(theta),
    "linear": lambda p, theta, _: Frequencies(theta / p.scaling["factor"]),
    "ntk": lambda p, theta, _: ntk(p, theta, p.scaling["factor"]),
    "ntk_fixed": lambda p, theta, _: ntk_mixed(p, theta, 1.0),
    "ntk_mixed": lambda p, theta, _: ntk_mixed(p, theta, p.scaling.get("b") or 0.625),
    "dynamic": dynamic,
    "dynamic_max": dynamic_max,
    "yarn": lambda p, theta, _: yarn(p, theta, p.scaling["factor"]),
    "dynamic_yarn": lambda p, theta, length: yarn(p, theta, max(1.0, length / p.length)),
    "longrope": longrope,
    "llama3": llama3,
    "clex": clex,
}
"""From theta_j of the training length and the length of a row to the frequencies that are used."""
LENGTH_DEPENDENT = frozenset({"dynamic", "dynamic_max", "dynamic_yarn", "longrope", "clex"})


# Maps, logit scaling, biases ------------------------------------------------------------------------------------------


class Segment(NamedTuple):
    """Pairs at distances low <= r < high, of the first `first_keys` keys, and where query and key are rotated to."""

    low: float = 0
    high: float = math.inf
    first_keys: float = math.inf
    query: Callable[[Tensor], Tensor] = identity
    key: Callable[[Tensor], Tensor] = identity


def leaky(s: Options, leak: float) -> Segment:
    """Leaky ReRoPE (Su 2023): distance (r - w)/k + w."""
    return Segment(s["window"], query=lambda m: (m + s["window"] * (leak - 1)) / leak, key=lambda n: n / leak)


def rerope(s: Options, first_keys: float = math.inf) -> Segment:
    """ReRoPE (Su 2023) and LM-Infinite (Han et al. 2023): distance w."""
    return Segment(s["window"], math.inf, first_keys, lambda m: torch.full_like(m, s["window"]), torch.zeros_like)


MAPS: dict[str, Callable[[Options, "Positions"], Segment]] = {
    "rerope": lambda s, p: rerope(s),
    "leaky_rerope": lambda s, p: leaky(s, s["leak"]),
    "inv_leaky_rerope": lambda s, p: leaky(s, p.trained / (2 * s["target_length"])),
    "self_extend": lambda s, p: Segment(
        s["window"],
        query=lambda m: (m / s["group_size"]).floor() + s["window"] - s["window"] // s["group_size"],
        key=lambda n: (n / s["group_size"]).floor(),
    ),
    "lm_infinite": lambda s, p: rerope(s, s["sinks"]),
    "streaming": lambda s, p: Segment(
        s["window"], math.inf, s["sinks"], lambda m: m.clamp(max=s["sinks"] + s["window"] - 1)
    ),
}
"""The far segment of each relative-position map; the near one, r < window, is as without it."""
TRAINED_MAPS = frozenset({"inv_leaky_rerope"})
"""Maps that a model is trained with and evaluated without."""

LOGIT_SCALINGS: dict[str, Callable[[Tensor, int], Tensor] | None] = {
    "none": None,
    "log_n": lambda m, length: (m.log1p() / math.log(length)).clamp(min=1.0),
    "log_n_trained": lambda m, length: m.log1p() / math.log(length),
}


class KerpleBias(nn.Module):
    """KERPLE's two numbers for each head of a layer (Chi et al. 2022): -p ln(1 + a r), or -a r^p."""

    def __init__(self, heads: int, power: bool) -> None:
        super().__init__()
        self.power = power
        self.bias_p, self.bias_a = nn.Parameter(torch.ones(heads)), nn.Parameter(torch.ones(heads))

    def forward(self, distance: Tensor) -> Tensor:
        """[batch, 1, queries, keys] -> [batch, heads, queries, keys]."""
        p, a = (x.float().clamp(0.01)[:, None, None] for x in (self.bias_p, self.bias_a))
        return -a * distance.pow(p.clamp(max=2.0)) if self.power else -p * torch.log1p(a * distance)


# Positions ------------------------------------------------------------------------------------------------------------


def choose(table: dict[str, Any], name: str, key: str, section: str = "position") -> Any:
    """Return a row of a table, or raise an error that names the rows."""
    if name not in table:
        raise ValueError(f"config.{section}: {key} {name!r} is not known; known are {', '.join(table)}")
    return table[name]


class TokenPlaces(NamedTuple):
    """Positions of queries and of keys [batch or 1, ...], the length of each row, and the tokens in the cache."""

    queries: Tensor
    keys: Tensor
    lengths: Tensor
    past: int


class SharedPositions(NamedTuple):
    """Values shared by all layers of one forward pass.

    Attributes:
        tables: for each segment the tables of queries and keys; empty for non-rotary forms.
        factor: logit scaling of features that are not rotated, [batch or 1, 1, queries, 1], or None.
        distance: m - n, float32 [batch or 1, 1, queries, keys], where a bias or a map needs it, else None.
        causal: True where a key comes no later than the query, bool [queries, keys]; likewise.
        inside: True for the pairs that each segment scores, bool [segments, batch or 1, 1, queries, keys], or None.
        bias_table: the table of a bias that all layers share, [buckets, heads], or None.
    """

    tables: tuple[tuple[Tables, Tables], ...]
    factor: Tensor | None
    distance: Tensor | None
    causal: Tensor | None
    inside: Tensor | None
    bias_table: Tensor | None


class Positions:
    """The position method that a configuration names, with what it needs of the model's shape."""

    def __init__(self, config: Any) -> None:
        if not config.position:
            raise ValueError(f"this {config.model_type} has no `position` in its config.json; export the model again")
        given = self.given = Options(config.position)
        theirs = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
        if theirs.get("rope_type", "default") != "default":
            raise ValueError("an extension is set as config.position['rope_scaling'], not as rope_scaling")
        self.method = given["pos_emb"]
        self.form = choose(FORMS, self.method, "pos_emb")
        self.scaling = Options(given.get("rope_scaling") or {})
        self.extension = choose(EXTENSIONS, self.scaling.get("rope_type", "default"), "rope_type")
        self.trained = config.max_position_embeddings
        self.length = self.scaling.get("original_max_position_embeddings") or self.trained
        self.heads, self.base = config.num_attention_heads, float(given.get("rotary_emb_base", 10000.0))
        head_dim, rotates = config.hidden_size // self.heads, self.form is not PLAIN
        self.rotary_dim = int(head_dim * given.get("rotary_pct", 1.0)) if rotates else 0
        self.by_length = rotates and self.scaling.get("rope_type") in LENGTH_DEPENDENT
        self.logit_scaling = choose(LOGIT_SCALINGS, given.get("logit_scaling", "none"), "logit_scaling")
        far = Options(given.get("relative_positions") or {})
        self.trained_map = far.get("type") in TRAINED_MAPS
        self.far = choose(MAPS, far["type"], "relative_positions.type")(far, self) if far else None
        self.biased = self.method in ("alibi", "kerple_log", "kerple_power", "rpe")
        self.bias_scale = math.sqrt(head_dim)

    def shared(
        self, where: TokenPlaces, dtype: torch.dtype, bias_table: Tensor | None, training: bool
    ) -> SharedPositions:
        """Return what the layers of a forward pass share, for operands of `dtype`."""
        far = self.far if training or not self.trained_map else None
        segments = (Segment(),) if far is None else (Segment(high=far.low), far)
        queries, keys, past = where.queries, where.keys, where.past
        factor = distance = causal = inside = None
        if self.logit_scaling is not None:
            factor = self.logit_scaling(queries.double(), self.trained)[..., None]
        if self.biased or far is not None:
            distance = (queries[:, None, :, None] - keys[:, None, None, :]).clamp(min=0).float()
            causal = torch.ones(queries.shape[1], keys.shape[1], dtype=torch.bool, device=keys.device).tril(past)
        if far is not None:
            index = keys[:, None, None, :]
            bands = [(distance >= s.low) & (distance < s.high) & (index < s.first_keys) for s in segments]
            inside = torch.stack(bands)
        tables = self._tables(segments, where, factor, dtype) if self.rotary_dim else ()
        factor = None if factor is None else factor[:, None].to(torch.promote_types(dtype, torch.float32))
        return SharedPositions(tables, factor, distance, causal, inside, bias_table)

    def _tables(
        self, segments: tuple[Segment, ...], where: TokenPlaces, factor: Tensor | None, dtype: torch.dtype
    ) -> tuple[tuple[Tables, Tables], ...]:
        """Make tables where the positions are: a CUDA graph may copy nothing from the host."""
        m, n, wide = where.queries.double(), where.keys.double(), torch.promote_types(dtype, torch.float32)
        plain = geometric(self.rotary_dim, self.base, m.device)
        lengths = where.lengths.tolist() if self.by_length else [self.length]
        known = {length: self.extension(self, plain, length) for length in set(lengths)}
        theta = torch.stack([known[length].theta for length in lengths])[:, None]
        multipliers = [torch.full_like(plain[:1], known[length].multiplier ** 2) for length in lengths]
        scale = torch.stack(multipliers)[:, None]
        scale = scale if factor is None else scale * factor

        def table(positions: Tensor, amplitude: Any) -> Tables:
            """Phases are float64 and rounded once, to float32 at least."""
            phases = positions[..., None] * theta
            return Tables(*((wave * amplitude)[:, None].to(wide) for wave in (phases.cos(), phases.sin())))

        made = []
        for segment in segments:
            to, at = segment.query(m), segment.key(n)
            growing, shrinking = self._decay(to, at, dtype)
            made.append((table(to, scale * growing), table(at, shrinking)))
        return tuple(made)

    def _decay(self, m: Tensor, n: Tensor, dtype: torch.dtype) -> tuple[Any, Any]:
        """xPos (Sun et al. 2022): queries grow by zeta_j^((m - c)/512), keys shrink; c keeps both small."""
        if self.method != "xpos":
            return 1.0, 1.0
        pair = torch.arange(self.rotary_dim // 2, dtype=torch.float64, device=m.device)
        zeta = (2 * pair / self.rotary_dim + 0.4) / 1.4
        centre = n.amax(dim=-1, keepdim=True) / 2
        reach = 512 * math.log(torch.finfo(dtype).max / 100) / math.log(1.4 / 0.4)
        if float(centre.max()) > reach:
            raise ValueError(f"xpos reaches {2 * reach:.0f} tokens in {dtype}; load the model in another dtype")
        return tuple(zeta ** ((x - centre)[..., None] / 512) for x in (m, -n + 2 * centre))


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """sin and cos of position * 10000^(-2j/width), all sines first, in float64."""
    pair = torch.arange(0, width, 2, dtype=torch.float64, device=positions.device)
    phases = positions.double()[..., None] * 10000.0 ** (-pair / width)
    return torch.cat((phases.sin(), phases.cos()), dim=-1)[..., :width]


def token_places(
    mask: Tensor | None, position_ids: Tensor | None, past: int, new: int, total: int, device: Any
) -> TokenPlaces:
    """Return the positions of `new` queries after `past` tokens, among `total` keys.

    A mask [batch, keys] says which keys are padding; of one [batch, 1, queries, keys] the last query's row says it.
    """
    if mask is not None and mask.dim() == 4:
        last = mask[:, 0, -1]
        mask = last if last.dtype == torch.bool else last >= 0
    real = torch.ones(1, total, dtype=torch.long, device=device)
    if mask is not None:
        real = nn.functional.pad(mask.to(device).ne(0).long(), (0, total - mask.shape[1]))
    keys = (real.cumsum(-1) - 1).clamp(min=0)
    queries = keys[:, past : past + new] if position_ids is None else position_ids.to(device)
    if past == 0:
        keys = nn.functional.pad(queries, (0, total - new))
    return TokenPlaces(queries, keys, (queries * real[:, past : past + new]).amax(dim=-1) + 1, past)


# Attention ------------------------------------------------------------------------------------------------------------

STOCK = frozenset({"eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention"})
"""Attention functions that see all keys of a call; others belong to engines that keep K' themselves."""
WITH_MASK = frozenset({"eager", "sdpa"})


def mapped_attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float, dropout: float, **_: Any
) -> tuple[Tensor, Tensor]:
    """Compute attention under a map.

    Features of q and k hold the concatenated operands of all segments, and the mask [segments, ...] hides each pair
    from all segments but its own.
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    segments = zip(q.chunk(len(mask), dim=-1), k.chunk(len(mask), dim=-1), mask, strict=True)
    scores = torch.stack([(query @ key.transpose(2, 3)).float() * scaling + hidden for query, key, hidden in segments])
    weights = nn.functional.dropout(scores.amax(dim=0).softmax(dim=-1).to(v.dtype), dropout, module.training)
    return (weights @ v).transpose(1, 2), weights


class CocaAttention:
    """Attention code shared by both architectures."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.positions = Positions(config)
        if self.positions.method in ("kerple_log", "kerple_power"):
            self.position_bias = KerpleBias(self.positions.heads, self.positions.method == "kerple_power")

    def prepare(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, shared: SharedPositions, cache: Any, cache_position: Any
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        """Return Q', K' and v of all keys, [batch, heads, ..., head_dim], and the mask, from projections of new tokens.

        `cache_position` is of transformers 4, whose static cache reads it.
        """
        positions, width = self.positions, q.shape[-1]
        block, rest = split(k, positions.rotary_dim)
        k = torch.cat((positions.form.kept(block), rest), dim=-1).to(q.dtype)
        if cache is not None:
            now = [] if cache_position is None else [{"cache_position": cache_position}]
            k, v = cache.update(k, v, self.layer_idx, *now)
        if positions.biased or shared.inside is not None:
            mask = self._additive_mask(mask, shared, q.dtype)
        if shared.tables:
            queries = [self._query(q, tables, shared.factor) for tables, _ in shared.tables]
            keys = [self._key(k, tables, width) for _, tables in shared.tables]
            q, k = (operands[0] if len(operands) == 1 else torch.cat(operands, dim=-1) for operands in (queries, keys))
        elif shared.factor is not None:
            q = (q * shared.factor).to(q.dtype)
        return q, k, v, mask

    def own_function(self, shared: SharedPositions, mask: Any, dtype: torch.dtype) -> Any:
        """Return the attention function that must replace the configured one, else None."""
        if shared.inside is not None:
            return mapped_attention
        # Fused kernels want a mask in the operands' dtype, and far distances have few values in half precision.
        eager = self.config._attn_implementation == "eager" or (self.positions.biased and mask.dtype != dtype)
        return eager_attention_forward if eager else None

    def _query(self, q: Tensor, tables: Tables, factor: Tensor | None) -> Tensor:
        """Q', formed in float32 at least and rounded once."""
        form, (block, rest) = self.positions.form, split(q, self.positions.rotary_dim)
        rest = form.query_rest(rest) if factor is None else form.query_rest(rest) * factor
        return torch.cat((form.query(block, tables), rest), dim=-1).to(q.dtype)

    def _key(self, kept: Tensor, tables: Tables, head_dim: int) -> Tensor:
        """K' of what the cache kept."""
        form = self.positions.form
        block, rest = split(kept, kept.shape[-1] - (head_dim - self.positions.rotary_dim))
        return torch.cat((form.key(block, tables), form.key_rest(rest)), dim=-1).to(kept.dtype)

    def _additive_mask(self, mask: Tensor | None, shared: SharedPositions, dtype: torch.dtype) -> Tensor:
        """Return what is added to the scores, float32: the bias, and a large negative number for hidden keys."""
        mask, hidden = shared.causal if mask is None else mask, torch.finfo(dtype).min
        mask = torch.where(mask, 0.0, hidden) if mask.dtype == torch.bool else mask.float()
        return mask + self._bias(shared) if shared.inside is None else torch.where(shared.inside, mask, hidden)

    def _bias(self, shared: SharedPositions) -> Tensor:
        """Return the bias of every pair, float32 [batch or 1, heads, queries, keys]."""
        distance, given = shared.distance, self.positions.given
        if self.positions.method == "alibi":
            return -distance.new_tensor(given["alibi_slopes"])[:, None, None] * distance
        if self.positions.method != "rpe":
            return self.position_bias(distance)
        bucket = torch.bucketize(distance[:, 0], distance.new_tensor(given["bucket_starts"]), right=True) - 1
        return (shared.bias_table.float() * self.positions.bias_scale)[bucket].permute(0, 3, 1, 2)


# vLLM reads the source of the two methods `forward`: the attention function has to be looked up and called there, and
# the projections of LLaMA be called there one by one.


class CocaLlamaAttention(CocaAttention, LlamaAttention):
    """LLaMA's attention with operands of the position method; `k_proj` gives CoCA's t."""

    def forward(
        self,
        hidden_states: Tensor,
        shared: SharedPositions,
        attention_mask: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """As LLaMA's, with the positions that `CocaModel` passes on."""
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        k = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        q, k, v, mask = self.prepare(q, k, v, attention_mask, shared, past_key_values, kwargs.get("cache_position"))
        function: Any = self.own_function(shared, mask, q.dtype)
        if function is None:
            function = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        dropout = self.attention_dropout if self.training else 0.0
        output, weights = function(self, q, k, v, mask, scaling=self.scaling, dropout=dropout, **kwargs)
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1)), weights


class CocaGPTNeoXAttention(CocaAttention, GPTNeoXAttention):
    """GPT-NeoX's attention with operands of the position method; the k rows give CoCA's t."""

    num_key_value_groups = 1

    def forward(
        self,
        hidden_states: Tensor,
        shared: SharedPositions,
        attention_mask: Any = None,
        layer_past: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """As GPT-NeoX's, with the positions that `CocaModel` passes on."""
        packed = self.query_key_value(hidden_states).view(*hidden_states.shape[:-1], -1, 3 * self.head_size)
        q, k, v = packed.transpose(1, 2).chunk(3, dim=-1)
        q, k, v, mask = self.prepare(q, k, v, attention_mask, shared, layer_past, kwargs.get("cache_position"))
        function: Any = self.own_function(shared, mask, q.dtype)
        if function is None:
            function = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        dropout = self.attention_dropout if self.training else 0.0
        output, weights = function(self, q, k, v, mask, scaling=self.scaling, dropout=dropout, **kwargs)
        return self.dense(output.reshape(*hidden_states.shape[:-1], -1)), weights


# Other blocks ---------------------------------------------------------------------------------------------------------


class CocaScaleNorm(nn.Module):
    """g x / |x| with one learned g (Nguyen and Salazar 2019), the norm in float32."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.g, self.eps = nn.Parameter(torch.ones(1)), eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] -> the same."""
        return self.g * (x / x.float().norm(dim=-1, keepdim=True).clamp(min=self.eps)).to(x.dtype)


NORMS: dict[str, Callable[[int, dict], nn.Module]] = {
    "layernorm": lambda size, n: nn.LayerNorm(size, n["layernorm_epsilon"], bias=n["use_bias_in_norms"]),
    "rmsnorm": lambda size, n: LlamaRMSNorm(size, n["rms_norm_epsilon"]),
    "scalenorm": lambda size, n: CocaScaleNorm(n["scalenorm_epsilon"]),
    "non_parametric_layernorm": lambda size, n: nn.LayerNorm(size, n["layernorm_epsilon"], elementwise_affine=False),
}
PLAIN_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "swish": nn.SiLU,
    "mish": nn.Mish,
    "softsign": nn.Softsign,
}
GATED_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "swiglu": nn.SiLU,
    "geglu": nn.GELU,
    "reglu": nn.ReLU,
    "glu": nn.Sigmoid,
    "bilinear": nn.Identity,
}


class GatedMLP(LlamaMLP):
    """LLaMA's MLP, down(act(gate x) * up x), with another activation."""

    def __init__(self, config: CocaDenseConfig) -> None:
        super().__init__(config)
        self.act_fn = GATED_ACTIVATIONS[config.network["activation"]]()


class PlainMLP(nn.Module):
    """down(act(up x)); GPT-NeoX's with LLaMA's names."""

    def __init__(self, config: CocaDenseConfig) -> None:
        super().__init__()
        name, width = config.network["activation"], config.intermediate_size
        self.up_proj = nn.Linear(config.hidden_size, width, bias=config.mlp_bias)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=config.mlp_bias)
        tanh = name == "gelu" and config.network["bias_gelu_fusion"]
        self.act_fn = nn.GELU("tanh") if tanh else choose(PLAIN_ACTIVATIONS, name, "activation", "network")()

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] -> the same."""
        return self.down_proj(self.act_fn(self.up_proj(x)))


class CocaDenseLayer(LlamaDecoderLayer):
    """A block: x += attention(norm1 x), x += mlp(norm2 x); or in parallel, x + attention(norm1 x) + mlp(norm2 x), with
    `gpt_j_tied` norm1 in place of norm2.
    """

    def __init__(self, config: CocaDenseConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        network = config.network
        self.parallel, self.dropout = network["gpt_j_residual"], network["hidden_dropout"]
        self.one_norm = self.parallel and network["gpt_j_tied"]
        self.self_attn = CocaLlamaAttention(config, layer_idx)
        self.mlp = (GatedMLP if network["activation"] in GATED_ACTIVATIONS else PlainMLP)(config)
        self.input_layernorm = choose(NORMS, network["norm"], "norm", "network")(config.hidden_size, network)
        if self.one_norm:
            del self.post_attention_layernorm
        else:
            self.post_attention_layernorm = NORMS[network["norm"]](config.hidden_size, network)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As LLaMA's."""
        normed = self.input_layernorm(hidden_states)
        attended = self._drop(self.self_attn(normed, *args, **kwargs)[0])
        if self.parallel:
            fed = normed if self.one_norm else self.post_attention_layernorm(hidden_states)
            return hidden_states + attended + self._drop(self.mlp(fed))
        hidden_states = hidden_states + attended
        return hidden_states + self._drop(self.mlp(self.post_attention_layernorm(hidden_states)))

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
        if isinstance(module, KerpleBias):
            nn.init.uniform_(module.bias_p, 0, 2)
            nn.init.uniform_(module.bias_a, 0, 1)
        if isinstance(module, CocaScaleNorm):
            nn.init.ones_(module.g)


class CocaModel(InitWeights):
    """Additions to the stock network without its head, whose layers call their attention `attention_name`."""

    attention_name: str
    attention: type[CocaAttention]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.positions = positions = Positions(config)
        self.rotary_emb = NoTables()
        for number, layer in enumerate(self.layers):
            setattr(layer, self.attention_name, self.attention(config, number))
        self.position_bias = self.clex = self.position_embeddings = None
        if positions.method == "rpe":
            self.position_bias = nn.Embedding(len(positions.given["bucket_starts"]), config.num_attention_heads)
        if positions.rotary_dim and positions.extension is clex:
            # Its solved frequencies are in config.json; the weights are only kept.
            up = torch.zeros(positions.rotary_dim // 2, positions.rotary_dim)
            self.clex = nn.ParameterDict({"up": up, "down": up.T.clone()}).requires_grad_(False)
        if positions.method == "learned":
            self.position_embeddings = nn.Embedding(positions.given["max_position_embeddings"], config.hidden_size)
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
        """As the stock model's. Positions come from `position_ids`, else from the mask, else they are 0, 1, ..."""
        self._check(past_key_values)
        embeds = self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds
        new, past, total = embeds.shape[1], 0, embeds.shape[1]
        if past_key_values is not None:
            past = int(past_key_values.get_seq_length())
            # Keys that a cache of fixed size holds, -1 for one that grows; transformers 4 has another name for it.
            size = getattr(past_key_values, "get_max_length", None) or past_key_values.get_max_cache_shape
            total = max(past + new, size(0))
        where = token_places(attention_mask, position_ids, past, new, total, embeds.device)
        bias_table = None if self.position_bias is None else self.position_bias.weight
        kwargs |= {"shared": self.positions.shared(where, embeds.dtype, bias_table, self.training)}
        kwargs |= {"inputs_embeds": self._embedded(embeds, where.queries), "position_ids": where.queries}
        return super().forward(attention_mask=attention_mask, past_key_values=past_key_values, **kwargs)

    def _embedded(self, embeds: Tensor, queries: Tensor) -> Tensor:
        """Add absolute positions to the embedding."""
        if self.positions.method == "sinusoidal":
            return embeds + sinusoids(queries, embeds.shape[-1]).to(embeds.dtype)
        if self.positions.method != "learned":
            return embeds
        rows = self.position_embeddings.num_embeddings
        if not torch.compiler.is_compiling() and int(queries.max()) >= rows:
            raise ValueError(f"this model has learned {rows} positions; position {int(queries.max())} is beyond them")
        return embeds + self.position_embeddings(queries).to(embeds.dtype)

    def _check(self, cache: Any) -> None:
        """Raise a ValueError where the configured attention function would give wrong numbers."""
        name, method = self.config._attn_implementation or "eager", self.positions
        if (method.biased or method.far is not None) and name not in WITH_MASK:
            raise ValueError(
                f"pos_emb {method.method}, or relative_positions, needs attn_implementation eager or sdpa, not {name}"
            )
        kept_elsewhere = name not in STOCK and cache is None and "/" not in name
        if kept_elsewhere and (method.by_length or method.method == "xpos"):
            raise ValueError(
                f"{name} keeps keys that are rotated already, and here rotations change with the length (pos_emb "
                f"{method.method}, rope_scaling {dict(method.scaling)}); set a rope_scaling that does not depend on "
                "the length"
            )


class CocaLlamaModel(CocaModel, LlamaModel):
    """LLaMA without its head."""

    config_class, attention_name, attention = CocaLlamaConfig, "self_attn", CocaLlamaAttention


class CocaDenseModel(CocaModel, LlamaModel):
    """A network of another shape without its head."""

    config_class, attention_name, attention = CocaDenseConfig, "self_attn", CocaLlamaAttention
    _no_split_modules = ["CocaDenseLayer"]

    def __init__(self, config: CocaDenseConfig) -> None:
        if not config.network:
            raise ValueError(f"this {config.model_type} has no `network` in its config.json; export the model again")
        super().__init__(config)
        self.layers = nn.ModuleList(CocaDenseLayer(config, n) for n in range(config.num_hidden_layers))
        self.norm = NORMS[config.network["norm"]](config.hidden_size, config.network)
        self.post_init()

    def _embedded(self, embeds: Tensor, queries: Tensor) -> Tensor:
        dropout = self.config.network["hidden_dropout"]
        return nn.functional.dropout(super()._embedded(embeds, queries), dropout, self.training)


class CocaGPTNeoXModel(CocaModel, GPTNeoXModel):
    """GPT-NeoX without its head."""

    config_class, attention_name, attention = CocaGPTNeoXConfig, "attention", CocaGPTNeoXAttention


class CocaLlamaForCausalLM(InitWeights, LlamaForCausalLM):
    """LLaMA with its head."""

    config_class = CocaLlamaConfig

    def __init__(self, config: CocaLlamaConfig) -> None:
        super().__init__(config)
        self.model = CocaLlamaModel(config)
        self.post_init()


class CocaDenseForCausalLM(InitWeights, LlamaForCausalLM):
    """A network of another shape with its head."""

    config_class = CocaDenseConfig
    _no_split_modules = ["CocaDenseLayer"]

    def __init__(self, config: CocaDenseConfig) -> None:
        super().__init__(config)
        self.model = CocaDenseModel(config)
        self.post_init()


class CocaGPTNeoXForCausalLM(InitWeights, GPTNeoXForCausalLM):
    """GPT-NeoX with its head, which is `lm_head` in every version of transformers."""

    config_class = CocaGPTNeoXConfig

    def __init__(self, config: CocaGPTNeoXConfig) -> None:
        super().__init__(config)
        self.gpt_neox = CocaGPTNeoXModel(config)
        if "embed_out" in self._modules:  # transformers 4
            self.lm_head, self._tied_weights_keys = self._modules.pop("embed_out"), ["lm_head.weight"]
        self.post_init()

    @property
    def embed_out(self) -> nn.Module:
        """The head, by its name in transformers 4."""
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the head."""
        self.lm_head = new_embeddings
