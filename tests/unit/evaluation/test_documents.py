"""Evaluation documents: text and shards alike, only long ones, and wrong sources."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from megatron_coca.checkpoints.huggingface.tokenizer_files import tokenizer_files
from megatron_coca.data import (
    CorpusSource,
    DataError,
    Execution,
    Rules,
    SourceSpec,
    load_tokenizer,
    prepare,
    train_sentencepiece,
)
from megatron_coca.evaluation import EvaluationError
from megatron_coca.evaluation.documents import Documents, check_tokenizers, collect_documents
from megatron_coca.evaluation.documents import DocumentSource as EvaluatedSource
from tests.tokenizer_files import train_bpe

TOKENIZER = load_tokenizer("CharLevelTokenizer")
VOCABULARY = 512
TEXTS = ["short", "a longer document", "the longest document of them all", "one that is also long enough"]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


@pytest.fixture
def shard(tmp_path: Path, corpus: Path) -> str:
    prepare(
        [CorpusSource(SourceSpec("all", [corpus]))],
        tmp_path / "shards",
        TOKENIZER,
        Rules(0, 1.0),
        Execution(progress=False),
    )
    return str(tmp_path / "shards" / "all_test")


def collect(*names: str | Path, **changes: object):
    arguments = {"tokenizer": TOKENIZER, "vocab_size": VOCABULARY, "max_length": 16, **changes}
    return collect_documents([str(name) for name in names], **arguments)


def test_long_documents_in_order_truncated(corpus: Path) -> None:
    found = collect(corpus)
    assert [bytes(tokens.tolist()).decode() for tokens in found.arrays] == [text[:16] for text in TEXTS[1:]]
    assert [len(tokens) for tokens in collect(corpus, num_documents=2).arrays] == [16, 16]
    record = found.record()
    assert (record.count, record.tokens, record.max_length, record.sources) == (3, 48, 16, [str(corpus)])


def test_the_rest_is_joined_and_divided_if_too_few_documents_are_long_enough(corpus: Path) -> None:
    """Documents first, in order; then everything that was left of them and of the short ones."""
    whole = [[*text.encode(), TOKENIZER.eod] for text in TEXTS]
    length = max(map(len, whole))
    first = next(tokens for tokens in whole if len(tokens) == length)
    rest = [token for tokens in whole for token in (tokens[length:] if len(tokens) >= length else tokens)]
    found = collect(corpus, max_length=length, num_documents=9, joined=True)
    parts = [rest[at : at + length] for at in range(0, len(rest) - length + 1, length)]
    assert parts and [tokens.tolist() for tokens in found.arrays] == [first, *parts]
    assert [tokens.tolist() for tokens in collect(corpus, max_length=length, num_documents=1, joined=True).arrays] == [
        first
    ]
    with pytest.raises(EvaluationError, match="has fewer than 9999 tokens"):
        collect(corpus, max_length=9999, num_documents=2, joined=True)


def test_documents_of_a_repeated_beginning(corpus: Path) -> None:
    found = collect(corpus, max_length=20, repeated=8)
    assert [bytes(tokens.tolist()).decode() for tokens in found.arrays] == [(text[:8] * 3)[:20] for text in TEXTS[1:]]
    assert found.record().repeated == 8


def test_a_token_before_every_document(corpus: Path, shard: str) -> None:
    found = collect(corpus, start=7)
    assert [tokens.tolist() for tokens in found.arrays] == [[7, *text[:15].encode()] for text in TEXTS[1:]]
    assert found.record().start == 7 and found.record().sha256 == collect(shard, start=7).record().sha256


def test_end_of_document_counts_as_in_shards(corpus: Path) -> None:
    length = len(TEXTS[2]) + 1
    (tokens,) = collect(corpus, max_length=length).arrays
    assert tokens[-1] == TOKENIZER.eod


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_text_and_shard_are_the_same_documents(corpus: Path, shard: str, suffix: str) -> None:
    assert collect(shard + suffix).record().sha256 == collect(corpus).record().sha256


def test_folder_of_texts(tmp_path: Path, corpus: Path) -> None:
    folder = tmp_path / "books"
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(text)
    assert collect(folder).record().sha256 == collect(corpus).record().sha256


def test_hash_depends_on_the_boundaries() -> None:
    tokens = np.arange(8)
    hashes = {Documents(tuple(np.split(tokens, [cut])), (), 8).record().sha256 for cut in (2, 3, 4)}
    assert len(hashes) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_length": 34}, r"no document .* 34 tokens .the longest has 33"),
        ({"vocab_size": 100}, r"token id \d+ is outside the model's vocabulary of 100"),
        ({"tokenizer": None}, r"corpus.jsonl: is a text file.*no tokenizer"),
    ],
)
def test_documents_that_do_not_fit(corpus: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(EvaluationError, match=message):
        collect(corpus, **changes)


def test_sources_that_are_not_there(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(EvaluationError, match="absent: no such text file, folder or shard"):
        collect(corpus, tmp_path / "absent")
    with pytest.raises(EvaluationError, match="no test data"):
        collect()
    (tmp_path / "book.pdf").write_bytes(b"%PDF")
    with pytest.raises(DataError, match=r"book.pdf: unsupported file type"):
        collect(tmp_path / "book.pdf")


def test_a_folder_of_shards_is_told_as_that(shard: str) -> None:
    folder = Path(shard).parent
    for name in ("b_train", "c_train"):
        for suffix in (".bin", ".idx"):
            Path(f"{folder / name}{suffix}").write_bytes(Path(f"{shard}{suffix}").read_bytes())
    with pytest.raises(EvaluationError, match=rf"is a folder of shards.*--data: .*{folder}/b_train {folder}/c"):
        collect(folder)


@pytest.mark.parametrize("manifest", [True, False])
def test_shards_that_nothing_vouches_for_are_named(
    shard: str, caplog: pytest.LogCaptureFixture, manifest: bool
) -> None:
    folder = Path(shard).parent
    if not manifest:
        (folder / "manifest.json").unlink()
    collect(shard)
    assert not caplog.records, "the manifest or the tokenizer beside the shard vouches for it"
    collect(shard, tokenizer=None)
    (record,) = caplog.records
    assert f"{shard}: the checkpoint has no tokenizer" in record.getMessage()
    for name in ("manifest.json", "tokenizer_type.json"):
        (folder / name).unlink(missing_ok=True)
    collect(shard)
    assert f"{shard}: no tokenizer was saved with these shards" in caplog.records[1].getMessage()


def test_a_tokenizer_beside_a_shard_counts_without_a_manifest(shard: str, tmp_path: Path) -> None:
    (Path(shard).parent / "manifest.json").unlink()
    train_bpe(["some text"], 285, tmp_path / "t.json").save(Path(shard).parent)
    with pytest.raises(EvaluationError, match="all_test: .* different tokenizer .*tokenizer_type.json"):
        collect(shard)


def test_another_file_of_the_same_tokenizer_is_no_other_tokenizer(tmp_path: Path) -> None:
    """An exported and imported checkpoint has a tokenizer.json in place of the model file of its shards."""
    texts = ["The quick brown fox jumps over the lazy dog. " * 3, "a boat lay near the shore until morning"] * 20
    made = train_sentencepiece(texts, 300, tmp_path / "model")
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    source = CorpusSource(SourceSpec("all", [tmp_path / "texts.jsonl"]))
    prepare([source], tmp_path / "shards", made, Rules(valid_fraction=0, test_fraction=0.5), Execution(progress=False))
    made.save(tmp_path / "saved")
    files, note = tokenizer_files(made)
    assert note is None
    (tmp_path / "tokenizer.json").write_bytes(files["tokenizer.json"])
    merges = json.loads(files["tokenizer.json"])["model"]["merges"]
    assert merges and all(isinstance(pair, str) for pair in merges), "older versions of tokenizers read no pairs"
    converted = load_tokenizer("HFTokenizer", tmp_path / "tokenizer.json")
    assert converted.fingerprint != made.fingerprint
    check_tokenizers([EvaluatedSource(str(tmp_path / "shards/all_test"), True)], converted)
    with pytest.raises(EvaluationError, match="prepared with a different tokenizer"):
        check_tokenizers(
            [EvaluatedSource(str(tmp_path / "shards/all_test"), True)], load_tokenizer("CharLevelTokenizer")
        )


def test_another_end_of_text_is_no_other_tokenizer(shard: str, tmp_path: Path) -> None:
    """Qwen 3 ends its turns with <|im_end|>, and prepared documents end with <|endoftext|>."""
    train_bpe(["some text"], 285, tmp_path / "t.json")
    model = tokenizers.Tokenizer.from_file(str(tmp_path / "t.json"))
    model.add_special_tokens(["<|im_end|>"])
    model.save(str(tmp_path / "tokenizer.json"))
    (Path(shard).parent / "manifest.json").unlink()
    load_tokenizer("HFTokenizer", tmp_path).save(Path(shard).parent)
    check_tokenizers([EvaluatedSource(shard, True)], load_tokenizer("HFTokenizer", tmp_path, eod="<|im_end|>"))


def test_shard_of_another_tokenizer(shard: str) -> None:
    manifest = Path(shard).parent / "manifest.json"
    content = json.loads(manifest.read_text())
    content["tokenizer"]["fingerprint"] = "0" * 64
    manifest.write_text(json.dumps(content))
    with pytest.raises(EvaluationError, match=r"all_test: prepared with a different tokenizer \(000000000000, "):
        collect(shard)
    assert len(collect(shard, tokenizer=None).arrays) == 3
