"""The model card of an export, and the positions in its config.json."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_coca.checkpoints import open_checkpoint
from megatron_coca.checkpoints.exporting import export
from megatron_coca.checkpoints.huggingface.config_json import position_keys
from megatron_coca.checkpoints.huggingface.write import describe_position
from megatron_coca.config import load_config
from tests.parity.exported import GROUPED, LLAMA, NEOX, SHAPE, random_checkpoint

TRAINING = {"train_batch_size": 24, "optimizer.params.lr": 3e-4, "train_data_paths": ["/secret/place/words"]}
TRAINING |= {"valid_data_paths": ["/secret/place/words"], "test_data_paths": ["/secret/place/words"]}


def card(tmp_path: Path, **keys: Any) -> tuple[dict[str, Any], str]:
    folder = export(random_checkpoint(tmp_path / "run", **keys), tmp_path / "my-model").folder
    _, front, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), text


def test_the_text_of_the_card(tmp_path: Path) -> None:
    front, text = card(tmp_path, **GROUPED, pos_emb="coca", **TRAINING)
    assert front["library_name"] == "transformers" and front["pipeline_tag"] == "text-generation"
    assert {"coca_dense", "coca", "custom_code"} <= set(front["tags"])
    weights = sum(entry.nbytes // 4 for entry in open_checkpoint(tmp_path / "run").weights().entries.values())
    for line in (
        "| training length | 32 tokens |",
        f"| parameters | {weights:,} |",
        "| shape | 2 layers, width 32, 4 heads, 2 key-value heads |",
        "| trained for | 7 steps of 24 sequences |",
        "| optimizer | Adam, peak learning rate 0.0003 |",
        'AutoModelForCausalLM.from_pretrained("my-model", trust_remote_code=True)',
        'AutoTokenizer.from_pretrained("my-model", trust_remote_code=True)',
        "pads on the left",
        'config.position["rope_scaling"] = {"rope_type": "dynamic", "factor": 4.0}',
        "arXiv:2309.08646",
        "author = {Zhu, Shiyi",
    ):
        assert line in text, line
    assert "secret" not in text and str(tmp_path) not in text


def test_the_card_of_a_stock_model(tmp_path: Path) -> None:
    front, text = card(tmp_path, **NEOX, rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert "custom_code" not in front["tags"] and "trust_remote_code" not in text and "2309.08646" not in text
    assert "| extension | linear |" in text and "config.rope_parameters" in text


def test_the_lengths_give_the_factor_of_longrope(tmp_path: Path) -> None:
    """transformers 4 derives it from them, and the training length has a key of its own."""
    lists = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    scaling = {"rope_type": "longrope", "factor": 8.0, "original_max_position_embeddings": 16} | lists
    folder = export(random_checkpoint(tmp_path / "run", **LLAMA, rope_scaling=scaling), tmp_path / "model").folder
    written = json.loads((folder / "config.json").read_text())
    assert written["max_position_embeddings"] == 8 * written["original_max_position_embeddings"] == 128
    assert written["training_length"] == open_checkpoint(folder).trained.model.seq_length == 32
    assert written["rope_scaling"]["factor"] == written["rope_parameters"]["factor"] == 8.0


def test_no_advice_on_rotations_where_nothing_turns(tmp_path: Path) -> None:
    _, text = card(tmp_path, **LLAMA, pos_emb="alibi")
    assert "Longer texts" not in text and "ALiBi" in text


LONGROPE = {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    ("scaling", "method", "independent"),
    [
        (None, "rotary", True),
        ({"rope_type": "yarn", "factor": 4.0}, "rotary", True),
        ({"rope_type": "dynamic", "factor": 4.0}, "rotary", False),
        (LONGROPE, "rotary", False),
        ({"rope_type": "dynamic", "factor": 4.0}, "coca", True),
    ],
)
def test_texts_in_a_batch(scaling: Any, method: str, independent: bool, tmp_path: Path) -> None:
    """Stock transformers extends a batch by its longest text; the modelling file extends each by its own length."""
    _, text = card(tmp_path, **LLAMA, pos_emb=method, rope_scaling=scaling)
    assert ("do not depend on the other texts" in text) == independent
    assert ("Use one text at a time" in text) == (not independent) and "{" not in text.split("```")[2]
    assert independent or (f"with `{scaling['rope_type']}`" in text and "more than 32 tokens" in text)


@pytest.mark.parametrize(("kind", "told"), [("yarn", False), ("dynamic", True)])
def test_from_where_an_extension_is_measured(kind: str, told: bool, tmp_path: Path) -> None:
    """Another one from the training length, the same one as before; a stock model has its length in config.json."""
    scaling = {"rope_type": kind, "factor": 2.0, "original_max_position_embeddings": 16}
    _, text = card(tmp_path, **LLAMA, pos_emb="coca", rope_scaling=scaling)
    assert ('"factor": 4.0, "original_max_position_embeddings": 16}\nmodel = ' in text) == told
    assert told or '"factor": 4.0}\nmodel = ' in text


ADVICE: dict[str, tuple[dict[str, Any], str, bool]] = {
    "nothing set": ({}, "For longer texts, set an extension", True),
    "an extension": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "sets the extension `yarn`", True),
    "clex": ({"rope_scaling": {"rope_type": "clex", "max_factor": 4}}, "for up to 4 times the training length", False),
    "a map": ({"relative_positions": {"type": "rerope"}}, "the relative-position map `rerope`", False),
    "a map that trains": (
        {"relative_positions": {"type": "inv_leaky_rerope", "target_length": 64}},
        "with the map `inv_leaky_rerope`",
        False,
    ),
    "both": (
        {"relative_positions": {"type": "rerope"}, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        "the relative-position map `rerope`",
        False,
    ),
}


@pytest.mark.parametrize("name", ADVICE)
def test_advice_for_longer_texts(name: str, tmp_path: Path) -> None:
    keys, told, dynamic = ADVICE[name]
    _, text = card(tmp_path, **GROUPED, pos_emb="coca", **keys)
    assert told in text and ('"rope_type": "dynamic"' in text) == dynamic and "{" not in text.split("```")[0]
    assert text.count("## Longer texts") == 1
    assert ("`use_cache=False` than with plain cached decoding" in text) == ("a map" not in name and name != "both")


def test_a_card_of_an_imported_model(tmp_path: Path) -> None:
    once = export(random_checkpoint(tmp_path / "run", **LLAMA), tmp_path / "once").folder
    text = (export(once, tmp_path / "again").folder / "README.md").read_text()
    assert "trained for" not in text and "optimizer" not in text and "| training length | 32 tokens |" in text


@pytest.mark.parametrize(
    "keys",
    [
        {"pos_emb": "coca", "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
        {"pos_emb": "xpos", "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "ramp": "rotations"}},
        {"pos_emb": "rpe", "rpe_num_buckets": 16, "rpe_max_distance": 64},
        {"pos_emb": "learned", "max_position_embeddings": 99},
        {"pos_emb": "coca", "relative_positions": {"type": "self_extend"}, "logit_scaling": "log_n", "rotary_pct": 0.5},
    ],
)
def test_positions_there_and_back(keys: dict[str, Any], tmp_path: Path) -> None:
    run = random_checkpoint(tmp_path / "run", **LLAMA | keys)
    opened = open_checkpoint(run)
    told = json.loads(json.dumps({"position": describe_position(opened.trained, opened.weights())}))
    back = load_config([], SHAPE | LLAMA | position_keys(told))
    again = describe_position(back, opened.weights())
    assert again == told["position"]
    assert set(keys) <= set(position_keys(told)), "the keys that were set are written"
    section = told["position"]["rope_scaling"] or {}
    assert set(section) == set(keys.get("rope_scaling", {})) | (set(section) & {"beta_fast", "beta_slow", "truncate"})
    if "relative_positions" in keys:
        assert told["position"]["relative_positions"] == {"type": "self_extend", "window": 8, "group_size": 8}


def test_a_folder_without_positions() -> None:
    with pytest.raises(KeyError, match="position"):
        position_keys({"model_type": "coca_dense", "position": 3})
