"""The loss guard: detect bad steps and decide whether to skip or stop."""

import math
import statistics
from collections import deque
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from megatron_coca.checkpoints import CheckpointError
from megatron_coca.config import FaultConfig

SIGMA_PER_MAD = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation (Rousseeuw and Croux, 1993)."""
SMALLEST_SPREAD = 1e-3
"""Smallest relative standard deviation, so that rounding is no spike if the losses hardly vary."""
LARGEST_LOGARITHM = 700.0
"""Just below the logarithm of the largest float."""


class Limits(NamedTuple):
    """Values above which a step is bad; a value that is not finite is bad in any case."""

    loss: float = math.inf
    grad_norm: float = math.inf


class Verdict(NamedTuple):
    """The consequence of a step.

    Attributes:
        kind: "ok": the step counts; "skipped": it changed nothing and the run continues; "stop": the run ends.
        reason: the fault, for the log, or None. Under the policy `warn` a step that is "ok" may have one.
    """

    kind: Literal["ok", "skipped", "stop"]
    reason: str | None = None


def bad_reason(loss: float, grad_norm: float | None, limits: Limits) -> str | None:
    """Return why a step is bad, or None.

    Args:
        loss: mean over all ranks, in nats per token.
        grad_norm: before clipping, over all ranks; None is an overflow of fp16's loss scaling, which is not a fault.
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
    """Return the median of positive values times e to the `factor` robust standard deviations of their logarithms.

    OLMo-core's SkipStepOptimizer, the source of the defaults for window and factor, takes mean and standard deviation
    of the values: a spike among them hides the next one, while median and absolute deviation hardly change. It uses
    logarithms, because gradient norms have a long upper tail, which is full of spikes on a linear scale.
    """
    logarithms = [math.log(value) for value in values]
    middle = statistics.median(logarithms)
    spread = SIGMA_PER_MAD * statistics.median(abs(value - middle) for value in logarithms)
    return math.exp(min(middle + factor * max(spread, SMALLEST_SPREAD), LARGEST_LOGARITHM))


class LossGuard:
    """Judges every step of a run by its loss and gradient norm.

    All ranks must pass the same numbers, so that they get the same verdicts. A step is judged by the steps before it:
    get `limits`, skip the optimizer's step if `bad_reason` returns a reason, then call `observe`.
    """

    def __init__(self, config: FaultConfig) -> None:
        self._config = config
        self._losses: deque[float] = deque(maxlen=config.loss_spike_window)
        self._norms: deque[float] = deque(maxlen=config.loss_spike_window)
        self._consecutive = 0

    def spike_limits(self) -> Limits:
        """Return the limits of a spike at the next step: infinite under `off` and before half the window is filled."""
        config = self._config
        loss, norm = (
            spike_limit(values, config.loss_spike_factor)
            if config.loss_spike_policy != "off" and len(values) >= config.loss_spike_window // 2
            else math.inf
            for values in (self._losses, self._norms)
        )
        return Limits(loss, norm)

    def limits(self) -> Limits:
        """Return the values above which the next step must be skipped: infinite if spikes are only noted or ignored."""
        return Limits() if self._config.loss_spike_policy in ("off", "warn") else self.spike_limits()

    def observe(self, loss: float, grad_norm: float | None) -> Verdict:
        """Record a step and judge it. The arguments are those of `bad_reason`."""
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
        """Return the state for `restore`, exact in JSON."""
        return {
            "losses": list(self._losses),
            "norms": list(self._norms),
            "consecutive": self._consecutive,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a saved `state`; entries that it lacks are those of a new guard.

        Raises:
            CheckpointError: the state has unknown entries.
        """
        new = LossGuard(self._config).state()
        if unknown := sorted(state.keys() - new.keys()):
            raise CheckpointError(
                f"the loss guard's state in the checkpoint has unknown entries ({', '.join(unknown)}); "
                "resume with the version that wrote it, or start from its weights with finetune=true"
            )
        values = new | state
        self._losses = deque(values["losses"], maxlen=self._config.loss_spike_window)
        self._norms = deque(values["norms"], maxlen=self._config.loss_spike_window)
        self._consecutive = values["consecutive"]
