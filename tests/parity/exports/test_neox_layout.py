"""The layout of GPT-NeoX, from files written by hand and by us: equal weights and equal logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_coca.checkpoints import CheckpointError, load_model, open_checkpoint
from megatron_coca.checkpoints.exporting import export, export_neox
from megatron_coca.config import load_config
from megatron_coca.model import build_model
from tests.neox_files import write_neox
from tests.parity.exported import LLAMA, NEOX, SHAPE, random_checkpoint

SHAPES: dict[str, dict[str, Any]] = {
    "parallel residual": NEOX,
    "sequential": {"rotary_pct": 0.25},
    "tied": NEOX | {"no_weight_tying": False},
    "learned positions": {"pos_emb": "learned", "max_position_embeddings": 40},
    "rmsnorm, gated, no biases": LLAMA,
    "gated with biases": {"activation": "geglu", "intermediate_size": 192},
    "grouped queries": LLAMA | {"num_kv_heads": 2},
    "grouped queries with biases": {"num_kv_heads": 2, "activation": "swiglu", "intermediate_size": 96},
    "scalenorm": {"norm": "scalenorm"},
    "norm without weights": {"norm": "non_parametric_layernorm"},
    "buckets": {"pos_emb": "rpe"},
    "alibi": {"pos_emb": "alibi"},
    "CoCA": {"pos_emb": "coca"},
}
OURS_ONLY: dict[str, dict[str, Any]] = {
    "sinusoidal": {"pos_emb": "sinusoidal"},
    "one norm for both": NEOX | {"gpt_j_tied": True},
    "extended CoCA": {"pos_emb": "coca", "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    "PoPE": {"pos_emb": "pope", "pos_emb_options": {"offset": "uniform"}},
    "polar": {
        "pos_emb": "polar",
        "pos_emb_options": {"power": 2, "frequencies": "pair", "magnitude": "relu_mean", "offset": "zero"},
        "rotary_pct": 0.5,
    },
    "an initial angle": {"pos_emb": "coca_strict", "pos_emb_options": {"initial_angle": -0.7}},
    "map and logits": {"relative_positions": {"type": "rerope", "window": 8}, "logit_scaling": "log_n"},
}


def divided(shapes: dict[str, dict[str, Any]]) -> list[tuple[str, int, int]]:
    """Every shape for two ranks, with and without files of layers in turn, and for one rank every other one."""
    two = [(name, 2, number % 2) for number, name in enumerate(shapes)]
    return two + [(name, 1, number // 2 % 2) for number, name in enumerate(shapes) if number % 2]


def tokens(length: int) -> Tensor:
    return torch.randint(500, (2, length), generator=torch.Generator().manual_seed(length))


def assert_same(folder: Path, expected: dict[str, Tensor]) -> None:
    found = dict(open_checkpoint(folder).weights())
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert found[name].dtype == weight.dtype and torch.equal(found[name], weight), name


@pytest.mark.parametrize(("name", "ranks", "piped"), [*divided(SHAPES), ("CoCA", 1, 1), ("CoCA", 2, 1)])
@torch.no_grad()
def test_what_is_cut_by_hand_is_read(name: str, ranks: int, piped: int, tmp_path: Path) -> None:
    division = {"model_parallel_size": ranks, "pipe_parallel_size": piped}
    keys = SHAPE | SHAPES[name] | {"use_bias_in_norms": True}
    model = build_model(load_config([], keys)).eval()
    # Multiples of 3, so that a bias is divided among ranks in thirds without rounding.
    weights = {
        each: torch.randint(-96, 97, weight.shape, generator=torch.Generator().manual_seed(i)) * 3 / 512
        for i, (each, weight) in enumerate(model.state_dict().items())
    }
    model.load_state_dict(weights)
    folder = write_neox(tmp_path / "run", keys | division, weights)
    for place in (folder, tmp_path / "run"):
        assert_same(place, weights)
    opened = open_checkpoint(folder)
    assert opened.step == 20 and opened.tokenizer_folder is None
    assert opened.trained.model.padded_vocab_size == 512 and opened.trained.position.pos_emb == keys["pos_emb"]
    assert torch.equal(load_model(folder)(tokens(32)), model(tokens(32)))


@pytest.mark.parametrize(("name", "ranks", "piped"), divided(SHAPES | OURS_ONLY))
@torch.no_grad()
def test_written_and_read_back(name: str, ranks: int, piped: int, tmp_path: Path) -> None:
    source = random_checkpoint(tmp_path / "run", **(SHAPES | OURS_ONLY)[name])
    done = export_neox(source, tmp_path / "neox", model_parallel_size=ranks, pipe_parallel_size=piped)
    assert (done.folder / "latest").read_text() == done.step.name == "global_step7"
    assert_same(done.folder, dict(open_checkpoint(source).weights()))
    assert torch.equal(load_model(done.folder)(tokens(32)), load_model(source)(tokens(32)))


def test_random_angles_are_not_written(tmp_path: Path) -> None:
    """GPT-NeoX would train them."""
    keys = {"pos_emb": "coca_strict", "pos_emb_options": {"initial_angle": "random"}}
    with pytest.raises(CheckpointError, match="initial_angle to a number"):
        export_neox(random_checkpoint(tmp_path / "run", **keys), tmp_path / "neox")
    assert not (tmp_path / "neox").exists()


@pytest.mark.parametrize(
    ("name", "ranks", "piped"), [*((name, 2, 1) for name in SHAPES), ("alibi", 1, 0), ("buckets", 1, 0), ("CoCA", 2, 0)]
)
def test_files_are_those_cut_by_hand(name: str, ranks: int, piped: int, tmp_path: Path) -> None:
    """Names, shapes and values, file by file; a bias that is a sum may be divided in any way."""
    source = random_checkpoint(tmp_path / "run", **SHAPES[name])
    done = export_neox(source, tmp_path / "neox", model_parallel_size=ranks, pipe_parallel_size=piped)
    keys = SHAPE | SHAPES[name] | {"model_parallel_size": ranks, "pipe_parallel_size": piped}
    by_hand = write_neox(tmp_path / "hand", keys, dict(open_checkpoint(source).weights()), step=7)
    files = sorted(path.name for path in by_hand.glob("*.pt"))
    assert sorted(path.name for path in done.step.glob("*.pt")) == files
    for file in files:
        first, second = (torch.load(place / file, weights_only=False) for place in (done.step, by_hand))
        if file.startswith("mp_rank"):
            first, second = (content["module"] or {} for content in (first, second))
        if name == "CoCA":  # what stock GPT-NeoX must not read
            plain, renamed = "attention.query_key_value", "attention.megatron_coca_query_key_value"
            second = {each.replace(plain, renamed): tensor for each, tensor in second.items()}
        assert first.keys() == second.keys(), file
        for each, tensor in second.items():
            summed = keys.get("gpt_j_residual") and each.endswith(("dense.bias", "linear2.bias")) and ranks > 1
            assert first[each].dtype == tensor.dtype and first[each].shape == tensor.shape
            assert summed or torch.equal(first[each], tensor), each


@pytest.mark.parametrize(("keys", "dtype"), [(NEOX, "float16"), (LLAMA | {"num_kv_heads": 2}, "bfloat16")])
def test_other_dtypes(keys: dict[str, Any], dtype: str, tmp_path: Path) -> None:
    source = random_checkpoint(tmp_path / "run", **keys)
    done = export_neox(source, tmp_path / "neox", dtype=dtype, model_parallel_size=2)
    rounded = {name: weight.to(getattr(torch, dtype)) for name, weight in open_checkpoint(source).weights()}
    assert_same(done.folder, rounded)
    again = export_neox(done.folder, tmp_path / "again", model_parallel_size=4 if "num_kv_heads" not in keys else 1)
    assert_same(again.folder, rounded)


@pytest.mark.parametrize(
    ("keys", "ranks"), [(NEOX, 1), (LLAMA | {"num_kv_heads": 2}, 2), (LLAMA | {"no_weight_tying": False}, 2)]
)
def test_hugging_face_to_neox_and_back(keys: dict[str, Any], ranks: int, tmp_path: Path) -> None:
    first = export(random_checkpoint(tmp_path / "run", tokenizer=None, **keys), tmp_path / "first").folder
    neox = export_neox(first, tmp_path / "neox", model_parallel_size=ranks).folder
    second = export(neox, tmp_path / "second").folder
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    assert (first / "config.json").read_text() == (second / "config.json").read_text()
