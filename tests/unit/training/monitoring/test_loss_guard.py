"""The loss guard: the steps that are bad, the verdicts of each policy, and equal verdicts of a resumed guard."""

import json
import math
import random
from typing import Any

import pytest

from megatron_coca.checkpoints import CheckpointError
from megatron_coca.config import FaultConfig
from megatron_coca.training.monitoring.loss_guard import Limits, LossGuard, Verdict, bad_reason, spike_limit

NAN, INF = math.nan, math.inf
SHAPE = {"num_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "seq_length": 64}


def guard(**keys: Any) -> LossGuard:
    return LossGuard(FaultConfig(**{"loss_spike_window": 8} | keys))


def noisy(seed: int, count: int, sigma: float = 0.02) -> list[tuple[float, float]]:
    """Losses near 3 and gradient norms near 1, both log-normal, as training gives them."""
    generator = random.Random(seed)
    return [(3.0 * generator.lognormvariate(0, sigma), generator.lognormvariate(0, 0.3)) for _ in range(count)]


def feed(watched: LossGuard, count: int = 8, first: int = 0) -> int:
    for loss, norm in noisy(first, count):
        assert watched.observe(loss, norm) == Verdict("ok")
    return first + count


@pytest.mark.parametrize(
    ("loss", "norm", "reason"),
    [
        (2.0, 1.0, None),
        (2.0, None, None),
        (3.0, 5.0, None),
        (NAN, 1.0, "loss is nan"),
        (INF, None, "loss is inf"),
        (2.0, NAN, "gradient norm is nan"),
        (2.0, -INF, "gradient norm is -inf"),
        (3.5, 1.0, "loss 3.5 is above 3"),
        (2.0, 7.25, "gradient norm 7.25 is above 5"),
        (9.0, NAN, "gradient norm is nan"),
    ],
)
def test_bad_reason(loss: float, norm: float | None, reason: str | None) -> None:
    assert bad_reason(loss, norm, Limits(3.0, 5.0)) == reason


def test_infinite_values_are_bad_where_nothing_is_limited() -> None:
    assert bad_reason(INF, 1.0, Limits()) and bad_reason(1.0, INF, Limits())


def test_spike_limit_by_hand() -> None:
    """Logarithms 0, 1, 2, 3, 10: median 2, absolute deviations 2, 1, 0, 1, 8 with median 1."""
    values = [math.exp(power) for power in (0, 1, 2, 3, 10)]
    assert spike_limit(values, 2.0) == pytest.approx(math.exp(2 + 2 * 1.4826))


def test_values_that_hardly_vary_leave_room_for_rounding() -> None:
    assert spike_limit([2.0] * 8, 6.0) == pytest.approx(2.0 * math.exp(6e-3))


def test_a_spike_that_was_taken_in_hides_no_other() -> None:
    values = [loss for loss, _ in noisy(0, 64)]
    assert spike_limit([*values, *[50.0] * 4], 6.0) < 4.0


@pytest.mark.parametrize("values", [[1e-300, 1e300] * 4, [5e-324] * 8, [1.7e308] * 8])
def test_extreme_values_give_a_finite_limit(values: list[float]) -> None:
    assert spike_limit(values, 1e3) < INF


@pytest.mark.parametrize(
    ("keys", "limited", "applied"),
    [({}, False, False), ({"loss_spike_policy": "warn"}, True, False), ({"loss_spike_policy": "skip"}, True, True)],
)
def test_limits(keys: dict[str, Any], limited: bool, applied: bool) -> None:
    watched = guard(**keys)
    feed(watched)
    assert [limit < INF for limit in watched.spike_limits()] == [limited, limited]
    assert watched.limits() == (watched.spike_limits() if applied else Limits())


def test_nothing_is_a_spike_before_half_the_window() -> None:
    watched = guard(loss_spike_policy="skip")
    assert feed(watched, 3) and watched.observe(1e6, 1e6).kind == "ok"
    assert watched.spike_limits().loss < INF and watched.observe(1e30, 1.0).kind == "skipped"


def test_few_false_alarms() -> None:
    """Four thousand steps of noise with the default keys."""
    watched = LossGuard(FaultConfig(loss_spike_policy="skip"))
    verdicts = [watched.observe(*values) for values in noisy(1, 4_000)]
    assert sum(verdict.kind != "ok" for verdict in verdicts) == 0


@pytest.mark.parametrize(("loss", "norm"), [(4.0, 1.0), (3.0, 12.0)])
@pytest.mark.parametrize(("policy", "kind"), [("off", "ok"), ("warn", "ok"), ("skip", "skipped")])
def test_verdicts_on_a_spike(policy: str, kind: str, loss: float, norm: float) -> None:
    watched = LossGuard(FaultConfig(loss_spike_policy=policy))
    feed(watched, 128)
    verdict = watched.observe(loss, norm)
    assert verdict.kind == kind and (verdict.reason is None) == (policy == "off")


@pytest.mark.parametrize(("policy", "kind"), [("stop", "stop"), ("skip", "skipped")])
@pytest.mark.parametrize(("loss", "norm"), [(NAN, 1.0), (3.0, INF)])
def test_verdicts_on_a_value_that_is_not_finite(policy: str, kind: str, loss: float, norm: float) -> None:
    assert guard(nonfinite_policy=policy).observe(loss, norm).kind == kind


def test_skipped_steps_do_not_change_the_limits() -> None:
    watched = guard(loss_spike_policy="skip")
    feed(watched)
    before = watched.limits()
    watched.observe(1e4, 1.0)
    watched.observe(NAN, None)
    assert watched.limits() == before


def test_too_many_skips_in_a_row() -> None:
    watched = guard(max_consecutive_skips=2)
    kinds = [watched.observe(NAN, None).kind for _ in range(2)]
    assert watched.observe(3.0, 1.0).kind == "ok", "a good step begins the count anew"
    verdicts = [watched.observe(NAN, None) for _ in range(3)]
    assert kinds + [verdict.kind for verdict in verdicts] == ["skipped"] * 4 + ["stop"]
    assert "3 steps in a row" in str(verdicts[-1].reason)


def test_zero_consecutive_skips_stops_at_the_first() -> None:
    assert guard(max_consecutive_skips=0).observe(NAN, None).kind == "stop"


def history(seed: int) -> list[tuple[float, float | None]]:
    generator = random.Random(seed)
    odd: list[tuple[float, float | None]] = [(NAN, None), (90.0, 1.0), (3.0, 1e5), (3.0, INF), (3.0, None)]
    return [generator.choice(odd) if generator.random() < 0.2 else values for values in noisy(seed, 60)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("stop", [0, 3, 30])
def test_a_resumed_guard_judges_the_same(seed: int, stop: int) -> None:
    keys = {"loss_spike_policy": "skip", "max_consecutive_skips": 1}
    whole, part = guard(**keys), guard(**keys)
    steps = history(seed)
    expected = [whole.observe(*values) for values in steps]
    found = [part.observe(*values) for values in steps[:stop]]
    resumed = guard(**keys)
    resumed.restore(json.loads(json.dumps(part.state())))
    found += [resumed.observe(*values) for values in steps[stop:]]
    assert found == expected and resumed.state() == whole.state() and resumed.limits() == whole.limits()
    assert {"ok", "skipped"} <= {verdict.kind for verdict in expected}


def test_a_smaller_window_keeps_the_last_values() -> None:
    watched, smaller = guard(loss_spike_policy="skip"), guard(loss_spike_policy="skip", loss_spike_window=4)
    feed(watched)
    smaller.restore(watched.state())
    assert smaller.state()["losses"] == watched.state()["losses"][-4:]


def test_a_checkpoint_without_a_guard_gives_a_new_one() -> None:
    watched = guard()
    watched.restore({})
    assert watched.state() == guard().state()


def test_a_foreign_state_is_an_error() -> None:
    with pytest.raises(CheckpointError, match="loss guard's state.*surprise.*finetune=true"):
        guard().restore({"surprise": 1})


@pytest.mark.parametrize(("timeout", "collective"), [(1200.0, 2400.0), (None, None)])
def test_collectives_outlast_the_watchdog(timeout: float | None, collective: float | None) -> None:
    assert FaultConfig(watchdog_timeout=timeout).collective_timeout == collective
