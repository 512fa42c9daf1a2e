"""The benchmark of divided evaluations: its results are equal, and its record is complete."""

import json
from pathlib import Path

import pytest

from tools import bench_families, bench_jobs


@pytest.mark.slow
def test_a_small_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 64}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    monkeypatch.setitem(bench_families.FAMILIES, "llama", ("Llama", shape))
    monkeypatch.setitem(bench_families.BLOCK, "vocab_size", 96)
    output = tmp_path / "jobs.jsonl"
    options = ["--window", "32", "--seconds", "0.01", "--documents", "1", "--output", str(output)]
    assert bench_jobs.main(options) == 0
    record = json.loads(output.read_text())
    assert (record["jobs"], record["documents"], record["window"], record["threads"]) == (2, 2, 32, 1)
    assert record["document_tokens"] >= 48 and record["ratio"] == record["seconds_one"] / record["seconds_jobs"]
    assert "without the start" in capsys.readouterr().out and {"device", "versions"} <= record.keys()
