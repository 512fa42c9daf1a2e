"""Steps that go wrong: what is a bad step, and what follows from one. Pure: numbers in, verdicts out."""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple, Self

from megatron_coca.checkpoints import CheckpointError
from megatron_coca.config import FaultConfig


class Gap(NamedTuple):
    """Places in the order of the training data, in steps, that are never read: `begin`, ..., `begin + steps - 1`."""

    begin: int
    steps: int

    @property
    def end(self) -> int:
        """The first place after it."""
        return self.begin + self.steps


@dataclass(frozen=True)
class DataSkips:
    """The places that a run leaves out, and the place that each of its steps reads instead.

    A place is the samples that a step of this number would read if nothing were left out. Steps read the places that
    remain, in order: none twice, none that is left out.

    Attributes:
        gaps: what is left out, ascending and apart from each other.
    """

    gaps: tuple[Gap, ...] = ()

    def position(self, step: int) -> int:
        """The place that step number `step` (the first is 0) reads."""
        place = step
        for gap in self.gaps:
            if gap.begin > place:
                break
            place += gap.steps
        return place

    def skip(self, first: int, last: int) -> Self:
        """Leave out what the steps `first` to `last`, both included, read until now."""
        begin, end = self.position(first), self.position(last) + 1
        # Older gaps lie between the steps' places or apart from them, and never overlap the new one's ends.
        kept = [gap for gap in self.gaps if gap.end < begin or gap.begin > end]
        touching = [gap for gap in self.gaps if gap not in kept]
        begin, end = min([begin, *(g.begin for g in touching)]), max([end, *(g.end for g in touching)])
        return type(self)(tuple(sorted([*kept, Gap(begin, end - begin)])))

    def after_rollback(self, checkpoint: int, first_bad: int, last_bad: int, margin: int) -> Self:
        """What to leave out once the run is back at `checkpoint` completed steps because of `first_bad` to `last_bad`.

        PaLM (Chowdhery et al. 2022, section 5.1) restarts about 100 steps before a spike and leaves out the data seen
        before and during it: the same steps on the same data would lead to the same weights before the spike again.

        Args:
            checkpoint: completed steps of the checkpoint, at most `first_bad`.
            margin: steps before `first_bad` whose data are left out too, as far back as the checkpoint.
        """
        return self.skip(max(checkpoint, first_bad - margin), last_bad)

    def state(self) -> list[list[int]]:
        """The gaps as [begin, steps], for JSON."""
        return [list(gap) for gap in self.gaps]

    @classmethod
    def restore(cls, state: Sequence[Sequence[int]]) -> Self:
        """What `state` has given."""
        return cls(tuple(Gap(*gap) for gap in state))


SIGMA_PER_MAD = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation (Rousseeuw and Croux, 1993)."""
SMALLEST_SPREAD = 1e-3
"""A relative standard deviation is taken to be at least this, so that losses which hardly vary do not turn rounding
into spikes.
"""
LARGEST_LOGARITHM = 700.0
"""Just below that of the largest float."""


class Limits(NamedTuple):
    """Above which values a step is bad. Infinity for none; what is not finite is bad in any case."""

    loss: float = math.inf
    grad_norm: float = math.inf


class Verdict(NamedTuple):
    """What follows from a step.

    Attributes:
        kind: "ok", the step counts; "skipped", it changed nothing and the run goes on; "stop"; "rollback".
        reason: what was wrong, for the log; None where nothing was. A step that is "ok" has one under `warn`.
        first_bad: the step with which the present row of bad steps began; None where there is none.
    """

    kind: Literal["ok", "skipped", "stop", "rollback"]
    reason: str | None = None
    first_bad: int | None = None


def bad_reason(loss: float, grad_norm: float | None, limits: Limits) -> str | None:
    """Why a step must not be taken, or None where it may.

    Args:
        loss: the step's mean loss over all ranks, in nats per token.
        grad_norm: the global norm of its gradient before clipping; None where fp16's loss scaling found an overflow
            and takes back the step by itself, which is no fault.
        limits: as `LossGuard.limits` gives them.
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
    """The median of positive values, times e to the `factor` robust standard deviations of their logarithms.

    OLMo-core's SkipStepOptimizer, from which the defaults of window and factor are, takes mean and standard deviation
    of the values. A spike that was taken into them hides the next one, while median and absolute deviation hardly
    move. Logarithms, because gradient norms have a long upper tail, which in a linear measure is full of spikes.
    """
    logarithms = [math.log(value) for value in values]
    middle = statistics.median(logarithms)
    spread = SIGMA_PER_MAD * statistics.median(abs(value - middle) for value in logarithms)
    return math.exp(min(middle + factor * max(spread, SMALLEST_SPREAD), LARGEST_LOGARITHM))


@dataclass
class _State:
    """What a resumed run needs to judge as the one that was stopped."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    consecutive: int = 0
    first_bad: int | None = None
    bad_steps: int = 0
    rollbacks: int = 0


class LossGuard:
    """Judges every step of a run by its loss and gradient norm.

    All ranks must give it the same numbers, and then come to the same verdicts. A step is judged by the steps before
    it: ask `limits`, leave the optimizer's step out where `bad_reason` gives one, then `observe`.
    """

    def __init__(self, config: FaultConfig) -> None:
        self._config = config
        self._counts = _State()
        self._losses: deque[float] = deque(maxlen=config.loss_spike_window)
        self._norms: deque[float] = deque(maxlen=config.loss_spike_window)

    @property
    def bad_steps(self) -> int:
        """Bad steps of the run so far."""
        return self._counts.bad_steps

    @property
    def rollbacks(self) -> int:
        """Rollbacks of the run so far."""
        return self._counts.rollbacks

    def limit(self) -> float:
        """The loss above which the next step is a spike; infinity under `off` and before half the window is there."""
        return self._limit(self._losses)

    def norm_limit(self) -> float:
        """The same for the gradient norm."""
        return self._limit(self._norms)

    def limits(self) -> Limits:
        """The limits above which the next step must be left out: infinite where spikes are not looked for, or only
        warned of.
        """
        policy = self._config.loss_spike_policy
        return Limits() if policy in ("off", "warn") else Limits(self.limit(), self.norm_limit())

    def observe(self, step: int, loss: float, grad_norm: float | None) -> Verdict:
        """Take note of step number `step` (the first is 0) and say what follows. Arguments as of `bad_reason`."""
        finite = bad_reason(loss, grad_norm, Limits()) is None
        reason = bad_reason(loss, grad_norm, Limits(self.limit(), self.norm_limit()))
        policy = self._config.loss_spike_policy if finite else self._config.nonfinite_policy
        if reason is None or (finite and policy == "warn"):
            self._accept(loss, grad_norm)
            return Verdict("ok", reason)
        counts = self._counts
        counts.first_bad = step if counts.first_bad is None else counts.first_bad
        counts.consecutive, counts.bad_steps = counts.consecutive + 1, counts.bad_steps + 1
        return self._judge(policy, reason)

    def rolled_back(self, state: dict[str, Any]) -> None:
        """Go back to `state`, that of the checkpoint which was restored, but go on counting.

        What is counted must not be taken back with the rest, or a run that cannot get past a place would try for ever.
        """
        bad_steps, rollbacks = self._counts.bad_steps, self._counts.rollbacks
        self.restore(state)
        self._counts.bad_steps, self._counts.rollbacks = bad_steps, rollbacks + 1
        self._counts.consecutive, self._counts.first_bad = 0, None

    def state(self) -> dict[str, Any]:
        """What `restore` needs; numbers, lists and texts only, exact in JSON."""
        return asdict(self._counts) | {"losses": list(self._losses), "norms": list(self._norms)}

    def restore(self, state: dict[str, Any]) -> None:
        """Judge on as the guard did whose `state` this is. An empty one is that of a new guard.

        Raises:
            CheckpointError: it is none.
        """
        try:
            self._counts = _State(**state)
        except TypeError as error:
            raise CheckpointError(
                f"the loss guard's state in the checkpoint does not fit ({error}); "
                "resume with the version that wrote it, or start from its weights with finetune=true"
            ) from error
        self._losses = deque(self._counts.losses, maxlen=self._config.loss_spike_window)
        self._norms = deque(self._counts.norms, maxlen=self._config.loss_spike_window)

    def _limit(self, values: deque[float]) -> float:
        config = self._config
        ready = config.loss_spike_policy != "off" and len(values) >= config.loss_spike_window // 2
        return spike_limit(values, config.loss_spike_factor) if ready else math.inf

    def _accept(self, loss: float, grad_norm: float | None) -> None:
        for values, value in ((self._losses, loss), (self._norms, grad_norm)):
            if value is not None and value > 0.0:
                values.append(float(value))
        self._counts.consecutive, self._counts.first_bad = 0, None

    def _judge(self, policy: str, reason: str) -> Verdict:
        counts, config = self._counts, self._config
        if policy == "skip" and counts.consecutive > config.max_consecutive_skips:
            policy, reason = config.skip_limit_policy, f"{reason}, and {counts.consecutive} steps in a row were bad"
        if policy == "rollback" and counts.rollbacks >= config.max_rollbacks:
            policy, reason = "stop", f"{reason}, and the run was rolled back {counts.rollbacks} times before"
        return Verdict(_KINDS[policy], reason, counts.first_bad)


_KINDS: dict[str, Literal["skipped", "stop", "rollback"]] = {
    "skip": "skipped",
    "stop": "stop",
    "rollback": "rollback",
}
"""What each policy is called once it applies."""
