"""From data keys to blends: splits of one shard, the tokenizer beside the shards, the vocabulary."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_coca.config import BatchSizes, Config, ConfigError, load_config
from megatron_coca.data import Blend, CorpusSource, DataError, Loader, Shard, SourceSpec, load_tokenizer, prepare
from megatron_coca.data.shards import ShardWriter
from megatron_coca.data.tokenizers.chat import ChatTemplate
from megatron_coca.training.corpus import (
    document_weights,
    open_corpus,
    open_loader,
    open_split,
    split_shard,
    validation_note,
    with_train_iters,
)
from tests.tokenizer_files import train_bpe

SHAPE = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "seq_length": 4}


def write_shard(prefix: Path, documents: int = 10, length: int = 20, tokenizer: bool = True) -> Path:
    writer = ShardWriter(prefix, 512)
    for number in range(documents):
        writer.add(np.full(length + number, number))
    writer.finish()
    if tokenizer:
        load_tokenizer("CharLevelTokenizer").save(prefix.parent)
    return prefix


def config(**keys: object) -> Config:
    return load_config([], SHAPE | keys)


def test_a_part_is_a_shard_of_its_documents(tmp_path: Path) -> None:
    shard = Shard(write_shard(tmp_path / "s"))
    part = shard.part(3, 6)
    assert (part.documents, part.len_tokens) == (3, 23 + 24 + 25)
    assert [int(part.document(i)[0]) for i in range(3)] == [3, 4, 5]
    assert part.tokens(22, 3).tolist() == [3, 4, 4]
    assert [len(part.part(1, 3).document(i)) for i in range(2)] == [24, 25]
    assert shard.part(9, 10).document(0).tolist() == [9] * 29
    with pytest.raises(DataError, match="are out of range"):
        part.tokens(70, 3)
    with pytest.raises(DataError, match="out of range"):
        shard.part(5, 11)


def test_a_split_divides_the_documents_without_overlap(tmp_path: Path) -> None:
    parts = split_shard(Shard(write_shard(tmp_path / "s")), (8, 1, 1))
    assert [part.documents for part in parts if part] == [8, 1, 1]
    assert [int(part.document(0)[0]) for part in parts if part] == [0, 8, 9]
    assert split_shard(Shard(tmp_path / "s"), (1, 0, 0))[1:] == [None, None]


@pytest.mark.parametrize(
    ("documents", "shares", "sizes"),
    [
        (100, (1, 1, 1), [34, 33, 33]),
        (11, (1, 1, 1), [3, 4, 4]),
        (10, (969, 30, 1), [10, 0, 0]),
        (3, (0, 1, 1), [0, 1, 2]),
    ],
)
def test_a_split_rounds_as_gpt_neox_does(
    tmp_path: Path, documents: int, shares: tuple[int, ...], sizes: list[int]
) -> None:
    """Each share is rounded, and the first takes the difference."""
    parts = split_shard(Shard(write_shard(tmp_path / "s", documents)), shares)
    assert [part.documents if part else 0 for part in parts] == sizes


def test_a_short_shard_of_validation_is_left_out(tmp_path: Path) -> None:
    train, short = write_shard(tmp_path / "s"), write_shard(tmp_path / "short", documents=1, length=4)
    keys = paths(train, train, train) | {"valid_data_paths": [str(short), str(train)], "valid_data_weights": [1, 3]}
    corpus = open_corpus(config(**keys))
    assert corpus.valid is not None and [shard.name for shard in corpus.valid.shards] == [str(train)]
    (note,) = corpus.left_out
    assert f"validation leaves out {short}: only 4 tokens, " in note and " seq_length + 1 = 5; " in note
    corpus = open_corpus(config(**keys | {"valid_data_paths": [str(short)], "valid_data_weights": [1]}))
    assert corpus.valid is None and "no validation shard is long" in (validation_note(corpus) or "")
    with pytest.raises(DataError, match="short: only 4 tokens, fewer than one sample"):
        open_corpus(config(**paths(short, train, train)))


def test_data_path_trains_and_validates_on_its_split(tmp_path: Path) -> None:
    corpus = open_corpus(config(data_path=str(write_shard(tmp_path / "s")), split="8,2,0"))
    assert corpus.valid is not None
    trained = {int(token) for index in range(50) for token in corpus.train.sample(index)}
    assert trained == set(range(8))
    assert {int(token) for index in range(10) for token in corpus.valid.sample(index)} == {8, 9}
    with pytest.raises(DataError, match="no training document"):
        open_corpus(config(data_path=str(tmp_path / "s"), split="0,1,0"))


def test_the_vocabulary_comes_from_the_tokenizer_beside_the_shards(tmp_path: Path) -> None:
    prefix = str(write_shard(tmp_path / "s"))
    corpus = open_corpus(config(data_path=prefix))
    assert corpus.tokenizer is not None
    assert corpus.config.model.vocab_size == corpus.tokenizer.vocab_size
    assert open_corpus(config(data_path=prefix, vocab_size=1000)).config.model.vocab_size == 1000
    with pytest.raises(ConfigError, match=r"vocab_size: 100, .*tokenizer has \d+ tokens; set vocab_size"):
        open_corpus(config(data_path=prefix, vocab_size=100))


def test_shards_of_different_tokenizers_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, other = write_shard(tmp_path / "a" / "s"), write_shard(tmp_path / "b" / "s", tokenizer=False)
    pieces = tmp_path / "b" / "words.json"
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"<|endoftext|>": 0, "a": 1}, unk_token="a")).save(str(pieces))
    load_tokenizer("HFTokenizer", pieces).save(tmp_path / "b")
    for train, valid, test in ((one, one, other), (one, other, one), (other, one, one)):
        keys = {"train_data_paths": [str(train)], "valid_data_paths": [str(valid)], "test_data_paths": [str(test)]}
        with pytest.raises(DataError, match="/.*: the tokenizers differ; prepare"):
            open_corpus(config(**keys))


def test_ids_beyond_the_vocabulary_are_errors_when_they_are_read(tmp_path: Path) -> None:
    corpus = open_corpus(config(data_path=str(write_shard(tmp_path / "s", tokenizer=False)), vocab_size=4, split="1"))
    assert corpus.config.model.padded_vocab_size > 10, "ids in the padding are an error too"
    with (
        open_loader(corpus, corpus.train, (8, 8, 0, 1)) as loader,
        pytest.raises(DataError, match=r"/s: token id [4-9] is outside .*vocab_size=4"),
    ):
        for step in range(10):
            loader.micro_batches(step)


def test_an_added_token_without_a_row_is_an_error_only_where_it_occurs(tmp_path: Path) -> None:
    """As a padding token that was added to a tokenizer, but not to the embedding of the model."""
    vocabulary = tmp_path / "tokenizer.json"
    size = train_bpe(["some text"], 288, vocabulary).vocab_size
    content = json.loads(vocabulary.read_text())
    added = content["added_tokens"][0] | {"id": size, "content": "[PAD]"}
    vocabulary.write_text(json.dumps(content | {"added_tokens": [*content["added_tokens"], added]}))
    tokenizer = load_tokenizer("HFTokenizer", vocabulary)
    for name, template in (("without", "{{ messages[0].content }}"), ("with", "{{ messages[0].content }}[PAD]")):
        tokenizer.chat = ChatTemplate(template, {})
        lines = [json.dumps({"messages": [{"role": "user", "content": f"one two {n}"}]}) for n in range(40)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
        spec = SourceSpec("s", [tmp_path / f"{name}.jsonl"], messages="all")
        prepare([CorpusSource(spec, split="train")], tmp_path / name, tokenizer)
    keys = {"train_data_paths": [str(tmp_path / "without" / "s_train")], "valid_data_paths": [], "test_data_paths": []}
    corpus = open_corpus(config(**keys, vocab_size=size))
    assert corpus.tokenizer is not None and corpus.tokenizer.vocab_size == size + 1
    with open_loader(corpus, corpus.train, (8, 8, 0, 1)) as loader:
        assert max(int(batch.tokens.max()) for batch in loader.micro_batches(0)) < size
    with pytest.raises(ConfigError, match=f"but the data's tokenizer has {size + 1} tokens"):
        open_corpus(config(**keys, vocab_size=200))
    keys["train_data_paths"] = [str(tmp_path / "with" / "s_train")]
    message = rf"with/s_train: contains token '\[PAD\]' with id {size}, but the model has only {size} tokens; prepare"
    with pytest.raises(DataError, match=message):
        open_corpus(config(**keys, vocab_size=size))
    manifest = tmp_path / "with" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"largest_id"', '"older"'))
    corpus = open_corpus(config(**keys, vocab_size=size))
    with (
        open_loader(corpus, corpus.train, (8, 8, 0, 1)) as loader,
        pytest.raises(DataError, match=f"token id {size} is outside .*vocab_size={size}; use"),
    ):
        loader.micro_batches(0)


def test_the_first_id_of_the_padding_is_an_error(tmp_path: Path) -> None:
    blend = Blend([Shard(write_shard(tmp_path / "s", documents=5, tokenizer=False))], [1], 16, seed=0)
    with (
        Loader(blend, 4, 4, 0, 1, vocab_size=4) as loader,
        pytest.raises(DataError, match="token id 4 is outside .*vocab_size=4"),
    ):
        for step in range(3):
            loader.micro_batches(step)
    with Loader(blend, 4, 4, 0, 1, vocab_size=5) as loader:
        batches = [batch for step in range(3) for batch in loader.micro_batches(step)]
    assert max(int(batch.tokens.max()) for batch in batches) == 4


def test_negative_ids_are_errors_too(tmp_path: Path) -> None:
    prefix = write_shard(tmp_path / "s", tokenizer=False)
    tokens, index = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    ids = np.fromfile(tokens, dtype="<i2")
    ids[5::7] = -2
    ids.tofile(tokens)
    header = bytearray(index.read_bytes())
    header[17] = 3  # int16
    index.write_bytes(header)
    with (
        Loader(Blend([Shard(prefix)], [1], 16, seed=0), 8, 8, 0, 1, vocab_size=20) as loader,
        pytest.raises(DataError, match="token id -2 is outside"),
    ):
        loader.micro_batches(0)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing.idx|nothing.bin"):
        open_corpus(config(data_path=str(tmp_path / "nothing")))


def paths(train: object, valid: object, test: object) -> dict[str, list[str]]:
    given = zip(("train", "valid", "test"), (train, valid, test), strict=True)
    return {f"{split}_data_paths": [str(path)] for split, path in given}


def test_test_shards_must_be_there_when_training_starts(tmp_path: Path) -> None:
    prefix = write_shard(tmp_path / "s")
    with pytest.raises(DataError, match=r"nope\.bin: no such file"):
        open_corpus(config(**paths(prefix, prefix, tmp_path / "nope")))
    (tmp_path / "cut.bin").write_bytes(b"1234")
    (tmp_path / "cut.idx").write_bytes(Path(f"{prefix}.idx").read_bytes()[:-3])
    with pytest.raises(DataError, match=r"cut\.idx: truncated or in another format"):
        open_corpus(config(**paths(prefix, prefix, tmp_path / "cut")))


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_a_prefix_has_no_ending(tmp_path: Path, suffix: str, split: str) -> None:
    prefix = write_shard(tmp_path / "s")
    given = paths(prefix, prefix, prefix) | {f"{split}_data_paths": [f"{prefix}{suffix}"]}
    with pytest.raises(DataError, match=rf"s\{suffix}: .*give the path without \{suffix}"):
        open_corpus(config(**given))


def test_a_type_that_needs_no_file_names_a_tokenizer(tmp_path: Path) -> None:
    prefix = str(write_shard(tmp_path / "s", tokenizer=False))
    keys = {"data_path": prefix, "tokenizer_type": "CharLevelTokenizer", "eod_mask_loss": True}
    corpus = open_corpus(config(**keys))
    assert corpus.tokenizer is not None and corpus.packing.masked_token == 0
    assert corpus.config.model.vocab_size == 512
    for name in ("GPT2BPETokenizer", "HFTokenizer", "TiktokenTokenizer"):
        assert open_corpus(config(data_path=prefix, vocab_size=512, tokenizer_type=name)).tokenizer is None


def test_a_named_type_must_agree_with_the_shards(tmp_path: Path) -> None:
    prefix = write_shard(tmp_path / "s", tokenizer=False)
    train_bpe(["some text"], 285, tmp_path / "t.json").save(tmp_path)
    with pytest.raises(DataError, match=", tokenizer_type CharLevelTokenizer: the tokenizers differ"):
        open_corpus(config(data_path=str(prefix), tokenizer_type="CharLevelTokenizer"))


def test_shards_without_a_tokenizer_are_named(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    known = write_shard(tmp_path / "a" / "s")
    foreign, other = (write_shard(tmp_path / "b" / name, tokenizer=False) for name in ("s", "t"))
    keys = paths(known, foreign, other) | {"train_data_paths": [str(known), str(foreign)]}
    assert open_corpus(config(**keys)).unverified == (str(foreign), str(other))
    assert open_corpus(config(data_path=str(known))).unverified == ()


def test_one_split_only(tmp_path: Path) -> None:
    train, other = write_shard(tmp_path / "s"), write_shard(tmp_path / "t", documents=3)
    keys = paths(train, train, train) | {"test_data_paths": [str(train), str(other)], "test_data_weights": [1, 3]}
    found = open_split(config(**keys), "test")
    assert found is not None and [share.weight for share in found.mixture(10)] == [0.25, 0.75]
    assert open_split(config(data_path=str(train), split="1,1,0"), "test") is None


def test_missing_validation_data_is_told(tmp_path: Path) -> None:
    one, other = str(write_shard(tmp_path / "s")), str(write_shard(tmp_path / "t"))
    lists = {"train_data_paths": [one], "test_data_paths": [one]}
    for keys, told in (
        ({"data_path": one, "split": "969,30,1"}, "split '969,30,1' leaves no validation document in .*/s"),
        (lists | {"valid_data_paths": []}, "there are no validation shards"),
        (lists | {"valid_data_paths": [one]}, "valid_data_paths: .*/s: also in test_data_paths"),
    ):
        corpus = open_corpus(config(**keys))
        assert re.search(told, validation_note(corpus) or "")
        assert validation_note(replace(corpus, config=corpus.config.override({"eval_iters": 0}))) is None
    assert validation_note(open_corpus(config(**lists | {"valid_data_paths": [other]}))) is None
    with pytest.raises(ConfigError, match="train_data_paths"):
        config(train_data_paths=[], valid_data_paths=[], test_data_paths=[])


def test_weights_by_number_of_documents(tmp_path: Path) -> None:
    """GPT-NeoX's numbers for 1, 2 and 5 documents: (p^alpha / sum) (1 - p), normalised."""
    powers = [math.sqrt(number / 8) for number in (1, 2, 5)]
    expected = [power / sum(powers) * rest / 8 for power, rest in zip(powers, (7, 6, 3), strict=True)]
    assert document_weights([1, 2, 5], 0.5) == pytest.approx([value / sum(expected) for value in expected])
    assert document_weights([1, 3], 1.0) == [0.5, 0.5] and document_weights([7], 0.3) == [1.0]
    paths = [str(write_shard(tmp_path / name, documents)) for name, documents in (("a", 2), ("b", 4), ("c", 10))]
    keys = dict.fromkeys(("train_data_paths", "valid_data_paths", "test_data_paths"), paths)
    keys |= {"weight_by_num_documents": True, "weighted_sampler_alpha": 0.5, "train_data_weights": [5.0, 1.0, 1.0]}
    corpus = open_corpus(config(**keys))
    assert corpus.train.weights == pytest.approx(document_weights([2, 4, 10], 0.5))
    assert corpus.valid is not None and corpus.valid.weights == corpus.train.weights


def test_epochs_read_every_sample_as_often(tmp_path: Path) -> None:
    paths = [str(write_shard(tmp_path / name, documents)) for name, documents in (("a", 2), ("b", 9))]
    keys = dict.fromkeys(("train_data_paths", "valid_data_paths", "test_data_paths"), paths)
    # 41 and 216 tokens in inputs of 4: 9 and 53 samples; 31 micro-batches of 2 in a pass, 93 in three.
    resolved = with_train_iters(config(**keys, train_epochs=3), BatchSizes(1, 4, 8))
    assert (resolved.schedule.train_iters, resolved.schedule.train_epochs) == (93 // 4, None)
    shares = open_corpus(resolved).train.mixture(3 * 62)
    assert [share.epochs for share in shares] == pytest.approx([3, 3], rel=0.04)
    with pytest.raises(DataError, match="train_epochs: .*62 samples, .*reads 64; .*train_batch_size"):
        with_train_iters(config(**keys, train_epochs=1), BatchSizes(64, 1, 64))
