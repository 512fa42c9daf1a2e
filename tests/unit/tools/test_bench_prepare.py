"""The computed tables of preparation in benchmarks/data.md, and the corpus of the benchmark."""

import json
from pathlib import Path

from tests.conftest import ROOT
from tools.bench_prepare import PLANNED, tables, write_corpus

ASSUMED = [
    {"method": method, "processes": processes, "megabytes_per_second": rate, "of_ideal": 0.9}
    for method, rate in (("prepare", 1 / (1 / 3.4 + 1 / 250)), ("shards", 250))
    for processes in (1, 2)
]
"""The rates of benchmarks/data.md until benchmarks/prepare.jsonl exists."""


def test_the_page_has_the_computed_tables() -> None:
    measured = ROOT / "benchmarks/prepare.jsonl"
    records = [json.loads(line) for line in measured.read_text().splitlines()] if measured.exists() else ASSUMED
    rows = [line for line in tables(records).splitlines() if line.startswith("|")]
    page = (ROOT / "benchmarks/data.md").read_text().splitlines()
    assert len(rows) == 2 + len(PLANNED) and set(rows) <= set(page)


def test_the_corpus_has_its_size(tmp_path: Path) -> None:
    documents, size = write_corpus(tmp_path / "corpus", 2_000_000)
    lines = [line for path in (tmp_path / "corpus").iterdir() for line in path.read_text().splitlines()]
    assert len(lines) == documents and 2_000_000 <= size < 2_100_001
    assert sum(len(json.loads(line)["text"].encode()) for line in lines) == size
