"""LLaMA and GPT-NeoX with other position methods, for Hugging Face transformers: CoCA, xPos, ALiBi, KERPLE and others.

This file stands beside the weights and is loaded with `trust_remote_code=True`. It needs torch and transformers alone.
What it knows of positions is the mapping `position` in config.json.

Every method is ordinary attention: softmax(Q' K'^T / sqrt(head_dim) + bias) V. The operands Q' and K' are formed here
and handed to whichever attention function transformers was told to use. Notation: m position of a query, n of a key,
r = m - n, R_p the rotation by position p of feature i with feature i + d/2, theta_j the frequencies, L the training
length, l the length of a row so far.

- CoCA (Zhu et al. 2024, arXiv 2309.08646) as it is trained: Q' = q * (R_m q), K' = R_n (u, u), where u = relu of the mean
  of the two members of each pair that the key projection gives. With its constraint on queries too (`coca_strict`):
  Q' = R_m (|q|^2, 0), K' = R_n (u, 0).
- The cache keeps keys before any rotation, of CoCA only u. All of them are rotated at every step with the frequencies
  of the present length, so extensions that depend on the length are right while a sequence grows.
- Positions of a row begin at its first token that is not padding; so does its length.
- Nothing is kept between calls.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GPTNeoXModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention
from transformers.models.llama.modeling_llama import LlamaAttention, eager_attention_forward


class CocaLlamaConfig(LlamaConfig):
    """LLaMA's configuration with `position`, the position method."""

    model_type = "coca_llama"
    position: dict | None = None


class CocaGPTNeoXConfig(GPTNeoXConfig):
    """GPT-NeoX's configuration with `position`, the position method."""

    model_type = "coca_gpt_neox"
    position: dict | None = None


class Tables(NamedTuple):
    """cos and sin of position times frequency, with whatever multiplies scores; [batch or 1, 1, length, d/2]."""

    cos: Tensor
    sin: Tensor


class Frame(NamedTuple):
    """What all layers of one forward pass share.

    Attributes:
        tables: for each part of the relative-position map the tables of queries and keys; none where nothing turns.
        factor: logit scaling of features that are not rotated, [batch or 1, 1, queries, 1], or None.
        keys: positions of all keys, cached ones included, [batch or 1, keys].
        distance: m - n, float32 [batch or 1, 1, queries, keys]; where a bias or a map needs it, else None.
        causal: which keys come no later than each query, bool [queries, keys]; likewise.
        shared: the table of a bias that all layers share, [buckets, heads], or None.
    """

    tables: tuple[tuple[Tables, Tables], ...]
    factor: Tensor | None
    keys: Tensor
    distance: Tensor | None
    causal: Tensor | None
    shared: Tensor | None


# Operands -------------------------------------------------------------------------------------------------------------


def rotate(x: Tensor, tables: Tables) -> Tensor:
    """R_p x."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * tables.cos - second * tables.sin, second * tables.cos + first * tables.sin), dim=-1)


def coefficients(t: Tensor) -> Tensor:
    """u: relu of the mean of each pair, [..., d] -> [..., d/2]."""
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


def same(x: Tensor, *_: Any) -> Tensor:
    """x."""
    return x


class Form(NamedTuple):
    """How operands are made: Q' of q, what a cache keeps of k, K' of that; and the two for features that do not turn."""

    query: Callable[[Tensor, Tables], Tensor] = same
    kept: Callable[[Tensor], Tensor] = same
    key: Callable[[Tensor, Tables], Tensor] = same
    query_rest: Callable[[Tensor], Tensor] = same
    key_rest: Callable[[Tensor], Tensor] = same


PLAIN, ROTATED = Form(), Form(rotate, same, rotate)
FORMS = {
    "rotary": ROTATED,
    "xpos": ROTATED,
    "coca": Form(lambda q, tables: q * rotate(q, tables), coefficients, slack_key, torch.square, torch.relu),
    "coca_strict": Form(strict_query, coefficients, strict_key, torch.square, torch.relu),
    **dict.fromkeys(("alibi", "kerple_log", "kerple_power", "rpe", "learned", "sinusoidal", "none"), PLAIN),
}


def split(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The first `width` features and the others, in float32 or better."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x[..., :width], x[..., width:]


# Frequencies ----------------------------------------------------------------------------------------------------------


class Options(dict):
    """A section of config.json: what is missing is named."""

    def __missing__(self, name: str) -> Any:
        raise ValueError(f"config.position: {dict(self)} says nothing of {name}")


class Spectrum(NamedTuple):
    """theta_j, float64 [d/2], and what cos and sin are multiplied by."""

    frequencies: Tensor
    multiplier: float = 1.0


def geometric(dim: int, base: float) -> Tensor:
    """theta_j = base^(-2j/d)."""
    return torch.tensor(base, dtype=torch.float64) ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def stretched(p: "Positions", alpha: float) -> Spectrum:
    """NTK-aware: base' = base * alpha^(d/(d-2)) divides the slowest frequency by alpha and keeps the fastest."""
    d = p.rotary_dim
    return Spectrum(geometric(d, p.base * alpha ** (d / (d - 2)) if d > 2 else p.base))


def ramp_by_turns(p: "Positions", low: float, high: float) -> Tensor:
    """1 for frequencies that turn `high` times within L or more, 0 for `low` or fewer, linear between."""
    return ((p.length * p.theta / (2 * math.pi) - low) / (high - low)).clamp(0, 1)


def ramp_by_dimension(p: "Positions", low: float, high: float) -> Tensor:
    """The same, linear in the number of the pair (the YaRN authors' code)."""
    d = p.rotary_dim
    first, last = (d * math.log(p.length / (2 * math.pi * turns)) / (2 * math.log(p.base)) for turns in (high, low))
    if p.scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, d - 1)
    return 1 - ((torch.arange(d // 2, dtype=torch.float64) - first) / max(last - first, 0.001)).clamp(0, 1)


RAMPS = {"dimension": ramp_by_dimension, "rotations": ramp_by_turns}


def yarn(p: "Positions", factor: float) -> Spectrum:
    """Peng et al. 2023: slow frequencies divided by the factor, fast ones kept."""
    s = p.scaling
    kept = RAMPS[s.get("ramp") or "dimension"](p, s.get("beta_slow") or 1.0, s.get("beta_fast") or 32.0)
    temperature = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    return Spectrum((1 - kept) * p.theta / factor + kept * p.theta, s.get("attention_factor") or temperature)


def longrope(p: "Positions", length: int) -> Spectrum:
    """Ding et al. 2024: a divisor for each frequency, one list up to L and one beyond."""
    s = p.scaling
    factors = torch.tensor(s["long_factor" if length > p.length else "short_factor"], dtype=torch.float64)
    default = math.sqrt(1 + math.log(s["factor"]) / math.log(p.length)) if s["factor"] > 1 else 1.0
    return Spectrum(p.theta / factors, s.get("attention_factor") or default)


def llama3(p: "Positions", length: int) -> Spectrum:
    """Llama 3.1: by how often a frequency turns within L it is kept, mixed, or divided by the factor."""
    s = p.scaling
    kept = ramp_by_turns(p, s.get("low_freq_factor") or 1.0, s.get("high_freq_factor") or 4.0)
    return Spectrum((1 - kept) * p.theta / s["factor"] + kept * p.theta)


def dynamic_max(p: "Positions", length: int) -> Spectrum:
    """Dynamic NTK made for a target length, which shorter inputs see too."""
    target = p.scaling["target_length"]
    factor = target / (2 * p.length)
    return stretched(p, factor * max(target, length) / p.length - (factor - 1))


def clex(p: "Positions", length: int) -> Spectrum:
    """Chen et al. 2024: the learned equation, solved when the model was exported, at t = ceil(l/L)."""
    solved = p.given["clex_frequencies"]
    t = max(1, min(math.ceil(length / p.length), len(solved)))
    return Spectrum(torch.tensor(solved[t - 1], dtype=torch.float64))


def ordinal(p: "Positions") -> Tensor:
    """1 .. d/2 as shares of d/2."""
    return torch.arange(1, p.rotary_dim // 2 + 1, dtype=torch.float64) / (p.rotary_dim // 2)


EXTENSIONS: dict[str, Callable[["Positions", int], Spectrum]] = {
    "default": lambda p, _: Spectrum(p.theta),
    "linear": lambda p, _: Spectrum(p.theta / p.scaling["factor"]),
    "ntk": lambda p, _: stretched(p, p.scaling["factor"]),
    "ntk_fixed": lambda p, _: Spectrum(p.theta * torch.exp(-math.log(p.scaling["factor"]) * ordinal(p))),
    "ntk_mixed": lambda p, _: Spectrum(
        p.theta * torch.exp(-math.log(p.scaling["factor"]) * ordinal(p) ** (p.scaling.get("b") or 0.625))
    ),
    "dynamic": lambda p, length: stretched(p, p.scaling["factor"] * (max(length, p.length) / p.length - 1) + 1),
    "dynamic_max": dynamic_max,
    "yarn": lambda p, _: yarn(p, p.scaling["factor"]),
    "dynamic_yarn": lambda p, length: yarn(p, max(1.0, length / p.length)),
    "longrope": longrope,
    "llama3": llama3,
    "clex": clex,
}
LENGTH_DEPENDENT = frozenset({"dynamic", "dynamic_max", "dynamic_yarn", "longrope", "clex"})


# Maps, logit scaling, biases ------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """Pairs at distances low <= r < high, of the first `first_keys` keys where that is said, and where their queries and
    keys are rotated to.
    """

    low: float = 0
    high: float = math.inf
    first_keys: float = math.inf
    query: Callable[[Tensor], Tensor] = same
    key: Callable[[Tensor], Tensor] = same


def leaky(s: Options, leak: float) -> Part:
    """Leaky ReRoPE (Su 2023): distance (r - w)/k + w."""
    return Part(s["window"], query=lambda m: (m + s["window"] * (leak - 1)) / leak, key=lambda n: n / leak)


MAPS: dict[str, Callable[[Options, "Positions"], Part]] = {
    "rerope": lambda s, p: Part(s["window"], query=lambda m: torch.full_like(m, s["window"]), key=torch.zeros_like),
    "leaky_rerope": lambda s, p: leaky(s, s["leak"]),
    "inv_leaky_rerope": lambda s, p: leaky(s, p.length / (2 * s["target_length"])),
    "self_extend": lambda s, p: Part(
        s["window"],
        query=lambda m: (m / s["group_size"]).floor() + s["window"] - s["window"] // s["group_size"],
        key=lambda n: (n / s["group_size"]).floor(),
    ),
    "lm_infinite": lambda s, p: Part(
        s["window"], math.inf, s["sinks"], lambda m: torch.full_like(m, s["window"]), torch.zeros_like
    ),
    "streaming": lambda s, p: Part(
        s["window"], math.inf, s["sinks"], lambda m: m.clamp(max=s["sinks"] + s["window"] - 1)
    ),
}
"""The far part of each relative-position map; the near one, r < window, is as without it."""
TRAINED_MAPS = frozenset({"inv_leaky_rerope"})
"""Maps that a model is trained with and evaluated without."""

LOGIT_SCALINGS: dict[str, Callable[[Tensor, int], Tensor] | None] = {
    "none": None,
    "log_n": lambda m, length: (m.log1p() / math.log(length)).clamp(min=1.0),
    "log_n_trained": lambda m, length: m.log1p() / math.log(length),
}


def alibi_slopes(heads: int) -> list[float]:
    """2^(-8h/H) for H heads, a power of two; else those of the next smaller one, then every other of twice that."""
    power = 2 ** int(math.log2(heads))
    slopes = [2.0 ** (-8 * h / power) for h in range(1, power + 1)]
    return (slopes + [2.0 ** (-4 * h / power) for h in range(1, 2 * power + 1, 2)])[:heads]


def bucket_starts(buckets: int, furthest: int) -> list[int]:
    """The smallest distance of each of T5's buckets (Raffel et al. 2020), found in integers."""
    exact = buckets // 2
    rest, starts, r = buckets - exact, list(range(exact)), exact
    for k in range(rest):
        while r**rest < exact ** (rest - k) * furthest**k:
            r += 1
        starts.append(r)
    return starts


class Kernel(nn.Module):
    """KERPLE's two numbers for each head of a layer (Chi et al. 2022): -p ln(1 + a r), or -a r^p."""

    def __init__(self, heads: int, power: bool) -> None:
        super().__init__()
        self.power = power
        self.bias_p, self.bias_a = nn.Parameter(torch.ones(heads)), nn.Parameter(torch.ones(heads))

    def forward(self, distance: Tensor) -> Tensor:
        """[batch, 1, queries, keys] -> [batch, heads, queries, keys]."""
        p, a = (x.float().clamp(0.01)[:, None, None] for x in (self.bias_p, self.bias_a))
        return -a * distance.pow(p.clamp(max=2.0)) if self.power else -p * torch.log1p(a * distance)


class Clex(nn.Module):
    """The network behind CLEX's frequencies. It is carried along with the model; what it gives is in config.json."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(dim // 2, dim), requires_grad=False)
        self.down = nn.Parameter(torch.zeros(dim, dim // 2), requires_grad=False)


# Positions ------------------------------------------------------------------------------------------------------------


def choose(table: dict[str, Any], name: str, key: str) -> Any:
    """The row of a table, or an error that names the rows."""
    if name not in table:
        raise ValueError(f"config.position: {key} {name!r} is not known; known are {', '.join(table)}")
    return table[name]


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
        self.length = self.scaling.get("original_max_position_embeddings") or config.max_position_embeddings
        self.heads, self.base = config.num_attention_heads, float(given.get("rotary_emb_base", 10000.0))
        head_dim = config.hidden_size // config.num_attention_heads
        turns = self.form is not PLAIN
        self.rotary_dim = int(head_dim * given.get("rotary_pct", 1.0)) if turns else 0
        self.by_length = turns and self.scaling.get("rope_type") in LENGTH_DEPENDENT
        self.logit_scaling = choose(LOGIT_SCALINGS, given.get("logit_scaling", "none"), "logit_scaling")
        far = Options(given.get("relative_positions") or {})
        self.trained_map = far.get("type") in TRAINED_MAPS
        self.far = choose(MAPS, far["type"], "relative_positions.type")(far, self) if far else None
        self.biased = self.method in ("alibi", "kerple_log", "kerple_power", "rpe")
        buckets = given.get("rpe_num_buckets", 32), given.get("rpe_max_distance", 128)
        self.starts = bucket_starts(*buckets) if self.method == "rpe" else []
        self.bias_scale = math.sqrt(head_dim)

    @property
    def theta(self) -> Tensor:
        """The frequencies of the training length, float64 [d/2]."""
        return geometric(self.rotary_dim, self.base)

    def parts(self, training: bool) -> tuple[Part, ...]:
        """The parts of the map, one where there is none."""
        far = self.far if training or not self.trained_map else None
        return (Part(),) if far is None else (Part(high=far.low), far)

    def frame(self, where: "Places", dtype: torch.dtype, shared: Tensor | None, training: bool) -> Frame:
        """The frame of a forward pass whose operands are of `dtype`."""
        queries, keys, lengths, past = where
        parts, factor = self.parts(training), None
        m, n = queries.double(), keys.double()
        if self.logit_scaling is not None:
            factor = self.logit_scaling(m, self.length)[..., None]
        distance = causal = None
        if self.biased or len(parts) > 1:
            distance = (queries[:, None, :, None] - keys[:, None, None, :]).clamp(min=0).float()
            causal = torch.ones(queries.shape[1], keys.shape[1], dtype=torch.bool, device=keys.device).tril(past)
        tables = self._tables(parts, m, n, lengths, factor, dtype) if self.rotary_dim else ()
        factor = None if factor is None else factor[:, None].to(torch.promote_types(dtype, torch.float32))
        return Frame(tables, factor, keys, distance, causal, shared)

    def _tables(
        self, parts: tuple[Part, ...], m: Tensor, n: Tensor, lengths: Tensor, factor: Tensor | None, dtype: torch.dtype
    ) -> tuple[tuple[Tables, Tables], ...]:
        each = lengths.tolist() if self.by_length else [self.length]
        known = {length: self.extension(self, length) for length in set(each)}
        theta = torch.stack([known[length].frequencies for length in each])[:, None].to(m.device)
        amplitude = m.new_tensor([known[length].multiplier ** 2 for length in each])[:, None, None]
        amplitude = amplitude if factor is None else amplitude * factor
        found = []
        for part in parts:
            to, at = part.query(m), part.key(n)
            grown, shrunk = self._decay(to, at, dtype)
            found.append((self._table(to, theta, amplitude * grown, dtype), self._table(at, theta, shrunk, dtype)))
        return tuple(found)

    def _table(self, positions: Tensor, theta: Tensor, amplitude: Any, dtype: torch.dtype) -> Tables:
        """Phases in float64, rounded once, to float32 at least."""
        phases, wide = positions[..., None] * theta, torch.promote_types(dtype, torch.float32)
        return Tables(*((wave * amplitude)[:, None].to(wide) for wave in (phases.cos(), phases.sin())))

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


class Places(NamedTuple):
    """Where tokens stand: positions of queries and keys [batch or 1, ...], the length of each row [batch or 1], and how
    many tokens the cache holds.
    """

    queries: Tensor
    keys: Tensor
    lengths: Tensor
    past: int


def places(mask: Tensor | None, position_ids: Tensor | None, past: int, new: int, total: int, device: Any) -> Places:
    """Places of `new` queries behind `past` tokens, among `total` keys.

    A mask [batch, keys] says which keys are padding; of one [batch, 1, queries, keys] the row of the last query says it.
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
    return Places(queries, keys, (queries * real[:, past : past + new]).amax(dim=-1) + 1, past)


# Attention ------------------------------------------------------------------------------------------------------------

STOCK = frozenset({"eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention"})
"""Attention functions that see all keys of a call; others belong to engines that keep K' themselves."""
WITH_MASK = frozenset({"eager", "sdpa"})


def room(cache: Any) -> int:
    """Keys that a cache of fixed size holds; one that grows says -1. transformers 4 has another name for it."""
    return (getattr(cache, "get_max_length", None) or cache.get_max_cache_shape)(0)


class CocaAttention:
    """What the attention of both architectures adds to the stock one."""

    def add_positions(self, config: Any, head_dim: int) -> None:
        """Make the parts of a layer."""
        self.positions = Positions(config)
        self.rotary_dim = self.positions.rotary_dim
        if self.positions.method in ("kerple_log", "kerple_power"):
            self.position_bias = Kernel(self.positions.heads, self.positions.method == "kerple_power")

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, frame: Frame, cache: Any, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        """Attention of q [batch, heads, queries, head_dim], k and v before any rotation: [batch, queries, heads, head_dim]
        with the attention weights or None.
        """
        form, dtype = self.positions.form, q.dtype
        block, rest = split(k, self.rotary_dim)
        k = torch.cat((form.kept(block), rest), dim=-1).to(dtype)
        if cache is not None:
            now = kwargs.get("cache_position")  # only transformers 4 passes it, and only its static cache reads it
            k, v = cache.update(k, v, self.layer_idx, *([] if now is None else [{"cache_position": now}]))
        pairs = frame.tables or ((None, None),)
        operands = [(self._query(q, at, frame.factor), self._key(k, to, q.shape[-1])) for at, to in pairs]
        settings = {"scaling": self.scaling, "dropout": self.attention_dropout if self.training else 0.0}
        if len(operands) > 1:
            return self._mapped(operands, v, self._additive(mask, frame, dtype, None), frame, settings)
        if self.positions.biased:
            mask = self._additive(mask, frame, dtype, self._bias(frame))
        name = self.config._attn_implementation
        # Fused kernels want a mask in the operands' dtype, and a far distance has few different values in half precision.
        eager = name == "eager" or (self.positions.biased and mask.dtype != dtype)
        function = eager_attention_forward if eager else ALL_ATTENTION_FUNCTIONS[name]
        return function(self, *operands[0], v, mask, **settings, **kwargs)

    def _query(self, q: Tensor, tables: Tables | None, factor: Tensor | None) -> Tensor:
        """Q', formed in float32 at least and rounded once."""
        if tables is None and factor is None:
            return q
        form, (block, rest) = self.positions.form, split(q, self.rotary_dim)
        block = block if tables is None else form.query(block, tables)
        rest = form.query_rest(rest) if factor is None else form.query_rest(rest) * factor
        return torch.cat((block, rest), dim=-1).to(q.dtype)

    def _key(self, kept: Tensor, tables: Tables | None, head_dim: int) -> Tensor:
        """K' of what the cache kept."""
        if tables is None:
            return kept
        form, (block, rest) = self.positions.form, split(kept, kept.shape[-1] - (head_dim - self.rotary_dim))
        return torch.cat((form.key(block, tables), form.key_rest(rest)), dim=-1).to(kept.dtype)

    def _bias(self, frame: Frame) -> Tensor:
        """The bias of every pair, float32 [batch or 1, heads, queries, keys]."""
        if self.positions.method == "alibi":
            slopes = torch.tensor(alibi_slopes(self.positions.heads), device=frame.distance.device)
            return -slopes[:, None, None] * frame.distance
        if self.positions.method != "rpe":
            return self.position_bias(frame.distance)
        starts = torch.tensor(self.positions.starts, dtype=torch.float32, device=frame.distance.device)
        bucket = torch.bucketize(frame.distance[:, 0], starts, right=True) - 1
        return (frame.shared.float() * self.positions.bias_scale)[bucket].permute(0, 3, 1, 2)

    def _additive(self, mask: Tensor | None, frame: Frame, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
        """What is added to the scores, float32: the bias, and a large negative number where a key is hidden."""
        bias = torch.zeros((), device=frame.keys.device) if bias is None else bias
        mask = frame.causal if mask is None else mask
        hidden = torch.finfo(dtype).min
        return torch.where(mask, bias, hidden) if mask.dtype == torch.bool else bias + mask.float()

    def _mapped(
        self, operands: list[tuple[Tensor, Tensor]], v: Tensor, mask: Tensor, frame: Frame, settings: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Attention whose pairs are scored by the part of the map that holds their distance."""
        groups = operands[0][0].shape[1] // v.shape[1]
        scores = torch.full_like(frame.distance, torch.finfo(mask.dtype).min)
        for part, (query, key) in zip(self.positions.parts(self.training), operands, strict=True):
            inside = (frame.distance >= part.low) & (frame.distance < part.high)
            inside = inside & (frame.keys[:, None, None, :] < part.first_keys)
            products = query @ key.repeat_interleave(groups, dim=1).transpose(2, 3)
            scores = torch.where(inside, products.float() * settings["scaling"], scores)
        weights = (scores + mask).softmax(dim=-1).to(v.dtype)
        weights = nn.functional.dropout(weights, settings["dropout"], self.training)
        return (weights @ v.repeat_interleave(groups, dim=1)).transpose(1, 2), weights


class CocaLlamaAttention(CocaAttention, LlamaAttention):
    """LLaMA's attention with operands of the position method; `k_proj` gives CoCA's t."""

    def __init__(self, config: CocaLlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.add_positions(config, self.head_dim)

    def forward(
        self,
        hidden_states: Tensor,
        frame: Frame,
        attention_mask: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """As LLaMA's, with what `CocaModel` has made of the positions."""
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (proj(hidden_states).view(shape).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        output, weights = self.attend(q, k, v, attention_mask, frame, past_key_values, **kwargs)
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1)), weights


class CocaGPTNeoXAttention(CocaAttention, GPTNeoXAttention):
    """GPT-NeoX's attention with operands of the position method; the k rows give CoCA's t."""

    def __init__(self, config: CocaGPTNeoXConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.num_key_value_groups = 1
        self.add_positions(config, self.head_size)

    def forward(
        self, hidden_states: Tensor, frame: Frame, attention_mask: Any = None, layer_past: Any = None, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        """As GPT-NeoX's, with what `CocaModel` has made of the positions."""
        packed = self.query_key_value(hidden_states).view(*hidden_states.shape[:-1], -1, 3 * self.head_size)
        q, k, v = packed.transpose(1, 2).chunk(3, dim=-1)
        output, weights = self.attend(q, k, v, attention_mask, frame, layer_past, **kwargs)
        return self.dense(output.reshape(*hidden_states.shape[:-1], -1)), weights


# Models ---------------------------------------------------------------------------------------------------------------


class NoTables(nn.Module):
    """Stands where the stock model makes its rotary tables."""

    def forward(self, *_: Any, **__: Any) -> None:
        """Nothing."""


class Drawn:
    """How the weights of what a method learns are drawn."""

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Kernel):
            nn.init.uniform_(module.bias_p, 0, 2)
            nn.init.uniform_(module.bias_a, 0, 1)
        elif isinstance(module, Clex):
            nn.init.zeros_(module.down)
            nn.init.uniform_(module.up, -(module.up.shape[1] ** -0.5), module.up.shape[1] ** -0.5)


class CocaModel(Drawn):
    """What the network without its head adds to the stock one."""

    def add_positions(self, config: Any, name: str, attention: type) -> None:
        """Put our attention and what a method learns once for all layers in their places."""
        self.positions = positions = Positions(config)
        self.rotary_emb = NoTables()
        for number, layer in enumerate(self.layers):
            setattr(layer, name, attention(config, number))
        self.position_bias = self.clex = self.position_embeddings = None
        if positions.method == "rpe":
            self.position_bias = nn.Embedding(len(positions.starts), config.num_attention_heads)
        if positions.rotary_dim and positions.extension is clex:
            self.clex = Clex(positions.rotary_dim)
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
            total = max(past + new, room(past_key_values))
        where = places(attention_mask, position_ids, past, new, total, embeds.device)
        shared = None if self.position_bias is None else self.position_bias.weight
        kwargs |= {"frame": self.positions.frame(where, embeds.dtype, shared, self.training)}
        kwargs |= {"inputs_embeds": embeds + self._absolute(where.queries, embeds), "position_ids": where.queries}
        return super().forward(attention_mask=attention_mask, past_key_values=past_key_values, **kwargs)

    def _absolute(self, queries: Tensor, embeds: Tensor) -> Tensor | int:
        """What is added to the embedding by position."""
        if self.positions.method == "sinusoidal":
            return sinusoids(queries, embeds.shape[-1]).to(embeds.dtype)
        if self.positions.method != "learned":
            return 0
        rows = self.position_embeddings.num_embeddings
        if not torch.compiler.is_compiling() and int(queries.max()) >= rows:
            raise ValueError(f"this model has learned {rows} positions; position {int(queries.max())} is beyond them")
        return self.position_embeddings(queries).to(embeds.dtype)

    def _check(self, cache: Any) -> None:
        """Refuse what the chosen attention function cannot compute, rather than give wrong numbers."""
        name, method = self.config._attn_implementation or "eager", self.positions
        if (method.biased or method.far is not None) and name not in WITH_MASK:
            raise ValueError(
                f"pos_emb {method.method}, or relative_positions, needs attn_implementation eager or sdpa, not {name}"
            )
        kept_elsewhere = name not in STOCK and cache is None and "/" not in name
        if kept_elsewhere and (method.by_length or method.method == "xpos"):
            raise ValueError(
                f"{name} keeps keys that are rotated already, and here rotations change with the length (pos_emb {method.method},"
                f" rope_scaling {dict(method.scaling)}); set a rope_scaling that does not depend on the length"
            )


class CocaLlamaModel(CocaModel, LlamaModel):
    """LLaMA without its head."""

    config_class = CocaLlamaConfig

    def __init__(self, config: CocaLlamaConfig) -> None:
        super().__init__(config)
        self.add_positions(config, "self_attn", CocaLlamaAttention)


class CocaGPTNeoXModel(CocaModel, GPTNeoXModel):
    """GPT-NeoX without its head."""

    config_class = CocaGPTNeoXConfig

    def __init__(self, config: CocaGPTNeoXConfig) -> None:
        super().__init__(config)
        self.add_positions(config, "attention", CocaGPTNeoXAttention)


class CocaLlamaForCausalLM(Drawn, LlamaForCausalLM):
    """LLaMA with its head."""

    config_class = CocaLlamaConfig

    def __init__(self, config: CocaLlamaConfig) -> None:
        super().__init__(config)
        self.model = CocaLlamaModel(config)
        self.post_init()


class CocaGPTNeoXForCausalLM(Drawn, GPTNeoXForCausalLM):
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
        """The name of the head in transformers 4."""
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Put another head in its place."""
        self.lm_head = new_embeddings
