"""The report: what it writes, and what it refuses to put side by side."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from megatron_coca.evaluation import EvaluationError, PerplexityResult, WindowResult, build_report
from megatron_coca.evaluation.results import read_perplexity, write_atomically, write_record

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def window_result(window: int, nll: float) -> dict[str, Any]:
    return {
        "window": window,
        "perplexity": math.exp(nll) if nll < 709 else math.inf,
        "nll": nll,
        "tokens_scored": 4092,
        "seconds": 2.0,
        "tokens_per_second": 2046.0,
        "documents": 4,
        "peak_memory_bytes": None,
    }


def result(label: str, nlls: dict[int, float], /, **changes: Any) -> PerplexityResult:
    content = {
        "label": label,
        "protocol": {"text": "as written", "stride": 64, "windows": list(nlls), "tokens_per_batch": 4096},
        "checkpoint": {"path": label, "identity": label, "step": 500, "seq_length": 64, "pos_emb": "rotary"},
        "overrides": [],
        "tokenizer": "f00d",
        "documents": {"sha256": "aa", "count": 4, "tokens": 4096, "max_length": 1024, "sources": ["test"]},
        "environment": {"dtype": "float32", "backend": "sdpa", "device": "cpu", "torch": "2"},
        "results": [window_result(window, nll) for window, nll in nlls.items()],
    }
    for path, value in changes.items():
        group, _, name = path.partition("__")
        content[group] = {**content[group], name: value} if name else value
    return PerplexityResult.model_validate(content)


def write(folder: Path, **results: PerplexityResult) -> list[Path]:
    for name, content in results.items():
        write_record(folder / f"{name}.json", content)
    return [folder / f"{name}.json" for name in results]


def test_table_json_and_plot(tmp_path: Path) -> None:
    files = write(
        tmp_path,
        rotary=result("rotary", {64: 2.0, 1024: 6.0}),
        coca=result("rotary coca", {64: 2.1, 256: 2.5, 1024: 3.0}),
    )
    table = build_report(files, tmp_path / "new" / "folder", "Quick start")
    assert table.splitlines()[:6] == [
        "Quick start",
        "",
        "| perplexity at window |  64* |   256 |   1024 |",
        "| -------------------- | ---: | ----: | -----: |",
        "| rotary               | 7.39 |     - | 403.43 |",
        "| rotary coca          | 8.17 | 12.18 |  20.09 |",
    ]
    assert table.splitlines()[-1] == "* training length (64); stride 64, 4 documents, 4092 tokens scored"
    report = json.loads((tmp_path / "new" / "folder" / "report.json").read_text())
    assert [(row["label"], row["window"], row["extrapolation"]) for row in report["rows"]] == [
        ("rotary", 64, 1.0),
        ("rotary", 1024, 16.0),
        ("rotary coca", 64, 1.0),
        ("rotary coca", 256, 4.0),
        ("rotary coca", 1024, 16.0),
    ]
    assert report["rows"][4]["perplexity"] == pytest.approx(math.exp(3.0))
    assert list(report["results"]) == [str(file) for file in files]
    assert report["results"][str(files[0])] == json.loads(files[0].read_text())
    assert (tmp_path / "new" / "folder" / "report.png").read_bytes().startswith(PNG_SIGNATURE)


def test_infinite_perplexity_survives_strict_json(tmp_path: Path) -> None:
    files = write(tmp_path, rotary=result("rotary", {64: 2.0, 1024: 800.0}))

    def reject(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    stored = json.loads(files[0].read_text(), parse_constant=reject)
    assert stored["results"][1]["perplexity"] == "Infinity"
    assert read_perplexity(files[0]).results[1].perplexity == math.inf
    assert "|  inf |" in build_report(files, tmp_path)
    json.loads((tmp_path / "report.json").read_text(), parse_constant=reject)


def test_windows_of_one_model_in_two_files_are_one_line(tmp_path: Path) -> None:
    files = write(tmp_path, a=result("rotary", {1024: 6.0}), b=result("rotary", {64: 2.0}))
    assert "| rotary               | 7.39 | 403.43 |" in build_report(files, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"documents__sha256": "bb"}, r"different documents"),
        ({"protocol__stride": 32}, r"different stride(.|\n)*64: .*one.json\n  32: .*two.json"),
        ({"protocol__text": "otherwise"}, r"different protocol"),
        ({"label": "rotary"}, r"label `rotary` stands for different models in .*one.json and .*two.json"),
        ({"label": "rotary", "checkpoint__identity": "rotary"}, r"label `rotary` has window 64 both in .*one.json"),
        ({"label": "rotary", "checkpoint__identity": "rotary", "overrides": ["a=1"]}, r"different models"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    files = write(tmp_path, one=result("rotary", {64: 2.0}), two=result("coca", {64: 2.0}, **changes))
    with pytest.raises(EvaluationError, match=message):
        build_report(files, tmp_path / "report")
    assert not list((tmp_path / "report").glob("*"))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"task": "passkey"}', "\x00"])
def test_foreign_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "foreign.json").write_text(content)
    with pytest.raises(EvaluationError, match=r"foreign.json: is not a result of `evaluate.py perplexity`"):
        build_report([tmp_path / "foreign.json"], tmp_path)


def test_missing_file_and_nothing_evaluated(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match=r"absent.json: cannot be read"):
        build_report([tmp_path / "absent.json"], tmp_path)
    with pytest.raises(EvaluationError, match="no results to report"):
        build_report(write(tmp_path, empty=result("rotary", {})), tmp_path)
    with pytest.raises(EvaluationError, match="no results to report"):
        build_report([], tmp_path)


def test_output_that_cannot_be_a_folder_is_an_error(tmp_path: Path) -> None:
    files = write(tmp_path, one=result("rotary", {64: 2.0}))
    with pytest.raises(EvaluationError, match="cannot be written"):
        build_report(files, files[0])


def test_failed_write_keeps_the_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "result.json"
    write_atomically(target, b"earlier")

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(EvaluationError, match="result.json: cannot be written .No space left on device"):
        write_atomically(target, b"later")
    assert target.read_bytes() == b"earlier"
    assert list(tmp_path.iterdir()) == [target]


def test_results_are_closed_records() -> None:
    with pytest.raises(ValueError, match="extra"):
        WindowResult.model_validate({**window_result(64, 1.0), "surprise": 1})
