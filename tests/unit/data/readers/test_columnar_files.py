"""Parquet and Arrow: rows in order, small chunks, needed columns only, damage reported."""

import pickle
from pathlib import Path
from typing import Any

import pytest

from megatron_coca.data.errors import DataError
from megatron_coca.data.readers.columnar_files import packed, table_rows
from megatron_coca.data.readers.files import FileReader
from megatron_coca.data.readers.source import Chunk, Document, Filters, ReadingProblems, SourceSpec, content_key
from megatron_coca.data.readers.streams import TooLong

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

STACK = {
    "content": [f"code {i} " * (i % 9 + 1) for i in range(500)],
    "max_stars_count": [None if i % 5 == 0 else float(i % 3) for i in range(500)],
    "max_stars_repo_licenses": [["MIT", "Apache-2.0"] if i % 2 else ["GPL-3.0"] for i in range(500)],
    "max_stars_repo_name": [f"owner/{i // 10}" for i in range(500)],
    "hexsha": ["0" * 40] * 500,
}


def write(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    table = arrow.table(columns)
    if path.suffix == ".parquet":
        parquet.write_table(table, path, **options)
    elif options.get("file"):
        with arrow.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=100)
    else:
        with arrow.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=100)
    return path


def read(path: Path, block: int = 1 << 20, **spec: Any) -> tuple[list[Document], ReadingProblems, list[int]]:
    """Documents, problems and the bytes of each chunk's payload."""
    reader, problems = FileReader(SourceSpec("s", [path], **spec), block), ReadingProblems()
    (unit,) = reader.units()
    chunks = list(reader.chunks(unit))
    assert sum(chunk.read for chunk in chunks) == unit.size
    assert all(chunk.read >= 0 for chunk in chunks)
    received = pickle.loads(pickle.dumps(chunks))
    documents = [document for chunk in received for document in reader.documents(chunk, problems)]
    return documents, problems, [sum(len(piece.chunk.payload) for piece in chunk.payload) for chunk in chunks]


WAYS = [("a.parquet", {}), ("a.parquet", {"row_group_size": 7}), ("a.arrow", {}), ("a.arrow", {"file": True})]


@pytest.mark.parametrize(("name", "options"), WAYS)
@pytest.mark.parametrize("block", [1, 3000])
def test_rows_are_read_in_order(tmp_path: Path, name: str, options: dict[str, Any], block: int) -> None:
    path = write(tmp_path / name, STACK, **options)
    documents, problems, _ = read(path, block, fields={"text": "content"})
    assert [d.text for d in documents] == STACK["content"] and not problems.total
    assert [d.key for d in documents] == STACK["max_stars_repo_name"]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_the_stack_is_filtered(tmp_path: Path, name: str) -> None:
    filters = Filters(min_stars=1)
    documents, problems, _ = read(write(tmp_path / name, STACK), fields={"text": "content"}, filters=filters)
    kept = [i for i in range(500) if i % 5 and i % 3 >= 1]
    assert [d.text for d in documents] == [STACK["content"][i] for i in kept]
    assert sum(problems.filtered.values()) == 500 - len(kept) and len(problems.filtered) == 2


def test_sets_are_found_in_nested_columns(tmp_path: Path) -> None:
    meta = [{"pile_set_name": "A" if i % 2 else "B", "other": i} for i in range(10)]
    path = write(tmp_path / "a.parquet", {"text": [f"t{i}" for i in range(10)], "meta": meta})
    documents, problems, _ = read(path, sets=["A"], divide=True)
    assert [(d.text, d.part) for d in documents] == [(f"t{i}", "A") for i in range(1, 10, 2)]
    assert problems.filtered == {"set not chosen": 5}


@pytest.mark.parametrize(("name", "options"), [("a.parquet", {"row_group_size": 10**6}), ("a.arrow", {})])
def test_chunks_are_small_and_hold_needed_columns(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    columns = {"text": [f"{i:01000}" for i in range(2000)], "image": [f"{i:03000}" for i in range(2000)]}
    _, _, sizes = read(write(tmp_path / name, columns, **options), 1 << 18)
    assert max(sizes) < 1 << 20 and 2_000_000 < sum(sizes) < 2_400_000


def test_text_in_other_types_of_column(tmp_path: Path) -> None:
    texts = ["one", "two", "one"]
    kinds = [arrow.large_string(), arrow.binary(), arrow.dictionary(arrow.int32(), arrow.string())]
    for number, kind in enumerate(kinds):
        path = write(tmp_path / f"{number}.parquet", {"text": arrow.array(texts).cast(kind)})
        assert [d.text for d in read(path)[0]] == texts


def test_unusable_rows_are_counted_and_named(tmp_path: Path) -> None:
    strings = arrow.array([b"one", None, b"\xff\xfe", b"", b"two"], arrow.binary()).view(arrow.string())
    path = write(tmp_path / "a.parquet", {"text": strings})
    documents, problems, _ = read(path)
    assert [(d.text, d.key) for d in documents] == [(t, content_key(t)) for t in ("one", "two")]
    faults = ["empty text (null)", "invalid UTF-8", "empty text"]
    starts = [f"{path}:{number}: {kind}" for number, kind in zip((2, 3, 4), faults, strict=True)]
    assert [line.startswith(start) for line, start in zip(problems.named, starts, strict=True)] == [True] * 3


def test_a_table_without_the_text_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.parquet: .*no column 'text', only \['content', "):
        read(write(tmp_path / "a.parquet", STACK))


@pytest.mark.parametrize(("name", "options"), WAYS)
@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99])
def test_a_table_cut_off_is_an_error(tmp_path: Path, name: str, options: dict[str, Any], kept: float) -> None:
    path = write(tmp_path / name, STACK, **options)
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(DataError, match=f"{name}: cannot be read to its end"):
        read(path, fields={"text": "content"})


def test_an_arrow_stream_cut_between_batches_is_an_error_after_what_comes_before(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", STACK)
    path.write_bytes(path.read_bytes()[:-8])
    reader = FileReader(SourceSpec("s", [path], fields={"text": "content"}))
    found: list[str] = []
    with pytest.raises(DataError, match="the end-of-stream mark is missing"):
        for chunk in reader.chunks(reader.units()[0]):
            found += [document.text for document in reader.documents(chunk, ReadingProblems())]
    assert found == STACK["content"]


def test_damaged_pages_are_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", STACK, compression="zstd", row_group_size=100)
    content = bytearray(path.read_bytes())
    content[2000:2400] = bytes(400)
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read to its end"):
        read(path, fields={"text": "content"})


@pytest.mark.parametrize("compression", ["none", "snappy"])
def test_zeroed_pages_are_an_error_where_there_are_checksums(tmp_path: Path, compression: str) -> None:
    texts = {"text": [f"{i:0200}" for i in range(2000)]}
    options = {"row_group_size": 500, "use_dictionary": False, "write_page_checksum": True}
    path = write(tmp_path / "a.parquet", texts, compression=compression, **options)
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 1000] = bytes(1000)
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read to its end.*CRC"):
        read(path)


def test_an_empty_table_has_no_documents(tmp_path: Path) -> None:
    for name in ("a.parquet", "a.arrow"):
        assert read(write(tmp_path / name, {"text": arrow.array([], arrow.string())}))[0] == []


def kinds_of_text() -> dict[str, Any]:
    texts = [f"{i:0400}" for i in range(3000)]
    nested = arrow.list_(arrow.struct([("text", arrow.dictionary(arrow.int32(), arrow.string()))]))
    return {
        "string": arrow.array(texts),
        "dictionary": arrow.array(texts).dictionary_encode(),
        "view": arrow.array(texts, arrow.string_view()),
        "nested dictionary": arrow.array([[{"text": text}] for text in texts]).cast(nested),
    }


@pytest.mark.parametrize("kind", ["dictionary", "view", "nested dictionary"])
def test_a_piece_contains_only_its_own_values(kind: str) -> None:
    """A dictionary or view shares its values with the whole batch."""
    kinds = kinds_of_text()
    plain, column = (arrow.record_batch({"text": kinds[name]}) for name in ("string", kind))
    wanted, found = (list(packed(batch, 1 << 16, 1 << 20)) for batch in (plain, column))
    assert [rows for rows, _ in found] == [rows for rows, _ in wanted]
    assert sum(len(data) for _, data in found) < 1.1 * sum(len(data) for _, data in wanted)
    rows = [record.row for _, data in found for record in table_rows(Chunk("t", 1, data, 0), ReadingProblems())]
    assert rows == column.to_pylist()


def test_a_long_value_in_any_type_of_column_is_too_long() -> None:
    long = ["short", "x" * 5000, "short"]
    columns = [
        arrow.array(long),
        arrow.array(long).dictionary_encode(),
        arrow.array(long, arrow.string_view()),
        arrow.array([[{"content": text}] for text in long]),
        arrow.array([[("content", text)] for text in long], arrow.map_(arrow.string(), arrow.string())),
        arrow.ExtensionArray.from_storage(arrow.json_(), arrow.array(long)),
    ]
    for column in columns:
        found = [data for _, data in packed(arrow.record_batch({"messages": column}), 1 << 20, 4000)]
        assert [isinstance(data, TooLong) for data in found] == [False, True, False], column.type


def test_repeated_values_of_a_dictionary_count_each_time() -> None:
    column = arrow.DictionaryArray.from_arrays(arrow.array([0] * 1000 + [None]), arrow.array(["x" * 1000]))
    found = list(packed(arrow.record_batch({"text": column}), 100_000, 1 << 20))
    assert len(found) > 9 and max(len(data) for _, data in found) < 120_000


def test_maps_are_objects(tmp_path: Path) -> None:
    kind = arrow.map_(arrow.string(), arrow.string())
    path = write(tmp_path / "a.parquet", {"text": arrow.array([[("body", "t")]], kind)})
    assert [d.text for d in read(path, fields={"text": "text.body"})[0]] == ["t"]
