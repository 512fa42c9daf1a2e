"""The sweep of learning rates that a file declares, usually at a smaller width, and the choice of the best rates."""

import math
from collections.abc import Mapping

from megatron_coca.ablation.cells import read_curve, recorded_data, unpack
from megatron_coca.ablation.file import AblationFile, ModelEntry
from megatron_coca.ablation.grid import Cell, expand
from megatron_coca.evaluation.results import EvaluationError

SWEEP = "--rates"
"""The option of `megatron-coca ablate` that runs the sweep."""


def sweep_of(file: AblationFile) -> AblationFile:
    """Return the sweep that `file` declares, as an ablation with one model for each model of `file` and each rate.

    Raises EvaluationError if `file` declares no sweep.
    """
    rates = file.rates
    if rates is None:
        raise EvaluationError(f"{SWEEP}: the file has no `rates`; add them (docs/ablations.md), or leave out {SWEEP}")
    models = {
        name_of(label, rate): ModelEntry(set=[*entry.set, *rates.set, *settings(file, rate)])
        for label, entry in file.models.items()
        for rate in rates.lr
    }
    return file.model_copy(
        update={
            "title": f"{file.title}: learning rates",
            "seeds": rates.seeds,
            "baseline": None,
            "results": file.results.with_name(f"{file.results.name}_rates"),
            "runs": file.runs.with_name(f"{file.runs.name}_rates"),
            "models": models,
            "tasks": rates.tasks,
            "contrasts": [],
            "testing": "together",
            "rates": None,
        }
    )


def name_of(label: str, rate: float) -> str:
    """Return the name that the model `label` with this rate has in the sweep."""
    return f"{label}, {rate:g}"


def settings(file: AblationFile, rate: float) -> list[str]:
    """Return the config overrides that set a model's learning rate."""
    assert file.rates is not None
    share = file.rates.min_lr
    return [f"optimizer.params.lr={rate:.8g}", *([f"min_lr={rate * share:.8g}"] if share is not None else [])]


def with_rates(file: AblationFile, chosen: Mapping[str, float]) -> AblationFile:
    """Return the file with the learning rates `chosen` set for its models."""
    models = {
        label: entry.model_copy(update={"set": [*entry.set, *settings(file, chosen[label])]})
        for label, entry in file.models.items()
    }
    return file.model_copy(update={"models": models})


def middle_rates(file: AblationFile) -> AblationFile:
    """Return the file with the middle rate of the sweep for every model, for a plan that is made before the sweep."""
    assert file.rates is not None
    rates = sorted(file.rates.lr)
    return with_rates(file, dict.fromkeys(file.models, rates[len(rates) // 2]))


def found_rates(file: AblationFile) -> dict[str, float]:
    """Return the best rate of each model: the one with the lowest last validation loss, averaged over seeds.

    Raises EvaluationError if a run of the sweep is missing or has no validation loss, or if the best rate is the
    smallest or the largest one, because a rate outside the sweep may be better.
    """
    sweep = sweep_of(file)
    unpack(sweep.results)
    recorded = recorded_data(sweep.results)
    cells = expand(sweep, recorded=recorded) if recorded else []
    assert file.rates is not None
    losses = {(cell.model, cell.seed): last_loss(cell) for cell in cells}
    missing = [key for model in sweep.models for seed in sweep.seeds if losses.get(key := (model, seed)) is None]
    if missing:
        model, seed = missing[0]
        raise EvaluationError(
            f"rates: {len(missing)} of {len(sweep.models) * len(sweep.seeds)} runs of the sweep have no validation "
            f"loss, such as {model} with seed {seed}; run the same command with {SWEEP} first"
        )
    known = {key: loss for key, loss in losses.items() if loss is not None}
    return {label: _best(file, label, known) for label in file.models}


def last_loss(cell: Cell) -> float | None:
    """Return the last validation loss of a finished cell, or None. Return infinity for a loss that is not finite."""
    curve = read_curve(cell)
    found = [each.validation_loss for each in curve.points] if curve is not None else []
    loss = next((loss for loss in reversed(found) if loss is not None), None)
    return loss if loss is None or math.isfinite(loss) else math.inf


def _best(file: AblationFile, label: str, losses: Mapping[tuple[str, int], float]) -> float:
    assert file.rates is not None
    seeds = file.rates.seeds
    means = {rate: sum(losses[name_of(label, rate), seed] for seed in seeds) / len(seeds) for rate in file.rates.lr}
    best = min(means, key=means.__getitem__)
    if best in (min(means), max(means)):
        end, other = ("smallest", "smaller") if best == min(means) else ("largest", "larger")
        raise EvaluationError(
            f"rates: {label}: the best rate, {best:g}, is the {end} of the sweep; add a {other} one to `rates.lr`, and"
            f" run the same command with {SWEEP}"
        )
    return best
