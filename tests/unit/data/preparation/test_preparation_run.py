"""Preparation: the same shards whatever the processes and the interruptions; duplicates, splits, faults, weights."""

import gzip
import io
import json
import os
import random
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from megatron_coca.config import load_config
from megatron_coca.data import DataError, Shard, SourceSpec, load_saved_tokenizer, load_tokenizer
from megatron_coca.data.preparation import blocks
from megatron_coca.data.preparation.manifest import read_manifest, training_weights
from megatron_coca.data.preparation.preparation_plan import CorpusSource, Execution, Rules, find_inputs, split_of
from megatron_coca.data.preparation.run import prepare, prepare_part
from megatron_coca.data.preparation.shard_files import Outputs
from megatron_coca.data.preparation.workers import ChunkTokenizer, Pool
from megatron_coca.data.readers.files import FileReader
from megatron_coca.data.shards import ShardWriter
from megatron_coca.data.tokenizers.chat import ChatTemplate
from megatron_coca.work import folders
from megatron_coca.work.folders import partial_folder

CHARACTERS = load_tokenizer("CharLevelTokenizer")
SHAPE = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "seq_length": 4}
QUIET = Execution(progress=False)


def write_jsonl(path: Path, texts: list[str], **fields: Any) -> Path:
    path.write_text("".join(json.dumps({"text": t, "key": f"k{i}"} | fields) + "\n" for i, t in enumerate(texts)))
    return path


def source(name: str, *paths: Path, **treatment: Any) -> CorpusSource:
    return CorpusSource(SourceSpec(name, paths), **treatment)


def texts_of(prefix: Path) -> list[str]:
    shard = Shard(prefix)
    return [CHARACTERS.decode(shard.document(i)) for i in range(shard.documents)]


def everything(folder: Path) -> dict[str, bytes]:
    """The files of a preparation, except its record of paths."""
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix in (".bin", ".idx", ".model", ".json")}


@pytest.fixture
def corpus(tmp_path: Path) -> list[CorpusSource]:
    """Two sources in five files, with duplicates within and across them, and faults."""
    chosen = random.Random(0)
    sources = []
    for name in ("books", "code"):
        paths = []
        for number in range(3 if name == "books" else 2):
            texts = [f"{name} {chosen.randrange(150)} " * chosen.randrange(1, 40) for _ in range(120)]
            paths.append(write_jsonl(tmp_path / f"{name}{number}.jsonl", [*texts, "the same in both"]))
            with paths[-1].open("a") as stream:
                stream.write("{broken\n")
        sources.append(source(name, *paths))
    return sources


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut files every 2,000 bytes instead of every megabyte, and make a block of every 20,000."""
    monkeypatch.setattr(blocks, "open_reader", lambda spec: FileReader(spec, block=2000))
    monkeypatch.setattr(blocks, "BLOCK_BYTES", (20_000, 20_000))


RULES = Rules(valid_fraction=0.1, test_fraction=0.2)
ALL = Rules(valid_fraction=0, test_fraction=0)


def test_shards_manifest_tokenizer_and_run_config(tmp_path: Path) -> None:
    texts = [f"document {i} " * (i % 7 + 1) for i in range(200)]
    path = write_jsonl(tmp_path / "c.jsonl", texts)
    with path.open("a") as stream:
        stream.write("{broken\n")
    manifest = prepare([source("c", path)], tmp_path / "out", CHARACTERS, RULES, QUIET)
    record = read_manifest(manifest)
    (entry,), (read,) = record["sources"], record["inputs"]
    assert read["problems"] == {"invalid JSON": 1} and f"{path}:201" in read["problems_named"][0]
    for split in ("train", "valid", "test"):
        expected = [t for i, t in enumerate(texts) if split_of(f"k{i}", RULES) == split]
        assert texts_of(manifest.parent / entry[split]["prefix"]) == expected
        assert entry[split]["documents"] == len(expected) > 5
        assert entry[split]["bytes"] == sum(map(len, expected)) == entry[split]["tokens"] - len(expected)
    assert load_saved_tokenizer(manifest.parent).fingerprint == CHARACTERS.fingerprint
    config = load_config(manifest.parent / "data.yml", SHAPE)
    assert config.data.train_data_paths == [str(manifest.parent / "c_train")]
    assert config.model.vocab_size == CHARACTERS.vocab_size
    assert not partial_folder(tmp_path / "out").exists()


def test_the_result_does_not_depend_on_the_processes(tmp_path: Path, corpus: list[CorpusSource]) -> None:
    for workers in (0, 2):
        prepare(corpus, tmp_path / f"by{workers}", CHARACTERS, RULES, Execution(workers, progress=False))
    assert everything(tmp_path / "by0") == everything(tmp_path / "by2")


class Killed(BaseException):
    """Stands for a kill: nothing of ours catches it."""


def chats(tmp_path: Path) -> CorpusSource:
    """Chats with labels of their answers, some of them twice."""
    chosen = random.Random(3)
    records = []
    for _ in range(150):
        question, answer = (f"{word} {chosen.randrange(90)} " * chosen.randrange(1, 20) for word in ("why", "because"))
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        records.append(json.dumps({"messages": messages * chosen.randrange(1, 4)}) + "\n")
    (tmp_path / "chats.jsonl").write_text("".join(records))
    return CorpusSource(SourceSpec("chats", [tmp_path / "chats.jsonl"], messages="answers"))


@pytest.mark.parametrize("seed", range(4))
def test_killed_anywhere_it_ends_with_the_same_bytes(
    tmp_path: Path, corpus: list[CorpusSource], small: None, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With labels from seed 2 on."""
    tokenizer = load_tokenizer("CharLevelTokenizer")
    if seed > 1:
        turns = "{% for each in messages %}{{ each.role }}:{{ each.content }}.{% endfor %}"
        tokenizer.chat = ChatTemplate(turns + "{% if add_generation_prompt %}assistant:{% endif %}", {})
        corpus = [*corpus, chats(tmp_path)]
    with monkeypatch.context() as patched:
        patched.setattr(blocks, "BLOCK_BYTES", (1 << 30, 1 << 30))
        prepare(corpus, tmp_path / "whole", tokenizer, RULES, QUIET)
    assert (tmp_path / "whole" / "chats_train_label.bin").exists() == (seed > 1)
    chosen, kills = random.Random(seed), 0
    tokenize, write = ChunkTokenizer.tokenize, Outputs.write

    def tokenize_sometimes(self: ChunkTokenizer, *arguments: Any) -> Any:
        if chosen.random() < 0.05:
            raise Killed
        return tokenize(self, *arguments)

    def write_sometimes(self: Outputs, *arguments: Any) -> None:
        write(self, *arguments)
        if chosen.random() < 0.01:
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(ChunkTokenizer, "tokenize", tokenize_sometimes)
        patched.setattr(Outputs, "write", write_sometimes)
        while kills < 25:
            try:
                prepare(corpus, tmp_path / "out", tokenizer, RULES, QUIET)
                break
            except Killed:
                kills += 1
    if kills == 25:
        prepare(corpus, tmp_path / "out", tokenizer, RULES, QUIET)
    assert kills > 0
    assert everything(tmp_path / "out") == everything(tmp_path / "whole")


@pytest.mark.parametrize("when", ["hash", "run config", "rename"])
def test_killed_at_its_end_nothing_is_tokenized_again(
    tmp_path: Path, corpus: list[CorpusSource], when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(corpus, tmp_path / "whole", CHARACTERS, RULES, QUIET)

    complete = folders.complete_folder

    def kill(*arguments: Any) -> None:
        if when == "rename" and arguments[1] != tmp_path / "out":
            complete(*arguments)
        else:
            raise Killed

    place = {
        "hash": "megatron_coca.data.preparation.shard_files.shard_facts",
        "run config": "megatron_coca.data.preparation.manifest.write_run_config",
        "rename": "megatron_coca.work.folders.complete_folder",
    }[when]
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(place, kill)
        prepare(corpus, tmp_path / "out", CHARACTERS, RULES, QUIET)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(ChunkTokenizer, "tokenize", lambda *_: pytest.fail("a chunk was tokenized again"))
    prepare(corpus, tmp_path / "out", CHARACTERS, RULES, QUIET)
    assert everything(tmp_path / "out") == everything(tmp_path / "whole")
    assert sorted(path.suffix for path in (tmp_path / "out").iterdir() if path.suffix not in (".bin", ".idx")) == [
        ".json",
        ".json",
        ".yml",
    ]
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == ["out"]


def test_killed_before_its_blocks_are_removed(
    tmp_path: Path, corpus: list[CorpusSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(output: Path) -> None:
        raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr("megatron_coca.data.preparation.run.remove_blocks", kill)
        prepare(corpus, tmp_path / "out", CHARACTERS, RULES, QUIET)
    assert blocks.blocks_folder(tmp_path / "out").exists()
    before = everything(tmp_path / "out")
    assert prepare(corpus, tmp_path / "out", CHARACTERS, RULES, QUIET) == tmp_path / "out" / "manifest.json"
    assert everything(tmp_path / "out") == before
    assert prepare_part(corpus, tmp_path / "out", CHARACTERS, 1, 3, RULES, QUIET).endswith("out: is complete")
    for rules in (replace(RULES, valid_fraction=0.25), replace(RULES, strict=not RULES.strict)):
        with pytest.raises(DataError, match="out: exists already"):
            prepare(corpus, tmp_path / "out", CHARACTERS, rules, QUIET)
    first = Path(corpus[0].spec.paths[0])
    first.write_bytes(first.read_bytes() + first.read_bytes())
    with pytest.raises(DataError, match="out: exists already"):
        prepare(corpus, tmp_path / "out", CHARACTERS, RULES, QUIET)
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == ["out"]


@pytest.mark.parametrize(("where", "times"), [("save", 2), ("later", 1)])
def test_a_tokenizer_is_made_once_and_again_where_it_was_not_saved(
    tmp_path: Path, corpus: list[CorpusSource], where: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def make(folder: Path) -> Any:
        made.append(1)
        return CHARACTERS

    def kill(*_: Any, **__: Any) -> None:
        raise Killed

    place = {
        "save": "megatron_coca.data.tokenizers.kinds.Tokenizer.save",
        "later": "megatron_coca.data.preparation.blocks.Blocks.make",
    }[where]
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(place, kill)
        prepare(corpus, tmp_path / "out", make, RULES, QUIET)
    prepare(corpus, tmp_path / "out", make, RULES, QUIET)
    assert len(made) == times


def test_a_folder_made_while_the_inputs_are_listed_is_kept(
    tmp_path: Path, corpus: list[CorpusSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(sources: list[CorpusSource]) -> Any:
        (tmp_path / "out").mkdir()
        return find_inputs(sources)

    with monkeypatch.context() as patched, pytest.raises(DataError, match="exists already"):
        patched.setattr("megatron_coca.data.preparation.run.find_inputs", slowly)
        prepare(corpus, tmp_path / "out", CHARACTERS, RULES, QUIET)
    assert not partial_folder(tmp_path / "out").exists() and not (tmp_path / ".out.lock").exists()


def test_two_at_once_are_an_error(tmp_path: Path, corpus: list[CorpusSource], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    complete = folders.complete_folder

    def second(partial: Path, final: Path) -> None:
        if final == tmp_path / "out":
            with pytest.raises(DataError, match="another process is writing it"):
                prepare(corpus, tmp_path / "out", CHARACTERS, RULES, QUIET)
            seen.append("refused")
        complete(partial, final)

    monkeypatch.setattr("megatron_coca.work.folders.complete_folder", second)
    prepare(corpus, tmp_path / "out", CHARACTERS, RULES, QUIET)
    assert seen == ["refused"]


def test_equal_texts_are_written_once_unless_kept(tmp_path: Path, corpus: list[CorpusSource]) -> None:
    rules = ALL
    prepare(corpus, tmp_path / "once", CHARACTERS, rules, QUIET)
    once = [text for name in ("books", "code") for text in texts_of(tmp_path / "once" / f"{name}_train")]
    assert len(set(once)) == len(once) and "the same in both" in texts_of(tmp_path / "once" / "books_train")
    kept = [replace(each, duplicates="keep") for each in corpus]
    prepare(kept, tmp_path / "kept", CHARACTERS, rules, QUIET)
    every = [text for name in ("books", "code") for text in texts_of(tmp_path / "kept" / f"{name}_train")]
    assert len(every) == 5 * 121 and set(every) == set(once)
    read = read_manifest(tmp_path / "once" / "manifest.json")["inputs"]
    assert [entry["records"] for entry in read] == [3 * 122, 2 * 122], "with the faulty ones"
    left_out = [entry["left_out"] for entry in read]
    assert sum(found["duplicate"] for found in left_out) == len(every) - len(once)


def test_a_source_that_keeps_all_counts_for_the_ones_after_it(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", ["one", "two", "one"])
    other = write_jsonl(tmp_path / "d.jsonl", ["two", "three"])
    prepare([source("a", path, duplicates="keep"), source("b", other)], tmp_path / "out", CHARACTERS, ALL, QUIET)
    assert texts_of(tmp_path / "out" / "a_train") == ["one", "two", "one"]
    assert texts_of(tmp_path / "out" / "b_train") == ["three"]


def test_a_fraction_is_the_same_documents_in_any_order(tmp_path: Path) -> None:
    texts = [f"text {i}" for i in range(2000)]
    chosen = []
    for name, ordered in (("a", texts), ("b", texts[::-1])):
        path = write_jsonl(tmp_path / f"{name}.jsonl", ordered)
        prepare([source("s", path, fraction=0.25)], tmp_path / name, CHARACTERS, ALL, QUIET)
        chosen.append(set(texts_of(tmp_path / name / "s_train")))
    assert chosen[0] == chosen[1] and 440 < len(chosen[0]) < 560


def test_added_files_do_not_move_documents_between_splits(tmp_path: Path) -> None:
    first = write_jsonl(tmp_path / "a.jsonl", [f"first {i}" for i in range(300)])
    second = tmp_path / "b.jsonl"
    second.write_text("".join(json.dumps({"text": f"second {i}"}) + "\n" for i in range(300)))
    prepare([source("s", first)], tmp_path / "before", CHARACTERS, RULES, QUIET)
    prepare([source("s", second, first)], tmp_path / "after", CHARACTERS, RULES, QUIET)
    for split in ("train", "valid", "test"):
        before, after = (set(texts_of(tmp_path / name / f"s_{split}")) for name in ("before", "after"))
        assert before == {text for text in after if text.startswith("first")}


def test_files_of_a_folder_that_are_not_read_are_told(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", ["text"])
    (folder / "b.zip").write_bytes(b"PK")
    record = read_manifest(prepare([source("s", folder)], tmp_path / "out", CHARACTERS, ALL, QUIET))
    assert record["inputs"][0]["unread"] == {"not a readable file (.zip)": 1}


def test_a_source_can_be_one_split(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [f"text {i}" for i in range(50)])
    prepare([source("s", path, split="valid")], tmp_path / "out", CHARACTERS, RULES, QUIET)
    assert len(texts_of(tmp_path / "out" / "s_valid")) == 50 and not (tmp_path / "out" / "s_train.bin").exists()


def pile(tmp_path: Path, names: list[str]) -> Path:
    path = tmp_path / "pile.jsonl"
    rows = [{"text": f"text {i}", "meta": {"pile_set_name": names[i % len(names)]}} for i in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_sets_become_shards_with_weights(tmp_path: Path) -> None:
    path = pile(tmp_path, ["Pile-CC", "PubMed Central", "Github"])
    weights = {"Pile-CC": 3.0, "PubMed Central": 1.0, "Books3": 1.0}
    spec = SourceSpec("pile", [path], sets=tuple(weights), divide=True)
    rest = source("rest", write_jsonl(tmp_path / "rest.jsonl", ["a text"] * 3), weight=0.25)
    prepare([CorpusSource(spec, 0.75, weights), rest], tmp_path / "out", CHARACTERS, ALL, QUIET)
    record = read_manifest(tmp_path / "out" / "manifest.json")
    assert [entry["name"] for entry in record["sources"]] == ["pile_pile-cc", "pile_pubmed-central", "rest"]
    assert record["inputs"][0]["left_out"] == {"set not chosen": 20}
    assert record["inputs"][0]["sets_missing"] == ["Books3"]
    keys = yaml.safe_load((tmp_path / "out" / "data.yml").read_text())
    assert keys["train_data_weights"] == [0.5625, 0.1875, 0.25]


def test_a_listed_set_that_never_comes_is_told(tmp_path: Path) -> None:
    spec = SourceSpec("pile", [pile(tmp_path, ["Pile-CC", "ArXiv"])], sets=("ArXiv", "Pile-cc"))
    record = read_manifest(prepare([CorpusSource(spec)], tmp_path / "out", CHARACTERS, ALL, QUIET))
    assert [entry["name"] for entry in record["sources"]] == ["pile"]
    assert record["inputs"][0]["sets_missing"] == ["Pile-cc"]


def test_shards_with_one_file_name_are_errors(tmp_path: Path) -> None:
    spec = SourceSpec("pile", [pile(tmp_path, ["Pile-CC", "pile CC"])], divide=True)
    with pytest.raises(DataError, match=r"pile, set 'Pile-CC'.*, set 'pile CC'"):
        prepare([CorpusSource(spec)], tmp_path / "out", CHARACTERS, None, QUIET)
    path = pile(tmp_path, ["C"])
    sources = [
        source("a_c", path, duplicates="keep"),
        CorpusSource(SourceSpec("a", [path], divide=True), duplicates="keep"),
    ]
    with pytest.raises(DataError, match="a_c_train: a_c and a, set 'C', would be written"):
        prepare(sources, tmp_path / "out", CHARACTERS, ALL, QUIET)


@pytest.mark.parametrize(
    ("rules", "valid", "test"),
    [
        (Rules(0, 0.3), [], ["s_test"]),
        (Rules(0.3, 0), ["s_valid"], []),
        (Rules(0.3, 0.3), ["s_valid"], ["s_test"]),
        (Rules(1e-9, 1e-9), [], []),
    ],
)
def test_no_held_out_split_stands_for_the_other(
    tmp_path: Path, rules: Rules, valid: list[str], test: list[str]
) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", [f"text {i}" for i in range(50)])
    prepare([source("s", path)], tmp_path / "out", CHARACTERS, rules, QUIET)
    keys, text = load_config(tmp_path / "out" / "data.yml", SHAPE).data, (tmp_path / "out" / "data.yml").read_text()
    for split, paths, names in (("valid", keys.valid_data_paths, valid), ("test", keys.test_data_paths, test)):
        assert paths == [str(tmp_path / "out" / name) for name in names]
        fraction = rules.valid_fraction if split == "valid" else rules.test_fraction
        assert (f": the {split} split has no documents, so " in text) == (not names and fraction > 0)
        assert (f"{split}_fraction is 0, so " in text) == (fraction == 0)


def test_an_empty_split_of_documents_with_keys_names_the_key(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text("".join(json.dumps({"text": f"text {i}", "book": "one"}) + "\n" for i in range(50)))
    books = CorpusSource(SourceSpec("s", (str(path),), fields={"key": "book"}))
    prepare([books], tmp_path / "out", CHARACTERS, Rules(1e-9, 1e-9), QUIET)
    assert "or choose a key with more different values" in (tmp_path / "out" / "data.yml").read_text()


def test_the_name_of_the_output_is_not_in_the_encoding_of_the_locale(tmp_path: Path) -> None:
    """In a locale with ASCII, Python represents the two bytes of an accented letter as surrogates."""
    folder = tmp_path / "cr\udcc3\udca8me"
    prepare([source("s", write_jsonl(tmp_path / "c.jsonl", ["a text"]))], folder, CHARACTERS, ALL, QUIET)
    header = (tmp_path / "cr\u00e8me" / "data.yml").read_text(encoding="utf-8").splitlines()[0]
    assert "cr\\udcc3\\udca8me/data.yml" in header


def test_small_weights_stay_positive() -> None:
    entries = [
        {"name": name, "source": name, "part": "", **{split: {"tokens": 5} for split in ("train", "valid", "test")}}
        for name in "ab"
    ]
    assert training_weights([source("a", weight=1.0), source("b", weight=1e8)], entries) == {"a": 1e-08, "b": 1.0}


def test_without_weights_a_source_counts_by_its_tokens() -> None:
    def entry(name: str, part: str, tokens: int) -> dict[str, Any]:
        splits = {split: {"tokens": tokens if split == "train" else 0} for split in ("train", "valid", "test")}
        return {"name": f"{name}{part}", "source": name, "part": part} | splits

    entries = [entry("a", "x", 100), entry("a", "y", 300), entry("b", "", 400)]
    sources = [source("a", set_weights={"x": 1, "y": 1}), source("b")]
    assert training_weights(sources, entries) == {"ax": 0.25, "ay": 0.25, "b": 0.5}
    assert training_weights([source("a"), source("b")], entries) == {"ax": 0.125, "ay": 0.375, "b": 0.5}
    weighted = [source("a", weight=9), source("b", weight=1)]
    assert training_weights(weighted, entries) == {"ax": 0.225, "ay": 0.675, "b": 0.1}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_damaged_file_is_fatal_and_the_work_on_others_is_kept(
    tmp_path: Path, workers: int, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = write_jsonl(tmp_path / "a.jsonl", [f"text {random.Random(i).random()}" for i in range(3000)])
    packed = gzip.compress(whole.read_bytes().replace(b'"text ', b'"other '))
    damaged = tmp_path / "b.jsonl.gz"
    damaged.write_bytes(packed[:-2000])
    sources = [source("s", damaged, whole)]
    with pytest.raises(DataError, match=r"b\.jsonl\.gz.*check that the file is complete"):
        prepare(sources, tmp_path / "out", CHARACTERS, RULES, Execution(workers, progress=False))
    assert not (tmp_path / "out").exists()
    damaged.write_bytes(packed)
    tokenized, tokenize = list[str](), ChunkTokenizer.tokenize

    def noting(self: ChunkTokenizer, number: int, chunk: Any) -> Any:
        tokenized.append(chunk.path)
        return tokenize(self, number, chunk)

    monkeypatch.setattr(ChunkTokenizer, "tokenize", noting)
    manifest = prepare(sources, tmp_path / "out", CHARACTERS, RULES, QUIET)
    assert set(tokenized) == {str(damaged)}
    assert read_manifest(manifest)["inputs"][0]["written"] == 6000


def test_strict_stops_at_the_first_fault(tmp_path: Path, corpus: list[CorpusSource]) -> None:
    with pytest.raises(DataError, match=r"books0\.jsonl:122: invalid JSON"):
        prepare(corpus, tmp_path / "out", CHARACTERS, replace(RULES, strict=True), Execution(2, progress=False))


@pytest.mark.parametrize("content", ["", "\n\n", '{"text": ""}\n', "garbage\n"])
def test_an_empty_corpus_is_an_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "c.jsonl").write_text(content)
    with pytest.raises(DataError, match=r"no usable document in .*c\.jsonl"):
        prepare([source("c", tmp_path / "c.jsonl")], tmp_path / "out", CHARACTERS, None, QUIET)
    assert not (tmp_path / "out").exists() and not partial_folder(tmp_path / "out").exists()


def test_what_exists_is_kept(tmp_path: Path, corpus: list[CorpusSource]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    with pytest.raises(DataError, match="exists already"):
        prepare(corpus, tmp_path / "out", CHARACTERS, None, QUIET)
    assert (tmp_path / "out" / "mine").read_text() == "precious"


@pytest.mark.parametrize(
    ("full", "kept"),
    [
        ((ShardWriter, "finish"), r"[1-9] blocks are kept in .*out\.blocks"),
        ((blocks.Blocks, "_write"), "no finished block exists yet"),
    ],
)
def test_a_full_disk_says_what_is_kept(
    tmp_path: Path, corpus: list[CorpusSource], monkeypatch: pytest.MonkeyPatch, full: tuple[type, str], kept: str
) -> None:
    prepare(corpus, tmp_path / "whole", CHARACTERS, RULES, QUIET)

    def no_space(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with (
        monkeypatch.context() as patched,
        pytest.raises(DataError, match=rf"No space left.*free some space.* \({kept}"),
    ):
        patched.setattr(*full, no_space)
        prepare(corpus, tmp_path / "out", CHARACTERS, RULES, QUIET)
    assert not (tmp_path / "out").exists()
    prepare(corpus, tmp_path / "out", CHARACTERS, RULES, QUIET)
    assert everything(tmp_path / "out") == everything(tmp_path / "whole")


def test_a_lost_worker_is_an_error_that_can_be_gone_on_from(
    tmp_path: Path, corpus: list[CorpusSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(corpus, tmp_path / "whole", CHARACTERS, RULES, QUIET)
    submit = Pool.submit

    def ending(self: Pool, *arguments: Any) -> Any:
        result = submit(self, *arguments)
        for process in list(self._executor._processes.values()):  # type: ignore[union-attr]
            process.kill()
        return result

    with monkeypatch.context() as patched, pytest.raises(DataError, match="workers: a worker process was") as error:
        patched.setattr(Pool, "submit", ending)
        prepare(corpus, tmp_path / "out", CHARACTERS, RULES, Execution(2, progress=False))
    assert error.value.status == 1, "a scheduler starts the command again"
    prepare(corpus, tmp_path / "out", CHARACTERS, RULES, QUIET)
    assert everything(tmp_path / "out") == everything(tmp_path / "whole")


@pytest.mark.parametrize(
    ("treatments", "rules", "message"),
    [
        ([{}, {}], Rules(), "their names must be unique"),
        ([{"weight": -1.0}], Rules(), "positive"),
        ([{"fraction": 0.0}], Rules(), r"fraction: must be above 0 and at most 1, not 0.0"),
        ([{"split": "dev"}], Rules(), "split: .*train, valid, test, not 'dev'"),
        ([{"duplicates": "all"}], Rules(), "s: duplicates: must be exact or keep, not 'all'"),
        ([{}], Rules(0.6, 0.6), "and their sum must be between 0 and 1"),
    ],
)
def test_meaningless_options_are_errors(
    tmp_path: Path, treatments: list[dict[str, Any]], rules: Rules, message: str
) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", ["text"])
    with pytest.raises(DataError, match=message):
        prepare([source("s", path, **each) for each in treatments], tmp_path / "out", CHARACTERS, rules, QUIET)


def test_weights_are_given_to_all_or_none(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", ["text"])
    with pytest.raises(DataError, match="b: no weight, but other sources have weights"):
        prepare([source("a", path, weight=1.0), source("b", path)], tmp_path / "out", CHARACTERS, None, QUIET)


def test_split_is_stable_and_near_its_fractions() -> None:
    rules = Rules(valid_fraction=0.03, test_fraction=0.03)
    splits = [split_of(f"document {i}", rules) for i in range(20000)]
    # Other numbers here would move documents between the splits of every corpus.
    assert np.flatnonzero(np.array(splits) == "test")[:4].tolist() == [21, 22, 55, 59]
    for held_out in ("valid", "test"):
        assert 0.026 < splits.count(held_out) / 20000 < 0.034
    assert [s for s in splits if s == "test"] == [
        s for i in range(20000) if (s := split_of(f"document {i}", Rules(0, 0.03))) == "test"
    ]


def test_names_that_are_not_utf8_do_not_end_a_preparation(tmp_path: Path) -> None:
    """In a folder of files they are skipped and named; repositories, and files in archives, are read."""
    files, code = tmp_path / "files", tmp_path / "code"
    (code / "fine" / ".git").mkdir(parents=True)
    files.mkdir()
    write_jsonl(files / "a.jsonl", ["a text"])
    write_jsonl(Path(os.fsdecode(os.fsencode(files) + b"/b\xff.jsonl")), ["another text"])
    odd = Path(os.fsdecode(os.fsencode(code) + b"/odd\xff"))
    (odd / ".git").mkdir(parents=True)
    (odd / "a.py").write_text("print(1)\n")
    (odd / "b.py").write_bytes(b"\xff\xfe\xff\n")
    with tarfile.open(files / "c.tar", "w", errors="surrogateescape") as archive:
        for name, content in {"x\udcff.txt": b"in an archive", "y\udcff.txt": b"\xff"}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    repositories = CorpusSource(SourceSpec("code", [code], reader="repositories"))
    output = tmp_path / "out"
    prepare([replace(source("files", files), max_faulty=0.4), repositories], output, CHARACTERS, Rules(0, 0), QUIET)
    inputs = {entry["name"]: entry for entry in read_manifest(output / "manifest.json")["inputs"]}
    assert inputs["files"]["unread"] == {"name that is not UTF-8": 1}
    assert inputs["files"]["problems_named"] == [f"{files}/c.tar!y\\xff.txt: invalid UTF-8 (byte 0)"]
    assert inputs["code"]["problems_named"] == [f"{code}/odd\\xff/b.py: invalid UTF-8 (byte 0)"]
    assert texts_of(output / "files_train") == ["a text", "in an archive"]
    assert texts_of(output / "code_train") == ["print(1)\n"]
