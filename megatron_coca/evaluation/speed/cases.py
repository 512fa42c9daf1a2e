"""The methods that are measured side by side: one model for each, all with the same weights."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import opt_einsum
import torch
import torch.nn as nn
from torch import Tensor

from megatron_coca.attention.inputs import BackendError
from megatron_coca.attention.layer import SelfAttention
from megatron_coca.attention.positions.forms import RotaryTables, coefficients, rotate
from megatron_coca.config import Config, ConfigError
from megatron_coca.config.model import GAU
from megatron_coca.evaluation.options import Variant
from megatron_coca.evaluation.results import EvaluationError, Missing
from megatron_coca.evaluation.speed import CONTRACTION
from megatron_coca.evaluation.subject import backend_name
from megatron_coca.model import GPT, build_model

EINSUM = "opt_einsum"
"""The name of the contraction among the backends."""
DENSE = ("reference", EINSUM)
"""Backends that hold N x N scores."""


def contracted_attention(
    q: Tensor, t: Tensor, v: Tensor, query: RotaryTables, key: RotaryTables, scale: float
) -> Tensor:
    """Causal CoCA-Slack attention [batch, heads, length, head_dim] in the dtype of q, with O(length^2) memory.

    q is [batch, heads, length, head_dim], t (the T projection) and v are [batch, kv_heads, length, head_dim]; the
    tables belong to their positions.
    """
    groups, length = q.shape[1] // t.shape[1], q.shape[2]
    t, v = t.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    rotated_t = rotate(coefficients(t).repeat(1, 1, 1, 2), key).to(q.dtype)
    rotated_q = rotate(q, query).to(q.dtype)
    scores = opt_einsum.contract("bhmd,bhnd,bhmd->bhmn", q, rotated_t, rotated_q) * scale
    hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
    return opt_einsum.contract("bhmn,bhnd->bhmd", weights, v)


class Contraction:
    """Replaces both the position method and the backend of an attention layer by `contracted_attention`."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def prepare(self, *operands: Any) -> tuple[Any, ...]:
        return operands

    def attend(self, operands: tuple[Any, ...]) -> Tensor:
        q, t, v, frame, *_ = operands
        tables = frame.segments[0]
        return contracted_attention(q, t, v, tables.query, tables.key, self.scale)


def contract(model: nn.Module) -> None:
    """Make all layers of a CoCA model attend by the contraction; its output stays the same.

    Raises BackendError unless the model is plain CoCA on all features, which is what the paper's listing computes.
    """
    for layer in [module for module in model.modules() if isinstance(module, SelfAttention)]:
        method = layer.method
        if method.name != "coca" or method.rotary_dim != method.head_dim or len(method.bands) > 1:
            raise BackendError("the contraction computes only pos_emb coca with rotary_pct 1 and without a map")
        layer.method = layer.backend = Contraction(method.scale)  # type: ignore[assignment]


PLAIN = {"rope_scaling": None, "relative_positions": None, "logit_scaling": "none", "forgetting_gate": None}


@dataclass(frozen=True)
class Case:
    """A method: its label, its configuration, and whether it attends by the contraction."""

    label: str
    config: Config
    contracted: bool = False

    @property
    def is_plain_rope(self) -> bool:
        position = self.config.position
        return position.pos_emb == "rotary" and all(getattr(position, key) == value for key, value in PLAIN.items())


@dataclass(frozen=True)
class Built:
    """A case with its model and the name of its backend."""

    case: Case
    model: GPT
    backend: str

    @property
    def label(self) -> str:
        return self.case.label


def choose(base: Config, methods: Sequence[str], variants: Sequence[Variant]) -> tuple[list[Case], list[Missing]]:
    """The cases asked for (values of `pos_emb`, `contraction`, and variants of the base config), and the refused.

    Raises EvaluationError where two have one label.
    """
    labels = [*methods, *(variant.label for variant in variants)]
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise EvaluationError(f"{twice[0]}: duplicate method; name each once")
    changes: dict[str, tuple[Any, ...]] = {method: ({"pos_emb": method},) for method in methods}
    if CONTRACTION in methods:
        changes[CONTRACTION] = ({"pos_emb": "coca", **PLAIN},)
    changes |= {variant.label: (variant.overrides, variant.files) for variant in variants}
    cases, refused = [], []
    for label, overrides in changes.items():
        try:
            cases.append(Case(label, base.override(*overrides), label == CONTRACTION and label in methods))
        except ConfigError as error:
            refused.append(Missing(at=label, kind="refused", reason=str(error)))
    return cases, refused


def build(case: Case, device: str, dtype: torch.dtype) -> Built:
    """The model of a case, with weights drawn from its configuration's seed. Raises BackendError, ConfigError."""
    if GAU in case.config.layer_types:
        raise BackendError("attention_config: the speed of gated attention units (gau) is not measured; leave them out")
    model = build_model(case.config, device).to(dtype)
    if not case.contracted:
        return Built(case, model, backend_name(model))
    contract(model)
    return Built(case, model, EINSUM)


def build_all(cases: Iterable[Case], device: str, dtype: torch.dtype) -> tuple[list[Built], list[Missing]]:
    """The models of all cases, and the refused; parameters of the same name and shape are the first model's, in memory
    once.

    Plain RoPE is added for every backend in use without it, except the contraction's, which has none.
    """
    built: list[Built] = []
    refused: list[Missing] = []

    def add(wanted: Iterable[Case]) -> None:
        for case in wanted:
            try:
                made = build(case, device, dtype)
            except (BackendError, ConfigError) as error:
                refused.append(Missing(at=case.label, kind="refused", reason=str(error)))
                continue
            if built:
                share_weights(made.model, built[0].model)
            built.append(made)

    add(cases)
    with_rope = {item.backend for item in built if item.case.is_plain_rope}
    missing = [name for name in dict.fromkeys(item.backend for item in built) if name not in (*with_rope, EINSUM)]
    if built and not missing and not with_rope:
        missing = ["auto"]
    labels = {item.label for item in built}
    for backend in missing:
        label = "rotary" if "rotary" not in labels else f"rotary by {backend}"
        labels.add(label)
        changes = {"pos_emb": "rotary", "attention_backend": backend, **PLAIN}
        add([Case(label, built[0].case.config.override(changes))])
    return built, refused


@torch.no_grad()
def share_weights(model: nn.Module, other: nn.Module) -> None:
    theirs = dict(other.named_modules())
    for name, module in model.named_modules():
        for key, own in list(module._parameters.items()):
            shared = theirs[name]._parameters.get(key) if name in theirs else None
            if own is not None and shared is not None and shared.shape == own.shape:
                module._parameters[key] = shared
