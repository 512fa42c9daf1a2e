"""The loss guard: detects bad steps and decides whether to skip them or stop the run."""

import math
import statistics
from collections import deque
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from megatron_coca.checkpoints import CheckpointError
from megatron_coca.config import FaultConfig

SIGMA_PER_MAD = 1.4826
"""Ratio of a normal distribution's standard deviation to its median absolute deviation (Rousseeuw and Croux, 1993)."""
SMALLEST_SPREAD = 1e-3
"""Minimum relative standard deviation, so that rounding errors are not spikes if the losses hardly vary."""
LARGEST_LOGARITHM = 700.0
"""A value just below the logarithm of the largest float."""


class Limits(NamedTuple):
    """Values above which a step is bad. Values that are not finite are always bad."""

    loss: float = math.inf
    grad_norm: float = math.inf


class Verdict(NamedTuple):
    """The loss guard's decision about a step.

    Attributes:
        kind: "ok" (the step counts), "skipped" (it did not change the weights, and the run continues) or "stop" (the
            run ends).
        reason: why the step is bad, for the log, or None. Under the policy `warn`, an "ok" step may have a reason.
    """

    kind: Literal["ok", "skipped", "stop"]
    reason: str | None = None


def bad_reason(loss: float, grad_norm: float | None, limits: Limits) -> str | None:
    """Return why a step is bad, or None.

    Args:
        loss: mean loss over all ranks, in nats per token.
        grad_norm: norm over all ranks before clipping. None means an overflow of the fp16 loss scale, which is not bad.
    """
    named = (("loss", loss, limits.loss), ("gradient norm", grad_norm, limits.grad_norm))
    values = [(name, float(value), limit) for name, value, limit in named if value is not None]
    for name, value, _ in values:
        if not math.isfinite(value):
            return f"{name} is {value}"
    for name, value, limit in values:
        if value > limit:
            return f"{name} {value:.4g} is above {limit:.4g}"
    return None


def spike_limit(values: Iterable[float], factor: float) -> float:
    """Return exp(median + `factor` * robust standard deviation) of the logarithms of positive values.

    The defaults for window and factor are from OLMo-core's SkipStepOptimizer. Unlike it, this function uses the median
    and the median absolute deviation, because a spike changes mean and standard deviation so much that it hides the
    next spike. It uses logarithms, because gradient norms have a long upper tail, which looks like spikes on a linear
    scale.
    """
    logarithms = [math.log(value) for value in values]
    middle = statistics.median(logarithms)
    spread = SIGMA_PER_MAD * statistics.median(abs(value - middle) for value in logarithms)
    return math.exp(min(middle + factor * max(spread, SMALLEST_SPREAD), LARGEST_LOGARITHM))


class LossGuard:
    """Judges every step of a run by its loss and gradient norm.

    All ranks must pass the same numbers, so that they get the same verdicts. In every step, get `limits`,
    skip the optimizer step if `bad_reason` returns a reason, then call `observe`.
    """

    def __init__(self, config: FaultConfig) -> None:
        self._config = config
        self._losses: deque[float] = deque(maxlen=config.loss_spike_window)
        self._norms: deque[float] = deque(maxlen=config.loss_spike_window)
        self._consecutive = 0

    def spike_limits(self) -> Limits:
        """Return the values above which the next step is a spike. They are infinite with the policy `off` and
        until half of the window is filled.
        """
        config = self._config
        loss, norm = (
            spike_limit(values, config.loss_spike_factor)
            if config.loss_spike_policy != "off" and len(values) >= config.loss_spike_window // 2
            else math.inf
            for values in (self._losses, self._norms)
        )
        return Limits(loss, norm)

    def limits(self) -> Limits:
        """Return the values above which the next step must be skipped. They are infinite if spikes are ignored or only
        cause a warning.
        """
        return Limits() if self._config.loss_spike_policy in ("off", "warn") else self.spike_limits()

    def observe(self, loss: float, grad_norm: float | None) -> Verdict:
        """Record a step and judge it. `bad_reason` explains the arguments."""
        config = self._config
        finite = bad_reason(loss, grad_norm, Limits()) is None
        reason = bad_reason(loss, grad_norm, self.spike_limits())
        policy: str = config.loss_spike_policy if finite else config.nonfinite_policy
        if reason is None or (finite and policy == "warn"):
            for values, value in ((self._losses, loss), (self._norms, grad_norm)):
                if value is not None and value > 0.0:
                    values.append(float(value))
            self._consecutive = 0
            return Verdict("ok", reason)
        self._consecutive += 1
        if policy == "skip" and self._consecutive > config.max_consecutive_skips:
            return Verdict("stop", f"{reason}, and {self._consecutive} steps in a row were bad")
        return Verdict("skipped" if policy == "skip" else "stop", reason)

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`. It can be stored in JSON without loss of precision."""
        return {
            "losses": list(self._losses),
            "norms": list(self._norms),
            "consecutive": self._consecutive,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a saved `state`. Missing entries keep the values of a new guard.

        Raises:
            CheckpointError: the state has unknown entries.
        """
        new = LossGuard(self._config).state()
        if unknown := sorted(state.keys() - new.keys()):
            raise CheckpointError(
                f"the loss guard's state in the checkpoint has unknown entries ({', '.join(unknown)}); "
                "resume with the version that wrote the checkpoint, or start from its weights with finetune=true"
            )
        values = new | state
        self._losses = deque(values["losses"], maxlen=self._config.loss_spike_window)
        self._norms = deque(values["norms"], maxlen=self._config.loss_spike_window)
        self._consecutive = values["consecutive"]
