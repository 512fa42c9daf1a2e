"""Records to documents: paths of fields, sets, keys, filters."""

import json
from collections.abc import Mapping
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from megatron_coca.data.errors import DataError
from megatron_coca.data.readers.fields import Fields
from megatron_coca.data.readers.source import Document, Filters, RawRecord, ReadingProblems, SourceSpec, content_key

PILE = [
    {"text": "a web page", "meta": {"pile_set_name": "Pile-CC"}},
    {"text": "a book", "meta": {"pile_set_name": "Books3"}},
    {"text": "", "meta": {"pile_set_name": "Pile-CC"}},
    {"text": "", "meta": {"pile_set_name": "Books3"}},
    {"text": "nameless", "meta": {}},
    {"text": "nameless as well"},
    {"text": "numbered", "meta": {"pile_set_name": 3}},
]


def documents(rows: list[Mapping[str, Any]], **spec: Any) -> tuple[list[Document], ReadingProblems]:
    problems = ReadingProblems()
    fields = Fields(SourceSpec("s", [Path("x")], **spec))
    records = (RawRecord(f"x:{i}", row, 1) for i, row in enumerate(rows, 1))
    return list(fields.documents(records, problems)), problems


def texts(rows: list[Mapping[str, Any]], **spec: Any) -> list[str]:
    return [document.text for document in documents(rows, **spec)[0]]


@pytest.mark.parametrize(
    ("path", "row"),
    [
        ("a", {"a": "it"}),
        ("a.b", {"a": {"b": "it"}}),
        ("a.b", {"a.b": "it", "a": {"b": "no"}}),
        ("a.b.c", {"a.b": {"c": "it"}}),
        ("a.b.c", {"a": {"b.c": "it", "b": {"c": "no"}}}),
        ("a.b.c", {"a": {"x": 1}, "a.b": {"c": "it"}}),
    ],
)
def test_dots_reach_into_records_and_names_with_dots_come_first(path: str, row: Mapping[str, Any]) -> None:
    assert texts([row], fields={"text": path}) == ["it"]
    assert documents([row], fields={"text": path + "z"})[1].counts == {"missing field": 1}


def test_unknown_fields_are_errors() -> None:
    with pytest.raises(DataError, match=r"s: unknown fields \['txt'\]; supported fields: text, key, set"):
        documents([], fields={"txt": "text"})


def test_sets_are_chosen_and_the_others_counted() -> None:
    found, problems = documents(PILE, sets=["Pile-CC"])
    assert found == [Document("a web page", content_key("a web page"), "Pile-CC")]
    assert problems.filtered == {"set not chosen": 3} and problems.counts == {"empty text": 1, "missing set": 2}
    assert "meta.pile_set_name" in problems.named[1]


def test_sets_divide_a_source() -> None:
    found, problems = documents(PILE, divide=True)
    assert [(d.text, d.part) for d in found] == [("a web page", "Pile-CC"), ("a book", "Books3"), ("numbered", "3")]
    assert problems.counts == {"empty text": 2, "missing set": 2} and not problems.filtered
    both, _ = documents([{"text": "x", "part": "B"}], divide=True, sets=["B"], fields={"set": "part"})
    assert [d.part for d in both] == ["B"]


def test_sets_are_ignored_by_default() -> None:
    found, _ = documents(PILE)
    assert len(found) == 5 and {d.part for d in found} == {""}


@pytest.mark.parametrize(
    ("row", "fields", "key"),
    [
        ({"key": "k", "repository": "r"}, {}, "k"),
        ({"key": 7}, {}, "7"),
        ({"key": "", "repo_name": "r"}, {}, "r"),
        ({"key": None, "max_stars_repo_name": "r"}, {}, "r"),
        ({"meta": {"url": "u"}, "key": "k"}, {"key": "meta.url"}, "u"),
        ({"key": 7.0}, {}, "7"),
        ({"key": 7.5}, {}, "7.5"),
        ({"key": float("nan")}, {}, content_key("t")),
        ({"key": Decimal("7.00")}, {}, "7"),
        ({"key": b"k"}, {}, "k"),
        ({"key": b"\xff\x01"}, {}, "ff01"),
        ({"key": date(2024, 1, 31)}, {}, "2024-01-31"),
        ({"key": datetime(2024, 1, 31, 9, 30)}, {}, "2024-01-31T09:30:00"),
        ({"key": UUID(int=7)}, {}, "00000000-0000-0000-0000-000000000007"),
        ({"origin": "o"}, {"repository": "origin"}, "o"),
        ({"key": ["k"]}, {}, content_key("t")),
    ],
)
def test_key_from_record_or_repository_or_text(row: dict[str, Any], fields: dict[str, str], key: str) -> None:
    (document,) = documents([{"text": "t"} | row], fields=fields)[0]
    assert document.key == key


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"key": "k"}, "missing key"),
        ({"url": None}, "missing key"),
        ({"url": ""}, "unusable key"),
        ({"url": float("nan")}, "unusable key"),
        ({"url": ["k"]}, "unusable key"),
    ],
)
def test_a_key_that_was_named_must_be_there(row: dict[str, Any], kind: str) -> None:
    assert documents([{"text": "t"} | row], fields={"key": "url"})[1].counts == {kind: 1}


@pytest.mark.parametrize(
    "row",
    [
        {"stars": 3, "language": "C"},
        {"max_stars_count": 3.0, "lang": "C"},
        {"stars": None, "stargazers_count": "3", "language": None, "lang": "C"},
    ],
)
def test_filters_know_the_names_of_the_stack(row: dict[str, Any]) -> None:
    row = {"text": "code"} | row
    assert texts([row], filters=Filters(min_stars=3, languages=("C",))) == ["code"]
    for other in (Filters(min_stars=4), Filters(languages=("C++",))):
        found, problems = documents([row], filters=other)
        assert not found and sum(problems.filtered.values()) == 1 and not problems.total


@pytest.mark.parametrize("stars", [None, float("nan"), float("inf"), "many", [1]])
def test_a_record_without_stars_is_left_out_where_they_count(stars: object) -> None:
    row = {"text": "code", "stars": stars}
    assert texts([row]) == ["code"]
    found, problems = documents([row], filters=Filters(min_stars=1))
    assert not found and sum(problems.filtered.values()) == 1


def test_bytes_are_text_and_surrogates_are_not() -> None:
    rows = [{"text": "h\u00e9".encode()}, {"text": b"\xff"}, json.loads('{"text": "\\ud83d"}'), {"text": None}]
    found, problems = documents(rows)
    assert [d.text for d in found] == ["h\u00e9"]
    assert problems.counts == {"invalid UTF-8": 1, "invalid Unicode": 1, "empty text": 1}


@pytest.mark.parametrize(
    ("spec", "columns"),
    [
        ({}, ["text", "key", "repo_name"]),
        ({"divide": True}, ["text", "key", "meta", "repo_name"]),
        ({"filters": Filters(min_stars=1)}, ["text", "key", "repo_name", "stars", "lang"]),
        ({"fields": {"text": "a.b"}}, ["key", "a", "repo_name"]),
    ],
)
def test_only_needed_columns_are_read(spec: dict[str, Any], columns: list[str]) -> None:
    names = ["text", "key", "meta", "a", "repo_name", "stars", "lang", "image"]
    assert Fields(SourceSpec("s", [], **spec)).columns(names, "t") == columns


def test_a_table_without_the_text_is_an_error() -> None:
    with pytest.raises(DataError, match=r"t: .*no column 'text', only \['content'\].*--text-field"):
        Fields(SourceSpec("s", [])).columns(["content"], "t")
