"""tools/bench_spinning.py measures every setting in a process of its own."""

import json
import os
from pathlib import Path

import pytest

from tools import bench_spinning


def test_settings_of_other_libraries_are_errors(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_spinning.main(["--settings", "KMP_BLOCKTIME=0"])
    assert "'KMP_BLOCKTIME=0' is not one of GOMP_SPINCOUNT" in capsys.readouterr().err


@pytest.mark.slow
def test_a_short_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])  # for configs/
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    output = tmp_path / "spinning.jsonl"
    options = ["--rounds", "2", "--seconds", "0.1", "--settings", "GOMP_SPINCOUNT=1", "--output", str(output)]
    assert bench_spinning.main(options) == 0
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(records) == len(bench_spinning.KINDS) * 2 * 2, "kinds, idle and busy, two settings"
    assert all(record["tokens_per_second"] > 0 and record["against_default"]["rounds"] == 2 for record in records)
    assert os.environ["OMP_WAIT_POLICY"] == "active", "the settings of this process are kept"
