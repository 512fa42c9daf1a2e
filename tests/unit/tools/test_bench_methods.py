"""The benchmark of methods: every declared choice is in it, records are complete, ratios are of the work."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_coca import methods
from tools import bench_methods
from tools.bench_methods import FAMILIES, LAYERS, METHODS, main, memory_of, row, time_ratio
from tools.records import ChildProcess, compared


def test_every_map_extension_and_scaling_is_a_row() -> None:
    for key, plain in (("relative_positions", ""), ("rope_scaling", "default"), ("logit_scaling", "none")):
        assert set(methods.names(key, compute=None)) - {plain} <= METHODS.keys()
    assert {"fox", "cable", "fire", "alibi"} <= METHODS.keys()


def test_records_are_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """One line for each method, with what was asked for alone; a pattern of layers is compared with its family."""
    monkeypatch.setattr(bench_methods, "oracle_error", lambda keys, length: 1e-7)
    monkeypatch.setattr(bench_methods, "stock_error", lambda name: {"layers of gemma3": 2e-6}.get(name))
    measures = bench_methods.MEASURES | {"memory": lambda name, rounds: {"memory_bytes": 3 * 2**20}}
    monkeypatch.setattr(bench_methods, "MEASURES", measures)
    output = tmp_path / "new/methods.jsonl"
    chosen = ["rerope", "layers of gemma3"]
    assert main(["--only", *chosen, "--measure", "errors", "memory", "--output", str(output)]) == 0
    rerope, gemma = map(json.loads, output.read_text().splitlines())
    assert rerope["method"] == "rerope" and rerope["oracle_error"] == 1e-7 and rerope["memory_bytes"] == 3 * 2**20
    assert rerope["stock_error"] is None and "ratio" not in rerope and {"device", "threads", "versions"} <= gemma.keys()
    assert gemma["stock"] == "gemma3" and gemma["stock_error"] == 2e-6 and gemma["oracle_error"] is None
    assert main(["--only", "layers of gemma3", "--measure", "memory", "--output", str(tmp_path / "none")]) == 0
    assert not (tmp_path / "none").exists(), "a pattern of layers has no memory of one layer"
    rows = capsys.readouterr().out.splitlines()
    assert rows == ["| rerope | 1.0e-07 |  | 3 |  |  |", "| layers of gemma3 |  | 2.0e-06 |  |  |  |"]


def test_what_is_compared_with_transformers_exists() -> None:
    assert set(FAMILIES.values()) <= bench_methods.bench_families.FAMILIES.keys()
    assert not FAMILIES.keys() & LAYERS.keys()


def test_a_row_shows_all_figures() -> None:
    found = {"method": "x", "oracle_error": 2.5e-7, "stock_error": 1e-6, "memory_bytes": 2**21}
    assert row(found | {"ratio": 1.034, "launches": 37.0}) == "| x | 2.5e-07 | 1.0e-06 | 2 | 1.03 | 37 |"


def test_the_ratio_is_of_rounds_that_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(bench_methods, "stepper", lambda name: lambda: order.append(name))
    found = time_ratio("coca", 3)
    assert found["rounds"] == 3 and found["ratio_quartiles"][0] <= found["ratio"] <= found["ratio_quartiles"][2]
    assert order == ["rotary", "coca"] * 4
    assert compared([3.0, 30.0], [2.0, 20.0])["ratio"] == 1.5


@pytest.mark.slow
def test_a_step_and_its_memory_are_measured() -> None:
    bench_methods.stepper("dual_chunk")()
    assert ChildProcess(memory_of, "rotary")(4096) > 4096 * 256 * 4 * 3, "queries, keys and values at least"
