"""Reported figures, measured with a fake clock, and traces."""

import json
import math
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_coca.config import Config, ConfigError, load_config
from megatron_coca.model.cost import flops_per_token
from megatron_coca.sinks.json_lines import METRICS
from megatron_coca.support.crowded_cores import CrowdedCores
from megatron_coca.training.monitoring.monitor import IntervalMean, Monitor
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


class Clock:
    """A clock that the test moves on."""

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
    return Monitor(configured(folder, **keys), start, TOKENS, ranks, rank, clock=clock or Clock())


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


def test_the_loss_of_a_report_is_the_mean_of_its_interval() -> None:
    """As in GPT-NeoX, over the steps that changed weights, even if a run is resumed within the interval."""
    losses, skipped = [4.0, 2.0, math.nan, 3.0, 1.0, 8.0], [False, False, True, False, False, False]
    whole, resumed = IntervalMean(4), IntervalMean(4)
    means = [
        whole.add(step, loss, skip) for step, (loss, skip) in enumerate(zip(losses, skipped, strict=True), start=1)
    ]
    assert means == [4.0, 3.0, 3.0, 3.0, 1.0, 4.5]
    for step in (1, 2):
        resumed.add(step, losses[step - 1], False)
    other = IntervalMean(4)
    other.restore(json.loads(json.dumps(resumed.state())))
    assert other.add(3, math.nan, True) == 3.0 and other.add(4, 3.0, False) == means[3]
    longer = IntervalMean(3)
    longer.restore(resumed.state())
    assert longer.add(3, 7.0, False) == 7.0, "with another log_interval, the mean of the steps since then"
    assert math.isnan(IntervalMean(4).add(1, math.nan, True)), "the loss itself, as no step has counted"
    assert IntervalMean(1).add(7, 2.5, False) == 2.5


@pytest.mark.parametrize(
    ("interval", "start", "last"), [(None, 0, 10), (3, 0, 3), (3, 3, 6), (3, 4, 6), (3, 9, 10), (20, 0, 10)]
)
def test_a_launch_ends_at_the_next_multiple_of_exit_interval(
    tmp_path: Path, interval: int | None, start: int, last: int
) -> None:
    """So that every job of a chain trains, as in GPT-NeoX."""
    assert configured(tmp_path, exit_interval=interval).logging.last_step(start, 10) == last


def test_no_peak_no_mfu(tmp_path: Path) -> None:
    monitor = build(tmp_path)
    monitor.stepped(2, step_figures(2), False)
    monitor.close()
    assert "mfu" not in lines(tmp_path)[0] or torch.cuda.is_available()


def test_skipped_steps_are_counted(tmp_path: Path) -> None:
    config = configured(tmp_path)
    monitor = Monitor(config, 0, TOKENS, alone, 0, skipped=3, clock=Clock())
    for step, skipped in enumerate((True, True, False, False, True, False), start=1):
        figures = {"loss": 1.0, "grad_norm": None if step == 2 else 0.5, "lr": 1e-3, "loss_scale": 8.0}
        monitor.stepped(step, figures, skipped)
    monitor.close()
    reports = lines(tmp_path)
    assert [line["skipped_steps"] for line in reports] == [5, 5, 6] and reports[0]["loss_scale"] == 8.0
    assert reports[0]["grad_norm"] is None


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
    assert sent[-1][0] == 3.0
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


def test_a_trace_is_not_written_through_a_link(tmp_path: Path) -> None:
    """A downloaded run may have a link to another folder or file of the user in the place of its trace."""
    own = tmp_path / "own"
    own.mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").symlink_to(own)
    with pytest.raises(ConfigError, match="profile: .*/profile: a link to .*/own, .*outside"):
        build(tmp_path / "run", profile=True)
    assert not list(own.iterdir())

    (own / "precious").write_text("text")
    folder = tmp_path / "other" / "profile"
    folder.mkdir(parents=True)
    (folder / "trace_steps_2-2_rank_0.json").symlink_to(own / "precious")
    monitor = build(tmp_path / "other", profile=True, profile_step_start=1, profile_step_stop=2)
    for step in (1, 2):
        monitor.stepped(step, step_figures(step), False)
    monitor.close()
    assert (own / "precious").read_text() == "text"
    assert traced_steps(folder / "trace_steps_2-2_rank_0.json")


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


def test_an_empty_window_is_an_error() -> None:
    with pytest.raises(ConfigError, match="profile_step_stop: 5 .*after profile_step_start 5"):
        load_config([], SHAPE | {"profile": True, "profile_step_start": 5, "profile_step_stop": 5})


@pytest.mark.parametrize(
    ("between", "rank", "expected"), [("waiting", 0, 0), ("saving", 0, 0), (None, 0, 1), (None, 1, 0)]
)
def test_crowded_cores_are_logged_once(
    between: Any,
    rank: int,
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Other ranks would say the same. Neither the first step counts nor what is no step."""
    clock = Clock()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    watch = partial(CrowdedCores, clock=clock, usage=lambda: (clock.now / 2, int(clock.now * 250)), environment={})
    monkeypatch.setattr("megatron_coca.training.monitoring.monitor.CrowdedCores", watch)
    monitor = build(tmp_path, clock=clock, rank=rank)
    for step in range(1, 15):
        with monitor.during(between) if between is not None else nullcontext():
            clock.now += 5.0 if step > 1 else 60.0
        monitor.stepped(step, step_figures(step), False)
        assert step > 6 or "busy cores" not in caplog.text
    monitor.close()
    assert caplog.text.count("busy cores") == expected
