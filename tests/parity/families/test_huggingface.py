"""Hugging Face folders: the logits of transformers, and clear errors for folders that cannot be read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_coca import load_model
from megatron_coca.checkpoints import CheckpointError, load_checkpoint
from tests.parity.foreign import (
    DYNAMIC,
    EXTENSIONS,
    LINEAR,
    LLAMA3,
    LONGROPE,
    TRAINED,
    YARN,
    assert_same_logits,
    llama,
    neox,
    theirs,
    tokens,
    write,
)

CASES = {
    "neox": neox(),
    "neox sequential, tied": neox(use_parallel_residual=False, tie_word_embeddings=True),
    "neox other base": neox(rope={"rope_theta": 500000.0}, rotary_pct=1.0),
    "neox without attention biases": neox(attention_bias=False),
    "neox tanh gelu": neox(hidden_act="gelu_new"),
    "llama": llama(),
    "llama grouped queries": llama(num_key_value_heads=2),
    "llama one key head": llama(num_key_value_heads=1, rms_norm_eps=1e-5),
    "llama attention biases": llama(attention_bias=True),
    "llama all biases, grouped queries": llama(attention_bias=True, mlp_bias=True, num_key_value_heads=2),
    "llama MLP biases, tied": llama(mlp_bias=True, tie_word_embeddings=True),
}
EXTENDED = {
    **{
        f"llama {name}": llama(rope=rope, num_key_value_heads=2 if number % 2 else 4)
        for number, (name, rope) in enumerate(EXTENSIONS.items())
    },
    "neox linear": neox(rope=LINEAR, rotary_pct=1.0),
    "neox longrope": neox(rope=LONGROPE, rotary_pct=1.0),
    "llama yarn, ramp in whole dimensions not": llama(rope=YARN | {"truncate": False, "beta_fast": 8.0}),
    "llama yarn, own temperature": llama(rope=YARN | {"attention_factor": 1.3}),
    "neox yarn, half rotated": neox(rope=YARN, rotary_pct=0.5),
    "neox dynamic, half rotated": neox(rope=DYNAMIC, rotary_pct=0.5),
}


@pytest.mark.parametrize("name", CASES)
def test_logits(name: str, tmp_path: Path) -> None:
    assert_same_logits(write(CASES[name], tmp_path), 19, TRAINED)


@pytest.mark.parametrize("name", EXTENDED)
def test_logits_within_and_beyond_the_training_length(name: str, tmp_path: Path) -> None:
    assert_same_logits(write(EXTENDED[name], tmp_path), 3 * TRAINED, 17, TRAINED, TRAINED + 1)


def test_extension_by_override_is_the_extension_of_transformers(tmp_path: Path) -> None:
    folder = write(llama(), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    model = load_model(folder, {"rope_scaling": DYNAMIC})
    config["rope_parameters"] |= DYNAMIC
    (folder / "config.json").write_text(json.dumps(config))
    expected = theirs(folder, tokens(4 * TRAINED))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens(4 * TRAINED)), expected, rtol=1e-4, atol=1e-4)


LENGTHS = {"original_max_position_embeddings": 8}
OLDER: dict[str, tuple[Any, dict[str, Any]]] = {
    "neox plain": (neox(rotary_pct=0.5), {"rotary_pct": 0.5, "rotary_emb_base": 10000}),
    "neox dynamic": (
        neox(rope=DYNAMIC, rotary_pct=0.5),
        {"rotary_pct": 0.5, "rotary_emb_base": 10000, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
    ),
    "neox other base": (neox(rope={"rope_theta": 500.0}), {"rotary_emb_base": 500}),
    "llama plain": (llama(), {"rope_theta": 10000.0, "rope_scaling": None}),
    "llama without a word": (llama(), {}),
    "llama linear": (llama(rope=LINEAR), {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "llama dynamic": (llama(rope=DYNAMIC), {"rope_scaling": {"type": "dynamic", "factor": 4.0}}),
    "llama llama3": (llama(rope=LLAMA3), {"rope_theta": 10000.0, "rope_scaling": LLAMA3}),
    "llama both names": (llama(rope=YARN), {"rope_scaling": YARN | {"type": "yarn"}}),
    "llama longrope, lengths outside": (
        llama(rope=LONGROPE),
        LENGTHS | {"rope_scaling": {name: value for name, value in LONGROPE.items() if name not in LENGTHS}},
    ),
}
"""A folder, and its keys on rotation as transformers 4 wrote them, at the top level."""


@pytest.mark.parametrize("name", OLDER)
def test_the_spelling_of_older_folders(name: str, tmp_path: Path) -> None:
    model, spelled = OLDER[name]
    folder = write(model, tmp_path)
    before = load_checkpoint(folder).config
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(config | spelled))
    assert load_checkpoint(folder).config == before
    assert_same_logits(folder, TRAINED, 3 * TRAINED)


def test_an_original_length_that_transformers_does_not_look_at(tmp_path: Path) -> None:
    """linear and dynamic are measured by max_position_embeddings, whatever stands in their section."""
    folder = write(llama(rope=DYNAMIC), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] |= LENGTHS
    (folder / "config.json").write_text(json.dumps(config))
    assert_same_logits(folder, TRAINED, 3 * TRAINED)


def test_weights_in_several_files(tmp_path: Path) -> None:
    folder = write(llama(), tmp_path)
    expected = load_model(folder).state_dict()
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    parts = {f"model-0000{part}-of-00002.safetensors": sorted(weights)[part - 1 :: 2] for part in (1, 2)}
    for file, names in parts.items():
        save_file({name: weights[name] for name in names}, folder / file)
    index = {"weight_map": {name: file for file, names in parts.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    found = load_model(folder).state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    next(folder.glob("model-00002*")).unlink()
    with pytest.raises(CheckpointError, match=r"do not exist .model-00002-of-00002.safetensors \(10 weights\)"):
        load_model(folder)


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        load_model(tmp_path)
    with pytest.raises(CheckpointError, match="no such checkpoint folder"):
        load_model(tmp_path / "nowhere")


def test_overrides_that_the_weights_do_not_fit(tmp_path: Path) -> None:
    folder = write(neox(), tmp_path)
    with pytest.raises(CheckpointError, match="cannot be evaluated with another num_layers"):
        load_model(folder, {"num_layers": 1})
    assert load_checkpoint(folder, {"pos_emb": "coca"}).config.position.pos_emb == "coca", (
        "the authors' folders look like plain ones"
    )
