"""Softmax attention from the scores of all N x N pairs (m, n), written for clarity, not for speed.

Query and key of every pair are rotated to positions of their own, so relative-position maps need no other code. CoCA
without a map is the paper's three-operand contraction. A dtype below float64 measures the rounding of a plain
computation, or the memory and time of the contraction.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import opt_einsum
import torch
from torch import Tensor


@dataclass(frozen=True)
class RelativeMap:
    """Far pairs, whose tokens are `window` or more apart, are scored elsewhere than where they stand; lengths in
    tokens.

    `leak` is k of Leaky ReRoPE, `group_size` G of SelfExtend, `sinks` the number of first keys that stay visible,
    `local` the smallest distance of STRING's shifted pairs. Dual chunk attention has no window, but chunks of
    `chunk_size` tokens and the largest position `max_position` of a query.
    """

    type: str
    window: int = 0
    leak: float = 16.0
    group_size: int = 8
    sinks: int = 0
    local: int = 0
    chunk_size: int = 1
    max_position: int = 0


@dataclass(frozen=True)
class Polar:
    """A form whose angles depend on positions only: sum_c m_c u_c cos(r theta_c - offset_c).

    Attributes:
        softplus: m and u are softplus of every feature of q and k; if False, the length of every pair of features of q
            and relu of the mean of every pair of k.
        power: of m.
        by_feature: whether there is one frequency per feature, and not one per pair.
        offset: [heads, terms], in radians.
    """

    softplus: bool
    power: int
    by_feature: bool
    offset: Tensor


@dataclass(frozen=True)
class Setting:
    """What decides a score beside the operands and their positions.

    Attributes:
        multiplier: of cosine and sine each.
        map: the relative-position map, or None.
        logit_scaling: "none", "log_n" (never below 1), "log_n_trained", "ssmax", or (a, p, first) of the temperature.
        training_length: L of the logit scaling.
        bias: the learned parameters of the bias by name: p and a [heads], or table [buckets, heads].
        documents: the document of every token, [batch, length], one run of equal numbers for each; None: one a row.
        gate: "fox" or "cable", or None.
        opened: [batch, heads, length], w x + b of the gate of every token.
        factors: [heads], learned, on the logits of every head, or None.
        sinks: [heads], learned, the score of one more key whose value is 0, or None.
        polar: the polar form, or None.
    """

    multiplier: float = 1.0
    map: RelativeMap | None = None
    logit_scaling: str | tuple[float, int, int] = "none"
    training_length: int = 1
    bias: Mapping[str, Tensor] = field(default_factory=dict)
    documents: Tensor | None = None
    gate: str | None = None
    opened: Tensor | None = None
    factors: Tensor | None = None
    sinks: Tensor | None = None
    polar: Polar | None = None


@dataclass(frozen=True)
class Pairs:
    """Every pair (m, n), each attribute broadcasting to [batch, 1, queries, keys].

    Attributes:
        distance: tokens from the key to the query, int64.
        visible: whether the query sees the key.
        query, key: the positions to which the two are rotated, float64.
        place: the query's token within its document, from 0, float64.
        mapped: whether these depend on the pair, and not on the query or the key alone.
    """

    distance: Tensor
    visible: Tensor
    query: Tensor
    key: Tensor
    place: Tensor
    mapped: bool


def attention(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    positions: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    setting: Setting | None = None,
) -> Tensor:
    """Causal attention of method `name`, [batch, heads, queries, head_dim] in `dtype` (float32 or float64).

    q is [batch, heads, queries, head_dim], k and v are [batch, kv_heads, length, head_dim]; the queries stand at the
    last tokens. `theta` has one frequency per rotated pair: 2 * len(theta) < head_dim is partial rotary. `positions`,
    [length] or [batch, length], are those of the keys; 0 .. length-1 by default.
    """
    setting = setting or Setting()
    groups, head_dim = q.shape[1] // k.shape[1], q.shape[-1]
    positions = torch.arange(k.shape[2], device=q.device) if positions is None else positions
    positions = positions.double().reshape(-1, k.shape[2])
    pairs = lay_out(positions, q.shape[2], setting)
    q, k, v = q.to(dtype), k.to(dtype).repeat_interleave(groups, 1), v.to(dtype).repeat_interleave(groups, 1)
    if setting.polar is None:
        assert name in SCORES, f"{name}: the oracle has no formula; add it to SCORES or BIASES of dense.py"
        scores = SCORES[name](q, k, theta.double(), pairs, setting.multiplier) / math.sqrt(head_dim)
    else:
        scores = _polar_scores(q, k, theta.double(), pairs, setting.multiplier, setting.polar) / math.sqrt(head_dim)
    factors = _row_factors(positions[:, -q.shape[2] :], setting).to(dtype)
    if setting.factors is not None:  # s, or s and b in the columns
        columns = setting.factors.to(dtype).reshape(q.shape[1], -1)[:, :, None, None]
        factors = factors * columns[:, 0] + (columns[:, 1] if columns.shape[1] == 2 else 0)
    scores = scores * factors
    if name in BIASES:
        distance = pairs.distance.clamp(min=0).to(dtype)
        scores = scores + BIASES[name](distance, q.shape[1], head_dim, setting.bias).to(dtype)
    if name == "fire":
        scores = scores + _fire(pairs.distance.clamp(min=0).to(dtype), pairs.place.to(dtype), setting.bias)
    if setting.gate is not None and setting.opened is not None:
        scores = scores + forgotten(setting.gate, setting.opened.to(dtype), q.shape[2])
    scores = scores.masked_fill(~pairs.visible, -math.inf)
    if setting.sinks is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        sink = setting.sinks.to(dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat((scores, sink), dim=-1), dim=-1)[..., :-1]
    return opt_einsum.contract("bhmn,bhnd->bhmd", weights, v)


def forgotten(gate: str, opened: Tensor, queries: int) -> Tensor:
    """F_m - F_n, F the running sum of ln sigmoid(x) (Lin et al. 2025, equations 5 to 8) or of -softplus(x) (Veisi et
    al. 2025), of x [batch, heads, length], for the last `queries` tokens and all keys, in the dtype of x.
    """
    zero = torch.zeros_like(opened)
    logarithms = -torch.logaddexp(zero, -opened if gate == "fox" else opened)  # finite where a sigmoid is 0
    running = torch.cumsum(logarithms, dim=-1)
    return running[..., -queries:, None] - running[..., None, :]


def _row_factors(positions: Tensor, setting: Setting) -> Tensor:
    """What the logits of row m are multiplied by, [batch or 1, 1, queries, 1]."""
    if setting.logit_scaling == "none":
        return torch.ones(1, dtype=torch.float64, device=positions.device)
    if not isinstance(setting.logit_scaling, str):
        strength, period, first = setting.logit_scaling
        periods = torch.div(positions + first, period, rounding_mode="floor")
        return (1 + strength * torch.log(1 + periods))[:, None, :, None]
    if setting.logit_scaling == "ssmax":
        return torch.log(positions + 1)[:, None, :, None]
    factors = torch.log(positions + 1) / math.log(setting.training_length)
    factors = factors.clamp(min=1.0) if setting.logit_scaling == "log_n" else factors
    return factors[:, None, :, None]


def lay_out(positions: Tensor, queries: int, setting: Setting) -> Pairs:
    """The pairs of the last `queries` tokens with all of them, for `positions` [batch or 1, length] float64."""
    token = torch.arange(positions.shape[1], device=positions.device)
    documents = torch.zeros_like(token)[None] if setting.documents is None else setting.documents
    same = documents[:, :, None] == documents[:, None, :]
    inner = (token - same.int().argmax(dim=-1)).double()  # argmax: the first token of the own document
    distance = token[-queries:, None] - token[None, :]
    visible = (same[:, -queries:] & (distance >= 0))[:, None]
    m, n = positions[:, None, -queries:, None], positions[:, None, None, :]
    m_inner, n_inner = inner[:, None, -queries:, None], inner[:, None, None, :]
    if setting.map is None:
        return Pairs(distance, visible, m, n, m_inner, mapped=False)
    far = distance >= setting.map.window
    m_far, n_far = FAR[setting.map.type](setting.map, m, n, m_inner, n_inner)
    if setting.map.type in FIRST_KEYS_ONLY:
        visible = visible & (~far | (n_inner < setting.map.sinks))
    return Pairs(distance, visible, torch.where(far, m_far, m), torch.where(far, n_far, n), m_inner, mapped=True)


Far = Callable[[RelativeMap, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(map, m, n, m and n counted within their document) -> the positions to which a far pair is rotated."""


def _far_rerope(s: RelativeMap, m: Tensor, n: Tensor, m_inner: Tensor, n_inner: Tensor) -> tuple[Tensor, Tensor]:
    return torch.full_like(m, s.window), torch.zeros_like(n)


def _far_leaky(s: RelativeMap, m: Tensor, n: Tensor, m_inner: Tensor, n_inner: Tensor) -> tuple[Tensor, Tensor]:
    return (m + s.window * (s.leak - 1)) / s.leak, n / s.leak


def _far_self_extend(s: RelativeMap, m: Tensor, n: Tensor, m_inner: Tensor, n_inner: Tensor) -> tuple[Tensor, Tensor]:
    shift = s.window - s.window // s.group_size
    return torch.floor(m / s.group_size) + shift, torch.floor(n / s.group_size)


def _far_streaming(s: RelativeMap, m: Tensor, n: Tensor, m_inner: Tensor, n_inner: Tensor) -> tuple[Tensor, Tensor]:
    """Indices in a cache of the sinks and the last `window` keys, of which the query's own is the last."""
    return m_inner.clamp(max=s.sinks + s.window - 1), n_inner


def _dual_chunk(s: RelativeMap, m: Tensor, n: Tensor, m_inner: Tensor, n_inner: Tensor) -> tuple[Tensor, Tensor]:
    """Section 3 of the paper on dual chunk attention, by the chunks of query and key; of every pair."""
    m_chunk, n_chunk = torch.floor(m_inner / s.chunk_size), torch.floor(n_inner / s.chunk_size)
    m_offset, n_offset = m_inner - m_chunk * s.chunk_size, n_inner - n_chunk * s.chunk_size
    successive = torch.clamp(m_offset + s.chunk_size, max=s.max_position)
    inter = torch.full_like(m_offset, min(2 * s.chunk_size - 1, s.max_position))
    query = torch.where(m_chunk - n_chunk == 1, successive, inter)
    return torch.where(m_chunk == n_chunk, m_offset, query), n_offset


def _far_string(s: RelativeMap, m: Tensor, n: Tensor, m_inner: Tensor, n_inner: Tensor) -> tuple[Tensor, Tensor]:
    """The distance m - n becomes m - n - S + w."""
    return m - (s.window - s.local), n


FAR: dict[str, Far] = {
    "rerope": _far_rerope,
    "leaky_rerope": _far_leaky,
    "inv_leaky_rerope": _far_leaky,
    "self_extend": _far_self_extend,
    "string": _far_string,
    "dual_chunk": _dual_chunk,
    "lm_infinite": _far_rerope,
    "streaming": _far_streaming,
}
FIRST_KEYS_ONLY = frozenset({"lm_infinite", "streaming"})


def inverse_leak(target_length: int, training_length: int) -> float:
    """k = 1/(2b), b = L'/L, with which InvLeaky ReRoPE trains."""
    return training_length / (2 * target_length)


def _turn(x: Tensor, theta: Tensor, positions: Tensor) -> Tensor:
    """R_p x: pair (i, i + d/2) as a complex number, multiplied by e^(i p theta)."""
    first, second = x.chunk(2, dim=-1)
    phase = positions[..., None] * theta
    unit = torch.complex(phase.cos().to(x.dtype), phase.sin().to(x.dtype))
    turned = torch.complex(first.contiguous(), second.contiguous()) * unit
    return torch.cat((turned.real, turned.imag), dim=-1)


def _split(x: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
    return x[..., : 2 * len(theta)], x[..., 2 * len(theta) :]


def _members(x: Tensor, j: int) -> tuple[Tensor, Tensor]:
    """The two members of rotated pair j, [batch, heads, length] each."""
    return x[..., j], x[..., j + x.shape[-1] // 2]


def _rows(x: Tensor) -> Tensor:
    return x[..., :, None]


def _columns(x: Tensor) -> Tensor:
    return x[..., None, :]


def _dot(q: Tensor, k: Tensor) -> Tensor:
    return opt_einsum.contract("bhmd,bhnd->bhmn", q, k)


def _collinear(t: Tensor) -> Tensor:
    mean = torch.relu((t[..., : t.shape[-1] // 2] + t[..., t.shape[-1] // 2 :]) / 2)
    return torch.cat((mean, mean), dim=-1)


def _position_free_coca(q: Tensor, t: Tensor) -> Tensor:
    """CoCA without rotation, for the dimensions beyond the rotary block."""
    return opt_einsum.contract("bhmd,bhnd,bhmd->bhmn", q, torch.relu(t), q)


def _cos_sin(positions: Tensor, angle: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    phase = positions * angle
    return phase.cos().to(dtype), phase.sin().to(dtype)


def _relative(q: Tensor, k: Tensor, theta: Tensor, pairs: Pairs, zeta: Tensor | None = None) -> Tensor:
    """sum_j zeta_j^(r/512) Re(q_j conj(k_j) e^(i r theta_j)), q_j and k_j complex, r the pair's relative position."""
    relative, scores = pairs.query - pairs.key, torch.zeros((), dtype=q.dtype, device=q.device)
    for j in range(len(theta)):
        (q1, q2), (k1, k2) = _members(q, j), _members(k, j)
        cos, sin = _cos_sin(relative, theta[j], q.dtype)
        along = _rows(q1) * _columns(k1) + _rows(q2) * _columns(k2)
        across = _rows(q1) * _columns(k2) - _rows(q2) * _columns(k1)
        term = along * cos + across * sin
        scores = scores + (term if zeta is None else term * (zeta[j] ** (relative / 512)).to(q.dtype))
    return scores


def _rotary_scores(q: Tensor, k: Tensor, theta: Tensor, pairs: Pairs, multiplier: float) -> Tensor:
    (q, q_rest), (k, k_rest) = _split(q, theta), _split(k, theta)
    if pairs.mapped:
        turned = _relative(q, k, theta, pairs)
    else:
        turned = _dot(_turn(q, theta, pairs.query[..., 0]), _turn(k, theta, pairs.key[..., 0, :]))
    return turned * multiplier**2 + _dot(q_rest, k_rest)


def _xpos_scores(q: Tensor, k: Tensor, theta: Tensor, pairs: Pairs, multiplier: float) -> Tensor:
    """xPos: zeta_j = (2j + 0.4 d)/(1.4 d); the centre of the exponents cancels in a score."""
    (q, q_rest), (k, k_rest) = _split(q, theta), _split(k, theta)
    dim = 2 * len(theta)
    zeta = (2 * torch.arange(len(theta), dtype=torch.float64, device=q.device) + 0.4 * dim) / (1.4 * dim)
    return _relative(q, k, theta, pairs, zeta) * multiplier**2 + _dot(q_rest, k_rest)


def _coca_scores(q: Tensor, t: Tensor, theta: Tensor, pairs: Pairs, multiplier: float) -> Tensor:
    """The contraction of the CoCA paper's listing: sum_d q_d (R_n t)_d (R_m q)_d."""
    (q, q_rest), (t, t_rest) = _split(q, theta), _split(t, theta)
    if pairs.mapped:
        turned = _coca_pair_by_pair(q, _collinear(t), theta, pairs)
    else:
        turned_q = _turn(q, theta, pairs.query[..., 0])
        turned_t = _turn(_collinear(t), theta, pairs.key[..., 0, :])
        turned = opt_einsum.contract("bhmd,bhnd,bhmd->bhmn", q, turned_t, turned_q)
    return turned * multiplier**2 + _position_free_coca(q_rest, t_rest)


def _coca_pair_by_pair(q: Tensor, t: Tensor, theta: Tensor, pairs: Pairs) -> Tensor:
    """The same sum where every pair turns its query and its key by positions of its own."""
    scores = torch.zeros((), dtype=q.dtype, device=q.device)
    for j in range(len(theta)):
        (q1, q2), (t1, t2) = _members(q, j), _members(t, j)
        (cm, sm), (cn, sn) = (_cos_sin(at, theta[j], q.dtype) for at in (pairs.query, pairs.key))
        first = _rows(q1) * (_rows(q1) * cm - _rows(q2) * sm) * (_columns(t1) * cn - _columns(t2) * sn)
        second = _rows(q2) * (_rows(q2) * cm + _rows(q1) * sm) * (_columns(t2) * cn + _columns(t1) * sn)
        scores = scores + first + second
    return scores


def _coca_strict_scores(q: Tensor, t: Tensor, theta: Tensor, pairs: Pairs, multiplier: float) -> Tensor:
    """sum_j u_j |q_j|^2 cos(r theta_j)."""
    (q, q_rest), (t, t_rest) = _split(q, theta), _split(t, theta)
    scores = torch.zeros((), dtype=q.dtype, device=q.device)
    for j in range(len(theta)):
        (q1, q2), (u, _) = _members(q, j), _members(_collinear(t), j)
        cos, _ = _cos_sin(pairs.query - pairs.key, theta[j], q.dtype)
        scores = scores + _rows(q1**2 + q2**2) * _columns(u) * cos
    return scores * multiplier**2 + _position_free_coca(q_rest, t_rest)


def _polar_scores(q: Tensor, k: Tensor, theta: Tensor, pairs: Pairs, multiplier: float, polar: Polar) -> Tensor:
    """Gopalakrishnan et al. 2025, arXiv:2509.10534, section 3, and the forms between it and CoCA-Strict, term by term.
    The features beyond the rotated ones are plain with softplus, and as in CoCA without it.
    """
    rotated = len(theta) if polar.by_feature else 2 * len(theta)
    half, zero = rotated // 2, torch.zeros((), dtype=q.dtype, device=q.device)
    terms = rotated if polar.softplus or polar.by_feature else half
    scores = zero
    for c in range(terms):
        if polar.softplus:
            m, u = torch.logaddexp(q[..., c], zero), torch.logaddexp(k[..., c], zero)
        else:
            j = c % half
            m = torch.sqrt(q[..., j] ** 2 + q[..., j + half] ** 2)
            u = torch.relu((k[..., j] + k[..., j + half]) / 2)
        phase = (pairs.query - pairs.key) * theta[c % len(theta)]
        offset = polar.offset.to(q.dtype)[:, c, None, None]
        cos, sin = phase.cos().to(q.dtype), phase.sin().to(q.dtype)
        turned = cos * torch.cos(offset) + sin * torch.sin(offset)
        scores = scores + _rows(m**polar.power) * _columns(u) * turned
    q_rest, k_rest = q[..., rotated:], k[..., rotated:]
    if polar.softplus:
        return scores * multiplier**2 + _dot(q_rest, k_rest)
    return scores * multiplier**2 + _dot(q_rest.abs() ** polar.power, torch.relu(k_rest))


def _plain_scores(q: Tensor, k: Tensor, theta: Tensor, pairs: Pairs, multiplier: float) -> Tensor:
    return _dot(q, k)


def _slopes(heads: int) -> list[float]:
    """The ALiBi authors' recursion: a power of two, or the closest smaller one and alternate slopes of twice that."""
    if heads & (heads - 1) == 0:
        return [2 ** (-8 * (i + 1) / heads) for i in range(heads)]
    closest = 1 << (heads.bit_length() - 1)
    return _slopes(closest) + _slopes(2 * closest)[0::2][: heads - closest]


def _bucket(distance: int) -> int:
    """T5's bucket of a distance: 32 of them, exact below 16, logarithmic to 128."""
    if distance < 16:
        return distance
    return min(16 + math.floor(16 * math.log(distance / 16) / math.log(128 / 16)), 31)


Bias = Callable[[Tensor, int, int, Mapping[str, Tensor]], Tensor]
"""(distances [queries, keys], heads, head_dim, parameters) -> [heads, queries, keys], added to the scaled scores."""


def _per_head(x: Tensor, distance: Tensor) -> Tensor:
    return x.to(distance.dtype)[:, None, None]


def _alibi(distance: Tensor, heads: int, head_dim: int, bias: Mapping[str, Tensor]) -> Tensor:
    slopes = torch.tensor(_slopes(heads), dtype=distance.dtype, device=distance.device)
    return -_per_head(slopes, distance) * distance


def _kerple_log(distance: Tensor, heads: int, head_dim: int, bias: Mapping[str, Tensor]) -> Tensor:
    p, a = (_per_head(bias[name].clamp(min=0.01), distance) for name in ("p", "a"))
    return -p * torch.log(1 + a * distance)


def _kerple_power(distance: Tensor, heads: int, head_dim: int, bias: Mapping[str, Tensor]) -> Tensor:
    a, p = (_per_head(bias[name].clamp(min=0.01), distance) for name in ("a", "p"))
    return -a * distance ** p.clamp(max=2)


def _rpe(distance: Tensor, heads: int, head_dim: int, bias: Mapping[str, Tensor]) -> Tensor:
    of_distance = torch.tensor([_bucket(r) for r in range(int(distance.max()) + 1)], device=distance.device)
    rows = bias["table"].to(distance.dtype)[of_distance[distance.long()]]
    return rows.permute(2, 0, 1) * math.sqrt(head_dim)


def _sandwich(distance: Tensor, heads: int, head_dim: int, bias: Mapping[str, Tensor]) -> Tensor:
    """Inner products of sinusoidal embeddings of 128 features at distance r, as the paper has them (64 at r = 0)."""

    def embedding(position: int) -> list[float]:
        phases = [position / 10000 ** (2 * i / 128) for i in range(64)]
        return [math.sin(x) for x in phases] + [math.cos(x) for x in phases]

    origin = embedding(0)
    products = [sum(a * b for a, b in zip(embedding(r), origin, strict=True)) for r in range(int(distance.max()) + 1)]
    inner = torch.tensor(products, dtype=distance.dtype, device=distance.device)[distance.long()]
    return torch.stack([inner / (8 * (head + 1) / heads) for head in range(heads)])


def _fire(distance: Tensor, query: Tensor, bias: Mapping[str, Tensor]) -> Tensor:
    """f(psi(r)/psi(max(m, |a| 512))) of Li et al. 2024, unit by unit of the network f, without the constant of its
    output: `query` m [batch, 1, queries, 1] -> [batch, heads, queries, keys].
    """
    given = {name: value.to(distance.dtype) for name, value in bias.items()}
    furthest = torch.maximum(query, 512 * given["a"].abs())
    share = torch.log(given["c"].abs() * distance + 1) / torch.log(given["c"].abs() * furthest + 1)
    total = torch.zeros((), dtype=distance.dtype)
    for unit, weights in enumerate(given["output_weight"].T):
        hidden = torch.relu(given["hidden_weight"][unit] * share + given["hidden_bias"][unit])
        total = total + weights[:, None, None] * hidden
    return total


BIASES: dict[str, Bias] = {
    "alibi": _alibi,
    "kerple_log": _kerple_log,
    "kerple_power": _kerple_power,
    "rpe": _rpe,
    "sandwich": _sandwich,
}

Scores = Callable[[Tensor, Tensor, Tensor, Pairs, float], Tensor]
SCORES: dict[str, Scores] = {
    "rotary": _rotary_scores,
    "xpos": _xpos_scores,
    "coca": _coca_scores,
    "coca_strict": _coca_strict_scores,
    **dict.fromkeys((*BIASES, "fire", "learned", "sinusoidal", "none"), _plain_scores),
}
