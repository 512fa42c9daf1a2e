"""Keys of the maximal update parametrization: what belongs together, and what it excludes."""

import re
from pathlib import Path
from typing import Any

import pytest

from megatron_coca.config import ConfigError, load_config

ROOT = Path(__file__).parents[4]
SHAPE: dict[str, Any] = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 16}
SHAPE |= {"pos_emb": "rotary"}
MUP: dict[str, Any] = {"use_mup": True, "mup_base_hidden_size": 32}


def error_of(keys: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config([], SHAPE | keys)
    return str(caught.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"use_mup": True}, "mup_base_hidden_size: not set; with use_mup"),
        ({"mup_base_hidden_size": 32}, "mup_base_hidden_size: .*without use_mup"),
        ({"mup_init_scale": 2.0}, "mup_init_scale: .*without use_mup"),
        ({"mup_attn_temp": 2.0}, "mup_attn_temp: .*without use_mup"),
        ({"mup_output_temp": 2.0}, "mup_output_temp: .*without use_mup"),
        ({"mup_embedding_mult": 2.0}, "mup_embedding_mult: .*without use_mup"),
        (MUP | {"embedding_scale": 2.0}, "embedding_scale: use_mup .*1.0, not 2.0; .*mup_embedding_mult"),
        (MUP | {"softmax_scale": 0.25}, "softmax_scale: use_mup .*0.0625, not 0.25; .*mup_attn_temp"),
        (MUP | {"final_logit_scale": 1.0}, "final_logit_scale: use_mup .*0.5, not 1.0; .*mup_output_temp"),
        (MUP | {"init_method": "orthogonal"}, "init_method: orthogonal .*with use_mup"),
        (MUP | {"output_layer_init_method": "xavier_normal"}, "output_layer_init_method: xavier_normal .*supported"),
        (MUP | {"optimizer.type": "sgd"}, "use_mup: .*with optimizer.type sgd"),
        (MUP | {"attention_config": [[["gau"], "all"]]}, "use_mup: .*with layers of type gau"),
        (MUP | {"embedding_width": 32}, "use_mup: .*with embedding_width"),
        (MUP | {"pos_emb": "rpe"}, "use_mup: .*with pos_emb rpe"),
        (MUP | {"use_bias_in_output_head": True}, "use_bias_in_output_head: .*with use_mup"),
        (
            MUP
            | {"attention_config": [[["near", "global"], "all"]], "layer_types": {"near": {"sliding_window_width": 4}}}
            | {"head_shapes": {"near": {"kv_channels": 8}}},
            "use_mup: .*with head_shapes that set kv_channels",
        ),
        ({"save_base_shapes": True}, "save_base_shapes: .*mup_base_hidden_size replaces"),
        ({"base_shapes_file": "shapes"}, "base_shapes_file: .*mup_base_hidden_size"),
        ({"coord_check": True}, "coord_check: .*`megatron-coca inspect mup`"),
        ({"mup_rp_embedding_mult": 2.0}, "mup_rp_embedding_mult: a factor on absolute positions"),
    ],
)
def test_errors(keys: dict[str, Any], message: str) -> None:
    assert re.search(message, error_of(keys))


def test_an_error_about_the_output_head_follows_from_use_mup() -> None:
    """With an invalid value of use_mup, nothing is known about the factor on logits."""
    assert "use_bias_in_output_head" not in error_of(MUP | {"use_mup": 1, "use_bias_in_output_head": True})


def test_a_configuration_of_gpt_neox(tmp_path: Path) -> None:
    """Its file of shapes is an error that names our key, with which the same file works."""
    (tmp_path / "mup.yml").write_text(
        '{"use-mup": true, "save-base-shapes": false, "coord-check": false, "base-shapes-file": "base-shapes",'
        ' "mup-init-scale": 2.0, "mup-attn-temp": 1.0, "mup-output-temp": 1.0, "mup-embedding-mult": 10.0,'
        ' "mup-rp-embedding-mult": 1.0, "mup-width-scale": 2}'
    )
    files = [ROOT / "configs/350M/roformer.yml", tmp_path / "mup.yml"]
    with pytest.raises(ConfigError) as caught:
        load_config(files)
    assert [problem.split(": ")[1] for problem in caught.value.problems] == ["base_shapes_file", "mup_base_hidden_size"]
    model = load_config(files, ["base_shapes_file=null", "mup_base_hidden_size=256"]).model
    assert (model.width_ratio, model.embedding_scale, model.mup_init_scale, model.softmax_scale) == (4, 10, 2, 1 / 64)


def test_values_that_use_mup_sets_itself_are_accepted() -> None:
    plain = load_config([], SHAPE | MUP)
    scales = {"embedding_scale": 1.0, "softmax_scale": 1 / 16, "final_logit_scale": 0.5}
    assert load_config([], SHAPE | MUP | scales) == plain
    defaults = {"mup_init_scale": 1.0, "mup_rp_embedding_mult": 1.0, "mup_width_scale": 4, "coord_check": False}
    assert load_config([], SHAPE | defaults) == load_config([], SHAPE)
