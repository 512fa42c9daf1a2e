"""Position methods run as a layer runs them between its projections: for tools/bench_attention.py."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn as nn
from torch import Tensor

from megatron_coca.attention.backends.select import BACKENDS
from megatron_coca.attention.compose import build_method
from megatron_coca.attention.context import PositionContext
from megatron_coca.attention.inputs import AttentionInputs
from megatron_coca.attention.layer import LayerCache
from megatron_coca.attention.method import PositionEncoding, PositionMethod, with_torch
from megatron_coca.evaluation.speed.cases import EINSUM, contracted_attention
from tools.bench_cases import Case, Shape, configuration

Attend = Callable[[AttentionInputs], Tensor]
Results = dict[str, Tensor]
Step = Callable[[], Results]


@dataclass(frozen=True)
class Workload:
    """A method and its operands; the frame is made once, as one serves all layers."""

    method: PositionMethod
    shape: Shape
    encoding: PositionEncoding
    layer_bias: nn.Module | None
    packed: Tensor
    frame: PositionContext
    new_tokens: int | None = None

    @classmethod
    def build(cls, name: str, operands: str, shape: Shape, packed: Tensor, new_tokens: int | None = None) -> "Workload":
        """`new_tokens`: how many of the last tokens are queries of a cache of the others, or None."""
        config = configuration(name, operands, shape)
        method = build_method(config.position, config.model)
        torch.manual_seed(0)  # learned biases are drawn
        encoding, bias = PositionEncoding(method).to(packed.device), _layer_bias(method, packed.device)
        return cls(method, shape, encoding, bias, packed, make_frame(encoding, packed, new_tokens), new_tokens)

    def in_float64(self) -> "Workload":
        """The same numbers, everything that follows from them in float64."""
        packed = self.packed.double()
        frame = make_frame(self.encoding, packed, self.new_tokens)
        return replace(self.in_torch(), packed=packed, frame=frame)

    def in_torch(self) -> "Workload":
        """The same, its operands formed by PyTorch."""
        return replace(self, method=replace(self.method, operands=with_torch))

    def learned(self) -> list[Tensor]:
        """What autograd reaches beside the projections: a layer's bias, or the coefficients of the one all share."""
        own = list(self.layer_bias.parameters()) if self.layer_bias is not None else []
        shared = self.frame.bias.coefficients if self.frame.bias is not None else None
        return [*own, shared] if shared is not None and shared.requires_grad else own

    def inputs(self, packed: Tensor) -> AttentionInputs:
        """What the layer gives its backend."""
        bias = self.layer_bias.distance_bias() if self.layer_bias is not None else None
        return self.method.prepare(*self.shape.unpack(packed), self.frame, bias=bias)


def _layer_bias(method: PositionMethod, device: torch.device) -> nn.Module | None:
    """A layer's bias with weights within their bounds, where all formulas of it have one gradient."""
    bias = method.layer_bias()
    if bias is None:
        return None
    with torch.no_grad():
        for weight in bias.parameters():
            weight.clamp_(min=0.05)
    return bias.to(device)


def make_frame(encoding: PositionEncoding, packed: Tensor, new_tokens: int | None = None) -> PositionContext:
    """The frame of all tokens of `packed`, or of the last ones after a cache of the others."""
    length = packed.shape[1]
    places = torch.arange(length, device=packed.device)
    if new_tokens is None:
        return encoding(places, length, packed.dtype)
    return encoding(places[-new_tokens:], length, packed.dtype, key_positions=places)


class Steps(Protocol):
    """How a layer's attention is computed: [batch, heads, queries, head_dim]."""

    def full(self, work: Workload, packed: Tensor) -> Tensor:
        """All queries at once."""
        ...


class Production:
    """The method's operands and a backend."""

    def __init__(self, attend: Attend) -> None:
        self.attend = attend

    def full(self, work: Workload, packed: Tensor) -> Tensor:
        return self.attend(work.inputs(packed))

    def after_cache(self, work: Workload, q: Tensor, cached: Tensor, values: Tensor) -> Tensor:
        bias = work.layer_bias.distance_bias() if work.layer_bias is not None else None
        return self.attend(work.method.prepare_cached(q, cached, values, work.frame, bias))


class Contraction:
    """The three-operand contraction of the CoCA paper's listing, in the operands' dtype."""

    def full(self, work: Workload, packed: Tensor) -> Tensor:
        tables = work.frame.segments[0]
        return contracted_attention(*work.shape.unpack(packed), tables.query, tables.key, work.method.scale)


def steps_of(case: Case) -> Steps:
    """What computes a case."""
    return Contraction() if case.backend == EINSUM else Production(BACKENDS[case.backend].attend)


def forward(work: Workload, steps: Steps, cotangent: Tensor | None = None) -> Step:
    """Operands, attention, and the rows [batch, queries, heads * head_dim] that the output projection takes."""

    def step() -> Results:
        with torch.no_grad():
            return {"out": _rows(steps.full(work, work.packed))}

    return step


def forward_backward(work: Workload, steps: Steps, cotangent: Tensor | None = None) -> Step:
    """The same, and the gradients of the packed projection and of what is learned, for an output of `cotangent`."""
    shape = (*work.packed.shape[:2], work.shape.heads * work.shape.head_dim)
    given = torch.randn(shape, device=work.packed.device) if cotangent is None else cotangent
    given = given.to(work.packed.dtype)

    def step() -> Results:
        packed = work.packed.detach().requires_grad_()
        out = _rows(steps.full(work, packed))
        gradient, *rest = torch.autograd.grad(out, [packed, *work.learned()], given)
        named = dict(zip(("dq", "dk", "dv"), work.shape.unpack(gradient), strict=True))
        return {"out": out.detach(), **named, **{f"dbias{index}": each for index, each in enumerate(rest)}}

    return step


def decode(work: Workload, steps: Steps, cotangent: Tensor | None = None) -> Step:
    """The new tokens of `work` through a cache that holds the others; every call forgets the ones it added."""
    if not isinstance(steps, Production):
        raise TypeError("only backends decode with a cache")
    q, k, v = work.shape.unpack(work.packed)
    cache, past = LayerCache(), k.shape[2] - (work.new_tokens or 0)
    cache.append(work.method.cached(k[:, :, :past]), v[:, :, :past])

    def step() -> Results:
        cache.length = past
        with torch.no_grad():
            kept = cache.append(work.method.cached(k[:, :, past:]), v[:, :, past:])
            return {"out": _rows(steps.after_cache(work, q[:, :, past:], *kept))}

    return step


def _rows(out: Tensor) -> Tensor:
    return out.transpose(1, 2).flatten(2)


DECODE = "decode"
MODES: dict[str, Callable[[Workload, Steps, Tensor | None], Step]] = {
    "forward": forward,
    "forward+backward": forward_backward,
    DECODE: decode,
}
