"""Reported figures, measured with a fake clock, and anomalies."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn

from megatron_coca.config import Config, ConfigError, load_config
from megatron_coca.model.cost import flops_per_token
from megatron_coca.training import monitor as rules
from megatron_coca.training.monitor import RULES, TIMED_RULES, Anomalies, Interval, Monitor, RankTimes
from megatron_coca.training.profiling import ForwardTimer
from megatron_coca.training.sinks import METRICS
from tests.figures import TIMINGS

SHAPE = {
    "num_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "seq_length": 16,
    "vocab_size": 64,
    "train_iters": 10,
    "log_interval": 2,
}
TOKENS = 64
HOSTS = ("a", "b", "c")


class Clock:
    """Seconds that pass when the test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def configured(folder: Path, **keys: Any) -> Config:
    return load_config([], SHAPE | {"log_dir": str(folder)} | keys)


def alone(values: list[float]) -> list[list[float]]:
    return [values]


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]


def build(folder: Path, start: int = 0, ranks: Any = alone, rank: int = 0, clock: Any = None, **keys: Any) -> Monitor:
    return Monitor(configured(folder, **keys), start, TOKENS, ranks, HOSTS, rank, clock=clock or Clock())


def step_figures(step: int) -> dict[str, float | None]:
    return {"loss": 4.0 / step, "grad_norm": 0.5, "lr": 1e-3}


def test_figures_of_time(tmp_path: Path) -> None:
    monitor = build(tmp_path, clock=(clock := Clock()), ranks=lambda own: [own, own], peak_theoretical_tflops=1e-6)
    for step in range(1, 11):
        with monitor.during("waiting"):
            clock.now += 0.5
        clock.now += 1.5
        monitor.stepped(step, step_figures(step), False)
        with monitor.during("saving"):
            clock.now += 1.0 if step == 4 else 0.0
        with monitor.during("validating"):
            clock.now += 5.0 if step == 4 else 0.0
    monitor.close()
    first, second, third, *_ = lines(tmp_path)
    assert first.keys() - TIMINGS == {"step", "loss", "grad_norm", "lr", "skipped_steps"}
    assert first.keys() >= TIMINGS
    assert first["tokens_per_second"] == TOKENS / 2 and first["tokens_per_second_per_device"] == TOKENS / 4
    assert first["step_seconds"] == 2.0 and first["data_wait"] == 0.25 and first["save_share"] == 0.0
    flops = flops_per_token(configured(tmp_path)).model * TOKENS / 4
    assert first["tflops_per_device"] == pytest.approx(flops / 1e12) and first["mfu"] == pytest.approx(flops / 1e6)
    assert (second["eta_seconds"], third["eta_seconds"]) == (12.0, 4 * (10 + 6) / 5), "the first step is left out"
    assert third["step_seconds"] == 2.0, "neither a save nor a validation is training"
    assert (third["save_share"], third["eval_share"]) == (0.1, 0.5)


@pytest.mark.parametrize(
    ("start", "keys", "steps"),
    [(0, {}, [2, 4, 6, 8, 10]), (5, {}, [6, 8, 10]), (0, {"exit_interval": 3}, [2, 3]), (0, {"train_iters": 1}, [1])],
)
def test_reports_at_the_interval_and_at_the_last_step(
    tmp_path: Path, start: int, keys: dict[str, int], steps: list[int]
) -> None:
    monitor = build(tmp_path, start, **keys)
    for step in range(start + 1, steps[-1] + 1):
        monitor.stepped(step, step_figures(step), False)
    monitor.close()
    assert [line["step"] for line in lines(tmp_path)] == steps
    assert [line["loss"] for line in lines(tmp_path)] == pytest.approx([4.0 / step for step in steps])


def test_no_peak_no_mfu(tmp_path: Path) -> None:
    monitor = build(tmp_path)
    monitor.stepped(2, step_figures(2), False)
    monitor.close()
    assert "mfu" not in lines(tmp_path)[0] or torch.cuda.is_available()


def test_skipped_steps_are_counted_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = configured(tmp_path)
    monitor = Monitor(config, 0, TOKENS, alone, HOSTS, 0, skipped=3, clock=Clock())
    for step, skipped in enumerate((True, True, False, False, True, False), start=1):
        figures = {"loss": 1.0, "grad_norm": None if step == 2 else 0.5, "lr": 1e-3, "loss_scale": 8.0}
        monitor.stepped(step, figures, skipped)
    monitor.close()
    reports = [line for line in lines(tmp_path) if "loss" in line]
    assert [line["skipped_steps"] for line in reports] == [5, 5, 6] and reports[0]["loss_scale"] == 8.0
    assert reports[0]["grad_norm"] is None
    assert [line for line in lines(tmp_path) if "event" in line] == [
        {"step": 2, "event": "2 of the last 2 steps changed no weight"}
    ], "not told again so soon"
    assert caplog.messages == ["step 2: 2 of the last 2 steps changed no weight"]


def test_other_ranks_time_and_are_silent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    sent: list[list[float]] = []
    monitor = build(
        tmp_path / "run", ranks=lambda own: sent.append(own) or [own, own], rank=1, clock=(clock := Clock())
    )
    with monitor.during("waiting"):
        clock.now += 3.0
    monitor.stepped(2, {"loss": math.nan, "grad_norm": None, "lr": 1e-3}, True)
    monitor.report(2, {"validation_loss": 1.0})
    monitor.note(2, "odd")
    monitor.close()
    assert RankTimes(*sent[-1]).waited == 3.0
    assert not (tmp_path / "run").exists() and not caplog.messages and capsys.readouterr().err == ""


def test_validation_and_other_figures(tmp_path: Path) -> None:
    monitor = build(tmp_path)
    monitor.report(4, {"validation_loss": 2.0, "validation_loss/code": 1.5})
    monitor.report(4, {"share/code": 0.25})
    monitor.close()
    assert lines(tmp_path) == [
        {"step": 4, "validation_loss": 2.0, "validation_loss/code": 1.5},
        {"step": 4, "share/code": 0.25},
    ]


# --- timing ---------------------------------------------------------------------------------------------------------


def test_phases_end_with_an_error_too(tmp_path: Path) -> None:
    monitor = build(tmp_path, clock=(clock := Clock()), log_interval=1)
    with pytest.raises(KeyError), monitor.during("saving"):
        clock.now += 2.0
        raise KeyError
    clock.now += 1.0
    monitor.stepped(1, step_figures(1), False)
    clock.now += 4.0
    monitor.stepped(2, step_figures(2), False)
    monitor.close()
    first, second = lines(tmp_path)
    assert (first["save_share"], first["step_seconds"]) == (pytest.approx(2 / 3), 1.0)
    assert (second["save_share"], second["step_seconds"]) == (0.0, 4.0)


def test_remaining_time_after_one_step_counts_that_one(tmp_path: Path) -> None:
    monitor = build(tmp_path, 5, clock=(clock := Clock()), log_interval=1)
    clock.now += 30.0
    monitor.stepped(6, step_figures(6), False)
    clock.now += 2.0
    monitor.stepped(7, step_figures(7), False)
    monitor.stepped(10, step_figures(10), False)
    monitor.close()
    assert [line["eta_seconds"] for line in lines(tmp_path)] == [120.0, 6.0, 0.0]


def test_forward_passes_are_timed_in_training_only() -> None:
    clock = Clock()

    class Slow(nn.Module):
        def forward(self, seconds: float) -> None:
            clock.now += seconds

    module, timer = Slow(), ForwardTimer(clock)
    timer.watch(module)
    module(2.0), module(4.0)
    module.eval()(100.0)
    assert timer.lap() == 3.0 and timer.lap() == 0.0
    timer.close()
    module.train()(1.0)
    assert timer.lap() == 0.0 and not module._forward_hooks and not module._forward_pre_hooks


def test_stages_of_a_pipeline_are_not_compared(tmp_path: Path) -> None:
    monitor, module = build(tmp_path), nn.Linear(1, 1)
    monitor._config = monitor._config.model_copy(
        update={"parallel": monitor._config.parallel.model_copy(update={"pipe_parallel_size": 2})}
    )
    monitor.watch(module)
    monitor.close()
    assert not module._forward_hooks


# --- anomalies ------------------------------------------------------------------------------------------------------

RANK = RankTimes(waited=0.0, forward=1.0, memory_gib=1.0, memory_share=0.5)
QUIET = Interval(steps=10, seconds=20.0, skipped=0, loss=3.0, ranks=(RANK, RANK, RANK), speeds=(0.5,) * 3)


def second(**changes: float) -> tuple[RankTimes, ...]:
    return (RANK, RANK._replace(**changes), RANK)


@pytest.mark.parametrize(
    ("rule", "below", "above", "text"),
    [
        (rules.slow_data, {"ranks": second(waited=2.0)}, {"ranks": second(waited=2.4)}, "12% .* rank 1 (b)"),
        (
            rules.straggler,
            {"ranks": second(forward=1.2)},
            {"ranks": second(forward=1.3)},
            "rank 1 (b) is slow: .* 1.30",
        ),
        (rules.full_memory, {"ranks": second(memory_share=0.9)}, {"ranks": second(memory_share=0.95)}, "95% .* rank 1"),
        (rules.slowdown, {"seconds": 39.0}, {"seconds": 41.0}, "a step takes 4.1 s; the run's median is 2 s"),
        (rules.skipped_steps, {"skipped": 0}, {"skipped": 2}, "2 of the last 10 steps"),
        (rules.loss_not_finite, {"loss": 1e30}, {"loss": math.inf}, "the loss is inf"),
    ],
)
def test_rules(rule: Callable[..., str | None], below: dict[str, Any], above: dict[str, Any], text: str) -> None:
    assert rule(QUIET, HOSTS) is None and rule(replace(QUIET, **below), HOSTS) is None
    found = rule(replace(QUIET, **above), HOSTS)
    assert found is not None and "\n" not in found
    assert all(part in found for part in text.split(" .* "))
    others = [each(replace(QUIET, **above), HOSTS) for each in (*RULES, *TIMED_RULES) if each is not rule]
    assert not any(others), "one thing, one line"


def test_forward_passes_that_nobody_timed_are_no_stragglers() -> None:
    assert rules.straggler(replace(QUIET, ranks=(RANK._replace(forward=0.0),) * 2), HOSTS) is None


def test_speed_is_compared_with_some_history_only() -> None:
    assert rules.slowdown(replace(QUIET, seconds=1e3, speeds=(0.5,) * 2), HOSTS) is None


def test_short_intervals_are_judged_together() -> None:
    waiting = replace(QUIET, seconds=4.0, ranks=(RANK._replace(waited=1.0),) * 3, speeds=())
    anomalies = Anomalies(HOSTS)
    found = [list(anomalies.find(waiting)) for _ in range(3)]
    assert found[:2] == [[], []] and len(found[2]) == 1 and found[2][0].startswith("25% of the time")


def test_a_rule_repeats_itself_after_a_while_only() -> None:
    anomalies, waiting = Anomalies(HOSTS), replace(QUIET, seconds=100.0, ranks=second(waited=50.0))
    told = [len(list(anomalies.find(waiting))) for _ in range(14)]
    assert told == [1, 0, 0, 0, 0, 0] * 2 + [1, 0]


def test_a_drop_is_told_against_the_runs_median() -> None:
    anomalies = Anomalies(HOSTS)
    usual = replace(QUIET, speeds=())
    assert not [line for _ in range(5) for line in anomalies.find(usual)]
    assert list(anomalies.find(replace(usual, seconds=100.0))) == ["a step takes 10 s; the run's median is 2 s"]


# --- profiling ------------------------------------------------------------------------------------------------------


def traced_steps(path: Path) -> list[str]:
    events = json.loads(path.read_text())["traceEvents"]
    return sorted({each["name"] for each in events if each.get("name", "").startswith("ProfilerStep")})


@pytest.mark.parametrize(
    ("start", "steps", "window", "name"),
    [
        (0, 6, (2, 4), "trace_steps_3-4_rank_0.json"),
        (4, 6, (2, 4), "trace_steps_7-8_rank_0.json"),
        (0, 3, (1, 9), "trace_steps_2-3_rank_0.json"),
    ],
)
def test_a_trace_of_the_asked_steps(tmp_path: Path, start: int, steps: int, window: tuple[int, int], name: str) -> None:
    first, last = window
    monitor = build(tmp_path, start, profile=True, profile_step_start=first, profile_step_stop=last, log_interval=100)
    for step in range(start + 1, start + steps + 1):
        torch.ones(8, 8) @ torch.ones(8, 8)
        monitor.stepped(step, step_figures(step), False)
    monitor.close()
    (path,) = (tmp_path / "profile").iterdir()
    assert path.name == name and "aten::mm" in path.read_text()
    unfinished = steps < last
    assert len(traced_steps(path)) == min(last, steps) - first + unfinished


def test_a_run_too_short_for_its_trace_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monitor = build(tmp_path, profile=True)
    monitor.stepped(1, step_figures(1), False)
    monitor.close()
    assert "before profile_step_start 10" in caplog.text and not list((tmp_path / "profile").iterdir())


@pytest.mark.parametrize(("ranks", "traced"), [([0], False), ([0, 1], True)])
def test_other_ranks_trace_when_asked(tmp_path: Path, ranks: list[int], traced: bool) -> None:
    monitor = build(tmp_path, rank=1, profile=True, profile_step_start=1, profile_step_stop=2, profile_ranks=ranks)
    for step in (1, 2, 3):
        monitor.stepped(step, step_figures(step), False)
    monitor.close()
    assert (tmp_path / "profile" / "trace_steps_2-2_rank_1.json").is_file() == traced


def test_memory_is_recorded_on_a_gpu_only(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(ConfigError, match="memory_profiling: there is no GPU"):
        build(tmp_path, memory_profiling=True)


def test_an_empty_window_is_refused() -> None:
    with pytest.raises(ConfigError, match="profile_step_stop: 5 is not after profile_step_start 5"):
        load_config([], SHAPE | {"profile": True, "profile_step_start": 5, "profile_step_stop": 5})
