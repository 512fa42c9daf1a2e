"""Score forms: how a query and a key become the two operands whose dot product is the attention score.

Every form here, CoCA included, is ordinary attention on modified operands Q' and K', so any flash kernel runs it in
O(N) memory. The papers write CoCA as a three-operand contraction over an N x N intermediate;
`tests.reference` follows them literally.

Operand functions take x [batch, heads, length, head_dim] and the rotary tables, work in the tables' dtype (float32
or better: Q' of CoCA is quadratic in q, so it must be rounded once, at the end) and return x's dtype.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_coca.attention.positions import PositionRangeError
from megatron_coca.attention.rotary import RotaryTables, positive_mean, rotate, spread, squared_length, times_rotated

GAMMA = 0.4
SCALE_BASE = 512


def growth(positions: Tensor, dim: int, centre: float) -> Tensor:
    """zeta_j^((p - c)/512), zeta_j = (2j/d + gamma)/(1 + gamma): what multiplies a query; a key is divided by it.

    float64 `positions` [...] -> [..., dim/2]. A score depends on the difference of two positions alone, so the centre
    c only keeps the factors of one operand small; uncentred they overflow at 32k.
    """
    pair = torch.arange(dim // 2, dtype=torch.float64, device=positions.device)
    zeta = (2 * pair / dim + GAMMA) / (1 + GAMMA)
    return zeta ** ((positions[..., None] - centre) / SCALE_BASE)


def check_range(centre: float, dtype: torch.dtype) -> None:
    """Check that operands of `dtype`, with room for features of size 100, hold the factors of places 0 to 2 centre.

    Raises:
        PositionRangeError: they do not; with gamma 0.4 float32 ends near 68,000 tokens, float16 near 5,000.
    """
    largest = torch.finfo(dtype).max / 100
    reach = SCALE_BASE * math.log(largest) / math.log((1 + GAMMA) / GAMMA)
    if centre > reach:
        raise PositionRangeError(
            f"pos_emb: xpos at {2 * centre:.0f} tokens multiplies operands by more than {dtype} holds; it reaches"
            f" {2 * reach:.0f} tokens in this precision"
        )


Operand = Callable[[Tensor, RotaryTables], Tensor]
Kernel = Literal["rotary", "coca", "coca_strict"]


def _identity(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class ScoreForm:
    """One row of the table below.

    Attributes:
        query: q of the rotary block -> Q'; linear in the tables. None where the form turns nothing.
        kept: k of the rotary block -> what of it the score depends on, before any rotation.
        key: that -> K'; linear in the tables.
        query_rest: q -> Q' on the dimensions beyond `rotary_pct`.
        key_rest: k -> K' on them.
        kernel: the form's name among the fused kernels, or None.
        shift_invariant: whether moving all positions by a constant leaves the scores unchanged.
    """

    query: Operand | None = None
    kept: Callable[[Tensor], Tensor] = _identity
    key: Operand | None = None
    query_rest: Callable[[Tensor], Tensor] = _identity
    key_rest: Callable[[Tensor], Tensor] = _identity
    kernel: Kernel | None = None
    shift_invariant: bool = True

    @property
    def rotary(self) -> bool:
        """Whether the form turns its operands at all."""
        return self.query is not None

    def query_operand(self, q: Tensor, tables: RotaryTables | None, factor: Tensor | None = None) -> Tensor:
        """Q' of q [batch, heads, length, head_dim]; `factor` ([length, 1] or [batch, 1, length, 1]) multiplies the
        dimensions that the tables, which carry it already, do not reach.
        """
        if self.query is None or tables is None:
            return q if factor is None else (q.to(factor.dtype) * factor).to(q.dtype)
        block, rest = _split(q, 2 * tables.cos.shape[-1], tables.cos.dtype)
        turned = self.query(block, tables)
        if rest.shape[-1]:
            rest = self.query_rest(rest)
            turned = torch.cat((turned, rest if factor is None else rest * factor), dim=-1)
        return turned.to(q.dtype)

    def key_operand(self, k: Tensor, tables: RotaryTables | None) -> Tensor:
        """K' of k [batch, kv_heads, length, head_dim]."""
        if self.key is None or tables is None:
            return k
        block, rest = _split(k, 2 * tables.cos.shape[-1], tables.cos.dtype)
        return self._turn_key(self.kept(block), rest, tables).to(k.dtype)

    def cached(self, k: Tensor, rotary_dim: int) -> Tensor:
        """What a cache keeps of k: unrotated, half as wide on the rotary block for CoCA, in k's dtype."""
        block, rest = _split(k, rotary_dim, torch.promote_types(k.dtype, torch.float32))
        return torch.cat((self.kept(block), rest), dim=-1).to(k.dtype)

    def cached_width(self, head_dim: int, rotary_dim: int) -> int:
        """Features that `cached` keeps for each key head."""
        return self.cached(torch.empty(0, head_dim), rotary_dim).shape[-1]

    def key_operand_of_cached(self, cached: Tensor, tables: RotaryTables | None, head_dim: int) -> Tensor:
        """K' of what `cached` kept of keys with `head_dim` features."""
        if self.key is None or tables is None:
            return cached
        rest_dim = head_dim - 2 * tables.cos.shape[-1]
        block, rest = _split(cached, cached.shape[-1] - rest_dim, tables.cos.dtype)
        return self._turn_key(block, rest, tables).to(cached.dtype)

    def _turn_key(self, kept: Tensor, rest: Tensor, tables: RotaryTables) -> Tensor:
        assert self.key is not None
        turned = self.key(kept, tables)
        return torch.cat((turned, self.key_rest(rest)), dim=-1) if rest.shape[-1] else turned


def _split(x: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = x.to(dtype)
    return x[..., :width], x[..., width:]


def _slack_query(q: Tensor, tables: RotaryTables) -> Tensor:
    """q * (R_m q), elementwise (Zhu et al. 2024, "CoCA", the slack form, whose scores the paper writes as a contraction)."""
    return times_rotated(q, tables)


def coefficients(t: Tensor) -> Tensor:
    """u = relu of the mean of the two members of each rotated pair, [..., d] -> [..., d/2].

    `t` is what the key projection gives, so that the projection keeps a key's shape; the collinear key is (u, u).
    """
    return positive_mean(t)


def _slack_key(u: Tensor, tables: RotaryTables) -> Tensor:
    """R_n (u, u) = (u (cos - sin), u (cos + sin))."""
    return spread(u, tables.cos - tables.sin, tables.cos + tables.sin)


def _strict_query(q: Tensor, tables: RotaryTables) -> Tensor:
    """R_m (|q|^2, 0) with |q|^2 = q_i^2 + q_{i+d/2}^2, so that a score is sum_j u_j |q_j|^2 cos((m - n) theta_j)."""
    return spread(squared_length(q), tables.cos, tables.sin)


def _strict_key(u: Tensor, tables: RotaryTables) -> Tensor:
    """R_n (u, 0)."""
    return spread(u, tables.cos, tables.sin)


PLAIN = ScoreForm()
"""Q' = q, K' = k: position enters through a bias, the embedding, or not at all."""

ROTATED = ScoreForm(query=rotate, key=rotate, kernel="rotary")
"""R_m q and R_n k (Su et al. 2021, "RoFormer", section 3.2.2); with xPos's growing and shrinking tables, xPos."""

SCORE_FORMS: dict[str, ScoreForm] = {
    "rotary": ROTATED,
    "xpos": ROTATED,
    "coca": ScoreForm(
        _slack_query, coefficients, _slack_key, torch.square, torch.relu, kernel="coca", shift_invariant=False
    ),
    "coca_strict": ScoreForm(_strict_query, coefficients, _strict_key, torch.square, torch.relu, kernel="coca_strict"),
    "alibi": PLAIN,
    "kerple_log": PLAIN,
    "kerple_power": PLAIN,
    "rpe": PLAIN,
    "learned": PLAIN,
    "sinusoidal": PLAIN,
    "none": PLAIN,
}

LogitScaling = Callable[[Tensor, int], Tensor]
"""(float64 positions [...], training length L) -> factors [...]."""


def _log_n(positions: Tensor, training_length: int) -> Tensor:
    """max(1, ln(m + 1)/ln L): nothing changes within the training length (Su 2023, kexue.fm/archives/9708)."""
    return _log_n_trained(positions, training_length).clamp(min=1.0)


def _log_n_trained(positions: Tensor, training_length: int) -> Tensor:
    """ln(m + 1)/ln L, m counted from 0, from the first step of training on (Su 2021, kexue.fm/archives/8823; the form
    for a causal model, whose row m sees m + 1 keys, is our reading).
    """
    return positions.log1p() / math.log(training_length)


LOGIT_SCALINGS: dict[str, LogitScaling | None] = {"none": None, "log_n": _log_n, "log_n_trained": _log_n_trained}

TRAINED_SCALINGS = frozenset({"log_n_trained"})
"""Scalings that belong to the weights: they cannot be switched on or off at evaluation time."""
