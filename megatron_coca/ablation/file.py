"""The file of an ablation: its models, tasks, seeds and declared contrasts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, FiniteFloat, field_validator, model_validator

from megatron_coca.evaluation.labels import full_label
from megatron_coca.evaluation.results import EvaluationError, Record, read_yaml_file, validated
from megatron_coca.evaluation.suite import TextList, check_variants

HomePath = Annotated[Path, AfterValidator(Path.expanduser)]
"""A path in which a leading `~` means the home folder."""


class ModelEntry(Record):
    """A model in the file.

    Attributes:
        set: YAML files and keys that are applied after those of `base`.
        variants: the variants to evaluate.
        after: a model above this one in the file, or None. As with `finetune`, training starts from the trained weights
            of that model with the same seed.
    """

    set: TextList = []
    variants: dict[str, TextList | None] = {"": None}
    after: str | None = None


class DeclaredContrast(Record):
    """A comparison of two labels, or a weighted sum over labels, that a file declares before its runs.

    Attributes:
        label, other: the two compared labels. The difference is the value of `label` minus the value of `other`.
        weights: the weight of each label in a weighted sum, which replaces `label` and `other`. For a difference of
            differences, the weights are 1, -1, -1 and 1. Their sum is 0, so that equal values give 0.
        title: the words for a weighted sum, such as "CoCA minus RoFormer, per factor of e in parameters".
        at: the length as a multiple of the training length; for "validation perplexity", a share of the training steps.
        quantity: "recall", "recall PART" (`Figures.accuracies` has the parts) or a perplexity (`Figures.logarithms`).
            Recall is compared by differences, perplexity by ratios.
        expected: the mean difference for which the power is computed; for perplexities, a difference of logarithms.
        deviation: the standard deviation of the difference over seeds, known from earlier runs.
    """

    label: str = ""
    other: str = ""
    weights: dict[str, FiniteFloat] = {}
    title: str = ""
    at: float = 1
    quantity: str = "recall"
    expected: float | None = None
    deviation: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _two_labels_or_weights(self) -> Self:
        pair, weighted = (bool(self.label), bool(self.other)), (bool(self.weights), bool(self.title))
        if (pair, weighted) not in (((True, True), (False, False)), ((False, False), (True, True))):
            raise ValueError("label and other, or weights and title: set both keys of exactly one pair")
        size = sum(map(abs, self.weights.values()))
        if self.weights and (not size or abs(sum(self.weights.values())) > 1e-6 * size):
            raise ValueError("weights: a contrast needs weights that are not all 0 and whose sum is 0; change them")
        return self

    @model_validator(mode="after")
    def _both_or_none(self) -> Self:
        if (self.expected is None) != (self.deviation is None):
            raise ValueError("expected and deviation: only one of them is set; set both, or neither")
        return self

    @property
    def is_recall(self) -> bool:
        """True for accuracies, which are compared by differences; False for perplexities."""
        return self.quantity.partition(" ")[0] == "recall"

    @property
    def terms(self) -> dict[str, float]:
        """The weight of each label. The difference is the sum of weights times values."""
        return {**self.weights} or {self.label: 1.0, self.other: -1.0}

    @property
    def sides(self) -> str:
        """The compared labels in words, without the quantity and the length."""
        return self.title or f"{self.label} against {self.other}"

    @property
    def name(self) -> str:
        return f"{self.sides}, {self.quantity} at {self.at:g}L"


class RateSweep(Record):
    """A sweep of learning rates. Each model of the file is then trained with its best rate.

    Attributes:
        lr: the learning rates.
        seeds: the seeds of the sweep. Every model is trained with each rate and each seed.
        set: YAML files and keys that are applied after those of the model, such as a smaller width.
        min_lr: the key `min_lr` as a share of the rate. If None, each model keeps its own `min_lr`.
        tasks: the evaluations of the models in the sweep. They do not affect the choice of a rate.
    """

    lr: list[FiniteFloat] = Field(min_length=3)
    seeds: list[int] = Field(min_length=1)
    set: TextList = []
    min_lr: float | None = Field(default=None, ge=0, le=1)
    tasks: dict[str, dict[str, Any] | None] = Field(min_length=1)

    @field_validator("lr")
    @classmethod
    def _positive_and_different(cls, rates: list[float]) -> list[float]:
        if min(rates) <= 0 or len({*rates}) < len(rates):
            raise ValueError("lr: needs different positive rates; change them")
        return rates


class AblationFile(Record):
    """The content of an ablation file (docs/ablations.md). `tasks` has the same form as in a suite file.

    Attributes:
        testing: how `contrasts` are tested. With "together", Holm's method corrects all p-values and intervals for the
            number of contrasts. With "sequence", the first contrast is the primary one, and each contrast is tested at
            5% only if all contrasts before it hold.
        rates: the sweep that sets the learning rate of every model, or None if each model sets its own rate.
    """

    title: str
    base: TextList = Field(min_length=1)
    seeds: list[int] = Field(min_length=1)
    baseline: str | None = None
    results: HomePath
    runs: HomePath
    models: dict[str, ModelEntry] = Field(min_length=1)
    tasks: dict[str, dict[str, Any] | None] = Field(min_length=1)
    contrasts: list[DeclaredContrast] = []
    testing: Literal["together", "sequence"] = "together"
    rates: RateSweep | None = None

    @model_validator(mode="after")
    def _swept_apart(self) -> Self:
        later = next((label for label, entry in self.models.items() if entry.after is not None), None)
        if self.rates is not None and later is not None:
            raise ValueError(f"rates: not supported with models.{later}.after; set the rates of the models")
        return self

    @model_validator(mode="after")
    def _testable(self) -> Self:
        if self.testing == "sequence" and (not self.contrasts or len(self.seeds) < 2):
            raise ValueError("testing: a sequence needs contrasts and at least two seeds; declare them")
        return self

    @field_validator("models", mode="before")
    @classmethod
    def _lists(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        return {name: {"set": entry} if isinstance(entry, list | str) else entry or {} for name, entry in given.items()}


def read_ablation(
    path: Path, scale: str | None = None, results: Path | None = None, runs: Path | None = None
) -> AblationFile:
    """Read and validate a file at the scale `scale`, or at its first scale if `scale` is None.

    `results` and `runs` override the folders in the file. Raises EvaluationError.
    """
    content = read_yaml_file(path)
    if isinstance(content, Mapping):
        scales = content.get("scales") or {}
        if not isinstance(scales, Mapping) or (scale is not None and scale not in scales):
            known = ", ".join(map(str, scales)) or "none"
            raise EvaluationError(f"{path}: --scale {scale}: unknown; known scales: {known}")
        name = scale or next(iter(scales), None)
        chosen = scales[name] if name is not None else {}
        if not isinstance(chosen, Mapping):
            raise EvaluationError(f"{path}: scales.{name}: must be a mapping of keys to values")
        folders = {"results": results, "runs": runs}
        content = _merged({key: value for key, value in content.items() if key != "scales"}, chosen)
        content |= {key: folder for key, folder in folders.items() if folder is not None}
    return validated(path, content, AblationFile, "an ablation")


def _merged(first: Any, second: Any) -> Any:
    """Merge two mappings key by key. If one of the values is not a mapping, return the second value."""
    if not isinstance(first, Mapping) or not isinstance(second, Mapping):
        return second
    return {**first, **{key: _merged(first.get(key), value) for key, value in second.items()}}


def unknown_names(file: AblationFile) -> list[str]:
    """Return a line for every model, label and variant that the file names but does not define."""
    problems = []
    if file.baseline is not None and file.baseline not in file.models:
        problems.append(f"baseline: {file.baseline}: unknown; known models: {' | '.join(file.models)}")
    elif file.baseline is not None and "" not in file.models[file.baseline].variants:
        problems.append(f'baseline: {file.baseline}: has no variant "", the reference for comparisons; add it')
    above: list[str] = []
    for model, entry in file.models.items():
        if entry.after is not None and entry.after not in above:
            problems.append(
                f"models.{model}: after: {entry.after}: no model above it; known: {' | '.join(above) or 'none'}"
            )
        above.append(model)
    labels = {full_label(model, variant) for model, entry in file.models.items() for variant in entry.variants}
    for contrast in file.contrasts:
        problems += [
            f"contrasts: {name}: unknown; known labels: {' | '.join(labels)}"
            for name in contrast.terms
            if name not in labels
        ]
    try:
        check_variants(file.tasks, (entry.variants for entry in file.models.values()))
    except EvaluationError as error:
        problems.append(str(error))
    return problems
