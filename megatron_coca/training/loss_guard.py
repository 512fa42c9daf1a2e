"""The loss guard: detect bad steps and decide whether to skip, stop or roll back."""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

from megatron_coca.checkpoints import CheckpointError
from megatron_coca.config import FaultConfig

SIGMA_PER_MAD = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation (Rousseeuw and Croux, 1993)."""
SMALLEST_SPREAD = 1e-3
"""Least relative standard deviation, so that rounding of losses that hardly vary is no spike."""
LARGEST_LOGARITHM = 700.0
"""Just below that of the largest float."""


class Limits(NamedTuple):
    """Values above which a step is bad; a value that is not finite is bad in any case."""

    loss: float = math.inf
    grad_norm: float = math.inf


class Verdict(NamedTuple):
    """The consequence of a step.

    Attributes:
        kind: "ok": the step counts; "skipped": it changed nothing and the run continues; "stop"; "rollback".
        reason: the fault, for the log, or None. Under the policy `warn` a step that is "ok" may have one.
        first_bad: the first of the current consecutive bad steps, or None.
    """

    kind: Literal["ok", "skipped", "stop", "rollback"]
    reason: str | None = None
    first_bad: int | None = None


KINDS: dict[str, Literal["skipped", "stop", "rollback"]] = {"skip": "skipped", "stop": "stop", "rollback": "rollback"}
"""Verdicts by policy."""


def bad_reason(loss: float, grad_norm: float | None, limits: Limits) -> str | None:
    """Return why a step is bad, or None.

    Args:
        loss: mean over all ranks, in nats per token.
        grad_norm: before clipping, over all ranks; None is an overflow of fp16's loss scaling, which is no fault.
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
    of the values: a spike among them hides the next one, while median and absolute deviation hardly change. Logarithms,
    because gradient norms have a long upper tail, which is full of spikes on a linear scale.
    """
    logarithms = [math.log(value) for value in values]
    middle = statistics.median(logarithms)
    spread = SIGMA_PER_MAD * statistics.median(abs(value - middle) for value in logarithms)
    return math.exp(min(middle + factor * max(spread, SMALLEST_SPREAD), LARGEST_LOGARITHM))


class LossGuard:
    """Judges every step of a run by its loss and gradient norm.

    All ranks must pass the same numbers, and get the same verdicts. A step is judged by the steps before it: get
    `limits`, skip the optimizer's step if `bad_reason` gives one, then `observe`.
    """

    def __init__(self, config: FaultConfig) -> None:
        self._config = config
        self._losses: deque[float] = deque(maxlen=config.loss_spike_window)
        self._norms: deque[float] = deque(maxlen=config.loss_spike_window)
        self._consecutive = self._bad_steps = self._rollbacks = 0
        self._first_bad: int | None = None

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
        """Return the values above which the next step must be skipped: infinite unless spikes have consequences."""
        return Limits() if self._config.loss_spike_policy in ("off", "warn") else self.spike_limits()

    def observe(self, step: int, loss: float, grad_norm: float | None) -> Verdict:
        """Record step number `step` (the first is 0) and judge it. Arguments as of `bad_reason`."""
        config = self._config
        finite = bad_reason(loss, grad_norm, Limits()) is None
        reason = bad_reason(loss, grad_norm, self.spike_limits())
        policy: str = config.loss_spike_policy if finite else config.nonfinite_policy
        if reason is None or (finite and policy == "warn"):
            for values, value in ((self._losses, loss), (self._norms, grad_norm)):
                if value is not None and value > 0.0:
                    values.append(float(value))
            self._consecutive, self._first_bad = 0, None
            return Verdict("ok", reason)
        self._first_bad = step if self._first_bad is None else self._first_bad
        self._consecutive, self._bad_steps = self._consecutive + 1, self._bad_steps + 1
        if policy == "skip" and self._consecutive > config.max_consecutive_skips:
            policy, reason = config.skip_limit_policy, f"{reason}, and {self._consecutive} steps in a row were bad"
        if policy == "rollback" and self._rollbacks >= config.max_rollbacks:
            policy, reason = "stop", f"{reason}, and the run was rolled back {self._rollbacks} times before"
        return Verdict(KINDS[policy], reason, self._first_bad)

    def rolled_back(self, state: dict[str, Any]) -> None:
        """Return to the `state` of a checkpoint, but keep counting bad steps and rollbacks: with counts taken back, a
        run that cannot get past a step would be rolled back forever.
        """
        bad_steps, rollbacks = self._bad_steps, self._rollbacks
        self.restore(state)
        self._bad_steps, self._rollbacks = bad_steps, rollbacks + 1
        self._consecutive, self._first_bad = 0, None

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`, exact in JSON."""
        return {
            "losses": list(self._losses),
            "norms": list(self._norms),
            "consecutive": self._consecutive,
            "first_bad": self._first_bad,
            "bad_steps": self._bad_steps,
            "rollbacks": self._rollbacks,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over the saved `state` of a guard; an empty one is that of a new guard.

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
        self._consecutive, self._first_bad = values["consecutive"], values["first_bad"]
        self._bad_steps, self._rollbacks = values["bad_steps"], values["rollbacks"]


class Gap(NamedTuple):
    """Positions in the order of the training data, in steps, that are never read: `begin`, ..., `begin + steps - 1`."""

    begin: int
    steps: int

    @property
    def end(self) -> int:
        """The first position after it."""
        return self.begin + self.steps


@dataclass(frozen=True)
class DataSkips:
    """The data that a run leaves out after rollbacks: gaps, ascending and not adjacent.

    A position is the data that the step of this number would read if nothing were left out. Steps read the remaining
    positions in order, each once.
    """

    gaps: tuple[Gap, ...] = ()

    def position(self, step: int) -> int:
        """Return the position that step number `step` (the first is 0) reads."""
        position = step
        for gap in self.gaps:
            if gap.begin > position:
                break
            position += gap.steps
        return position

    def skip(self, first: int, last: int) -> Self:
        """Leave out what the steps `first` to `last`, inclusive, read until now."""
        begin, end = self.position(first), self.position(last) + 1
        # Older gaps are inside the new one or outside it, and never overlap its ends.
        kept = [gap for gap in self.gaps if gap.end < begin or gap.begin > end]
        merged = [gap for gap in self.gaps if gap not in kept]
        begin, end = min([begin, *(gap.begin for gap in merged)]), max([end, *(gap.end for gap in merged)])
        return type(self)(tuple(sorted([*kept, Gap(begin, end - begin)])))

    def state(self) -> list[list[int]]:
        """Return the gaps as [begin, steps], for JSON."""
        return [list(gap) for gap in self.gaps]

    @classmethod
    def restore(cls, state: Sequence[Sequence[int]]) -> Self:
        """Rebuild from what `state` returned."""
        return cls(tuple(Gap(*gap) for gap in state))
