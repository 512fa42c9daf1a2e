"""Streams cut into pieces: every record once for any block size, and long records reported."""

import io
import json
import random
from pathlib import Path

import pytest

from megatron_coca.data.errors import DataError
from megatron_coca.data.readers import streams
from megatron_coca.data.readers.files import FileReader
from megatron_coca.data.readers.source import ReadingProblems, SourceSpec
from megatron_coca.data.readers.streams import TooLong, pieces
from tests.unit.data.readers.compressed_files import COMPRESS, LINES, tar


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 1000])
def test_pieces_end_with_lines_and_lose_nothing(size: int) -> None:
    alphabet = [b"a", b"\n", b"\r\n", b"bc" * 5]
    content = b"".join(random.Random(size).choices(alphabet, k=2000))
    for step in (1, size, 3 * size):
        blocks = [content[i : i + step] for i in range(0, len(content), step)]
        found = list(pieces(blocks, True, size, 1 << 20))
        assert b"".join(found) == content
        assert all(piece.endswith(b"\n") for piece in found[:-1])
        assert len(found) > 1


def test_a_long_record_is_buffered() -> None:
    blocks = [b"a\n", b"b" * 10, *[b"c" * 10] * 20, b"\nd\n", b"e"]
    assert list(pieces(blocks, True, 10, 1 << 20)) == [b"a\n", b"b" * 10 + b"c" * 200 + b"\nd\n", b"e"]


@pytest.mark.parametrize("lines", [True, False])
@pytest.mark.parametrize("limit", [12, 40])
@pytest.mark.parametrize("ended", [True, False])
def test_records_over_the_limit_are_given_as_their_length(lines: bool, limit: int, ended: bool) -> None:
    records = [b"x" * length + b"\n" for length in (3, 50, 4, 5, 33, 120, 2, 41)]
    records[-1] = records[-1] if ended else records[-1].removesuffix(b"\n")
    records = records if lines else [b"".join(records)]
    content = b"".join(records)
    wanted = [TooLong(len(record)) if len(record) > limit else record for record in records]
    for step in (1, 3, 7, 30, 1000):
        for size in (1, 10, 25):
            blocks = [content[i : i + step] for i in range(0, len(content), step)]
            found: list[bytes | TooLong] = []
            for piece in pieces(blocks, lines, size, limit):
                found += [piece] if isinstance(piece, TooLong) or not lines else piece.splitlines(keepends=True)
            assert found == wanted


def test_a_record_without_end_is_not_held() -> None:
    assert list(pieces((b"x" * 10 for _ in range(10_000)), True, 10, 100)) == [TooLong(100_000)]


@pytest.mark.parametrize("block", [1000, 1 << 20])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_record_that_is_too_long_is_skipped_counted_and_named(tmp_path: Path, suffix: str, block: int) -> None:
    long = json.dumps({"text": "x" * (1 << 20)}).encode()
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(
        COMPRESS.get(suffix, bytes)(b"\n".join([b'{"text": "a"}', long, b"{broken", b'{"text": "b"}', long]))
    )
    reader, problems = FileReader(SourceSpec("s", [path], max_record_mib=1), block), ReadingProblems()
    documents = [d.text for chunk in reader.chunks(reader.units()[0]) for d in reader.documents(chunk, problems)]
    assert documents == ["a", "b"] and problems.counts == {"record too long": 2, "invalid JSON": 1}
    length = f"{len(long) + 1:,} bytes, more than max_record_mib: 1"
    assert problems.named[0].startswith(f"{path}:2: record too long ({length}")
    assert [line.split(" ")[0] for line in problems.named] == [f"{path}:{number}:" for number in (2, 3, 5)]
    strict = FileReader(SourceSpec("s", [path], max_record_mib=1), block)
    with pytest.raises(DataError, match=r":2: record too long"):
        [list(strict.documents(chunk, ReadingProblems(strict=True))) for chunk in strict.chunks(strict.units()[0])]


def test_a_text_file_that_is_too_long_is_named_without_a_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("line\n" * 300_000)
    (tmp_path / "b.txt").write_text("book")
    problems, found = ReadingProblems(), []
    reader = FileReader(SourceSpec("s", [tmp_path], max_record_mib=1))
    for unit in reader.units():
        found += [d.text for chunk in reader.chunks(unit) for d in reader.documents(chunk, problems)]
    assert found == ["book"] and problems.named[0].startswith(f"{tmp_path / 'a.txt'}: record too long (1,500,000 bytes")


def test_a_failing_disk_is_an_error() -> None:
    class Failing(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise OSError(5, "Input/output error")

    with pytest.raises(DataError, match=r"a\.jsonl: cannot be read.*Input/output"):
        list(streams.raw_blocks("a.jsonl", Failing(b"one\n"), 3))


@pytest.mark.parametrize("name", ["a.jsonl", "b.tar", "b.tar.gz", "a.jsonl.zst", "b.tar.bz2", "a.jsonl.xz"])
def test_documents_do_not_depend_on_the_blocks(tmp_path: Path, name: str) -> None:
    rng = random.Random(1)
    records = [
        b"{broken",
        b"\xef\xbb\xbf" + LINES.splitlines()[0],  # a byte order mark that does not begin the file
        b'{"text": "\xff"}',
        b"",
        b"  ",
        *LINES.splitlines()[:40],
        b'{"text": "' + b"x" * 900 + b'"}',
    ]
    lines = b"\n".join([*records, *rng.choices(records, k=40)])
    files = {"a.jsonl": lines, "b.txt": b"a book", "c.txt": b"", "d.jpg": b"", "e.jsonl": lines}
    path, results = tmp_path / name, []
    path.write_bytes(COMPRESS.get(path.suffix, bytes)(tar(files) if "tar" in name else lines))
    for block in (1, 7, 1000, 1 << 20):
        reader, problems = FileReader(SourceSpec("s", [path]), block), ReadingProblems()
        (unit,) = reader.units()
        chunks = list(reader.chunks(unit))
        assert sum(chunk.read for chunk in chunks) == unit.size == path.stat().st_size
        documents = [document for chunk in chunks for document in reader.documents(chunk, problems)]
        results.append((documents, problems, problems.lost_files))
    assert all(result == results[0] for result in results) and len(results[0][0]) > 20
