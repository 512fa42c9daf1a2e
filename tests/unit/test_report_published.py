"""The papers' numbers, and which of our measurements stand for the same method."""

from pathlib import Path
from typing import Any

import pytest
from report_cases import NTK, REROPE, lacking, passkey, perplexity, write

from megatron_coca.evaluation import PerplexityResult
from megatron_coca.evaluation.report.document import Line, Table
from megatron_coca.evaluation.report.published import TABLES, PublishedTable, Use, coca, rerope, use_of
from megatron_coca.evaluation.report.reading import read_results
from megatron_coca.evaluation.report.sections import build_sections

NOT_NUMBERS = {"OOM", "–"}


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_tables_are_whole(table: PublishedTable) -> None:
    assert table.source and table.setting and table.rows
    for row in table.rows:
        assert len(row.values) == len(table.columns), row.name
        if table.measured:
            assert all(value in NOT_NUMBERS or float(value) is not None for value in row.values)


@pytest.mark.parametrize(
    ("single", "table"), [(coca.PERPLEXITY, coca.STRICT_PERPLEXITY), (coca.RETRIEVAL, coca.STRICT_RETRIEVAL)]
)
def test_factor_4_of_table_3_is_the_dynamic_ntk_of_tables_1_and_2(
    single: PublishedTable, table: PublishedTable
) -> None:
    (row,) = [row for row in single.rows if row.use == coca.COCA_NTK]
    (same,) = [row for row in table.rows if row.use == coca.COCA_NTK]
    assert list(map(float, row.values)) == list(map(float, same.values))


def test_the_two_pages_on_rerope_agree_with_the_text() -> None:
    best = max(rerope.ACCURACY.rows, key=lambda row: float(row.values[1]))
    assert best.name == "ReRoPE-w128, log n" and best.values == ("49.40", "85.47", "48.87")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Use("rotary")),
        ({"checkpoint__pos_emb": "coca", "overrides": NTK}, Use("coca", "dynamic", 4.0)),
        ({"overrides": REROPE}, Use("rotary", positions="rerope", window=0.5)),
        (
            {
                "overrides": {
                    "relative_positions": {"type": "leaky_rerope", "window": 128, "leak": 16.0},
                    "logit_scaling": "log_n",
                }
            },
            Use("rotary", positions="leaky_rerope", window=0.25, leak=16.0, logits="log_n"),
        ),
        ({"overrides": {"rope_scaling": None, "rotary_emb_base": 5e5}}, Use("rotary")),
    ],
)
def test_use_of_a_result(changes: dict[str, Any], expected: Use) -> None:
    assert use_of(perplexity("one", {512: 2.0}, **changes)) == expected


@pytest.mark.parametrize(
    ("given", "covered"),
    [
        (Use("coca", "dynamic", 4.0), True),
        (Use("coca", "dynamic", 8.0), False),
        (Use("rotary", "dynamic", 4.0), False),
        (Use("coca"), False),
        (Use("coca", "dynamic", 4.0, logits="log_n"), False),
        (Use("coca", "dynamic", 4.0, positions="rerope", window=0.5), False),
    ],
)
def test_a_row_covers_its_own_method_alone(given: Use, covered: bool) -> None:
    assert coca.COCA_NTK.covers(given) == covered


def perplexity_tables(folder: Path, **changes: Any) -> list[Table]:
    files = write(folder, {"one": perplexity("ours", {512: 2.0}, **changes)})
    (section, *_) = build_sections(read_results(files), papers=True)
    return list(section.blocks[0].tables)


def named(lines: tuple[Line, ...], name: str) -> Line:
    return next(line for line in lines if line.name == name)


def test_the_same_training_length_stands_in_one_table(tmp_path: Path) -> None:
    (table,) = perplexity_tables(tmp_path, checkpoint__pos_emb="coca", overrides=NTK)
    assert table.header[1:] == ("512*", "1024", "2048", "4096", "8192", "16384", "32768")
    assert [entry.text for entry in table.lines[0].entries] == ["7.39", *["not run"] * 6]
    row = named(table.lines, "RoFormer + dynamic NTK & CoCA")
    assert [entry.text for entry in row.entries] == ["20.11", "20.81", "25.88", "34.16", "55.75", "89.31", "101.13"]
    assert row.published == "CoCA paper, arXiv:2309.08646v3, Table 1" and row.detail == "the method of: ours"
    assert not named(table.lines, "ALiBi").detail


@pytest.mark.parametrize(
    ("length", "overrides", "joined", "apart"),
    [
        (64, {}, [], ["Table 1"]),
        (2048, {}, ["Table 1 (LLaMA-7B)"], ["Table 1"]),
        (64, {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, [], ["Table 1", "Table 4 (perplexity)"]),
    ],
)
def test_other_training_lengths_stand_alone(
    tmp_path: Path, length: int, overrides: dict[str, Any], joined: list[str], apart: list[str]
) -> None:
    main, *others = perplexity_tables(tmp_path, length=length, overrides=overrides)
    assert list(dict.fromkeys(line.published.rpartition(", ")[2] for line in main.lines if line.published)) == joined
    assert [table.caption.rpartition(": ")[2] for table in others] == apart


REFUSED = {"environment__backend": None, "overrides": {"variant": "rope_scaling.rope_type=dynamic"}}


def refused(label: str, pos_emb: str = "rotary") -> PerplexityResult:
    missing = [lacking("all", "refused", "it means nothing")]
    return perplexity(label, {}, missing=missing, checkpoint__pos_emb=pos_emb, **REFUSED)


def test_a_refused_use_is_of_no_method(tmp_path: Path) -> None:
    results = {"one": perplexity("RoFormer", {512: 2.0}), "two": refused("RoFormer, refused")}
    assert use_of(results["two"]) is None
    sections = build_sections(read_results(write(tmp_path, results)), papers=True)
    lines = sections[0].blocks[0].tables[0].lines
    assert [line.name for line in lines if not line.published] == ["RoFormer", "RoFormer, refused"]
    assert {line.detail for line in lines if line.published} == {"", "the method of: RoFormer"}


def test_a_refused_use_asks_for_no_table_of_its_own(tmp_path: Path) -> None:
    trained = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    tables = perplexity_tables(tmp_path, results=[], checkpoint__trained_with=trained, **REFUSED)
    assert not [table for table in tables if "Table 4" in table.caption]
    measured = perplexity_tables(tmp_path / "measured", checkpoint__trained_with=trained)
    assert [table for table in measured if "Table 4" in table.caption]


def test_a_refused_strict_is_no_pair(tmp_path: Path) -> None:
    slack = perplexity("Slack", {512: 3.0}, checkpoint__pos_emb="coca")
    results = {"slack": slack, "strict": refused("Strict", "coca_strict")}
    sections = build_sections(read_results(write(tmp_path, results)), papers=True)
    assert "strict" not in [section.name for section in sections]


def test_strict_less_slack(tmp_path: Path) -> None:
    results = {
        "slack": perplexity("Slack", {512: 3.0, 1024: 3.5}, overrides=NTK, checkpoint__pos_emb="coca"),
        "strict": perplexity("Strict", {512: 3.1}, overrides=NTK, checkpoint__pos_emb="coca_strict"),
        "unlike": perplexity("Unlike", {512: 9.0}, checkpoint__pos_emb="coca_strict"),
        "passkey": passkey("CoCA", {512: 1.0}),
    }
    sections = build_sections(read_results(write(tmp_path, results)), papers=True)
    (block,) = next(section for section in sections if section.name == "strict").blocks
    (table,) = block.tables
    assert [line.name for line in table.lines[:2]] == ["Slack", "Strict: difference"]
    assert [entry.text for entry in table.lines[1].entries[:2]] == ["+2.11", ""]
    assert {line.published for line in table.lines[2:]} == {"CoCA paper, arXiv:2309.08646v3, Table 3 (perplexity)"}
