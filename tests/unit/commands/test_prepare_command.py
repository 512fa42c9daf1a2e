"""The command prepare: options that are zero, faulty records, tokenizers that lose text, start and end tokens."""

import gzip
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers

from megatron_coca.commands import generate, prepare
from megatron_coca.config import load_config
from megatron_coca.data import DataError, Shard, load_saved_tokenizer, load_tokenizer
from megatron_coca.data.preparation import blocks, faults
from megatron_coca.data.preparation.workers import ChunkTokenizer
from megatron_coca.data.readers.files import FileReader
from megatron_coca.data.tokenizers.losses import PASSAGE, Sample, passages_of
from megatron_coca.evaluation.documents import collect_documents
from megatron_coca.training.corpus import open_corpus


def options(tmp_path: Path, path: Path, *given: str) -> list[str]:
    """Arguments for one source, without held-out documents, in this process."""
    base = ["--input", f"s={path}", "--output", str(tmp_path / "out"), "--workers", "0"]
    base += [] if "--tokenizer-type" in given else ["--tokenizer-type", "CharLevelTokenizer"]
    held_out = [] if "--test-fraction" in given else ["--valid-fraction", "0", "--test-fraction", "0"]
    return [*base, *held_out, *given]


def manifest_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text())


def write_texts(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_a_fraction_of_zero_holds_nothing_out(tmp_path: Path) -> None:
    """Zero equals False in Python, and is an option that was given."""
    path = write_texts(tmp_path / "s.jsonl", *(f"text {number}" for number in range(400)))
    prepare.main(options(tmp_path, path))
    (entry,) = manifest_of(tmp_path / "out")["sources"]
    assert [entry[split]["documents"] for split in ("train", "valid", "test")] == [400, 0, 0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--max-record-mib", "0"], "max_record_mib: .*greater than or equal to 1"),
        (["--train-tokenizer", "0"], "vocab_size: .*greater than 0"),
        (["--text-field", ""], "s.jsonl:1: missing field"),
        (["--output", ""], "output: not set; give --output"),
    ],
)
def test_a_zero_or_empty_value_is_not_ignored(tmp_path: Path, given: list[str], message: str) -> None:
    path = write_texts(tmp_path / "s.jsonl", "text")
    kind = [] if "--train-tokenizer" in given else ["--tokenizer-type", "CharLevelTokenizer"]
    with pytest.raises(DataError, match=message):
        prepare.main(["--input", f"s={path}", "--output", str(tmp_path / "out"), "--workers", "0", *kind, *given])


@pytest.mark.parametrize("given", [["--valid-fraction", "0"], ["--max-record-mib", "0"], ["--text-field", ""]])
def test_a_zero_beside_a_recipe_is_an_error(tmp_path: Path, given: list[str]) -> None:
    with pytest.raises(DataError, match=f"{given[0]}: only supported with --input"):
        prepare.main([str(tmp_path / "recipe.yml"), *given])


def test_no_piece_for_the_built_in_corpus_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--train-tokenizer 0: must be from 1"):
        prepare.main(["--builtin", "--output", str(tmp_path), "--train-tokenizer", "0"])


def test_an_empty_name_of_a_file_of_prompts_is_not_standard_input(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DataError, match="^: cannot be read"):
        generate.main(["--checkpoint", ".", "--file", ""])


DEEPSEEK = "<\uff5cend\u2581of\u2581sentence\uff5c>"
SHAPE = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "seq_length": 4, "train_iters": 1}


def tokenizer_folder(folder: Path, *special: str) -> Path:
    """A Hugging Face folder with a byte-level BPE that has these special tokens, from id 0 on."""
    folder.mkdir(exist_ok=True)
    model = tokenizers.ByteLevelBPETokenizer()
    model.train_from_iterator(["text"], vocab_size=270, special_tokens=list(special), show_progress=False)
    model.save(str(folder / "tokenizer.json"))
    return folder


def hf(folder: Path) -> list[str]:
    return ["--tokenizer-type", "HFTokenizer", "--vocab-file", str(folder / "tokenizer.json")]


TOKEN = {"__type": "AddedToken", "content": DEEPSEEK, "lstrip": False, "normalized": True}


@pytest.mark.parametrize(
    ("special", "files", "end"),
    [
        (["<end>", "</s>"], {"tokenizer_config.json": {"eos_token": "<end>"}}, 0),
        (["</s>", "<end>"], {"tokenizer_config.json": {"eos_token": "<end>"}}, 1),
        (["<bos>", DEEPSEEK], {"tokenizer_config.json": {"eos_token": TOKEN}}, 1),
        (["<bos>", DEEPSEEK], {}, 1),
        (["</s>", "<end>"], {"special_tokens_map.json": {"eos_token": {"content": "<end>"}}}, 1),
        (["</s>", "<a>", "<b>"], {"generation_config.json": {"eos_token_id": [2, 1]}}, 2),
        (["</s>", "<end>"], {"tokenizer_config.json": {"eos_token": "<of another model>"}}, 0),
        (["</s>"], {"tokenizer_config.json": ["</s>"], "generation_config.json": {"eos_token_id": 999}}, 0),
    ],
)
def test_documents_end_with_the_end_of_text_of_the_tokenizer(
    tmp_path: Path, special: list[str], files: dict[str, Any], end: int
) -> None:
    """The shards, the tokenizer saved with them and that of a run agree on it."""
    folder = tokenizer_folder(tmp_path / "model", *special)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    prepare.main(options(tmp_path, write_texts(tmp_path / "s.jsonl", f"a text{special[end]}"), *hf(folder)))
    tokens = Shard(tmp_path / "out" / "s_train").document(0).tolist()
    assert tokens[-1] == end and end not in tokens[:-1]
    assert load_saved_tokenizer(tmp_path / "out").eod == manifest_of(tmp_path / "out")["tokenizer"]["eod"] == end
    corpus = open_corpus(load_config([tmp_path / "out" / "data.yml"], SHAPE))
    assert corpus.tokenizer is not None and corpus.tokenizer.eod == end


def test_an_end_token_can_be_named_and_has_a_remedy(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "model", "<stop>")
    given = options(tmp_path, write_texts(tmp_path / "s.jsonl", "a text"), *hf(folder))
    with pytest.raises(DataError, match="to end documents.* --end-token"):
        prepare.main(given)
    prepare.main([*given, "--end-token", "<stop>"])
    assert Shard(tmp_path / "out" / "s_train").document(0)[-1] == 0
    assert open_corpus(load_config([tmp_path / "out" / "data.yml"], SHAPE)).tokenizer is not None


def test_a_start_token_begins_every_text(tmp_path: Path) -> None:
    """It is recorded, the tokenizer keeps it, and evaluation puts it once."""
    folder = tokenizer_folder(tmp_path / "model", "<s>", "</s>")
    path = write_texts(tmp_path / "s.jsonl", "one", "<s>two")
    prepare.main(options(tmp_path, path, *hf(folder), "--start-token", "<s>"))
    prefix, plain = tmp_path / "out" / "s_train", load_tokenizer("HFTokenizer", folder)
    documents = [[0, *plain.encode(text), 1] for text in ("one", "<s>two")]
    shard = Shard(prefix)
    assert [shard.document(number).tolist() for number in range(2)] == documents
    record, saved = manifest_of(tmp_path / "out"), load_saved_tokenizer(tmp_path / "out")
    assert record["settings"]["start_token"] == "<s>" and record["tokenizer"]["start"] == 0 == saved.trained_start
    assert saved.fingerprint == plain.fingerprint and plain.trained_start is None
    for source in (prefix, path):
        found = collect_documents([str(source)], saved, saved.vocab_size, 4, start=0)
        assert [row.tolist() for row in found.arrays] == [document[:4] for document in documents]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--start-token", "<bos>"], "no symbol '<bos>'"),
        (["--start-token", "t"], "start_token: 't' is not a special token"),
        (["--start-token", "<s>", "--messages", "all"], "start_token has no effect on chats"),
    ],
)
def test_start_tokens_that_cannot_be_used(tmp_path: Path, given: list[str], message: str) -> None:
    folder = tokenizer_folder(tmp_path / "model", "<s>", "</s>")
    with pytest.raises(DataError, match=message):
        prepare.main(options(tmp_path, write_texts(tmp_path / "s.jsonl", "text"), *hf(folder), *given))


def test_the_end_of_a_trained_tokenizer_begins_texts_too(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "s.jsonl", *(f"a text with the number {number}" for number in range(200)))
    given = ["--input", f"s={path}", "--output", str(tmp_path / "out"), "--workers", "0", "--train-tokenizer", "300"]
    with pytest.raises(DataError, match="end_token has no effect"):
        prepare.main([*given, "--end-token", "</s>"])
    prepare.main([*given, "--start-token", "<eod>"])
    eod = load_saved_tokenizer(tmp_path / "out").eod
    tokens = Shard(tmp_path / "out" / "s_train").document(0)
    assert tokens[0] == tokens[-1] == eod
    assert manifest_of(tmp_path / "out")["settings"]["start_token"] == "<eod>"


def changelog(path: Path, lines: int, records: int) -> Path:
    """A compressed text whose name has no other ending, with records of JSON at its end."""
    text = [f"* change {number}: corrected a word" for number in range(lines)]
    text += [json.dumps({"text": f"record {number}"}) for number in range(records)]
    path.write_bytes(gzip.compress("\n".join(text).encode()))
    return path


def test_too_many_faulty_records_are_an_error_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With parts too; the work is kept for the command that accepts the faults, and a right name reads all."""
    path = changelog(tmp_path / "changelog.gz", 500, 19)
    given = options(tmp_path, path)
    prepare.main([*given, "--part", "1/1"])
    with pytest.raises(DataError, match=r"s: 500 of 519 records are faulty, .*10% .*gz:1: invalid JSON"):
        prepare.main(given)
    with pytest.raises(DataError, match=r"suffix .txt.*--max-faulty 1.00"):
        prepare.main(given)
    with pytest.raises(DataError, match=r"suffix .txt"):
        prepare.main(["--input", f"s={path}", "--output", str(tmp_path / "b"), "--train-tokenizer", "300"])
    text = changelog(tmp_path / "text.gz", 500, 0)
    with pytest.raises(DataError, match=r"500 of 500 records are faulty.*suffix .txt, before [^-]*$"):
        prepare.main([*options(tmp_path, text), "--output", str(tmp_path / "c")])
    with monkeypatch.context() as patched:
        patched.setattr(ChunkTokenizer, "tokenize", lambda *_: pytest.fail("a chunk was tokenized again"))
        prepare.main([*given, "--max-faulty", "0.97"])
    assert manifest_of(tmp_path / "out")["inputs"][0]["problems"] == {"invalid JSON": 500}
    named = path.rename(tmp_path / "changelog.txt.gz")
    prepare.main([*options(tmp_path, named), "--output", str(tmp_path / "text")])
    assert manifest_of(tmp_path / "text")["inputs"][0]["problems"] == {}


@pytest.mark.parametrize(
    ("lines", "records", "stops"), [(10, 1, False), (11, 99, False), (11, 98, True), (11, 1, True)]
)
def test_a_tenth_of_the_records_may_be_faulty_and_a_few_always(
    tmp_path: Path, lines: int, records: int, stops: bool
) -> None:
    path = changelog(tmp_path / "changelog.gz", lines, records)
    if stops:
        with pytest.raises(DataError, match="are faulty"):
            prepare.main(options(tmp_path, path))
    else:
        prepare.main(options(tmp_path, path))
    other = ["--input", f"s={path}", f"good={write_texts(tmp_path / 'good.jsonl', *map(str, range(900)))}"]
    if stops:  # each source counts for itself
        with pytest.raises(DataError, match="s: 11 of"):
            prepare.main([*other, *options(tmp_path, path)[2:], "--output", str(tmp_path / "two")])


def test_empty_rows_are_no_faults_of_a_type(tmp_path: Path) -> None:
    prepare.main(options(tmp_path, write_texts(tmp_path / "s.jsonl", *["", "text"] * 30)))
    assert manifest_of(tmp_path / "out")["inputs"][0]["problems"] == {"empty text": 30}


def test_a_source_of_faults_stops_before_all_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "EARLY_FAULTS", 100)
    monkeypatch.setattr("megatron_coca.data.preparation.run.run_stages", lambda *_: pytest.fail("all was read"))
    path = changelog(tmp_path / "changelog.gz", 101, 1)
    with pytest.raises(DataError, match="101 of 102 records are faulty"):
        prepare.main(options(tmp_path, path))


CODE = ["def function(a, b):\n\treturn {'key': [a ** 2, b % 3]}\n" * 4, "class Name(Base):\n    x: int = ~0\n" * 4]


def with_defaults(folder: Path) -> list[str]:
    """A SentencePiece model that was trained on prose with the library's defaults."""
    lines = [f"the value of the word number {number} is good" for number in range(300)]
    with (folder / "spm.model").open("wb") as writer:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=writer, vocab_size=50, minloglevel=2
        )
    return ["--tokenizer-type", "SPMTokenizer", "--vocab-file", str(folder / "spm.model")]


def lowercasing(folder: Path) -> list[str]:
    words = {word: number for number, word in enumerate(["[UNK]", "<eod>", "the", "word", ",", "."])}
    model = tokenizers.Tokenizer(tokenizers.models.WordPiece(words, unk_token="[UNK]"))
    model.normalizer = tokenizers.normalizers.BertNormalizer()
    model.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    model.decoder = tokenizers.decoders.WordPiece()
    model.save(str(folder / "tokenizer.json"))
    return hf(folder)


def without_merges(folder: Path, merges: str = "") -> list[str]:
    """A vocabulary of 5,000 words with an empty file of merges."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = ["<|endoftext|>", *alphabet, *(f"word{number}" for number in range(5000))]
    (folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + merges)
    return ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", str(folder)]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (with_defaults, r"100% of 2 sampled passages .*; \d+.\d% of their tokens are unknown"),
        (lowercasing, r"100% of 2 sampled passages .*; \d+.\d% of their tokens are unknown"),
        (without_merges, "loses text: 1.00 tokens per byte with 5,257 ids"),
    ],
)
def test_a_tokenizer_that_loses_text_stops_a_preparation_unless_told(
    tmp_path: Path, made: Any, message: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The shares are printed and recorded; evaluation of the same text warns."""
    path = write_texts(tmp_path / "s.jsonl", *CODE)
    given = options(tmp_path, path, *made(tmp_path))
    with pytest.raises(DataError, match=message):
        prepare.main(given)
    prepare.main([*given, "--accept-tokenizer"])
    sample = Sample(**manifest_of(tmp_path / "out")["inputs"][0]["sample"])
    assert sample.passages == 2 and sample.bytes == sum(len(text.strip()) for text in CODE)
    assert f"s tokenizer: {sample}" in capsys.readouterr().out
    tokenizer = load_saved_tokenizer(tmp_path / "out")
    with caplog.at_level(logging.WARNING):
        collect_documents([str(path)], tokenizer, tokenizer.vocab_size, 20)
    assert "the tokenizer loses text" in caplog.text
    assert ("tokens are unknown to the tokenizer" in caplog.text) == (sample.unknown > 0) == (made != without_merges)


def test_an_exact_tokenizer_loses_nothing(tmp_path: Path) -> None:
    """The sample is the same for any number of processes and after a kill, and changes no shard."""
    rows = [text * (number + 1) for number, text in enumerate(CODE * 20)]
    path, folder = write_texts(tmp_path / "s.jsonl", *rows), tokenizer_folder(tmp_path / "model", "</s>")
    given = options(tmp_path, path, *hf(folder))
    prepare.main(given)
    sample = Sample(**manifest_of(tmp_path / "out")["inputs"][0]["sample"])
    assert (sample.passages, sample.lost, sample.unknown) == (16, 0, 0) and sample.tokens > 0
    prepare.main([*given, "--output", str(tmp_path / "again"), "--workers", "1"])
    for name in ("manifest.json", "s_train.bin", "s_train.idx"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_passages_are_taken_from_all_texts_first() -> None:
    texts = ["a" * PASSAGE + "  b  " + "c" * PASSAGE, "  d", "", " " * 5000]
    assert list(passages_of(texts, 3)) == ["a" * PASSAGE, "d", "b  " + "c" * (PASSAGE - 5)]
    assert list(passages_of(texts, 1)) == ["a" * PASSAGE] and list(passages_of([], 3)) == []


def test_a_tokenizer_that_loses_text_stops_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_coca.data.preparation.acceptance.EARLY_PASSAGES", 2)
    monkeypatch.setattr("megatron_coca.data.preparation.run.run_stages", lambda *_: pytest.fail("all was read"))
    with pytest.raises(DataError, match="loses text"):
        prepare.main(options(tmp_path, write_texts(tmp_path / "s.jsonl", *CODE), *lowercasing(tmp_path)))


def test_repositories_suggest_their_reader(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "repository"
    (folder / ".git").mkdir(parents=True)
    (folder / "a.py").write_text("print(1)\n")
    with pytest.raises(DataError, match="no readable file .*--reader repositories"):
        prepare.main(options(tmp_path, folder))
    (folder / "guide.md").write_text("A guide.\n")
    prepare.main(options(tmp_path, folder))
    assert f"s: {folder}: to read the source code" in capsys.readouterr().out
    prepare.main(
        [
            *options(tmp_path, folder, "--reader", "repositories", "--valid-fraction", "0.1"),
            "--output",
            str(tmp_path / "code"),
        ]
    )
    shown = capsys.readouterr().out
    assert "s train: 2 documents" in shown and "--reader" not in shown
    assert "no validation loss; increase valid_fraction" in shown
    assert "a source with `split: valid`" in (tmp_path / "code" / "data.yml").read_text()


def test_divided_shards_on_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second set of tasks writes the shards, one task for the shards of all its workers. The summary adds them up."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", (1000, 1000))
    monkeypatch.setattr(blocks, "open_reader", lambda spec: FileReader(spec, block=500))
    calls = list[Any]()
    monkeypatch.setattr(prepare, "run", lambda *arguments: calls.append(arguments) or 0)
    given = options(tmp_path, write_texts(tmp_path / "s.jsonl", *(f"text {number}" * 9 for number in range(100))))
    given.remove("--workers")
    given.remove("0")
    for cpus, divided in (("1", ["--shard-gib", "0.000002"]), ("2", ["--shard-gib", "0.000002"]), ("1", [])):
        assert prepare.main([*given, *divided, "--engine", "local", "--cpus", cpus]) == 0
    (_, one, finish, _, second), (*_, halves), (*_, none) = calls
    assert len(one.numbers) == 7 and len(second.numbers) == second.parts == 3 and len(halves.numbers) == 2
    assert none is None and finish.parts is None and "--shard-gib" in second.arguments
    assert prepare.main([*given, "--workers", "0", "--shard-gib", "0.000002"]) == 0
    assert "s train: 100 documents, 6,310 tokens, 0.98 bytes per token, in 3 shards" in capsys.readouterr().out
