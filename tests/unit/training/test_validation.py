"""The samples that a validation reads, the names of its figures, and perplexity at longer windows."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_coca.config import ConfigError, load_config
from megatron_coca.data import Batch, Blend, DataError, Packing, Shard, Tokenizer, load_tokenizer
from megatron_coca.data.shards import ShardWriter
from megatron_coca.model import GPT, LanguageModelLoss, build_model
from megatron_coca.training.corpus import Corpus
from megatron_coca.training.engine import HeldOutLoss
from megatron_coca.training.validation import check_validation, validate

SHAPE = {
    "num_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 1,
    "seq_length": 4,
    "vocab_size": 512,
    "pos_emb": "coca",
}
LAYOUT = (4, 2, 0, 1)


def shard(prefix: Path, token: int) -> Shard:
    """A shard of one token only, so that a mean over tokens gives the share of its samples."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    writer = ShardWriter(prefix, 512)
    writer.add(np.full(400, token))
    writer.finish()
    return Shard(prefix)


class Mean:
    """A stand-in for the engine: the loss is the mean token. It keeps its inputs."""

    def __init__(self) -> None:
        self.seen: list[np.ndarray] = []

    def mean_loss(self, micro_batches: Sequence[Batch]) -> HeldOutLoss:
        tokens = np.concatenate([batch.tokens for batch in micro_batches])
        self.seen.append(tokens)
        return HeldOutLoss(float(tokens.mean()), tokens.size)


def losses_of(shards: list[Shard], weights: list[float], **keys: Any) -> tuple[dict[str, float], Mean]:
    blend = Blend(shards, weights, 4, seed=0)
    corpus = Corpus(load_config([], SHAPE | {"num_workers": 0} | keys), Blend(shards[:1], [1], 4, 0), blend, None)
    engine = Mean()
    return validate(corpus, engine.mean_loss, LAYOUT), engine


@pytest.fixture
def two(tmp_path: Path) -> list[Shard]:
    return [shard(tmp_path / "text", 1), shard(tmp_path / "code", 5)]


def test_the_blend_and_every_source(two: list[Shard]) -> None:
    losses, engine = losses_of(two, [3.0, 1.0], eval_iters=8)
    assert losses == {"validation_loss": 2.0, "validation_loss/text": 1.0, "validation_loss/code": 5.0}
    assert len(engine.seen) == 8 + 6 + 2, "sources share the number of batches by weight"


def test_the_blend_reads_its_first_samples_every_time(two: list[Shard]) -> None:
    for _ in range(2):
        _, engine = losses_of(two, [3.0, 1.0], eval_iters=8)
        wanted = Blend(two, [3.0, 1.0], 4, seed=0).batch(range(32))
        assert np.array_equal(np.concatenate(engine.seen[:8]), wanted)


def test_a_small_source_has_a_batch(two: list[Shard]) -> None:
    _, engine = losses_of(two, [1000.0, 1.0], eval_iters=2)
    assert [int(tokens[0, 0]) for tokens in engine.seen[2:]] == [1, 1, 5]


@pytest.mark.parametrize(
    ("number", "keys", "names"),
    [
        (2, {"eval_per_source": False}, ["validation_loss"]),
        (1, {}, ["validation_loss"]),
        (2, {"eval_iters": 0}, []),
    ],
)
def test_validation_that_is_left_out(two: list[Shard], number: int, keys: dict[str, Any], names: list[str]) -> None:
    losses, _ = losses_of(two[:number], [1.0] * number, **({"eval_iters": 2} | keys))
    assert list(losses) == names


def test_no_validation_data_no_losses(two: list[Shard]) -> None:
    corpus = Corpus(load_config([], SHAPE), Blend(two, [1, 1], 4, 0), None, None)
    assert validate(corpus, Mean().mean_loss, LAYOUT) == {}


def test_sources_of_one_name_keep_their_prefixes(tmp_path: Path) -> None:
    same = [shard(tmp_path / folder / "text", token) for folder, token in (("a", 1), ("b", 5))]
    losses, _ = losses_of(same, [1.0, 1.0], eval_iters=2)
    assert list(losses)[1:] == [f"validation_loss/{tmp_path}/{folder}/text" for folder in "ab"]


L = SHAPE["seq_length"]
WINDOWS: dict[str, Any] = {"eval_windows": ["1L", 10, "4L"], "eval_iters": 8}
TOKENS = {"1L": 4, "10": 10, "4L": 16}


class OfModel:
    """Stands for the engine: the loss of a model."""

    def __init__(self, model: GPT) -> None:
        self._loss = LanguageModelLoss(model)

    @torch.no_grad()
    def mean_loss(self, micro_batches: Sequence[Batch]) -> HeldOutLoss:
        named = ({name: torch.from_numpy(x) for name, x in vars(b).items() if x is not None} for b in micro_batches)
        losses = [self._loss(batch.pop("tokens"), **batch) for batch in named]
        return HeldOutLoss(float(torch.stack(losses).mean()), 1)


def random_shard(prefix: Path, tokens: int = 400) -> Shard:
    prefix.parent.mkdir(parents=True, exist_ok=True)
    writer = ShardWriter(prefix, 512)
    for part in np.array_split(np.random.default_rng(0).integers(1, 512, tokens), 40):
        writer.add(part)
    writer.finish()
    return Shard(prefix)


def window_figures(shards: list[Shard], layout: tuple[int, int, int, int], **keys: Any) -> dict[str, float]:
    config = load_config([], SHAPE | {"num_workers": 0, "rotary_pct": 0.5, "init_method_std": 0.7} | WINDOWS | keys)
    blend = Blend(shards, [1.0] * len(shards), L, seed=0)
    packing = Packing(config.data.reset_attention_mask, config.data.reset_position_ids)
    model = build_model(config).eval()
    figures = validate(Corpus(config, blend, blend, None, packing), OfModel(model).mean_loss, layout)
    return {name.removeprefix("validation_perplexity_"): x for name, x in figures.items() if "perplexity" in name}


@torch.no_grad()
def by_logits(shard: Shard, packed: bool = False, **keys: Any) -> dict[str, float]:
    """exp of the mean nll of the last two tokens of eight samples of the longest window, from the model's logits."""
    config = load_config([], SHAPE | {"rotary_pct": 0.5, "init_method_std": 0.7} | keys)
    model = build_model(config).eval()
    blend = Blend([shard], [1.0], 16, seed=0)
    located = blend.by_source(range(8))
    tokens, begins = torch.from_numpy(blend.tokens(located)), torch.from_numpy(blend.document_begins(located))
    found = {}
    for name, window in TOKENS.items():
        inputs, targets = tokens[:, -window - 1 : -1], tokens[:, -2:, None]
        documents = begins[:, -window:].cumsum(1) if packed else None
        logs = model(inputs, documents=documents).log_softmax(-1)[:, -2:]
        found[name] = float(torch.exp(-logs.gather(2, targets).double().mean()))
    return found


def test_perplexity_of_longer_windows(tmp_path: Path) -> None:
    one = random_shard(tmp_path / "text")
    wanted = by_logits(one)
    assert len({round(value, 3) for value in wanted.values()}) == 3, "windows differ"
    assert window_figures([one], LAYOUT) == pytest.approx(wanted, rel=1e-5)
    ranks = [window_figures([one], (4, 2, rank, 2)) for rank in range(2)]
    mean = {name: math.sqrt(ranks[0][name] * ranks[1][name]) for name in TOKENS}
    assert mean == pytest.approx(wanted, rel=1e-5), "ranks share the same samples"


def test_longer_windows_of_packed_documents(tmp_path: Path) -> None:
    one, keys = random_shard(tmp_path / "text"), {"reset_attention_mask": True, "reset_position_ids": True}
    wanted = by_logits(one, packed=True)
    assert window_figures([one], LAYOUT, **keys) == pytest.approx(wanted, rel=1e-5)
    assert wanted != pytest.approx(by_logits(one), rel=1e-3)


def test_the_longest_window_reads_as_much_as_the_validation_loss(two: list[Shard]) -> None:
    _, engine = losses_of(two, [3.0, 1.0], eval_per_source=False, **WINDOWS)
    shapes = [tokens.shape for tokens in engine.seen]
    assert shapes[:8] == [(4, 5)] * 8
    assert shapes[8:] == [(1, 5)] * 8 + [(1, 11)] * 8 + [(1, 17)] * 8
    assert sum(rows * (width - 1) for rows, width in shapes[-8:]) == sum(rows * 4 for rows, _ in shapes[:8])


def corpus_of(valid: Shard, tokenizer: Tokenizer | None, **keys: Any) -> Corpus:
    blend = Blend([valid], [1.0], L, seed=0)
    return Corpus(load_config([], SHAPE | keys), blend, blend, tokenizer)


BYTES = load_tokenizer("CharLevelTokenizer")


@pytest.mark.parametrize(
    ("tokenizer", "keys", "message"),
    [
        (BYTES, {"eval_windows": ["1L", 400]}, "text: has 400 .*eval_windows needs more than 400"),
        (BYTES, {"eval_windows": [399], "pos_emb": "xpos", "hidden_size": 16, "precision": "fp16"}, None),
    ],
)
def test_requirements_on_the_data(
    tmp_path: Path, tokenizer: Tokenizer | None, keys: dict[str, Any], message: str | None
) -> None:
    corpus = corpus_of(random_shard(tmp_path / "text"), tokenizer, **keys)
    if message is None:
        check_validation(corpus)
        return
    with pytest.raises((ConfigError, DataError), match=message):
        check_validation(corpus)


def test_windows_that_xpos_cannot_represent(tmp_path: Path) -> None:
    keys = {"eval_windows": [6000], "pos_emb": "xpos", "hidden_size": 16, "precision": "fp16"}
    with pytest.raises(ConfigError, match="eval_windows: .*xpos overflows torch.float16 at 6000"):
        check_validation(corpus_of(random_shard(tmp_path / "text", 7000), BYTES, **keys))
