"""Scores that a task of the harness did not measure, which it gives as -1: in results and in tables."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_coca.evaluation.report.document import csv_table
from megatron_coca.evaluation.tasks.lm_eval.measure import task_scores
from megatron_coca.evaluation.tasks.lm_eval.samples import log_samples
from megatron_coca.evaluation.tasks.lm_eval.task import HarnessResult
from megatron_coca.evaluation.tasks.retrieval.task import PasskeyResult
from tests.unit.evaluation.report_cases import harness, passkey, sections_of, write


def results(samples: dict[str, dict[str, list[Any]]], values: dict[str, dict[str, float]]) -> dict[str, Any]:
    """The results of the harness for a group "all" of tasks with the values of their samples by metric."""
    rows = {
        task: [
            {"doc_id": number, "doc_hash": "d", "prompt_hash": "p", **dict(zip(metrics, each, strict=True))}
            for number, each in enumerate(zip(*metrics.values(), strict=True))
        ]
        for task, metrics in samples.items()
    }
    found = {name: {f"{metric},none": value for metric, value in each.items()} for name, each in values.items()}
    found |= {name: each | {"4096_stderr,none": "N/A", "mcc_stderr,none": 0.1} for name, each in found.items()}
    empty: dict[str, Any] = {name: {} for name in ("versions", "n-shot", "higher_is_better")}
    counts = {task: {"effective": len(each)} for task, each in rows.items()}
    return empty | {"results": found, "samples": rows, "n-samples": counts, "group_subtasks": {"all": [*samples]}}


NOTHING = [-1.0, -1.0]
GIVEN = results(
    {
        "one": {"4096": NOTHING, "8192": [0.0, 1.0], "mcc": [(0, 1), (1, 0)], "odd": NOTHING},
        "two": {"4096": [1.0, 1.0], "8192": [0.0, -1.0], "mcc": [(0, 1), (1, 0)], "odd": [-1.0, 0.5]},
    },
    {
        "one": {"4096": -1, "8192": 0.5, "mcc": -1.0, "odd": -1.0},
        "two": {"4096": 1.0, "8192": 0.0, "mcc": -1.0, "odd": -0.25},
        "all": {"4096": 0.0, "8192": 0.25, "mcc": -1.0, "odd": -0.625},
    },
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("one", {"4096": None, "8192": 0.5, "mcc": -1.0, "odd": None}),
        ("two", {"4096": 1.0, "8192": 0.0, "mcc": -1.0, "odd": -0.25}),
        ("all", {"4096": None, "8192": 0.25, "mcc": -1.0, "odd": None}),
    ],
)
def test_a_score_without_samples_has_no_value(name: str, expected: dict[str, float | None]) -> None:
    """Nor has a mean of which a part is missing; a correlation may be -1."""
    cell = task_scores(name, GIVEN, "", "", {"one": {0}, "two": {0, 1}}, {})
    assert {score.metric: score.value for score in cell.scores} == expected
    assert (cell.samples, cell.cut) == {"one": (2, 1), "two": (2, 2), "all": (4, 3)}[name]


def test_tables_show_scores_that_were_not_measured_and_cut_prompts(tmp_path: Path) -> None:
    result = harness("RoFormer", 0.0)
    content = json.loads(result.model_dump_json())
    copa, boolq, _ = content["results"]
    boolq["scores"][0] |= {"metric": "4096", "value": None}
    copa |= {"cut": 100}
    found = HarnessResult.model_validate(content)
    sections = sections_of(write(tmp_path, {"one": found}), papers=False)
    (table,) = (table for section in sections for block in section.blocks for table in block.tables)
    cells = dict(zip(table.header[1:], table.rows[0].cells, strict=True))
    assert cells["boolq 4096"].text == "not measured" and cells["boolq 4096"].value is None
    assert cells["copa acc"].in_full == "0.000 ± 0.020, 100 of 100 prompts cut"
    assert "lost their beginning" in cells["copa acc"].note
    assert "answers cut" not in csv_table(table)
    assert "not measured" in csv_table(table) and "-1" not in csv_table(table) and "prompts cut" in csv_table(table)


def test_tables_and_samples_tell_answers_that_had_not_ended(tmp_path: Path) -> None:
    """Of chats: the answer may be wrong because it was cut."""
    content = json.loads(harness("RoFormer", 0.0).model_dump_json())
    copa, _, _ = content["results"]
    copa |= {"unfinished": 7}
    content["protocol"]["chat"] = {"template_sha256": "0"}
    for with_chat in (True, False):
        if not with_chat:
            content["protocol"]["chat"] = None
        found = HarnessResult.model_validate(content)
        sections = sections_of(write(tmp_path / str(with_chat), {"one": found}), papers=False)
        (table,) = (table for section in sections for block in section.blocks for table in block.tables)
        cell = dict(zip(table.header[1:], table.rows[0].cells, strict=True))["copa acc"]
        assert ("7 of 100 answers cut" in cell.in_full) == ("had not ended after the task's" in cell.note) == with_chat
    row = {"filter": "none", "arguments": [("a", {})], "target": "x", "resps": [["y"]], "filtered_resps": ["y"]}
    samples = {"t": [row | {"doc_id": number} for number in range(3)]}
    log_samples(tmp_path / "r.json", samples, {"t": {0}}, {"t": {1}})
    lines = (tmp_path / "r.samples" / "t.jsonl").read_text().splitlines()
    marks = [(line["cut"], line["unfinished"]) for line in map(json.loads, lines)]
    assert marks == [(True, False), (False, True), (False, False)]


def test_a_report_counts_answers_of_retrieval_that_had_not_ended(tmp_path: Path) -> None:
    content = json.loads(passkey("RoFormer", {512: 1.0, 1024: 0.5}).model_dump_json())
    case = {"number": 0, "tokens": 9, "facts": [], "expected": ["1"], "answer": "I think"}
    for entry in content["results"]:
        entry["cases"] = [
            case | {"score": score, "unfinished": cut} for score, cut in ((1, True), (0, True), (0, False))
        ]
    content["protocol"]["chat"] = {"template_sha256": "0"}
    for with_chat in (True, False):
        if not with_chat:
            content["protocol"]["chat"] = None
        sections = sections_of(
            write(tmp_path / str(with_chat), {"one": PasskeyResult.model_validate(content)}), papers=False
        )
        text = [line for section in sections for block in section.blocks for line in block.text]
        told = "after 64 tokens: RoFormer: 4 of 6, of which 2 are wrong."
        assert any(line.endswith(told) for line in text) == with_chat
