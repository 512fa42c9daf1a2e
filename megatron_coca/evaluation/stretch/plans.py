"""Plans of `megatron-coca stretch`: files that declare measurements, fine-tuning and contrasts before the first run."""

from argparse import Namespace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from megatron_coca.evaluation.contrasts import Step, in_sequence
from megatron_coca.evaluation.results import EvaluationError, Record, read_yaml_file, validated
from megatron_coca.evaluation.stretch.choices import (
    CHOICES,
    MOST,
    PLAIN,
    TRAINED,
    chosen_methods,
    multiples_up_to,
    trial_methods,
)
from megatron_coca.evaluation.stretch.records import StretchResult


class PlannedContrast(Record):
    """Two methods that are compared at `at` times the training length, by margins in nats or losses in nats per token.

    `expected` is the expected mean of the paired differences, and `deviation` their expected standard deviation. The
    power of the test follows from both and from the number of pairs.
    """

    method: str
    other: str
    at: float
    quantity: Literal["margin", "loss"] = "margin"
    expected: float | None = Field(default=None, allow_inf_nan=False)
    deviation: float | None = Field(default=None, gt=0, allow_inf_nan=False)

    @property
    def name(self) -> str:
        return f"{self.method} - {self.other}, {self.at:g}x"


class PlannedFineTuning(Record):
    """The values that a plan sets for the `--finetune` options and `--lora`. `steps` is the value of `--finetune`."""

    steps: int = Field(ge=1)
    methods: list[str]
    length: int | None = Field(default=None, ge=1)
    lora: bool = False
    set: list[str] = []


class Plan(Record):
    """The content of a plan file. `cases` has the number of hidden facts by multiple of the training length.

    The facts depend on `seed`. A run without a plan has seed 0, so a plan with another seed measures new facts. With
    `finetune`, a contrast may name a fine-tuned model, such as `pi (trained)`.
    """

    title: str
    methods: list[str]
    to: float = Field(ge=1, le=MOST)
    documents: int = Field(default=1, ge=1)
    seed: int = Field(default=0, ge=0)
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    cases: dict[float, Annotated[int, Field(ge=1)]] = {}
    finetune: PlannedFineTuning | None = None
    contrasts: list[PlannedContrast] = []


def read_plan(path: Path) -> Plan:
    """Read and check a plan. Replace its method names by the names in the results. Raises EvaluationError."""
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
    if plan.finetune is not None:
        trials = trial_methods(plan.finetune.methods, f"{path}: finetune.methods:")
        untrained = [trial for trial in trials if trial in CHOICES]  # `--finetune` measures these, too
        names |= {name: name for name in (*untrained, *(f"{trial}{TRAINED}" for trial in trials))}
    for number, contrast in enumerate(plan.contrasts):
        for name in (name for name in (contrast.method, contrast.other) if name not in names):
            raise EvaluationError(f"{path}: contrasts[{number}]: {name} is not one of the methods; add it to them")
        if contrast.at not in measured:
            raise EvaluationError(f"{path}: contrasts[{number}]: {contrast.at:g} is not measured; change `at` or `to`")
    contrasts = [
        each.model_copy(update={"method": names[each.method], "other": names[each.other]}) for each in plan.contrasts
    ]
    return plan.model_copy(update={"methods": [names[name] for name in plan.methods], "contrasts": contrasts})


def planned(args: Namespace) -> Namespace:
    """Return the options with the values that the plan sets. `plan` is then the plan itself, and not its path.

    Raises EvaluationError.
    """
    if args.plan is None:
        return args
    plan = read_plan(args.plan)
    values = {"methods": plan.methods, "to": plan.to, "documents": plan.documents, "dtype": plan.dtype or args.dtype}
    if (trials := plan.finetune) is not None:
        values |= {"finetune": trials.steps, "finetune_method": trials.methods, "finetune_length": trials.length}
        values |= {"lora": trials.lora, "finetune_set": trials.set}
    return Namespace(**vars(args) | values | {"plan": plan})


def pairs_of(plan: Plan, contrast: PlannedContrast) -> int | None:
    """Return the number of pairs of a contrast, or None if the plan does not set the number of facts."""
    return plan.documents if contrast.quantity == "loss" else plan.cases.get(contrast.at)


def paired_differences(result: StretchResult, plan: Plan, contrast: PlannedContrast) -> list[float] | None:
    """Return the paired differences of a contrast, `method` minus `other`, or None if results are missing.

    Margins in nats are paired by fact. Losses in nats per token are paired by document.
    """
    length, pairs = round(contrast.at * result.trained), pairs_of(plan, contrast)
    read = {"margin": result.margins, "loss": result.losses}[contrast.quantity]
    ours, theirs = read(contrast.method, length), read(contrast.other, length)
    if contrast.quantity == "margin":  # an earlier run may have measured more facts than planned
        ours, theirs = ours[:pairs], theirs[:pairs]
    if not ours or not theirs or {len(ours), len(theirs)} != {pairs or len(ours)}:
        return None
    return [one - other for one, other in zip(ours, theirs, strict=True)]


def sequence(result: StretchResult, plan: Plan) -> list[Step[PlannedContrast]]:
    """Test a plan's contrasts in order, until one is not decided or not measured. Return a step for each contrast."""
    found = [(each, paired_differences(result, plan, each)) for each in plan.contrasts]
    return in_sequence(found, either_direction=True)


def outcome_of(step: Step[PlannedContrast]) -> str:
    """Return "higher" or "lower" for `method` compared with `other`, "not decided" or "not tested"."""
    if step.verdict == "not tested":
        return step.verdict
    return "not decided" if step.verdict != "holds" else "higher" if step.difference.mean > 0 else "lower"
