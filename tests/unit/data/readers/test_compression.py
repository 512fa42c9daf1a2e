"""Compression and archives: all their bytes in order, and damage reported."""

import gzip
import io
import lzma
import random
import tarfile
import tracemalloc
from pathlib import Path

import pytest
import zstandard

from megatron_coca.data.errors import DataError
from megatron_coca.data.readers import read_documents
from megatron_coca.data.readers.compression import COMPRESSIONS, decompressed, members
from megatron_coca.data.readers.source import ReadingProblems
from tests.unit.data.readers.compressed_files import COMPRESS, LINES, SKIPPABLE, TEXTS, tar


def damage(path: Path) -> str:
    """The error of reading a file."""
    with pytest.raises(DataError) as caught:
        list(read_documents(path, problems=ReadingProblems()))
    return str(caught.value)


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
def test_a_compressed_file_cut_off_is_an_error(tmp_path: Path, suffix: str, cut: int) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes((COMPRESS[suffix](LINES[:20000]) + COMPRESS[suffix](LINES[20000:]))[:-cut])
    message = damage(path)
    assert str(path) in message and "read to its end" in message


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("kind", ["garbage behind", "flipped bits", "nothing"])
def test_damaged_data_is_an_error(tmp_path: Path, suffix: str, kind: str) -> None:
    packed = bytearray(COMPRESS[suffix](LINES))
    if kind == "garbage behind":
        packed += b"garbage that is no frame"
    elif kind == "flipped bits":
        packed[8:40] = bytes(byte ^ 0xFF for byte in packed[8:40])
    else:
        packed.clear()
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(packed)
    assert str(path) in damage(path)


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
        "not a readable file (no known ending)": 1,
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
    assert "read to its end" in damage(path), "the end of the first is not that of the second"


@pytest.mark.parametrize(
    "kept",
    [
        512 + 1024,  # the end's mark is missing
        512 + 1024 + 512,  # in the middle of the second file's header and content
        512 + 1024 + 100,
        512 + 1024 + 512 + 1000,  # the content is whole, its padding is not
        512 + 300,
        100,
        0,
    ],
)
@pytest.mark.parametrize("suffix", ["", ".zst"])
def test_an_archive_cut_off_is_an_error(tmp_path: Path, kept: int, suffix: str) -> None:
    whole = tar({"a.txt": b"a" * 1024, "b.txt": b"b" * 1000})
    path = tmp_path / f"a.tar{suffix}"
    path.write_bytes(COMPRESS.get(suffix, bytes)(whole[:kept]))
    message = damage(path)
    assert str(path) in message and "read to its end" in message


def test_a_damaged_header_does_not_end_an_archive(tmp_path: Path) -> None:
    whole = bytearray(tar({"a.txt": b"a" * 1024, "b.txt": b"b" * 1000, "c.txt": b"c"}))
    whole[1536:1600] = b"!" * 64
    path = tmp_path / "a.tar"
    path.write_bytes(whole)
    assert "header" in damage(path)


def test_a_damaged_file_in_an_archive_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    inner = tar({"c.txt": b"third", "d.txt": b"d" * 2000})[: 1024 + 512 + 700]
    for name, content in (("cut.jsonl.gz", gzip.compress(LINES)[:-9]), ("inner.tar", inner)):
        path.write_bytes(tar({"a.txt": b"first", name: content, "e.txt": b"last"}))
        message = damage(path)
        assert message.startswith(f"{path}!{name}") and "read to its end" in message


def test_an_archive_whose_compression_is_damaged_is_no_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    noise = random.Random(2).randbytes(4000).hex().encode()
    path.write_bytes(gzip.compress(tar({"a.txt": b"one", "b.jsonl": noise, "c.jsonl.gz": gzip.compress(noise)}))[:3000])
    message = damage(path)
    assert message.startswith(f"{path}: ") and "gzip data is truncated" in message


def test_members_can_be_left_unread() -> None:
    content = {f"{i}.txt": bytes([65 + i]) * 700 * i for i in range(10)}
    whole = tar(content)
    blocks = (whole[i : i + 333] for i in range(0, len(whole), 333))
    found = {}
    for number, (name, data) in enumerate(members("x", blocks)):
        if number % 2 and data is not None:
            found[name] = b"".join(data)
    assert found == {name: data for number, (name, data) in enumerate(content.items()) if number % 2}


BOMBS = {
    ".gz": lambda size: gzip.compress(bytes(size)),
    ".xz": lambda size: lzma.compress(bytes(size), preset=0),
    ".zst": lambda size: zstandard.ZstdCompressor(level=19).compress(bytes(size)),
}


@pytest.mark.parametrize("suffix", BOMBS)
def test_a_small_block_does_not_fill_the_memory(suffix: str) -> None:
    packed = BOMBS[suffix](1 << 26)
    tracemalloc.start()
    try:
        total = sum(len(block) for block in decompressed("x", [packed], COMPRESSIONS[suffix], 1 << 16))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert total == 1 << 26 and len(packed) < 1 << 19
    assert peak < 32 << 20, f"{peak >> 20} MiB"


def test_a_frame_with_a_large_window_is_read(tmp_path: Path) -> None:
    options = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    stream = zstandard.ZstdCompressor(compression_params=options).compressobj()
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(stream.compress(LINES) + stream.flush())
    assert [document.text for document in read_documents(path)] == TEXTS
