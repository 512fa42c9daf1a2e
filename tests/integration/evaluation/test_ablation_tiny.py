"""A shipped ablation at scale tiny, up to the report. The process is killed once."""

import json
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.integration.evaluation import test_ablation_runs as ablation

FILE, CELLS = "rerope_loss", 2
ONLY = ("--jobs", "2", "--only", "s1234")  # one seed of the two


@pytest.mark.slow
def test_tiny_from_nothing_to_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ablation, "TIME_LIMIT", 1800)
    (tmp_path / "configs").symlink_to(ROOT / "configs")  # so that corpus, runs and results are made here
    file = Path("configs/ablations") / f"{FILE}.yml"
    runs, results = tmp_path / "runs/ablations/tiny", tmp_path / f"results/ablations/{FILE}/tiny"

    def saved_once() -> bool:
        return any(runs.glob("*/latest"))

    ablation.kill_when(ablation.start(file, tmp_path, *ONLY), saved_once)
    assert not list(results.glob("*/curve.json"))
    ablation.finish(file, tmp_path, *ONLY)
    output = ablation.finish(file, tmp_path, "--report")
    assert any("resuming at step 50" in log.read_text() for log in runs.glob("*/log.txt"))

    cells = [json.loads(path.read_text()) for path in results.glob("*/cell.json")]
    assert [cell["status"] for cell in cells] == ["done"] * CELLS and {cell["seed"] for cell in cells} == {1234}
    assert {cell["tokens"] for cell in cells} == {150 * 64 * 64}
    measured = [
        json.loads(path.read_text()) for path in results.glob("*/perplexity_*.json") if ".cost" not in path.name
    ]
    assert len(measured) == 3 * CELLS and not any(each["missing"] for each in measured)
    assert {cell["window"] for each in measured for cell in each["results"]} == {64, 128, 256}
    assert (results / "report" / "report.html").is_file()
    assert "RoFormer + CoCA + ReRoPE w=L/4, log n*" in output
