"""tools/bench_decoding.py decodes the same tokens in every way."""

import json
from pathlib import Path

import pytest

from tools import bench_decoding

SMALL = ["hidden_size=32", "num_attention_heads=2", "vocab_size=64", "make_vocab_size_divisible_by=1"]


@pytest.mark.slow
def test_a_short_measurement(tmp_path: Path) -> None:
    output = tmp_path / "decoding.jsonl"
    options = ["--rounds", "2", "--lengths", "40", "--layers", "1", "--tokens", "3", "--dtypes", "float32"]
    options += ["--methods", "coca", "rerope", "--output", str(output), "--keys", *SMALL]
    assert bench_decoding.main(options) == 0
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(each["method"], each["way"]) for each in records] == [
        (name, way) for name in ("coca", "rerope") for way in ("growing", "static", "compiled")
    ]
    assert all(each["equal_tokens"] == 3 and each["milliseconds"] > 0 for each in records)
    assert records[2]["compile_seconds"] > 0 and records[2]["against_static"]["rounds"] == 2
    assert "against_static" not in records[1] and records[1]["against_growing"]["ratio"] > 0
