"""GGUF files: optional keys, layouts of weights, and tokenizers that transformers does not read; hostile headers."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from megatron_coca import load_model
from megatron_coca.checkpoints import CheckpointError, open_checkpoint
from megatron_coca.checkpoints.huggingface.config_json import parse_config
from megatron_coca.checkpoints.huggingface.gguf import header
from megatron_coca.checkpoints.huggingface.gguf.gguf_file import GgufFile
from megatron_coca.commands import inspect
from tests.parity.families.test_quantized_folders import byte_symbols, in_pairs, llama, write_gguf

gguf = pytest.importorskip("gguf")
HEADS, WIDTH, LAYERS = 4, 64, 2
SHAPE: dict[str, Any] = {"vocab_size": 258, "pad_token_id": 5, "bos_token_id": 5, "eos_token_id": 5}
NAMED: dict[str, Any] = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
FIELDS: dict[str, Any] = {"context_length": 64, "block_count": LAYERS, "embedding_length": WIDTH}
FIELDS |= {"feed_forward_length": 96, "attention.head_count": HEADS}
RMS, NORM = {"attention.layer_norm_rms_epsilon": 1e-6}, {"attention.layer_norm_epsilon": 1e-5}
Layout = Callable[[str, np.ndarray], np.ndarray]


def write(path: Path, architecture: str, fields: dict[str, Any], tokenizer: dict[str, Any] | None = None) -> Any:
    """Return a writer with the fields of a model and of a byte-level tokenizer of 258 tokens."""
    writer = gguf.GGUFWriter(path, architecture)
    keys = {f"{architecture}.{name}": value for name, value in fields.items()}
    keys |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.eos_token_id": 257}
    for name, value in (keys | (tokenizer or {})).items():
        kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        if value is not None:
            kinds[type(value)](name, value)
    return writer


def finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_bytes(writer: Any) -> None:
    writer.add_token_list([*byte_symbols(), "12", "<|endoftext|>"])
    writer.add_token_types([1] * 257 + [3])
    writer.add_token_merges(["1 2"])


def transposed(name: str, values: np.ndarray) -> np.ndarray:
    """GPT-2's class has transposed matrices."""
    return values.T if values.ndim == 2 and ("c_attn" in name or "c_proj" in name or "c_fc" in name) else values


def ungrouped(name: str, values: np.ndarray) -> np.ndarray:
    """All queries, all keys, all values of Falcon with two key heads."""
    if "query_key_value" not in name:
        return values
    grouped = values.reshape(2, HEADS // 2 + 2, WIDTH // HEADS, WIDTH)
    parts = grouped[:, :-2], grouped[:, -2:-1], grouped[:, -1:]
    return np.concatenate([part.reshape(-1, WIDTH) for part in parts])


def rotated(name: str, values: np.ndarray) -> np.ndarray:
    """llama.cpp rotates neighbouring features of LLaMA."""
    if "q_proj" not in name and "k_proj" not in name:
        return values
    return in_pairs(values.reshape(len(values), -1), HEADS).reshape(values.shape)


KINDS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], Layout]] = {
    "llama without key heads": ("llama", "Llama", NAMED | {"intermediate_size": 96}, RMS, rotated),
    "llama with biases": (
        "llama",
        "Llama",
        NAMED | {"intermediate_size": 96, "attention_bias": True, "mlp_bias": True},
        RMS | {"attention.head_count_kv": HEADS},
        rotated,
    ),
    "gpt2": (
        "gpt2",
        "GPT2",
        {"n_embd": WIDTH, "n_head": HEADS, "n_layer": LAYERS, "n_positions": 64, "n_inner": 96},
        NORM,
        transposed,
    ),
    "falcon with two key heads": (
        "falcon",
        "Falcon",
        NAMED | {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 96},
        NORM | {"attention.head_count_kv": 2},
        ungrouped,
    ),
    "falcon with one key head": (
        "falcon",
        "Falcon",
        NAMED | {"multi_query": True, "ffn_hidden_size": 96},
        NORM | {"attention.head_count_kv": 1},
        lambda _, values: values,
    ),
    "qwen3 without the width of heads": (
        "qwen3",
        "Qwen3",
        NAMED | {"intermediate_size": 96, "num_key_value_heads": HEADS, "head_dim": WIDTH // HEADS},
        RMS,
        lambda _, values: values,
    ),
    "stablelm without a number of rotated features": (
        "stablelm",
        "StableLm",
        NAMED | {"intermediate_size": 96, "num_key_value_heads": HEADS, "partial_rotary_factor": 1.0},
        NORM,
        lambda _, values: values,
    ),
    "llama with an extension by 1": (
        "llama",
        "Llama",
        NAMED | {"intermediate_size": 96},
        RMS | {"rope.scaling.type": "linear", "rope.scaling.factor": 1.0, "rope.dimension_count": WIDTH // HEADS},
        rotated,
    ),
    "qwen2 without key heads": (
        "qwen2",
        "Qwen2",
        NAMED | {"intermediate_size": 96, "num_key_value_heads": HEADS},
        RMS,
        lambda _, values: values,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_file_has_the_logits_of_the_model(kind: str, tmp_path: Path) -> None:
    architecture, name, changes, fields, layout = KINDS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SHAPE | changes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        parameter += 0.1 * torch.randn(parameter.shape)
    writer = write(tmp_path / "a.gguf", architecture, FIELDS | fields)
    add_bytes(writer)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), LAYERS)
    for key, weight in model.state_dict().items():
        if not (config.tie_word_embeddings and key == "lm_head.weight"):
            values = np.ascontiguousarray(layout(key, weight.numpy()))
            writer.add_tensor(names.get_name(key, (".weight", ".bias")), values)
    finish(writer)
    tokens = torch.randint(0, 258, (1, 40), generator=torch.Generator().manual_seed(1))
    found = load_model(tmp_path).double()(tokens)
    torch.testing.assert_close(found, model.double()(tokens).logits, rtol=1e-5, atol=1e-5)  # cos and sin in float32


def small_file(folder: Path, architecture: str = "llama", **fields: Any) -> GgufFile:
    """Write a file with an embedding and few layers of norms. A field that is None is left out."""
    writer = write(folder / "a.gguf", architecture, FIELDS | (RMS if architecture != "stablelm" else NORM) | fields)
    add_bytes(writer)
    for number in range(LAYERS):
        writer.add_tensor(f"blk.{number}.attn_norm.weight", np.ones(WIDTH, np.float32))
    writer.add_tensor("token_embd.weight", np.ones((258, WIDTH), np.float32))
    finish(writer)
    return GgufFile(folder / "a.gguf")


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        *(("llama", name) for name in (*FIELDS, *RMS)),
        ("stablelm", "attention.layer_norm_epsilon"),
        ("gemma3", "attention.sliding_window"),
    ],
)
def test_a_missing_key_without_a_default_is_named(architecture: str, name: str, tmp_path: Path) -> None:
    """transformers would take the number of heads, the epsilon or the window of some other model."""
    with pytest.raises(CheckpointError, match=rf"a\.gguf: {architecture}\.{name}: missing, and it has no default; put"):
        small_file(tmp_path, architecture, **{name: None}).settings()


def test_defaults_of_llama_cpp(tmp_path: Path) -> None:
    """Also where the class of transformers has another default: a base of 1,000,000 and heads of 256 features."""
    found = small_file(tmp_path, "gemma3", **{"attention.sliding_window": 16}).settings()
    assert (found["rope_theta"], found["head_dim"], found["vocab_size"]) == (10000.0, WIDTH // HEADS, 258)
    model = parse_config(small_file(tmp_path, "gemma2").settings(), tmp_path / "a.gguf")
    assert {each.sliding_window_width for each in model.layer_types.values()} == {4095, None}  # before the token
    assert (model.model.attn_logit_softcapping, model.model.final_logit_softcapping) == (50.0, 30.0)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"rope.scaling.factor": 4.0}, "factor"),
        ({"rope.scaling.type": "yarn"}, "type"),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, "type"),
        ({"rope.scaling.attn_factor": 1.5}, "attn_factor"),
    ],
)
def test_extensions_are_named(fields: dict[str, Any], name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"llama\.rope\.scaling\.{name}: a frequency extension"):
        small_file(tmp_path, **fields).settings()
    small_file(tmp_path, **{"rope.scaling.type": "linear", "rope.scaling.original_context_length": 64}).settings()


def test_a_file_is_described_as_a_folder_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = llama()
    write_gguf(tmp_path / "a.gguf", model)
    model.save_pretrained(tmp_path / "folder")
    size = sum(weight.numel() for weight in model.state_dict().values())
    for name, layout, stored in (
        ("a.gguf", "GGUF file", "Q8_0 (21), F32 (9)"),
        ("folder", "Hugging Face folder", "float32 (21)"),
    ):
        assert inspect.main(["checkpoint", str(tmp_path / name), "--json", str(tmp_path / "facts.json")]) == 0
        text = capsys.readouterr().out
        assert f"{tmp_path / name}: {layout}, weights fit the configuration" in text
        assert f"  parameters: {size:,}\n" in text and "  pos_emb: rotary\n" in text
        assert sorted(stored.split(", ")) == sorted(text.partition("stored as: ")[2].splitlines()[0].split(", "))
        (facts,) = json.loads((tmp_path / "facts.json").read_text())
        assert facts["layout"] == layout and facts["keys"]["num_kv_heads"] == 2 and facts["damage"] is None
    assert "tokenizer: no tokenizer is used" in text
    content = (tmp_path / "a.gguf").read_bytes()
    (tmp_path / "a.gguf").write_bytes(content[:-1000])
    with pytest.raises(CheckpointError, match=r"a\.gguf: cannot be read as GGUF"):
        inspect.main(["checkpoint", str(tmp_path / "a.gguf")])


# Tokenizers -------------------------------------------------------------------------------------------------------


def opened(folder: Path, tokenizer: dict[str, Any], fields: dict[str, Any] | None = None) -> Any:
    """Open a small LLaMA with this tokenizer."""
    torch.manual_seed(0)
    writer = write(folder / "a.gguf", "llama", FIELDS | RMS | {"block_count": 1} | (fields or {}), tokenizer)
    if tokenizer.get("tokenizer.ggml.model") == "llama":
        pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "\u2581a"]
        writer.add_token_list(pieces)
        writer.add_token_scores([0.0] * 259 + [-1.0, -2.0, -3.0])
        writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * 3)
    else:
        add_bytes(writer)
    shapes = {"token_embd": (262, WIDTH), "output": (262, WIDTH), "output_norm": (WIDTH,)}
    shapes |= {f"blk.0.attn_{name}": (WIDTH, WIDTH) for name in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_gate": (96, WIDTH), "blk.0.ffn_up": (96, WIDTH), "blk.0.ffn_down": (WIDTH, 96)}
    shapes |= {"blk.0.attn_norm": (WIDTH,), "blk.0.ffn_norm": (WIDTH,)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.zeros(shape, dtype=np.float32))
    finish(writer)
    return open_checkpoint(folder)


def test_texts_are_divided_as_the_file_says(tmp_path: Path) -> None:
    """`smollm` keeps digits apart, and `gpt-2` does not."""
    text = "in 12 days"
    divided = opened(tmp_path, {"tokenizer.ggml.pre": "smollm"}).tokenizer().tokenizer
    assert 256 not in divided.encode(text) and divided.decode(divided.encode(text)) == text
    assert 256 in opened(tmp_path, {"tokenizer.ggml.pre": "gpt-2"}).tokenizer().tokenizer.encode(text)


def test_each_known_division_is_a_pattern_and_keeps_texts(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models

    from megatron_coca.checkpoints.huggingface.gguf.tokenizer import SPLITS, adapt

    text = "It's 2024:\tDON'T pay (x+y)==12345678 \u00e9\u4e2d --- \n\n\n  if(a){return(b);}  "
    for name in SPLITS:
        model = Tokenizer(models.BPE({symbol: number for number, symbol in enumerate(byte_symbols())}, []))
        model.decoder = decoders.ByteLevel()
        adapt(model, {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": name})
        assert model.decode(model.encode(text).ids) == text


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("ggml.pre", None, "ggml.pre: missing"),
        ("ggml.pre", "novel", "ggml.pre: 'novel' is unknown"),
        ("ggml.novel", 1, "ggml.novel: not supported"),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_an_error(key: str, value: Any, message: str, tmp_path: Path) -> None:
    """Unless the tokenizer.json of the model is beside the file."""
    found = opened(tmp_path, {f"tokenizer.{key}": value})
    with pytest.raises(CheckpointError, match=rf"{message}.*; put the tokenizer.json"):
        found.tokenizer()


@pytest.mark.parametrize("prefix", [True, False])
def test_a_space_before_texts(prefix: bool, tmp_path: Path) -> None:
    keys = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default", "tokenizer.ggml.eos_token_id": 2}
    found = opened(tmp_path, keys | {"tokenizer.ggml.add_space_prefix": prefix}).tokenizer().tokenizer
    assert found.encode("a a") == ([261, 261] if prefix else [260, 261])
    assert found.decode(found.encode("a a")) == "a a"


def test_the_end_of_a_turn_ends_a_text(tmp_path: Path) -> None:
    found = opened(tmp_path, {"tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.eom_token_id": 8})
    assert found.tokenizer().tokenizer.ends == (257, 9, 8)


def test_a_model_that_sees_later_tokens_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="llama.attention.causal: false"):
        opened(tmp_path, {}, {"attention.causal": False})


# Hostile headers --------------------------------------------------------------------------------------------------


def test_counts_beyond_the_file_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An array of 2^60 values in 100 bytes, of numbers or of arrays, and a vocabulary beyond the limit."""
    start = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a" + struct.pack("<I", 9)
    for array in (struct.pack("<IQ", 0, 1 << 60), struct.pack("<IQ", 9, 1 << 60), struct.pack("<IQ", 8, 1 << 60)):
        (tmp_path / "a.gguf").write_bytes(start + array + bytes(40))
        with pytest.raises(CheckpointError, match="a.gguf: cannot be read .*announces more than its"):
            open_checkpoint(tmp_path)
    monkeypatch.setattr(header, "MOST_VALUES", 500)
    with pytest.raises(CheckpointError, match="its header has more than 500 values"):
        opened(tmp_path, {})


def test_layers_without_weights_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"announces 2,000,000,000 layers, but has 12 weights"):
        opened(tmp_path, {}, {"block_count": 2_000_000_000})
