"""Learning curves, read from the metrics of a training run or from a file next to a result."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_coca.evaluation.report.reading import LoadedResult
from megatron_coca.evaluation.results import Record, read_record

CURVE, METRICS = "curve.json", "metrics.jsonl"
MAX_POINTS = 200
"""Largest number of points per curve in a report."""


class CurvePoint(Record):
    """Losses in nats per token after `step`. A loss is None if the run did not report it."""

    step: int
    tokens: int  # number of tokens trained on up to `step`
    train_loss: float | None
    validation_loss: float | None


class Curve(Record):
    """The curve of one training run; `borders` are the token counts at which later stages begin."""

    seed: int
    points: list[CurvePoint]
    borders: list[int] = []


def find_curves(loaded: Sequence[LoadedResult]) -> dict[str, list[Curve]]:
    """Return one learning curve per seed for each label. Results with config overrides are ignored.

    The curves are read from curve.json, which an ablation writes next to a result. Raises EvaluationError for a
    damaged file.
    """
    found: dict[str, dict[str, Curve]] = {}
    for item in loaded:
        checkpoint, beside = item.result.checkpoint, Path(item.file).parent / CURVE
        by_weights = found.setdefault(item.result.label, {})
        if item.result.overrides or checkpoint.identity in by_weights:
            continue
        if beside.is_file() and (curve := read_record(beside, Curve, "a learning curve")).seed == (
            checkpoint.seed or 0
        ):
            by_weights[checkpoint.identity] = curve
    return {label: sorted(curves.values(), key=lambda curve: curve.seed) for label, curves in found.items() if curves}


class TrainedStage(NamedTuple):
    """A stage of a run: its first step, and its number of tokens per step."""

    first: int
    tokens: int


def trained_stages(meta: Mapping[str, Any], seq_length: int) -> list[TrainedStage]:
    """Return the stages up to a checkpoint, read from its meta.json. A run without stages counts as one stage."""
    records = meta.get("stages")
    if not records:
        return [TrainedStage(0, meta["batch"] * seq_length)]
    firsts = [0, *(record["last"] for record in records)]
    return [TrainedStage(first, record["tokens_per_step"]) for first, record in zip(firsts, records, strict=False)]


def run_curve(run: Path, seed: int, stages: Sequence[TrainedStage]) -> Curve:
    """Return the learning curve of a run from its metrics file."""

    def tokens(step: int) -> int:
        ends = [*(stage.first for stage in stages[1:]), step]
        return sum(max(0, min(step, end) - stage.first) * stage.tokens for stage, end in zip(stages, ends, strict=True))

    points: dict[int, dict[str, Any]] = {}
    for report in metrics(run):
        for key, name in (("loss", "train_loss"), ("validation_loss", "validation_loss")):
            if key in report:
                losses = points.setdefault(int(report["step"]), {"train_loss": None, "validation_loss": None})
                losses[name] = report[key]
    found = [CurvePoint(step=step, tokens=tokens(step), **losses) for step, losses in sorted(points.items())]
    return Curve(seed=seed, points=thinned(found), borders=[tokens(stage.first) for stage in stages[1:]])


def metrics(run: Path) -> Iterator[dict[str, Any]]:
    """Yield the metric records of a training run in order."""
    path = run / METRICS
    for line in path.read_bytes().split(b"\n") if path.is_file() else ():
        try:
            report = json.loads(line)
        except (ValueError, RecursionError):  # the last line may be incomplete
            continue
        if isinstance(report, dict) and "event" not in report:
            yield report


def thinned(points: Sequence[CurvePoint], most: int = MAX_POINTS) -> list[CurvePoint]:
    """Return at most `most` evenly spaced points, preferring points with a validation loss."""
    if len(points) <= most:
        return list(points)
    validated = _evenly([point for point in points if point.validation_loss is not None], most)
    others = _evenly([point for point in points if point.validation_loss is None], most - len(validated))
    return sorted([*validated, *others], key=lambda point: point.step)


def _evenly(points: Sequence[CurvePoint], count: int) -> list[CurvePoint]:
    """Return `count` evenly spaced points including the last point, or all points if there are fewer."""
    if len(points) <= count:
        return list(points)
    return [points[(number + 1) * len(points) // count - 1] for number in range(count)]
