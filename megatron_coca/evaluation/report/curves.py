"""Records of the loss during training, from which a report draws learning curves."""

from megatron_coca.evaluation.results import Record


class CurvePoint(Record):
    """Losses in nats per token after `step`; None where none was reported."""

    step: int
    tokens: int  # trained on until then
    train_loss: float | None
    validation_loss: float | None


class Curve(Record):
    """One training run."""

    seed: int
    points: list[CurvePoint]
