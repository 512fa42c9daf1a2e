"""Plans of `megatron-coca stretch`: the measurements, and contrasts that are declared before the first run."""

import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from megatron_coca.evaluation.results import EvaluationError, Record, read_yaml_file, validated
from megatron_coca.evaluation.statistics import Estimate, estimate, power
from megatron_coca.evaluation.stretch.choices import MOST, PLAIN, chosen_methods, multiples_up_to
from megatron_coca.evaluation.stretch.records import StretchResult


class PlannedContrast(Record):
    """Two methods at a multiple of the training length, compared by margins (nats) or by losses (nats per token).

    `expected` is the expected difference, and `deviation` the standard deviation of the paired differences. Together
    with the number of pairs, they give the power of the test.
    """

    method: str
    other: str
    at: float
    quantity: Literal["margin", "loss"] = "margin"
    expected: float | None = Field(default=None, allow_inf_nan=False)
    deviation: float | None = Field(default=None, gt=0, allow_inf_nan=False)


class Plan(Record):
    """The content of a plan file. `cases` has the number of hidden facts by multiple of the training length.

    The facts depend on `seed`. With a seed other than the default 0, no run without a plan has used the same facts.
    """

    title: str
    methods: list[str]
    to: float = Field(ge=1, le=MOST)
    documents: int = Field(default=1, ge=1)
    seed: int = Field(default=0, ge=0)
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    cases: dict[float, Annotated[int, Field(ge=1)]] = {}
    contrasts: list[PlannedContrast] = []


def read_plan(path: Path) -> Plan:
    """Read and check a plan. Names of methods become those of the results. Raises EvaluationError."""
    plan = validated(path, read_yaml_file(path), Plan, "a plan")
    measured = multiples_up_to(plan.to)
    for key in (key for key in plan.cases if key not in measured):
        raise EvaluationError(
            f"{path}: cases.{key:g}: is not measured; name some of {', '.join(map('{:g}'.format, measured))}"
        )
    names = {PLAIN: PLAIN} | {
        name: chosen_methods([name], plan.to, 1, f"{path}: methods:")[-1].name for name in plan.methods
    }
    names |= {name: name for name in names.values()}
    for number, contrast in enumerate(plan.contrasts):
        for name in (name for name in (contrast.method, contrast.other) if name not in names):
            raise EvaluationError(f"{path}: contrasts[{number}]: {name} is not one of the methods; add it to them")
        if contrast.at not in measured:
            raise EvaluationError(f"{path}: contrasts[{number}]: {contrast.at:g} is not measured; change `at` or `to`")
    contrasts = [
        each.model_copy(update={"method": names[each.method], "other": names[each.other]}) for each in plan.contrasts
    ]
    return plan.model_copy(update={"methods": [names[name] for name in plan.methods], "contrasts": contrasts})


def pairs_of(plan: Plan, contrast: PlannedContrast) -> int | None:
    """Return the number of pairs of a contrast; None if the number of facts follows from the budget."""
    return plan.documents if contrast.quantity == "loss" else plan.cases.get(contrast.at)


def power_of(plan: Plan, contrast: PlannedContrast) -> float | None:
    """Return the power of a contrast if all contrasts before it are decided; None without an expected difference."""
    pairs = pairs_of(plan, contrast)
    if contrast.expected is None or contrast.deviation is None or pairs is None or pairs < 2:
        return None
    return power(contrast.expected / contrast.deviation, pairs)


def difference(result: StretchResult, contrast: PlannedContrast, pairs: int | None = None) -> Estimate | None:
    """Return the mean of the paired differences, method minus other; None if results are missing.

    `pairs` is the planned number of pairs.
    """
    found = paired_differences(result, contrast, pairs)
    return None if found is None else estimate(found)


def paired_differences(
    result: StretchResult, contrast: PlannedContrast, pairs: int | None = None
) -> list[float] | None:
    """Return the differences of `difference`: in nats by fact for margins, in nats per token by document for losses."""
    length = round(contrast.at * result.trained)
    if contrast.quantity == "margin":
        cases = [result.facts(name, length)[:pairs] for name in (contrast.method, contrast.other)]
        values = [[case.margin for case in each] for each in cases if each]
    else:
        losses = [result.loss(name, length) for name in (contrast.method, contrast.other)]
        values = [[nll / result.settings.scored for nll in each.nlls] for each in losses if each is not None]
    if len(values) < 2 or any(len(each) != (pairs or len(values[0])) for each in values):
        return None
    return [one - other for one, other in zip(*values, strict=True)]


def contrast_rows(result: StretchResult, plan: Plan) -> list[list[str]]:
    """Return a row for each contrast in the order of the plan, tested until the first one that is not decided."""
    rows, testing = [], True
    for contrast in plan.contrasts:
        found = difference(result, contrast, pairs_of(plan, contrast))
        name = f"{contrast.method} - {contrast.other}, {contrast.at:g}x"
        declared = power_of(plan, contrast)
        row = [name, contrast.quantity, "-" if declared is None else f"{declared:.2f}"]
        if found is None:
            rows.append([*row, "not measured", "-", "not tested"])
            testing = False
            continue
        interval = "-" if math.isnan(found.low) else f"{found.low:+.3f} .. {found.high:+.3f}"
        decided = found.low > 0 or found.high < 0
        verdict = (
            "not tested" if not testing else "not decided" if not decided else "higher" if found.mean > 0 else "lower"
        )
        testing = testing and decided
        rows.append([*row, f"{found.mean:+.3f}", interval, verdict])
    return rows
