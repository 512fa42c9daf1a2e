"""What may change when a checkpoint is evaluated: extensions and maps, unless they belong to the weights."""

from pathlib import Path
from typing import Any

import pytest

from megatron_coca import methods
from megatron_coca.checkpoints import CheckpointError
from megatron_coca.checkpoints.compare import TRAINED_CHOICES, check_same_model
from megatron_coca.config import KEYS, Config, load_config

CLEX = {"rope_scaling": {"rope_type": "clex"}}
INV_LEAKY = {"relative_positions": {"type": "inv_leaky_rerope", "target_length": 256}}
LOG_N = {"logit_scaling": "log_n_trained"}
FOX, CABLE = {"forgetting_gate": "fox"}, {"forgetting_gate": "cable"}
ROPE_ID = {"rotary_frequencies": {"type": "rope_id"}}
SSMAX = {"logit_scaling": {"type": "ssmax", "initial": 0.3}}


def make(**keys: Any) -> Config:
    shape = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64, "pos_emb": "coca"}
    return load_config([], shape | keys)


@pytest.mark.parametrize(
    "wanted",
    [
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"relative_positions": {"type": "rerope", "window": 16}},
        {"logit_scaling": "log_n"},
        {"attention_backend": "reference"},
        {"rotary_emb_base": 500000.0, "relative_positions": {"type": "lm_infinite"}, "logit_scaling": "log_n"},
    ],
)
def test_evaluation_may_extend(wanted: dict[str, Any]) -> None:
    check_same_model(Path("run"), make(), make(**wanted))
    check_same_model(Path("run"), make(**wanted), make())


@pytest.mark.parametrize("trained", [CLEX, INV_LEAKY, LOG_N, SSMAX, FOX, CABLE, ROPE_ID])
def test_learned_choices_stay(trained: dict[str, Any]) -> None:
    (key,) = trained
    check_same_model(Path("run"), make(**trained), make(**trained))
    with pytest.raises(CheckpointError, match=f"run: .*{key} .trained with .*which the weights depend on"):
        check_same_model(Path("run"), make(**trained), make())
    with pytest.raises(CheckpointError, match=f"run: .*{key} .*must be used in training"):
        check_same_model(Path("run"), make(), make(**trained))


def test_extensions_of_other_frequencies() -> None:
    check_same_model(Path("run"), make(**ROPE_ID), make(**ROPE_ID, rope_scaling={"rope_type": "ntk", "factor": 4.0}))


def test_another_form_is_another_model() -> None:
    with pytest.raises(CheckpointError, match="pos_emb .saved 'coca', now 'rotary'"):
        check_same_model(Path("run"), make(), make(pos_emb="rotary"))


def test_the_choices_of_training_are_these() -> None:
    trained = {(key, name) for key in methods.TABLES for name in methods.names(key, trained=True, compute=None)}
    cases = (CLEX["rope_scaling"]["rope_type"], INV_LEAKY["relative_positions"]["type"], LOG_N["logit_scaling"])
    others = (("logit_scaling", SSMAX["logit_scaling"]["type"]), *CABLE.items())
    of_training = ROPE_ID["rotary_frequencies"]["type"]
    assert trained == {*zip(TRAINED_CHOICES, (*cases, *FOX.values(), of_training), strict=True), *others}
    assert set(TRAINED_CHOICES) <= KEYS.keys()


@pytest.mark.parametrize(
    ("trained", "wanted"),
    [
        (CLEX, {"rope_scaling": CLEX["rope_scaling"] | {"original_max_position_embeddings": 8}}),
        (INV_LEAKY, {"relative_positions": {"type": "inv_leaky_rerope", "target_length": 512}}),
        (CLEX, {"rotary_emb_base": 500.0}),
        (ROPE_ID, {"rotary_frequencies": {"type": "rope_id", "turns": 3.0}}),
        (ROPE_ID, {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}}),
    ],
)
def test_learned_choices_stay_with_their_options(trained: dict[str, Any], wanted: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="was trained with other options"):
        check_same_model(Path("run"), make(**trained), make(**trained | wanted))
