"""What WikiExtractor leaves: articles in tags, or JSON lines, in files without an ending."""

import bz2
import gzip
import json
import time
from pathlib import Path

import pytest

from megatron_coca.data.readers.files import FileReader
from megatron_coca.data.readers.source import Chunk, Document, ReadingProblems, SourceSpec
from megatron_coca.data.readers.wikipedia import extract_rows


def article(attributes: str, text: str) -> str:
    return f"<doc {attributes}>\n{text}\n</doc>\n"


ARTICLES = [
    article(
        'id="12" url="https://en.wikipedia.org/wiki?curid=12" title="Anarchism"', "Anarchism\n\nA &lt;b&gt; &amp;lt;."
    ),
    article('id="13" revid="9" url="u" title=""Weird Al" Yankovic"', "\nProse of Al.\n"),
    article('id="14" url="u" title="A &amp; B" language="en" revision="5"', "Zürich, 世界 &quot;x&quot;."),
]
FOUND = [
    Document("Anarchism\n\nA <b> &lt;.", "Anarchism"),
    Document("Prose of Al.", '"Weird Al" Yankovic'),
    Document('Zürich, 世界 "x".', "A & B"),
]


def read(path: Path, block: int = 1 << 20) -> tuple[list[Document], ReadingProblems]:
    reader, problems = FileReader(SourceSpec("w", [path]), block), ReadingProblems()
    chunks = [chunk for unit in reader.units() for chunk in reader.chunks(unit)]
    return [document for chunk in chunks for document in reader.documents(chunk, problems)], problems


@pytest.mark.parametrize(("suffix", "compress"), [("", bytes), (".bz2", bz2.compress), (".gz", gzip.compress)])
@pytest.mark.parametrize("block", [1, 60, 1 << 20])
def test_articles_are_read_from_folders(tmp_path: Path, suffix: str, compress, block: int) -> None:
    (tmp_path / "AA").mkdir()
    (tmp_path / "AB").mkdir()
    (tmp_path / "AA" / f"wiki_00{suffix}").write_bytes(compress(("\ufeff\n" + "".join(ARTICLES[:2])).encode()))
    (tmp_path / "AB" / f"wiki_00{suffix}").write_bytes(compress("".join(ARTICLES[2:]).encode()))
    assert read(tmp_path, block) == (FOUND, ReadingProblems())


@pytest.mark.parametrize("suffix", ["", ".bz2"])
@pytest.mark.parametrize("block", [1, 60, 1 << 20])
@pytest.mark.parametrize("start", ["", " \r\n", "\ufeff", "\ufeff\n"])
def test_json_lines_are_told_by_their_first_character(tmp_path: Path, suffix: str, block: int, start: str) -> None:
    path = tmp_path / f"wiki_07{suffix}"
    lines = "".join(json.dumps({"id": str(i), "title": f"T{i}", "text": f"text {i}"}) + "\n" for i in range(20)) + "{\n"
    path.write_bytes((bz2.compress if suffix else bytes)((start + lines).encode()))
    documents, problems = read(path, block)
    assert [document.text for document in documents] == [f"text {i}" for i in range(20)]
    assert [fault.partition(" invalid JSON")[0] for fault in problems.named] == [f"{path}:{start.count(chr(10)) + 21}:"]


@pytest.mark.parametrize(
    ("content", "faults", "found"),
    [
        (ARTICLES[0] + ARTICLES[1][:-8], [":2: invalid <doc> (it does not end)"], 1),
        (ARTICLES[0][:-7] + ARTICLES[1], [":1: invalid <doc> (it does not end)"], 1),
        ("what is this\n" + ARTICLES[1], [":1: invalid <doc> (text before it)"], 1),
        ("Anarchism\n</doc>\n" + ARTICLES[1], [":1: invalid <doc> (it does not begin)"], 1),
        (article('id="1" url="u"', "x") + ARTICLES[1], [":1: missing field (no title; the tag has ['id', 'url'])"], 1),
        ("neither of both\n", [":1: invalid <doc> (it does not end)"], 0),
        (ARTICLES[1].replace("Prose", "\udcff"), [":1: invalid UTF-8 (byte 61)"], 0),
    ],
)
def test_articles_that_are_not_whole_are_faults(tmp_path: Path, content: str, faults: list[str], found: int) -> None:
    path = tmp_path / "wiki_00"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    documents, problems = read(path)
    assert len(documents) == found and problems.named == [f"{path}{fault}" for fault in faults]


def test_articles_without_prose_are_left_out_and_empty_files_are_nothing(tmp_path: Path) -> None:
    path = tmp_path / "wiki_00"
    path.write_text(article('title="A"', "A\n") + article('title="B"', "") + ARTICLES[1])
    documents, problems = read(path)
    assert documents == FOUND[1:2] and problems == ReadingProblems(filtered=problems.filtered)
    assert problems.filtered == {"no prose": 2}
    path.write_text(" \n")
    assert read(path) == ([], ReadingProblems())


@pytest.mark.parametrize("unit", ["a", '"', 'a="', '" a', "a ", '" '])
def test_a_tag_is_read_in_linear_time(unit: str) -> None:
    def seconds(size: int) -> float:
        payload = article(f'title="A" x="{unit * (size // len(unit))}', "Prose.").encode()
        taken = []
        for _ in range(2):
            start = time.process_time()
            list(extract_rows(Chunk("wiki_00", 1, payload, 0), ReadingProblems()))
            taken.append(time.process_time() - start)
        return min(taken)

    assert seconds(64_000) < 24 * max(seconds(8000), 1e-4)  # linear: 8 times; quadratic: 64 times
