"""Sinks of the figures of a run, and how a resumed run treats those already written."""

import errno
import io
import json
import logging
import os
import shutil
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_coca.config import Config, ConfigError, load_config
from megatron_coca.sinks import SINKS, MetricSink, RunFacts, declaration
from megatron_coca.sinks.console import COLUMNS, Console, shown
from megatron_coca.sinks.json_lines import METRICS, OLDER, UNSAVED, is_validated
from megatron_coca.support.console import Handler, set_up_logging
from megatron_coca.training.sinks import NonFatal, adopt_metrics, open_sinks

SHAPE = {
    "num_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "seq_length": 16,
    "vocab_size": 64,
    "train_iters": 10,
}


def configured(**keys: Any) -> Config:
    return load_config([], SHAPE | keys)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    logging.getLogger("megatron_coca").setLevel(logging.NOTSET)
    return caplog


def test_another_run_in_the_same_folder_is_not_continued(tmp_path: Path) -> None:
    """`log_dir` of GPT-NeoX's files is the same for every run."""
    config = configured(save=str(tmp_path / "a"), log_dir=str(tmp_path / "logs"))
    for run, start, stop in (("first", 0, 7), ("second", 0, 4), ("second", 4, 6), ("first", 7, 9)):
        opened = open_sinks(config, start, run)
        for step in range(start + 1, stop + 1):
            report(opened, step, {"loss": float(step)})
        close(opened)
    assert [line["step"] for line in lines(tmp_path / "logs")] == [8, 9]
    kept = [json.loads(line)["step"] for line in (tmp_path / "logs" / OLDER).read_text().splitlines()]
    assert kept == [*range(1, 8), *range(1, 7)]
    assert not is_validated(tmp_path / "logs", 9, "second")


def report(sinks: list[MetricSink], step: int, figures: dict[str, float | None]) -> None:
    for sink in sinks:
        sink.report(step, figures)


def close(sinks: list[MetricSink]) -> None:
    for sink in sinks:
        sink.close()


def report_all(config: Config, start: int = 0, stop: int = 10, run: str | None = None) -> None:
    sinks = open_sinks(config, start, run)
    for step in range(start + 1, stop + 1):
        report(sinks, step, {"loss": 3.5, "lr": 0.1, "tokens_per_second": 12345.0, "eta_seconds": 3661.0})
        for sink in sinks:
            sink.advance()
    for sink in sinks:
        sink.note(stop, "odd")
    close(sinks)


@pytest.mark.parametrize(
    ("keys", "folder"),
    [({"save": "run"}, "run"), ({"save": "elsewhere", "log_dir": "run"}, "run"), ({}, str(UNSAVED))],
)
def test_the_first_rank_always_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, str], folder: str
) -> None:
    monkeypatch.chdir(tmp_path)
    report_all(configured(**keys))
    assert len(lines(tmp_path / folder)) == 11 and len(list(tmp_path.rglob(METRICS))) == 1


def test_a_run_without_a_folder_continues_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    report_all(configured(), stop=7)
    report_all(configured(load="elsewhere"), start=5)
    assert [line["step"] for line in lines(tmp_path / UNSAVED)] == [6, 7, 8, 9, 10, 10]
    assert (tmp_path / UNSAVED / OLDER).read_text().count("\n") == 8


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"log_dir: .*file/run'; choose a writable folder"):
        open_sinks(configured(log_dir=str(tmp_path / "file" / "run")), 0)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")


@pytest.mark.parametrize(("stream", "bar"), [(Terminal(), True), (io.StringIO(), False)])
def test_a_bar_is_for_terminals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, bar: bool
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    report_all(configured(save=str(tmp_path)))
    text = stream.getvalue()
    assert ("10/10" in text and "loss 3.5000" in text and "\r" in text) == bar
    assert ("learned step 3/10: loss 3.5000, lr 0.1, tokens/s 12.3k, ETA 1:01:01\n" in text) == (not bar)
    assert bar or text.count("\n") == 10, "a line per report"


def test_a_bar_keeps_the_latest_of_every_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    sinks = open_sinks(configured(save=str(tmp_path)), 0)
    report(sinks, 1, {"loss": 3.5})
    report(sinks, 1, {"validation_loss": 3.25})
    close(sinks)
    assert "loss 3.5000 val 3.2500" in stream.getvalue()


def test_figures_on_the_console() -> None:
    figures = {"lr": 3e-4, "mfu": 0.4567, "loss": 2.0, "peak_memory_gib": 12.345, "grad_norm": None, "data_wait": 0.5}
    assert shown(figures) == {"loss": "2.0000", "lr": "0.0003", "MFU": "45.7%", "memory": "12.35GiB"}
    assert list(shown(figures)) == [label for name, (label, _) in COLUMNS.items() if figures.get(name) is not None]


def test_sources_are_on_the_line_of_a_validation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sinks = open_sinks(configured(save=str(tmp_path)), 0)
    report(sinks, 4, {"validation_loss": 3.0, "validation_loss/text": 3.25, "validation_loss/code": 2.75})
    report(sinks, 4, {"share/text": 0.5})
    close(sinks)
    assert capsys.readouterr().err[20:] == "learned step 4/10: validation loss 3.0000, text 3.2500, code 2.7500\n"


def test_log_lines_stand_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    bar = Console(RunFacts(Path(), 0, 0, None, configured().flat()))
    Handler().emit(logging.makeLogRecord({"msg": "saved %d", "args": (5,), "levelname": "INFO"}))
    bar.close()
    before, _, after = stream.getvalue().partition("saved 5\n")
    assert "0/10" in before and "0/10" in after, "the bar is drawn again below the line"


@pytest.mark.parametrize(
    ("name", "keys"), [("tensorboard", {"tensorboard_dir": "logs"}), ("wandb", {"use_wandb": True})]
)
def test_a_missing_extra_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, keys: dict[str, Any]
) -> None:
    def missing(self: MetricSink, run: RunFacts, **options: object) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(SINKS[name], "__init__", missing)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"{next(iter(keys))}: No module .*pip install 'megatron-coca\[logging\]'"):
        open_sinks(configured(**keys), 0)


def test_only_the_first_rank_logs() -> None:
    logger = logging.getLogger("megatron_coca")
    level = logger.level
    try:
        set_up_logging(False)
        assert not logger.isEnabledFor(logging.INFO) and logger.isEnabledFor(logging.WARNING)
        set_up_logging(True)
        assert logger.isEnabledFor(logging.INFO)
    finally:
        logger.setLevel(level)


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The scalars of a folder that TensorBoard shows."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {name: [(each.step, each.value) for each in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_tensorboard_shows_repeated_steps_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    keys = {"save": str(tmp_path / "run"), "tensorboard_dir": str(tmp_path / "board")}
    report_all(configured(**keys), stop=7)
    report_all(configured(**keys), start=5)
    found = scalars(tmp_path / "board")
    assert found["loss"] == [(step, 3.5) for step in range(1, 11)]
    assert set(found) == {"loss", "lr", "tokens_per_second", "eta_seconds"}


class FakeWandB:
    """A stand-in for the library that records the runs and their figures."""

    class errors:  # noqa: N801
        class Error(Exception): ...

        class CommError(Error): ...

    Settings = SimpleNamespace

    def __init__(self, refusal: Exception | None = None) -> None:
        self.refusal = refusal
        self.inits: list[dict[str, Any]] = []
        self.logged: list[tuple[str, int]] = []

    def init(self, mode: str | None = None, **arguments: Any) -> "FakeWandB":
        self.settings = SimpleNamespace(sync_dir="wandb/offline-run-1")
        if self.refusal is not None and mode != "offline":
            raise self.refusal
        self.inits.append(arguments)
        self.id = arguments["id"] or f"run{len(self.inits)}"
        return self

    def log(self, figures: dict[str, float], step: int) -> None:
        self.logged.append((self.id, step))

    def finish(self) -> None: ...


def test_a_resumed_run_is_the_same_run_at_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", fake := FakeWandB())  # type: ignore[arg-type]
    config = configured(save=str(tmp_path), use_wandb=True)
    for start, stop in ((0, 7), (5, 10), (0, 2)):
        report_all(config, start, stop)
    assert [(each["id"], each["resume"]) for each in fake.inits] == [(None, None), ("run1", "allow"), (None, None)]
    assert Counter(fake.logged) == Counter([("run1", step) for step in range(1, 11)] + [("run3", 1), ("run3", 2)])


def test_the_metrics_of_a_copied_run_are_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy keeps its lines, and starts another run at Weights & Biases. A folder of a third run stays as it is."""
    monkeypatch.setitem(sys.modules, "wandb", fake := FakeWandB())  # type: ignore[arg-type]
    first, copy = tmp_path / "first", tmp_path / "copy"
    report_all(configured(save=str(first), use_wandb=True), 0, 5, run="one")
    shutil.copytree(first, copy)
    adopt_metrics(copy, "one", "two")
    adopt_metrics(first, "three", "two")
    for folder, run in ((copy, "two"), (first, "one")):
        report_all(configured(save=str(folder), use_wandb=True), 5, 7, run=run)
        assert sorted({line["step"] for line in lines(folder)}) == [1, 2, 3, 4, 5, 6, 7]
    assert [each["id"] for each in fake.inits] == [None, None, "run1"]
    assert Counter(fake.logged) == Counter(
        [("run1", step) for step in range(1, 8)] + [("run2", step) for step in (6, 7)]
    )


def test_a_full_disk_does_not_end_the_reports_to_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Any
) -> None:
    def fail(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(path))

    monkeypatch.setitem(sys.modules, "wandb", fake := FakeWandB())  # type: ignore[arg-type]
    made = open_sinks(configured(save=str(tmp_path), use_wandb=True), 0)
    monkeypatch.setattr(declaration, "write_file", fail)
    for step in (1, 2):
        for sink in made:
            sink.report(step, {"loss": 1.0})
    assert fake.logged == [("run1", 1), ("run1", 2)]
    assert warnings.text.count("wandb.json: cannot be written (Disk quota exceeded)") == 1


@pytest.mark.parametrize(
    ("kind", "start", "stops"),
    [
        (FakeWandB.errors.CommError, 0, False),
        (FakeWandB.errors.CommError, 5, False),
        (ConnectionResetError, 0, False),  # requests' errors are OSErrors too
        (FakeWandB.errors.Error, 0, True),
        (FakeWandB.errors.Error, 5, False),
    ],
)
def test_a_server_that_is_away_does_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Any, kind: type[Exception], start: int, stops: bool
) -> None:
    """Only a new run must log in: a resumed one has trained with the same keys."""
    fake = FakeWandB(kind("it said no"))
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    config = configured(save=str(tmp_path), use_wandb=True)
    if stops:
        with pytest.raises(ConfigError, match="use_wandb: it said no; .*`wandb login`"):
            open_sinks(config, start)
        return
    report_all(config, start)
    assert [step for _, step in fake.logged] == list(range(start + 1, 11))
    assert "it said no; metrics stay on disk" in warnings.text
    assert "`wandb sync wandb/offline-run-1`" in warnings.text


def test_a_host_that_is_no_address_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def settings(**given: Any) -> Any:
        raise ValueError("1 validation error for Settings\nbase_url\n  Input should be a valid URL")

    monkeypatch.setattr(FakeWandB, "Settings", staticmethod(settings))
    monkeypatch.setitem(sys.modules, "wandb", FakeWandB())  # type: ignore[arg-type]
    config = configured(save=str(tmp_path), use_wandb=True, wandb_host="here:9000")
    with pytest.raises(ConfigError, match="use_wandb: wandb_host .* base_url Input"):
        open_sinks(config, 0)


class Broken(MetricSink):
    """A sink with a library that fails."""

    calls = 0

    def report(self, step: int, figures: Any) -> None:
        self.calls += 1
        raise RuntimeError("the library failed")

    def close(self) -> None:
        raise AssertionError("it gets nothing more")


def test_a_sink_that_fails_is_left_out(warnings: Any) -> None:
    sink = NonFatal(broken := Broken(), "tensorboard_dir")
    for step in (1, 2):
        sink.report(step, {"loss": 1.0})
    sink.close()
    assert (
        broken.calls == 1
        and warnings.text.count("tensorboard_dir: failed (the library failed); training continues") == 1
    )


def test_a_file_that_names_no_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", FakeWandB())  # type: ignore[arg-type]
    (tmp_path / "wandb.json").write_text("{}")
    with pytest.raises(ConfigError, match="wandb.json does not contain a run id"):
        open_sinks(configured(save=str(tmp_path), use_wandb=True), 5)
