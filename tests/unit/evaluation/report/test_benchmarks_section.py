"""The tables of published benchmarks: their layout, means, and published rows."""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

import pytest

from megatron_coca.evaluation.report.document import ReportBlock, Table
from megatron_coca.evaluation.report.published import TABLES
from megatron_coca.evaluation.results import Result
from megatron_coca.evaluation.tasks.lm_eval import benchmarks
from tests.unit.evaluation.report_cases import benchmark, sections_of, write

RULER = {task: 0.1 * number for number, task in enumerate(benchmarks.RULER_TASKS, 1)}
ENGLISH = {f"longbench_{task}": 0.2 for tasks in benchmarks.LONGBENCH_ENGLISH.values() for task in tasks}


def blocks(folder: Path, results: dict[str, Result]) -> tuple[ReportBlock, ...]:
    (section,) = [each for each in sections_of(write(folder, results)) if each.name == "benchmarks"]
    return section.blocks


def rows(table: Table) -> dict[str, list[str]]:
    return {row.name: [cell.text for cell in row.cells] for row in table.rows if not row.published}


def published(table: Table) -> dict[str, list[str]]:
    return {row.name: [cell.text for cell in row.cells] for row in table.rows if row.published}


def test_ruler_beside_published_rows(tmp_path: Path) -> None:
    """Files of several lengths are columns of one table; published rows have only these lengths."""
    results: dict[str, Result] = {
        str(length): benchmark("RoFormer", RULER, length, metadata={"max_seq_lengths": [length]})
        for length in (8192, 2048)
    }
    results["ALiBi"] = benchmark("ALiBi", dict(list(RULER.items())[:3]), 8192)
    (block,) = blocks(tmp_path, results)
    means, tasks = block.tables
    assert means.header == ("length in tokens", "2048", "8192")
    assert rows(means) == {"RoFormer": ["70.0", "70.0"]}, "ALiBi was measured on 3 of 13 tasks only"
    assert published(means)["Llama3.1 (8B)"] == ["", "93.8"] and "Llama2 (7B)" in published(means)
    assert rows(tasks)["niah_single_2: ALiBi"] == ["not run", "20.0"]
    assert rows(tasks)["niah_single_2: RoFormer"] == ["20.0", "20.0"]


@pytest.mark.parametrize("change", [{"limit": 5}, {"num_fewshot": 2}])
def test_another_protocol_has_no_published_rows(change: dict[str, int], tmp_path: Path) -> None:
    (block,) = blocks(tmp_path, {"a": benchmark("RoFormer", RULER, 8192, **change)})
    assert not published(block.tables[0])


def test_babilong_by_length(tmp_path: Path) -> None:
    tasks = {f"babilong_qa{number}": 0.1 * number for number in range(1, 6)}
    lengths: Mapping[str, dict[str, str]] = {
        "16k": {"max_seq_lengths": "16k"},
        "0k": {},
        "2k": {"max_seq_lengths": "2k"},
    }
    results: dict[str, Result] = {
        name: benchmark("RoFormer", tasks, None, "acc", metadata=metadata) for name, metadata in lengths.items()
    }
    (block,) = blocks(tmp_path, results)
    assert block.tables[0].header == ("length", "0k", "2k", "16k")
    assert rows(block.tables[0]) == {"RoFormer": ["30.0"] * 3}
    assert rows(block.tables[1])["qa2: RoFormer"] == ["20.0"] * 3


def test_longbench_by_category(tmp_path: Path) -> None:
    """An average needs all categories, and a category all of its tasks; the Chinese table has its own tasks."""
    tasks = {**ENGLISH, "longbench_qasper": 0.5, "longbench_dureader": 0.4, "longbench": 0.9}
    (block,) = blocks(tmp_path, {"a": benchmark("RoFormer", tasks, cut=7)})
    english, chinese, each = block.tables
    assert english.header == ("label", "Avg", *benchmarks.LONGBENCH_ENGLISH)
    assert rows(english) == {"RoFormer": ["21.7", "30.0", *["20.0"] * 5]}
    assert published(english)["Llama2-7B-chat-4k"] == ["31.0", "24.9", "22.6", "24.7", "60.0", "48.1", "5.9"]
    assert "cut" in english.rows[0].cells[1].detail and "21 of 300" in english.rows[0].cells[1].note
    assert rows(chinese)["RoFormer"][:3] == ["not run", "not run", "40.0"]
    assert rows(each)["qasper: RoFormer"] == ["50.0"]


def test_longbench_e_by_length(tmp_path: Path) -> None:
    (block,) = blocks(tmp_path, {"a": benchmark("RoFormer", {"longbench_lcc_e": 0.25}, "4-8k")})
    (table,) = block.tables
    assert table.header == ("task", "0-4k", "4-8k", "8k+")
    assert rows(table) == {"lcc_e: RoFormer": ["not run", "25.0", "not run"]}


def test_other_tasks_keep_their_table(tmp_path: Path) -> None:
    mixed = benchmark("RoFormer", {"longbench_lcc": 0.5, "copa": 0.6})
    sections = {section.name: section for section in sections_of(write(tmp_path, {"a": mixed}))}
    assert sections["short"].blocks[0].tables[0].header == ("label", "copa score")
    assert "benchmarks" in sections


def test_published_averages_are_those_of_their_rows() -> None:
    for table in (each for each in TABLES if each.metric.startswith("longbench")):
        for row in table.rows:
            average, *parts = map(float, row["values"].split())
            assert fmean(parts) == pytest.approx(average, abs=0.11), row["name"]
