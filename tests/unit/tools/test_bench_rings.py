"""tools/bench_rings.py trains the same steps in one process, with Ulysses and with a ring."""

import json
from pathlib import Path

import pytest

from tools import bench_rings


@pytest.mark.slow
def test_a_short_measurement(tmp_path: Path) -> None:
    output = tmp_path / "rings.jsonl"
    options = ["--rounds", "1", "--length", "64", "--processes", "2", "--output", str(output)]
    assert bench_rings.main([*options, "--set", "pos_emb=rotary", "num_layers=1"]) == 0
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(each["sequence_parallel_size"], each["context_parallel_size"]) for each in records] == [
        (1, 1),
        (2, 1),
        (1, 2),
    ]
    assert records[0]["against_one_process"] == 1 and all(len(each["seconds"]) == 1 for each in records)
    assert all(each["loss"] == pytest.approx(records[0]["loss"], rel=1e-5) for each in records)
