"""Compression, archives and cuts: every record once for any block size, and all damage reported."""

import bz2
import gzip
import io
import json
import lzma
import random
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from megatron_coca.data.errors import DataError
from megatron_coca.data.readers import read_documents, streams
from megatron_coca.data.readers.compression import COMPRESSIONS, decompressed, members
from megatron_coca.data.readers.files import FileReader
from megatron_coca.data.readers.source import ReadingProblems, SourceSpec
from megatron_coca.data.readers.streams import Cut, TooLong, pieces

Compress = Callable[[bytes], bytes]
COMPRESS: dict[str, Compress] = {
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor().compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}
TEXTS = [f"text {i} " + "".join(random.Random(i).choices("abcdefghijklmnop \u00e9\u4e16", k=200)) for i in range(300)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
SKIPPABLE = (0x184D2A50).to_bytes(4, "little") + (5).to_bytes(4, "little") + b"notes"


def tar(files: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, content in files.items():
            header = tarfile.TarInfo(name)
            header.size = len(content)
            archive.addfile(header, io.BytesIO(content))
    return stream.getvalue()


def texts_before_damage(path: Path) -> tuple[list[str], str]:
    """The texts that were read, and the error after them."""
    found: list[str] = []
    with pytest.raises(DataError) as caught:
        for document in read_documents(path, problems=ReadingProblems()):
            found.append(document.text)  # noqa: PERF401 - what was read before the error must stay
    return found, str(caught.value)


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize(("frames", "size"), [(1, 1 << 20), (2, 1), (7, 100)])
def test_all_frames_are_decompressed(suffix: str, frames: int, size: int) -> None:
    parts = [LINES[i * len(LINES) // frames : (i + 1) * len(LINES) // frames] for i in range(frames)]
    packed = b"".join(COMPRESS[suffix](part) for part in parts) + bytes(8)  # zeros at the end are padding
    fed = (packed[i : i + 1000] for i in range(0, len(packed), 1000))
    blocks = list(decompressed("x", fed, COMPRESSIONS[suffix], size))
    assert b"".join(blocks) == LINES and max(map(len, blocks)) <= size


def test_zstd_frames_to_skip_are_skipped(tmp_path: Path) -> None:
    compress = COMPRESS[".zst"]
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(SKIPPABLE + compress(LINES[:5000]) + SKIPPABLE + compress(LINES[5000:]) + SKIPPABLE)
    assert [document.text for document in read_documents(path)] == TEXTS


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("cut", [1, 20, 900])
def test_a_compressed_file_cut_off_is_an_error_after_what_comes_before(tmp_path: Path, suffix: str, cut: int) -> None:
    first, second = LINES[:20000], LINES[20000:]
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes((COMPRESS[suffix](first) + COMPRESS[suffix](second))[:-cut])
    found, message = texts_before_damage(path)
    assert found == TEXTS[: len(found)] and len(found) >= first.count(b"\n"), "incomplete lines are no records"
    assert str(path) in message and "read to its end" in message


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("damage", ["garbage behind", "flipped bits", "nothing"])
def test_damaged_data_is_an_error(tmp_path: Path, suffix: str, damage: str) -> None:
    packed = bytearray(COMPRESS[suffix](LINES))
    if damage == "garbage behind":
        packed += b"garbage that is no frame"
    elif damage == "flipped bits":
        packed[8:40] = bytes(byte ^ 0xFF for byte in packed[8:40])
    else:
        packed.clear()
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(packed)
    found, message = texts_before_damage(path)
    assert found == (TEXTS[: len(found)]) and str(path) in message


@pytest.mark.parametrize("suffix", ["", *COMPRESS])
def test_an_archive_streams_its_files_in_order(tmp_path: Path, suffix: str) -> None:
    files = {f"books/{i}.txt": text.encode() for i, text in enumerate(TEXTS[:100])}
    files |= {"lines.jsonl": LINES, "packed/lines.jsonl.gz": gzip.compress(LINES), "inner.tar": tar({"a.txt": b"deep"})}
    path = tmp_path / f"a.tar{suffix}"
    path.write_bytes(COMPRESS.get(suffix, bytes)(tar(files)))
    assert [document.text for document in read_documents(path)] == [*TEXTS[:100], *TEXTS, *TEXTS, "deep"]


@pytest.mark.parametrize(("short", "suffix"), [(".tgz", ".gz"), (".tbz2", ".bz2"), (".txz", ".xz"), (".tzst", ".zst")])
def test_short_names_of_archives(tmp_path: Path, short: str, suffix: str) -> None:
    path = tmp_path / f"a{short}"
    path.write_bytes(COMPRESS[suffix](tar({"a.txt": b"one"})))
    assert [document.text for document in read_documents(path)] == ["one"]


def test_what_is_not_read_in_an_archive_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        for name in ("cover.jpg", "a.txt", "b.parquet", "README.md", "._a.txt", "c.txt", "LICENCE"):
            header = tarfile.TarInfo(name)
            header.size = 700
            archive.addfile(header, io.BytesIO(b"x" * 700))
        for name, kind in (("folder", tarfile.DIRTYPE), ("link.txt", tarfile.SYMTYPE)):
            header = tarfile.TarInfo(name)
            header.type, header.linkname = kind, "a.txt"
            archive.addfile(header)
    problems = ReadingProblems()
    assert len(list(read_documents(path, problems=problems))) == 2
    assert problems.filtered == {
        "not a readable file (.jpg)": 1,
        "not readable in an archive (.parquet)": 1,
        "description of the data": 1,
        "hidden file": 1,
        "not a readable file (no ending)": 1,
        "not a regular file": 1,
    }
    assert not problems.total


def test_faults_name_the_file_in_the_archive(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(tar({"d/a.txt": b"\xff", "b.jsonl": b'{"text": "x"}\n{broken\n', "e.txt": b""})))
    problems = ReadingProblems()
    assert [document.text for document in read_documents(path, problems=problems)] == ["x"]
    places = [line.partition(": ")[0] for line in problems.named]
    assert places == [f"{path}!d/a.txt", f"{path}!b.jsonl:2", f"{path}!e.txt"]


def test_concatenated_archives_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(tar({"a.txt": b"one"}) + tar({"b.txt": b"two"}))
    assert [document.text for document in read_documents(path)] == ["one", "two"]
    path.write_bytes(tar({"a.txt": b"one"}) + tar({"b.txt": b"two"})[:1024])
    assert texts_before_damage(path)[0] == ["one", "two"], "the end of the first is not that of the second"


@pytest.mark.parametrize(
    ("kept", "texts"),
    [
        (512 + 1024, 1),  # the end's mark is missing
        (512 + 1024 + 512, 1),  # in the middle of the second file's header and content
        (512 + 1024 + 100, 1),
        (512 + 1024 + 512 + 1000, 1),  # the content is whole, its padding is not
        (512 + 300, 0),
        (100, 0),
        (0, 0),
    ],
)
@pytest.mark.parametrize("suffix", ["", ".zst"])
def test_an_archive_cut_off_is_an_error_after_what_comes_before(
    tmp_path: Path, kept: int, texts: int, suffix: str
) -> None:
    whole = tar({"a.txt": b"a" * 1024, "b.txt": b"b" * 1000})
    path = tmp_path / f"a.tar{suffix}"
    path.write_bytes(COMPRESS.get(suffix, bytes)(whole[:kept]))
    found, message = texts_before_damage(path)
    wanted = ["a" * 1024] * texts + ["b" * 1000] * (kept >= 512 + 1024 + 512 + 1000)
    assert found == wanted and str(path) in message and "read to its end" in message


def test_a_damaged_header_does_not_end_an_archive(tmp_path: Path) -> None:
    whole = bytearray(tar({"a.txt": b"a" * 1024, "b.txt": b"b" * 1000, "c.txt": b"c"}))
    whole[1536:1600] = b"!" * 64
    path = tmp_path / "a.tar"
    path.write_bytes(whole)
    found, message = texts_before_damage(path)
    assert found == ["a" * 1024] and "header" in message


def damaged_members() -> dict[str, bytes]:
    """Files of an archive: sound ones between a gzip cut off, a zstd with bits flipped, and an archive cut off."""
    flipped = bytearray(COMPRESS[".zst"](LINES))
    flipped[8:40] = bytes(byte ^ 0xFF for byte in flipped[8:40])
    return {
        "a.txt": b"first",
        "cut.jsonl.gz": gzip.compress(LINES[:20000]) + gzip.compress(LINES[20000:])[:-9],
        "b.txt": b"second",
        "flipped.jsonl.zst": bytes(flipped),
        "inner.tar": tar({"c.txt": b"third", "d.txt": b"d" * 2000})[: 1024 + 512 + 700],
        "e.txt": b"last",
    }


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("block", [100, 1 << 20])
def test_a_damaged_file_in_an_archive_does_not_hide_the_others(tmp_path: Path, suffix: str, block: int) -> None:
    path = tmp_path / f"a.tar{suffix}"
    path.write_bytes(COMPRESS.get(suffix, bytes)(tar(damaged_members())))
    reader, found = FileReader(SourceSpec("s", [path]), block), list[str]()
    with pytest.raises(DataError) as caught:
        for chunk in reader.chunks(reader.units()[0]):
            found += [document.text for document in reader.documents(chunk, ReadingProblems(strict=True))]
    assert found[0] == "first" and found[-3:] == ["second", "third", "last"]
    lines = found[1:-3]
    assert lines == TEXTS[: len(lines)] and len(lines) >= LINES[:20000].count(b"\n")
    message = str(caught.value)
    assert message.startswith(f"{path}: damaged files in it: 3, each")
    for name in ("cut.jsonl.gz", "flipped.jsonl.zst", "inner.tar", "inner.tar!d.txt"):
        assert f"{path}!{name}" in message
    assert "a.txt" not in message and "e.txt" not in message


def test_an_archive_truncated_after_a_damaged_file_reports_both(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    content = tar(damaged_members())
    path.write_bytes(content[: content.index(b"second")] + b"seco")
    found, message = texts_before_damage(path)
    assert found[0] == "first" and len(found) > 50
    assert f"{path}!b.txt: cannot be read to its end (2 bytes are missing)" in message
    assert "Before that, damaged files in it: 1, each" in message and f"{path}!cut.jsonl.gz" in message


def test_an_archive_whose_compression_is_damaged_is_no_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    noise = random.Random(2).randbytes(4000).hex().encode()
    path.write_bytes(gzip.compress(tar({"a.txt": b"one", "b.jsonl": noise, "c.jsonl.gz": gzip.compress(noise)}))[:3000])
    found, message = texts_before_damage(path)
    assert found == ["one"] and message.startswith(f"{path}: cannot be read to its end (the gzip data stops")


def test_members_can_be_left_unread() -> None:
    content = {f"{i}.txt": bytes([65 + i]) * 700 * i for i in range(10)}
    whole = tar(content)
    blocks = (whole[i : i + 333] for i in range(0, len(whole), 333))
    found = {}
    for number, (name, data) in enumerate(members("x", blocks)):
        if number % 2 and data is not None:
            found[name] = b"".join(data)
    assert found == {name: data for number, (name, data) in enumerate(content.items()) if number % 2}


NEWLINE = Cut((b"\n",), b"\n")


@pytest.mark.parametrize("cut", [NEWLINE, Cut((b"</page>",), b"</page>"), Cut((b"\n\n", b"\n\r\n"), b"\n")])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 1000])
def test_pieces_end_with_delimiters_and_lose_nothing(cut: Cut, size: int) -> None:
    alphabet = [b"a", b"\n", b"\r\n", b"</page>", b"</pa", b"bc" * 5]
    content = b"".join(random.Random(size).choices(alphabet, k=400))
    for step in (1, size, 3 * size):
        blocks = [content[i : i + step] for i in range(0, len(content), step)]
        found = list(pieces("x", blocks, cut, size, 1 << 20))
        assert b"".join(found) == content
        assert all(piece.endswith(cut.ends) for piece in found[:-1])
        assert sum(piece.count(cut.counted) for piece in found) == content.count(cut.counted)
        assert len(found) > 1


def test_a_long_record_is_buffered() -> None:
    blocks = [b"a\n", b"b" * 10, *[b"c" * 10] * 20, b"\nd\n", b"e"]
    assert list(pieces("x", blocks, NEWLINE, 10, 1 << 20)) == [b"a\n", b"b" * 10 + b"c" * 200 + b"\nd\n", b"e"]


@pytest.mark.parametrize(
    "cut", [NEWLINE, Cut((b"</page>",), b"</page>"), Cut((b"\n\n", b"\n\r\n"), b"\n"), Cut((), b"\n")]
)
@pytest.mark.parametrize("limit", [12, 40])
@pytest.mark.parametrize("ended", [True, False])
def test_records_over_the_limit_are_given_as_their_length(cut: Cut, limit: int, ended: bool) -> None:
    end = cut.ends[-1] if cut.ends else b""
    records = [b"x" * length + end for length in (3, 50, 4, 5, 33, 120, 2, 41)]
    records[-1] = records[-1] if ended else records[-1].removesuffix(end)
    records = records if cut.ends else [b"".join(records)]
    content = b"".join(records)
    wanted = [TooLong(len(r), r.count(cut.counted)) if len(r) > limit else r for r in records]
    for step in (1, 3, 7, 30, 1000):
        for size in (1, 10, 25):
            blocks = [content[i : i + step] for i in range(0, len(content), step)]
            found: list[bytes | TooLong] = []
            for piece in pieces("x", blocks, cut, size, limit):
                parts = [piece] if isinstance(piece, TooLong) or not end else piece.split(end)
                found += [part if isinstance(part, TooLong) or not end else part + end for part in parts if part]
            assert [r if isinstance(r, TooLong) else r.removesuffix(end) for r in found] == [
                r if isinstance(r, TooLong) else r.removesuffix(end) for r in wanted
            ]


def test_a_record_without_end_is_not_held() -> None:
    blocks = (b"x" * 10 for _ in range(10_000))
    assert list(pieces("big.json", blocks, NEWLINE, 10, 100)) == [TooLong(100_000, 0)]


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


BOMBS = {
    ".gz": lambda size: gzip.compress(bytes(size)),
    ".bz2": lambda size: bz2.compress(bytes(size)),
    ".xz": lambda size: lzma.compress(bytes(size), preset=0),
    ".zst": lambda size: zstandard.ZstdCompressor(level=19).compress(bytes(size)),
}


@pytest.mark.parametrize("suffix", BOMBS)
def test_a_decompressed_block_is_never_larger_than_asked_for(suffix: str) -> None:
    packed = BOMBS[suffix](1 << 26)
    tracemalloc.start()
    try:
        total = sum(len(block) for block in decompressed("x", [packed], COMPRESSIONS[suffix], 1 << 16))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert total == 1 << 26 and len(packed) < 1 << 19
    assert peak < 32 << 20, f"{peak >> 20} MiB"


def test_a_frame_with_a_larger_window_says_what_to_do(tmp_path: Path) -> None:
    options = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    stream = zstandard.ZstdCompressor(compression_params=options).compressobj()
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(stream.compress(LINES) + stream.flush())
    message = r"a\.jsonl\.zst: the zstd data needs more than 128 MiB.*max_record_mib of the source above 128"
    reader = FileReader(SourceSpec("s", [path]))
    with pytest.raises(DataError, match=message):
        list(reader.chunks(reader.units()[0]))
    reader = FileReader(SourceSpec("s", [path], max_record_mib=256))
    found = [d.text for chunk in reader.chunks(reader.units()[0]) for d in reader.documents(chunk, ReadingProblems())]
    assert found == TEXTS


def test_a_header_of_an_archive_cannot_fill_the_memory(tmp_path: Path) -> None:
    header = tarfile.TarInfo("././@LongLink")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, 1 << 33
    path = tmp_path / "a.tar"
    path.write_bytes(tar({"a.txt": b"one"})[:1024] + header.tobuf(tarfile.GNU_FORMAT) + bytes(1 << 16))
    found, message = texts_before_damage(path)
    assert found == ["one"] and "a header of 8,589,934,592 bytes" in message


def test_a_failing_disk_is_an_error_after_what_comes_before() -> None:
    class Failing(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            return super().read(size) or self.fail()

        def fail(self) -> bytes:
            raise OSError(5, "Input/output error")

    found: list[bytes] = []
    with pytest.raises(DataError, match=r"a\.jsonl: cannot be read.*Input/output"):
        found.extend(pieces("a.jsonl", streams.raw_blocks("a.jsonl", Failing(b"one\ntwo\nthr"), 3), NEWLINE, 4, 100))
    assert b"".join(found) == b"one\ntwo\n"


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
        results.append((documents, problems))
    assert all(result == results[0] for result in results) and len(results[0][0]) > 20
