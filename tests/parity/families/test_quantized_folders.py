"""Quantized weights are read as the numbers they represent: FP8 with scales, and GGUF files of llama.cpp."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatron_coca import load_model
from megatron_coca.checkpoints import CheckpointError
from megatron_coca.checkpoints.exporting import export
from megatron_coca.checkpoints.huggingface import quantized
from megatron_coca.checkpoints.load import open_checkpoint
from megatron_coca.commands import train
from tests.parity.families.test_families import SHAPE, build, in_float64, tokens
from tests.parity.families.test_wrappers import build as build_wrapper

BLOCK = 2
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
WHOLE = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}


def quantize(folder: Path, section: dict[str, Any]) -> None:
    """Replace the projections of a saved model by FP8 numbers with scales, as transformers names them."""
    held: dict[str, Tensor] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if not name.endswith("_proj.weight") or "vision" in name:
            held[name] = weight
            continue
        rows, columns = weight.shape
        size = (rows, columns) if section["weight_block_size"] is None else (BLOCK, BLOCK)
        blocks = weight.view(rows // size[0], size[0], columns // size[1], size[1])
        scales = blocks.abs().amax(dim=(1, 3)) / 448
        held[name] = (blocks / scales[:, None, :, None]).view(rows, columns).to(torch.float8_e4m3fn)
        held[f"{name}_scale_inv"] = scales if section["weight_block_size"] is not None else scales.reshape(())
        if section["activation_scheme"] == "static":
            held[f"{name.removesuffix('.weight')}.activation_scale"] = torch.tensor(1.0)
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": section}))


@pytest.mark.parametrize("section", [FP8, WHOLE], ids=["blocks", "one scale"])
@torch.no_grad()
def test_fp8_is_read_as_transformers_reads_it(
    section: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build("llama, free head width").save_pretrained(tmp_path / "source")
    before = load_model(tmp_path / "source")(tokens(17))
    quantize(tmp_path / "source", section)
    found = load_model(tmp_path / "source")(tokens(17))
    assert "weights in FP8 are dequantized to float32" in caplog.text and not torch.equal(found, before)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.float32, attn_implementation="eager")
    torch.testing.assert_close(found, theirs.eval()(tokens(17)).logits, rtol=1e-4, atol=1e-4)
    done = export(tmp_path / "source", tmp_path / "exported", dtype="bfloat16")
    assert "quantization_config" not in json.loads((done.folder / "config.json").read_text())


@torch.no_grad()
def test_fp8_in_a_text_network(tmp_path: Path) -> None:
    """As Ministral 3 is published."""
    build_wrapper("mistral3").save_pretrained(tmp_path)
    before = load_model(tmp_path)(tokens(17))
    quantize(tmp_path, WHOLE)
    found = load_model(tmp_path)(tokens(17))
    assert 0 < (found - before).abs().max() < 0.2 * before.abs().max()


@pytest.mark.parametrize("end", ["_scale_inv", "_scale"])
@torch.no_grad()
def test_the_last_blocks_may_be_smaller(end: str, tmp_path: Path) -> None:
    """Blocks of 24 rows and 32 columns, as `weight_block_size` says, in matrices that two equal blocks would divide."""
    build("qwen3").save_pretrained(tmp_path)
    file, (high, wide) = tmp_path / "model.safetensors", (24, 32)
    held, plain = dict[str, Tensor](), load_file(file)
    for name, weight in load_file(file).items():
        if not name.endswith("_proj.weight"):
            held[name] = weight
            continue
        rows, columns = -(-weight.shape[0] // high), -(-weight.shape[1] // wide)
        scales = torch.rand(rows, columns, generator=torch.Generator().manual_seed(rows)) + 0.5
        factors = torch.stack(
            [scales[i // high, j // wide] for i in range(len(weight)) for j in range(weight.shape[1])]
        ).view(weight.shape)
        held[name] = (weight / factors).to(torch.float8_e4m3fn)
        held[f"{name}{end}"], plain[name] = scales, held[name].float() * factors
    config = json.loads((tmp_path / "config.json").read_text())
    save_file(plain, file, {"format": "pt"})
    expected = load_model(tmp_path)(tokens(17))
    save_file(held, file, {"format": "pt"})
    section = FP8 | {"weight_block_size": [high, wide]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    assert torch.equal(load_model(tmp_path)(tokens(17)), expected)
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": FP8}))
    with pytest.raises(CheckpointError, match=r"which does not divide .* into blocks of 2 x 2; download"):
        load_model(tmp_path)


def test_faulty_scales_are_named(tmp_path: Path) -> None:
    build("qwen3").save_pretrained(tmp_path)
    quantize(tmp_path, FP8)
    held, name = load_file(tmp_path / "model.safetensors"), "model.layers.1.mlp.up_proj.weight_scale_inv"
    for changed, message in (
        ({key: value for key, value in held.items() if key != name}, r"up_proj.weight: has no scales \(.*_scale_inv\)"),
        (held | {name: torch.ones(5, 18)}, rf"{name} has shape \[5, 18\], which does not divide .* \[44, 36\]"),
    ):
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            load_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(held, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="F8_E4M3, which is not|does not have .*_scale_inv"):
        load_model(tmp_path)


@torch.no_grad()
def test_fp8_with_a_scale_for_each_row(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As the folder of Llama 3.1 405B in FP8, which has the attention in full precision."""
    build("llama, free head width").save_pretrained(tmp_path)
    file, plain = tmp_path / "model.safetensors", load_file(tmp_path / "model.safetensors")
    held = dict(plain)
    for name in [name for name in plain if ".mlp." in name]:
        scales = plain[name].abs().amax(dim=1, keepdim=True) / 448
        held[name] = (plain[name] / scales).to(torch.float8_e4m3fn)
        held[f"{name}_scale"] = scales
        held[f"{name.removesuffix('.weight')}.input_scale_ub"] = torch.tensor([1200.0])
        plain[name] = held[name].float() * scales
    save_file(plain, file, {"format": "pt"})
    expected = load_model(tmp_path)(tokens(17))
    save_file(held, file, {"format": "pt"})
    section = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
    section |= {"modules_to_not_convert": [f"model.layers.{number}.self_attn" for number in range(3)]}
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    assert torch.equal(load_model(tmp_path)(tokens(17)), expected)
    assert "weights in FP8 are dequantized to float32" in caplog.text


# MXFP4 ----------------------------------------------------------------------------------------------------------------

WIDE = {"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 10}


def gpt_oss_in_blocks(folder: Path) -> dict[str, Tensor]:
    """Save a gpt-oss model whose experts are random MXFP4 blocks, as OpenAI publishes it. Return its tensors."""
    rope = {"rope_type": "default", "rope_theta": 500.0}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(GptOssConfig(**SHAPE | WIDE | {"rope_parameters": rope}))
    model.to(torch.bfloat16).save_pretrained(folder)
    held = load_file(folder / "model.safetensors")
    for name in [name for name in held if name.endswith("_proj") and "experts" in name]:
        experts, columns, rows = held.pop(name).shape
        held[f"{name}_blocks"] = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        held[f"{name}_scales"] = torch.randint(119, 124, (experts, rows, columns // 32), dtype=torch.uint8)
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    section = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    return held


@torch.no_grad()
def test_mxfp4_is_read_as_transformers_reads_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every byte and sign, in float64; and an export in bfloat16, which has the same numbers."""
    held = gpt_oss_in_blocks(tmp_path / "source")
    plain = {name: weight for name, weight in held.items() if not name.endswith(("_blocks", "_scales"))}
    for name in [name for name in held if name.endswith("_blocks")]:
        ours = name.removesuffix("_blocks")
        plain[ours] = convert_moe_packed_tensors(held[name], held[f"{ours}_scales"], dtype=torch.bfloat16)
    theirs = AutoModelForCausalLM.from_config(GptOssConfig.from_pretrained(tmp_path / "source"))
    theirs.load_state_dict(plain)
    with in_float64():
        theirs.config._experts_implementation = "eager"
        expected = theirs.double().eval()(tokens(17)).logits
    found = open_checkpoint(tmp_path / "source").load(dtype=torch.float64).model(tokens(17))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert "weights in MXFP4 are dequantized to bfloat16" in caplog.text
    done = export(tmp_path / "source", tmp_path / "exported")
    written = load_file(done.folder / "model.safetensors")
    assert written.keys() == plain.keys() and all(torch.equal(written[name], plain[name]) for name in plain)
    assert "quantization_config" not in json.loads((done.folder / "config.json").read_text())


def test_all_numbers_of_mxfp4_are_exact() -> None:
    """With every exponent of a finite number in bfloat16, the smallest and the largest included."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(1, 252, 1, 1)
    exponents = torch.arange(252, dtype=torch.uint8).view(1, 252, 1).repeat(1, 1, 16)
    found = quantized.from_blocks(blocks, exponents)
    expected = convert_moe_packed_tensors(blocks, exponents, dtype=torch.float64)
    assert torch.equal(found.double(), expected) and found.shape == (1, 512, 252)


def test_faulty_blocks_are_named(tmp_path: Path) -> None:
    held = gpt_oss_in_blocks(tmp_path)
    name = "model.layers.1.mlp.experts.down_proj_scales"
    for changed, message in (
        ({key: value for key, value in held.items() if key != name}, r"down_proj: has no scales \(.*_scales\)"),
        (
            held | {name: held[name][:, :5].contiguous()},
            rf"{name} has shape \[3, 5, 1\], which does not fit .*_blocks \[3, 64, 1, 16\]",
        ),
    ):
        save_file(changed, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(CheckpointError, match=message):
            load_model(tmp_path)


# GGUF -----------------------------------------------------------------------------------------------------------------

NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
NAMES |= {"self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"}
NAMES |= {"mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
ENDS = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
ENDS |= {"lm_head.weight": "output.weight"}
WIDTH, HEADS, KEYS = 64, 4, 2


def byte_symbols() -> list[str]:
    """The symbols of the 256 bytes in a byte-level vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def in_pairs(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """llama.cpp rotates neighbouring features."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def add_tokenizer(writer: Any) -> None:
    """Add a byte-level tokenizer of 258 tokens."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    symbols = byte_symbols()
    writer.add_token_list([*symbols, "th", "<|endoftext|>"])
    writer.add_token_types([1] * 257 + [3])
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(257)


def write_gguf(path: Path, model: Any, **more: Any) -> None:
    """Write a LLaMA model with Q8_0 projections and a byte-level tokenizer."""
    gguf = pytest.importorskip("gguf")
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(500.0)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEYS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    add_tokenizer(writer)
    for key, value in more.items():
        writer.add_string(key.replace("_", "."), value)
    for name, weight in model.state_dict().items():
        values = weight.numpy()
        if name in ENDS:
            writer.add_tensor(ENDS[name], values)
            continue
        _, _, number, module, _ = name.split(".") if name.count(".") == 4 else (*name.split(".")[:3], name[15:-7], "")
        values = in_pairs(values, HEADS) if "q_proj" in name else in_pairs(values, KEYS) if "k_proj" in name else values
        target = f"blk.{number}.{NAMES[module]}.weight"
        if values.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(target, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(target, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama() -> Any:
    from transformers import LlamaConfig

    rope = {"rope_type": "default", "rope_theta": 500.0}
    shape = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": KEYS, "intermediate_size": 96}
    config = LlamaConfig(**SHAPE | shape | {"vocab_size": 258, "rope_parameters": rope})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    return model


@torch.no_grad()
def test_a_gguf_file_is_read_as_transformers_reads_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The file, its folder, and the tokenizer in the file; near the model before quantization; and the export."""
    model = llama()
    file = tmp_path / "model-q8.gguf"
    write_gguf(file, model)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, attn_implementation="eager").eval()
    expected, plain = theirs(tokens(17)).logits, model(tokens(17)).logits
    opened = open_checkpoint(file)
    found = opened.load().model(tokens(17))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert 0 < (found - plain).abs().max() < 0.1 * plain.abs().max()
    assert "weights in Q8_0 are dequantized to float32" in caplog.text
    other = open_checkpoint(tmp_path)
    assert opened.identity == other.identity and opened.trained == other.trained
    tokenizer, note = opened.tokenizer()
    assert tokenizer is not None, note
    text = "the quick fox, thousand \u00e9t\u00e9"
    assert (
        list(tokenizer.encode(text))
        == AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)(text, add_special_tokens=False).input_ids
    )
    config, _ = train.read_config(train.parser().parse_args([str(file), "train_iters=1", "train_batch_size=1"]))
    assert config.checkpoint.load == str(file) and config.model.hidden_size == WIDTH
    done = export(file, tmp_path / "exported")
    again = AutoModelForCausalLM.from_pretrained(done.folder, attn_implementation="eager").eval()
    torch.testing.assert_close(again(tokens(17)).logits, found, rtol=1e-4, atol=1e-4)
    assert (done.folder / "tokenizer.json").is_file()


def test_faults_of_gguf_files_are_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "one.gguf", llama(), llama_rope_scaling_type="yarn")
    message = "one.gguf: llama.rope.scaling.type: .*; put the"
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path)
    (tmp_path / "two.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"several GGUF files \(one.gguf, two.gguf\); name"):
        load_model(tmp_path)
    with pytest.raises(CheckpointError, match="two.gguf: cannot be read .*; download it again"):
        load_model(tmp_path / "two.gguf")


def write_plain(path: Path, architecture: str, model: Any, fields: dict[str, float]) -> None:
    """Write a model in float32 with the names that llama.cpp gives to its weights, and these fields."""
    gguf = pytest.importorskip("gguf")
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    add_tokenizer(writer)
    for name, value in fields.items():
        (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(f"{architecture}.{name}", value)
    kind = getattr(gguf.MODEL_ARCH, architecture.upper())
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    tied = config.tie_word_embeddings
    for name, weight in model.state_dict().items():
        if not (tied and name == "lm_head.weight"):
            centred = architecture == "gemma2" and "norm" in name
            writer.add_tensor(names.get_name(name, (".weight", ".bias")), (weight + centred).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


BASE, RMS, NORM = "rope.freq_base", "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
TOLD: dict[str, tuple[str, dict[str, Any], dict[str, float]]] = {
    "starcoder2, base": (
        "Starcoder2",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {BASE: 500.0, NORM: 1e-5, "rope.dimension_count": 6},
    ),
    "stablelm, base and share": (
        "StableLm",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.67}},
        {BASE: 500.0, NORM: 1e-5, "rope.dimension_count": 4},
    ),
    "gemma2, scale of the largest": (
        "Gemma2",
        {"num_hidden_layers": 46, "hidden_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 6}
        | {"query_pre_attn_scalar": 12, "sliding_window": 9},
        {BASE: 1e4, RMS: 1e-6, "attention.key_length": 6, "attention.value_length": 6, "attention.sliding_window": 9},
    ),
    "gemma2, scale of the others": (
        "Gemma2",
        {"head_dim": 10, "query_pre_attn_scalar": 10, "sliding_window": 9, "attn_logit_softcapping": 2.0},
        {
            BASE: 1e4,
            RMS: 1e-6,
            "attention.key_length": 10,
            "attention.sliding_window": 9,
            "attn_logit_softcapping": 2.0,
        },
    ),
}
"""A model, and the fields of its GGUF file that transformers does not read, or of which it has another default."""


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if "largest" in case else case for case in TOLD]
)
@torch.no_grad()
def test_gguf_describes_more_than_transformers_reads(case: str, tmp_path: Path) -> None:
    import transformers

    kind, changes, fields = TOLD[case]
    config = getattr(transformers, f"{kind}Config")(**SHAPE | {"vocab_size": 258, "pad_token_id": 0} | changes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        parameter += 0.1 * torch.randn(parameter.shape)
    write_plain(tmp_path / "a.gguf", kind.lower(), model, fields)
    torch.testing.assert_close(load_model(tmp_path)(tokens(50)), model(tokens(50)).logits, rtol=1e-3, atol=1e-3)
    for name, value, message in (
        ("mystery", 3, rf"{kind.lower()}\.mystery: not supported and may change .*config.json"),
        ("rope.scaling.factor", 4.0, "a frequency extension in a GGUF file is not supported"),
    ):
        write_plain(tmp_path / "a.gguf", kind.lower(), model, fields | {name: value})
        with pytest.raises(CheckpointError, match=message):
            load_model(tmp_path)
