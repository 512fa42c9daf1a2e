"""Families of models: tiny random models of transformers are read, run in every way, extended and written again.

A case is a class of transformers with odd sizes. In float64, the casts of transformers to float32 are replaced, so that
both sides compute in float64.
"""

import dataclasses
import inspect
import json
import re
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_coca import load_model
from megatron_coca.checkpoints import CheckpointError, export_check, load_checkpoint, weights
from megatron_coca.checkpoints.compare import comparable
from megatron_coca.checkpoints.exporting import export
from megatron_coca.checkpoints.huggingface.config_json import parse_config
from megatron_coca.checkpoints.importing import import_checkpoint
from megatron_coca.checkpoints.load import open_checkpoint
from megatron_coca.commands.evaluate import main as evaluate
from megatron_coca.commands.train import parser, read_config
from megatron_coca.config import ConfigError, load_config
from megatron_coca.model.generate import generate
from megatron_coca.training.checkpointing.initial_model import initial_model
from tests.checkpoint_files import beginning_tokenizer
from tests.parity import family_cases
from tests.parity.exported import random_checkpoint

TRAINED, LONG = 40, 100
SHAPE = {"vocab_size": 96, "hidden_size": 36, "num_hidden_layers": 3, "num_attention_heads": 6, "intermediate_size": 44}
SHAPE |= {"max_position_embeddings": TRAINED, "num_key_value_heads": 3, "pad_token_id": None}
SHAPE |= {"bos_token_id": None, "eos_token_id": None}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 500.0}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}
DYNAMIC = LINEAR | {"rope_type": "dynamic"}
BASE = {"rope_type": "default", "rope_theta": 300.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 500.0, "short_factor": [1.0, 1.5], "long_factor": [1.5, 4.0]}
LONGROPE |= {"original_max_position_embeddings": 16, "partial_rotary_factor": 0.67}
DROPLESS = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "n_embd": 36, "n_layer": 3, "n_head": 6}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox": ("GPTNeoX", {"rope_parameters": DYNAMIC | {"partial_rotary_factor": 0.67}}),
    "gpt_neox sequential, tied": (
        "GPTNeoX",
        {"use_parallel_residual": False, "tie_word_embeddings": True, "hidden_act": "gelu_new"}
        | {"rope_parameters": YARN | {"partial_rotary_factor": 1.0}, "attention_bias": False},
    ),
    "qwen2": ("Qwen2", {}),
    "qwen2 tied, windows": (
        "Qwen2",
        {
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 1,
            "rope_parameters": YARN,
        },
    ),
    "llama, free head width": ("Llama", {"head_dim": 10, "rope_parameters": LLAMA3}),
    "llama, scales of YaRN": ("Llama", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.4}}),
    "mistral": ("Mistral", {"sliding_window": 9, "head_dim": 8}),
    "mistral without a window": ("Mistral", {"sliding_window": None, "rope_parameters": DYNAMIC}),
    "qwen3": ("Qwen3", {"head_dim": 10, "rope_parameters": YARN}),
    "qwen3 tied, biases": ("Qwen3", {"head_dim": 6, "attention_bias": True, "tie_word_embeddings": True}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5, "rope_parameters": YARN}),
    "smollm3 windows, untied": (
        "SmolLM3",
        {
            "num_hidden_layers": 5,
            "tie_word_embeddings": False,
            "use_sliding_window": True,
            "sliding_window": 9,
            "no_rope_layer_interval": 2,
            "mlp_bias": True,
        },
    ),
    "smollm3, windows by a list": (
        "SmolLM3",
        {"sliding_window": 9, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    ),
    "ministral3, no temperature": (
        "Ministral3",
        {"head_dim": 10, "rope_parameters": YARN | {"llama_4_scaling_beta": 0.0, "mscale": 1.0, "mscale_all_dim": 0.5}},
    ),
    "ministral3": (
        "Ministral3",
        {"head_dim": 10, "sliding_window": 9, "rope_parameters": YARN | {"llama_4_scaling_beta": 0.3}},
    ),
    "ministral3 without an extension": (
        "Ministral3",
        {"rope_parameters": BASE | {"llama_4_scaling_beta": 0.2, "original_max_position_embeddings": 11}},
    ),
    "olmo2": ("Olmo2", {"rope_parameters": LINEAR}),
    "olmo2, scale of YaRN that is ignored": (
        "Olmo2",
        {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.0}},
    ),
    "olmo2 tied, biases": ("Olmo2", {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 6}),
    "olmo3": (
        "Olmo3",
        {
            "sliding_window": 9,
            "num_hidden_layers": 5,
            "rope_parameters": {"full_attention": YARN, "sliding_attention": BASE},
        },
    ),
    "phi3": ("Phi3", {"sliding_window": 11, "rope_parameters": BASE}),
    "phi3 longrope, tied, partly rotated": (
        "Phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16, "tie_word_embeddings": True},
    ),
    "gemma2": (
        "Gemma2",
        {"head_dim": 10, "query_pre_attn_scalar": 7, "sliding_window": 9, "hidden_activation": "gelu_pytorch_tanh"}
        | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma2 untied, uncapped": (
        "Gemma2",
        {"head_dim": 6, "attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": False},
    ),
    "gemma3": (
        "Gemma3Text",
        {
            "head_dim": 10,
            "sliding_window": 9,
            "num_hidden_layers": 7,
            "query_pre_attn_scalar": 7,
            "rope_parameters": {"full_attention": LINEAR, "sliding_attention": BASE},
        },
    ),
    "cohere2": ("Cohere2", {"sliding_window": 9, "num_hidden_layers": 5, "rope_parameters": BASE}),
    "cohere2 untied, biases": (
        "Cohere2",
        {"tie_word_embeddings": False, "attention_bias": True, "num_key_value_heads": 6},
    ),
    "cohere2 without rotation": ("Cohere2", {"layer_types": ["full_attention"] * 3, "rope_parameters": LINEAR}),
    "gpt2": ("GPT2", {"n_positions": LONG, "n_inner": 50} | DROPLESS),
    "gpt2 untied": ("GPT2", {"n_positions": LONG, "tie_word_embeddings": False} | DROPLESS),
    "mpt": ("Mpt", {"d_model": 40, "n_heads": 4, "n_layers": 3, "max_seq_len": LONG}),
    "mpt untied": (
        "Mpt",
        {"d_model": 40, "n_heads": 8, "n_layers": 2, "max_seq_len": LONG, "tie_word_embeddings": False}
        | {"attn_config": {"softmax_scale": 0.3}},
    ),
    "bloom": ("Bloom", {"hidden_size": 36, "n_head": 6, "n_layer": 3}),
    "falcon": ("Falcon", {"rope_parameters": BASE, "num_kv_heads": None, "ffn_hidden_size": 50}),
    "falcon sequential, ALiBi": (
        "Falcon",
        {
            "alibi": True,
            "parallel_attn": False,
            "multi_query": False,
            "bias": True,
            "hidden_size": 40,
            "num_kv_heads": 4,
        }
        | {"num_attention_heads": 4, "rope_parameters": LINEAR},
    ),
    "falcon grouped, untied": (
        "Falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "tie_word_embeddings": False, "rope_parameters": DYNAMIC},
    ),
    "falcon grouped, one norm": (
        "Falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 3, "num_ln_in_parallel_attn": 1},
    ),
    "bloom untied": ("Bloom", {"hidden_size": 40, "n_head": 4, "n_layer": 2, "tie_word_embeddings": False}),
}
EVERY = [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in family_cases.CASES)]
CASES |= family_cases.CASES


_SHAPE_NAMES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
OWN_NAMES = dict.fromkeys(("GPT2", "Mpt", "Bloom"), (*_SHAPE_NAMES, "intermediate_size", "num_key_value_heads"))
OWN_NAMES["Falcon"] = ("intermediate_size", "num_key_value_heads")
OWN_NAMES["GPTNeoX"] = ("num_key_value_heads",)
OWN_NAMES |= family_cases.OWN_NAMES
"""Names that a class does not have."""
FLOAT = torch.float32


@contextmanager
def in_float64() -> Iterator[None]:
    """Transformers in float64, where it would compute norms, rotations and softmax in float32."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(FLOAT)


def implementation(name: str) -> str:
    """Eager attention, which has soft-capping; but for Falcon it adds ALiBi to the scores and to the mask."""
    return "sdpa" if name.startswith("falcon") else "eager"


def build(name: str) -> Any:
    """A model with random weights, norms and biases included, in evaluation mode and the default dtype."""
    kind, changes = CASES[name]
    shape = {name: value for name, value in SHAPE.items() if name not in OWN_NAMES.get(kind, ())}
    config = getattr(transformers, f"{kind}Config")(**shape | changes)
    config._experts_implementation = "eager"  # the others have no float64
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation(name)).eval()
    with torch.no_grad():
        for parameter in (*model.parameters(), *layer_scalars(model)):
            parameter += 0.1 * torch.randn(parameter.shape)
    return model


def layer_scalars(model: Any) -> list[Tensor]:
    """Weights of Gemma 4, and of routers like DeepSeek 3's, that are no parameters."""
    ends = ("layer_scalar", "e_score_correction_bias")
    return [buffer for name, buffer in model.named_buffers() if name.endswith(ends)]


def tokens(length: int) -> Tensor:
    return torch.randint(96, (2, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("name", EVERY)
@torch.no_grad()
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """In float32 within and beyond the training length, decoded with a cache, with left padding, and in float64."""
    build(name).save_pretrained(tmp_path)
    ours = load_model(tmp_path)
    for length in (17, TRAINED, LONG):
        expected = build(name)(tokens(length)).logits
        assert expected.std() > 0.01
        torch.testing.assert_close(ours(tokens(length)), expected, rtol=1e-4, atol=1e-4)
    cache = ours.new_cache(length=LONG)
    parts = [ours(part, cache=cache) for part in tokens(LONG).split([90, 1, 3, 6], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-4, atol=1e-4)
    padded, documents = tokens(50), torch.ones(2, 50, dtype=torch.long)
    documents[0, :7] = 0
    theirs = build(name)
    places = {"position_ids": (documents.cumsum(1) - 1).clamp(min=0)}
    taken = places if "position_ids" in inspect.signature(theirs.forward).parameters else {}
    expected = theirs(padded, attention_mask=documents, **taken).logits
    found = ours(padded, documents=documents)
    torch.testing.assert_close(found[documents == 1], expected[documents == 1], rtol=1e-4, atol=1e-4)
    with in_float64():
        wide = build(name)
        expected = wide(tokens(LONG)).logits
        wide.save_pretrained(tmp_path / "wide")
    found = open_checkpoint(tmp_path / "wide").load(dtype=torch.float64).model(tokens(LONG))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("prompt", [5, 16, 17])
def test_phi3_passes_the_switch_of_longrope_as_its_class(
    prompt: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 16 tokens on with other factors: logits of every step in float64, and the tokens, with a cache."""
    ids, settings = tokens(prompt), {"max_new_tokens": 14, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    settings |= {"output_logits": True, "return_dict_in_generate": True}
    with in_float64():
        wide = build("phi3 longrope, tied, partly rotated")
        expected = wide.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        wide.save_pretrained(tmp_path)
    ours = open_checkpoint(tmp_path).load(dtype=torch.float64).model
    seen, logits = [], ours.logits
    monkeypatch.setattr(ours, "logits", lambda hidden: seen.append(logits(hidden)) or seen[-1])
    assert torch.equal(generate(ours, ids, 14), expected.sequences[:, prompt:])
    torch.testing.assert_close(torch.stack(seen), torch.stack(expected.logits), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", EVERY)
def test_the_way_back_is_the_same_bit_by_bit(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its logits are compared as those of a large model: by the layers that have every type, and some rows."""
    monkeypatch.setattr(export_check, "MEMORY", 1)
    monkeypatch.setattr(export_check, "ROWS", 80)
    theirs = build(name)
    theirs.save_pretrained(tmp_path / "source")
    done = export(tmp_path / "source", tmp_path / "back")
    assert done.model_type == theirs.config.model_type
    expected, found = (load_file(tmp_path / side / "model.safetensors") for side in ("source", "back"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    with torch.no_grad():
        before, after = (
            AutoModelForCausalLM.from_pretrained(tmp_path / side, attn_implementation=implementation(name)).eval()
            for side in ("source", "back")
        )
        assert torch.equal(after(tokens(LONG)).logits, before(tokens(LONG)).logits)


class CountedFile:
    """A file of safetensors that counts the weights read from it that are alive while another is read."""

    alive: list[weakref.ref[Tensor]]
    most: int

    def __init__(self, file: Any) -> None:
        self.file = file

    def __enter__(self) -> "CountedFile":
        self.file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.file.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def get_tensor(self, name: str) -> Tensor:
        found = self.file.get_tensor(name)
        CountedFile.alive = [each for each in self.alive if each() is not None]
        CountedFile.most = max(self.most, len(self.alive))
        self.alive.append(weakref.ref(found))
        return found


OLDER: dict[str, dict[str, Any]] = {
    "gpt_neox sequential, tied": {
        "rotary_emb_base": 500.0,
        "rotary_pct": 1.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
        | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True},
    },
    "llama, free head width": {"rope_theta": 500.0, "rope_scaling.rope_type": "llama3"},
    "mistral": {"rope_theta": 10000.0, "rope_scaling": None},
    "smollm3": {"rope_theta": 500.0, "rope_scaling.factor": 4.0},
    "olmo2": {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "olmo2, scale of YaRN that is ignored": {"rope_scaling.rope_type": "yarn", "tried": False},
    "olmo3": {"rope_theta": None, "rope_scaling": None, "tried": False},
    "phi3 longrope, tied, partly rotated": {
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.67,
        "original_max_position_embeddings": 16,
        "max_position_embeddings": 40,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [1.5, 4.0]},
    },
    "gemma3": {
        "rope_theta": 500.0,
        "rope_local_base_freq": 300.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "ministral3": {"rope_scaling": None, "tried": False},
    "gpt2": {"rope_theta": None, "rope_scaling": None},
}
"""Keys that transformers 4 reads; None: absent or null. They were tried by older_transformers.py."""


@pytest.mark.parametrize("name", OLDER)
def test_the_rotation_in_the_spelling_of_transformers_4(name: str, tmp_path: Path) -> None:
    build(name).save_pretrained(tmp_path / "source")
    folder = export(tmp_path / "source", tmp_path / "back").folder
    written, expected = json.loads((folder / "config.json").read_text()), dict(OLDER[name])
    tried = expected.pop("tried", True)
    assert ("5.23.0 and 4.57.6" in (folder / "README.md").read_text()) == tried
    for key, value in expected.items():
        section, _, option = key.partition(".")
        assert (written[section][option] if option else written.get(key)) == value, key


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "deepseek_v3", "ernie4_5_moe", "llama4_text"])
def test_a_folder_is_read_one_matrix_at_a_time(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the weight that was read last, at most the two others that are packed with it, of however many experts."""
    build(name).save_pretrained(tmp_path / "source")
    opened = weights._opened
    monkeypatch.setattr(weights, "_opened", lambda path: CountedFile(opened(path)))
    for use in (load_model, lambda folder: import_checkpoint(folder, tmp_path / "imported")):
        CountedFile.alive, CountedFile.most = [], 0
        use(tmp_path / "source")
        assert len(load_file(tmp_path / "source" / "model.safetensors")) > 30 and 0 < CountedFile.most <= 3


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("deepseek_v3", "kv_lora_rank", 7),
        ("deepseek_v3", "qk_nope_head_dim", 5),
        ("deepseek_v2", "qk_rope_head_dim", 10),
        ("codegen", "n_head", 5),
        ("bloom", "n_head", 5),
        ("cohere2", "num_attention_heads", 5),
        ("granitemoe", "num_attention_heads", 5),
        ("gpt_oss", "head_dim", 6),
    ],
)
def test_weights_that_do_not_fit_config_json_are_an_error(name: str, key: str, value: int, tmp_path: Path) -> None:
    build(name).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises((CheckpointError, ConfigError), match="shape|divi|head_dim|must be"):
        load_model(tmp_path)


COCA = "configs/finetune/coca.yml"


@pytest.mark.parametrize(
    "name",
    [
        *("qwen3", "gemma3", "smollm3", "cohere2", "qwen2_moe, some dense layers, windows"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("apertus", "phi", "olmo", "granite", "gemma4_text")),
    ],
)
def test_training_takes_the_network_from_the_folder(name: str, tmp_path: Path) -> None:
    """The staged files for CoCA have no shape; layers without rotation keep theirs."""
    folder = tmp_path / "source"
    build(name).save_pretrained(folder)
    trained = load_checkpoint(folder)
    options = parser().parse_args([str(folder), COCA, "save=runs/none", "zero_optimization=null"])
    config, _ = read_config(options)
    assert config.checkpoint.load == str(folder) and config.checkpoint.finetune
    forms = {key: kind.pos_emb for key, kind in config.layer_types.items()}
    before = {key: kind.pos_emb for key, kind in trained.config.layer_types.items()}
    assert forms == {key: "none" if form == "none" else "coca" for key, form in before.items()}
    begun, expected = initial_model(config, "cpu").model.state_dict(), trained.model.state_dict()
    assert all(torch.equal(begun[key], expected[key]) for key in expected)
    trainable = [stage.config.optimizer.trainable for stage in config.run_stages()]
    assert [None if each is None else list(each) for each in trainable] == [["key"], ["query", "key", "value"], None]


@pytest.mark.parametrize("name", ["minicpm3", "deepseek_v3"])
def test_latents_are_trained_with_the_values(name: str, tmp_path: Path) -> None:
    build(name).save_pretrained(tmp_path)
    given = [str(tmp_path), COCA, "save=runs/none", "zero_optimization=null"]
    with pytest.raises(ConfigError, match="one matrix computes keys and values"):
        read_config(parser().parse_args(given))[0].run_stages()
    config, _ = read_config(parser().parse_args([*given[:2], "configs/finetune/latent.yml", *given[2:]]))
    trainable = [stage.config.optimizer.trainable for stage in config.run_stages()]
    assert trainable == [["key", "value"], ["query", "key", "value"], None]
    begun, expected = initial_model(config, "cpu").model.state_dict(), load_model(tmp_path).state_dict()
    assert config.position.pos_emb == "coca" and all(torch.equal(begun[key], expected[key]) for key in expected)


@pytest.mark.parametrize("data", [{}, {"vocab_size": 90}])
def test_training_keeps_the_rows_of_the_folder(data: dict[str, int], tmp_path: Path) -> None:
    """Prepared data name the ids of their tokenizer, fewer than the rows of most published embeddings."""
    folder = tmp_path / "source"
    build("qwen3").save_pretrained(folder)
    tokenizer = beginning_tokenizer(folder, ids=90)
    (tmp_path / "data.yml").write_text(json.dumps(data))
    config, _ = read_config(parser().parse_args([str(folder), COCA, str(tmp_path / "data.yml")]))
    assert (config.model.vocab_size, config.model.padded_vocab_size) == (90, 96)
    assert initial_model(config, "cpu", tokenizer).model.vocab_size == 96


MODIFIED = {name: {"pos_emb": "coca"} for name in ("olmo3", "gemma2", "gemma3", "cohere2", "ministral3", "falcon")}
MODIFIED["falcon sequential, ALiBi"] = {"logit_scaling": "log_n"}
BY_SWITCH = ("apertus", "olmo", "granite", "phi norms of heads", "nemotron", "cohere untied, norms of heads", "gptj")
NEWER = {name: {"pos_emb": "coca"} for name in BY_SWITCH}
NEWER |= {name: {"sliding_window_width": 5} for name in ("opt", "xglm")}
NEWER |= {name: {"rope_scaling": {"rope_type": "ntk", "factor": 4.0}} for name in ("hunyuan", "nanochat tied, biases")}
MODIFIED |= NEWER


@torch.no_grad()
@pytest.mark.parametrize(
    "name", [name if name not in NEWER else pytest.param(name, marks=pytest.mark.slow) for name in MODIFIED]
)
def test_other_positions_are_exported_in_the_block_of_the_family(name: str, tmp_path: Path) -> None:
    build(name).save_pretrained(tmp_path / "source")
    done = export(tmp_path / "source", tmp_path / "exported", MODIFIED[name])
    theirs = AutoModelForCausalLM.from_pretrained(done.folder, trust_remote_code=True).eval()
    ours, ids = load_model(tmp_path / "source", MODIFIED[name]), tokens(LONG)
    assert done.remote and (ours(ids) - load_model(tmp_path / "source")(ids)).abs().max() > 1e-4
    torch.testing.assert_close(theirs(ids).logits, ours(ids), rtol=0, atol=1e-5)


def test_a_wrong_shape_is_told_the_right_number(tmp_path: Path) -> None:
    build("qwen3").save_pretrained(tmp_path / "source")
    config, _ = read_config(parser().parse_args([str(tmp_path / "source"), COCA, "intermediate_size=96"]))
    with pytest.raises(CheckpointError, match=r"intermediate_size \(saved 132, now a width of 32"):
        initial_model(config, "cpu")


EXTENDED = {
    "another": (["rope_scaling={rope_type: yarn, factor: 4}"], TRAINED, "is replaced by yarn (from a length of 40)"),
    "another option": (["rope_scaling.factor=8.0"], 16, "is replaced by llama3 (from a length of 16)"),
    "the same": (["rope_scaling={rope_type: llama3, factor: 4}"], 16, None),
    "a map": (["relative_positions.type=rerope"], 16, "is used together with relative_positions rerope"),
    "none": (["rope_scaling=null"], TRAINED, "is replaced by default"),
    "nothing": ([], 16, None),
}
"""Overrides of a model with llama3 of length 16, trained at 40; the length of the extension in use; what is said."""


@pytest.mark.parametrize("case", EXTENDED)
def test_what_becomes_of_an_extension_is_said_with_its_length(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    overrides, length, message = EXTENDED[case]
    build("llama, free head width").save_pretrained(tmp_path)
    loaded = load_checkpoint(tmp_path, overrides)
    assert loaded.config.position.original_length(TRAINED) == length
    said = f"{tmp_path}: the model's own rope_scaling llama3 (from a length of 16) {message}"
    heard = [each.getMessage() for each in caplog.records if each.name == "megatron_coca.checkpoints.opened"]
    assert heard == ([said] if message is not None else [])


@pytest.mark.parametrize("name", ["olmo3", "gemma3"])
@pytest.mark.parametrize("own", [{"rope_type": "default"}, {"rope_type": "linear", "factor": 2.0}])
def test_an_extension_of_ours_leaves_layers_with_a_window(name: str, own: dict[str, Any], tmp_path: Path) -> None:
    """Of classes whose layers have sections by type, whether the model has an extension or none."""
    build(name).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    values["rope_parameters"] = {"full_attention": own | {"rope_theta": 300.0}, "sliding_attention": BASE}
    (tmp_path / "config.json").write_text(json.dumps(values))
    kinds = open_checkpoint(tmp_path).configure(["rope_scaling={rope_type: yarn, factor: 4}"]).layer_types
    assert {key: kind.extension.name for key, kind in kinds.items()} == {"sliding": "default", "global": "yarn"}


@torch.no_grad()
def test_a_length_of_training_beside_that_of_the_extension(tmp_path: Path) -> None:
    """Stock `dynamic` counts from max_position_embeddings, so an export has the training length as another key."""
    build("olmo2").save_pretrained(tmp_path / "source")
    dynamic = {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 16}}
    done = export(tmp_path / "source", tmp_path / "exported", dynamic)
    read = open_checkpoint(done.folder).trained
    assert done.model_type == "olmo2" and json.loads((done.folder / "config.json").read_text())["training_length"] == 40
    assert (read.model.seq_length, read.position.original_length(TRAINED)) == (TRAINED, 16)
    theirs = AutoModelForCausalLM.from_pretrained(done.folder).eval()
    ours = load_model(tmp_path / "source", dynamic)
    torch.testing.assert_close(ours(tokens(LONG)), theirs(tokens(LONG)).logits, rtol=1e-4, atol=1e-4)


def test_a_temperature_that_the_class_would_not_read(tmp_path: Path) -> None:
    build("qwen3").save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    values["rope_parameters"]["llama_4_scaling_beta"] = 0.1
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="llama_4_scaling_beta: Qwen3ForCausalLM ignores this key"):
        load_model(tmp_path)


def test_rotation_that_only_the_class_knows(tmp_path: Path) -> None:
    build("ministral3").save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    del values["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="rope_parameters: missing, so Ministral3ForCausalLM"):
        load_model(tmp_path)


UNREAD = {
    "a key that is not known": ({"attention_chunk_size": 3}, "attention_chunk_size: not supported"),
    "a value of another model": (
        {"use_bidirectional_attention": True},
        "use_bidirectional_attention: True is not supp",
    ),
    "a type of layers": ({"layer_types": ["linear_attention"] * 7}, "layer_types: 'linear_attention' is not supported"),
    "an extension outside of the sections": (
        {"rope_parameters": YARN},
        "rope_parameters has factor, original",
    ),
    "a ramp that its class truncates": (
        {"rope_parameters": {"full_attention": YARN | {"truncate": False}}},
        "rope_parameters.full_attention.truncate: .* ignores",
    ),
    "two extensions": (
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 500.0},
        "rope_scaling .* contradicts rope_parameters .*factor",
    ),
    "two bases of layers with a window": (
        {"rope_local_base_freq": 77.0},
        "rope_local_base_freq 77.0 contradicts rope_parameters.sliding_attention.rope_theta 300.0",
    ),
    "a length that is no number": ({"training_length": "long"}, r"training_length \(here seq_length\): "),
}


@pytest.mark.parametrize("name", ["gemma3", "qwen3"])
@torch.no_grad()
def test_the_card_extends_the_model_as_its_class_reads_it(name: str, tmp_path: Path) -> None:
    build(name).save_pretrained(tmp_path / "source")
    folder = export(tmp_path / "source", tmp_path / "exported").folder
    _, example = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    found: dict[str, Any] = {}
    exec(example.replace('"exported"', f'"{folder}"'), found)
    ours = load_model(folder, {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}})
    plain, extended = load_model(folder)(tokens(LONG)), ours(tokens(LONG))
    assert (extended - plain).abs().max() > 1e-3
    torch.testing.assert_close(found["model"].eval()(tokens(LONG)).logits, extended, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", UNREAD)
def test_an_unknown_key_that_changes_the_model_is_an_error(case: str, tmp_path: Path) -> None:
    changes, message = UNREAD[case]
    build("gemma3").save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | changes))
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path)


BY_SHAPE = {"num_key_value_heads", "intermediate_size", "num_kv_heads", "ffn_hidden_size", "n_inner", "ffn_dim"}
BY_SHAPE |= {"shared_intermediate_size", "dff"}
"""Keys whose defaults are numbers of one size of model: the shapes of the weights tell."""


@pytest.mark.parametrize("name", EVERY)
def test_an_absent_key_has_the_default_of_the_class(name: str) -> None:
    """Or it is an error, as a width is."""
    kind, changes = CASES[name]
    shape = {key: value for key, value in SHAPE.items() if key not in OWN_NAMES.get(kind, ())}
    written = getattr(transformers, f"{kind}Config")(**shape | changes)
    values = written.to_dict()
    values |= {"max_position_embeddings": 8192} if "max_position_embeddings" in values else {}
    compared = 0
    for default in dataclasses.fields(written):
        if default.name not in values.keys() - BY_SHAPE or default.default is dataclasses.MISSING:
            continue
        try:
            found = parse_config({key: value for key, value in values.items() if key != default.name}, Path("x"))
        except CheckpointError:
            continue
        expected = parse_config(values | {default.name: default.default}, Path("x"))
        assert comparable(found) == comparable(expected), default.name
        compared += 1
    assert compared > 10


LENGTH = {"original_max_position_embeddings": 400}
IGNORED: dict[str, dict[str, Any]] = {
    "olmo3": LENGTH,  # sections by type of layers have their own
    "ministral3 without an extension": LENGTH,  # and so has a temperature
    "gemma2": {"sliding_window_size": 3, "hidden_act": "relu"},
    "gemma3": {"attn_logit_softcapping": 0.1, "mystery": 3, "_mystery": 3, "use_sdpa": True},
    "gpt2": {"n_special": 3, "predict_special_tokens": False, "n_head": 3, "num_attention_heads": 6}
    | {"num_key_value_heads": 1},
    "bloom": {"n_head": 3, "num_attention_heads": 6},
    "cohere2": {"_sliding_window_pattern": 2, "sliding_window_pattern": 2},
}
"""Keys that transformers does not read, and its names for all classes, which it reads before those of the class."""


@pytest.mark.parametrize("name", IGNORED)
@torch.no_grad()
def test_keys_that_are_not_read_by_either_side(name: str, tmp_path: Path) -> None:
    build(name).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | IGNORED[name]))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    torch.testing.assert_close(load_model(tmp_path)(tokens(LONG)), theirs(tokens(LONG)).logits, rtol=1e-4, atol=1e-4)


LINEAR_ONLY = {"rope_type": "linear", "factor": 4.0}
SPELLED: dict[str, tuple[str, dict[str, Any]]] = {
    "bases beside the sections": (
        "gemma3",
        {"rope_parameters": {"full_attention": LINEAR_ONLY, "sliding_attention": {"rope_type": "default"}}}
        | {"rope_theta": 500.0, "rope_local_base_freq": 300.0},
    ),
    "no base at all": ("gemma3", {"rope_parameters": {"full_attention": LINEAR_ONLY}}),
    "the spelling of transformers 4": (
        "gemma3",
        {"rope_parameters": None, "rope_scaling": LINEAR_ONLY, "rope_theta": 500.0, "rope_local_base_freq": 300.0},
    ),
    "one base of two sections": (
        "olmo3",
        {"rope_theta": 300.0, "rope_parameters": {"full_attention": {"rope_type": "default"}}},
    ),
    "a pattern": ("gemma3", {"layer_types": None, "sliding_window_pattern": 3}),
    "a pattern of another name": ("gemma3", {"layer_types": None, "_sliding_window_pattern": 3}),
    "a pattern of Cohere": ("cohere2", {"layer_types": None, "sliding_window_pattern": 2}),
    "a length in the section alone": (
        "phi3 longrope, tied, partly rotated",
        {"original_max_position_embeddings": None, "max_position_embeddings": 8192},
    ),
}
"""A model, and keys of config.json in places where its class looks for them, too; None: absent."""


@pytest.mark.parametrize("case", SPELLED)
@torch.no_grad()
def test_a_key_is_read_where_its_class_reads_it(case: str, tmp_path: Path) -> None:
    name, spelled = SPELLED[case]
    build(name).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text()) | spelled
    (tmp_path / "config.json").write_text(
        json.dumps({key: value for key, value in values.items() if spelled.get(key, 0) is not None})
    )
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    torch.testing.assert_close(load_model(tmp_path)(tokens(LONG)), theirs(tokens(LONG)).logits, rtol=1e-4, atol=1e-4)


def test_a_wrong_number_of_heads_in_packed_weights(tmp_path: Path) -> None:
    build("falcon").save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"multi_query": False, "num_kv_heads": 6}))
    message = r"h\.0\..*query_key_value\.weight must have shape \[108, 36\]"
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path)


def test_a_width_that_cannot_be_rotated_is_named_as_in_the_file(tmp_path: Path) -> None:
    build("qwen3").save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"head_dim": 7}))
    with pytest.raises(CheckpointError, match=r"partial_rotary_factor \(here rotary_pct\): 1.0 of 7"):
        load_model(tmp_path)


def test_a_folder_without_the_prefix_of_the_class_with_a_head(tmp_path: Path) -> None:
    """GPT-2's published weights have no `transformer.` before their names."""
    build("gpt2").save_pretrained(tmp_path / "whole")
    build("gpt2").transformer.save_pretrained(tmp_path / "base")
    with torch.no_grad():
        whole, base = (load_model(tmp_path / name)(tokens(17)) for name in ("whole", "base"))
    assert torch.equal(whole, base)


def test_names_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="download Qwen/Qwen3-0.6B.*models/Qwen3-0.6B"):
        load_model("Qwen/Qwen3-0.6B")
    with pytest.raises(CheckpointError, match="give its whole name, hf://OWNER/gpt2"):
        load_model("gpt2")
    build("qwen3").save_pretrained(tmp_path / "cache")
    asked = []

    def snapshot(name: str, **patterns: list[str]) -> str:
        asked.append(name)
        if name == "none/such":
            raise OSError("offline")
        return str(tmp_path / "cache")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert load_model("hf://Qwen/Qwen3-0.6B").vocab_size == 96 and asked == ["Qwen/Qwen3-0.6B"]
    with pytest.raises(CheckpointError, match="hf://none/such: cannot be downloaded .offline"):
        load_model("hf://none/such")


SMALL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 32, "pos_emb": "rotary"}
BLOCK_KEYS = {
    *("norm", "rms_norm_epsilon", "norm_position", "zero_centered_norms", "qk_norm", "activation", "expansion_factor"),
    *("mlp_multiple_of", "use_bias_in_attn_linear", "use_bias_in_mlp", "use_bias_in_norms", "gpt_j_residual"),
}
WRITTEN = {"neox": "gpt_neox", "llama": "llama", "qwen3": "qwen3", "olmo2": "olmo2", "gemma3": "gemma3_text"}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_model_of_ours_is_written_as_the_class_that_has_its_block(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    block = load_config([f"configs/model/{name}.yml"], SMALL).flat()
    keys = {key: value for key, value in block.items() if key in BLOCK_KEYS}
    keys |= {"embedding_scale": 32.0**0.5} if name == "gemma3" else {}  # of this width
    saved = random_checkpoint(tmp_path / "run", **keys)
    done = export(saved, tmp_path / "exported")
    assert done.model_type == WRITTEN[name] and not done.remote
    theirs = AutoModelForCausalLM.from_pretrained(done.folder, attn_implementation="eager", dtype=FLOAT).eval()
    with torch.no_grad():
        torch.testing.assert_close(load_model(saved)(tokens(LONG)), theirs(tokens(LONG)).logits, rtol=1e-4, atol=1e-4)
    if name == "qwen3":
        (tmp_path / "text.txt").write_text("a small boat lay near its shore until morning came over the hills. " * 3)
        command = ["perplexity", "--checkpoint", str(done.folder), "--data", str(tmp_path / "text.txt")]
        command += ["--windows", "32,96", "--stride", "16", "--device", "cpu", "--output", str(tmp_path / "results")]
        variants = ("configs/extend/yarn.yml", "configs/extend/rerope.yml", "configs/extend/dynamic_ntk.yml")
        for file in variants:
            command += ["--variant", Path(file).stem, file]
        assert evaluate(command) == 0
        shown = capsys.readouterr().out
        assert all(Path(file).stem in shown for file in variants)


PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "one base": ("qwen2", {"rope_theta": 10000.0, "use_mrope": False}),
    "a window without use": (
        "qwen2",
        {"rope_theta": 10000.0, "layer_types": None}
        | {"sliding_window": 7, "use_sliding_window": False, "max_window_layers": 1},
    ),
    "two bases": (
        "gemma3",
        {"rope_theta": 500.0, "rope_local_base_freq": 300.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
        | {"sliding_window_pattern": 6, "layer_types": None, "cache_implementation": "hybrid"},
    ),
    "longrope by its first name": (
        "phi3 longrope, tied, partly rotated",
        {"rope_theta": 500.0, "partial_rotary_factor": 0.67, "attention_bias": False}
        | {"rope_scaling": {"type": "su", "short_factor": [1.0, 1.5], "long_factor": [1.5, 4.0]}},
    ),
    "width by another name": ("bloom", {"n_embed": 36, "hidden_size": None, "offset_alibi": 100, "seq_length": 2048}),
    "numbers by other names": ("bloom", {"num_attention_heads": 6, "num_hidden_layers": 3, "n_head": None}),
    "of SmolLM 2": (
        "llama, free head width",
        {
            "is_llama_config": True,
            "rope_interleaved": False,
            "transformers.js_config": {"dtype": "q4"},
            "unsloth_fixed": True,
        }
        | {"rope_scaling": LLAMA3},
    ),
}
"""A model, and the keys of config.json as its authors published them."""


@pytest.mark.parametrize("case", PUBLISHED)
def test_published_spellings_are_the_same_model(case: str, tmp_path: Path) -> None:
    name, spelled = PUBLISHED[case]
    build(name).save_pretrained(tmp_path)
    before = load_checkpoint(tmp_path).config
    values = json.loads((tmp_path / "config.json").read_text())
    values.pop("rope_parameters", None)
    (tmp_path / "config.json").write_text(json.dumps(values | spelled))
    assert comparable(load_checkpoint(tmp_path).config) == comparable(before)
