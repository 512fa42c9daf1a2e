"""Documents within samples: their boundaries, their batches, and that a model sees each of them separately."""

import struct
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_coca.config import ConfigError, load_config
from megatron_coca.data import Batch, Blend, DataError, Loader, Packing, Shard, load_tokenizer
from megatron_coca.model import LanguageModelLoss, build_model, next_token_loss
from megatron_coca.training.corpus import open_corpus, open_loader

EOD = 0
LENGTH = 16


def write_pair(
    prefix: Path, sequences: Sequence[int], boundaries: Sequence[int] | None = None, eod: bool = True
) -> Path:
    """A shard in GPT-NeoX's bytes, written without any library; every sequence ends in EOD where `eod` is true."""
    lengths = np.array(sequences)
    ends = np.cumsum(lengths)
    tokens = np.random.default_rng(0).integers(1, 500, ends[-1])
    if eod:
        tokens[ends[lengths > 0] - 1] = EOD
    index = np.arange(len(lengths) + 1) if boundaries is None else np.array(boundaries)
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(lengths), len(index))
    parts = [lengths.astype("<i4"), ((ends - lengths) * 2).astype("<i8"), index.astype("<i8")]
    prefix.with_suffix(".idx").write_bytes(header + b"".join(part.tobytes() for part in parts))
    prefix.with_suffix(".bin").write_bytes(tokens.astype("<u2").tobytes())
    return prefix


LAYOUTS = {
    "a document is a sequence": ([5, 1, 9, 40, 2, 3], None, {0, 5, 6, 15, 55, 57}),
    "documents of several sequences": ([5, 1, 9, 40, 2, 3], [0, 2, 3, 6], {0, 6, 15}),
    "empty documents": ([0, 5, 0, 0, 12, 7, 0, 30, 0], None, {0, 5, 17, 24}),
    "documents without sequences": ([5, 9, 30], [0, 0, 1, 1, 3, 3], {0, 5}),
    "as many documents as sequences, but others": ([5, 9, 30], [0, 1, 1, 3], {0, 5}),
}


@pytest.mark.parametrize(("lengths", "boundaries", "begins"), LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("eod", [True, False])
def test_documents_begin_where_the_index_says(
    tmp_path: Path, lengths: list[int], boundaries: list[int] | None, begins: set[int], eod: bool
) -> None:
    shard = Shard(write_pair(tmp_path / "s", lengths, boundaries, eod))
    for count in (1, 2, 7, shard.len_tokens):
        offsets = np.arange(shard.len_tokens - count + 1)
        found = shard.document_begins(offsets, count)
        assert found.shape == (len(offsets), count) and found.dtype == bool
        expected = [[offset + place in begins for place in range(count)] for offset in offsets]
        assert found.tolist() == expected
    with pytest.raises(DataError, match="are out of range"):
        shard.document_begins(np.array([0, shard.len_tokens - 1]), 2)


def test_a_part_of_a_shard_begins_where_its_documents_do(tmp_path: Path) -> None:
    part = Shard(write_pair(tmp_path / "s", [5, 1, 9, 40, 2, 3])).part(1, 5).part(1, 4)
    assert np.flatnonzero(part.document_begins(np.array([0]), part.len_tokens)[0]).tolist() == [0, 9, 49]
    assert part.documents == 3 and part.len_tokens == 51


def test_many_documents_are_found_as_one_by_one(tmp_path: Path) -> None:
    lengths = np.random.default_rng(1).integers(0, 30, 5000)
    shard = Shard(write_pair(tmp_path / "s", lengths))
    begins = np.zeros(shard.len_tokens, dtype=bool)
    begins[np.cumsum([0, *lengths])[:-1][lengths > 0]] = True
    offsets = np.random.default_rng(2).integers(0, shard.len_tokens - 64, 300)
    assert np.array_equal(shard.document_begins(offsets, 64), np.stack([begins[o : o + 64] for o in offsets]))


@pytest.fixture(scope="module")
def blend(tmp_path_factory: pytest.TempPathFactory) -> Blend:
    folder = tmp_path_factory.mktemp("packed")
    lengths = np.random.default_rng(3).integers(1, 20, 200)
    shards = [Shard(write_pair(folder / "text", lengths)), Shard(write_pair(folder / "code", lengths[::-1]))]
    return Blend(shards, [3, 1], LENGTH, seed=5)


def read(blend: Blend, packing: Packing, samples: int = 64, step: int = 0) -> Batch:
    with Loader(blend, samples, samples, 0, 1, packing=packing, num_workers=0) as loader:
        (batch,) = loader.micro_batches(step)
    return batch


CHOICES = [(mask, positions) for mask in (False, True) for positions in (False, True)]


@pytest.mark.parametrize(("mask", "positions"), CHOICES)
@pytest.mark.parametrize("masked", [None, EOD])
def test_a_batch_says_what_megatron_says(blend: Blend, mask: bool, positions: bool, masked: int | None) -> None:
    """Against megatron-core's own masks and positions, which look for the token that ends a document."""
    from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids as megatron

    batch = read(blend, Packing(mask, positions, masked))
    assert (batch.documents is not None) == mask and (batch.loss_mask is not None) == (masked is not None)
    for row, tokens in enumerate(batch.tokens):
        inputs = torch.from_numpy(tokens[:-1])
        hidden, kept, places = megatron(inputs, EOD, positions, mask, masked is not None, True)
        earlier = np.tri(LENGTH, dtype=bool)
        same = True if batch.documents is None else np.equal.outer(batch.documents[row], batch.documents[row])
        assert np.array_equal(earlier & same, ~hidden[0].numpy())
        assert batch.loss_mask is None or np.array_equal(batch.loss_mask[row], kept.numpy() > 0)
        assert np.array_equal(model_positions(batch, row), places.numpy())


def model_positions(batch: Batch, row: int) -> np.ndarray:
    """The positions that a model uses: those given, or its own in the sample or in every document."""
    if batch.positions is not None:
        return batch.positions[row]
    if batch.documents is None:
        return np.arange(LENGTH)
    ids = batch.documents[row].tolist()
    return np.array([place - ids.index(number) for place, number in enumerate(ids)])


def test_without_packing_a_batch_has_tokens_and_nothing_else(blend: Blend) -> None:
    batch = read(blend, Packing())
    assert [name for name, array in vars(batch).items() if array is not None] == ["tokens"]
    assert np.array_equal(batch.tokens, blend.batch(np.arange(64)))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_rank_gets_its_rows_of_everything(blend: Blend, world: int) -> None:
    packing = Packing(True, False, EOD)
    whole = read(blend, packing, samples=48, step=3)
    ranks = []
    for rank in range(world):
        with Loader(blend, 48, 4, rank, world, packing=packing) as loader:
            ranks.append(loader.micro_batches(3))
    ordered = [ranks[rank][turn] for turn in range(12 // world) for rank in range(world)]
    for name, array in vars(whole).items():
        assert np.array_equal(np.concatenate([getattr(batch, name) for batch in ordered]), array), name


SHAPE = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": LENGTH,
    "vocab_size": 512,
    "seed": 3,
}
# A packed sample and its separate documents sum the same up to 16 terms in different order, in float64.
EXACT = {"rtol": 1e-9, "atol": 1e-11}


def tensors(batch: Batch) -> dict[str, Tensor]:
    """The arguments of LanguageModelLoss."""
    arrays = {name: torch.from_numpy(array) for name, array in vars(batch).items() if array is not None}
    return {"samples" if name == "tokens" else name: tensor for name, tensor in arrays.items()}


def gradients(loss: Tensor, model: torch.nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def documents_alone(model: torch.nn.Module, batch: Batch, begins: np.ndarray) -> Tensor:
    """The loss of a packed batch from calls with one document each, at the positions that the batch gives or from 0
    on: the mean over all targets that count.
    """
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row, tokens in enumerate(batch.tokens):
        edges = sorted({0, *np.flatnonzero(begins[row]).tolist(), LENGTH})
        for first, stop in pairwise(edges):
            places = None if batch.positions is None else torch.from_numpy(batch.positions[row, first:stop])
            logits = model(torch.from_numpy(tokens[None, first:stop]), positions=places)[0]
            losses = F.cross_entropy(logits, torch.from_numpy(tokens[first + 1 : stop + 1]), reduction="none")
            kept = np.ones(stop - first) if batch.loss_mask is None else batch.loss_mask[row, first:stop]
            total, count = total + (losses * torch.from_numpy(kept.astype(np.float64))).sum(), count + kept.sum()
    return total / count


METHODS = [
    *((name, True) for name in ("rotary", "coca", "coca_strict", "alibi", "learned", "sinusoidal")),
    *((name, False) for name in ("rotary", "coca", "alibi", "learned")),
]


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(("pos_emb", "reset_position_ids"), METHODS)
def test_a_packed_sample_is_its_documents_alone(
    blend: Blend, monkeypatch: pytest.MonkeyPatch, pos_emb: str, reset_position_ids: bool, backend: str
) -> None:
    """Loss and gradients, where positions begin again in a document and where they go on."""
    # The loss is taken in float32 in training; here both sides keep float64, so that nothing hides in its rounding.
    monkeypatch.setattr(Tensor, "float", lambda x: x)
    config = load_config([], SHAPE | {"pos_emb": pos_emb, "rotary_pct": 0.5, "attention_backend": backend})
    model = build_model(config).double()
    batch = read(blend, Packing(True, reset_position_ids, EOD), samples=6)
    begins = blend.document_begins(blend.by_source(np.arange(6)))
    packed = LanguageModelLoss(model)(**tensors(batch))
    alone = documents_alone(model, batch, begins)
    torch.testing.assert_close(packed, alone, **EXACT)
    one, other = gradients(packed, model), gradients(alone, model)
    for name, gradient in one.items():
        torch.testing.assert_close(gradient, other[name], **EXACT, msg=lambda text, name=name: f"{name}: {text}")
    plain = LanguageModelLoss(model)(**tensors(Batch(batch.tokens, loss_mask=batch.loss_mask)))
    assert abs(float(plain - packed)) > 1e-6, "documents are not parted without being told"


def test_the_masked_loss_is_the_mean_over_what_counts() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 7, generator=generator)
    labels = torch.randint(7, (2, 5), generator=generator)
    mask = torch.rand(2, 5, generator=generator) < 0.6
    each = -logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    torch.testing.assert_close(next_token_loss(logits, labels, mask), each[mask].mean())
    assert next_token_loss(logits, labels, torch.zeros_like(mask)) == 0.0
    torch.testing.assert_close(next_token_loss(logits, labels, torch.ones_like(mask)), next_token_loss(logits, labels))


def keys(folder: Path, tokenizer: bool = True, **changes: Any) -> dict[str, Any]:
    write_pair(folder / "s", [9] * 400)
    if tokenizer:
        load_tokenizer("CharLevelTokenizer").save(folder)
    return SHAPE | {"data_path": str(folder / "s"), "pos_emb": "coca", **changes}


def test_the_keys_reach_the_loader(tmp_path: Path) -> None:
    given = keys(tmp_path, reset_attention_mask=True, reset_position_ids=True, eod_mask_loss=True)
    corpus = open_corpus(load_config([], given))
    assert corpus.packing == Packing(True, True, EOD)
    assert corpus.identity["documents"] == ["reset_attention_mask", "reset_position_ids", "eod_mask_loss"]
    plain = open_corpus(load_config([], keys(tmp_path)))
    assert plain.packing == Packing() and "documents" not in plain.identity


def test_training_and_validation_read_alike(tmp_path: Path) -> None:
    given = keys(tmp_path, split="1,1,0", reset_attention_mask=True, eod_mask_loss=True, num_workers=0)
    corpus = open_corpus(load_config([], given))
    assert corpus.valid is not None
    for blend in (corpus.train, corpus.valid):
        with open_loader(corpus, blend, (8, 8, 0, 1)) as loader:
            (batch,) = loader.micro_batches(0)
        assert batch.documents is not None and batch.documents.max() > 1
        assert batch.loss_mask is not None and not batch.loss_mask.all()


def test_a_mask_needs_to_know_the_token(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="eod_mask_loss: .*token is unknown"):
        open_corpus(load_config([], keys(tmp_path, tokenizer=False, eod_mask_loss=True)))


@pytest.mark.parametrize("pos_emb", ["rotary", "coca", "alibi", "none"])
def test_positions_do_not_begin_again_under_crossing_attention(tmp_path: Path, pos_emb: str) -> None:
    with pytest.raises(ConfigError, match="reset_position_ids: .*set reset_attention_mask=true"):
        load_config([], keys(tmp_path, pos_emb=pos_emb, reset_position_ids=True))
    for allowed in ({"pos_emb": "learned"}, {"reset_attention_mask": True}):
        load_config([], keys(tmp_path, pos_emb=pos_emb, reset_position_ids=True) | allowed)
