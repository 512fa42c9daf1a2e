"""Faulty records stop a preparation by their share of the records, of the bytes and of the files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_coca.commands import prepare as command
from megatron_coca.data import DataError, SourceSpec, load_tokenizer
from megatron_coca.data.preparation.manifest import read_manifest
from megatron_coca.data.preparation.preparation_plan import CorpusSource, Execution, Rules
from megatron_coca.data.preparation.run import prepare

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 914313\n"
TEXT = "a line of text " * 20


def prepared(folder: Path, max_faulty: float = 0.1, **spec: Any) -> dict[str, Any]:
    """Prepare the files in a folder. Return the facts about the source."""
    source = CorpusSource(SourceSpec("s", [folder], **spec), max_faulty=max_faulty)
    tokenizer = load_tokenizer("CharLevelTokenizer")
    path = prepare([source], folder.with_name("out"), tokenizer, Rules(0, 0), Execution(progress=False))
    return read_manifest(path)["inputs"][0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with 200 records in one file."""
    made = tmp_path / "in"
    made.mkdir()
    made.joinpath("a.jsonl").write_text("".join(json.dumps({"text": f"{i} {TEXT}"}) + "\n" for i in range(200)))
    return made


def test_files_without_a_record_are_faults(folder: Path) -> None:
    """A JSON array is one line, so a file of any size is only one faulty record."""
    for number in range(2):
        (folder / f"b{number}.json").write_text(json.dumps([{"text": "b"}] * 30))
    with pytest.raises(DataError, match=r"s: 2 of 3 files .*b0\.json:1: not JSON lines.*jq"):
        prepared(folder)
    facts = prepared(folder, max_faulty=0.7)
    assert facts["files_lost"] == 2 and facts["written"] == 200


@pytest.mark.parametrize(
    ("name", "content", "remedy"),
    [
        ("a.jsonl", json.dumps({"text": TEXT}).encode() * 30, "Extra data.*one JSON object per line"),
        ("a.json", json.dumps([{"text": TEXT}] * 30, indent=2).encode(), "a.json:1: not JSON lines.*as jq -c"),
        ("a.jsonl", f"{{'text': '{TEXT}'}}\n".encode() * 30, "one JSON object per line, as json.dumps"),
        (
            "a.jsonl",
            (json.dumps({"text": TEXT}) + "\n").encode("utf-16") * 30,
            "binary data.*iconv -f UTF-16LE -t UTF-8",
        ),
    ],
)
def test_the_remedy_is_that_of_the_cause(name: str, content: bytes, remedy: str, folder: Path) -> None:
    (folder / "a.jsonl").unlink()
    (folder / name).write_bytes(content)
    with pytest.raises(DataError, match=remedy):
        prepared(folder)


def test_shares_are_also_counted_in_bytes(folder: Path) -> None:
    with (folder / "a.jsonl").open("a") as stream:
        for _ in range(3):
            stream.write("{" + "x" * 100_000 + "\n")
    with pytest.raises(DataError, match=r"s: 300,0.. of 3..,... bytes are in faulty records.*invalid JSON"):
        prepared(folder)
    facts = prepared(folder, max_faulty=0.9)
    assert facts["problems"] == {"invalid JSON": 3} and facts["files_lost"] == 0


def test_the_size_of_a_record_that_is_too_long_counts(folder: Path) -> None:
    (folder / "b.txt").write_text("x" * (1 << 20) + "y")
    with pytest.raises(DataError, match=r"1,048,577 of .* bytes .*record too long"):
        prepared(folder, max_record_mib=1)


def test_few_small_faults_are_skipped(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (folder / "a.jsonl").open("a") as stream:
        stream.write("{broken\n" * 10 + '{"text": null}\n' * 100)
    given = ["--input", f"s={folder}", "--tokenizer-type", "CharLevelTokenizer", "--workers", "0"]
    assert command.main([*given, "--output", str(folder.with_name("out"))]) == 0
    printed = capsys.readouterr().out
    assert "s faulty, skipped: 10 x invalid JSON" in printed and "s faulty, skipped: 100 x empty text" in printed
    assert "FAULTY" not in printed and "Train with" in printed


@pytest.mark.parametrize("name", ["b.jsonl", "b.txt", "b.parquet"])
def test_a_pointer_of_git_lfs_is_an_error(folder: Path, name: str) -> None:
    (folder / name).write_text(POINTER)
    with pytest.raises(DataError, match=rf"{name}: .*Git LFS.*`git lfs pull`"):
        prepared(folder)


def test_a_file_with_a_usable_record_in_a_later_part_is_not_lost(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl").write_text("{broken\n" * 150_000 + json.dumps({"text": TEXT}) + "\n")
    assert prepared(folder, max_faulty=1.0)["files_lost"] == 0


def test_faulty_chats_are_named_by_file_and_line(tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    asked = {"role": "user", "content": "hello"}
    refused = json.dumps({"messages": [{"role": "critic", "content": "no"}]})
    chats.write_text((json.dumps({"messages": [asked]}) + "\n") * 5 + refused + "\n")
    (tmp_path / "chat.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'critic' %}{{ raise_exception('no') }}{% endif %}{{ m.content }}"
        "{% endfor %}"
    )
    given = ["--input", f"s={chats}", "--tokenizer-type", "CharLevelTokenizer", "--workers", "0", "--messages", "all"]
    command.main([*given, "--chat-template", str(tmp_path / "chat.jinja"), "--output", str(tmp_path / "out")])
    (facts,) = read_manifest(tmp_path / "out" / "manifest.json")["inputs"]
    (line,) = facts["problems_named"]
    assert line.startswith(f"{chats}:6: chat that cannot be rendered (") and "(no)" in line


def test_books_with_float_keys_stay_in_one_split(tmp_path: Path) -> None:
    """pandas turns whole numbers into floats in a column with a missing value."""
    splits = []
    for name, convert in (("whole", int), ("float", float)):
        (tmp_path / name).mkdir()
        rows = [{"text": f"page {i} {TEXT}", "book": convert(i // 10)} for i in range(200)]
        (tmp_path / name / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = CorpusSource(SourceSpec("s", [tmp_path / name], fields={"key": "book"}))
        rules = replace(Rules(), valid_fraction=0.3, test_fraction=0.3)
        tokenizer = load_tokenizer("CharLevelTokenizer")
        path = prepare([source], tmp_path / f"out_{name}", tokenizer, rules, Execution(progress=False))
        (entry,) = read_manifest(path)["sources"]
        splits.append([entry[split]["sha256"] for split in ("train", "valid", "test")])
    assert splits[0] == splits[1] and None not in splits[0]
