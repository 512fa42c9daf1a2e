"""The methods that are measured side by side: one model for each, all with the same weights."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import opt_einsum
import torch
import torch.nn as nn
from torch import Tensor

from megatron_coca.attention.context import PositionContext
from megatron_coca.attention.inputs import BackendError
from megatron_coca.attention.layer import SelfAttention
from megatron_coca.attention.method import PositionMethod
from megatron_coca.attention.positions.forms import RotaryTables, coefficients, rotate
from megatron_coca.config import Config, ConfigError
from megatron_coca.evaluation.options import Variant
from megatron_coca.evaluation.results import EvaluationError, Missing
from megatron_coca.evaluation.subject import backend_name
from megatron_coca.model import GPT, build_model

CONTRACTION, EINSUM = "contraction", "opt_einsum"
"""Its names among the methods, and among the backends."""


def contracted_attention(
    q: Tensor, t: Tensor, v: Tensor, query: RotaryTables, key: RotaryTables, scale: float
) -> Tensor:
    """Causal CoCA-Slack attention [batch, heads, length, head_dim] in the dtype of q, O(length^2) memory.

    q is [batch, heads, length, head_dim], t (the T projection) and v are [batch, kv_heads, length, head_dim], the tables
    those of their positions.
    """
    groups, length = q.shape[1] // t.shape[1], q.shape[2]
    t, v = t.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    turned_t = rotate(coefficients(t).repeat(1, 1, 1, 2), key).to(q.dtype)
    turned_q = rotate(q, query).to(q.dtype)
    scores = opt_einsum.contract("bhmd,bhnd,bhmd->bhmn", q, turned_t, turned_q) * scale
    hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
    return opt_einsum.contract("bhmn,bhnd->bhmd", weights, v)


@dataclass(frozen=True)
class _Operands:
    q: Tensor
    t: Tensor
    v: Tensor
    frame: PositionContext


class _Unprepared:
    """In the place of a layer's position method: leaves the operands as the projections give them."""

    def __init__(self, method: PositionMethod) -> None:
        self.scale = method.scale

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, frame: PositionContext, *rest: Any) -> _Operands:
        return _Operands(q, k, v, frame)


class _Contracting:
    """In the place of a layer's backend."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def attend(self, given: _Operands) -> Tensor:
        tables = given.frame.segments[0]
        assert tables.query is not None and tables.key is not None
        return contracted_attention(given.q, given.t, given.v, tables.query, tables.key, self.scale)


def contract(model: nn.Module) -> None:
    """Let all layers of a CoCA model attend by the contraction, for good; it then computes the same as before.

    Raises:
        BackendError: the model is not plain CoCA on all features, which is all that the paper's listing computes.
    """
    for layer in [module for module in model.modules() if isinstance(module, SelfAttention)]:
        method = layer.method
        if method.name != "coca" or method.rotary_dim != method.head_dim or len(method.bands) > 1:
            raise BackendError("the contraction computes pos_emb coca with rotary_pct 1 and without a map alone")
        layer.method = _Unprepared(method)  # type: ignore[assignment]
        layer.backend = _Contracting(method.scale)  # type: ignore[assignment]


PLAIN = {"rope_scaling": None, "relative_positions": None, "logit_scaling": "none"}
DENSE = ("reference", EINSUM)
"""Backends that hold N x N scores."""


@dataclass(frozen=True)
class Case:
    """One line of the tables: its label, the configuration of its model, and whether that attends by the contraction."""

    label: str
    config: Config
    contracted: bool = False

    @property
    def is_plain_rope(self) -> bool:
        """Whether it may be the measure of others."""
        position = self.config.position
        plain = position.rope_scaling is None and position.relative_positions is None
        return position.pos_emb == "rotary" and plain and position.logit_scaling == "none"


@dataclass(frozen=True)
class Built:
    """A case with its model and the name of its backend."""

    case: Case
    model: GPT
    backend: str

    @property
    def label(self) -> str:
        """The case's."""
        return self.case.label


@dataclass(frozen=True)
class Refusal:
    """A method that cannot be measured with this shape."""

    label: str
    reason: str

    def missing(self) -> Missing:
        """For the result file."""
        return Missing(at=self.label, kind="refused", reason=self.reason)


def choose(base: Config, methods: Sequence[str], variants: Sequence[Variant]) -> tuple[list[Case], list[Refusal]]:
    """The cases asked for: values of `pos_emb`, `contraction`, and variants of the base configuration.

    Raises EvaluationError where two have one label.
    """
    labels = [*methods, *(variant.label for variant in variants)]
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise EvaluationError(f"{twice[0]}: stands for two methods; name each once")
    named = [_of_method(base, method) for method in methods]
    wanted = [*named, *(_of_variant(base, variant) for variant in variants)]
    cases = [each for each in wanted if isinstance(each, Case)]
    return cases, [each for each in wanted if isinstance(each, Refusal)]


def _of_method(base: Config, method: str) -> Case | Refusal:
    contracted = method == CONTRACTION
    try:
        changes = {"pos_emb": "coca", **PLAIN} if contracted else {"pos_emb": method}
        return Case(method, base.override(changes), contracted)
    except ConfigError as error:
        return Refusal(method, str(error))


def _of_variant(base: Config, variant: Variant) -> Case | Refusal:
    try:
        return Case(variant.label, base.override(variant.overrides, variant.files))
    except ConfigError as error:
        return Refusal(variant.label, str(error))


def build(case: Case, device: str, dtype: torch.dtype) -> Built:
    """The model of a case, with weights drawn from its configuration's seed. Raises BackendError, ConfigError."""
    model = build_model(case.config, device).to(dtype)
    if not case.contracted:
        return Built(case, model, backend_name(model))
    contract(model)
    return Built(case, model, EINSUM)


def build_all(cases: Iterable[Case], device: str, dtype: torch.dtype) -> tuple[list[Built], list[Refusal]]:
    """The models of all cases, in memory once: what has the same name and shape is the first model's.

    RoPE is added for every backend that a case takes and that no plain RoPE among the cases is served by.
    """
    built: list[Built] = []
    refusals: list[Refusal] = []
    _build_onto(built, refusals, cases, device, dtype)
    _build_onto(built, refusals, missing_ropes(built), device, dtype)
    return built, refusals


def _build_onto(
    built: list[Built], refusals: list[Refusal], cases: Iterable[Case], device: str, dtype: torch.dtype
) -> None:
    for case in cases:
        try:
            made = build(case, device, dtype)
        except (BackendError, ConfigError) as error:
            refusals.append(Refusal(case.label, str(error)))
            continue
        if built:
            share_weights(made.model, built[0].model)
        built.append(made)


def missing_ropes(built: Sequence[Built]) -> list[Case]:
    """Plain RoPE by every backend that has a method and not this one; of the contraction's there is none."""
    served = {each.backend for each in built if each.case.is_plain_rope}
    lacking = [each for each in dict.fromkeys(each.backend for each in built) if each not in (*served, EINSUM)]
    if not lacking and not served and built:
        lacking = ["auto"]
    taken, found = {each.label for each in built}, []
    for backend in lacking:
        label = "rotary" if "rotary" not in taken else f"rotary by {backend}"
        taken.add(label)
        config = built[0].case.config.override({"pos_emb": "rotary", "attention_backend": backend, **PLAIN})
        found.append(Case(label, config))
    return found


@torch.no_grad()
def share_weights(model: nn.Module, other: nn.Module) -> None:
    """Put the parameters of `other` in the place of those of `model` with the same name and shape."""
    theirs = dict(other.named_modules())
    for name, module in model.named_modules():
        for key, own in list(module._parameters.items()):
            shared = theirs[name]._parameters.get(key) if name in theirs else None
            if own is not None and shared is not None and shared.shape == own.shape:
                module._parameters[key] = shared
