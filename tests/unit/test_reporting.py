"""Where the figures of a run go, and what a resumed run does to those already written."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from megatron_coca.checkpoints import CheckpointError
from megatron_coca.config import Config, ConfigError, load_config
from megatron_coca.training import reporting
from megatron_coca.training.reporting import METRICS, JsonLines, Reporters, set_up_logging

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


def write(folder: Path, start: int, stop: int) -> None:
    sink = JsonLines(folder, start)
    for step in range(start + 1, stop + 1):
        sink.report(step, {"loss": 1.0 / step, "grad_norm": None})
    sink.close()


def test_a_resumed_run_drops_what_it_repeats(tmp_path: Path) -> None:
    write(tmp_path, 0, 7)
    write(tmp_path, 5, 9)
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 10))
    assert lines(tmp_path)[0] == {"step": 1, "loss": 1.0, "grad_norm": None}


def test_a_fresh_run_begins_an_empty_file(tmp_path: Path) -> None:
    write(tmp_path, 0, 7)
    write(tmp_path, 0, 2)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]
    write(tmp_path, 0, 1)
    older = [path.read_text().count("\n") for path in sorted(tmp_path.glob(f"{METRICS}.*"))]
    assert older == [7, 2], "an older run's lines are set aside, not lost"


def test_a_damaged_line_ends_what_is_kept(tmp_path: Path) -> None:
    write(tmp_path, 0, 2)
    with (tmp_path / METRICS).open("ab") as file:
        file.write(b'{"loss": 1}\n\xff\n')
    write(tmp_path, 2, 3)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]


def test_half_a_line_is_dropped(tmp_path: Path) -> None:
    write(tmp_path, 0, 4)
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 5, "los')
    write(tmp_path, 4, 6)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_lines_are_on_disk_at_once(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path, 0)
    sink.report(1, {"loss": 2.0})
    assert lines(tmp_path) == [{"step": 1, "loss": 2.0}]
    sink.close()


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path, 0)
    sink._file = Path("/dev/full").open("w")  # noqa: SIM115
    with pytest.raises(CheckpointError, match=r"metrics.jsonl: cannot be written .*No space left"):
        sink.report(1, {"loss": 1.0})
    sink.close()


@pytest.mark.parametrize("keys", [{"save": "run"}, {"save": "elsewhere", "log_dir": "run"}])
def test_the_first_rank_writes_and_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], keys: dict[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    reporters = Reporters(configured(**keys), 0, active=True)
    for step in range(1, 11):
        reporters.report(step, loss=3.5, lr=0.1)
        reporters.advance()
    reporters.close()
    assert len(lines(tmp_path / "run")) == 10 and not (tmp_path / "elsewhere").exists()
    bar = capsys.readouterr().err
    assert "10/10" in bar and "step/s" in bar and "loss=3.5" in bar


def test_other_ranks_are_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reporters = Reporters(configured(save=str(tmp_path / "run")), 0, active=False)
    reporters.advance()
    reporters.report(1, loss=1.0)
    reporters.close()
    assert not (tmp_path / "run").exists() and capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("name", "keys"), [("TensorBoard", {"tensorboard_dir": "logs"}), ("WandB", {"use_wandb": True})]
)
def test_a_missing_extra_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, keys: dict[str, Any]
) -> None:
    def missing(*arguments: object) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(reporting, name, missing)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"{next(iter(keys))}: No module .*pip install 'megatron-coca\[logging\]'"):
        Reporters(configured(**keys), 0, active=True)


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
