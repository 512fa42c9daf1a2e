"""`megatron-coca inspect checkpoint`: the description of a checkpoint, and whether it finds damage."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_coca import cli
from megatron_coca.checkpoints import native
from megatron_coca.checkpoints.native.state import WEIGHT, ParameterSlice, StatePiece, file_name, write_pieces
from megatron_coca.config import load_config
from megatron_coca.model import build_model


@pytest.fixture(scope="module")
def inspect() -> Callable[[list[str]], int]:
    return lambda arguments: cli.main(["inspect", "checkpoint", *arguments])


@pytest.fixture
def run(small: dict[str, Any], tmp_path: Path) -> Path:
    """Two checkpoints of a model, its weights in two halves with one moment each."""
    config = load_config([], small)
    weights = build_model(config).state_dict()
    for step in (4, 8):
        folder = native.begin(tmp_path / "run", step)
        save_file(weights, folder / native.WEIGHTS)
        (folder / native.CONFIG).write_text(config.to_yaml())
        native.write_json(folder / native.META, {"step": step, "topology": {"data": 2}, "batch": 4})
        (folder / native.STATE).mkdir()
        (folder / native.RNG).mkdir()
        for rank in range(2):
            (folder / native.RNG / f"rank_{rank}.pt").write_text("random")
        places = {name: ParameterSlice(tuple(tensor.shape)) for name, tensor in weights.items()}
        for rank in range(2):
            write_pieces(folder / native.STATE / file_name(rank), halves(weights, rank), places)
        native.commit(tmp_path / "run", step)
    return tmp_path / "run"


def halves(weights: dict[str, torch.Tensor], rank: int) -> list[StatePiece]:
    pieces = []
    for name, tensor in weights.items():
        middle = tensor.numel() // 2
        begin, stop = (0, middle) if rank == 0 else (middle, tensor.numel())
        part = tensor.reshape(-1)[begin:stop].clone()
        pieces += [StatePiece(name, WEIGHT, begin, part), StatePiece(name, "exp_avg", begin, part.clone())]
    return pieces


def test_a_sound_run(inspect: Any, run: Path, small: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    parameters = sum(p.numel() for p in build_model(load_config([], small)).parameters())
    assert inspect([str(run)]) == 0
    text = capsys.readouterr().out
    assert "global_step4: step 4, valid" in text and "global_step8: step 8, valid" in text
    assert text.count(f"parameters: {parameters:,}") == 2 and "pos_emb: coca" in text
    assert inspect([str(run / "global_step8"), "--json", str(run / "facts.json")]) == 0
    (facts,) = json.loads((run / "facts.json").read_text())
    assert facts["damage"] is None
    assert facts["meta"]["topology"] == {"data": 2} and facts["parameters"] == parameters


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def test_damage_is_found(inspect: Any, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(run / "global_step8" / native.STATE / file_name(1))
    assert inspect([str(run)]) == 1
    text = capsys.readouterr().out
    assert "global_step4: step 4, valid" in text
    assert "rank_00001.safetensors: content has changed" in text
    assert inspect([str(run), "--no-verify"]) == 0, "a changed value shows in the checksum only"
    text = capsys.readouterr().out
    assert text.count("not verified (only file names") == 2 and ", valid" not in text
    flip_size = run / "global_step4" / native.RNG / "rank_0.pt"
    flip_size.write_text("")
    assert inspect([str(run), "--no-verify"]) == 1 and "rank_0.pt: has 0 bytes" in capsys.readouterr().out


def test_a_step_without_a_manifest_is_damaged(inspect: Any, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "global_step4" / native.MANIFEST).unlink()
    for path in (run, run / "global_step4"):
        assert inspect([str(path)]) == 1
        assert "global_step4: step ?, " in (text := capsys.readouterr().out) and "manifest.json: not found" in text


def test_files_that_the_manifest_does_not_know(inspect: Any, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "global_step4" / "notes.txt").write_text("mine")
    assert inspect([str(run)]) == 0
    assert capsys.readouterr().out.count("not listed in manifest.json: notes.txt") == 1


def test_a_rank_that_is_missing_is_found_without_checksums(
    inspect: Any, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "global_step8" / native.STATE / file_name(1)).unlink()
    assert inspect([str(run / "global_step8"), "--no-verify"]) == 1
    assert "rank_00001.safetensors: not found; copy the checkpoint" in capsys.readouterr().out


def test_nothing_to_inspect(inspect: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect([str(tmp_path)]) == 2 and "no complete checkpoint" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    assert inspect([str(tmp_path)]) == 2 and "config.json: model_type: None is not su" in capsys.readouterr().err
