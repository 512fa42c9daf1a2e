"""megatron-coca evaluate analyse: the same numbers in any order, and the samples."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_coca.attention.inputs import CAUSAL, AttentionInputs, Segment
from megatron_coca.commands.evaluate import main
from megatron_coca.config import load_config
from megatron_coca.evaluation.distance_sweep import SweptScores
from megatron_coca.evaluation.results import read_costs, read_record
from megatron_coca.evaluation.tasks.analysis import measure as length_analysis
from megatron_coca.evaluation.tasks.analysis.measure import (
    draw_pairs,
    log_distances,
    row_entropies,
    spread,
    summarise_angles,
    summarise_decay,
)
from megatron_coca.evaluation.tasks.analysis.task import AnalysisResult
from tests.checkpoint_files import write_checkpoint

MODEL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 16, "vocab_size": 512}
MODEL |= {"no_weight_tying": True, "tokenizer_type": "CharLevelTokenizer"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: write_checkpoint(tmp_path_factory.mktemp(name), load_config([], {**MODEL, "pos_emb": name}))
        for name in ("rotary", "coca", "alibi")
    }


@pytest.fixture
def analyse(tmp_path: Path) -> Any:
    """analyse(checkpoint, file name, option, ...): the exit status."""
    text = tmp_path / "text.jsonl"
    sentences = ["It is a truth universally acknowledged. " * 3, "Call me Ishmael, some years ago. " * 3]
    text.write_text("".join(json.dumps({"text": sentence}) + "\n" for sentence in sentences))

    def run(checkpoint: Path, name: str, *more: str) -> int:
        given = ["analyse", "--checkpoint", str(checkpoint), "--data", str(text), "--max-length", "48"]
        given += ["--pairs", "40", "--queries", "9", "--device", "cpu", "--output", str(tmp_path / name)]
        return main([*given, *more])

    return run


def test_order_and_interruption_change_no_byte(
    analyse: Any, checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert analyse(checkpoints["rotary"], "one.json", "--lengths", "16,48") == 0
    assert analyse(checkpoints["rotary"], "two.json", "--lengths", "48") == 0
    assert analyse(checkpoints["rotary"], "two.json", "--lengths", "48,16") == 0
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()
    result = read_record(tmp_path / "one.json", AnalysisResult, "an analysis")
    assert [cell.length for cell in result.results] == [16, 48] and result.documents.count == 2
    costs = read_costs(tmp_path / "one.json")
    assert costs is not None and [(cost.at, cost.tokens) for cost in costs.costs] == [
        ("length 16", 32),
        ("length 48", 96),
    ]
    monkeypatch.setattr(length_analysis, "analyse", lambda *given: pytest.fail("it was measured already"))
    assert analyse(checkpoints["rotary"], "one.json", "--lengths", "16") == 0


def test_variants_and_methods_without_rotation(
    analyse: Any, checkpoints: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dynamic = ("--variant", "plain", "--variant", "dynamic", "rope_scaling.rope_type=dynamic", "rope_scaling.factor=4")
    assert analyse(checkpoints["coca"], "coca", "--lengths", "48", *dynamic) == 0
    results = [
        read_record(tmp_path / "coca" / f"analyse_{name}.json", AnalysisResult, "an analysis").results[0]
        for name in ("plain", "dynamic")
    ]
    assert [cell.angles.anomalous for cell in results] == [0.0, 0.0], "collinear, under every extension"
    assert [cell.borders.k.beyond_training for cell in results] == [0.0, 0.0]
    assert analyse(checkpoints["alibi"], "alibi.json", "--lengths", "16") == 0
    cell = read_record(tmp_path / "alibi.json", AnalysisResult, "an analysis").results[0]
    assert cell.angles is None and cell.borders is None and cell.decay.falling_mean == 1.0
    shown = capsys.readouterr()
    assert ", 16 tokens |               – |" in shown.out and "length 16: 0/2 windows" in shown.err
    assert analyse(checkpoints["alibi"], "alibi.json", "--lengths", "16,16") == 2
    assert "must be distinct" in capsys.readouterr().err


@pytest.mark.parametrize("seed", ["-1", "1.5", "x"])
def test_a_seed_that_is_none_is_one_message(
    seed: str, analyse: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        analyse(tmp_path, "one.json", "--lengths", "16", "--seed", seed)
    assert "--seed" in capsys.readouterr().err


def test_all_pairs_come_once_each() -> None:
    m, n = draw_pairs(9, 10**6, seed=4)
    assert sorted(zip(m.tolist(), n.tolist(), strict=True)) == [
        (row, key) for row in range(9) for key in range(row + 1)
    ]


def test_drawn_pairs_are_spread_evenly_over_all() -> None:
    m, n = draw_pairs(131072, 20000, seed=4)
    assert len({*zip(m.tolist(), n.tolist(), strict=True)}) == 20000 and (n <= m).all() and m.max() < 131072
    assert (m < 65536).double().mean() == pytest.approx(1 / 4, abs=0.02)
    assert (n < m / 2).double().mean() == pytest.approx(1 / 2, abs=0.02)
    again, other = draw_pairs(131072, 20000, seed=4), draw_pairs(131072, 20000, seed=5)
    assert torch.equal(m, again[0]) and not torch.equal(m, other[0])


@pytest.mark.parametrize(("length", "count"), [(2, 2), (17, 17), (18, 18), (512, 37), (32768, 61)])
def test_distances_are_dense_where_it_is_near(length: int, count: int) -> None:
    found = log_distances(length)
    assert found == sorted(set(found)) and found[0] == 0 and found[-1] == length - 1
    assert found[:17] == list(range(min(17, length))) and len(found) == count
    assert all(after / before < 1.25 for before, after in pairwise(found[16:]))


def test_positions_are_spread() -> None:
    assert spread(0, 100, 5).tolist() == [0, 25, 50, 75, 100] and spread(3, 5, 9).tolist() == [3, 4, 5]
    assert spread(7, 7, 4).tolist() == [7]


def test_shares_of_angles() -> None:
    theta = np.array([0.0, 1e-12, -1e-12, 0.2, -0.2, np.pi, -np.pi + 1e-6, -0.5, np.nan])[None, None, :, None]
    angles, borders = summarise_angles(theta, np.array([0.01]), training_length=30)
    assert angles.undefined == 1 / 9 and angles.collinear == 3 / 8
    assert angles.anomalous == 3 / 8 and angles.anomalous_by_head == [[3 / 8]] and angles.largest == np.pi
    assert borders.k.beyond_training == 2 / 8, "tau is 20, 50 and 314 tokens"


def test_invisible_distances_have_no_part_in_the_mean() -> None:
    scores = torch.tensor([[[3.0, 2.0, 2.5, 1.0]]], dtype=torch.float64)
    visible = torch.tensor([True, True, True, False])
    decay = summarise_decay([0, 1, 2, 3], [SweptScores(scores, visible)])
    assert decay.falling == [1.0, 0.0, None] and decay.falling_mean == 0.5
    assert decay.change == decay.low == decay.high == [0.0, -1.0, -0.5, None]
    hidden = summarise_decay([0, 1, 2, 3], [SweptScores(scores, ~visible)])
    assert hidden.falling == [None] * 3 and hidden.falling_mean is None


def test_entropy_takes_no_more_memory_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of queries, no more scores than allowed exist at once."""
    length, heads, sizes = 400, 2, []
    x = torch.randn(1, heads, length, 8)
    inputs = AttentionInputs((Segment(x, x, CAUSAL),), x, 0.3)
    whole, original = row_entropies(inputs, torch.arange(length)), length_analysis.row_scores
    monkeypatch.setattr(length_analysis, "SCORES_AT_ONCE", 7 * heads * length + 1)
    monkeypatch.setattr(length_analysis, "row_scores", lambda *given: sizes.append(len(given[1])) or original(*given))
    torch.testing.assert_close(row_entropies(inputs, torch.arange(length)), whole)
    assert max(sizes) == 7 and sum(sizes) == length
