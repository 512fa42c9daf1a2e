"""Score forms: each turns a query and a key into two operands, and their dot product is the attention score.

Every form, including CoCA, is ordinary attention on modified operands Q' and K', so any flash kernel can run it in O(N)
memory. The papers write CoCA as a three-operand contraction with an N x N intermediate; `tests.reference` implements
the papers literally.

Operand functions take x [batch, heads, length, head_dim] and the rotary tables, compute in the tables' dtype, and
return x's dtype. The tables are float32 or better, because Q' of CoCA is quadratic in q and must be rounded only once,
at the end.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_coca.attention.positions import PositionRangeError


class RotaryTables(NamedTuple):
    """cos and sin of position * frequency, both multiplied by an amplitude; each [length, d/2] or [batch, 1, length,
    d/2].
    """

    cos: Tensor
    sin: Tensor


def rotary_tables(
    positions: Tensor, inverse_frequencies: Tensor, dtype: torch.dtype, amplitude: Tensor | float = 1.0
) -> RotaryTables:
    """Compute the tables in float32, or in float64 if `dtype` is float64.

    `positions` is [length] or [batch, length] of any real dtype; `amplitude` broadcasts to [..., length, d/2].
    """
    phases = positions.to(torch.float64)[..., None] * inverse_frequencies.to(positions.device)
    cos, sin = phases.cos() * amplitude, phases.sin() * amplitude
    if positions.dim() == 2:
        cos, sin = cos[:, None], sin[:, None]
    table_dtype = torch.promote_types(dtype, torch.float32)
    return RotaryTables(cos.to(table_dtype), sin.to(table_dtype))


def rotate(x: Tensor, tables: RotaryTables) -> Tensor:
    """Return R_p x for x [batch, heads, length, rotary_dim] in the tables' dtype."""
    if tables.cos.requires_grad or torch.compiler.is_compiling():
        (first, second), (cos, sin) = _halves(x), tables
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return _Rotation.apply(x, *tables)


def times_rotated(x: Tensor, tables: RotaryTables) -> Tensor:
    """Return x * (R_p x), elementwise."""
    if tables.cos.requires_grad or torch.compiler.is_compiling():
        return x * rotate(x, tables)
    return _TimesRotated.apply(x, *tables)


def spread(x: Tensor, to_first: Tensor, to_second: Tensor) -> Tensor:
    """Return (x a, x b) for tables a and b: [..., d/2] -> [..., d]."""
    if to_first.requires_grad or torch.compiler.is_compiling():
        return torch.cat((x * to_first, x * to_second), dim=-1)
    return _Spread.apply(x, to_first, to_second)


def positive_mean(x: Tensor) -> Tensor:
    """Return relu of the mean of the two members of each rotated pair: [..., d] -> [..., d/2]."""
    if torch.compiler.is_compiling():
        first, second = _halves(x)
        return ((first + second) * 0.5).relu()
    return _PositiveMean.apply(x)


def squared_length(x: Tensor) -> Tensor:
    """Return x_i^2 + x_{i+d/2}^2: [..., d] -> [..., d/2]."""
    if torch.compiler.is_compiling():
        first, second = _halves(x)
        return first.square() + second.square()
    return _SquaredLength.apply(x)


def pair_length(x: Tensor) -> Tensor:
    """Return sqrt(x_i^2 + x_{i+d/2}^2), with gradient 0 at 0: [..., d] -> [..., d/2]."""
    return torch.linalg.vector_norm(torch.stack(_halves(x), dim=-1), dim=-1)


def softplus(x: Tensor) -> Tensor:
    """Return ln(1 + e^x). The result is exact in float64; with PyTorch's default threshold it would not be."""
    return F.softplus(x, threshold=40.0) if torch.compiler.is_compiling() else _Softplus.apply(x)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    first, second = x.chunk(2, dim=-1)
    return first, second


def _turn(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """Return R_p x or, with sign -1, the inverse rotation R_-p x."""
    rotated = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (first, second), (rotated_first, rotated_second) = _halves(x), _halves(rotated)
    torch.mul(first, cos, out=rotated_first).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=rotated_second).addcmul_(first, sin, value=sign)
    return rotated


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, sin, -1), None, None


class _TimesRotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(x, cos, sin)
        return _turn(x, cos, sin, 1).mul_(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Return g * (R x) + R^-1 (g * x), which is (2c g1 x1 + s (g2 - g1) x2, 2c g2 x2 + s (g2 - g1) x1)."""
        x, cos, sin = ctx.saved_tensors
        result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        (x1, x2), (g1, g2) = _halves(x), _halves(grad)
        cross, twice = (g2 - g1).mul_(sin), 2 * cos
        for half, own, of_x, other in zip(_halves(result), (g1, g2), (x1, x2), (x2, x1), strict=True):
            torch.mul(own, of_x, out=half).mul_(twice).addcmul_(cross, other)
        return result, None, None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, to_first: Tensor, to_second: Tensor) -> Tensor:
        ctx.save_for_backward(to_first, to_second)
        result = torch.empty((*x.shape[:-1], 2 * x.shape[-1]), dtype=x.dtype, device=x.device)
        first, second = _halves(result)
        torch.mul(x, to_first, out=first)
        torch.mul(x, to_second, out=second)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        to_first, to_second = ctx.saved_tensors
        first, second = _halves(grad)
        return (first * to_first).addcmul_(second, to_second), None, None


class _PositiveMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        first, second = _halves(x)
        mean = (first + second).mul_(0.5).relu_()
        ctx.save_for_backward(mean)
        return mean

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (mean,) = ctx.saved_tensors
        result = torch.empty((*grad.shape[:-1], 2 * grad.shape[-1]), dtype=grad.dtype, device=grad.device)
        first, second = _halves(result)
        second.copy_(torch.mul(grad, (mean > 0).to(grad.dtype).mul_(0.5), out=first))
        return result


class _Softplus(torch.autograd.Function):
    """Save the result for the backward pass instead of a float32 copy of x. Later operations save the result anyway."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = F.softplus(x, threshold=40.0)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Return g sigmoid(x), where sigmoid(x) = 1 - e^-softplus(x)."""
        (result,) = ctx.saved_tensors
        return torch.neg(result).expm1_().neg_().mul_(grad)


class _SquaredLength(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        first, second = _halves(x)
        return first.square().addcmul_(second, second)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for half, of_x in zip(_halves(result), _halves(x), strict=True):
            torch.mul(of_x, grad, out=half).mul_(2)
        return result


GAMMA = 0.4
SCALE_BASE = 512


def growth(positions: Tensor, dim: int, centre: float) -> Tensor:
    """Return xPos's factor, zeta_j^((p - c)/512) with zeta_j = (2j/d + gamma)/(1 + gamma), for float64 `positions` p:
    [...] -> [..., dim/2]. Queries are multiplied by it, and keys are divided by it.

    The centre c cancels in the scores. It keeps the factors small; without it, they would overflow at 32k.
    """
    pair = torch.arange(dim // 2, dtype=torch.float64, device=positions.device)
    zeta = (2 * pair / dim + GAMMA) / (1 + GAMMA)
    return zeta ** ((positions[..., None] - centre) / SCALE_BASE)


def check_range(centre: float, dtype: torch.dtype) -> None:
    """Check that `dtype` can represent the factors at positions 0 to 2 * centre, multiplied by features of size 100.

    Raises:
        PositionRangeError: `dtype` cannot represent these products. The limit is about 68,000 tokens in float32 and
            about 5,300 in float16.
    """
    largest = torch.finfo(dtype).max / 100
    reach = SCALE_BASE * math.log(largest) / math.log((1 + GAMMA) / GAMMA)
    if centre > reach:
        raise PositionRangeError(
            f"pos_emb: xpos overflows {dtype} at {2 * centre:.0f} tokens; use at most {2 * reach:.0f} tokens, "
            "or a wider precision"
        )


MagnitudeFunction = Callable[[Tensor], Tensor]
Operand = Callable[[Tensor, RotaryTables], Tensor]
KernelForm = Literal["rotary", "coca", "coca_strict"]
Polar = tuple[Literal["softplus", "relu_mean"], int]


def _identity(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class ScoreForm:
    """One score form, as listed in `SCORE_FORMS`.

    `query` and `key` take x and the tables of cosines and sines, and return the operand in the dtype of the tables; the
    form then rounds it once. They must be linear in the tables, because factors on the scores are multiplied into the
    tables.

    Attributes:
        query: maps q in the rotary block to Q'; linear in the tables. None for non-rotary forms.
        kept: maps k in the rotary block to the values that `key` rotates.
        key: maps the result of `kept` to K'; linear in the tables.
        query_rest: maps q to Q' on the dimensions beyond `rotary_pct`.
        key_rest: maps k to K' on the dimensions beyond `rotary_pct`.
        kernel: the name of the form in the fused kernel, or None.
        polar: the options `magnitude` and `power` of a form that the fused kernel of polar forms computes, or None.
        decay: whether the tables include xPos's exponential factors.
        magnitude: maps q to the numbers a for which Q' = R_m (a, 0), or None if the form has an angle that depends on q
            or k. Only a form with `magnitude` can be turned by a constant angle.
        angle: constant angle phi of every term, m_j u_j cos(r theta_j + phi).
        features: number of rotated features per frequency.
        operand_features: number of features of the rotated part of Q' and K' per rotated feature.
    """

    query: Operand | None = None
    kept: Callable[[Tensor], Tensor] = _identity
    key: Operand | None = None
    query_rest: Callable[[Tensor], Tensor] = _identity
    key_rest: Callable[[Tensor], Tensor] = _identity
    kernel: KernelForm | None = None
    polar: Polar | None = None
    decay: bool = False
    magnitude: MagnitudeFunction | None = None
    angle: float = 0.0
    features: int = 2
    operand_features: int = 1

    @property
    def rotary(self) -> bool:
        """Whether the form rotates its operands."""
        return self.query is not None

    def constant_offset(self, heads: int, tables: RotaryTables) -> Tensor | None:
        """Return the form's angle as offsets [heads, number of terms], or None if it is 0."""
        terms = self.operand_features * self.features * tables.cos.shape[-1] // 2
        shape, cos = (heads, terms), tables.cos
        return torch.full(shape, -self.angle, dtype=cos.dtype, device=cos.device) if self.angle else None

    @property
    def fused(self) -> bool:
        """Whether a fused kernel computes the operands."""
        return self.kernel is not None or self.polar is not None

    def operand_width(self, head_dim: int, rotated: int) -> int:
        """Return the number of features of Q' and K' for heads with `rotated` of `head_dim` features rotated."""
        return head_dim + (self.operand_features - 1) * rotated

    def query_operand(
        self, q: Tensor, tables: RotaryTables | None, factor: Tensor | None = None, offset: Tensor | None = None
    ) -> Tensor:
        """Return Q' for q [batch, heads, length, head_dim].

        `factor` ([length, 1] or [batch, 1, length, 1]) multiplies only the unrotated features, because the tables
        already include it. `offset` ([heads, number of magnitudes], in radians) is subtracted from the angle of every
        term: m_j u_j cos(r theta_j - offset_j).
        """
        if self.query is None or tables is None:
            return q if factor is None else (q.to(factor.dtype) * factor).to(q.dtype)
        block, rest = _split(q, self.features * tables.cos.shape[-1], tables.cos.dtype)
        if self.magnitude is not None and (offset is not None or self.angle):
            rotated = _turned_magnitudes(self.magnitude(block), -self.angle if offset is None else offset, tables)
        else:
            rotated = self.query(block, tables)
        if rest.shape[-1]:
            rest = self.query_rest(rest)
            rotated = torch.cat((rotated, rest if factor is None else rest * factor), dim=-1)
        return rotated.to(q.dtype)

    def key_operand(self, k: Tensor, tables: RotaryTables | None) -> Tensor:
        """Return K' for k [batch, kv_heads, length, head_dim]."""
        if self.key is None or tables is None:
            return k
        block, rest = _split(k, self.features * tables.cos.shape[-1], tables.cos.dtype)
        rotated = self.key(self.kept(block), tables)
        return (torch.cat((rotated, self.key_rest(rest)), dim=-1) if rest.shape[-1] else rotated).to(k.dtype)

    @property
    def by_magnitudes(self) -> bool:
        """Whether Q' and K' have two features for each magnitude, so that a kernel that computes Q' and K' itself saves
        memory.
        """
        return self.operand_features == 2 and self.magnitude is not None

    def query_magnitudes(self, q: Tensor, tables: RotaryTables, factor: Tensor | None = None) -> Tensor:
        """Return the magnitudes of q, followed by its unrotated features multiplied by `factor`, in q's shape."""
        assert self.magnitude is not None
        return self._magnitudes(q, self.magnitude, self.query_rest, tables, factor)

    def key_magnitudes(self, k: Tensor, tables: RotaryTables) -> Tensor:
        """Return the magnitudes of k, followed by its unrotated features, in k's shape."""
        return self._magnitudes(k, self.kept, self.key_rest, tables)

    def _magnitudes(
        self,
        x: Tensor,
        of: MagnitudeFunction,
        of_rest: MagnitudeFunction,
        tables: RotaryTables,
        factor: Tensor | None = None,
    ) -> Tensor:
        width, wide = self.features * tables.cos.shape[-1], tables.cos.dtype
        # Softplus is computed in x's dtype, so that its backward pass and that of attention save the same tensor.
        block = of(x[..., :width] if of is softplus else x[..., :width].to(wide)).to(x.dtype)
        m, _ = _matched(block, tables)
        if width == x.shape[-1]:
            return m
        rest = of_rest(x[..., width:].to(wide))
        return torch.cat((m, (rest if factor is None else rest * factor).to(x.dtype)), dim=-1)


def magnitude_tables(form: ScoreForm, tables: RotaryTables) -> RotaryTables:
    """Return tables with one column for each magnitude, for forms in which two magnitudes share a frequency."""
    return RotaryTables(*(torch.cat((x, x), dim=-1) for x in tables)) if form.features == 2 else tables


def expand(x: Tensor, tables: RotaryTables, offset: Tensor | None = None) -> Tensor:
    """Return (m cos, m sin) for the magnitudes m in x [..., heads, length, features], followed by the other features.

    `offset` [heads, number of magnitudes] is subtracted from the angles.
    """
    m, rest = _split(x, tables.cos.shape[-1], tables.cos.dtype)
    turned = rotated_magnitudes(m, tables) if offset is None else _turned_magnitudes(m, offset, tables)
    return torch.cat((turned, rest), dim=-1).to(x.dtype)


def _split(x: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = x.to(dtype)
    return x[..., :width], x[..., width:]


def _slack_query(q: Tensor, tables: RotaryTables) -> Tensor:
    """Return q * (R_m q), elementwise. This is the slack form of Zhu et al. 2024, "CoCA"; the paper writes it as a
    contraction.
    """
    return times_rotated(q, tables)


def coefficients(t: Tensor) -> Tensor:
    """Return u, relu of the mean of the two members of each rotated pair: [..., d] -> [..., d/2].

    `t` is the output of the key projection, in the shape of a key. The collinear key is (u, u).
    """
    return positive_mean(t)


def _slack_key(u: Tensor, tables: RotaryTables) -> Tensor:
    """Return R_n (u, u) = (u (cos - sin), u (cos + sin))."""
    return spread(u, tables.cos - tables.sin, tables.cos + tables.sin)


def rotated_magnitudes(magnitudes: Tensor, tables: RotaryTables) -> Tensor:
    """Return R_p (m, 0) = (m cos, m sin) for magnitudes m [..., number of magnitudes] of any sign.

    If there are half as many frequencies as magnitudes, magnitudes j and j + d/2 share frequency j. If there are half
    as many magnitudes as frequencies, frequencies j and j + d/2 share magnitude j.
    """
    m, (cos, sin) = _matched(magnitudes, tables)
    return spread(m, cos, sin)


def _turned_magnitudes(magnitudes: Tensor, offset: Tensor | float, tables: RotaryTables) -> Tensor:
    """Return R_p (m cos delta, -m sin delta), in which the angle of every term is p theta - delta. `offset` is one
    angle, or one per head and magnitude [heads, number of magnitudes].
    """
    m, tables = _matched(magnitudes, tables)
    if isinstance(offset, Tensor):
        offset = offset.to(m.dtype)[:, None]
        return rotate(torch.cat((m * offset.cos(), m * -offset.sin()), dim=-1), tables)
    return rotate(torch.cat((m * math.cos(offset), m * -math.sin(offset)), dim=-1), tables)


def _matched(magnitudes: Tensor, tables: RotaryTables) -> tuple[Tensor, RotaryTables]:
    """Repeat magnitudes or tables, whichever are fewer, so that there is one frequency per magnitude."""
    m, (cos, sin) = magnitudes, tables
    if m.shape[-1] < cos.shape[-1]:
        m = torch.cat((m, m), dim=-1)
    elif m.shape[-1] > cos.shape[-1]:
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
    return m, RotaryTables(cos, sin)


PLAIN = ScoreForm()
"""Q' = q, K' = k: positions affect the model through a bias, through the embedding, or not at all."""

ROTATED = ScoreForm(query=rotate, key=rotate, kernel="rotary")
"""Q' = R_m q, K' = R_n k (Su et al. 2021, "RoFormer", section 3.2.2)."""


def _softplus_squared(x: Tensor) -> Tensor:
    return softplus(x).square()


class _Magnitudes(NamedTuple):
    """Magnitudes of the rotated features of q and k, and functions of the unrotated features."""

    query: MagnitudeFunction
    key: MagnitudeFunction
    query_rest: MagnitudeFunction
    key_rest: MagnitudeFunction


_MAGNITUDES: dict[tuple[str, int], _Magnitudes] = {
    ("softplus", 1): _Magnitudes(softplus, softplus, _identity, _identity),
    ("softplus", 2): _Magnitudes(_softplus_squared, softplus, _identity, _identity),
    ("relu_mean", 1): _Magnitudes(pair_length, coefficients, torch.abs, torch.relu),
    ("relu_mean", 2): _Magnitudes(squared_length, coefficients, torch.square, torch.relu),
}
"""Magnitudes by the options `magnitude` and `power`. With `softplus`, unrotated features do not change, as in public
code of PoPE. With `relu_mean`, they become |q|^power and relu(t); for power 2, this is CoCA's rule.
"""


def polar(options: Mapping[str, Any]) -> ScoreForm:
    """Return the form with the score sum_c m_c u_c cos(r theta_c - delta_c), in which only positions change the angle.

    By default, it is PoPE (Gopalakrishnan et al. 2025, arXiv:2509.10534): m = softplus(q), u = softplus(k), and one
    frequency per feature. With `power` 2, `magnitude` relu_mean and `frequencies` pair, it is CoCA-Strict.
    """
    magnitude, power, frequencies = (options[name] for name in ("magnitude", "power", "frequencies"))
    of_query, of_key, query_rest, key_rest = _MAGNITUDES[magnitude, power]
    return ScoreForm(
        query=partial(_rotated_query, of_query),
        kept=of_key,
        key=rotated_magnitudes,
        query_rest=query_rest,
        key_rest=key_rest,
        polar=(magnitude, power),
        magnitude=of_query,
        angle=_constant_angle(options),
        features=1 if frequencies == "feature" else 2,
        operand_features=1 if (magnitude, frequencies) == ("relu_mean", "pair") else 2,
    )


def _constant_angle(options: Mapping[str, Any]) -> float:
    """Return the constant angle of all terms. Random angles are a module of each layer instead."""
    angle = options.get("initial_angle") or 0.0
    return 0.0 if angle == "random" else float(angle)


def _rotated_query(magnitude: MagnitudeFunction, q: Tensor, tables: RotaryTables) -> Tensor:
    """Return R_m (m, 0) for the magnitudes m of q."""
    return rotated_magnitudes(magnitude(q), tables)


PAPER = {"power": 1, "frequencies": "feature", "magnitude": "softplus"}
"""The options with which `polar` returns PoPE."""

SCORE_FORMS: dict[str, ScoreForm] = {
    "rotary": ROTATED,
    "xpos": ScoreForm(query=rotate, key=rotate, kernel="rotary", decay=True),
    "coca": ScoreForm(_slack_query, coefficients, _slack_key, torch.square, torch.relu, kernel="coca"),
    "coca_strict": ScoreForm(
        partial(_rotated_query, squared_length),  # a score is sum_j u_j |q_j|^2 cos((m - n) theta_j)
        coefficients,
        rotated_magnitudes,
        torch.square,
        torch.relu,
        kernel="coca_strict",
        polar=("relu_mean", 2),
        magnitude=squared_length,
    ),
    "pope": polar(PAPER),
    "polar": polar(PAPER),
}
"""Score forms of the rotary values of `pos_emb`, with their default options; all other values use PLAIN."""


def without_kernels(form: ScoreForm) -> ScoreForm:
    """Return the score form that a user declared. Unless this is a built-in form, the result has no fused kernels: the
    kernel of the form from which the user derived it would ignore the user's functions.
    """
    return form if form in SCORE_FORMS.values() else replace(form, kernel=None, polar=None)


def _angled(options: Mapping[str, Any]) -> ScoreForm:
    """Return CoCA-Strict with a constant initial angle."""
    return replace(SCORE_FORMS["coca_strict"], angle=_constant_angle(options))


_WITH_OPTIONS: dict[str, Callable[[Mapping[str, Any]], ScoreForm]] = {"polar": polar, "coca_strict": _angled}


def score_form(name: str, options: Mapping[str, Any]) -> ScoreForm:
    """Return the score form of `pos_emb: name` with all its options. For non-rotary values, return PLAIN."""
    return _WITH_OPTIONS[name](options) if name in _WITH_OPTIONS else SCORE_FORMS.get(name, PLAIN)
