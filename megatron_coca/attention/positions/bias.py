"""Additive score biases as formulas of the distance r = m - n, without an N x N tensor.

A bias has the name of its `formula`, its `coefficients` ([heads, k] float32 or better) and a method `at` that evaluates
it. Kernels implement some formulas by name; other backends evaluate any bias with `at`. Distances must be float32 or
better: bfloat16 can represent only 4 or 5 different values among 512 adjacent distances near 32,768. Learned biases are
modules; their weights may have any dtype.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar, Protocol

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx
from typing_extensions import Self


class DistanceBias(Protocol):
    """A score bias given as a formula of the distance r between query and key."""

    @property
    def formula(self) -> str:
        """Name of the formula for kernels: `linear` is -c0 r, `log` is -c0 ln(1 + c1 r), `power` is -c0 r^c1, `buckets`
        is a step function. A formula that no kernel computes may have any other name. For formulas in `PAIRWISE`, call
        `bias_of_pairs`, not `at`.
        """
        ...

    @property
    def coefficients(self) -> Tensor:
        """c0 and, if present, c1 of each query head, [heads, 1 or 2] float32 or better (for `buckets`: [heads,
        buckets]); differentiable if learned. Fixed biases without a kernel have shape [heads, 0].
        """
        ...

    def at(self, distance: Tensor) -> Tensor:
        """Evaluate the bias at floating-point `distance` [...] >= 0: [heads, ...] in the dtype and on the device of
        `distance`.
        """
        ...

    def part(self, index: int, count: int) -> "DistanceBias":
        """Return the bias for part `index` of `count` equal parts of the heads."""
        ...


CPU = torch.device("cpu")
PAIRWISE = frozenset({"fire"})
"""Formulas that depend on the query's position as well as the distance. Their `at` has an argument for each."""
SMALLEST = 0.01
"""Lower bound of KERPLE's p and a, which must be positive; the value is from the authors' code."""
LARGEST_POWER = 2.0
"""Upper bound of the exponent, beyond which r^p is not a conditionally positive definite kernel (Chi et al. 2022)."""


def _columns(coefficients: Tensor, distance: Tensor) -> tuple[Tensor, ...]:
    """Return the columns of `coefficients` [heads, k], each shaped [heads, 1, ...] to broadcast against `distance`
    [...].
    """
    shape = (-1, *[1] * distance.dim())
    return tuple(column.view(shape) for column in coefficients.to(distance).unbind(-1))


@dataclass(frozen=True)
class AlibiBias:
    """-slope_h * r, with one slope per query head (Press et al. 2022, section 3)."""

    slopes: tuple[float, ...]
    device: torch.device = CPU
    formula: ClassVar[str] = "linear"

    @property
    def coefficients(self) -> Tensor:
        """The slopes, [heads, 1] float32 on `device`, cached so that later calls copy nothing from the host."""
        return _column(self.slopes, torch.float32, self.device)

    def to(self, device: torch.device) -> "AlibiBias":
        """Return the same bias with its coefficients on `device`."""
        return self if device == self.device else replace(self, device=device)

    def at(self, distance: Tensor) -> Tensor:
        """Evaluate the bias at `distance` [...]: [heads, ...]."""
        (slopes,) = _columns(_column(self.slopes, distance.dtype, distance.device), distance)
        return -slopes * distance

    def part(self, index: int, count: int) -> "AlibiBias":
        """Return the bias for part `index` of `count` equal parts of the heads."""
        heads = len(self.slopes) // count
        return replace(self, slopes=self.slopes[index * heads : (index + 1) * heads])


@dataclass(frozen=True)
class FixedBias:
    """A bias without weights: `function` computes it for all heads, distance [...] -> [heads, ...]."""

    function: Callable[[Tensor], Tensor]
    formula: str
    index: int = 0
    count: int = 1

    @property
    def coefficients(self) -> Tensor:
        """An empty tensor [heads, 0]."""
        return self.at(torch.zeros(1))[:, :0]

    def to(self, device: torch.device) -> Self:
        """Return the bias unchanged: the function computes on the device of the distances."""
        return self

    def at(self, distance: Tensor) -> Tensor:
        """Evaluate the bias at `distance` [...]: [heads, ...]."""
        return self.function(distance).to(distance).chunk(self.count)[self.index]

    def part(self, index: int, count: int) -> Self:
        """Return the bias for part `index` of `count` equal parts of the heads."""
        return replace(self, index=self.index * count + index, count=self.count * count)


@cache  # otherwise each copy from the host would wait for the device
def _column(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # the cached tensor may be saved for a later backward
        return torch.tensor(values, dtype=dtype, device=device)[:, None]


@dataclass(frozen=True, eq=False)
class _OfCoefficients:
    coefficients: Tensor

    def part(self, index: int, count: int) -> Self:
        """Return the bias for part `index` of `count` equal parts of the heads."""
        return replace(self, coefficients=self.coefficients.chunk(count)[index])


@dataclass(frozen=True, eq=False)
class KerpleLogBias(_OfCoefficients):
    """-p ln(1 + a r) with `coefficients` [heads, 2] = (p, a), both positive (Chi et al. 2022, "KERPLE", section 4)."""

    formula: ClassVar[str] = "log"

    def at(self, distance: Tensor) -> Tensor:
        """Evaluate the bias at `distance` [...]: [heads, ...]."""
        p, a = _columns(self.coefficients, distance)
        return -p * torch.log1p(a * distance)


@dataclass(frozen=True, eq=False)
class KerplePowerBias(_OfCoefficients):
    """-a r^p with `coefficients` [heads, 2] = (a, p), a positive, 0 < p <= 2 (Chi et al. 2022, "KERPLE", section 4)."""

    formula: ClassVar[str] = "power"

    def at(self, distance: Tensor) -> Tensor:
        """Evaluate the bias at `distance` [...]: [heads, ...]. At r = 0, the bias and its gradients are 0."""
        a, p = _columns(self.coefficients, distance)
        return -a * distance.pow(p)


FIRE_WIDTH, FIRE_THRESHOLD = 32, 512.0
"""The number of hidden units in FIRE's network and the threshold L0, both from the authors' code."""


@dataclass(frozen=True, eq=False)
class FireBias(_OfCoefficients):
    """f(psi(r) / psi(max(m, |a L0|))), where psi(x) = ln(|c| x + 1) and f is a network with one hidden layer of ReLUs
    (Li et al. 2024, "Functional Interpolation for Relative Positions", section 3).

    `coefficients` is [heads, 3 W + 2] for W hidden units: the output weights of each head, followed by the hidden
    weights, hidden biases, c and a, which all heads share. The authors' network also has an output bias, which softmax
    would cancel.
    """

    formula: ClassVar[str] = "fire"

    def at(self, distance: Tensor, query: Tensor | None = None) -> Tensor:
        """Evaluate the bias, [heads, ...], at `distance` [...] for queries at token index `query` [...] within their
        documents; `distance` and `query` broadcast against each other.
        """
        if query is None:
            raise ValueError("fire: the bias also depends on the query's position; call bias_of_pairs instead of at")
        values = self.coefficients.to(distance)
        weight, bias = values[0, FIRE_WIDTH:-2].chunk(2)
        c, threshold = values[0, -2].abs(), (values[0, -1] * FIRE_THRESHOLD).abs()
        furthest = torch.maximum(query.to(distance), threshold)
        share = (c * distance).log1p() / (c * furthest).log1p().clamp(min=torch.finfo(distance.dtype).tiny)
        hidden = F.linear(share[..., None], weight[:, None], bias).relu()  # fewest passes over the W values per pair
        return F.linear(hidden, values[:, :FIRE_WIDTH]).movedim(-1, 0)


def bias_of_pairs(bias: DistanceBias, distance: Tensor, query: Tensor) -> Tensor:
    """Evaluate a bias, [heads, ...], at `distance` [...] >= 0 for queries at token index `query` [...] within their
    documents; `distance` and `query` broadcast against each other.
    """
    if bias.formula in PAIRWISE:
        return bias.at(distance, query)  # type: ignore[call-arg]
    return bias.at(distance)


@dataclass(frozen=True, eq=False)
class BucketBias(_OfCoefficients):
    """One bias value per bucket of distances: `coefficients` [heads, buckets] (Raffel et al. 2020, "T5", section 2.1).

    For B buckets and E = floor(B/2), each distance below E has its own bucket. A larger distance r is in bucket E +
    floor((B - E) ln(r/E) / ln(max_distance/E)), but at most B - 1.
    """

    max_distance: int = 128
    formula: ClassVar[str] = "buckets"

    def at(self, distance: Tensor) -> Tensor:
        """Evaluate the bias at `distance` [...]: [heads, ...]."""
        firsts = bucket_starts(self.coefficients.shape[-1], self.max_distance)
        starts = _column(firsts, distance.dtype, distance.device)[:, 0]
        bucket = torch.bucketize(distance, starts, right=True) - 1
        values = self.coefficients.to(distance).index_select(1, bucket.flatten())
        return values.view(len(values), *distance.shape)


@cache
def bucket_starts(buckets: int, max_distance: int) -> tuple[int, ...]:
    """Return the smallest distance in each bucket, ascending. A bucket that contains no integer has the same value as
    the next bucket.

    A distance r is in bucket E + k or a later one if (r/E)^(B - E) >= (max_distance/E)^k. The computation uses
    integers, because a floating-point logarithm could put a distance on a boundary into the wrong bucket.

    `buckets` must be at least 2, and `max_distance` must be greater than buckets / 2.
    """
    exact = buckets // 2
    rest = buckets - exact
    starts, distance = list(range(exact)), exact
    for k in range(rest):
        while distance**rest < exact ** (rest - k) * max_distance**k:
            distance += 1
        starts.append(distance)
    return tuple(starts)


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Return ALiBi's slopes: 2^(-8h/H) for h = 1..H if H is a power of two.

    Otherwise, return the slopes for the largest power of two p <= H, followed by every other slope for 2p, as in the
    ALiBi authors' code.
    """
    power = 2 ** int(math.log2(num_heads))
    slopes = _geometric_slopes(power)
    if power < num_heads:
        slopes += _geometric_slopes(2 * power)[::2][: num_heads - power]
    return tuple(slopes)


def _geometric_slopes(count: int) -> list[float]:
    return [2.0 ** (-8.0 * h / count) for h in range(1, count + 1)]


class _Bounded(torch.autograd.Function):
    """Compute clamp(weight, low, high). Beyond a bound, the gradient of `clamp` is zero; here it passes if a descent
    step would move the weight back. The authors' code overwrites the weight instead.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, weight: Tensor, low: float, high: float) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.bounds = low, high  # type: ignore[attr-defined]
        return weight.clamp(low, high)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors  # type: ignore[attr-defined]
        low, high = ctx.bounds  # type: ignore[attr-defined]
        outward = ((weight <= low) & (gradient > 0)) | ((weight >= high) & (gradient < 0))
        return gradient.masked_fill(outward, 0.0), None, None


def _wide(weight: Tensor) -> Tensor:
    return weight.to(torch.promote_types(weight.dtype, torch.float32))


def _bounded(weight: Tensor, high: float = math.inf) -> Tensor:
    return _Bounded.apply(_wide(weight), SMALLEST, high)


class LearnedBias(nn.Module, ABC):
    """A module with the weights of a bias. Its forward pass returns the coefficients as a tensor, so that ZeRO stage 3
    gathers the weights again for the backward pass.
    """

    @abstractmethod
    def reset_parameters(self) -> None:
        """Initialise the weights."""

    @abstractmethod
    def distance_bias(self) -> DistanceBias:
        """Return the bias for the current weights."""


class HeadWeights(nn.Module):
    """One or two learned numbers for each query head of a layer: `weight` [heads] and, if `biased`, `bias` [heads]. The
    forward pass returns them as one tensor, [heads] or [heads, 2], for the reason that `LearnedBias` explains.
    """

    def __init__(self, heads: int, initial: float, biased: bool = False) -> None:
        super().__init__()
        self.initial, self.weight = initial, nn.Parameter(torch.empty(heads))
        self.bias = nn.Parameter(torch.empty(heads)) if biased else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set `weight` to its initial value and `bias` to 0. This draws no random numbers."""
        self.weight.fill_(self.initial)
        if self.bias is not None:
            self.bias.zero_()

    def forward(self) -> Tensor:
        return self.weight if self.bias is None else torch.stack((self.weight, self.bias), dim=-1)


class _LearnedKerple(LearnedBias):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.bias_p = nn.Parameter(torch.empty(heads))
        self.bias_a = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw p ~ U(0, 2) and a ~ U(0, 1), as in the authors' code."""
        self.bias_p.uniform_(0, 2)
        self.bias_a.uniform_(0, 1)


class LearnedKerpleLog(_LearnedKerple):
    """KERPLE's logarithmic bias for one layer, with weights `bias_p` and `bias_a` [heads]."""

    def forward(self) -> Tensor:
        """Return (p, a), both at least 0.01, as [heads, 2]."""
        return torch.stack((_bounded(self.bias_p), _bounded(self.bias_a)), dim=-1)

    def distance_bias(self) -> KerpleLogBias:
        return KerpleLogBias(self())


class LearnedKerplePower(_LearnedKerple):
    """KERPLE's power bias for one layer, with weights `bias_p` and `bias_a` [heads]."""

    def forward(self) -> Tensor:
        """Return (a, p) as [heads, 2], with a at least 0.01 and p between 0.01 and 2."""
        return torch.stack((_bounded(self.bias_a), _bounded(self.bias_p, LARGEST_POWER)), dim=-1)

    def distance_bias(self) -> KerplePowerBias:
        return KerplePowerBias(self())


class LearnedFire(LearnedBias):
    """FIRE's network for one layer: `hidden_weight`, `hidden_bias` [32], `output_weight` [heads, 32], `c`, `a` [1]."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.hidden_weight, self.hidden_bias = (nn.Parameter(torch.empty(FIRE_WIDTH)) for _ in range(2))
        self.output_weight = nn.Parameter(torch.empty(heads, FIRE_WIDTH))
        self.c, self.a = (nn.Parameter(torch.empty(1)) for _ in range(2))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set c = 0.1 and a = 1, and draw weights uniformly within 1 / sqrt(inputs) (PyTorch's default), as in the
        authors' code.
        """
        for weights in (self.hidden_weight, self.hidden_bias):
            weights.uniform_(-1.0, 1.0)
        self.output_weight.uniform_(-(FIRE_WIDTH**-0.5), FIRE_WIDTH**-0.5)
        self.c.fill_(0.1)
        self.a.fill_(1.0)

    def forward(self) -> Tensor:
        """Return the coefficients of `FireBias`, float32 or better."""
        shared = torch.cat((self.hidden_weight, self.hidden_bias, self.c, self.a))
        return _wide(torch.cat((self.output_weight, shared.expand(len(self.output_weight), -1)), dim=1))

    def distance_bias(self) -> FireBias:
        return FireBias(self())


class LearnedBuckets(LearnedBias):
    """T5's bias, shared by all layers: `weight` [buckets, heads] has the name, shape and initialisation of GPT-NeoX.

    GPT-NeoX multiplies the table by sqrt(head_dim) and adds it to scores already divided by sqrt(head_dim).
    """

    def __init__(self, heads: int, head_dim: int, buckets: int = 32, max_distance: int = 128) -> None:
        super().__init__()
        self.max_distance = max_distance
        self.scale = math.sqrt(head_dim)
        self.weight = nn.Parameter(torch.empty(buckets, heads))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw Xavier-normal weights, with standard deviation sqrt(2 / (buckets + heads))."""
        nn.init.xavier_normal_(self.weight)

    def forward(self) -> Tensor:
        """Return the table [heads, buckets], multiplied by sqrt(head_dim)."""
        return (_wide(self.weight) * self.scale).T

    def distance_bias(self) -> BucketBias:
        return BucketBias(self(), self.max_distance)


@dataclass(frozen=True)
class BiasSource:
    """The source of a method's score bias: a fixed bias, a learned bias for all layers, a learned bias per layer, or
    none.

    `formula` is the name of the bias formula; `shared` and `by_layer` build the learned modules.
    """

    formula: str | None = None
    fixed: AlibiBias | FixedBias | None = None
    shared: Callable[[], LearnedBias] | None = None
    by_layer: Callable[[], LearnedBias] | None = None


def fixed_bias(formula: str, function: Callable[[Tensor, int], Tensor], heads: int) -> BiasSource:
    """Return the source of a bias without weights; `function(distance [...], heads)` returns [heads, ...]."""
    return BiasSource(formula, fixed=FixedBias(lambda distance: function(distance, heads), formula))


def sandwich(distance: Tensor, heads: int) -> Tensor:
    """H/(8h) sum_j (cos(r theta_j) - 1) for heads h = 1..H: the inner product of sinusoidal embeddings with 128
    features, divided by the head's compression ratio (Chi et al. 2023, "Dissecting Transformer Length Extrapolation via
    the Lens of Receptive Field Analysis"). The constant that makes the bias 0 at r = 0 cancels in softmax.
    """
    theta = 10000.0 ** (-torch.arange(64, dtype=torch.float64, device=distance.device) / 64)
    profile = (distance.double()[..., None] * theta).cos().sum(-1) - 64
    ratios = torch.arange(1, heads + 1, dtype=torch.float64, device=distance.device) * 8 / heads
    return profile / ratios.view(-1, *[1] * distance.dim())


BiasBuilder = Callable[[int, int, Mapping[str, Any]], BiasSource]
"""(query heads, features per head, options) -> the source of the bias."""


def _alibi(heads: int, head_dim: int, options: Mapping[str, Any]) -> BiasSource:
    factor = options.get("alibi_slope_scale", 1.0)
    return BiasSource("linear", fixed=AlibiBias(tuple(factor * slope for slope in alibi_slopes(heads))))


def _rpe(heads: int, head_dim: int, options: Mapping[str, Any]) -> BiasSource:
    buckets, furthest = options["rpe_num_buckets"], options["rpe_max_distance"]
    return BiasSource("buckets", shared=lambda: LearnedBuckets(heads, head_dim, buckets, furthest))


BIASES: dict[str, BiasBuilder] = {
    "alibi": _alibi,
    "kerple_log": lambda heads, *_: BiasSource("log", by_layer=lambda: LearnedKerpleLog(heads)),
    "kerple_power": lambda heads, *_: BiasSource("power", by_layer=lambda: LearnedKerplePower(heads)),
    "rpe": _rpe,
    "fire": lambda heads, *_: BiasSource("fire", by_layer=lambda: LearnedFire(heads)),
    "sandwich": lambda heads, *_: fixed_bias("sandwich", sandwich, heads),
}
"""Biases by `pos_emb`. As in GPT-NeoX, all layers share one T5 table. As in KERPLE's code, each layer has its own
KERPLE parameters.
"""
