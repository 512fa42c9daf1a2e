"""Score forms: how a query and a key become the two operands whose dot product is the attention score.

Every form here, CoCA included, is ordinary attention on modified operands Q' and K', so any flash kernel runs it in
O(N) memory. The papers write CoCA as a three-operand contraction over an N x N intermediate;
`megatron_coca.attention.oracle` follows them
literally.

Operand functions take x [batch, heads, length, head_dim] and the rotary tables, work in the tables' dtype (float32
or better: Q' of CoCA is quadratic in q, so it must be rounded once, at the end) and return x's dtype.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_coca.attention.rotary import RotaryTables, rotate

Operand = Callable[[Tensor, RotaryTables], Tensor]


@dataclass(frozen=True)
class ScoreForm:
    """One row of the table below.

    `query` and `key` act on the rotary block, `query_rest` and `key_rest` on the dimensions beyond `rotary_pct`.
    `rotary` says whether the form turns its operands at all, `shift_invariant` whether moving all positions by a
    constant leaves the scores
    unchanged.
    """

    query: Operand | None
    key: Operand | None
    query_rest: Callable[[Tensor], Tensor] | None
    key_rest: Callable[[Tensor], Tensor] | None
    rotary: bool
    shift_invariant: bool

    def operands(self, q: Tensor, k: Tensor, tables: RotaryTables | None) -> tuple[Tensor, Tensor]:
        """(Q', K') from q [batch, heads, length, head_dim] and k [batch, kv_heads, length, head_dim], in their
        dtypes.
        """
        if tables is None:
            return q, k
        return _apply(q, tables, self.query, self.query_rest), _apply(k, tables, self.key, self.key_rest)


def _apply(x: Tensor, tables: RotaryTables, operand: Operand | None, rest: Callable[[Tensor], Tensor] | None) -> Tensor:
    assert operand is not None and rest is not None, "a form without rotation has no tables"
    rotary_dim = 2 * tables.cos.shape[-1]
    if rotary_dim == x.shape[-1]:
        return operand(x, tables).to(x.dtype)
    turned = operand(x[..., :rotary_dim], tables)
    return torch.cat((turned, rest(x[..., rotary_dim:].to(turned.dtype))), dim=-1).to(x.dtype)


def _rotated(x: Tensor, tables: RotaryTables) -> Tensor:
    """R_p x (Su et al. 2021, "RoFormer", section 3.2.2)."""
    return rotate(x, tables)


def _slack_query(q: Tensor, tables: RotaryTables) -> Tensor:
    """q * (R_m q), elementwise (Zhu et al. 2024, "CoCA", the slack form, whose scores the paper writes as a contraction)."""
    return q.to(tables.cos.dtype) * rotate(q, tables)


def coefficients(t: Tensor) -> Tensor:
    """u = relu of the mean of the two members of each rotated pair, [..., d] -> [..., d/2].

    `t` is what the key projection gives, so that the projection keeps a key's shape; the collinear key is (u, u).
    """
    first, second = t.chunk(2, dim=-1)
    return torch.relu((first + second) / 2)


def _slack_key(t: Tensor, tables: RotaryTables) -> Tensor:
    """R_n (u, u) = (u (cos - sin), u (cos + sin))."""
    u = coefficients(t.to(tables.cos.dtype))
    return torch.cat((u * (tables.cos - tables.sin), u * (tables.cos + tables.sin)), dim=-1)


def _strict_query(q: Tensor, tables: RotaryTables) -> Tensor:
    """R_m (|q|^2, 0) with |q|^2 = q_i^2 + q_{i+d/2}^2, so that a score is sum_j u_j |q_j|^2 cos((m - n) theta_j)."""
    first, second = q.to(tables.cos.dtype).chunk(2, dim=-1)
    squared = first.square() + second.square()
    return torch.cat((squared * tables.cos, squared * tables.sin), dim=-1)


def _strict_key(t: Tensor, tables: RotaryTables) -> Tensor:
    """R_n (u, 0)."""
    u = coefficients(t.to(tables.cos.dtype))
    return torch.cat((u * tables.cos, u * tables.sin), dim=-1)


def _identity(x: Tensor) -> Tensor:
    return x


_PLAIN = ScoreForm(query=None, key=None, query_rest=None, key_rest=None, rotary=False, shift_invariant=True)
_COCA_REST = {"query_rest": torch.square, "key_rest": torch.relu}

SCORE_FORMS: dict[str, ScoreForm] = {
    "rotary": ScoreForm(_rotated, _rotated, _identity, _identity, rotary=True, shift_invariant=True),
    "coca": ScoreForm(_slack_query, _slack_key, **_COCA_REST, rotary=True, shift_invariant=False),
    "coca_strict": ScoreForm(_strict_query, _strict_key, **_COCA_REST, rotary=True, shift_invariant=True),
    "alibi": _PLAIN,
    "learned": _PLAIN,
    "none": _PLAIN,
}
