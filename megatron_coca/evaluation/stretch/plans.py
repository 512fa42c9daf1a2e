"""Plans of `megatron-coca stretch`: what is measured, and contrasts that are declared before the first run."""

import math
from pathlib import Path
from typing import Literal

from pydantic import Field

from megatron_coca.evaluation.results import EvaluationError, Record, read_yaml_file, validated
from megatron_coca.evaluation.statistics import Estimate, estimate
from megatron_coca.evaluation.stretch.choices import multiples_up_to
from megatron_coca.evaluation.stretch.records import StretchResult
from megatron_coca.support.markdown_tables import format_table


class PlannedContrast(Record):
    """Two methods at a multiple of the training length, compared by margins (nats) or by losses (nats per token)."""

    method: str
    other: str
    at: float
    quantity: Literal["margin", "loss"] = "margin"


class Plan(Record):
    """The content of a plan file. `cases` has the number of hidden facts by multiple of the training length."""

    title: str
    methods: list[str]
    to: float = Field(ge=1)
    documents: int = Field(default=1, ge=1)
    cases: dict[float, int] = {}
    contrasts: list[PlannedContrast] = []


def read_plan(path: Path) -> Plan:
    """Read and check a plan. Raises EvaluationError."""
    plan = validated(path, read_yaml_file(path), Plan, "a plan")
    measured = multiples_up_to(plan.to)
    for key in (key for key in plan.cases if key not in measured):
        raise EvaluationError(
            f"{path}: cases.{key:g}: is not measured; name some of {', '.join(map('{:g}'.format, measured))}"
        )
    for number, contrast in enumerate(plan.contrasts):
        for name in (name for name in (contrast.method, contrast.other) if name not in plan.methods):
            raise EvaluationError(f"{path}: contrasts[{number}]: {name} is not one of the methods; add it to them")
        if contrast.at not in measured:
            raise EvaluationError(f"{path}: contrasts[{number}]: {contrast.at:g} is not measured; change `at` or `to`")
    return plan


def difference(result: StretchResult, contrast: PlannedContrast) -> Estimate | None:
    """Return the mean of the paired differences, method minus other; None if a result is missing."""
    length = round(contrast.at * result.trained)
    if contrast.quantity == "margin":
        found = [result.found(name, length) for name in (contrast.method, contrast.other)]
        pairs = [[case.margin for case in each.cases] for each in found if each is not None]
    else:
        losses = [result.loss(name, length) for name in (contrast.method, contrast.other)]
        pairs = [[nll / result.settings.scored for nll in each.nlls] for each in losses if each is not None]
    if len(pairs) < 2 or len(pairs[0]) != len(pairs[1]):
        return None
    return estimate([one - other for one, other in zip(*pairs, strict=True)])


def contrasts_text(result: StretchResult, plan: Plan) -> str:
    """Return the table of the contrasts in their order, tested until the first one that is not decided."""
    rows, testing = [], True
    for contrast in plan.contrasts:
        found = difference(result, contrast)
        name = f"{contrast.method} - {contrast.other}, {contrast.at:g}x"
        if found is None:
            rows.append([name, contrast.quantity, "not measured", "", "not tested"])
            testing = False
            continue
        interval = "none" if math.isnan(found.low) else f"{found.low:+.3f} .. {found.high:+.3f}"
        decided = found.low > 0 or found.high < 0
        verdict = (
            "not tested" if not testing else "not decided" if not decided else "higher" if found.mean > 0 else "lower"
        )
        testing = testing and decided
        rows.append([name, contrast.quantity, f"{found.mean:+.3f}", interval, verdict])
    return format_table(["contrast", "quantity", "difference", "95% interval", "verdict"], rows)
