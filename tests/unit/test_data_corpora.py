"""The split, the preparation and its command."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from megatron_coca.data.prepare import read_manifest, split_of, training_texts

from megatron_coca.data import DataError, Shard, SourceSpec, load_saved_tokenizer, load_tokenizer, prepare
from megatron_coca.data.aside import written_aside
from megatron_coca.data.shards import ShardWriter

ROOT = Path(__file__).resolve().parents[2]
CHARACTERS = load_tokenizer("CharLevelTokenizer")


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text, "key": f"k{i}"}) + "\n" for i, text in enumerate(texts)))
    return path


def test_text_files_are_one_document_each(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n two\n")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"three"))
    (tmp_path / "readme.md").write_text("not read")
    tokenized = prepare(
        [SourceSpec("books", [tmp_path])], tmp_path / "out", CHARACTERS, test_fraction=0.0, progress=False
    )
    shard = Shard(tokenized.parent / "books_train")
    assert [CHARACTERS.decode(shard.document(i)) for i in range(2)] == ["one\n two\n", "three"]


def test_split_is_stable_and_near_its_fraction() -> None:
    held_out = [i for i in range(20000) if split_of(f"document {i}", 0.03) == "test"]
    assert held_out[:4] == [
        21,
        22,
        55,
        59,
    ]  # other numbers here would move documents between the splits of every corpus
    assert 0.026 < len(held_out) / 20000 < 0.034


def test_prepare_writes_shards_manifest_and_tokenizer(tmp_path: Path) -> None:
    texts = [f"document {i} " * (i % 7 + 1) for i in range(200)]
    path = write_jsonl(tmp_path / "c.jsonl", texts)
    with path.open("a") as stream:
        stream.write("{broken\n")
    manifest = prepare([SourceSpec("c", [path])], tmp_path / "out", CHARACTERS, test_fraction=0.2, progress=False)
    (source,) = read_manifest(manifest)["sources"]
    assert source["problems"] == {"invalid JSON": 1} and f"{path}:201" in source["problems_named"][0]
    for split in ("train", "test"):
        expected = [t for i, t in enumerate(texts) if split_of(f"k{i}", 0.2) == split]
        shard = Shard(manifest.parent / source[split]["prefix"])
        assert [CHARACTERS.decode(shard.document(i)) for i in range(shard.documents)] == expected
        assert all(shard.document(i)[-1] == CHARACTERS.eod for i in range(shard.documents))
        assert (source[split]["documents"], source[split]["tokens"]) == (len(expected), shard.len_tokens)
        assert source[split]["bytes"] == sum(map(len, expected))
    assert load_saved_tokenizer(manifest.parent).fingerprint == CHARACTERS.fingerprint


@pytest.mark.parametrize("content", ["", "\n\n", '{"text": ""}\n', "garbage\n"])
def test_empty_corpus_leaves_nothing_behind(tmp_path: Path, content: str) -> None:
    (tmp_path / "c.jsonl").write_text(content)
    with pytest.raises(DataError, match=r"no usable document in .*c\.jsonl"):
        prepare([SourceSpec("c", [tmp_path / "c.jsonl"])], tmp_path / "out", CHARACTERS, progress=False)
    with pytest.raises(DataError, match="no usable document"):
        list(training_texts([SourceSpec("c", [tmp_path / "c.jsonl"])], 0.03, 1000))
    assert [p.name for p in tmp_path.iterdir()] == ["c.jsonl"]


def test_existing_output_is_kept(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", ["text"])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    with pytest.raises(DataError, match="exists already"):
        prepare([SourceSpec("c", [path])], tmp_path / "out", CHARACTERS, progress=False)
    assert (tmp_path / "out" / "mine").read_text() == "precious"


def test_full_disk_leaves_nothing_under_the_final_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", ["text " * 100] * 50)

    def no_space(self: ShardWriter) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ShardWriter, "finish", no_space)
    with pytest.raises(DataError, match="No space left on device"):
        prepare([SourceSpec("c", [path])], tmp_path / "out", CHARACTERS, progress=False)
    assert [p.name for p in tmp_path.iterdir()] == ["c.jsonl"]


def test_written_aside_keeps_other_errors_and_cleans_up(tmp_path: Path) -> None:
    with pytest.raises(KeyError), written_aside(tmp_path / "out") as folder:
        (folder / "half").write_text("half")
        raise KeyError("fault in the caller")
    assert os.listdir(tmp_path) == []


def run_tool(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "prepare_data.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)


def test_command_trains_a_tokenizer_and_reports(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", [f"the quick brown fox {i} jumps over the lazy dog" for i in range(300)])
    done = run_tool(
        "--input", f"c={path}", "--output", tmp_path / "out", "--train-tokenizer", 320, "--test-fraction", 0.1
    )
    assert done.returncode == 0, done.stderr
    assert "c train: 2" in done.stdout and "Apex" not in done.stderr and "Transformer Engine" not in done.stderr
    tokenizer = load_saved_tokenizer(tmp_path / "out")
    assert tokenizer.vocab_size == 320 and tokenizer.decode(Shard(tmp_path / "out/c_test").document(0)).startswith(
        "the q"
    )


def test_command_reports_bad_input_without_a_traceback(tmp_path: Path) -> None:
    done = run_tool(
        "--input", f"c={tmp_path}/none.jsonl", "--output", tmp_path / "o", "--tokenizer-type", "CharLevelTokenizer"
    )
    assert done.returncode == 2 and "none.jsonl: no such file" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "o").exists()
