"""The file metrics.jsonl: repeated steps, other runs, damaged lines and full disks."""

import errno
import json
import logging
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_coca.sinks import RunFacts
from megatron_coca.sinks.json_lines import METRICS, OLDER, JsonLines


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    logging.getLogger("megatron_coca").setLevel(logging.NOTSET)
    return caplog


def json_lines(folder: Path, start: int) -> JsonLines:
    return JsonLines(RunFacts(folder, start, start, None, {}))


def write(folder: Path, start: int, stop: int) -> None:
    sink = json_lines(folder, start)
    for step in range(start + 1, stop + 1):
        sink.report(step, {"loss": 1.0 / step, "grad_norm": None})
    sink.close()


def test_a_resumed_run_drops_the_lines_that_it_repeats(tmp_path: Path) -> None:
    write(tmp_path, 0, 7)
    write(tmp_path, 5, 9)
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 10))
    assert lines(tmp_path)[0] == {"step": 1, "loss": 1.0, "grad_norm": None}


def test_a_fresh_run_begins_an_empty_file(tmp_path: Path) -> None:
    write(tmp_path, 0, 7)
    write(tmp_path, 0, 2)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]
    write(tmp_path, 0, 1)
    assert (tmp_path / OLDER).read_text().count("\n") == 7 + 2, "an older run's lines are set aside, not lost"


def test_a_link_in_a_downloaded_folder_is_not_followed(tmp_path: Path) -> None:
    """The lines would be appended to another file of the user, such as one that a shell runs."""
    folder, own = tmp_path / "run", tmp_path / "own"
    write(folder, 0, 2)
    own.write_text("mine")
    (folder / OLDER).symlink_to(own)
    with pytest.raises(OSError, match=OLDER):
        json_lines(folder, 0)
    assert own.read_text() == "mine" and lines(folder)


def test_a_crash_loop_leaves_few_files_and_loses_no_line(tmp_path: Path) -> None:
    for run in range(1, 31):
        sink = json_lines(tmp_path, 0)
        sink.report(run, {"loss": 1.0})
        sink.close()
        if run in (10, 20):
            with (tmp_path / METRICS).open("a") as file:
                file.write('{"step": 5, "los')  # a kill in the middle of a line
        for _ in range(3):
            json_lines(tmp_path, 0).close()  # and some before the first report
    assert {path.name for path in tmp_path.iterdir()} == {METRICS, OLDER}
    kept = (tmp_path / OLDER).read_text().splitlines()
    half = '{"step": 5, "los'
    assert kept.count(half) == 2 and [json.loads(line)["step"] for line in kept if line != half] == list(range(1, 31))


@pytest.mark.parametrize("text", [b'{"loss": 1}', b"\xff", b"[" * 100_000, b'{"step": 1e999}', b""])
def test_a_damaged_line_is_left_out_and_told(tmp_path: Path, warnings: Any, text: bytes) -> None:
    write(tmp_path, 0, 2)
    with (tmp_path / METRICS).open("ab") as file:
        file.write(text + b'\n{"step": 3}\n')
    write(tmp_path, 3, 4)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]
    assert warnings.text.count("metrics.jsonl: line 3 cannot be read") == warnings.text.count("WARNING") == 1


def test_half_a_line_is_dropped(tmp_path: Path, warnings: Any) -> None:
    write(tmp_path, 0, 4)
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 5, "los')
    write(tmp_path, 4, 6)
    assert not warnings.text, "a kill leaves it: nothing is wrong"
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_metrics_that_no_memory_holds_are_named(tmp_path: Path) -> None:
    with (tmp_path / "metrics.jsonl").open("wb") as file:
        file.truncate(1 << 36)
    with pytest.raises(OSError, match="68,719,476,736 bytes, more than"):
        json_lines(tmp_path, 3)


def test_lines_are_on_disk_at_once(tmp_path: Path) -> None:
    sink = json_lines(tmp_path, 0)
    sink.report(1, {"loss": 2.0})
    assert lines(tmp_path) == [{"step": 1, "loss": 2.0}]
    sink.close()


def test_a_deleted_file_is_made_again(tmp_path: Path) -> None:
    sink = json_lines(tmp_path / "run", 0)
    sink.report(1, {"loss": 1.0})
    shutil.rmtree(tmp_path / "run")
    sink.report(2, {"loss": 2.0})
    sink.close()
    assert [line["step"] for line in lines(tmp_path / "run")] == [2]


def test_a_deleted_folder_that_cannot_be_made_again(tmp_path: Path, warnings: Any) -> None:
    """Training continues, and no line is lost once the folder can be made."""
    run = tmp_path / "run"
    sink = json_lines(run, 0)
    shutil.rmtree(run)
    run.touch()
    for step in (1, 2, 3):
        sink.report(step, {"loss": 1.0})
    assert warnings.text.count("training continues") == 1
    run.unlink()
    sink.report(4, {"loss": 1.0})
    sink.close()
    assert [line["step"] for line in lines(run)] == [1, 2, 3, 4]


def test_lines_that_never_fit_are_counted(tmp_path: Path, warnings: Any) -> None:
    sink = json_lines(tmp_path, 0)
    sink._file = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115
    sink.report(1, {"loss": 1.0})
    sink.report(2, {"loss": 1.0})
    sink.close()
    assert "metrics.jsonl: 2 lines are lost (No space left" in warnings.text


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE])
def test_no_error_of_a_file_ends_the_run(tmp_path: Path, warnings: Any, number: int) -> None:
    class Broken:
        def fileno(self) -> int:
            raise OSError(number, os.strerror(number))

        def close(self) -> None:
            self.fileno()

    sink = json_lines(tmp_path, 0)
    sink._file.close()
    sink._file = Broken()  # type: ignore[assignment]
    for step in (1, 2):
        sink.report(step, {"loss": 1.0})
    sink.close()
    assert warnings.text.count("training continues") == 1 and os.strerror(number) in warnings.text


def test_lines_wait_while_the_disk_is_full(tmp_path: Path, warnings: Any) -> None:
    """Training continues, and no line is lost once there is space."""
    sink = json_lines(tmp_path, 0)
    sink.report(1, {"loss": 1.0})
    own = sink._file
    with Path("/dev/full").open("wb", buffering=0) as sink._file:
        sink.report(2, {"loss": 2.0})
        sink.note(2, "odd")
    sink._file = own
    assert warnings.text.count("log_dir: ") == 1 and "No space left" in warnings.text
    sink.report(3, {"loss": 3.0})
    sink.close()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 2, 3]


def test_nan_and_infinity_are_null_in_json(tmp_path: Path) -> None:
    sink = json_lines(tmp_path, 0)
    sink.report(1, {"loss": math.nan, "grad_norm": math.inf, "lr": 0.5})
    sink.note(1, "the loss is nan")
    sink.close()
    assert lines(tmp_path) == [
        {"step": 1, "loss": None, "grad_norm": None, "lr": 0.5},
        {"step": 1, "event": "the loss is nan"},
    ]
