"""Hugging Face folders: the logits of transformers, and clear errors for folders that cannot be read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, PreTrainedConfig

from megatron_coca import load_model
from megatron_coca.checkpoints import CheckpointError, load_checkpoint

TRAINED = 32
"""max_position_embeddings of the models here."""

COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": TRAINED,
}


def neox(**changes: Any) -> GPTNeoXConfig:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": changes.pop("rotary_pct", 0.25)}
    return GPTNeoXConfig(**COMMON, intermediate_size=80, rope_parameters=rope | changes.pop("rope", {}), **changes)


def llama(**changes: Any) -> LlamaConfig:
    rope = {"rope_type": "default", "rope_theta": 10000.0} | changes.pop("rope", {})
    return LlamaConfig(**COMMON, intermediate_size=52, rope_parameters=rope, **changes)


def write(config: PreTrainedConfig, folder: Path) -> Path:
    """A model with random weights, biases and norms included, as transformers saves it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def theirs(folder: Path, ids: Tensor) -> Tensor:
    """The logits of a fresh model: transformers' dynamic extension remembers the longest input it has seen."""
    return (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        .eval()(ids)
        .logits
    )


def tokens(length: int) -> Tensor:
    return torch.randint(96, (2, length), generator=torch.Generator().manual_seed(length))


def assert_same_logits(folder: Path, *lengths: int) -> None:
    model = load_model(folder)
    for length in lengths:
        expected = theirs(folder, tokens(length))
        with torch.no_grad():
            found = model(tokens(length))
        assert expected.std() > 0.1 and found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 8,
}
CASES = {
    "neox": neox(),
    "neox sequential": neox(use_parallel_residual=False),
    "neox all dimensions rotated": neox(rotary_pct=1.0),
    "neox tied": neox(tie_word_embeddings=True),
    "neox other base": neox(rope={"rope_theta": 500000.0}, rotary_pct=1.0),
    "neox without attention biases": neox(attention_bias=False),
    "neox tanh gelu": neox(hidden_act="gelu_new"),
    "llama": llama(),
    "llama tied": llama(tie_word_embeddings=True),
    "llama grouped queries": llama(num_key_value_heads=2),
    "llama one key head": llama(num_key_value_heads=1, rms_norm_eps=1e-5),
}
EXTENDED = {
    "llama linear": llama(rope={"rope_type": "linear", "factor": 4.0}),
    "llama dynamic": llama(rope=DYNAMIC),
    "llama dynamic, grouped queries": llama(rope=DYNAMIC, num_key_value_heads=2),
    "llama yarn": llama(rope=YARN),
    "llama yarn, ramp in whole dimensions not": llama(rope=YARN | {"truncate": False, "beta_fast": 8.0}),
    "llama yarn, own temperature": llama(rope=YARN | {"attention_factor": 1.3}),
    "llama llama3": llama(rope=LLAMA3),
    "llama longrope": llama(rope=LONGROPE),
    "neox yarn, half rotated": neox(rope=YARN, rotary_pct=0.5),
    "neox dynamic": neox(rope=DYNAMIC, rotary_pct=1.0),
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


@pytest.mark.parametrize("kind", ["neox", "llama"])
def test_the_spelling_of_older_folders(kind: str, tmp_path: Path) -> None:
    """transformers 4 wrote rope_scaling, rope_theta, rotary_emb_base and rotary_pct at the top level."""
    folder = write({"neox": neox(rope=DYNAMIC, rotary_pct=0.5), "llama": llama(rope=DYNAMIC)}[kind], tmp_path)
    found = load_checkpoint(folder).config
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    config["rope_scaling"] = {"type": "dynamic", "factor": 4.0}
    config |= {"neox": {"rotary_pct": 0.5, "rotary_emb_base": 10000}, "llama": {"rope_theta": 10000.0}}[kind]
    (folder / "config.json").write_text(json.dumps(config))
    assert load_checkpoint(folder).config == found
    assert found.position.rope_scaling is not None and found.position.rope_scaling.factor == 4.0


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
    with pytest.raises(CheckpointError, match="model-00002-of-00002.safetensors: cannot be read"):
        load_model(folder)


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({name: value for name, value in (config | changes).items() if value is not None})
    )


def drop_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors")


def pickle_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def truncate_weights(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


FAULTS = {
    "model type": (
        lambda f: change_config(f, model_type="mamba"),
        "config.json: model_type 'mamba' is not supported; known: gpt_neox, llama",
    ),
    "no size": (lambda f: change_config(f, hidden_size=None), "config.json: has no 'hidden_size'"),
    "bias": (lambda f: change_config(f, attention_bias=True), "attention_bias or mlp_bias is not supported"),
    "activation": (lambda f: change_config(f, hidden_act="relu2"), "hidden_act 'relu2' is not supported"),
    "head size": (lambda f: change_config(f, head_dim=16), "head_dim other than"),
    "not JSON": (lambda f: (f / "config.json").write_text("{"), "config.json: cannot be read as JSON"),
    "missing weight": (drop_weight, "has no weight model.layers.1.mlp.up_proj.weight"),
    "pickled": (pickle_weights, r"no model.safetensors .*\(pickled .bin weights are not read\)"),
    "truncated": (truncate_weights, "model.safetensors: is not a readable safetensors file"),
    "other shape": (
        lambda f: change_config(f, vocab_size=128),
        r"do not fit the model: embedding.word_embeddings.weight is \[96, 32\]",
    ),
    "empty index": (
        lambda f: (f / "model.safetensors.index.json").write_text("{}"),
        "model.safetensors.index.json: has no weight_map",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_named(name: str, tmp_path: Path) -> None:
    damage, message = FAULTS[name]
    folder = write(llama(), tmp_path)
    damage(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_model(folder)
    assert str(tmp_path) in str(caught.value)


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
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
