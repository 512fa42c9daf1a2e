"""Cases for the parity tests of attention: each method for the configuration and for the oracle, and the rule for
errors.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron_coca.attention.backends.flex import FlexBackend
from megatron_coca.attention.backends.merge import MergeBackend
from megatron_coca.attention.backends.reference import ReferenceBackend
from megatron_coca.attention.backends.sdpa import SdpaBackend
from megatron_coca.attention.build import build_method
from megatron_coca.attention.inputs import AttentionInputs, Backend, documents_from_ids
from megatron_coca.attention.method import PositionEncoding, PositionMethod
from megatron_coca.attention.positions.bias import LearnedFire
from megatron_coca.config import load_config
from megatron_coca.methods import find, names
from tests.reference.clex import clex_frequencies
from tests.reference.dense import Polar, RelativeMap, Setting, attention
from tests.reference.frequencies import frequencies, multiplier

HEADS, HEAD_DIM, TRAINING_LENGTH = 4, 16, 32
ROTATED = ("rotary", "coca", "coca_strict")
BIASED = names("pos_emb", biased=True, compute=None)
CLEX_STEP = 0.004
"""Of the oracle's integration, in t: its own error is then below 1e-10."""

BACKENDS: dict[str, Backend] = {
    "reference": ReferenceBackend(),
    "sdpa": SdpaBackend(),
    "merge": MergeBackend(),
    "flex": FlexBackend(compiled=False),
}


@dataclass(frozen=True)
class Case:
    """A position method: keys of the configuration, and what they mean to the oracle.

    Attributes:
        pos_emb, options, rotary_pct, logit_scaling, scaling, relative: values of the configuration's keys.
        training: whether the model trains.
        rope_id: options of RoPE-ID's frequencies; None: those of base 10000.
    """

    pos_emb: str
    scaling: Mapping[str, Any] = field(default_factory=dict)
    relative: Mapping[str, Any] = field(default_factory=dict)
    logit_scaling: str | Mapping[str, Any] = "none"
    rotary_pct: float = 1.0
    training: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    rope_id: Mapping[str, float] | None = None

    def __str__(self) -> str:
        parts = [self.pos_emb, *self.options.values(), *self.scaling.values(), *self.relative.values()]
        parts += ["rope_id", *self.rope_id.values()] if self.rope_id is not None else []
        parts += [self.logit_scaling] * (self.logit_scaling != "none") + [self.rotary_pct] * (self.rotary_pct < 1)
        return "-".join(str(part) for part in parts if not isinstance(part, Sequence) or isinstance(part, str))

    def __hash__(self) -> int:
        return hash(str(self))

    @property
    def rotary_dim(self) -> int:
        """Rotated features of a head."""
        return int(HEAD_DIM * self.rotary_pct)

    @property
    def method(self) -> PositionMethod:
        """As a model builds it."""
        keys = {"num_layers": 1, "hidden_size": HEADS * HEAD_DIM, "num_attention_heads": HEADS}
        keys |= {"seq_length": TRAINING_LENGTH, "pos_emb": self.pos_emb, "rotary_pct": self.rotary_pct}
        keys |= {"rope_scaling": dict(self.scaling) or None, "relative_positions": dict(self.relative) or None}
        keys |= {"pos_emb_options": dict(self.options) or None}
        keys |= {"rotary_frequencies": None if self.rope_id is None else {"type": "rope_id", **self.rope_id}}
        config = load_config([], keys | {"logit_scaling": self.logit_scaling})
        return build_method(config.position, config.model)

    def learned(self) -> dict[str, Tensor]:
        """Weights of the method by the oracle's names, float64 values that float32 holds exactly."""
        generator = torch.Generator().manual_seed(5)

        def uniform(low: float, high: float, *shape: int) -> Tensor:
            return (low + (high - low) * torch.rand(shape, generator=generator)).double()

        offsets = self.method.layer_offsets()
        highest = 3 if self.options.get("offset") == "free" else 0
        angles = {} if offsets is None else {"offset": uniform(-3, highest, *offsets.bias.shape)}
        half = self.frequency_dim // 2
        return (
            angles
            | {
                "kerple_log": lambda: {"p": uniform(0.1, 2, HEADS), "a": uniform(0.05, 1, HEADS)},
                "kerple_power": lambda: {"p": uniform(0.1, 1.5, HEADS), "a": uniform(0.05, 1, HEADS)},
                "rpe": lambda: {"table": uniform(-0.5, 0.5, 32, HEADS)},
                "fire": lambda: {
                    "hidden_weight": uniform(-3, 3, 32),
                    "hidden_bias": uniform(-1, 1, 32),
                    "output_weight": uniform(-0.5, 0.5, HEADS, 32),
                    "c": uniform(0.1, 0.5, 1),
                    "a": uniform(0.04, 0.08, 1),  # 20 to 40 tokens
                },
                "clex": lambda: {"up": uniform(-0.3, 0.3, half, 2 * half), "down": uniform(-0.2, 0.2, 2 * half, half)},
            }.get(self.scaling.get("rope_type", self.pos_emb), dict)()
        )

    def theta(self, length: int, learned: Mapping[str, Tensor]) -> Tensor:
        """The frequencies that the oracle uses at `length`."""
        if self.pos_emb not in (*ROTATED, "xpos", "pope", "polar"):
            return torch.zeros(0, dtype=torch.float64)
        if "up" in learned:
            t = max(1, math.ceil(length / TRAINING_LENGTH))
            return clex_frequencies(learned["up"], learned["down"], t, step=CLEX_STEP)
        kind = {"training_length": TRAINING_LENGTH, "length": length, "rope_id": self.rope_id}
        return frequencies(self.frequency_dim, **kind, **self.scaling)

    def _factors(self) -> str | tuple[float, int, int]:
        if isinstance(self.logit_scaling, str):
            absent = self.training and find("logit_scaling", self.logit_scaling).evaluation_only
            return "none" if absent else self.logit_scaling
        given = self.logit_scaling
        return given.get("strength", 0.1), given.get("period", TRAINING_LENGTH), given.get("first", 0)

    def setting(self, length: int, learned: Mapping[str, Tensor], ids: Tensor | None) -> Setting:
        """What else the oracle needs to know."""
        scaling = {} if "up" in learned else dict(self.scaling)
        relative = dict(self.relative)
        if target := relative.pop("target_length", None):
            relative["leak"] = TRAINING_LENGTH / (2 * target)
        return Setting(
            multiplier(self.frequency_dim, training_length=TRAINING_LENGTH, length=length, **scaling),
            RelativeMap(**relative) if relative else None,
            self._factors(),
            TRAINING_LENGTH,
            {**learned, **self.options},
            ids,
            polar=self._polar(learned),
        )

    @property
    def frequency_dim(self) -> int:
        """Twice the number of frequencies of a head."""
        by_feature = self.options.get("frequencies", "feature" if self.pos_emb in ("pope", "polar") else "pair")
        return self.rotary_dim * (2 if by_feature == "feature" else 1)

    def _polar(self, learned: Mapping[str, Tensor]) -> Polar | None:
        if self.pos_emb == "coca_strict" and self.options:
            angle = self.options["initial_angle"]
            fixed = torch.full((HEADS, self.rotary_dim // 2), 0.0 if angle == "random" else -angle, dtype=torch.float64)
            return Polar(False, 2, False, learned.get("offset", fixed))
        if self.pos_emb not in ("pope", "polar"):
            return None
        softplus = self.options.get("magnitude", "softplus") == "softplus"
        by_feature = self.frequency_dim == 2 * self.rotary_dim
        terms = self.rotary_dim // (1 if softplus or by_feature else 2)
        angle = self.options.get("initial_angle", 0.0)
        fixed = torch.full((HEADS, terms), 0.0 if angle == "random" else -angle, dtype=torch.float64)
        offset = learned.get("offset", fixed)
        return Polar(softplus, self.options.get("power", 1), by_feature, offset)


PLACES = {
    **{
        name: lambda encoding, bias, name=name: getattr(bias, name)
        for name in ("hidden_weight", "hidden_bias", "output_weight", "c")
    },
    "p": lambda encoding, bias: bias.bias_p,
    "a": lambda encoding, bias: bias.a if isinstance(bias, LearnedFire) else bias.bias_a,
    "table": lambda encoding, bias: encoding.bias.weight,
    "up": lambda encoding, bias: encoding.clex.up,
    "down": lambda encoding, bias: encoding.clex.down,
}
"""Where production keeps a weight that the oracle has by name."""


@dataclass(frozen=True)
class Layout:
    """Shapes and places of the tokens of one call.

    Attributes:
        length: keys in a row.
        queries: how many of the last tokens are queries; None: all.
        kv_heads, batch: as in the contract.
        positions: [length] or [batch, length]; None: 0 .. length-1.
        ids: the document of every token, [batch, length], or None.
    """

    length: int
    queries: int | None = None
    kv_heads: int = HEADS
    batch: int = 2
    positions: tuple[Any, ...] | None = None
    ids: tuple[tuple[int, ...], ...] | None = None

    def operands(self, dtype: torch.dtype) -> list[Tensor]:
        """q, k, v in float64, of values that `dtype` holds exactly."""
        generator = torch.Generator().manual_seed(self.length)
        rows = (self.queries or self.length, self.length, self.length)
        heads = (HEADS, self.kv_heads, self.kv_heads)
        shapes = [(self.batch, h, n, HEAD_DIM) for h, n in zip(heads, rows, strict=True)]
        return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).double() for s in shapes]

    @property
    def place(self) -> Tensor:
        """Positions of the keys."""
        return torch.arange(self.length) if self.positions is None else torch.tensor(self.positions)

    @property
    def documents(self) -> Tensor | None:
        """`ids` as a tensor."""
        return None if self.ids is None else torch.tensor(self.ids)

    @property
    def scored(self) -> int:
        """The length that dynamic extensions see."""
        return int(self.place.max()) + 1


@dataclass(frozen=True)
class Result:
    """The output, and gradients by name, in float64."""

    out: Tensor
    gradients: dict[str, Tensor] = field(default_factory=dict)

    @property
    def all(self) -> dict[str, Tensor]:
        """Output and gradients by name."""
        return {"out": self.out, **self.gradients}


Computed = Callable[[Sequence[Tensor], Mapping[str, Tensor]], Tensor]


def with_gradients(compute: Computed, operands: Sequence[Tensor], learned: Mapping[str, Tensor]) -> Result:
    """`compute` on leaves, and the gradients of all of them for a fixed random cotangent."""
    leaves = [x.detach().clone().requires_grad_() for x in operands]
    weights = {name: x.detach().clone().requires_grad_() for name, x in learned.items()}
    out = compute(leaves, weights)
    return differentiated(out, leaves, weights)


def differentiated(out: Tensor, leaves: Sequence[Tensor], weights: Mapping[str, Tensor]) -> Result:
    """The output and the gradients of q, k, v and the weights for a fixed random cotangent, in float64."""
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(out.dtype)
    named = dict(zip(("q", "k", "v"), leaves, strict=True)) | dict(weights)
    found = torch.autograd.grad(out, list(named.values()), cotangent, allow_unused=True)
    zeros = (torch.zeros_like(x) for x in named.values())
    gradients = {name: (z if g is None else g).double() for name, g, z in zip(named, found, zeros, strict=True)}
    return Result(out.detach().double(), gradients)


def exact(case: Case, layout: Layout, dtype: torch.dtype, computed_in: torch.dtype = torch.float64) -> Result:
    """The oracle's result for operands rounded to `dtype`; computed in `dtype` too, the error of a plain run."""

    def compute(operands: Sequence[Tensor], learned: Mapping[str, Tensor]) -> Tensor:
        setting = case.setting(layout.scored, learned, layout.documents)
        theta = case.theta(layout.scored, learned)
        return attention(case.pos_emb, *operands, theta, layout.place, computed_in, setting)

    return with_gradients(compute, [x.to(computed_in) for x in layout.operands(dtype)], case.learned())


@cache
def measure(case: Case, layout: Layout, dtype: torch.dtype) -> tuple[Result, Result]:
    """(exact, plain run in `dtype`)."""
    return exact(case, layout, dtype), exact(case, layout, dtype, computed_in=dtype)


def inputs_of(case: Case, layout: Layout, operands: Sequence[Tensor], weights: dict[str, Tensor]) -> AttentionInputs:
    """What production makes of q, k and v; fills `weights` with the learned parameters by the oracle's names."""
    method = case.method
    encoding, bias = PositionEncoding(method).train(case.training), method.layer_bias()
    offsets = method.layer_offsets()
    for name, value in case.learned().items():
        weights[name] = offsets.bias if name == "offset" and offsets else PLACES[name](encoding, bias)
        weights[name].requires_grad_()  # also of angles that are never trained
        with torch.no_grad():
            weights[name].copy_(value)
    ids, places = layout.documents, layout.place
    frame = encoding(
        places if layout.queries is None else places[..., -layout.queries :],
        layout.length if case.training else layout.scored,
        operands[0].dtype,
        None if layout.queries is None else places,
        None if ids is None else documents_from_ids(ids),
        layout.scored if case.training else None,
    )
    own = {"bias": None if bias is None else bias.distance_bias(), "offset": None if offsets is None else offsets()}
    return method.prepare(*operands, frame, **own)


def production(
    case: Case,
    layout: Layout,
    dtype: torch.dtype,
    attend: Callable[[AttentionInputs], Tensor],
    gradients: bool = True,
) -> Result:
    """The result of a backend's `attend` (or of any function of the inputs) for the operands of `exact`."""
    leaves = [x.to(dtype).requires_grad_(gradients) for x in layout.operands(dtype)]
    weights: dict[str, Tensor] = {}
    with torch.set_grad_enabled(gradients):
        out = attend(inputs_of(case, layout, leaves, weights))
    if not gradients:
        return Result(out.double())
    return differentiated(out, leaves, weights)


def error(got: Tensor, expected: Tensor) -> float:
    """Norm of the difference against the norm; the root mean square where the exact result is zero, as the gradient of
    a lone token's query is.
    """
    return float((got - expected).norm() / (expected.norm() or math.sqrt(expected.numel())))


def times_plain(got: Tensor) -> int:
    """How many times the error of a plain run is allowed. The errors of a few sums are a few random draws, so that of
    two equally exact runs one often has more than twice the error, and the processor decides which.
    """
    return 2 if got.numel() >= 8 else 4


def assert_as_exact_as_plain(case: Case, layout: Layout, dtype: torch.dtype, ours: Result) -> None:
    """Every error at most twice that of the oracle's formulas run in the same precision, both against float64; four
    times that of a few numbers.
    """
    true, plain = measure(case, layout, dtype)
    floor = (64 if case.pos_emb == "fire" else 16) * torch.finfo(dtype).eps  # gradients that are sums over all pairs
    for name, got in ours.all.items():
        ours_off, allowed = error(got, true.all[name]), error(plain.all[name], true.all[name])
        limit = max(times_plain(got) * allowed, floor)
        assert ours_off <= limit, f"{name}: {ours_off:.2e} against {allowed:.2e} of a plain run"


def served(backend: str, case: Case) -> bool:
    """What each backend is there for: the reference for everything, sdpa for one causal segment, merge for any segments
    without a bias, flex for one segment and any bias of the distance alone.
    """
    maps = case.relative.get("type") is not None and (case.training or case.relative["type"] != "inv_leaky_rerope")
    return {
        "reference": True,
        "sdpa": not maps,
        "merge": case.pos_emb not in BIASED,
        "flex": not maps and case.pos_emb != "fire",
    }[backend]


def check(case: Case, backend: str, layout: Layout, dtype: torch.dtype = torch.float32) -> None:
    """Values and all gradients of a backend; FlexAttention's dense definition has values only on the CPU."""
    ours = production(case, layout, dtype, BACKENDS[backend].attend, gradients=backend != "flex")
    assert_as_exact_as_plain(case, layout, dtype, ours)


FORMS = {name: Case(name) for name in (*ROTATED, "xpos", "pope", *BIASED, "none")}
POLAR = {
    "strict-angle": Case("coca_strict", options={"initial_angle": -0.7}),
    "strict-random": Case("coca_strict", options={"initial_angle": "random"}),
    **{
        f"polar-{power}-{frequencies}-{magnitude}-{offset}": Case(
            "polar",
            options={"power": power, "frequencies": frequencies, "magnitude": magnitude, "offset": offset},
        )
        for power in (1, 2)
        for frequencies in ("feature", "pair")
        for magnitude in ("softplus", "relu_mean")
        for offset in ("none", "uniform")
    },
    "pope-none": Case("pope", options={"offset": "none"}),
    "polar-angle": Case("polar", options={"offset": "none", "initial_angle": -0.7}),
    "polar-random": Case("polar", options={"offset": "none", "initial_angle": "random", "frequencies": "pair"}),
    "pope-free": Case("pope", options={"offset": "free"}),
    "pope-partial": Case("pope", rotary_pct=0.5),
    "polar-partial": Case("polar", rotary_pct=0.5, options={"magnitude": "relu_mean", "power": 2}),
    "pope-yarn": Case("pope", scaling={"rope_type": "yarn", "factor": 4.0}),
    "pope-dynamic": Case("pope", scaling={"rope_type": "dynamic", "factor": 2.0}),
    "pope-log_n": Case("pope", logit_scaling="log_n", rotary_pct=0.5),
    "pope-rerope": Case("pope", relative={"type": "rerope", "window": 20}),
}
_MAPS: dict[str, dict[str, Any]] = {
    "rerope": {"type": "rerope", "window": 20},
    "leaky_rerope": {"type": "leaky_rerope", "window": 20, "leak": 4.0},
    "inv_leaky_rerope": {"type": "inv_leaky_rerope", "window": 8, "target_length": 128},
    "self_extend": {"type": "self_extend", "window": 21, "group_size": 4},
    "string": {"type": "string", "window": 20, "local": 7},
    "dual_chunk": {"type": "dual_chunk", "chunk_size": 13, "max_position": 20},
    "lm_infinite": {"type": "lm_infinite", "window": 20, "sinks": 10},
    "streaming": {"type": "streaming", "window": 20, "sinks": 4},
}
MAPS = {
    f"{name}-{form}": Case(form, relative=relative, training=name == "inv_leaky_rerope")
    for name, relative in _MAPS.items()
    for form in ROTATED
    if (name, form) != ("streaming", "coca")
}


def with_window(case: Case, window: int) -> Case:
    """The same map with another window, or chunks of that size."""
    if "chunk_size" in case.relative:
        return replace(case, relative=dict(case.relative) | {"chunk_size": window, "max_position": window + 3})
    relative = dict(case.relative) | {"window": window}
    if "local" in relative:
        relative["local"] = min(relative["local"], window)
    return replace(case, relative=relative)


CASES = FORMS | MAPS | POLAR
SERVED = [(name, backend) for name, case in CASES.items() for backend in BACKENDS if served(backend, case)]
_ONE_FORM_PER_MAP = (
    "rerope-coca",
    "leaky_rerope-rotary",
    "inv_leaky_rerope-coca_strict",
    "self_extend-coca",
    "string-coca",
    "dual_chunk-coca",
    "lm_infinite-rotary",
    "streaming-coca_strict",
)
CHOSEN = [(name, backend) for name, backend in SERVED if name in FORMS or name in _ONE_FORM_PER_MAP]
"""Every form and every map once with every backend, for tests of one more property each."""
FAST = [(name, backend) for name, backend in CHOSEN if backend != "reference"]
"""Without the reference backend, which handles lengths, groups and documents alike for all methods."""
