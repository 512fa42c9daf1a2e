"""Label shards and samples of whole documents: every mask and sample is compared with a loop by hand."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron_coca.config import ConfigError, load_config
from megatron_coca.data import Batch, Blend, DataError, Loader, Packing, Shard
from megatron_coca.data.identity import differing_data
from megatron_coca.data.shards import MASKED, ShardWriter
from megatron_coca.model import LanguageModelLoss, build_model
from megatron_coca.training.corpus import open_corpus, open_loader
from megatron_coca.training.engine.label_weights import label_weights, step_labels
from tests.checkpoint_files import run_alone

LENGTH = 16
SHAPE = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "seq_length": LENGTH, "vocab_size": 512}
SHAPE |= {"pos_emb": "coca", "train_iters": 4, "train_micro_batch_size_per_gpu": 4, "num_workers": 0}


def write_chats(folder: Path, lengths: list[int], seed: int = 0) -> tuple[Path, Path]:
    """Documents of random tokens; their labels count a random half of them, and none in every fifth document."""
    draw = np.random.default_rng(seed)
    texts, labels = ShardWriter(folder / "t", 512), ShardWriter(folder / "t_label", 512, labels=True)
    for number, length in enumerate(lengths):
        tokens = draw.integers(1, 512, length)
        texts.add(tokens)
        labels.add(np.where((draw.random(length) < 0.5) & (number % 5 > 0), tokens, MASKED))
    texts.finish()
    labels.finish()
    return folder / "t", folder / "t_label"


LENGTHS = np.random.default_rng(1).integers(2, 30, 60).tolist()


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return write_chats(tmp_path, LENGTHS)


def test_packed_labels_mask_the_loss_of_a_loop_by_hand(pair: tuple[Path, Path]) -> None:
    shard = Shard(*pair)
    texts, labels = (shard.tokens(0, shard.len_tokens), Shard(pair[1]).tokens(0, shard.len_tokens))
    model = build_model(load_config([], SHAPE))
    with Loader(Blend([shard], [1], LENGTH, 3), 4, 4, 0, 1, packing=Packing(masked_token=7), num_workers=0) as loader:
        (batch,) = loader.micro_batches(0)
    assert batch.loss_mask is not None
    losses = []
    for row, mask in zip(batch.tokens, batch.loss_mask, strict=True):
        (start,) = [s for s in range(len(texts) - LENGTH) if np.array_equal(texts[s : s + LENGTH + 1], row)]
        logits = model(torch.from_numpy(row[None, :-1]))[0]
        for place in range(LENGTH):
            counts = labels[start + place + 1] >= 0 and row[place] != 7
            assert mask[place] == counts
            if counts:
                losses.append(F.cross_entropy(logits[place], torch.tensor(row[place + 1])))
    given = {"samples": torch.from_numpy(batch.tokens), "loss_mask": torch.from_numpy(batch.loss_mask)}
    torch.testing.assert_close(LanguageModelLoss(model)(**given), torch.stack(losses).mean())


@pytest.mark.parametrize("pack_impl", ["pack_until_overflow", "unpacked"])
@pytest.mark.parametrize("chopped", [True, False])
@pytest.mark.parametrize("labelled", [True, False])
def test_whole_documents_by_hand(pair: tuple[Path, Path], pack_impl: str, chopped: bool, labelled: bool) -> None:
    """An epoch has every usable document once. Samples start with a document, end with padding, and mask it."""
    shard, labels = Shard(pair[0], pair[1] if labelled else None), Shard(pair[1])
    blend = Blend([shard], [1], LENGTH, 3, pack_impl, chopped)
    wanted: dict[tuple[int, ...], int] = {}
    for number in range(shard.documents):
        document, label = shard.document(number)[: LENGTH + 1], labels.document(number)[: LENGTH + 1]
        if (chopped or LENGTHS[number] <= LENGTH + 1) and (not labelled or (label[1:] >= 0).any()):
            wanted[tuple(document.tolist())] = number
    (share,) = blend.mixture(1)
    per_epoch = round(1 / share.epochs)
    for epoch in (0, 1):
        tokens, begins, mask = blend.read(np.arange(per_epoch) + epoch * per_epoch, boundaries=True)
        assert begins is not None and mask is not None
        seen = []
        for row, starts, counted in zip(tokens, begins, mask, strict=True):
            edges = [*np.flatnonzero(starts).tolist(), LENGTH + 1]
            assert edges[0] == 0
            expected = np.zeros(LENGTH + 1, dtype=bool)
            for first, last in pairwise(edges):
                document = tuple(np.trim_zeros(row[first:last], "b").tolist())
                last = first + len(document)
                if not document:
                    assert not row[first:].any(), "only padding is no document"
                    continue
                number = wanted[document]
                seen.append(number)
                label = labels.document(number)[: last - first] >= 0
                expected[first:last] = label if labelled else True
            assert np.array_equal(counted, expected[1:])
        assert sorted(seen) == sorted(wanted.values())
        assert pack_impl == "pack_until_overflow" or len(seen) == per_epoch
    assert not np.array_equal(blend.batch(np.arange(per_epoch)), blend.batch(np.arange(per_epoch) + per_epoch))


@pytest.mark.parametrize("pack_impl", ["packed", "pack_until_overflow", "unpacked"])
def test_an_end_token_with_the_id_of_padding_is_learned(pack_impl: str, tmp_path: Path) -> None:
    """GPT-NeoX's end of text and padding both have the id 0: padding is recognized by its place."""
    writer = ShardWriter(tmp_path / "t", 512)
    for length in (6, 4, 7, 5) * 4:
        writer.add([*range(9, 9 + length - 1), 0])
    writer.finish()
    with Loader(Blend([Shard(tmp_path / "t")], [1], 12, 3, pack_impl), 8, 8, 0, 1, num_workers=0) as loader:
        (batch,) = loader.micro_batches(0)
    targets = batch.tokens[:, 1:]
    mask = np.ones_like(targets, dtype=bool) if batch.loss_mask is None else batch.loss_mask
    ends = (targets == 0) & (batch.tokens[:, :-1] != 0)
    assert ends.any() and mask[ends].all()
    assert not mask[(targets == 0) & ~ends].any()


def test_samples_overflow_only_when_the_next_document_does_not_fit(tmp_path: Path) -> None:
    shard = Shard(write_chats(tmp_path, [5] * 12)[0])
    tokens, begins, _ = Blend([shard], [1], LENGTH, 0, "pack_until_overflow").read(np.arange(4), boundaries=True)
    assert begins is not None and begins.sum(axis=1).tolist() == [4] * 4, "three of five tokens, and padding"
    assert not tokens[:, 15:].any()


def test_wrong_labels_are_errors(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    (tmp_path / "other").mkdir()
    with pytest.raises(DataError, match="the document lengths differ from those of"):
        Shard(pair[0], write_chats(tmp_path / "other", LENGTHS[::-1])[1])
    other = Shard(pair[0], write_chats(tmp_path / "other", LENGTHS, seed=9)[1])
    with pytest.raises(DataError, match="neither negative nor equal to the token"):
        Blend([other], [1], LENGTH, 0).read(np.arange(4))
    with pytest.raises(DataError, match="no document fits into seq_length"):
        Blend([Shard(write_chats(tmp_path, [9, 9])[0])], [1], 4, 0, "unpacked", allow_chopped=False)


def given(pair: tuple[Path, Path], **changes: Any) -> dict[str, Any]:
    texts, labels = map(str, pair)
    keys = {"train_data_paths": [texts, texts], "valid_data_paths": [texts], "test_data_paths": []}
    return SHAPE | keys | {"train_label_data_paths": [labels, None], "valid_label_data_paths": [labels]} | changes


def test_the_keys_reach_the_loader_and_the_identity(pair: tuple[Path, Path]) -> None:
    corpus = open_corpus(load_config([], given(pair, pack_impl="pack_until_overflow", allow_chopped=False)))
    assert corpus.valid is not None
    with open_loader(corpus, corpus.valid, (4, 4, 0, 1)) as loader:
        (batch,) = loader.micro_batches(0)
    assert batch.loss_mask is not None and 0 < batch.loss_mask.mean() < 0.7
    plain = open_corpus(load_config([], given(pair, train_label_data_paths=None)))
    labels, treatment = differing_data(plain.identity, corpus.identity, ["a", "b"])
    assert labels.startswith("set of label shards")
    assert "documents (saved as one text, now " in treatment and "now pack_until_overflow, not chopped)" in treatment


@pytest.mark.parametrize("parts", [1, 3, 7, 256, 1000])
@pytest.mark.parametrize("each", [1, 3, 511, 8192])
def test_equal_numbers_of_labels_have_the_weight_1(parts: int, each: int) -> None:
    """Exactly 1, so that losses without masks keep their bits."""
    assert label_weights([each] * parts, each * parts, parts) == [1.0] * parts


def test_weights_make_the_mean_over_all_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    run_alone(monkeypatch)
    random = np.random.default_rng(0)
    masks = [random.random((2, LENGTH)) < share for share in (0.0, 0.1, 0.9, 1.0)]
    losses = [random.random(mask.shape) for mask in masks]
    tokens = np.zeros((2, LENGTH + 1), dtype=np.int64)
    count, weights = step_labels([Batch(tokens, loss_mask=mask) for mask in masks], 1)
    means = [loss[mask].mean() if mask.any() else 0.0 for loss, mask in zip(losses, masks, strict=True)]
    wanted = np.concatenate([loss[mask] for loss, mask in zip(losses, masks, strict=True)])
    assert count == len(wanted) and weights[0] == 0.0
    assert np.mean(np.multiply(means, weights)) == pytest.approx(wanted.mean(), rel=1e-14)
    assert step_labels([Batch(tokens, loss_mask=masks[0])] * 3, 1) == (0, [0.0] * 3)


def test_without_masks_no_rank_communicates() -> None:
    """There is no process group to ask, and no array is counted."""
    batch = Batch(np.zeros((2, LENGTH + 1), dtype=np.int64))
    assert step_labels([batch] * 3, 4) == (2 * LENGTH * 3 * 4, [1.0] * 3)


def test_all_batches_of_partly_labelled_data_have_a_mask(pair: tuple[Path, Path]) -> None:
    """So that all ranks agree on whether to count labels."""
    blend = Blend([Shard(*pair), Shard(pair[0])], [1, 1], LENGTH, 3)
    masks = [blend.read(np.array([number])).loss_mask for number in range(12)]
    assert all(mask is not None for mask in masks) and {bool(np.all(mask)) for mask in masks} == {True, False}


WRONG = [
    ({"train_label_data_paths": ["a"]}, "train_label_data_paths: 1 labels for 2 train_data_paths"),
    ({"pack_impl": "unpacked", "eval_windows": [32]}, "pack_impl: not supported with eval_windows"),
    ({"pack_impl": "greedy"}, "pack_impl"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_wrong_keys_are_errors(pair: tuple[Path, Path], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config([], given(pair, **changes))
