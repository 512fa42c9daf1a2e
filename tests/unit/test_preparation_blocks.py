"""Blocks tokenized in advance by others: the shards do not show who made them, or whether they were there."""

import itertools
import json
import random
from pathlib import Path

import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from megatron_coca.data import DataError, load_tokenizer
from megatron_coca.data.preparation import blocks as blocks_module
from megatron_coca.data.preparation import workers
from megatron_coca.data.preparation.blocks import Blocks
from megatron_coca.data.preparation.engines import make_part, open_blocks, plan
from megatron_coca.data.preparation.manifest import read_manifest
from megatron_coca.data.preparation.preparation_plan import CorpusSource, Execution, Rules
from megatron_coca.data.preparation.run import prepare
from megatron_coca.data.preparation.workers import ChunkTokenizer, Pool
from megatron_coca.data.readers.files import FileReader
from megatron_coca.data.readers.source import SourceSpec

CHARACTERS = load_tokenizer("CharLevelTokenizer")
QUIET = Execution(progress=False)
RULES = Rules(valid_fraction=0.1, test_fraction=0.2)
TOLERANT = Rules(valid_fraction=0.1, test_fraction=0.2, skip_damaged=True)


def everything(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix in (".bin", ".idx", ".json")}


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[CorpusSource]:
    """Three sources in seven files, with duplicates within and across blocks, and faults; the second keeps its
    duplicates. A block is one or two files.
    """
    chosen, sources = random.Random(0), []
    for name, count in (("books", 3), ("code", 2), ("mail", 2)):
        paths = []
        for number in range(count):
            texts = [f"text {chosen.randrange(150)} " * chosen.randrange(1, 40) for _ in range(120)]
            lines = [json.dumps({"text": text, "key": text[:7]}) for text in [*texts, "the same in all"]]
            path = tmp_path / f"{name}{number}.jsonl"
            path.write_text("\n".join([*lines, "{broken", ""]))
            paths.append(path)
        sources.append(CorpusSource(SourceSpec(name, paths), duplicates="keep" if name == "code" else "exact"))
    monkeypatch.setattr(blocks_module, "BLOCK_BYTES", (60_000, 60_000))
    return sources


@pytest.fixture
def whole(tmp_path: Path, corpus: list[CorpusSource]) -> dict[str, bytes]:
    return everything(prepare(corpus, tmp_path / "whole", CHARACTERS, RULES, QUIET).parent)


@pytest.mark.parametrize(("parts", "made"), [(1, [0]), (2, [1]), (3, [2, 0]), (9, [4, 3, 8, 0, 1, 2, 5, 6, 7])])
def test_any_parts_in_any_order(
    tmp_path: Path, corpus: list[CorpusSource], whole: dict[str, bytes], parts: int, made: list[int]
) -> None:
    for part in made:
        blocks = open_blocks(corpus, tmp_path / "out", CHARACTERS, RULES)
        assert 3 <= len(blocks) < 7
        make_part(blocks, part, parts, Execution(workers=part % 2, progress=False))
    missing = open_blocks(corpus, tmp_path / "out", CHARACTERS, RULES).missing()
    assert missing == [number for number in range(len(blocks)) if number % parts not in made]
    assert everything(prepare(corpus, tmp_path / "out", CHARACTERS, RULES, QUIET).parent) == whole
    assert not blocks.folder.exists()


def test_blocks_are_used_and_what_changed_is_not(
    tmp_path: Path, corpus: list[CorpusSource], whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is tokenized where all blocks are made; after the last file changed, that one."""
    tokenized: list[int] = []
    tokenize = ChunkTokenizer.tokenize
    monkeypatch.setattr(ChunkTokenizer, "tokenize", lambda self, n, c: (tokenized.append(n), tokenize(self, n, c))[1])
    make_part(open_blocks(corpus, tmp_path / "out", CHARACTERS, RULES), 0, 1, QUIET)
    made, tokenized[:] = len(tokenized), []
    with Path(corpus[2].spec.paths[-1]).open("a") as stream:
        stream.write('{"text": "one more", "key": "k"}\n')
    other = open_blocks(corpus, tmp_path / "out", CHARACTERS, Rules(0.2, 0.2))
    assert len(other.missing()) == len(other)
    blocks = open_blocks(corpus, tmp_path / "out", CHARACTERS, RULES)
    assert len(blocks.missing()) == 1
    after = everything(prepare(corpus, tmp_path / "out", CHARACTERS, RULES, QUIET).parent)
    assert 0 < len(tokenized) < made and set(tokenized) == {2}
    assert after != whole and after["books_train.bin"] == whole["books_train.bin"]


def test_a_killed_merge_goes_on_within_a_block(
    tmp_path: Path, corpus: list[CorpusSource], whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    make_part(open_blocks(corpus, tmp_path / "out", CHARACTERS, RULES), 0, 1, QUIET)
    fetched, submit = itertools.count(), Pool.submit

    def sometimes(self: Pool, *arguments: object) -> object:
        if next(fetched) % 3 == 2:
            raise Killed
        return submit(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(Pool, "submit", sometimes)
        with pytest.raises(Killed):
            prepare(corpus, tmp_path / "out", CHARACTERS, RULES, Execution(0, 0.0, False))
    assert everything(prepare(corpus, tmp_path / "out", CHARACTERS, RULES, QUIET).parent) == whole


def test_a_damaged_block_is_named_and_made_again_where_it_is_removed(
    tmp_path: Path, corpus: list[CorpusSource], whole: dict[str, bytes]
) -> None:
    blocks = open_blocks(corpus, tmp_path / "out", CHARACTERS, RULES)
    make_part(blocks, 0, 1, QUIET)
    block = min(blocks.folder.glob("*.block"))
    content = bytearray(block.read_bytes())
    content[len(content) // 3] ^= 1
    block.write_bytes(content)
    with pytest.raises(DataError, match=f"{block.name}: cannot be read .*Remove this file"):
        prepare(corpus, tmp_path / "out", CHARACTERS, RULES, QUIET)
    block.unlink()
    assert everything(prepare(corpus, tmp_path / "out", CHARACTERS, RULES, QUIET).parent) == whole


def test_damage_of_a_file_is_carried_by_its_block(tmp_path: Path, corpus: list[CorpusSource]) -> None:
    path = Path(corpus[0].spec.paths[1])
    path.write_bytes(b"\x28\xb5\x2f\xfd" + path.read_bytes()[:50])  # begins as Zstandard
    damaged = path.rename(path.with_suffix(".jsonl.zst"))
    corpus[0] = CorpusSource(SourceSpec("books", [*corpus[0].spec.paths[::2], damaged]))
    with pytest.raises(DataError, match=damaged.name):
        make_part(open_blocks(corpus, tmp_path / "out", CHARACTERS, RULES), 0, 1, QUIET)
    make_part(open_blocks(corpus, tmp_path / "out", CHARACTERS, TOLERANT), 0, 1, QUIET)
    with pytest.raises(DataError, match=damaged.name):
        prepare(corpus, tmp_path / "out", CHARACTERS, RULES, QUIET)
    got = prepare(corpus, tmp_path / "out", CHARACTERS, TOLERANT, QUIET)
    expected = prepare(corpus, tmp_path / "expected", CHARACTERS, TOLERANT, QUIET)
    assert everything(got.parent) == everything(expected.parent)
    assert read_manifest(got)["inputs"][0]["problems"]["damaged file"] == 1


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[CorpusSource]:
    """Large files of three formats with a fault in each 100 records, and small ones before, between and behind them."""
    chosen, records = random.Random(1), []
    for number in range(9000):
        text = f"{number} " + "".join(chosen.choices("abcdefgh ", k=400))
        records.append("{broken" if number % 100 == 50 else json.dumps({"text": text, "key": text[:3]}))
    paths = [tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.jsonl.zst", "d.parquet", "e.jsonl")]
    paths[0].write_text("\n".join(records[:5]))
    paths[1].write_text("\n".join(records))
    paths[2].write_bytes(zstandard.compress("\n".join(reversed(records)).encode()))
    rows = [json.loads(record) for record in records if record != "{broken"]
    parquet.write_table(pyarrow.Table.from_pylist(rows), paths[3], row_group_size=500)
    paths[4].write_text("\n".join(records[-5:]))
    monkeypatch.setattr(blocks_module, "BLOCK_BYTES", (500_000, 500_000))
    return [CorpusSource(SourceSpec("large", paths), duplicates="keep")]


@pytest.mark.parametrize(("parts", "made"), [(1, [0]), (3, [1]), (2, [1, 0]), (5, [4, 0, 3])])
def test_pieces_of_large_files(tmp_path: Path, large: list[CorpusSource], parts: int, made: list[int]) -> None:
    whole = everything(prepare(large, tmp_path / "whole", CHARACTERS, RULES, QUIET).parent)
    for part in made:
        blocks = open_blocks(large, tmp_path / "out", CHARACTERS, RULES)
        assert len(blocks) > 15
        make_part(blocks, part, parts, QUIET)
    assert sum(map(blocks.size, range(len(blocks)))) == sum(Path(path).stat().st_size for path in large[0].spec.paths)
    assert everything(prepare(large, tmp_path / "out", CHARACTERS, RULES, QUIET).parent) == whole
    named = read_manifest(tmp_path / "out/manifest.json")["inputs"][0]["problems_named"]
    assert f"{large[0].spec.paths[1]}:8951: invalid JSON" in " ".join(named), "lines count from the file's beginning"


def test_a_file_is_read_once_for_all_its_pieces(
    tmp_path: Path, large: list[CorpusSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    chunks = FileReader.chunks
    monkeypatch.setattr(FileReader, "chunks", lambda self, unit: (read.append(unit.path), chunks(self, unit))[1])
    make_part(open_blocks(large, tmp_path / "out", CHARACTERS, RULES), 0, 2, QUIET)
    assert {str(path) for path in large[0].spec.paths[1:4]} <= set(read) and len(read) == len(set(read))


def test_a_process_loads_a_tokenizer_once_for_all_its_blocks(
    tmp_path: Path, corpus: list[CorpusSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a process of Ray's does, which makes one block after the other."""
    blocks, loaded = open_blocks(corpus, tmp_path / "out", CHARACTERS, RULES), list[Path]()
    load = workers.load_saved_tokenizer
    monkeypatch.setattr(workers, "load_saved_tokenizer", lambda folder: (loaded.append(folder), load(folder))[1])
    for number in blocks.missing():
        blocks.make([number], 0)
    assert len(loaded) == 1 and not blocks.missing()
    other = open_blocks(corpus, tmp_path / "other", CHARACTERS, RULES)
    other.make([0], 0)
    assert len(loaded) == 2, "another folder has another tokenizer"


def test_damage_within_a_piece(tmp_path: Path, large: list[CorpusSource]) -> None:
    """Pieces before it are whole; those behind it name it as well and hold nothing."""
    path = Path(large[0].spec.paths[2])
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)
    blocks = open_blocks(large, tmp_path / "strict", CHARACTERS, RULES)
    with pytest.raises(DataError, match=path.name) as raised:
        make_part(blocks, 0, 1, QUIET)
    assert str(raised.value).count(path.name) == 1, "one reason, however many pieces have it"
    missing = blocks.missing()
    assert len(missing) == 2 and missing[-1] < len(blocks) - 3, "pieces before the damage and later files are made"
    for part in (1, 0):
        make_part(open_blocks(large, tmp_path / "out", CHARACTERS, TOLERANT), part, 2, QUIET)
    got = prepare(large, tmp_path / "out", CHARACTERS, TOLERANT, QUIET)
    expected = prepare(large, tmp_path / "expected", CHARACTERS, TOLERANT, QUIET)
    assert everything(got.parent) == everything(expected.parent)
    assert read_manifest(got)["inputs"][0]["problems"]["damaged file"] == 1


def test_strict_is_strict_about_blocks(tmp_path: Path, corpus: list[CorpusSource]) -> None:
    make_part(open_blocks(corpus, tmp_path / "out", CHARACTERS, RULES), 0, 1, QUIET)
    strict = Rules(RULES.valid_fraction, RULES.test_fraction, strict=True)
    with pytest.raises(DataError, match="books0.jsonl:122: invalid JSON"):
        prepare(corpus, tmp_path / "out", CHARACTERS, strict, QUIET)


def test_a_tokenizer_is_trained_once_for_all_hosts(tmp_path: Path, corpus: list[CorpusSource]) -> None:
    trained = []

    def train(folder: Path) -> object:
        trained.append(folder)
        return CHARACTERS

    for part in range(2):
        make_part(open_blocks(corpus, tmp_path / "out", train, RULES), part, 2, QUIET)  # type: ignore[arg-type]
    prepare(corpus, tmp_path / "out", train, RULES, QUIET)  # type: ignore[arg-type]
    assert len(trained) == 1


def test_a_block_that_is_not_complete_is_not_there(
    tmp_path: Path, corpus: list[CorpusSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks: Blocks = open_blocks(corpus, tmp_path / "out", CHARACTERS, RULES)
    monkeypatch.setattr(blocks_module, "flush", lambda path: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(OSError, match="No space"):
        blocks.make([0], 0)
    assert len(blocks.missing()) == len(blocks) and not list(blocks.folder.glob("*block*"))


def test_the_plan_measures_a_core(corpus: list[CorpusSource], monkeypatch: pytest.MonkeyPatch) -> None:
    text = plan(corpus, CHARACTERS, RULES, 4)
    size = sum(Path(path).stat().st_size for source in corpus for path in source.spec.paths)
    assert "books: 3 units" in text and f"the first {size / 1e6:.1f} MB" in text and "with 4 workers" in text
    assert "no rate" in plan(corpus, lambda folder: CHARACTERS, RULES, 4)


@pytest.mark.parametrize(("size", "mebibytes"), [(0, 8), (10**9, 8), (9 << 30, 64), (10 << 30, 64), (10**12, 256)])
def test_small_corpora_have_small_blocks(size: int, mebibytes: int) -> None:
    assert blocks_module._block_bytes(size) == mebibytes << 20
