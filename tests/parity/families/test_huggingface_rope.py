"""The rotation in config.json, in every spelling, against the configuration classes of transformers."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from transformers import GPTNeoXConfig, LlamaConfig

from megatron_coca.checkpoints.files import CheckpointError
from megatron_coca.checkpoints.huggingface.config_json import READERS

CLASSES = {"gpt_neox": GPTNeoXConfig, "llama": LlamaConfig}
BESIDE: tuple[dict[str, Any], ...] = (
    {},
    {"rope_theta": 500.0},
    {"rotary_emb_base": 700},
    {"rope_theta": 500.0, "rotary_emb_base": 700},
)
"""Bases at the top level."""

SECTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"rope_scaling": None, "rope_parameters": None},
    {"rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 900.0}},
    {"rope_scaling": {"type": "yarn", "factor": 4.0, "finetuned": True}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
    {"rope_parameters": {"rope_type": "linear", "factor": 3.0}},
    {"rope_parameters": {"rope_type": "linear", "factor": 3.0}, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
)
SHARES: tuple[dict[str, Any], ...] = (
    {},
    {"rotary_pct": 0.75},
    {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
)
"""How much of a head is turned, where GPT-NeoX has it and elsewhere."""


def theirs(kind: str, config: dict[str, Any]) -> dict[str, Any]:
    found = CLASSES[kind](**deepcopy(config)).rope_parameters
    return {
        "base": found["rope_theta"],
        "share": found.get("partial_rotary_factor", 1.0),
        "type": found["rope_type"],
        "factor": found.get("factor"),
    }


def ours(kind: str, config: dict[str, Any]) -> dict[str, Any]:
    found = READERS[kind].position(config, Path("config.json"), ())
    scaling = found.get("rope_scaling", {})
    return {
        "base": found["rotary_emb_base"],
        "share": found.get("rotary_pct", 1.0),
        "type": scaling.get("rope_type", "default"),
        "factor": scaling.get("factor"),
    }


def contradicts_itself(kind: str, config: dict[str, Any]) -> bool:
    """Whether the keys of transformers 4 and those of 5 describe two rotations."""
    sections = [config.get(name) or {} for name in ("rope_scaling", "rope_parameters")]
    bases = {config.get({"gpt_neox": "rotary_emb_base", "llama": "rope_theta"}[kind])}
    bases |= {section.get("rope_theta") for section in sections}
    types = [(section.get("rope_type") or section.get("type"), section.get("factor")) for section in sections]
    return len(bases - {None}) > 1 or (all(sections) and types[0] != types[1])


@pytest.mark.parametrize("section", SECTIONS, ids=str)
@pytest.mark.parametrize("beside", BESIDE, ids=str)
@pytest.mark.parametrize("kind", CLASSES)
def test_base_and_extension(kind: str, beside: dict[str, Any], section: dict[str, Any]) -> None:
    if contradicts_itself(kind, beside | section):
        with pytest.raises(CheckpointError, match="contradicts .* transformers 4 and 5 read different keys"):
            ours(kind, beside | section)
        return
    assert ours(kind, beside | section) == theirs(kind, beside | section)


LINEAR = {"rope_type": "linear", "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
BOTH: tuple[tuple[str, dict[str, Any], str | None], ...] = (
    ("llama", {"rope_scaling": LINEAR, "rope_parameters": LINEAR | {"rope_theta": 500.0}, "rope_theta": 500.0}, None),
    ("llama", {"rope_scaling": YARN, "rope_parameters": YARN | {"beta_fast": 32.0}}, None),
    ("llama", {"rope_scaling": YARN, "rope_parameters": YARN | {"beta_fast": 8.0}}, "rope_scaling .* contradicts"),
    (
        "llama",
        {"rope_scaling": LINEAR, "rope_parameters": LINEAR | {"rope_theta": 500.0}},
        "rope_theta .by default. 10000.0 contr",
    ),
    ("gpt_neox", {"rotary_pct": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}}, "rotary_pct 0.5 contradicts"),
    (
        "gpt_neox",
        {"rope_scaling": LINEAR, "rope_parameters": LINEAR | {"partial_rotary_factor": 1.0}},
        "rotary_pct .by default. 0.25",
    ),
)
"""Both spellings in one file, and what of them is an error."""


@pytest.mark.parametrize(("kind", "config", "problem"), BOTH, ids=str)
def test_both_spellings(kind: str, config: dict[str, Any], problem: str | None) -> None:
    config = {"max_position_embeddings": 64} | config
    if problem is None:
        assert ours(kind, config) == theirs(kind, config)
        return
    with pytest.raises(CheckpointError, match=problem):
        ours(kind, config)


@pytest.mark.parametrize("share", SHARES, ids=str)
def test_the_share_that_is_turned(share: dict[str, Any]) -> None:
    assert ours("gpt_neox", share) == theirs("gpt_neox", share)


@pytest.mark.parametrize("beside", [{}, {"original_max_position_embeddings": 32}], ids=str)
@pytest.mark.parametrize("kind", CLASSES)
def test_the_original_length_of_the_top_level_goes_first(kind: str, beside: dict[str, Any]) -> None:
    section = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    config = {"max_position_embeddings": 128, "rope_scaling": section} | beside
    found = READERS[kind].position(config, Path("config.json"), ())["rope_scaling"]
    transformers_config = CLASSES[kind](**deepcopy(config))
    transformers_config.standardize_rope_params()  # the computation of frequencies begins with this
    expected = transformers_config.rope_parameters
    assert found["original_max_position_embeddings"] == expected["original_max_position_embeddings"]
    assert found["original_max_position_embeddings"] == beside.get("original_max_position_embeddings", 16)
