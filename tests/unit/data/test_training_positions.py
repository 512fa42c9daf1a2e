"""Positions drawn for training: their distribution, that they depend only on seed and sample, and their uses."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_coca.config import ConfigError, load_config
from megatron_coca.data import DrawnPositions, Loader, Packing, SyntheticSamples, TaskSettings
from megatron_coca.data.training_positions import DRAWN
from megatron_coca.model import build_model
from megatron_coca.model.gpt import LanguageModelLoss
from megatron_coca.neox_plugin.keys import FIELDS, NEW_CHOICES, problems_of
from megatron_coca.training.corpus import open_corpus, open_loader
from tests.unit.data.test_synthetic import write_shard

MODEL = "configs/recall/model.yml"
NUMBERS = np.arange(500)


@pytest.mark.parametrize("name", DRAWN)
def test_positions_increase_below_the_bound(name: str) -> None:
    positions = DrawnPositions(name, 1024, 0).draw(NUMBERS, 64)
    assert positions.shape == (500, 64) and positions.min() >= 0 and positions.max() < 1024
    assert (np.diff(positions) > 0).all()
    gaps = np.diff(positions) - 1
    if name == "shifted":
        assert not gaps.any() and len(set(positions[:, 0])) > 300 and positions[:, 0].max() > 940
    if name == "pose":
        assert (positions[:, 0] == 0).all() and ((gaps > 0).sum(axis=1) <= 1).all()
        assert set(np.nonzero(gaps)[1]) == set(range(63)) and positions.max() > 1000
    if name == "randomized":  # every position is as likely as any other: 31.25 of 500 samples have it
        counts = np.bincount(positions.ravel(), minlength=1024)
        assert abs(counts.mean() - 31.25) < 1e-9 and counts.std() < 8 and (gaps > 0).any(axis=1).all()


@pytest.mark.parametrize("name", DRAWN)
def test_positions_depend_on_seed_and_sample_alone(name: str) -> None:
    draw = DrawnPositions(name, 1024, 1)
    whole = draw.draw(NUMBERS, 64)
    assert (draw.draw(NUMBERS[::-1], 64)[::-1] == whole).all()
    assert (draw.draw(NUMBERS[40:41], 64) == whole[40:41]).all()
    assert (replace(draw, seed=2).draw(NUMBERS, 64) != whole).any(axis=1).mean() > 0.99


@pytest.mark.parametrize("name", DRAWN)
def test_every_document_of_a_sample_draws_its_own(name: str) -> None:
    begins = np.zeros((2, 20), dtype=bool)
    begins[0, [5, 6, 15]] = begins[1, 0] = True
    draw = DrawnPositions(name, 200, 0)
    positions = draw.draw(np.array([3, 4]), 20, begins)
    for first, end in ((0, 5), (6, 15), (15, 20)):
        assert (np.diff(positions[0, first:end]) > 0).all()
    assert (positions[1] == draw.draw(np.array([4]), 20)).all(), "one document draws the same as a whole sample"
    assert positions.max() < 200


def test_a_step_is_stretched_by_one_factor() -> None:
    draw, factors = DrawnPositions("stretched", 256, 3), []
    for step in range(40):
        positions = draw.draw(NUMBERS[:3], 64, step=step)
        factors.append(int(positions.max() + 1) // 64)
        assert (positions[:, 0] == 0).all() and (positions[:, -1] == 64 * factors[-1] - 1).all()
        assert factors[-1] == 1 or (positions[0] != positions[1]).any()
    assert set(factors) == {1, 2, 3, 4} and (draw.draw(NUMBERS[:1], 2, step=0)[0] >= [0, 1]).all()


def test_clex_is_trained_with_stretched_positions() -> None:
    """They reach the layers, and the factor of the frequencies follows from them."""
    clex = load_config([MODEL], ["rope_scaling={rope_type: clex, max_factor: 4}"])
    assert clex.training_positions is not None and clex.training_positions.max == "4L"
    corpus = open_corpus(clex)
    with open_loader(corpus, corpus.train, (8, 8, 0, 1)) as loader:
        reached = {int(loader.micro_batches(step)[0].positions.max()) + 1 for step in range(12)}
    assert reached == {64, 128, 192, 256}
    model = build_model(corpus.config, training=True)
    seen: list[int] = []
    model.positions.clex.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    tokens = torch.from_numpy(SyntheticSamples(TaskSettings(), 64, 0).read(NUMBERS[:2]).tokens)
    for factor in (1, 3):
        positions = torch.arange(64).expand(2, -1).clone()
        positions[:, -1] = 64 * factor - 1
        LanguageModelLoss(model)(tokens, positions=positions)
    assert seen == [1, 3]


def test_the_bound_may_be_the_length() -> None:
    for name in DRAWN:
        assert (DrawnPositions(name, 64, 0).draw(NUMBERS[:5], 64) == np.arange(64)).all()
        assert (DrawnPositions(name, 1, 0).draw(NUMBERS[:2], 1) == 0).all()


def config(kind: str = "randomized", *changes: str) -> Any:
    return load_config([MODEL], [f"training_positions={{type: {kind}, max: 16L}}", *changes])


def test_all_layouts_of_ranks_read_the_same_positions() -> None:
    samples, draw = SyntheticSamples(TaskSettings(), 64, 0), DrawnPositions("randomized", 1024, 0)

    def positions(rank: int, ranks: int, micro: int) -> list[Any]:
        with Loader(samples, 8, micro, rank, ranks, positions=draw) as loader:
            return [batch.positions for batch in loader.micro_batches(3)]

    (whole,) = positions(0, 1, 8)
    divided = [positions(rank, 2, 2) for rank in (0, 1)]
    assert (np.concatenate([divided[0][0], divided[1][0], divided[0][1], divided[1][1]]) == whole).all()


def test_stretched_documents_draw_their_own() -> None:
    begins = np.zeros((3, 40), dtype=bool)
    begins[0, [7, 8, 10, 30]] = begins[2, [1, 20]] = True
    draw = DrawnPositions("stretched", 160, 0)
    found = draw.draw(np.arange(3), 40, begins, step=2)
    last = draw.draw(np.arange(3), 40, step=2)[0, -1]
    assert last == 159, "the step draws the largest factor"
    for row, starts in zip(found, ([0, 7, 8, 10, 30], [0], [0, 1, 20]), strict=True):
        documents = np.split(row, starts[1:])
        assert [document[0] for document in documents] == [0] * len(starts)
        assert [document[-1] for document in documents] == [last * (len(document) > 1) for document in documents]
        assert all((np.diff(document) > 0).all() for document in documents)
    plain = draw.draw(np.arange(3), 40, np.zeros((3, 40), dtype=bool), step=2)
    assert (plain[1] == found[1]).all(), "a sample of one document is as without boundaries"


def test_a_factor_of_evaluation_is_absent_in_training() -> None:
    """Positions beyond the training length get the factor of `log_n` in evaluation only."""
    positions = torch.arange(64).expand(4, 64) * 16
    tokens = torch.from_numpy(SyntheticSamples(TaskSettings(), 64, 0).read(NUMBERS[:4]).tokens)
    found = {}
    for scaling in ("none", "log_n", "temperature"):
        torch.manual_seed(0)
        settings = open_corpus(config("randomized", f"logit_scaling={scaling}")).config
        loss = LanguageModelLoss(build_model(settings).double())
        found[scaling] = [loss.train(on)(tokens, positions=positions).item() for on in (True, False)]
    assert found["log_n"][0] == found["none"][0] == found["none"][1]
    assert abs(found["log_n"][1] - found["none"][1]) > 1e-6
    assert found["temperature"][0] == found["temperature"][1] != found["none"][0]


def test_validation_keeps_the_plain_positions() -> None:
    corpus = open_corpus(config())
    assert corpus.valid is not None
    for samples, drawn in ((corpus.train, True), (corpus.valid, False)):
        with open_loader(corpus, samples, (8, 8, 0, 1)) as loader:
            assert (loader.micro_batches(0)[0].positions is not None) is drawn


def test_documents_with_reset_positions_restart_the_draw(tmp_path: Path) -> None:
    prefix = write_shard(tmp_path / "text")
    keys = {name: [str(prefix)] for name in ("train_data_paths", "valid_data_paths", "test_data_paths")}
    drawn = {"synthetic": None, "vocab_size": 64, "training_positions": {"type": "shifted", "max": 1024}}
    reset = {"reset_attention_mask": True, "reset_position_ids": True}
    for packed in (False, True):
        corpus = open_corpus(load_config([MODEL], {**keys, **drawn, **(reset if packed else {})}))
        with open_loader(corpus, corpus.train, (32, 32, 0, 1)) as loader:
            batch = loader.micro_batches(0)[0]
        assert batch.positions is not None
        jumps = np.diff(batch.positions) != 1
        assert jumps.any() == packed
        if batch.documents is not None:
            assert (np.diff(batch.documents)[jumps] == 1).all(), "positions jump only where a document begins"


def test_the_model_reads_drawn_positions_and_counts_tokens_for_dynamic_extensions() -> None:
    """A shift changes nothing in RoFormer, and a dynamic extension stays that of L with positions beyond it."""
    torch.manual_seed(0)
    settings = open_corpus(config("shifted", "rope_scaling={rope_type: dynamic, factor: 4}")).config
    loss = LanguageModelLoss(build_model(settings).double())
    tokens = torch.from_numpy(SyntheticSamples(TaskSettings(), 64, 0).read(NUMBERS[:4]).tokens)
    plain = loss(tokens)
    shifted = loss(tokens, positions=torch.arange(64).expand(4, 64) + torch.tensor([[0], [7], [500], [900]]))
    assert abs(plain.item() - shifted.item()) < 1e-6
    spread = loss(tokens, positions=torch.from_numpy(DrawnPositions("randomized", 1024, 0).draw(NUMBERS[:4], 64)))
    assert abs(plain.item() - spread.item()) > 1e-6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["training_positions={type: shifted, max: 63}"], "max 63 is not valid; .*at least seq_length"),
        (["training_positions={type: shifted, max: 4K}"], "or a multiple such as 16L"),
        (["training_positions.type=random"], r"`random` is not one of randomized \| shifted"),
        (["pos_emb=alibi"], "no effect with pos_emb alibi"),
        (["pos_emb=none"], "no effect with pos_emb none"),
        (["pos_emb=learned"], "max 16L exceeds max_position_embeddings 64"),
        (["rope_scaling={rope_type: clex}"], "rope_type clex needs {type: stretched, max: 16L}"),
        (["training_positions={type: stretched, max: 100}"], "stretched, max .*seq_length 64, not 100"),
        (["logit_scaling=log_n_trained"], "logit_scaling log_n_trained, which uses positions"),
        (
            ["relative_positions={type: inv_leaky_rerope, target_length: 1024}"],
            "inv_leaky_rerope, which uses positions",
        ),
        (["relative_positions={type: dual_chunk}"], "relative_positions dual_chunk, which uses positions"),
    ],
)
def test_contradictions_are_errors(changes: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config("randomized", *changes)


@pytest.mark.parametrize("gate", ["fox", "cable"])
def test_gates_read_tokens_and_no_positions(gate: str) -> None:
    torch.manual_seed(0)
    settings = open_corpus(config("randomized", f"forgetting_gate={gate}")).config
    loss = LanguageModelLoss(build_model(settings).double())
    tokens = torch.from_numpy(SyntheticSamples(TaskSettings(), 64, 0).read(NUMBERS[:4]).tokens)
    plain = loss(tokens).item()
    assert abs(plain - loss(tokens, positions=torch.arange(64).expand(4, 64) + 500).item()) < 1e-6
    spread = torch.from_numpy(DrawnPositions("randomized", 1024, 0).draw(NUMBERS[:4], 64))
    assert abs(plain - loss(tokens, positions=spread).item()) > 1e-6


def test_a_shift_leaves_chunks_where_they_are() -> None:
    config("shifted", "relative_positions={type: dual_chunk}")


@pytest.mark.parametrize("gate", ["fox", "cable"])
def test_gates_read_no_positions(gate: str) -> None:
    """Gates are trained and count tokens; only the rotation sees the drawn positions."""
    settings = open_corpus(config("randomized", f"forgetting_gate={gate}")).config
    assert settings.training_positions is not None and settings.position.forgetting_gate == gate


def test_gpt_neox_rejects_them_with_the_reason() -> None:
    given = {"type": "randomized", "max": "16L"}
    known = dict.fromkeys((*NEW_CHOICES, *FIELDS), str)
    (problem,) = problems_of({"training_positions": given}, known)
    assert problem.startswith("training_positions: GPT-NeoX's batches contain only tokens")
    assert not problems_of({"training_positions": None}, known)


def test_packing_adds_the_mask_of_the_data_to_its_own() -> None:
    tokens, mask = np.array([[5, 6, 7]]), np.array([[True, True]])
    batch = Packing(masked_token=6).batch(tokens, None, mask)
    assert batch.loss_mask is not None and batch.loss_mask.tolist() == [[True, False]]
    assert Packing().batch(tokens, None, ~mask).loss_mask is not None
