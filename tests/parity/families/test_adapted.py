"""Folders with PEFT adapters, read with the model that they change, have the logits of peft in float64."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import PreTrainedModel

from megatron_coca import cli, load_model
from megatron_coca.checkpoints import CheckpointError, open_checkpoint
from megatron_coca.commands import train
from megatron_coca.training.checkpointing.initial_model import initial_model
from tests.parity.families import test_wrappers
from tests.parity.families.test_families import in_float64
from tests.parity.foreign import TRAINED, tokens

SHAPE = {"vocab_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
LLAMA = SHAPE | {"intermediate_size": 40, "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1}
ADAPTERS = "adapters/adapter_model.safetensors"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def llama(**keys: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**LLAMA | {"attention_bias": True} | keys))


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=96, n_layer=2, n_head=4, n_embd=32, n_positions=64))


def gpt_neox() -> PreTrainedModel:
    return GPTNeoXForCausalLM(GPTNeoXConfig(**SHAPE, intermediate_size=64, max_position_embeddings=64))


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "attention": (llama, {"target_modules": ATTENTION}),
    "all linear": (llama, {"target_modules": "all-linear"}),
    "rsLoRA": (llama, {"target_modules": ATTENTION, "use_rslora": True, "lora_alpha": 7}),
    "DoRA": (llama, {"target_modules": [*ATTENTION, "down_proj", "embed_tokens"], "use_dora": True}),
    "patterns": (
        llama,
        {
            "target_modules": ATTENTION,
            "rank_pattern": {"layers.1.self_attn.q_proj": 2, "k_proj": 3},
            "alpha_pattern": {r".*\.0\..*v_proj": 5},
        },
    ),
    "some layers": (llama, {"target_modules": ["q_proj"], "layers_to_transform": [1]}),
    "bias": (llama, {"target_modules": ATTENTION, "bias": "all"}),
    "bias of adapters": (llama, {"target_modules": ["q_proj"], "lora_bias": True}),
    "embedding": (llama, {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
    "embedding of a tied model": (lambda: llama(tie_word_embeddings=True), {"target_modules": ["embed_tokens"]}),
    "norms and head": (llama, {"target_modules": ["q_proj"], "modules_to_save": ["norm", "lm_head"]}),
    "head of a tied model": (
        lambda: llama(tie_word_embeddings=True),
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ),
    "both ends of a tied model": (
        lambda: llama(tie_word_embeddings=True),
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    ),
    "rows of tokens": (llama, {"target_modules": ["q_proj"], "trainable_token_indices": [3, 90, 4]}),
    "rows of tokens of a tied model": (
        lambda: llama(tie_word_embeddings=True),
        {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [3, 90]}},
    ),
    "other rows of the two ends of a tied model": (
        lambda: llama(tie_word_embeddings=True),
        {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [3, 90], "lm_head": [4, 5]}},
    ),
    "GPT-2": (gpt2, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "GPT-2, DoRA": (gpt2, {"target_modules": ["c_attn", "attn.c_proj"], "use_dora": True, "fan_in_fan_out": True}),
    "GPT-NeoX": (gpt_neox, {"target_modules": ["query_key_value", "dense"], "modules_to_save": ["lm_head"]}),
    "GPT-NeoX, adapter of the head": (gpt_neox, {"target_modules": ["query_key_value", "lm_head"]}),
}


def adapted(case: str, folder: Path, rows: int | None = None) -> PeftModel:
    """A random model with random adapters, both in float64, saved as `base` and `adapters`."""
    make, options = CASES[case]
    torch.manual_seed(0)
    with in_float64():
        base = make().double()
    base.save_pretrained(folder / "base")
    if rows is not None:
        base.resize_token_embeddings(rows, mean_resizing=False)
    model = get_peft_model(base, LoraConfig(r=4, **options)).double().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.requires_grad or "magnitude" in name:
                weight += 0.3 * torch.randn(weight.shape).to(weight)
    model.save_pretrained(folder / "adapters")
    return model


def theirs(model: PeftModel, batch: Tensor) -> Tensor:
    with torch.no_grad(), in_float64():
        return model(batch).logits


def ours(folder: Path, batch: Tensor, **keys: Any) -> Tensor:
    given = {"base_model": str(folder / "base")} | keys
    loaded = open_checkpoint(folder / "adapters", overrides=given).load(given, dtype=torch.float64)
    with torch.no_grad():
        return loaded.model(batch)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_peft(case: str, tmp_path: Path) -> None:
    model, batch = adapted(case, tmp_path), tokens(TRAINED) % 96
    with torch.no_grad():
        plain = load_model(tmp_path / "base").double()(batch)
    expected = theirs(model, batch)
    assert (expected - plain).abs().max() > 0.01
    torch.testing.assert_close(ours(tmp_path, batch), expected, rtol=1e-9, atol=1e-9)


def test_weights_that_longlora_saves_beside_its_adapters(tmp_path: Path) -> None:
    model, batch = adapted("attention", tmp_path), tokens(TRAINED) % 96
    with torch.no_grad():
        beside = {name: weight for name, weight in model.named_parameters() if "embed" in name or "norm" in name}
        for weight in beside.values():
            weight += 0.3 * torch.randn(weight.shape).to(weight)
    torch.save({name: weight.data for name, weight in beside.items()}, tmp_path / "adapters/trainable_params.bin")
    torch.testing.assert_close(ours(tmp_path, batch), theirs(model, batch), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("tied", [False, True])
def test_a_vocabulary_that_grew(tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}
    monkeypatch.setitem(CASES, "grown", (lambda: llama(tie_word_embeddings=tied), options))
    model = adapted("grown", tmp_path, rows=99)
    batch = torch.tensor([[98, *range(8)]])
    torch.testing.assert_close(ours(tmp_path, batch), theirs(model, batch), rtol=1e-9, atol=1e-9)


def test_adapters_beside_their_model(tmp_path: Path) -> None:
    model, batch = adapted("attention", tmp_path), tokens(TRAINED) % 96
    for path in (tmp_path / "adapters").iterdir():
        path.rename(tmp_path / "base" / path.name)
    found = open_checkpoint(tmp_path / "base").load(dtype=torch.float64).model
    with torch.no_grad():
        torch.testing.assert_close(found(batch), theirs(model, batch), rtol=1e-9, atol=1e-9)


def test_the_tokenizer_is_that_of_the_adapters_if_they_have_one(tmp_path: Path) -> None:
    adapted("attention", tmp_path)
    folder, given = tmp_path / "adapters", {"base_model": str(tmp_path / "base")}
    assert open_checkpoint(folder, overrides=given).folder == tmp_path / "base"
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(CheckpointError, match=r"has chat_template.jinja, but no tokenizer; copy"):
        open_checkpoint(folder, overrides=given)
    (folder / "tokenizer.json").write_text("{}")
    assert open_checkpoint(folder, overrides=given).folder == folder


def test_the_identity_covers_model_adapters_and_settings(tmp_path: Path) -> None:
    adapted("attention", tmp_path)
    path = tmp_path / "adapters/adapter_config.json"
    settings = json.loads(path.read_text())

    def identity(**changes: Any) -> str:
        path.write_text(json.dumps(settings | changes))
        return open_checkpoint(tmp_path / "adapters", overrides={"base_model": str(tmp_path / "base")}).identity

    base = open_checkpoint(tmp_path / "base").identity
    assert identity() == identity(task_type="CAUSAL_LM", base_model_name_or_path="elsewhere")
    assert len({base, identity(), identity(lora_alpha=9), identity(use_rslora=True)}) == 4


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another method": ({"peft_type": "IA3"}, "only peft can apply .peft_type 'IA3' is not LoRA.; merge them into"),
    "a start that changes the model": ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' changes the base"),
    "an unknown setting": ({"layer_replication": [[0, 2]]}, r"layer_replication is not supported\); merge them"),
    "patterns that are a list": ({"rank_pattern": ["q_proj"]}, "peft cannot merge the adapter of model.layers.0.self_"),
    "a pattern that cannot be read": (
        {"alpha_pattern": {"q{9999999999999999999}": 1}},
        "peft cannot merge the adapter",
    ),
    "a pattern that never ends": (
        {"alpha_pattern": {r"(\w|\.)*(\w|\.)*!": 1}},
        "alpha_pattern: .* repeats a group or has more than 4 repetitions and groups, .*; write the names",
    ),
    "an alpha too large": ({"lora_alpha": 10**400}, "peft cannot merge the adapter of model.layers.0.self_attn.q_proj"),
    "another rank": ({"r": 5}, "peft cannot merge the adapter of model.layers.0.self_attn.q_proj"),
    "no settings of tokens": ({"trainable_token_indices": "3"}, ""),
}


def test_an_alpha_of_zero_is_not_the_default(tmp_path: Path) -> None:
    adapted("attention", tmp_path)
    batch, path = tokens(TRAINED) % 96, tmp_path / "adapters/adapter_config.json"
    settings, given = json.loads(path.read_text()), {"base_model": str(tmp_path / "base")}
    identities = set()
    for alpha in (None, 0):
        path.write_text(json.dumps(settings | {"lora_alpha": alpha}))
        identities.add(open_checkpoint(tmp_path / "adapters", overrides=given).identity)
    assert len(identities) == 2
    with torch.no_grad():
        plain = open_checkpoint(tmp_path / "base").load(dtype=torch.float64).model(batch)
    torch.testing.assert_close(ours(tmp_path, batch), plain, rtol=1e-9, atol=1e-9)


INSIDE = "model.language_model.layers"
PARTS: dict[str, tuple[str, dict[str, Any], int]] = {
    "patterns of names in the whole model": (
        "llava",
        {
            "target_modules": rf"{INSIDE}.*_proj",
            "rank_pattern": {f"^{INSIDE}.1.mlp.up_proj": 2},
            "alpha_pattern": {f"{INSIDE}.0.self_attn.q_proj": 5},
        },
        0,
    ),
    "other parts": (
        "qwen2_vl",
        {"target_modules": ["q_proj", "qkv", "fc1"], "modules_to_save": ["norm", "merger"]},
        2 + 6,
    ),
    "layers and rows that text does not use": ("mllama", {"target_modules": ["q_proj", "embed_tokens"]}, 2 + 2),
    "rows that were trained as a whole": (
        "mllama",
        {"target_modules": [f"{INSIDE}.0.self_attn.q_proj"], "modules_to_save": ["embed_tokens"]},
        0,
    ),
}
"""Wrapper, options, and number of modules and weights that are left out."""


@pytest.mark.parametrize("case", PARTS)
def test_the_text_network_of_a_wrapper(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wrapper, options, left = PARTS[case]
    monkeypatch.setitem(CASES, case, (lambda: test_wrappers.build(wrapper), options))
    model, batch = adapted(case, tmp_path), tokens(TRAINED) % 96
    torch.testing.assert_close(ours(tmp_path, batch), theirs(model, batch), rtol=1e-9, atol=1e-9)
    assert f"{left} adapters of other parts" in caplog.text or not left


def test_adapters_of_another_part_than_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, "images", (lambda: test_wrappers.build("qwen2_vl"), {"target_modules": ["fc1"]}))
    adapted("images", tmp_path)
    with pytest.raises(CheckpointError, match="no adapter for a weight of .*base;"):
        ours(tmp_path, tokens(TRAINED) % 96)


@pytest.mark.parametrize("part", ["base", "adapters"])
def test_the_class_without_a_head(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"target_modules": ["q_proj"], "modules_to_save": ["norm"]}
    monkeypatch.setitem(CASES, "inner", (lambda: llama(tie_word_embeddings=True), options))
    model, batch = adapted("inner", tmp_path), tokens(TRAINED) % 96
    path, own = {"base": ("base/model.safetensors", "model."), "adapters": (ADAPTERS, "base_model.model.model.")}[part]
    weights = {name.replace(own, own.removesuffix("model."), 1): w for name, w in load_file(tmp_path / path).items()}
    save_file(weights, tmp_path / path, {"format": "pt"})
    torch.testing.assert_close(ours(tmp_path, batch), theirs(model, batch), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_do_not_fit(name: str, tmp_path: Path) -> None:
    changes, message = REFUSED[name]
    adapted("rows of tokens" if not message else "attention", tmp_path)
    path = tmp_path / "adapters/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(CheckpointError, match=message or "trainable_token_indices: must list 3 of the 96 tokens"):
        load_model(tmp_path / "adapters", {"base_model": str(tmp_path / "base")})


MODULE = "base_model.model.model.layers.0.self_attn.q_proj"
DAMAGED: dict[str, tuple[str, Tensor | None, str]] = {
    "a missing matrix": (f"{MODULE}.lora_B.weight", None, r"peft cannot merge .*its file has no .*q_proj.lora_B"),
    "a matrix twice": (f"{MODULE[17:]}.lora_A.weight", torch.ones(4, 32), r"q_proj.lora_A.weight twice, as .* and"),
    "an adapter of a norm": ("base_model.model.model.norm.lora_A.weight", torch.ones(4, 32), "peft cannot merge"),
    "an embedding without rows": ("base_model.model.model.embed_tokens.weight", torch.tensor(1.0), "do not fit"),
}
"""Name of a weight in the file, its value or None to remove it, and the message."""


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files(case: str, tmp_path: Path) -> None:
    name, value, message = DAMAGED[case]
    adapted("attention", tmp_path)
    weights = load_file(tmp_path / ADAPTERS)
    if value is None:
        del weights[name]
    else:
        weights[name] = value
    save_file(weights, tmp_path / ADAPTERS)
    with pytest.raises(CheckpointError, match=message):
        ours(tmp_path, tokens(TRAINED) % 96)


def test_rows_and_an_adapter_of_the_tied_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"target_modules": ["lm_head"], "trainable_token_indices": [3, 90]}
    monkeypatch.setitem(CASES, "both", (lambda: llama(tie_word_embeddings=True), options))
    adapted("both", tmp_path)
    with pytest.raises(CheckpointError, match="rows of the embedding and an adapter"):
        ours(tmp_path, tokens(TRAINED) % 96)


def test_a_base_with_adapters_of_its_own(tmp_path: Path) -> None:
    adapted("attention", tmp_path)
    for path in (tmp_path / "adapters").iterdir():
        (tmp_path / "base" / path.name).write_bytes(path.read_bytes())
    with pytest.raises(CheckpointError, match="base_model: .*base: has PEFT adapters"):
        ours(tmp_path, tokens(TRAINED) % 96)
    open_checkpoint(tmp_path / "base", overrides={"base_model": str(tmp_path / "base")})


def test_settings_of_strangers_run_no_code(tmp_path: Path) -> None:
    """peft would import the module that `megatron_core` names, and transformers the class in `auto_mapping`."""
    model, batch = adapted("attention", tmp_path), tokens(TRAINED) % 96
    path = tmp_path / "adapters/adapter_config.json"
    (tmp_path / "stranger.py").write_text("raise SystemExit('ran')")
    foreign = {
        "megatron_core": "stranger",
        "auto_mapping": {"base_model_class": "Stranger", "parent_library": "stranger"},
        "base_model_name_or_path": "/etc",
        "loftq_config": {},
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | foreign))
    torch.testing.assert_close(ours(tmp_path, batch), theirs(model, batch), rtol=1e-9, atol=1e-9)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"megatron_config": {"hidden_size": 1}}))
    with pytest.raises(CheckpointError, match="megatron_config is not supported"):
        ours(tmp_path, batch)


def test_another_model_than_they_were_trained_on(tmp_path: Path) -> None:
    adapted("attention", tmp_path)
    with pytest.raises(CheckpointError, match="PEFT adapters, but not the model .*--base"):
        load_model(tmp_path / "adapters")
    with pytest.raises(CheckpointError, match="base_model: .* is not a Hugging Face folder"):
        load_model(tmp_path / "adapters", {"base_model": str(tmp_path)})
    gpt2().save_pretrained(tmp_path / "other")
    with pytest.raises(CheckpointError, match="adapter for .*layers.0.self_attn.k_proj.weight, .*other"):
        load_model(tmp_path / "adapters", {"base_model": str(tmp_path / "other")})
    llama(hidden_size=64).save_pretrained(tmp_path / "wide")
    with pytest.raises(CheckpointError, match="cannot merge the adapter of .*--base"):
        load_model(tmp_path / "adapters", {"base_model": str(tmp_path / "wide")})


def test_every_command_reads_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapted("attention", tmp_path)
    given, base = str(tmp_path / "adapters"), ["--base", str(tmp_path / "base")]
    assert cli.main(["import", given, str(tmp_path / "imported"), *base]) == 0
    assert cli.main(["export", "huggingface", given, str(tmp_path / "exported"), *base]) == 0
    expected = dict(open_checkpoint(given, overrides={"base_model": str(tmp_path / "base")}).weights())
    for place in ("imported", "exported"):
        found = dict(open_checkpoint(tmp_path / place).weights())
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name].to(found[name].dtype)) for name in found)
    capsys.readouterr()
    options = train.parser().parse_args([given, "train_iters=1", "train_batch_size=1", *base])
    config, _ = train.read_config(options)
    started = initial_model(config, "cpu").model.state_dict()
    assert all(torch.equal(started[name], weight.to(torch.float32)) for name, weight in expected.items())


def test_the_model_of_adapters_is_not_fetched_for_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`evaluate --checkpoint MODEL --checkpoint ADAPTERS --base hf://NAME` opens MODEL without the network."""
    llama().save_pretrained(tmp_path / "base")
    monkeypatch.setattr("megatron_coca.checkpoints.load.from_hub", pytest.fail)
    given = {"base_model": "hf://owner/name"}
    assert open_checkpoint(tmp_path / "base", overrides=given).folder == tmp_path / "base"
