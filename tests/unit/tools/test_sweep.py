"""The sweep of block sizes: it times launches and finds wrong gradients, and the kernels read what it records."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from megatron_coca.kernels.launch_constants import CONFIGS, MEASURED, SMALL, Launch, Launches, with_measured
from tools.gpu import sweep
from tools.gpu.cases import read_lines

TINY = ["--device", "cpu", "--dtype", "float32", "--head-dim", "16", "--lengths", "40"]
TINY += ["--candidates", "1", "--rounds", "2"]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that the interpreter computes in a second, beside `SMALL`."""
    monkeypatch.setattr(sweep, "CANDIDATES", {kernel: (Launch(16, 16, 4, 1),) for kernel in sweep.CANDIDATES})


@pytest.mark.usefixtures("small")
def test_every_kernel_and_both_numbers_of_segments_are_timed(tmp_path: Path) -> None:
    assert sweep.main([*TINY, "--output", str(tmp_path / "x")]) == 0
    lines = [line for line in read_lines(tmp_path / "x") if "launch" in line]
    assert [(line["kernel"], line["segments"]) for line in lines] == [
        (kernel, segments) for segments in (1, 2) for kernel in sweep.CANDIDATES
    ]
    for line in lines:
        assert line["status"] == "ok" and line["launch"] == [16, 16, 4, 1, None] and line["base"] == list(SMALL[1])
        assert line["ratio"] > 0 and line["length"] == 40


@pytest.mark.usefixtures("small")
def test_a_launch_with_other_gradients_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = sweep.Problem.gradients

    def wrong(problem: Any, kernel: str, launch: Launch) -> list[torch.Tensor]:
        return [x * (1.1 if launch.rows == 16 else 1) for x in gradients(problem, kernel, launch)]

    monkeypatch.setattr(sweep.Problem, "gradients", wrong)
    arguments = [*TINY, "--segments", "1", "--output", str(tmp_path / "x")]
    assert sweep.main(arguments) == 1
    errors = [line["error"] for line in read_lines(tmp_path / "x") if line.get("status") == "failed"]
    assert len(errors) == 2 and all("differs from that of the present launch by 1.00e-01" in each for each in errors)


def line(launch: list[int | None], high: float, length: int = 2048, **other: Any) -> dict[str, Any]:
    keys = {"status": "ok", "architecture": 90, "segments": 1, "row_class": 128, "kernel": "key_gradients"}
    ratios = {"ratio": high - 0.01, "ratio_quartiles": [high - 0.02, high - 0.01, high]}
    return keys | ratios | {"base": [32, 64, 4, 2, None], "launch": launch, "length": length} | other


FAST, FASTER, OFTEN, FAILED = ([rows, 64, 8, 2, None] for rows in (64, 128, 32, 16))


def test_a_winner_is_faster_at_every_length() -> None:
    lines = [line(FAST, 0.9), line(FAST, 0.8, 8192), line(FASTER, 0.7), line(FASTER, 0.6, 8192)]
    lines += [line(OFTEN, 0.5), line(OFTEN, 0.98, 8192), line(FAILED, 0.1)]
    lines += [line(FAILED, 0.1, 8192) | {"status": "failed"}, line(FAST, 0.99, kernel="query_gradients")]
    table = sweep.winners(lines, {"gpu": "a GPU"})
    (entry,) = table["90"]["1 128"].values()
    assert entry["launch"] == FASTER and entry["gpu"] == "a GPU" and entry["replaces"] == [32, 64, 4, 2, None]
    assert entry["ratio"] == pytest.approx((0.69 * 0.59) ** 0.5, abs=1e-3)
    assert sweep.winners(lines[4:], {}) == {}


def test_what_is_recorded_is_read_by_the_kernels(tmp_path: Path) -> None:
    results, table = tmp_path / "results.jsonl", tmp_path / "table.json"
    old = {"80": {"1 64": {"forward": {"launch": [64, 64, 4, 2, None]}}}}
    table.write_text(json.dumps(old))
    results.write_text("".join(json.dumps(each) + "\n" for each in (line(FAST, 0.9), line(FAST, 0.8, 8192))))
    assert sweep.record(results, table) == 0
    found = with_measured(CONFIGS, json.loads(table.read_text()))
    before, after = CONFIGS[90][1, 128], found[90][1, 128]
    assert after == before._replace(key_gradients=Launch(64, 64, 8, 2)) and after != before
    assert found[80][1, 64].forward == Launch(64, 64, 4, 2)
    assert found[90][2, 128] == CONFIGS[90][2, 128] and found[100] == CONFIGS[100]


def test_no_results_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "table.json"
    assert sweep.record(tmp_path / "none", table) == 2 and not table.exists()
    assert "none: has no results" in capsys.readouterr().err


def test_the_committed_table_names_what_was_measured() -> None:
    table = json.loads(MEASURED.read_text())
    assert with_measured(CONFIGS, table) == CONFIGS, "the kernels read it"
    for rows in table.values():
        for kernels in rows.values():
            assert all(
                kernel in Launches._fields and {"gpu", "commit", "ratio"} <= {*found}
                for kernel, found in kernels.items()
            )
