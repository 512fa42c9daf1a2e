"""Text networks in models that also read images or sound: the logits of the whole model for text, and their export.

A case is a class of transformers with odd sizes and a vision network of one layer.
"""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from megatron_coca import load_model
from megatron_coca.checkpoints import CheckpointError
from megatron_coca.checkpoints.exporting import export
from megatron_coca.checkpoints.huggingface import wrappers
from megatron_coca.checkpoints.huggingface.tokenizer_files import own_files
from megatron_coca.checkpoints.load import open_checkpoint
from megatron_coca.checkpoints.tokenizer import largest_named_id
from megatron_coca.data.tokenizers.text_rules import find_rules
from tests.parity.families.test_families import BASE, LINEAR, LONG, SHAPE, in_float64, layer_scalars, tokens


def images(kind: str, **changes: Any) -> dict[str, Any]:
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return {"model_type": kind, "image_size": 28, "patch_size": 14} | shape | changes


AXES = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [1, 1, 1]}
CLIP, SIGLIP = images("clip_vision_model", projection_dim=16), images("siglip_vision_model")
QWEN = {"depth": 1, "num_heads": 2}
LATER = QWEN | {"hidden_size": 16, "out_hidden_size": 36, "intermediate_size": 16}
MLLAMA = {"attention_heads": 2, "num_hidden_layers": 1, "num_global_layers": 1, "intermediate_layers_indices": [0]}
MLLAMA |= {"hidden_size": 16, "intermediate_size": 16, "vision_output_dim": 32, "image_size": 28, "patch_size": 14}
GEMMA = {"model_type": "gemma3_text", "head_dim": 10, "sliding_window": 9, "num_hidden_layers": 7}
GEMMA |= {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": BASE}}
GEMMA4 = {"head_dim": 6, "global_head_dim": 10, "sliding_window": 9, "num_hidden_layers": 7}
GEMMA4 |= {"attention_k_eq_v": True, "num_global_key_value_heads": 2, "pad_token_id": 0}
IDS = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}
COMPASS = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
COMPASS |= {"rope_parameters": {"sliding_attention": AXES, "full_attention": None}}
COHERE = {"model_type": "cohere2", "sliding_window": 9, "num_hidden_layers": 5}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma3": (GEMMA, SIGLIP),
    "llama4": (
        {"model_type": "llama4_text", "num_local_experts": 3, "intermediate_size_mlp": 20, "head_dim": 10}
        | {"num_hidden_layers": 4, "interleave_moe_layer_step": 2, "attention_chunk_size": 13, "floor_scale": 11},
        {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        | {"image_size": 28, "patch_size": 14},
    ),
    "gemma4": (
        GEMMA4 | {"hidden_size_per_layer_input": 0},
        {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        | {"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16},
    ),
    "gemma4_unified": (GEMMA4, {"mm_embed_dim": 16, "output_proj_dims": 36, "mm_posemb_size": 16}),
    "qwen2_vl": ({"rope_parameters": AXES}, QWEN | {"embed_dim": 16, "hidden_size": 36, "mlp_ratio": 1}),
    "qwen2_5_vl": ({"rope_parameters": AXES}, LATER | {"fullatt_block_indexes": [0]}),
    "qwen3_vl": (
        {"head_dim": 12, "rope_parameters": AXES | {"mrope_section": [2, 2, 2], "mrope_interleaved": True}},
        LATER | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
    "mllama": (IDS | {"num_hidden_layers": 5, "cross_attention_layers": [1, 3], "rope_parameters": BASE}, MLLAMA),
    "mistral3": ({"model_type": "mistral", "head_dim": 10}, images("pixtral", head_dim=8)),
    "llava": ({"model_type": "llama", "tie_word_embeddings": True}, CLIP),
    "llava_next": ({"model_type": "mistral"}, CLIP),
    "llava_next_video": ({"model_type": "llama"}, CLIP),
    "llava_onevision": ({"model_type": "qwen2"}, SIGLIP),
    "video_llava": ({"model_type": "llama"}, CLIP),
    "vipllava": ({"model_type": "llama"}, CLIP),
    "idefics3": ({"model_type": "llama"}, images("idefics3_vision")),
    "smolvlm": ({"model_type": "llama"}, images("smolvlm_vision")),
    "internvl": ({"model_type": "qwen2"}, images("internvl_vision", image_size=[28, 28], patch_size=[14, 14])),
    "aya_vision": (COHERE, SIGLIP),
    "cohere2_vision": (COHERE, SIGLIP),
    "cohere_compass": (
        COMPASS,
        QWEN | {"hidden_size": 16, "out_hidden_size": 36, "intermediate_size": 16, "deepstack_visual_indexes": [0]},
    ),
    "deepseek_vl": ({"model_type": "llama"}, SIGLIP),
    "emu3": (IDS, {}),
    "fuyu": ({"model_type": "persimmon", "rope_parameters": BASE | {"partial_rotary_factor": 0.67}}, {}),
    "got_ocr2": (
        {"model_type": "qwen2"},
        {"hidden_size": 16, "output_channels": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp_dim": 16}
        | {"image_size": 64, "patch_size": 16, "global_attn_indexes": [0]},
    ),
    "idefics2": ({"model_type": "mistral", "pad_token_id": 0}, images("idefics2_vision")),
    "moss_transcribe_diarize": ({"model_type": "qwen3", "head_dim": 10}, {}),
    "phi4_multimodal": ({}, {}),
    "qwen2_audio": ({"model_type": "qwen2"}, {}),
    "voxtral": ({"model_type": "llama"}, {}),
}
"""Wrapper -> `text_config` and `vision_config`."""
SOUND = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
WHISPER = {"d_model": 16, "encoder_ffn_dim": 16, "encoder_layers": 1, "encoder_attention_heads": 2}
QUANTIZER = {"base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1, "hidden_size": 32}
OTHERS: dict[str, dict[str, Any]] = {
    "emu3": {"vq_config": QUANTIZER | {"attn_resolutions": []}, "vocabulary_map": {"<image>": 5}},
    "fuyu": {},
    "idefics2": {
        "perceiver_config": {"hidden_size": 36, "resampler_depth": 1, "resampler_n_heads": 2, "resampler_head_dim": 8}
        | {"num_key_value_heads": 1}
    },
    "moss_transcribe_diarize": {"audio_config": SOUND},
    "phi4_multimodal": {
        "vision_config": SOUND | {"image_size": 28, "patch_size": 14, "crop_size": 28},
        "audio_config": {"hidden_size": 16, "num_attention_heads": 2, "num_blocks": 1, "intermediate_size": 16}
        | {"ext_pw_out_channel": 16, "nemo_conv_channels": 16},
    },
    "qwen2_audio": {"audio_config": {"model_type": "qwen2_audio_encoder"} | WHISPER},
    "voxtral": {"audio_config": {"model_type": "voxtral_encoder"} | SOUND},
}
"""Wrapper -> its other keys, instead of `vision_config`."""
FLAT = ("phi4_multimodal",)
"""Classes that have the keys of the text network beside those of the others."""
FAST = ("gemma3", "qwen2_vl", "qwen3_vl", "mllama", "llava")
WITHOUT_SCALE = ("aya_vision", "cohere2_vision")
"""Classes that leave out the factor `logit_scale` of their text network."""
EXTRA = {"vipllava": {"vision_feature_layers": [-1] * 5}}
KINDS = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]


def build(name: str) -> Any:
    """A model with random weights, in evaluation mode and the default dtype."""
    text, vision = CASES[name]
    shape = {key: value for key, value in SHAPE.items() if name != "fuyu" or key != "num_key_value_heads"} | text
    section = shape if name in FLAT else {"text_config": shape}
    others = OTHERS.get(name, {"vision_config": vision})
    config = CONFIG_MAPPING[name](**section, **others, **EXTRA.get(name, {}))
    if "tie_word_embeddings" in text:
        config.tie_word_embeddings = text["tie_word_embeddings"]
    torch.manual_seed(0)
    model = AutoModelForMultimodalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in (*model.parameters(), *layer_scalars(model)):
            parameter += 0.1 * torch.randn(parameter.shape)
    return model


def test_every_wrapper_has_a_case() -> None:
    assert wrappers.WRAPPERS.keys() == CASES.keys()


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_a_text_network_is_read_and_written(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Logits in float64 beyond the training length. The exported weights are the text network's, bit for bit."""
    with in_float64():
        wide = build(name)
        expected = wide(tokens(LONG)).logits
        wide.save_pretrained(tmp_path / "wide")
    scale = 0.0625 if name in WITHOUT_SCALE else 1.0
    opened = open_checkpoint(tmp_path / "wide")
    found = opened.load(dtype=torch.float64).model(tokens(LONG))
    assert expected.std() > 0.01
    torch.testing.assert_close(found, scale * expected, rtol=1e-9, atol=1e-9)
    assert f"of the {name} model is read; " in caplog.text and "other parts are left out" in caplog.text
    assert ("logit_scale: the" in caplog.text) == (name in WITHOUT_SCALE)

    build(name).save_pretrained(tmp_path / "source")
    done = export(tmp_path / "source", tmp_path / "text")
    kind = wrappers.TEXT_TYPES[CASES[name][0].get("model_type") or wrappers.WRAPPERS[name]].kind
    assert done.model_type == kind and not done.remote
    before, after = (load_file(tmp_path / part / "model.safetensors") for part in ("source", "text"))
    read = json.loads((tmp_path / "source" / "config.json").read_text())
    network = wrappers.find_network(read, Path("x"), lambda: before)
    renamed = {network.rename(key): value for key, value in before.items()}
    assert after and all(torch.equal(value, renamed[key][: len(value)]) for key, value in after.items())
    theirs = AutoModelForCausalLM.from_pretrained(done.folder, attn_implementation="eager").eval()
    logits = build(name)(tokens(17)).logits
    torch.testing.assert_close(theirs(tokens(17)).logits, scale * logits, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_cap_of_the_logits_is_applied_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Gemma 3's class for images leaves it out; the class of its text network applies it."""
    with in_float64():
        wide = build("gemma3")
        wide.config.text_config.final_logit_softcapping = cap = 0.5
        wide.save_pretrained(tmp_path)
        expected = wide(tokens(LONG)).logits
    assert (expected.abs() > cap).any(), "left out"
    found = open_checkpoint(tmp_path).load(dtype=torch.float64).model(tokens(LONG))
    torch.testing.assert_close(found, cap * torch.tanh(expected / cap), rtol=1e-9, atol=1e-9)
    assert "final_logit_softcapping: the gemma3 class" in caplog.text


SPELLINGS = {
    "keys beside the vision network": ("qwen2_vl", "model.", "flat"),
    "names inside the model": ("llava", "model.language_model.", "nested"),
    "no key on the head": ("mistral3", "language_model.model.", "untold"),
}
"""A wrapper, the beginning of its weights' names, and the form of its config.json."""


@pytest.mark.parametrize("case", SPELLINGS)
@torch.no_grad()
def test_other_spellings_are_the_same_network(case: str, tmp_path: Path) -> None:
    name, prefix, form = SPELLINGS[case]
    build(name).save_pretrained(tmp_path)
    ids = tokens(17)
    expected, file = load_model(tmp_path)(ids), tmp_path / "model.safetensors"
    network = wrappers.find_network({"model_type": name, "text_config": {}}, Path("x"))
    held = load_file(file)
    inner = {key: ours.replace("model.", prefix, 1) for key in held if (ours := network.rename(key)) is not None}
    save_file({inner.get(key, key): weight for key, weight in held.items()}, file)
    values = json.loads((tmp_path / "config.json").read_text())
    if form == "flat":
        text = values.pop("text_config")
        values |= {key: value for key, value in text.items() if key != "model_type"}
        rope = values.pop("rope_parameters")
        values |= {"rope_theta": 500.0, "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}}
    elif form == "untold":
        values.pop("tie_word_embeddings"), values["text_config"].pop("tie_word_embeddings")
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert torch.equal(load_model(tmp_path)(ids), expected)


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("paligemma", "gemma", "'paligemma' is not supported; .* aya_vision, .*, vipllava"),
        ("git", "zaya", "'git' is not supported; .*vision-language"),
        ("internvl", "zaya", "'zaya' is not supported; .*mixture-of-experts"),
    ],
)
def test_a_wrapper_that_is_not_supported_is_named(kind: str, text: str, message: str, tmp_path: Path) -> None:
    values = {"model_type": kind, "text_config": {"model_type": text}, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=f"config.json: model_type: {message}"):
        load_model(tmp_path)


def test_ids_of_special_tokens_are_found_in_the_section(tmp_path: Path) -> None:
    """Those beside the section take precedence."""
    values = {"bos_token_id": 2, "eos_token_id": None, "text_config": {"bos_token_id": 7, "eos_token_id": [3, 4]}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert find_rules(tmp_path).ends == (3, 4) and largest_named_id(tmp_path) == 4
    assert own_files(tmp_path).ids == (2, [3, 4], None)


def test_the_identity_is_that_of_the_text_network(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Other vision weights do not change it; other text weights do."""
    caplog.set_level(logging.ERROR)
    build("llava").save_pretrained(tmp_path)
    before, file = open_checkpoint(tmp_path).identity, tmp_path / "model.safetensors"
    held = load_file(file)
    for name, same in (("vision_tower.post_layernorm.bias", True), ("language_model.model.norm.weight", False)):
        save_file(held | {name: held[name] + 1}, file)
        assert (open_checkpoint(tmp_path).identity == before) == same, name
