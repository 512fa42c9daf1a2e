"""The model at step 0: with random weights, or with those of a checkpoint, perhaps of another position method."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_coca.checkpoints import CheckpointError, open_checkpoint
from megatron_coca.checkpoints.exporting import export, export_neox
from megatron_coca.checkpoints.importing import import_checkpoint
from megatron_coca.config import Config, load_config
from megatron_coca.data import load_tokenizer
from megatron_coca.model import build_model
from megatron_coca.training.checkpointing.initial_model import initial_model
from megatron_coca.training.checkpointing.resume import candidates, first_valid
from tests.checkpoint_files import run_alone, write_checkpoint
from tests.tokenizer_files import train_bpe

SHAPE: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 32}
SHAPE |= {"vocab_size": 96, "make_vocab_size_divisible_by": 1, "no_weight_tying": True, "pos_emb": "rotary"}
CLEX = {"rope_type": "clex"}
GATES = "blocks.1.attention.position_gates.projection"
KERPLE = "blocks.{}.attention.position_bias.bias_{}"


def configured(**keys: Any) -> Config:
    return load_config([], SHAPE | keys)


def source(folder: Path, **keys: Any) -> tuple[Path, dict[str, torch.Tensor]]:
    config = configured(seed=5, **keys)
    return write_checkpoint(folder, config), build_model(config).state_dict()


def begun(load: Path, **keys: Any) -> dict[str, torch.Tensor]:
    return initial_model(configured(load=str(load), finetune=True, **keys), "cpu").model.state_dict()


def test_without_finetune_weights_are_drawn(tmp_path: Path) -> None:
    folder, weights = source(tmp_path / "run")
    found = initial_model(configured(load=str(folder)), "cpu").model.state_dict()
    drawn = build_model(configured()).state_dict()
    assert all(torch.equal(found[name], drawn[name]) for name in drawn)
    assert not torch.equal(found["final_linear.weight"], weights["final_linear.weight"])


@pytest.mark.parametrize("keys", [{}, {"iteration": 7}, {"pos_emb": "coca"}, {"pos_emb": "coca", "seq_length": 64}])
def test_the_weights_are_taken(tmp_path: Path, keys: dict[str, Any]) -> None:
    folder, weights = source(tmp_path / "run")
    found = begun(folder, **keys)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        ({"qk_norm": "head", "pos_emb": "none"}, ["query_layernorm.weight", "key_layernorm.weight"]),
        ({"qk_norm": "projection"}, ["query_layernorm.norm.weight", "key_layernorm.norm.weight"]),
        ({"qk_norm": "head", "qk_norm_after_rotation": True}, ["query_layernorm.weight", "key_layernorm.weight"]),
        ({"qk_norm": "layernorm_by_head"}, ["query_layernorm.weight", "key_layernorm.weight"]),
        (
            {"qk_norm": "layernorm"},
            [f"{name}_layernorm.{kind}" for name in ("query", "key") for kind in ("weight", "bias")],
        ),
        ({"use_qk_layernorm": True}, ["qk_layernorm.weight", "qk_layernorm.bias"]),
    ],
)
def test_norms_of_queries_and_keys_are_added(tmp_path: Path, keys: dict[str, Any], names: list[str]) -> None:
    folder, weights = source(tmp_path / "run")
    found = begun(folder, **keys)
    added = {f"blocks.{number}.attention.{name}" for number in range(2) for name in names}
    assert found.keys() - weights.keys() == added
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert all(bool((found[name] == float("bias" not in name)).all()) for name in added)
    with_norms, _ = source(tmp_path / "norms", **keys)
    with pytest.raises(CheckpointError, match="can only be added, but .* becomes none"):
        begun(with_norms)


@pytest.mark.parametrize(
    ("keys", "drawn"),
    [
        ({"pos_emb": "kerple_log"}, [KERPLE.format(0, "p"), KERPLE.format(1, "a")]),
        ({"rope_scaling": {"rope_type": "clex"}}, ["positions.clex.up", "positions.clex.down"]),
        ({"pos_emb": "rpe"}, ["positions.bias.weight"]),
        ({"forgetting_gate": "fox"}, [f"{GATES}.weight"]),
        ({"pos_emb": "fire"}, ["blocks.0.attention.position_bias.output_weight"]),
        ({"pos_emb": "learned"}, ["embedding.position_embeddings.weight"]),
    ],
)
def test_weights_that_a_method_learns_are_drawn(
    tmp_path: Path, keys: dict[str, Any], drawn: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder, weights = source(tmp_path / "run")
    with caplog.at_level(logging.INFO):
        found = begun(folder, **keys)
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    again, other = begun(folder, **keys), begun(folder, seed=6, **keys)
    for name in drawn:
        assert torch.equal(found[name], again[name]), "the seed decides"
        assert found[name].isfinite().all() and name in caplog.text
        assert name.endswith("down") or not torch.equal(found[name], other[name])


@pytest.mark.parametrize("method", ["kerple_power", "rpe", "learned"])
def test_weights_of_the_former_method_are_left_out(
    tmp_path: Path, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder, weights = source(tmp_path / "run", pos_emb=method)
    with caplog.at_level(logging.INFO):
        found = begun(folder, pos_emb="coca")
    assert weights.keys() - found.keys() and all(torch.equal(found[name], weights[name]) for name in found)
    assert f"pos_emb (saved {method!r}, now 'coca')" in caplog.text
    assert all(name in caplog.text for name in weights.keys() - found.keys())


@pytest.mark.parametrize(
    ("before", "after", "drawn"),
    [
        ({"pos_emb": "kerple_log"}, {"pos_emb": "kerple_power"}, KERPLE.format(0, "p")),
        ({"forgetting_gate": "fox"}, {"forgetting_gate": "cable"}, f"{GATES}.weight"),
        ({"rope_scaling": CLEX}, {"rope_scaling": CLEX, "seq_length": 64}, "positions.clex.up"),
        ({"rope_scaling": CLEX}, {"rope_scaling": CLEX, "rotary_emb_base": 500.0}, "positions.clex.up"),
    ],
)
def test_weights_of_one_name_and_another_meaning_are_drawn(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any], drawn: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder, weights = source(tmp_path / "run", **before)
    with caplog.at_level(logging.INFO):
        found = begun(folder, **after)
    assert not torch.equal(found[drawn], weights[drawn])
    assert caplog.text.count(drawn) == 2, "the message names it as left out, and as drawn"
    assert torch.equal(begun(folder, **before)[drawn], weights[drawn]), "weights with the same meaning are taken"


def test_options_are_compared_with_their_defaults(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, _ = source(tmp_path / "run", pos_emb="pope")
    with caplog.at_level(logging.INFO):
        begun(folder, pos_emb="pope", pos_emb_options={"offset": "zero"})
        assert "position_offsets" not in caplog.text, "the angles mean the same"
        begun(folder, pos_emb="polar", pos_emb_options={"power": 2})
    assert "now {'power': 2, " in caplog.text and "initializes blocks.0.attention.position_offsets.bias" in caplog.text


def test_the_origin_is_told(tmp_path: Path) -> None:
    folder, _ = source(tmp_path / "run")
    begun_with = initial_model(configured(load=str(folder), finetune=True), "cpu")
    assert begun_with.origin == open_checkpoint(folder).identity
    assert initial_model(configured(), "cpu").origin is None


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"num_layers": 3}, "num_layers (saved 2, now 3)"),
        ({"num_attention_heads": 4, "num_kv_heads": 4}, "num_attention_heads (saved 2, now 4)"),
        ({"gpt_j_residual": True}, "gpt_j_residual (saved False, now True)"),
        ({"activation": "relu"}, "activation (saved 'gelu', now 'relu')"),
        ({"layernorm_epsilon": 1e-6}, "layernorm_epsilon (saved 1e-05, now 1e-06)"),
    ],
)
def test_another_architecture_is_an_error(tmp_path: Path, keys: dict[str, Any], named: str) -> None:
    folder, _ = source(tmp_path / "run")
    with pytest.raises(CheckpointError) as caught:
        begun(folder, **keys)
    assert named in str(caught.value) and str(folder) in str(caught.value)


def test_fewer_features_may_rotate_but_not_more(tmp_path: Path) -> None:
    """More than in the saved model is what a configuration without the key would do."""
    folder, weights = source(tmp_path / "run")
    for keys in ({"rotary_pct": 0.5}, {"rotary_pct": 0.5, "pos_emb": "coca"}):
        started = begun(folder, **keys)
        assert all(torch.equal(started[name], weights[name]) for name in weights)
    half, _ = source(tmp_path / "half", rotary_pct=0.5)
    with pytest.raises(CheckpointError, match=r"rotary_pct \(saved 0\.5, now 1\.0\)"):
        begun(half, pos_emb="coca")


def test_another_shape_is_an_error(tmp_path: Path) -> None:
    folder, _ = source(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"intermediate_size \(saved 128, now .* 64 "):
        begun(folder, intermediate_size=64)


FOREIGN: dict[str, Callable[[Path, Path], object]] = {
    "Hugging Face": export,
    "GPT-NeoX": export_neox,
    "imported": import_checkpoint,
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_run_starts_from_an_export_but_does_not_resume_from_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_alone(monkeypatch)
    own, weights = source(tmp_path / "run")
    FOREIGN[kind](own, tmp_path / "foreign")
    found = begun(tmp_path / "foreign", pos_emb="coca")
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    if kind != "GPT-NeoX":  # its optimizer state can be read: tests/integration/formats/test_neox_resume.py
        with pytest.raises(CheckpointError, match="set finetune=true to start"):
            first_valid(candidates(configured(load=str(tmp_path / "foreign")).checkpoint))


@pytest.mark.parametrize(("kind", "step"), [("GPT-NeoX", 7), ("imported", 0)])
def test_one_step_of_a_foreign_folder(kind: str, step: int, tmp_path: Path) -> None:
    own, weights = source(tmp_path / "run")
    FOREIGN[kind](own, tmp_path / "foreign")
    found = begun(tmp_path / "foreign", iteration=step)
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    with pytest.raises(CheckpointError, match="no checkpoint of step 3"):
        begun(tmp_path / "foreign", iteration=3)


def test_keys_of_rotation_may_differ_for_a_method_without_it(tmp_path: Path) -> None:
    folder, _ = source(tmp_path / "run", rotary_pct=0.5)
    assert begun(folder, pos_emb="alibi")


def test_the_place_of_norms_changes_only_with_the_method(tmp_path: Path) -> None:
    folder, _ = source(tmp_path / "run", pos_emb="rotary", qk_norm="head", qk_norm_after_rotation=True)
    assert begun(folder, pos_emb="coca", qk_norm="head")
    with pytest.raises(CheckpointError, match="qk_norm_after_rotation .saved True, now False"):
        begun(folder, pos_emb="rotary", qk_norm="head")


def test_an_error_about_another_tokenizer_names_both(tmp_path: Path) -> None:
    """Even if the embeddings have one size: training would then continue with tokens of another meaning."""
    texts = [f"a boat {i} lay near the shore until morning came over the hills" for i in range(200)]
    trained = train_bpe(texts, 296, tmp_path / "trained.json")
    other = train_bpe([text[::-1] for text in texts], 296, tmp_path / "other.json")
    sizes = {"vocab_size": 296, "make_vocab_size_divisible_by": 8}
    folder = write_checkpoint(tmp_path / "run", configured(**sizes), tokenizer=trained)
    for keys in (sizes, sizes | {"vocab_size": 300}):
        config = configured(load=str(folder), finetune=True, **keys)
        with pytest.raises(CheckpointError) as error:
            initial_model(config, "cpu", other)
        told = str(error.value)
        assert (
            f"the checkpoint has HFTokenizer {trained.fingerprint[:12]} with vocab_size 296 (296 embedding rows" in told
        )
        assert f"and the run has HFTokenizer {other.fingerprint[:12]} with vocab_size 296" in told
        assert "prepare the data with the checkpoint's tokenizer" in told and "first import them with it" in told
    config = configured(load=str(folder), finetune=True, **sizes)
    for same in (trained, None):
        assert initial_model(config, "cpu", same).origin is not None
    (tmp_path / "other").mkdir()
    other.save(tmp_path / "other")
    said = ["tokenizer_type=HFTokenizer", f"vocab_file={tmp_path / 'other' / 'tokenizer.json'}"]
    imported = import_checkpoint(folder, tmp_path / "imported", said).folder
    assert initial_model(configured(load=str(imported), finetune=True, **sizes), "cpu", other).origin is not None


def test_weights_of_an_unknown_tokenizer_are_taken_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_checkpoint(tmp_path / "run", configured(), tokenizer=None)
    config = configured(load=str(folder), finetune=True)
    initial_model(config, "cpu")
    assert "cannot verify" not in caplog.text, "the data have none either"
    initial_model(config, "cpu", load_tokenizer("CharLevelTokenizer"))
    step = folder / "global_step7"
    assert f"cannot verify that the weights of {step} " in caplog.text
    assert f"(no tokenizer is used: {step} has none)" in caplog.text


def test_embeddings_of_different_sizes_name_the_tokenizers(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "run", configured(vocab_size=600))
    keys = {"vocab_size": 512, "make_vocab_size_divisible_by": 128}
    config = configured(load=str(folder), finetune=True, **keys)
    with pytest.raises(
        CheckpointError, match=r"CharLevelTokenizer .* \(600 .* the run has CharLevelTokenizer .* \(512 "
    ):
        initial_model(config, "cpu", load_tokenizer("CharLevelTokenizer"))
    with pytest.raises(CheckpointError, match="unknown tokenizer .512 .*; set make_vocab_size_divisible_by=600"):
        initial_model(config, "cpu")
    fitting = config.override({"make_vocab_size_divisible_by": 600})
    assert initial_model(fitting, "cpu").origin is not None
