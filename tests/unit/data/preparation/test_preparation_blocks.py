"""Blocks tokenized in advance by others: the shards do not show who made them, or whether they were there."""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from megatron_coca.data import DataError, Tokenizer, load_tokenizer
from megatron_coca.data.preparation import block_files, unit_identity
from megatron_coca.data.preparation import blocks as blocks_module
from megatron_coca.data.preparation.blocks import Blocks
from megatron_coca.data.preparation.manifest import read_manifest
from megatron_coca.data.preparation.preparation_plan import (
    CorpusSource,
    Execution,
    Rules,
    find_inputs,
    training_texts,
)
from megatron_coca.data.preparation.run import prepare, prepare_part
from megatron_coca.data.preparation.workers import ChunkTokenizer
from megatron_coca.data.readers import open_reader
from megatron_coca.data.readers.files import FileReader, read_documents
from megatron_coca.data.readers.source import SourceSpec

CHARACTERS = load_tokenizer("CharLevelTokenizer")
QUIET = Execution(progress=False)
RULES = Rules(valid_fraction=0.1, test_fraction=0.2)
BLOCK_BYTES = blocks_module.BLOCK_BYTES


def open_blocks(corpus: list[CorpusSource], output: Path, rules: Rules = RULES) -> Blocks:
    settings = blocks_module.settings_of(corpus, CHARACTERS, rules, None)
    return Blocks(corpus, find_inputs(corpus), output, CHARACTERS, rules, settings)


def everything(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix in (".bin", ".idx", ".json")}


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Iterator[None]:
    """A block is one or two files of `corpus`."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(blocks_module, "BLOCK_BYTES", (60_000, 60_000))
        yield


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[CorpusSource]:
    """Three sources in seven files, with duplicates within and across blocks, and faults; the second keeps its
    duplicates. No test changes them.
    """
    folder, chosen, sources = tmp_path_factory.mktemp("corpus"), random.Random(0), list[CorpusSource]()
    for name, count in (("books", 3), ("code", 2), ("mail", 2)):
        paths = []
        for number in range(count):
            texts = [f"text {chosen.randrange(150)} " * chosen.randrange(1, 40) for _ in range(120)]
            lines = [json.dumps({"text": text, "key": text[:7]}) for text in [*texts, "the same in all"]]
            path = folder / f"{name}{number}.jsonl"
            path.write_text("\n".join([*lines, "{broken", ""]))
            paths.append(path)
        sources.append(CorpusSource(SourceSpec(name, paths), duplicates="keep" if name == "code" else "exact"))
    return sources


def copied(corpus: list[CorpusSource], folder: Path) -> list[CorpusSource]:
    """The corpus with copies of its files in a folder."""
    sources = []
    for source in corpus:
        paths = [Path(shutil.copyfile(path, folder / Path(path).name)) for path in source.spec.paths]
        sources.append(replace(source, spec=replace(source.spec, paths=paths)))
    return sources


@pytest.fixture
def own_corpus(tmp_path: Path, corpus: list[CorpusSource]) -> list[CorpusSource]:
    """A copy of `corpus` that a test may change."""
    return copied(corpus, tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, corpus: list[CorpusSource]) -> dict[str, bytes]:
    return everything(prepare(corpus, tmp_path_factory.mktemp("whole") / "whole", CHARACTERS, RULES, QUIET).parent)


@pytest.mark.parametrize(("parts", "made"), [(1, [0]), (2, [1]), (3, [2, 0]), (9, [4, 3, 8, 0, 1, 2, 5, 6, 7])])
def test_any_parts_in_any_order(
    tmp_path: Path, corpus: list[CorpusSource], whole: dict[str, bytes], parts: int, made: list[int]
) -> None:
    for part in made:
        prepare_part(corpus, tmp_path / "out", CHARACTERS, part, parts, RULES, Execution(part % 2, progress=False))
    blocks = open_blocks(corpus, tmp_path / "out")
    assert 3 <= len(blocks) < 7
    assert blocks.missing() == [number for number in range(len(blocks)) if number % parts not in made]
    assert everything(prepare(corpus, tmp_path / "out", CHARACTERS, RULES, QUIET).parent) == whole
    assert not blocks.folder.exists()


def test_blocks_are_used_and_what_changed_is_not(
    tmp_path: Path, own_corpus: list[CorpusSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is tokenized where all blocks are built; after the last file changed, that one."""
    corpus = own_corpus
    whole = everything(prepare(corpus, tmp_path / "whole", CHARACTERS, RULES, QUIET).parent)
    tokenized: list[int] = []
    tokenize = ChunkTokenizer.tokenize
    monkeypatch.setattr(ChunkTokenizer, "tokenize", lambda self, n, c: (tokenized.append(n), tokenize(self, n, c))[1])
    told = prepare_part(corpus, tmp_path / "out", CHARACTERS, 0, 1, RULES, QUIET)
    made, tokenized[:] = len(tokenized), []
    assert not open_blocks(corpus, tmp_path / "out").missing() and told.endswith("blocks are built")
    with Path(corpus[2].spec.paths[-1]).open("a") as stream:
        stream.write('{"text": "one more", "key": "k"}\n')
    other = open_blocks(corpus, tmp_path / "out", Rules(0.2, 0.2))
    assert len(other.missing()) == len(other)
    assert len(open_blocks(corpus, tmp_path / "out").missing()) == 1
    after = everything(prepare(corpus, tmp_path / "out", CHARACTERS, RULES, QUIET).parent)
    assert 0 < len(tokenized) < made and set(tokenized) == {2}
    assert after != whole and after["books_train.bin"] == whole["books_train.bin"]


def test_blocks_are_named_after_content(
    tmp_path: Path, corpus: list[CorpusSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy below another mount point needs no new blocks; another version of the tokenizer's library needs all."""
    prepare_part(corpus, tmp_path / "out", CHARACTERS, 0, 1, RULES, QUIET)
    (tmp_path / "mounted").mkdir()
    mounted = copied(corpus, tmp_path / "mounted")
    assert open_blocks(mounted, tmp_path / "out").missing() == []
    last = Path(mounted[-1].spec.paths[-1])
    last.write_bytes(last.read_bytes().replace(b"text", b"TEXT", 1))
    assert len(open_blocks(mounted, tmp_path / "out").missing()) == 1, "the size is the same, the content is not"
    monkeypatch.setattr(unit_identity, "version", lambda name: "99.0")
    every = open_blocks(corpus, tmp_path / "out")
    assert len(every.missing()) == len(every)


def test_other_settings_of_a_source_leave_the_blocks_of_the_others(tmp_path: Path, corpus: list[CorpusSource]) -> None:
    prepare_part(corpus, tmp_path / "out", CHARACTERS, 0, 1, RULES, QUIET)
    changed = [*corpus[:2], replace(corpus[2], fraction=0.5)]
    missing = open_blocks(changed, tmp_path / "out").missing()
    assert 0 < len(missing) < len(open_blocks(corpus, tmp_path / "out"))


def test_a_damaged_block_is_named_and_made_again_where_it_is_removed(
    tmp_path: Path, corpus: list[CorpusSource], whole: dict[str, bytes]
) -> None:
    prepare_part(corpus, tmp_path / "out", CHARACTERS, 0, 1, RULES, QUIET)
    block = min(blocks_module.blocks_folder(tmp_path / "out").glob("*.block"))
    content = bytearray(block.read_bytes())
    content[len(content) // 3] ^= 1
    block.write_bytes(content)
    with pytest.raises(DataError, match=f"{block.name}: cannot be read .*delete this file"):
        prepare(corpus, tmp_path / "out", CHARACTERS, RULES, QUIET)
    block.unlink()
    assert everything(prepare(corpus, tmp_path / "out", CHARACTERS, RULES, QUIET).parent) == whole


@pytest.fixture(scope="module")
def large_files(tmp_path_factory: pytest.TempPathFactory) -> list[CorpusSource]:
    """Large files of three formats with a fault in each 100 records, and small ones before, between and behind them.
    No test changes them.
    """
    folder, chosen, records = tmp_path_factory.mktemp("large"), random.Random(1), list[str]()
    for number in range(9000):
        text = f"{number} " + "".join(chosen.choices("abcdefgh ", k=400))
        records.append("{broken" if number % 100 == 50 else json.dumps({"text": text, "key": text[:3]}))
    paths = [folder / name for name in ("a.jsonl", "b.jsonl", "c.jsonl.zst", "d.parquet", "e.jsonl")]
    paths[0].write_text("\n".join(records[:5]))
    paths[1].write_text("\n".join(records))
    paths[2].write_bytes(zstandard.compress("\n".join(reversed(records)).encode()))
    rows = [json.loads(record) for record in records if record != "{broken"]
    parquet.write_table(pyarrow.Table.from_pylist(rows), paths[3], row_group_size=500)
    paths[4].write_text("\n".join(records[-5:]))
    return [CorpusSource(SourceSpec("large", paths), duplicates="keep")]


LARGE_BLOCKS = (500_000, 500_000)
"""Sizes of blocks that are pieces of the large files."""


@pytest.fixture
def large(large_files: list[CorpusSource], monkeypatch: pytest.MonkeyPatch) -> list[CorpusSource]:
    monkeypatch.setattr(blocks_module, "BLOCK_BYTES", LARGE_BLOCKS)
    return large_files


@pytest.fixture(scope="module")
def whole_large(tmp_path_factory: pytest.TempPathFactory, large_files: list[CorpusSource]) -> dict[str, bytes]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(blocks_module, "BLOCK_BYTES", LARGE_BLOCKS)
        folder = tmp_path_factory.mktemp("whole_large") / "whole"
        return everything(prepare(large_files, folder, CHARACTERS, RULES, QUIET).parent)


@pytest.mark.fewest
@pytest.mark.parametrize(("parts", "made"), [(1, [0]), (3, [1]), (2, [1, 0]), (5, [4, 0, 3])])
def test_pieces_of_large_files(
    tmp_path: Path, large: list[CorpusSource], whole_large: dict[str, bytes], parts: int, made: list[int]
) -> None:
    for part in made:
        prepare_part(large, tmp_path / "out", CHARACTERS, part, parts, RULES, QUIET)
    blocks = open_blocks(large, tmp_path / "out")
    assert len(blocks) > 15
    assert sum(map(blocks.size, range(len(blocks)))) == sum(Path(path).stat().st_size for path in large[0].spec.paths)
    assert everything(prepare(large, tmp_path / "out", CHARACTERS, RULES, QUIET).parent) == whole_large
    named = read_manifest(tmp_path / "out/manifest.json")["inputs"][0]["problems_named"]
    assert f"{large[0].spec.paths[1]}:8951: invalid JSON" in " ".join(named), "lines count from the file's beginning"


def test_a_file_is_read_once_for_all_its_pieces(
    tmp_path: Path, large: list[CorpusSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    chunks = FileReader.chunks
    # Before that, the first documents of a source are read to choose its splits.
    monkeypatch.setattr("megatron_coca.data.preparation.run.with_splits", lambda sources, *_: sources)
    monkeypatch.setattr(FileReader, "chunks", lambda self, unit: (read.append(unit.path), chunks(self, unit))[1])
    prepare_part(large, tmp_path / "out", CHARACTERS, 0, 2, RULES, QUIET)
    assert {str(path) for path in large[0].spec.paths[1:4]} <= set(read) and len(read) == len(set(read))


@pytest.mark.parametrize("workers", [0, 2])
def test_damage_within_a_piece(tmp_path: Path, large: list[CorpusSource], workers: int) -> None:
    """Pieces before it are whole; those behind it are absent."""
    large = copied(large, tmp_path)
    path = Path(large[0].spec.paths[2])
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)
    with pytest.raises(DataError, match=path.name) as raised:
        prepare_part(large, tmp_path / "out", CHARACTERS, 0, 1, RULES, Execution(workers, progress=False))
    assert str(raised.value).count(path.name) == 1, "one reason, however many pieces have it"
    blocks = open_blocks(large, tmp_path / "out")
    missing = blocks.missing()
    assert 0 < len(missing) < 4 and missing[-1] < len(blocks) - 3, "pieces before the damage and later files are made"


def test_strict_is_strict_about_blocks(tmp_path: Path, corpus: list[CorpusSource]) -> None:
    prepare_part(corpus, tmp_path / "out", CHARACTERS, 0, 1, RULES, QUIET)
    strict = Rules(RULES.valid_fraction, RULES.test_fraction, strict=True)
    with pytest.raises(DataError, match="books0.jsonl:122: invalid JSON"):
        prepare(corpus, tmp_path / "out", CHARACTERS, strict, QUIET)


def test_a_tokenizer_is_trained_once_for_all_hosts(tmp_path: Path, corpus: list[CorpusSource]) -> None:
    trained = []

    def train(folder: Path) -> object:
        trained.append(folder)
        return CHARACTERS

    for part in range(2):
        prepare_part(corpus, tmp_path / "out", train, part, 2, RULES, QUIET)  # type: ignore[arg-type]
    prepare(corpus, tmp_path / "out", train, RULES, QUIET)  # type: ignore[arg-type]
    assert len(trained) == 1


def test_a_block_that_is_not_complete_is_not_there(
    tmp_path: Path, corpus: list[CorpusSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = open_blocks(corpus, tmp_path / "out")
    monkeypatch.setattr(block_files, "flush", lambda path: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(OSError, match="No space"):
        blocks.make([0], QUIET)
    assert len(blocks.missing()) == len(blocks) and not list(blocks.folder.glob("*block*"))


@pytest.mark.parametrize(("size", "mebibytes"), [(0, 8), (10**9, 8), (9 << 30, 64), (10 << 30, 64), (10**12, 256)])
def test_small_corpora_have_small_blocks(size: int, mebibytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "BLOCK_BYTES", BLOCK_BYTES)
    assert blocks_module.block_bytes(size) == mebibytes << 20


def test_a_block_that_was_copied_over_another_is_named(
    tmp_path: Path, corpus: list[CorpusSource], whole: dict[str, bytes]
) -> None:
    prepare_part(corpus, tmp_path / "out", CHARACTERS, 0, 1, RULES, QUIET)
    blocks = open_blocks(corpus, tmp_path / "out")
    counts = [len(block.units) for block in blocks._blocks]
    small, large = blocks.paths[counts.index(min(counts))], blocks.paths[counts.index(max(counts))]
    shutil.copy(large, small)
    with pytest.raises(DataError, match=f"{small.name}: .*a copy of .*delete this file"):
        prepare(corpus, tmp_path / "out", CHARACTERS, RULES, QUIET)
    small.unlink()
    assert everything(prepare(corpus, tmp_path / "out", CHARACTERS, RULES, QUIET).parent) == whole


def append(path: Path) -> None:
    with path.open("a") as stream:
        stream.write('{"text": "new"}\n')


def rewrite(path: Path) -> None:
    """Other content of the same size."""
    path.write_bytes(path.read_bytes().replace(b"text 1", b"text 2"))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def replaced(path: Path) -> None:
    path.with_name("new").write_text('{"text": "new"}\n')
    path.with_name("new").rename(path)


CHANGES = [append, rewrite, truncate, replaced, Path.unlink]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_file_that_changes_while_it_is_read_is_an_error(
    tmp_path: Path, own_corpus: list[CorpusSource], change: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its block is not written, the others are, and the same command later reads the current files."""
    corpus = own_corpus
    path, tokenize = Path(corpus[1].spec.paths[0]), ChunkTokenizer.tokenize
    replacement = path.read_bytes().replace(b"text 1", b"text 3")

    def tokenized(self: ChunkTokenizer, number: int, chunk: object) -> object:
        found = tokenize(self, number, chunk)  # type: ignore[arg-type]
        if chunk.path == str(path):  # type: ignore[attr-defined]
            change(path)
        return found

    monkeypatch.setattr(ChunkTokenizer, "tokenize", tokenized)
    with pytest.raises(
        DataError, match=rf"code0\.jsonl: ({'changed while it' if change != Path.unlink else 'cannot be'})"
    ):
        prepare(corpus, tmp_path / "out", CHARACTERS, RULES, QUIET)
    monkeypatch.setattr(ChunkTokenizer, "tokenize", tokenize)
    path.write_bytes(replacement)
    blocks = open_blocks(corpus, tmp_path / "out")
    assert 0 < len(blocks.missing()) < len(blocks)
    assert everything(prepare(corpus, tmp_path / "out", CHARACTERS, RULES, QUIET).parent) == everything(
        prepare(corpus, tmp_path / "again", CHARACTERS, RULES, QUIET).parent
    )


def test_files_that_change_are_noticed_by_every_reader_of_a_corpus(tmp_path: Path) -> None:
    """Evaluated documents, text to train a tokenizer on, a large file in pieces, and a repository."""
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"text {number}"}) + "\n" for number in range(100)))
    documents = read_documents(path)
    next(documents)
    append(path)
    with pytest.raises(DataError, match=r"a\.jsonl: changed while it was read"):
        list(documents)
    source = CorpusSource(SourceSpec("a", [path]))
    texts = training_texts([source], RULES, 1000)
    next(texts)
    append(path)
    with pytest.raises(DataError, match=r"a\.jsonl: changed while it was read"):
        list(texts)
    (tmp_path / "src" / "own").mkdir(parents=True)
    (tmp_path / "src" / "own" / "a.py").write_text("print(1)\n")
    reader = open_reader(SourceSpec("src", [tmp_path / "src"], reader="repositories"))
    (unit,) = reader.units()
    reader.check_unchanged(unit)
    (tmp_path / "src" / "own" / "b.py").write_text("print(2)\n")
    with pytest.raises(DataError, match=r"own: changed while it was read"):
        reader.check_unchanged(unit)


def test_a_file_in_pieces_that_changes_is_an_error(
    tmp_path: Path, large: list[CorpusSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenize, calls, large = ChunkTokenizer.tokenize, list[int](), copied(large, tmp_path)

    def tokenized(self: ChunkTokenizer, number: int, chunk: object) -> object:
        if number == 0:
            calls.append(1)
            if len(calls) == 3:
                append(Path(large[0].spec.paths[1]))
        return tokenize(self, number, chunk)  # type: ignore[arg-type]

    monkeypatch.setattr(ChunkTokenizer, "tokenize", tokenized)
    with pytest.raises(DataError, match="changed while it was read"):
        prepare(large, tmp_path / "out", CHARACTERS, RULES, QUIET)
    assert len(calls) > 3


def test_a_trained_tokenizer_belongs_to_the_text_that_it_was_trained_on(
    tmp_path: Path, own_corpus: list[CorpusSource]
) -> None:
    """An interrupted preparation keeps it; if the text has changed, a new one is trained."""
    corpus, trained = own_corpus, list[Path]()

    def train(folder: Path) -> Tokenizer:
        trained.append(folder)
        return CHARACTERS

    settings = blocks_module.settings_of(corpus, train, RULES, None)
    for _ in range(2):
        Blocks(corpus, find_inputs(corpus), tmp_path / "out", train, RULES, settings)
    assert len(trained) == 1
    with (tmp_path / "books0.jsonl").open("a") as file:
        file.write('{"text": "more"}\n')
    Blocks(corpus, find_inputs(corpus), tmp_path / "out", train, RULES, settings)
    assert len(trained) == 2
