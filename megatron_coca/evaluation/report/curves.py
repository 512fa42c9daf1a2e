"""Learning curves of training runs, as the report draws them."""

from megatron_coca.evaluation.results import Record


class CurvePoint(Record):
    """Losses after a step, in nats per token; None where the step has no such figure."""

    step: int
    tokens: int
    train_loss: float | None
    validation_loss: float | None


class Curve(Record):
    """The learning curve of one training run."""

    seed: int
    points: list[CurvePoint]
