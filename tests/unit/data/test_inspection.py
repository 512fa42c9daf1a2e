"""Inspection: known shards give known numbers."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from megatron_coca import cli
from megatron_coca.commands import inspect as inspect_data
from megatron_coca.config import load_config
from megatron_coca.data import inspection
from megatron_coca.data.blend import Blend
from megatron_coca.data.errors import DataError
from megatron_coca.data.inspection import (
    SAMPLE_BOUNDARY,
    ShardEntry,
    document_lengths,
    find_shards,
    length_facts,
    lengths_by_source,
    sample_text,
    token_blocks,
    view_sample,
)
from megatron_coca.data.preparation.manifest import FORMAT
from megatron_coca.data.shards import HEADER, MAGIC, Shard
from megatron_coca.data.tokenizers import load_tokenizer
from megatron_coca.support.markdown_tables import format_table, percent

TEXT = load_tokenizer("CharLevelTokenizer")


def write(prefix: Path, texts: Sequence[str], sequences: int = 1) -> Path:
    """A shard of bytes, each document in so many sequences, with 0 at its end."""
    bodies = [[*TEXT.encode(text), 0] for text in texts]
    pieces = [piece for body in bodies for piece in np.array_split(np.array(body, dtype="<u2"), sequences)]
    lengths = np.array([len(piece) for piece in pieces], dtype="<i4")
    pointers = (np.cumsum(lengths, dtype="<i8") - lengths) * 2
    boundaries = np.arange(0, len(pieces) + 1, sequences, dtype="<i8")
    Path(f"{prefix}.bin").write_bytes(b"".join(piece.tobytes() for piece in pieces))
    header = HEADER.pack(MAGIC, 1, 8, len(pieces), len(boundaries))
    Path(f"{prefix}.idx").write_bytes(header + lengths.tobytes() + pointers.tobytes() + boundaries.tobytes())
    return prefix


BOOKS = ["twice here", "once", "in both splits", "twice here", "naïve Ã© it’s", "bell \x07 \ufffd", "twice here"]
CODE = ["def f(): pass", "in both splits", "x = 'in two sources'"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of two sources with a manifest and a tokenizer."""
    folder = tmp_path_factory.mktemp("shards")
    texts = {
        "books": {"train": BOOKS, "test": ["in both splits", "x = 'in two sources'", "twice here"]},
        "code": {"train": CODE},
    }
    sources = []
    for name, splits in texts.items():
        entry: dict[str, object] = {"name": name, "source": name, "test": {"prefix": None, "documents": 0}}
        for split, chosen in splits.items():
            write(folder / f"{name}_{split}", chosen)
            size = sum(len(text.encode()) for text in chosen)
            entry[split] = {"prefix": f"{name}_{split}", "documents": len(chosen), "bytes": size}
        sources.append(entry)
    (folder / "manifest.json").write_text(json.dumps({"format": FORMAT, "sources": sources}))
    TEXT.save(folder)
    return folder


def test_shards_are_found_by_folder_prefix_and_file(folder: Path, tmp_path: Path) -> None:
    labels = [entry.label for entry in find_shards([folder])]
    assert labels == ["books test", "books train", "code train"]
    named = find_shards([folder / "code_train", folder / "code_train.idx", folder / "books_test.bin"])
    assert [entry.label for entry in named] == ["code train", "books test"]
    assert named[0].documents == len(CODE)
    assert (
        find_shards([write(tmp_path / "own", ["a"])])
        == find_shards([tmp_path])
        == [ShardEntry("own", "", tmp_path / "own")]
    )


def test_nothing_to_find_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="neither manifest.json nor an .idx"):
        find_shards([tmp_path])
    with pytest.raises(DataError, match="shards: no path given"):
        find_shards([])
    with pytest.raises(DataError, match="no such file"):
        lengths_by_source(find_shards([tmp_path / "absent"]))


@pytest.mark.parametrize("key", ["prefix", "labels"])
@pytest.mark.parametrize("name", ["../private", "/home/me/private"])
def test_a_manifest_names_no_shard_outside(name: str, key: str, tmp_path: Path) -> None:
    source = {"name": "books", "train": {"prefix": "books", key: name}}
    (tmp_path / "manifest.json").write_text(json.dumps({"format": FORMAT, "sources": [source]}))
    with pytest.raises(DataError, match=rf"{name}: leads to .*, which is outside the folder"):
        find_shards([tmp_path])


def test_a_name_in_a_table_stays_in_its_cell() -> None:
    """The name of a source must not look like a line of the program."""
    table = format_table(["source\nx", "n"], [["a\n\nno fault was found", 1], ["b", "c\nd"]])
    assert table.splitlines() == [
        "| source x             |   n |",
        "| -------------------- | --: |",
        "| a no fault was found |   1 |",
        "| b                    | c d |",
    ]


@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("at_once", [1, 7, 1 << 20])
def test_documents_in_blocks_are_those_of_the_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sequences: int, at_once: int
) -> None:
    monkeypatch.setattr(inspection, "BLOCK_TOKENS", at_once)
    monkeypatch.setattr(inspection, "BLOCK_DOCUMENTS", 3)
    texts = [*BOOKS, "", "end"]
    prefix = write(tmp_path / "s", texts, sequences)
    blocks = list(token_blocks(Shard(prefix)))
    documents = [part for tokens, lengths in blocks for part in np.split(tokens, np.cumsum(lengths)[:-1])]
    assert [TEXT.decode(tokens) for tokens in documents] == texts
    assert all(len(tokens) <= at_once or len(lengths) == 1 for tokens, lengths in blocks)
    lengths = np.concatenate(list(document_lengths(Shard(prefix))))
    assert lengths.tolist() == [len(TEXT.encode(text)) + 1 for text in texts]


def test_facts_of_lengths() -> None:
    rng = np.random.default_rng(0)
    lengths = np.concatenate(
        (rng.lognormal(6, 2, 4000).astype(np.int64), [0, 1 << 20, (1 << 20) - 1, 1 << 30, 1 << 30])
    )
    found = length_facts(lengths.astype(np.int32))
    assert (found["documents"], found["tokens"]) == (len(lengths), int(lengths.sum()))
    for name, share in inspection.QUANTILES.items():
        assert found[name] == sorted(lengths)[math.ceil(share * len(lengths)) - 1]
    assert found["share_of_tokens_in_longer"]["512"] == lengths[lengths > 512].sum() / lengths.sum()
    assert (found["min"], found["max"]) == (0, 1 << 30)


def test_lengths_by_source(folder: Path) -> None:
    found = lengths_by_source(find_shards([folder]))
    assert {name: lengths["documents"] for name, lengths in found.items()} == {"books": 10, "code": 3}
    assert found["code"]["min"] == len(CODE[0]) + 1


def test_a_sample_shows_its_documents(tmp_path: Path) -> None:
    blend = Blend([Shard(write(tmp_path / "s", ["first", "second one", "third"]))], [1.0], 5, seed=1)
    for number in range(9):
        view = view_sample(blend, number)
        assert np.concatenate(view.parts).tolist() == blend.sample(number).tolist()
        assert view.epoch == number // 3 + 1, "three samples in an epoch"
        assert all(0 not in part[:-1] for part in view.parts), "cut behind the separator and nowhere else"
        assert view.starts_document == (view.first_token in (0, 6, 17))
        text = sample_text(view, TEXT)
        assert text.count(SAMPLE_BOUNDARY) == len(view.parts) - 1
        assert text.partition("\n\n")[2].replace(f"\n{SAMPLE_BOUNDARY}\n", "") == TEXT.decode(blend.sample(number))
        assert f"{int(blend.sample(number)[0])}:" in sample_text(view, TEXT, pieces=True)


@pytest.mark.parametrize("pack_impl", ["unpacked", "pack_until_overflow"])
def test_a_sample_of_whole_documents_has_no_place_in_the_shard(tmp_path: Path, pack_impl: str) -> None:
    shard = Shard(write(tmp_path / "s", ["first", "second one", "third"]))
    view = view_sample(Blend([shard], [1.0], 12, seed=1, pack_impl=pack_impl), 1)
    assert view.first_token is None and view.facts()["first_token"] is None
    assert ", epoch 1, 13 tokens from " in sample_text(view, TEXT)


def test_tables() -> None:
    lines = [
        "| a   |        bb |",
        "| --- | --------: |",
        "| x   | 1,234,567 |",
        "| yy  |         - |",
        "| z   |    0.3333 |",
    ]
    assert format_table(["a", "bb"], [["x", 1234567], ["yy", None], ["z", 1 / 3]]).split("\n") == lines
    assert [percent(share) for share in (0.25, 0.0, 0.000001, None)] == ["25.00%", "0.00%", "1.0e-04%", "-"]


COMMANDS = {
    "lengths": (["lengths", "{}"], "books"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_print_and_write_json(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    arguments, shown = COMMANDS[name]
    out = tmp_path / "new" / "facts.json"
    assert inspect_data.main([*(text.format(folder) for text in arguments), "--json", str(out)]) == 0
    assert shown in capsys.readouterr().out
    assert json.loads(out.read_text())


@pytest.fixture
def config(folder: Path, tmp_path: Path) -> str:
    """A configuration file that trains on the shards."""
    keys = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "seq_length": 4, "train_iters": 10}
    paths = {
        f"{split}_data_paths": [str(folder / "books_train"), str(folder / "code_train")]
        for split in ("train", "valid", "test")
    }
    file = tmp_path / "config.yml"
    file.write_text(json.dumps(keys | paths | {"train_data_weights": [3, 1], "train_micro_batch_size_per_gpu": 4}))
    assert load_config([file])
    return str(file)


def test_the_mixture_of_a_configuration(config: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "m.json"
    assert inspect_data.main(["mixture", config, "--json", str(out), "train_micro_batch_size_per_gpu=8"]) == 0
    facts = json.loads(out.read_text())
    assert facts["samples"] == 80 and [source["samples"] for source in facts["sources"]] == [60, 20]
    assert facts["sources"][1]["tokens_on_disk"] == sum(map(len, CODE)) + 3
    assert "75.00%" in capsys.readouterr().out


def test_keys_may_stand_behind_options(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect_data.main(["sample", config, "--number", "3", "seq_length=6"]) == 0
    assert "sample 3: " in (shown := capsys.readouterr().out) and "(7 tokens) from" in shown
    with pytest.raises(SystemExit):
        inspect_data.main(["sample", config, "--number", "3", "--nonsense"])


@pytest.mark.parametrize(("command", "shown"), [("sample", "sample 1: "), ("mixture", "tokens on disk")])
@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_every_split_can_be_looked_at(
    folder: Path, config: str, capsys: pytest.CaptureFixture[str], command: str, shown: str, split: str
) -> None:
    paths = json.dumps([str(folder / ("books_test" if split == "test" else "books_train"))])
    keys = [f"{name}_data_paths={paths}" for name in ("train", "valid", "test") if name == split]
    keys += ["train_data_weights=[1]"] if split == "train" else []
    number = ["--number", "1"] if command == "sample" else []
    assert inspect_data.main([command, config, "--split", split, *number, *keys]) == 0
    printed = capsys.readouterr().out
    assert shown in printed and ("books_test" in printed) == (split == "test")


def test_the_test_part_of_one_shard(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "seq_length": 4}
    texts = [f"{name}={value}" for name, value in (keys | {"data_path": folder / "books_train"}).items()]
    arguments = ["sample", "--split", "test", "--number", "0", *texts, "split=5,1,1"]
    assert inspect_data.main(arguments) == 0
    heading, _, text = capsys.readouterr().out.partition("\n\n")
    assert "from 1 document(s)" in heading and text.strip() and text.strip() in BOOKS[-1]
    assert cli.main(["inspect", *arguments[:-1], "split=5,1,0"]) == 2
    assert "--split test: the configuration has no such data" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sample", "{config}", "--number", "9" * 23], "9: the largest sample number is 2^62"),
        (["sample", "{config}", "--number", "-1"], "sample -1: does not exist"),
        (["mixture", "{config}", "--samples", "9" * 23], "9: the largest sample number is 2^62"),
    ],
)
def test_what_a_library_would_trip_over(
    folder: Path, config: str, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert cli.main(["inspect", *(text.format(config=config, folder=folder) for text in arguments)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and not captured.out
