"""The papers' numbers, and how they stand beside ours."""

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from megatron_coca.evaluation.report.document import Table
from megatron_coca.evaluation.report.published import TABLES, PublishedTable, tables_of
from tests.unit.evaluation.report_cases import REROPE, harness, perplexity, sections_of, window, write

NOT_NUMBERS = {"OOM", "–"}
BY_NAME = {table.name: table for table in TABLES}
ACCURACY = BY_NAME["Next-token accuracy in percent"]


def values(table: PublishedTable, name: str) -> list[str]:
    return next(row["values"].split() for row in table.rows if row["name"] == name)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_tables_are_whole(table: PublishedTable) -> None:
    assert table.source and table.setting and table.rows
    for row in table.rows:
        found = row["values"].split()
        assert row.keys() == {"name", "values"} and len(found) == len(table.columns), row["name"]
        if table.measured:
            assert all(value in NOT_NUMBERS or float(value) is not None for value in found)


def test_factor_4_of_table_3_is_the_dynamic_ntk_of_tables_1_and_2() -> None:
    for table, metric in (("Table 1", "perplexity"), ("Table 2", "passkey")):
        one = values(BY_NAME[table], "RoFormer + dynamic NTK & CoCA")
        other = values(BY_NAME[f"Table 3 ({metric})"], "CoCA-Slack, dynamic NTK 4")
        assert list(map(float, one)) == list(map(float, other))


def test_the_pages_on_rerope_are_whole() -> None:
    """37 methods and HFWA, each once, with one model for each logit scaling."""
    names = [row["name"] for row in ACCURACY.rows]
    assert len(names) == len(set(names)) == 38
    for row in ACCURACY.rows[:-3]:
        assert row["values"].split()[0] == ("49.40" if row["name"].endswith("log n") else "49.41")
    best = max(ACCURACY.rows, key=lambda row: float(row["values"].split()[1]))
    assert best == {"name": "ReRoPE-w128, log n", "values": "49.40 85.47 48.87"}


def test_table_5_averages_its_four_groups() -> None:
    for row in BY_NAME["Table 5"].rows:
        *groups, average = map(float, row["values"].split())
        assert fmean(groups) == pytest.approx(average, abs=0.0051), row["name"]


def test_table_5_stands_below_the_scores(tmp_path: Path) -> None:
    sections = sections_of(write(tmp_path, {"one": harness("RoFormer", 0.5)}), papers=True)
    (block,) = next(section for section in sections if section.name == "short").blocks
    scores, table_5 = block.tables
    assert scores.header == ("label", "boolq acc", "copa acc", "wikitext word_perplexity", "afqmc", "mean of 2 tasks")
    assert table_5.caption.endswith("Table 5") and len(table_5.rows) == 4


def perplexity_tables(folder: Path, **changes: Any) -> list[Table]:
    files = write(folder, {"one": perplexity("ours", {512: 2.0}, **changes)})
    (section, *_) = sections_of(files, papers=True)
    return list(section.blocks[0].tables)


def test_the_same_training_length_stands_in_one_table(tmp_path: Path) -> None:
    table, apart = perplexity_tables(tmp_path)
    assert table.header[1:] == ("512*", "1024", "2048", "4096", "8192", "16384", "32768")
    assert [entry.text for entry in table.rows[0].cells] == ["7.39", *["not run"] * 6]
    row = next(line for line in table.rows if line.name == "RoFormer + dynamic NTK & CoCA")
    assert [entry.text for entry in row.cells] == ["20.11", "20.81", "25.88", "34.16", "55.75", "89.31", "101.13"]
    assert row.published == "CoCA paper, arXiv:2309.08646v3, Table 1"
    assert "Table 3" in apart.caption, "differences have a table of their own"


@pytest.mark.parametrize(
    ("length", "joined", "apart"),
    [
        (64, [], ["Table 1"]),
        (2048, ["Table 1 (LLaMA-7B)"], ["Table 1"]),
        (32768, ["Table 4 (perplexity)"], ["Table 1"]),
    ],
)
def test_other_training_lengths_have_tables_of_their_own(
    tmp_path: Path, length: int, joined: list[str], apart: list[str]
) -> None:
    main, *others = perplexity_tables(tmp_path, length=length)
    assert list(dict.fromkeys(line.published.rpartition(", ")[2] for line in main.rows if line.published)) == joined
    assert [table.caption.rpartition(": ")[2] for table in others] == apart
    assert [table.name for table in tables_of("perplexity", {length}) if not table.same_length] == ["Table 1"]


def test_the_pages_on_rerope_stand_below_a_map(tmp_path: Path) -> None:
    captions = [table.caption for table in perplexity_tables(tmp_path, overrides=REROPE)]
    assert any("Next-token accuracy in percent by window" in caption for caption in captions)
    assert sum("kexue.fm" in caption for caption in captions) == 2, "accuracy, and the loss of LLaMA-2-13B"


PROTOCOL = {"documents__count": 100, "documents__max_length": 32768, "documents__sources": ["data/PG19/test.jsonl"]}


@pytest.mark.parametrize(
    ("length", "changes", "shown"),
    [
        (512, PROTOCOL, ["Table 1"]),
        (512, PROTOCOL | {"protocol__stride": 256}, []),
        (512, PROTOCOL | {"documents__sources": ["books/test"]}, []),
        (512, {}, []),
        (64, PROTOCOL, []),
    ],
)
def test_published_rows_need_the_same_lengths_and_protocol(
    tmp_path: Path, length: int, changes: dict[str, Any], shown: list[str]
) -> None:
    count = changes.get("documents__count", 4)
    cells = [window(size, 2.0, documents=count) for size in (512, 1024)]
    ours = perplexity("ours", {}, results=cells, length=length, **changes)
    section = next(each for each in sections_of(write(tmp_path, {"one": ours})) if each.name == "perplexity")
    (table,) = section.blocks[0].tables
    assert list(dict.fromkeys(row.published.rpartition(", ")[2] for row in table.rows if row.published)) == shown
    assert [head.rstrip("*") for head in table.header[1:]] == ["512", "1024"], "no column that we did not measure"
