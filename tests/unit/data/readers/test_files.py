"""FileReader: formats, faults and their places, units and chunks."""

import bz2
import gzip
import io
import json
import os
import pickle
import tarfile
from pathlib import Path

import pytest
import zstandard

from megatron_coca.data import DataError, ReadingProblems, SourceSpec, read_documents
from megatron_coca.data.readers import open_reader
from megatron_coca.data.readers.files import FileReader
from megatron_coca.data.readers.source import Document, content_key


def read(spec: SourceSpec, block: int = 1 << 20) -> tuple[list[Document], ReadingProblems]:
    reader, problems = FileReader(spec, block), ReadingProblems()
    chunks = [chunk for unit in reader.units() for chunk in reader.chunks(unit)]
    return [document for chunk in chunks for document in reader.documents(chunk, problems)], problems


def texts(spec: SourceSpec) -> list[str]:
    return [document.text for document in read(spec)[0]]


@pytest.mark.parametrize(
    "suffix", [".jsonl", ".json", ".ndjson", ".JSONL", ".jsonl.gz", ".zst", ".00.jsonl.zst", ".json.bz2"]
)
def test_json_lines_are_read_in_order_whatever_the_name(tmp_path: Path, suffix: str) -> None:
    texts = [f"text {i}\u2028of\x85a\u2029page" for i in range(50)]  # breaks of lines in Unicode, but not in JSON Lines
    lines = "\ufeff" + "".join(json.dumps({"text": text}, ensure_ascii=False) + "\r\n\n" for text in texts)
    compress = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress, ".bz2": bz2.compress}
    path = tmp_path / f"corpus{suffix}"
    path.write_bytes(compress.get(path.suffix, bytes)(lines.encode()))
    assert [d.text for d in read_documents(path)] == texts


def test_other_fields_of_json_lines_may_have_any_form(tmp_path: Path) -> None:
    """Libraries that infer one type for each column stop at such rows."""
    schema = "### Describe the bug ,action: string, datetime: timestamp[s], author: string, version: 1.3.4"
    others = [None, "2020-01-01T00:00:00", {"a": None}, {"a": "b", "c": [{}]}, [], 1.5, True]
    rows = [{"meta": other, "text": f"{schema} {number}"} for number, other in enumerate(others)]
    lines = [json.dumps(row) for row in [*rows, {"text": "alone"}]] + ['{"text": "not finite", "score": -Infinity}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    expected = [row["text"] for row in rows] + ["alone", "not finite"]
    assert [document.text for document in read_documents(tmp_path / "a.jsonl")] == expected


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-16"])
def test_utf_16_is_a_fault(encoding: str, name: str, tmp_path: Path) -> None:
    """Without a byte order mark, English text in UTF-16 is valid UTF-8 with a zero after every letter."""
    (tmp_path / name).write_bytes((json.dumps({"text": "The sea was calm."}) + "\n").encode(encoding))
    problems = ReadingProblems()
    assert not list(read_documents(tmp_path / name, problems=problems))
    assert set(problems.counts) == {"binary data"}


def test_every_unusable_record_is_counted_and_named(tmp_path: Path) -> None:
    bad = [
        b"{not json",
        b'{"text": "\xff"}',
        b'{"other": "x"}',
        b'{"text": "  "}',
        b'{"text": 3}',
        b"[1]",
        b'{"text": "\\ud800"}',
        b'{"text": "x", "key": "\\ud800"}',
        b'{"text": "x", "n": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
    ]
    path = tmp_path / "c.jsonl"
    path.write_bytes(b"\n".join([b'{"text": "first"}', *bad, b'{"text": "last"}']))
    problems = ReadingProblems()
    assert [d.text for d in read_documents(path, problems=problems)] == ["first", "last"]
    kinds = [
        "invalid JSON",
        "invalid UTF-8",
        "missing field",
        "empty text",
        "text is not a string",
        "not a JSON object",
        "invalid Unicode",
    ]
    assert list(problems.counts) == kinds and problems.total == len(bad)
    starts = [line.startswith(f"{path}:{number}: ") for number, line in enumerate(problems.named, start=2)]
    assert starts == [True] * len(bad)
    with pytest.raises(DataError, match=r"c\.jsonl:2: invalid JSON"):
        list(read_documents(path, problems=ReadingProblems(strict=True)))
    with pytest.raises(DataError, match="invalid JSON"):
        list(read_documents(path))


@pytest.mark.parametrize(
    "content", [json.dumps([{"text": "x"}]), json.dumps([{"text": "x"}], indent=1), json.dumps({"text": "x"}, indent=1)]
)
def test_other_json_is_reported_as_not_json_lines(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(DataError, match=r"a\.json:1: not JSON lines .*one object per line"):
        list(read_documents(path))


@pytest.mark.parametrize(
    ("documents", "content", "expected"),
    [
        ("file", "\ufeffone\n\n two\r\n", {"": "one\n\n two\r\n"}),
        (
            "line",
            "\ufeffone \r\n\r\n \t\ntwo\u2028two\x85\n\nthree",
            {":1": "one ", ":4": "two\u2028two\x85", ":6": "three"},
        ),
    ],
)
@pytest.mark.parametrize(("suffix", "block"), [(".txt", 1), (".text", 3), (".md", 1 << 20)])
def test_a_text_is_one_document_or_lines(
    tmp_path: Path, documents, content: str, expected: dict[str, str], suffix: str, block: int
) -> None:
    path = tmp_path / f"book{suffix}"
    path.write_bytes(content.encode())
    spec = SourceSpec("s", [path], documents=documents)
    assert [d.text for d in read(spec, block)[0]] == list(expected.values())
    path.write_bytes(content.encode().replace(b"o", b"\xff"))
    _, problems = read(spec, block)
    places = [line.partition(": ")[0] for line in problems.named]
    assert places == [f"{path}{at}" for at, text in expected.items() if "o" in text]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.jsonl", None, "no such file"),
        ("a.csv", b"a,b", r"unsupported file type \(.csv\); .*parquet, .* pandas"),
        ("a.zip", b"PK", r"unsupported file type \(.zip\); unpack the archive"),
        ("a.pdf", b"%PDF", r"unsupported file type \(.pdf\); .* to .txt"),
        ("a.parquet.gz", b"", "unknown file type"),
        ("enwiki-pages-articles1.xml-p1p41242.bz2", b"", "WikiExtractor --json"),
        ("jsonl", b"", r"unknown file type \(no known ending\)"),
        ("a.csv.gz", gzip.compress(b"a,b", mtime=0), r"unsupported file type \(\.csv\.gz\)"),
        ("a.html.zst", b"", r"unsupported file type \(\.html\.zst\)"),
        ("corpus.v2.zst", b"", r"\(\.v2\.zst\).*: corpus\.v2\.jsonl\.zst"),
        ("corpus.00.bz2", b"", r": corpus\.00\.jsonl\.bz2"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 500, mtime=0)[:-9], "read to its end"),
        ("a.jsonl.zst", b"not zstd at all", "the zstd data is damaged"),
    ],
)
def test_files_that_cannot_be_read_are_errors(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        list(read_documents(path, problems=ReadingProblems()))
    assert name in str(caught.value)


def test_a_file_without_permission_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("{}")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)  # the tests may run as root, which may read everything
    with pytest.raises(DataError, match=r"a\.jsonl: cannot be opened .*Permission denied"):
        list(read_documents(path))


def test_empty_files_and_empty_text(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.txt", "c.tar.gz"):
        (tmp_path / name).write_bytes(b"")
    assert read(SourceSpec("s", [tmp_path / "a.jsonl"])) == ([], ReadingProblems())
    assert read(SourceSpec("s", [tmp_path / "b.txt"]))[1].counts == {"empty text": 1}
    with pytest.raises(DataError, match=r"c\.tar\.gz"):
        read(SourceSpec("s", [tmp_path / "c.tar.gz"]))


def test_units_tell_size_and_change(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}\n')
    reader = FileReader(SourceSpec("s", [tmp_path]))
    (before,) = reader.units()
    assert (before.path, before.size) == (str(path), 14)
    os.utime(path, ns=(1, 1))
    assert reader.units()[0].stamp != before.stamp
    with pytest.raises(DataError, match=r"a\.jsonl: is listed twice in s"):
        FileReader(SourceSpec("s", [tmp_path, path])).units()


def test_reader_and_chunks_can_be_sent_to_another_process(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"text {i}"}) + "\n" for i in range(100)))
    reader = FileReader(SourceSpec("s", [path]), block=200)
    chunks = list(reader.chunks(reader.units()[0]))
    assert len(chunks) > 5 and [chunk.first for chunk in chunks[:2]] == [
        1,
        1 + chunks[0].payload[0].chunk.payload.count(b"\n"),
    ]
    there, received = pickle.loads(pickle.dumps((reader, chunks)))
    assert received == chunks == list(there.chunks(there.units()[0]))
    found = [document.text for chunk in received for document in there.documents(chunk, ReadingProblems())]
    assert found == [f"text {i}" for i in range(100)]


def test_small_files_of_an_archive_share_a_chunk(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for i in range(500):
            header, content = tarfile.TarInfo(f"{i}.txt"), f"book {i}".encode()
            header.size = len(content)
            archive.addfile(header, io.BytesIO(content))
    reader = FileReader(SourceSpec("s", [tmp_path / "a.tar"]))
    assert len([chunk for chunk in reader.chunks(reader.units()[0]) if chunk.payload]) == 1
    assert texts(reader.spec) == [f"book {i}" for i in range(500)]


def test_the_reader_is_chosen_by_name(tmp_path: Path) -> None:
    assert isinstance(open_reader(SourceSpec("s", [tmp_path])), FileReader)
    with pytest.raises(
        DataError, match=r"s: unknown reader 'pile'; supported readers: files, repositories, huggingface"
    ):
        open_reader(SourceSpec("s", [tmp_path], reader="pile"))
    with pytest.raises(DataError, match="s: documents: .*file, line, not 'page'"):
        open_reader(SourceSpec("s", [tmp_path], documents="page"))  # type: ignore[arg-type]


def test_equal_texts_share_a_key(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("same")
    (tmp_path / "b.jsonl").write_text('{"text": "same"}\n')
    documents, _ = read(SourceSpec("s", [tmp_path]))
    assert [d.key for d in documents] == [content_key("same")] * 2
