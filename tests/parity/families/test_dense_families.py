"""Every causal language model of transformers is a supported family, or has a reason why it is not supported."""

import inspect
import json
import re
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from megatron_coca.checkpoints import CheckpointError, load_checkpoint, load_model
from megatron_coca.checkpoints.exporting import export
from megatron_coca.checkpoints.huggingface import unsupported_types
from megatron_coca.checkpoints.huggingface.config_json import OURS, READERS, parse_config
from megatron_coca.checkpoints.huggingface.families import FAMILIES
from megatron_coca.checkpoints.huggingface.unsupported_types import UNSUPPORTED_TYPES
from megatron_coca.checkpoints.huggingface.wrappers import WRAPPERS
from megatron_coca.checkpoints.load import open_checkpoint
from megatron_coca.model.cost import parameter_count
from tests.conftest import ROOT
from tests.parity import family_cases, published_configs
from tests.parity.families.test_families import CASES, LONG, build, in_float64, tokens

SUPPORTED = (READERS.keys() | FAMILIES.keys()) - {OURS}
FAST = (
    *("stablelm parallel, norms of heads", "phi norms of heads", "cohere untied, norms of heads", "granite", "glm"),
    *("exaone4", "hunyuan", "nemotron", "apertus", "olmo", "nanochat", "granite_swa"),
    *("codegen", "gpt_neo", "opt", "opt, norms of sums, a narrow embedding", "openai-gpt"),
    *("ctrl", "modernbert-decoder", "xglm", "gemma4_text"),
    *("mixtral", "olmoe", "qwen2_moe, some dense layers, windows", "qwen3_moe, some dense layers, a window"),
    *("glm4_moe", "dots1", "gpt_oss", "granitemoe_swa", "afmoe", "ernie4_5_moe", "llama4_text"),
    *("minicpm3", "deepseek_v2", "deepseek_v3, biases, two dense layers", "glm4_moe_lite tied, listed experts"),
)
"""Cases that together use every switch and every packing of these families. tests/long_tests.yml may leave out some."""


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in family_cases.CASES]
)
@torch.no_grad()
def test_a_family_is_read_and_written(name: str, tmp_path: Path) -> None:
    """Compare in float64: beyond the training length, with a cache, with left padding. Write the weights back."""
    padding = torch.ones(2, 50, dtype=torch.long)
    padding[0, :7] = 0
    with in_float64():
        theirs = build(name)
        theirs.save_pretrained(tmp_path / "source")
        expected = theirs(tokens(LONG)).logits
        theirs = build(name)  # of dynamic extensions, the class keeps the frequencies of the longest input
        own = "position_ids" in inspect.signature(theirs.forward).parameters
        places = {"position_ids": (padding.cumsum(1) - 1).clamp(min=0)} if own else {}
        padded = theirs(tokens(50), attention_mask=padding, **places).logits
    assert expected.std() > 0.01
    ours = open_checkpoint(tmp_path / "source").load(dtype=torch.float64).model
    torch.testing.assert_close(ours(tokens(LONG)), expected, rtol=1e-9, atol=1e-9)
    cache = ours.new_cache(length=LONG)
    parts = [ours(part, cache=cache) for part in tokens(LONG).split([90, 1, 3, 6], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-9, atol=1e-9)
    found = ours(tokens(50), documents=padding)
    torch.testing.assert_close(found[padding == 1], padded[padding == 1], rtol=1e-9, atol=1e-9)
    done = export(tmp_path / "source", tmp_path / "back")
    assert done.model_type == theirs.config.model_type and done.compared.startswith("transformers")
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "source", done.folder))
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.slow
def test_every_causal_language_model_is_a_family_or_has_a_reason() -> None:
    theirs = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert not (SUPPORTED | WRAPPERS.keys()) & UNSUPPORTED_TYPES.keys()
    assert theirs <= SUPPORTED | WRAPPERS.keys() | UNSUPPORTED_TYPES.keys()
    tried = {build(name).config.model_type for name in CASES}
    assert (SUPPORTED & theirs) - {"gpt-sw3"} == tried, "a family has no tiny model, or a tiny model has no family"
    page = (ROOT / "docs" / "models.md").read_text()
    assert f"{len(SUPPORTED & theirs)} of the {len(theirs)} causal language models" in page
    assert f"Of {len(WRAPPERS.keys() & theirs)} others, which read images" in page


SIGNS = {
    unsupported_types.EXPERTS: "experts|router",
    unsupported_types.INDEXED: "indexer",
    unsupported_types.RECURRENT: "conv1d|ssm|mamba|delta_rule|recurrent|rwkv|lstm",
    unsupported_types.CONVOLUTIONS: "conv",
    unsupported_types.IMAGES: "pixel_values|image",
    unsupported_types.DECODER: "encoder_hidden_states",
    unsupported_types.MASKED: "LMHead|LMPrediction|lm_head",
}
"""Reason -> words in the source of a class that has it."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(UNSUPPORTED_TYPES.keys() & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)))
def test_a_reason_is_stated_and_found_in_the_source(kind: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(UNSUPPORTED_TYPES[kind])):
        parse_config({"model_type": kind}, Path("config.json"))
    source = inspect.getsource(sys.modules[getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]).__module__])
    for reason in UNSUPPORTED_TYPES[kind].split("; "):
        assert re.search(SIGNS.get(reason, ""), source), reason


PUBLISHED = {
    "gemma, gelu means its approximation": ("gemma", {"hidden_act": "gelu", "hidden_activation": None}),
    "exaone4, a pattern in letters": ("exaone4", {"sliding_window_pattern": "LLLG"}),
    "gpt_neo, the list of layers": ("gpt_neo", {"gradient_checkpointing": True, "summary_type": "cls_index"}),
    "granite_swa, no list of bases": ("granite_swa", {"pad_token_id": 3}),
    "modernbert-decoder, older keys": (
        "modernbert-decoder without a bias of the head",
        {"rope_parameters": None, "global_rope_theta": 700.0, "local_rope_theta": 300.0}
        | {"layer_types": None, "global_attn_every_n_layers": 3},
    ),
    "starcoder2, older keys": ("starcoder2", {"mlp_type": "default", "norm_type": "layer_norm"}),
}
"""A model, and keys of config.json in the form of published models that mean the same."""


@pytest.mark.slow
@pytest.mark.parametrize("case", PUBLISHED)
def test_published_keys_mean_the_same(case: str, tmp_path: Path) -> None:
    name, spelled = PUBLISHED[case]
    build(name).save_pretrained(tmp_path)
    before = load_checkpoint(tmp_path).config
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | spelled))
    assert load_checkpoint(tmp_path).config == before


@pytest.mark.slow
@pytest.mark.parametrize("name", published_configs.PUBLISHED)
def test_a_published_configuration_has_the_parameters_of_its_class(name: str) -> None:
    values = published_configs.PUBLISHED[name]
    found = parse_config(values, Path("config.json"))
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
    saved = theirs.state_dict()
    kept = (buffer for key, buffer in theirs.named_buffers() if key in saved)
    assert parameter_count(found).total == sum(tensor.numel() for tensor in (*theirs.parameters(), *kept))


KINDS = {kind: name for name, (kind, _) in reversed(family_cases.MIXTURES.items())}
"""A class with mixtures -> its first case."""
IDS = {"vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_every_key_has_its_effect_or_is_an_error(kind: str, tmp_path: Path) -> None:
    """Each key of config.json is changed by itself, and the logits are those of the class or the import stops."""
    build(KINDS[kind]).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    same, errors = set[str](), set[str]()
    for key, value in values.items():
        if key in IDS or (other := family_cases.changed(value)) is None:
            continue
        (tmp_path / "config.json").write_text(json.dumps(values | {key: other}))
        try:
            found = load_model(tmp_path)(tokens(50))
        except CheckpointError:
            errors.add(key)
            continue
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
        torch.testing.assert_close(found, theirs(tokens(50)).logits, rtol=1e-4, atol=1e-4, msg=key)
        same.add(key)
    assert len(same) >= 6 and "rms_norm_eps" in same and "num_attention_heads" in errors


UNREAD = {
    "rotary_dim": ("gptj", {"rotary_dim": None}, "rotary_dim: null is not supported.*; use another model$"),
    "afn": ("openai-gpt", {"afn": "gelu_new"}, "afn: 'gelu_new' is not supported; supported values: gelu, relu"),
    "_remove_final_layer_norm": (
        "opt",
        {"_remove_final_layer_norm": True},
        "_remove_final_layer_norm: True is not supported, only False",
    ),
    "pad_token_id": ("xglm", {"pad_token_id": 5}, "pad_token_id: 5 is not supported, .*; set it to 1, as in"),
    "classifier_bias": ("modernbert-decoder", {"classifier_bias": True}, "classifier_bias: differs from mlp_bias"),
    "sliding_window": (
        "modernbert-decoder",
        {"sliding_window": 3},
        "sliding_window: differs from half of local_attention; correct one of the two$",
    ),
    "attention_types": ("gpt_neo", {"attention_types": [[["global"], 2]]}, "must name each layer"),
    "rope_parameters": ("apertus", {"rope_parameters": None}, "rope_parameters: missing, .*; add the section$"),
    "rope_parameters of gpt_oss": (
        "gpt_oss",
        {"rope_parameters": None},
        "rope_parameters: missing, .*; add the section$",
    ),
    "one expert": (
        "mixtral",
        {"num_local_experts": 1},
        "num_local_experts: 1 is not supported, only 2 or more experts",
    ),
    "no layer with experts": ("qwen3_moe", {"decoder_sparse_step": 9}, "leave no layer with experts"),
    "only dense layers": ("glm4_moe", {"first_k_dense_replace": 3}, "first_k_dense_replace: 3 leaves no layer"),
    "layer_rope_theta": ("granite_swa", {"layer_rope_theta": [1.0, 2.0, 0, 0, 0]}, "layer_rope_theta: several"),
    "section": ("cohere_compass_text", {"rope_parameters": {}}, "rope_parameters: has no section sliding_attention"),
    "num_local_experts": (
        "granitemoehybrid",
        {"num_local_experts": 4},
        "num_local_experts: 4 is not supported, only 0",
    ),
    "hidden_size_per_layer_input": (
        "gemma4_text",
        {"hidden_size_per_layer_input": 256},
        "hidden_size_per_layer_input: 256 is not supported, because each layer has an input of its own",
    ),
    "num_kv_shared_layers": (
        "gemma4_unified_text",
        {"num_kv_shared_layers": 1},
        "num_kv_shared_layers: 1 is not supported, because layers share keys and values",
    ),
    "enable_moe_block": (
        "gemma4_text",
        {"enable_moe_block": True},
        "enable_moe_block: True is not supported, because it has mixture-of-experts layers",
    ),
    "use_bidirectional_attention": (
        "gemma4_text",
        {"use_bidirectional_attention": "all"},
        "use_bidirectional_attention: 'all' is not supported",
    ),
    "per_layer_config": (
        "gemma4_text",
        {"per_layer_config": {"0": {"head_dim": 8}}},
        "per_layer_config: the heads of two layers of the same type differ",
    ),
    "layer_types": ("granitemoehybrid", {"layer_types": ["mamba"] * 3}, "layer_types: 'mamba' is not supported"),
}


@pytest.mark.slow
@pytest.mark.parametrize("key", UNREAD)
def test_values_that_are_not_supported_are_errors(key: str) -> None:
    name, changes, message = UNREAD[key]
    values = build(name).config.to_dict()
    with pytest.raises(CheckpointError, match=message):
        parse_config(values | changes, Path("config.json"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["glm4_moe", "dots1"])
def test_layers_that_predict_further_tokens_are_not_read(kind: str, tmp_path: Path) -> None:
    """The folders of GLM 4.5 have one behind the last layer. In other families, it is an error."""
    build(kind).save_pretrained(tmp_path)
    expected, file = load_model(tmp_path)(tokens(17)), tmp_path / "model.safetensors"
    save_file(load_file(file) | {"model.layers.3.eh_proj.weight": torch.ones(2, 2)}, file, {"format": "pt"})
    if kind == "glm4_moe":
        assert torch.equal(load_model(tmp_path)(tokens(17)), expected)
    else:
        with pytest.raises(CheckpointError, match="does not have .model.layers.3.eh_proj.weight"):
            load_model(tmp_path)


@pytest.mark.slow
def test_an_export_of_xglm_keeps_the_vectors_of_all_positions(tmp_path: Path) -> None:
    """The class replaces the vector of the position `pad_token_id` by zeros, so config.json does not name that id."""
    build("xglm").save_pretrained(tmp_path / "source")
    (tmp_path / "source" / "generation_config.json").write_text(json.dumps({"pad_token_id": 7}))
    folder = export(tmp_path / "source", tmp_path / "exported").folder
    assert json.loads((folder / "config.json").read_text())["pad_token_id"] is None
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = tokens(17)
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, load_model(folder)(ids), rtol=1e-4, atol=1e-4)
