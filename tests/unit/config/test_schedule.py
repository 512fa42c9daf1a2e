"""The learning rate at every point that matters, for every style."""

import math
from itertools import pairwise

import pytest

from megatron_coca.config import ConfigError, ScheduleConfig, load_config
from megatron_coca.config.schedule import DECAYS, WSD_DECAYS, learning_rate

PEAK, LOW, STEPS = 1e-3, 1e-4, 100

AT_HALF = {
    "constant": PEAK,
    "linear": PEAK / 2,
    "linear_to_min_lr": (PEAK + LOW) / 2,
    "cosine": (PEAK + LOW) / 2,
    "exponential": PEAK * 0.5**0.5,
}
AT_END = {"constant": PEAK, "linear": LOW, "linear_to_min_lr": LOW, "cosine": LOW, "exponential": PEAK / 2}


def schedule(style: str, **keys: object) -> ScheduleConfig:
    values = {"train_iters": STEPS, "min_lr": LOW, "warmup": 0.1, "lr_decay_style": style}
    return ScheduleConfig.model_validate(values | keys)


def rates(config: ScheduleConfig, count: int = STEPS) -> list[float]:
    return [learning_rate(step, PEAK, config) for step in range(count)]


def test_every_style_is_checked_here() -> None:
    assert DECAYS.keys() == AT_HALF.keys() == AT_END.keys()


@pytest.mark.parametrize("style", DECAYS)
def test_start_peak_half_and_end(style: str) -> None:
    found = rates(schedule(style))
    assert found[0] == pytest.approx(PEAK / 10), "the first step already trains"
    assert found[4] == pytest.approx(PEAK / 2)
    assert found[9] == max(found) == pytest.approx(PEAK)
    assert found[54] == pytest.approx(AT_HALF[style])
    assert found[-1] == pytest.approx(AT_END[style])
    falling = found[9:]
    assert all(later <= earlier for earlier, later in pairwise(falling))
    assert min(falling) >= LOW


@pytest.mark.parametrize("style", DECAYS)
def test_flat_beyond_the_horizon(style: str) -> None:
    beyond = [learning_rate(step, PEAK, schedule(style, lr_decay_iters=50)) for step in (49, 50, 51, 74, 99, 10_000)]
    assert beyond == pytest.approx([AT_END[style]] * 6)


def test_horizon_is_train_iters_a_share_or_a_number() -> None:
    assert rates(schedule("cosine", lr_decay_fraction=0.5)) == rates(schedule("cosine", lr_decay_iters=50))
    assert rates(schedule("cosine", lr_decay_iters=STEPS)) == rates(schedule("cosine"))


@pytest.mark.parametrize("first", [0.0, 2e-4])
def test_warmup_is_a_straight_line_from_its_start(first: float) -> None:
    found = rates(schedule("cosine", lr_warmup_init=first), 10)
    expected = [first + (PEAK - first) * (step + 1) / 10 for step in range(10)]
    assert found == pytest.approx(expected)


def test_without_warmup_the_first_step_is_on_the_decay() -> None:
    found = rates(schedule("cosine", warmup=0.0))
    assert found[0] == pytest.approx(LOW + (PEAK - LOW) / 2 * (math.cos(math.pi / STEPS) + 1))
    assert found[-1] == pytest.approx(LOW)


def test_warmup_may_fill_the_horizon() -> None:
    found = rates(schedule("cosine", warmup=1.0), STEPS + 5)
    assert found[STEPS - 2] == pytest.approx(PEAK * (STEPS - 1) / STEPS)
    assert all(math.isfinite(rate) and LOW <= rate <= PEAK for rate in found[STEPS // 10 :])


@pytest.mark.parametrize("style", DECAYS)
def test_one_step_run(style: str) -> None:
    assert learning_rate(0, PEAK, schedule(style, train_iters=1, warmup=0.0)) == pytest.approx(AT_END[style])


AT_HALF_OF_WSD = {
    "linear": (PEAK + LOW) / 2,
    "cosine": (PEAK + LOW) / 2,
    "exponential": LOW + (PEAK - LOW) * (math.sqrt(2.0) - 1.0),
    "minus_sqrt": LOW + (PEAK - LOW) * (1.0 - math.sqrt(0.5)),
}


@pytest.mark.parametrize("shape", WSD_DECAYS)
def test_wsd_warms_up_stays_and_decays_to_the_minimum(shape: str) -> None:
    found = rates(schedule("wsd", lr_wsd_decay_style=shape, lr_wsd_decay_iters=20), STEPS + 5)
    assert found[4] == pytest.approx(PEAK / 2)
    assert set(found[9:80]) == {PEAK}, "the step before the decay has the peak"
    assert found[89] == pytest.approx(AT_HALF_OF_WSD[shape])
    assert found[99:] == pytest.approx([LOW] * 6)
    assert all(later < earlier for earlier, later in pairwise(found[79:100]))


def test_wsd_decays_over_a_tenth_of_the_horizon_unless_told() -> None:
    assert rates(schedule("wsd")) == rates(schedule("wsd", lr_wsd_decay_iters=STEPS // 10))


def test_a_decay_of_wsd_that_does_not_fit_is_an_error() -> None:
    keys = {"lr_decay_style": "wsd", "train_iters": 100, "warmup": 0.1, "lr_wsd_decay_iters": 91}
    with pytest.raises(ConfigError, match="lr_wsd_decay_iters: 91 exceeds the 90 steps"):
        load_config("configs/350M/roformer.yml", keys)


def test_a_decay_of_no_step_is_an_error() -> None:
    """The rate would be 0 from the first step on."""
    shape = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "seq_length": 4}
    keys = {"train_iters": 100, "lr_decay_fraction": 0.001}
    with pytest.raises(ConfigError, match=r"lr_decay_fraction: 0\.001 of 100 steps .*at least 0\.01"):
        load_config(shape | keys)
    assert load_config(shape | keys | {"lr_decay_fraction": 0.01}).schedule.decay_iters == 1
