"""Checks between keys record the keys that they read, and drop messages that depend on an invalid one."""

from collections.abc import Mapping
from typing import Any

import pytest

from megatron_coca.config import ConfigError, load_config
from megatron_coca.config.checks import CHECKS, find_faults
from megatron_coca.config.checks.recording import run
from megatron_coca.config.schema import GROUPS, KEYS, Settings

SHAPE: dict[str, Any] = {"num_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "seq_length": 64}
GAU = {"attention_config": [[["gau"], "all"]]}
FAULTY: tuple[dict[str, Any], ...] = (
    {"max_position_embeddings": 63, "opt_pos_emb_offset": 2},
    {"num_kv_heads": 3},
    {"pos_emb": "rotary", "rotary_pct": 0.1},
    {"pos_emb": "alibi", "rope_scaling": {"rope_type": "linear", "factor": 2}},
    {"lr_wsd_decay_iters": 91, "train_iters": 100, "warmup": 0.1},
    {"precision": "fp32", "bf16": {"enabled": True}},
    {"model_parallel_size": 3},
    {"trainable": ["positions"], "pos_emb": "rotary"},
    {"train_epochs": 2, "train_iters": 4},
    {"eval_windows": [128]},
    GAU | {"pos_emb": "rotary", "sink_logits": True},
    {"layer_types": {"near": {"sliding_window_width": 8}}},
)
"""Keys that do not fit together, one fault each."""


def unchecked(keys: Mapping[str, Any]) -> Settings:
    """The configuration of valid keys that may not fit together."""
    given = SHAPE | keys
    groups = {
        name: kind.model_validate({key: value for key, value in given.items() if KEYS[key].group == name})
        for name, kind in GROUPS.items()
    }
    return Settings.model_validate(groups)


def test_an_invalid_key_hides_only_the_messages_that_depend_on_it() -> None:
    keys = SHAPE | {"pos_emb": "learned", "max_position_embeddings": 63, "num_kv_heads": 3}
    with pytest.raises(ConfigError) as error:
        load_config(keys | {"opt_pos_emb_offset": "two"})
    offset, heads = sorted(error.value.problems, reverse=True)
    assert "opt_pos_emb_offset: expected an integer" in offset and "num_kv_heads: 3 key/value heads" in heads


def test_a_default_that_follows_an_invalid_key_depends_on_it() -> None:
    for keys, lines in (({}, 1), ({"max_position_embeddings": 32}, 1), ({"opt_pos_emb_offset": 2}, 1)):
        with pytest.raises(ConfigError) as error:
            load_config(SHAPE | {"pos_emb": "learned", "seq_length": "long"} | keys)
        assert len(error.value.problems) == lines, error.value.problems


@pytest.mark.parametrize("keys", FAULTY, ids=lambda keys: next(iter(keys)))
def test_the_recorded_keys_are_those_that_the_check_reads(keys: dict[str, Any]) -> None:
    settings = unchecked(keys)
    found = [(check, run(check, settings)) for check in CHECKS]
    ((check, finding),) = [(check, finding) for check, finding in found if finding.message is not None]
    assert check.key in finding.keys, "the reported key is one of them"
    for key in KEYS:
        hidden = not list(find_faults(settings, frozenset({key})))
        assert hidden == (key in finding.keys), key
        if key not in finding.keys:  # so the message is the same for every other value of the key
            group, field = KEYS[key]
            other = getattr(settings, group).model_copy(update={field: object()})
            assert run(check, settings.model_copy(update={group: other})) == finding, key


def test_reading_through_properties_and_changed_copies_is_recorded() -> None:
    settings = unchecked(GAU | {"layer_types": {}, "pos_emb": "rotary"})
    (gau,) = [check for check in CHECKS if check.key == "gau_key_width"]
    read = run(gau, settings).keys
    assert {"gau_width", "hidden_size", "attention_config", "layer_types", "sink_logits", "trainable"} <= read
    assert "num_workers" not in read


def test_a_stage_of_zero_that_is_no_number_is_one_error() -> None:
    for keys in ({"torch_compile": True}, {"sequence_parallel_size": 2}, {"pipe_parallel_size": 2}):
        with pytest.raises(ConfigError, match=r"zero_optimization: stage 'x' .*0 \| 1 \| 2 \| 3") as error:
            load_config(SHAPE | keys | {"zero_optimization": {"stage": "x"}})
        assert len(error.value.problems) == 1


def test_recording_does_not_change_what_a_check_finds() -> None:
    for keys in ({}, *FAULTY):
        settings = unchecked(keys)
        assert [check.find(settings) for check in CHECKS] == [run(check, settings).message for check in CHECKS]
