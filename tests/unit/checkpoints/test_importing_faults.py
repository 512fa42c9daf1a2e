"""Folders that cannot be imported: the error names the fault, nothing is written, no code in a pickle runs."""

import json
import math
import pickle
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_coca.checkpoints import CheckpointError, load_model
from megatron_coca.checkpoints.huggingface.families import FAMILIES
from megatron_coca.checkpoints.huggingface.read import read_config
from megatron_coca.checkpoints.importing import import_checkpoint
from megatron_coca.config import ConfigError

AUTHORS = Path(__file__).parents[2] / "golden" / "authors" / "coca_llama"
SINGLE, BIN = "model.safetensors", "pytorch_model.bin"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
UP = "model.layers.1.mlp.up_proj.weight"
GATE = UP.replace("up_proj", "gate_proj")
Q, K, V = (f"model.layers.0.self_attn.{part}_proj.weight" for part in "qtv")
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A LLaMA folder of 80 thousand parameters."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("config.json", SINGLE):
        shutil.copyfile(AUTHORS / name, source / name)
    return source


def config(**changes: Any) -> Callable[[Path], None]:
    """Change keys of config.json; None takes one out."""

    def change(folder: Path) -> None:
        content = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps({k: v for k, v in content.items() if v is not None}))

    return change


def weights(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    """Change the weights."""

    def rewrite(folder: Path) -> None:
        held = load_file(folder / SINGLE)
        change(held)
        save_file(held, folder / SINGLE)

    return rewrite


def parts(rows: Mapping[str, int]) -> Callable[[Path], None]:
    """Give weights another number of rows."""
    return weights(lambda held: held.update({name: torch.zeros(count, 64) for name, count in rows.items()}))


def cut(name: str) -> Callable[[Path], None]:
    """Leave half of a file."""

    def truncate(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])

    return truncate


def shards(change: Callable[[Path, dict[str, str]], Any]) -> Callable[[Path], None]:
    """Divide the weights among two files, and change these or the index."""

    def divide(folder: Path) -> None:
        held = load_file(folder / SINGLE)
        (folder / SINGLE).unlink()
        index = {name: SHARDS[number % 2] for number, name in enumerate(sorted(held))}
        for shard in SHARDS:
            save_file({name: held[name] for name, place in index.items() if place == shard}, folder / shard)
        change(folder, index)
        (folder / f"{SINGLE}.index.json").write_text(json.dumps({"weight_map": index}))

    return divide


def beside_shards(name: str, save: Callable[[dict[str, Tensor], Path], Any]) -> Callable[[Path], None]:
    """Save one file with all weights, of which one differs, beside two files with an index."""

    def rewrite(folder: Path) -> None:
        held = load_file(folder / SINGLE)
        (folder / SINGLE).unlink()
        files = [f"part{number}{Path(name).suffix}" for number in range(2)]
        index = {key: files[number % 2] for number, key in enumerate(sorted(held))}
        for file in files:
            save({key: held[key] for key, place in index.items() if place == file}, folder / file)
        (folder / f"{name}.index.json").write_text(json.dumps({"weight_map": index}))
        held[UP] = held[UP] + 1e-3
        save(held, folder / name)

    return rewrite


def pickled(
    content: Callable[[dict[str, Tensor]], Any], change: Callable[[Path], Any] | None = None, **how: Any
) -> Any:
    """Weights in a .bin file, or something else in it."""

    def save(folder: Path) -> None:
        held = load_file(folder / SINGLE)
        (folder / SINGLE).unlink()
        torch.save(content(held), folder / BIN, **how)
        if change is not None:
            change(folder)

    return save


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self._folder / "evil"), "w")


def evil(**how: Any) -> Callable[[Path], None]:
    return lambda folder: pickled(lambda held: held | {"more": Evil(folder)}, **how)(folder)


def plain_pickle(folder: Path) -> None:
    (folder / SINGLE).unlink()
    (folder / BIN).write_bytes(pickle.dumps({"weights": Evil(folder)}))


def no_weights(folder: Path) -> None:
    (folder / SINGLE).unlink()


def rope(**section: Any) -> Callable[[Path], None]:
    return config(rope_parameters=section)


OLD = {"_use_new_zipfile_serialization": False}
FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "architecture": (
        config(model_type="unheard_of"),
        f"config.json: model_type: 'unheard_of' is not supported; supported values: {min(FAMILIES)}, .*llama, ",
    ),
    "state space": (
        config(model_type="mamba"),
        "model_type: 'mamba' is not supported; it has recurrent or state-space",
    ),
    "mixture of experts": (
        config(model_type="zaya"),
        "model_type: 'zaya' is not supported; it has mixture-of-experts",
    ),
    "no size": (config(hidden_size=None), "config.json: 'hidden_size' is missing"),
    "size of another kind": (config(num_attention_heads="four"), "config.json: has an invalid value"),
    "architecture of another kind": (
        config(model_type=["llama"]),
        r"model_type: \['llama'\] is not supported; supported values: ",
    ),
    "no layers": (
        config(num_hidden_layers=0),
        r"config.json: does not describe .*: num_hidden_layers \(here num_layers\): expected .* 1, got 0$",
    ),
    "half a layer": (config(num_hidden_layers=2.5), r"config.json: does .* num_hidden_layers .* an integer, got 2.5"),
    "key heads": (config(num_key_value_heads=3), r"config.json: does .* num_key_value_heads .*: 3 key/value heads do"),
    "no length": (
        lambda f: (f / "config.json").write_text(
            (f / "config.json").read_text().replace('"max_position_embeddings": 32', '"max_position_embeddings": null')
        ),
        r"config.json: does .* max_position_embeddings \(here seq_length\): required, but missing",
    ),
    "shrinking extension": (
        rope(rope_type="linear", factor=0.5),
        r"config.json: does .*: rope_scaling.factor: expected .*, got 0.5",
    ),
    "not JSON": (lambda f: (f / "config.json").write_text("{"), "config.json: not valid JSON"),
    "activation": (
        config(hidden_act="relu2"),
        "hidden_act: 'relu2' is not supported for LLaMA; supported values: silu",
    ),
    "head size": (config(head_dim=32), "the shapes of .*q_proj.weight.* do not match"),
    "quantized": (
        config(quantization_config={"quant_method": "bitsandbytes"}),
        "quantization_config: .* 'bitsandbytes' are not supported; convert the folder with\n    python -c .*dequantize",
    ),
    "quantized in another way": (
        config(quantization_config={"bits": 4}),
        "quantization_config: .* 'unknown' are not supported; use .*: hf download OWNER/NAME",
    ),
    "rotation of neighbours": (config(rope_interleaved=True), "rope_interleaved: weights for interleaved"),
    "rope type": (
        rope(rope_type="spiral", factor=2.0),
        "config.json: rope_type: 'spiral' is not supported; supported values: default, linear, dynamic, yarn,",
    ),
    "rope type that transformers has not": (rope(rope_type="clex"), "rope_type: 'clex' is not supported"),
    "rope option": (
        rope(rope_type="yarn", factor=2.0, interleaved=True),
        "rope_type 'yarn' with interleaved is not supported .supported options: factor, ",
    ),
    "rope option of ours": (
        rope(rope_type="linear", factor=2.0, resonance=True),
        "rope_type 'linear' with resonance is not supported .supported options: factor.; remove keys that have no",
    ),
    "rope without its factor": (rope(rope_type="linear"), "rope_type 'linear' needs factor"),
    "rope by layer": (rope(full_attention={"rope_type": "linear"}), "'default' with full_attention is not supported"),
    "partial rotation": (rope(partial_rotary_factor=0.5), "partial_rotary_factor: 0.5 is not supported, because LLaMA"),
    "network of its own, untold": (config(model_type="coca_dense"), "config.json: 'network' is missing"),
    "missing weight": (weights(lambda held: held.pop(UP)), f"weight {UP} is missing"),
    "bias that is said to be there": (
        config(attention_bias=True),
        "do not fit the model: missing blocks.0.attention.query_key_value.bias",
    ),
    "bias that is not said to be there": (
        weights(lambda held: held.update({UP.replace("weight", "bias"): torch.zeros(96)})),
        "weight model.layers.1.mlp.gate_proj.bias is missing",
    ),
    "unread weight": (
        weights(lambda held: held.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(16)})),
        "has weights that the model described by config.json does not have .model.layers.0.self_attn.q_norm.weight",
    ),
    "adapters": (
        weights(lambda held: held.update({f"model.layers.0.lora_{i}": torch.ones(1) for i in range(7)})),
        "does not have .model.layers.0.lora_0, .*, model.layers.0.lora_4 and 2 more",
    ),
    "more layers than said": (config(num_hidden_layers=1), "does not have .model.layers.1.input_layernorm.weight, "),
    "other shape": (config(vocab_size=128), rf"{EMBEDDING} has shape \[97, 64\], the model \[128, 64\]"),
    "parts of other shapes": (
        weights(lambda held: held.update({UP: torch.zeros(96, 63)})),
        rf"the shapes of {UP} \[96, 63\], .* do not match",
    ),
    "gated halves with the right sum": (
        parts({UP: 95, GATE: 97}),
        rf"the shapes of {UP} \[95, 64\], {GATE} \[97, 64\] do not match, {GATE} must have shape \[95, 64\]",
    ),
    "projections with the right sum": (
        parts({Q: 48, K: 80}),
        rf"the shapes of {Q} \[48, 64\], {K} \[80, 64\], {V} \[64, 64\] do not .*, {Q} must have shape \[64, 64\]",
    ),
    "grouped projections with the right sum": (
        lambda f: (config(num_key_value_heads=2)(f), parts({Q: 64, K: 16, V: 48})(f)),
        rf"{K} \[16, 64\], {V} \[48, 64\] do not match, {K} must have shape \[32, 64\]",
    ),
    "all projections too narrow": (
        parts({Q: 32, K: 32, V: 32}),
        rf"do not match, {Q} must have shape \[64, 64\]",
    ),
    "gated halves that are numbers": (
        weights(lambda held: held.update({UP: torch.tensor(1.0), GATE: torch.tensor(1.0)})),
        rf"the shapes of {UP} \[\], {GATE} \[\] do not match",
    ),
    "a projection that is a number": (
        weights(lambda held: held.update({Q: torch.tensor(1.0)})),
        rf"the shapes of {Q} \[\], .* do not match",
    ),
    "integers": (weights(lambda held: held.update({UP: torch.zeros(96, 64).char()})), f"{UP} has dtype I8"),
    "tied, but other head": (
        config(tie_word_embeddings=True),
        f"{HEAD} differs from {EMBEDDING}, but config.json ties these weights",
    ),
    "tied, without the embedding": (
        lambda f: (config(tie_word_embeddings=True)(f), weights(lambda held: held.pop(EMBEDDING))(f)),
        f"weight {EMBEDDING} is missing",
    ),
    "truncated": (cut(SINGLE), rf"{SINGLE}: not a readable safetensors file \(.*\); download it again"),
    "no weights": (no_weights, f"no weights found .no {SINGLE} or {SINGLE}.index.json or {BIN} or {BIN}.index.json"),
    "no index": (
        lambda f: (no_weights(f), (f / f"{SINGLE}.index.json").write_text("{}")),
        f"{SINGLE}.index.json: weight_map is missing",
    ),
    "stale single file": (
        beside_shards(SINGLE, save_file),
        rf"{SINGLE} and the files of {SINGLE}.index.json contain different weights .1 of \d+, for example {UP}.; move",
    ),
    "stale pickle": (
        beside_shards(BIN, torch.save),
        f"{BIN} and the files of {BIN}.index.json contain different weights",
    ),
    "shards without an index": (
        lambda f: (no_weights(f), (f / SHARDS[0]).touch()),
        rf"contains safetensors files without their index .{SHARDS[0]}.; add {SINGLE}.index.json from the same place$",
    ),
    "DeepSpeed's checkpoint": (
        lambda f: (no_weights(f), (f / "zero_to_fp32.py").touch(), (f / "latest").write_text("global_step10")),
        r"contains a checkpoint of DeepSpeed .*\n    cd .*/source && python zero_to_fp32.py . . --safe_serialization$",
    ),
    "FSDP's checkpoint": (
        lambda f: (no_weights(f), (f / "pytorch_model_fsdp_0").mkdir()),
        r"contains a sharded checkpoint of FSDP .*\n    accelerate merge-weights .*/pytorch_model_fsdp_0 .*/source$",
    ),
    "a Trainer's checkpoints": (
        lambda f: (no_weights(f), (f / "checkpoint-500").mkdir()),
        r"contains the checkpoints of a Hugging Face Trainer .checkpoint-500.; use one of these subfolders$",
    ),
    "weights for another library": (
        lambda f: (no_weights(f), (f / "flax_model.msgpack").touch()),
        "contains weights of Flax .flax_model.msgpack.; use a revision of the model with PyTorch weights",
    ),
    "parts of ZeRO 3": (
        weights(lambda held: held.update({UP: torch.zeros(0), GATE: torch.zeros(0)})),
        r"2 of \d+ weights have no values, for example model.*, because ZeRO stage 3 keeps .* zero_to_fp32.py",
    ),
    "saved without its head": (
        weights(lambda held: [held.update({n.partition(".")[2]: held.pop(n)}) for n in [*held]] and held.pop("weight")),
        rf"has no output head .{HEAD}., because it was saved from a class without one; save the model from its class",
    ),
    "names of another model": (
        weights(lambda held: [held.update({f"wte.{number}": held.pop(n)}) for number, n in enumerate([*held])]),
        rf"has no weight of the model that config.json describes .such as {EMBEDDING}., but wte.0, wte.1, ",
    ),
    "an empty single file beside shards": (
        shards(lambda f, index: save_file({name: torch.zeros(0) for name in index}, f / SINGLE)),
        rf"{SINGLE} and the files of {SINGLE}.index.json contain different weights .\d+ of \d+, for example",
    ),
    "attention factor under another name": (
        rope(rope_type="yarn", factor=4.0, attn_factor=0.88),
        r"rope_type 'yarn' with attn_factor is not supported .supported options: .*attention_factor.*; remove keys",
    ),
    "missing shards": (
        shards(lambda f, index: [(f / shard).unlink() for shard in SHARDS]),
        rf"index.json: lists files that do not exist .{SHARDS[0]} \(\d+ weights\), {SHARDS[1]} \(\d+ weights\).",
    ),
    "truncated shard": (shards(lambda f, index: cut(SHARDS[1])(f)), f"{SHARDS[1]}: not a readable safetensors file"),
    "shard outside": (
        shards(lambda f, index: index.update({HEAD: "../other.safetensors"})),
        "'../other.safetensors' is not a file name in the folder",
    ),
    "shard without its weight": (
        shards(lambda f, index: index.update({"model.norm.weight": SHARDS[0], HEAD: SHARDS[1]})),
        "safetensors: has no weight (model.norm|lm_head).weight, but the index of",
    ),
    "weight that the index does not know": (
        shards(lambda f, index: save_file(load_file(f / SHARDS[0]) | {"extra": torch.ones(1)}, f / SHARDS[0])),
        "does not have .extra",
    ),
    "evil": (evil(), rf"{BIN}: contains objects other than tensors \(io.open\); no code in the file was run"),
    "evil and old": (evil(**OLD), rf"{BIN}: contains objects other than tensors \(io.open\)"),
    "evil and plain": (plain_pickle, f"{BIN}: a pickle without weights"),
    "a whole model": (
        pickled(lambda held: torch.nn.Linear(2, 2)),
        r"other than tensors \(torch.nn.modules.linear.Linear\)",
    ),
    "one tensor": (pickled(lambda held: torch.ones(2)), f"{BIN}: contains a Tensor, not a mapping of names to tensors"),
    "wrapped": (
        pickled(lambda held: {"state_dict": held, "epoch": 1}),
        f"{BIN}: 'state_dict' is a dict, but only named tensors are supported",
    ),
    "quantized pickle": (pickled(lambda held: held | {UP: held[UP].char()}), f"{UP} has .* and torch.int8"),
    "sparse pickle": (pickled(lambda held: held | {UP: held[UP].to_sparse()}), f"{UP} has torch.sparse_coo"),
    "pickle without values": (
        pickled(lambda held: held | {UP: held[UP].to("meta")}),
        f"{BIN}: {UP} has no values, because it was saved on the meta device",
    ),
    "old pickle without values": (
        pickled(lambda held: held | {UP: held[UP].to("meta")}, **OLD),
        f"{BIN}: {UP} has no values, because it was saved on the meta device",
    ),
    "truncated pickle": (pickled(dict, cut(BIN)), f"{BIN}: damaged or not a weights file"),
    "truncated old pickle": (pickled(dict, cut(BIN), **OLD), f"{BIN}: damaged or not a weights file"),
    "text as pickle": (lambda f: (no_weights(f), (f / BIN).write_text("<html>")), f"{BIN}: (a|damaged) "),
    "empty pickle": (lambda f: (no_weights(f), (f / BIN).touch()), f"{BIN}: damaged or not a weights file"),
    "unread weight in a pickle": (pickled(lambda held: held | {"extra": torch.ones(1)}), "does not have .extra"),
    "missing weight in a pickle": (
        pickled(lambda held: {name: held[name] for name in held if name != UP}),
        f"weight {UP} is missing",
    ),
}


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_named_and_nothing_is_written(name: str, folder: Path) -> None:
    damage, message = FAULTS[name]
    damage(folder)
    left = sorted(folder.iterdir())
    with pytest.raises(CheckpointError, match=message) as caught:
        import_checkpoint(folder, folder.parent / "imported")
    assert str(folder) in str(caught.value)
    assert sorted(folder.iterdir()) == left, "no file has come by unpickling"
    assert list(folder.parent.iterdir()) == [folder]


def test_a_key_that_may_change_the_model_is_an_error_by_name(folder: Path) -> None:
    """Those are keys that transformers reads for this class; its cache reads a window for every class."""
    for change in ({"sliding_window": 512}, {"attention_chunk_size": 8}):
        name = next(iter(change))
        config(**change)(folder)
        with pytest.raises(
            CheckpointError,
            match=f"config.json: {name}: not supported .*--ignore-key {name}$",
        ):
            load_model(folder)
        config(**dict.fromkeys(change))(folder)
    config(bos_token_id=1, transformers_version="5.0", use_cache=True, pretraining_tp=1)(folder)
    load_model(folder)


def test_loading_an_evil_pickle_runs_nothing_either(folder: Path) -> None:
    evil()(folder)
    with pytest.raises(CheckpointError, match="no code in the file was run"):
        load_model(folder)
    assert not (folder / "evil").exists()
    torch.load(folder / BIN, weights_only=False)
    assert (folder / "evil").exists(), "the file is one that does harm"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"overrides": {"num_layers": 3}}, "cannot be evaluated with another num_layers"),
        ({"overrides": {"pos_emb": "kerple_log"}}, "do not fit .*missing blocks.0.attention.position_bias"),
        ({"overrides": {"rope_scaling.rope_type": "spiral"}}, "rope_scaling.rope_type"),
        ({"dtype": "int8"}, "dtype: 'int8' is not supported; .*float32, bfloat16, float16"),
    ],
)
def test_wrong_wishes_are_named_and_nothing_is_written(asked: Mapping[str, Any], message: str, folder: Path) -> None:
    with pytest.raises((CheckpointError, ConfigError), match=message):
        import_checkpoint(folder, folder.parent / "imported", **asked)
    assert list(folder.parent.iterdir()) == [folder]


@pytest.mark.parametrize("large", [65520.0, -1e30])
def test_a_value_that_float16_cannot_hold_is_named(large: float, folder: Path) -> None:
    weights(lambda held: held[UP].__setitem__((0, 0), large))(folder)
    message = (
        rf"{UP} .*has values up to {re.escape(f'{abs(large):.6g}')}, above the maximum 65504 of float16; use .*bfloat16"
    )
    with pytest.raises(CheckpointError, match=message):
        import_checkpoint(folder, folder.parent / "imported", dtype="float16")
    assert list(folder.parent.iterdir()) == [folder]
    import_checkpoint(folder, folder.parent / "imported", dtype="bfloat16")


def test_values_within_float16_and_infinities_pass(folder: Path) -> None:
    weights(lambda held: held[UP][0, :2].copy_(torch.tensor([65519.0, math.inf])))(folder)
    done = import_checkpoint(folder, folder.parent / "imported", dtype="float16")
    written = load_file(done.folder / "global_step0" / SINGLE)["blocks.1.mlp.linear1.weight"]
    assert written[0, :2].tolist() == [65504.0, math.inf]


def test_weights_that_are_not_finite_are_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_model(folder)
    assert "NaN" not in caplog.text
    weights(lambda held: (held[UP].__setitem__((0, 0), math.nan), held[EMBEDDING].__setitem__((1, 0), -math.inf)))(
        folder
    )
    load_model(folder)
    warned = f"{folder}: 2 of 15 weights contain NaN"
    assert warned in caplog.text and (UP in caplog.text or EMBEDDING in caplog.text)


def test_a_neox_weight_of_another_shape_has_its_own_name(folder: Path) -> None:
    source = folder.parent / "neox"
    shutil.copytree(AUTHORS.parent / "coca_gpt_neox", source)
    name = "gpt_neox.layers.1.attention.query_key_value.weight"
    weights(lambda held: held.update({name: torch.zeros(190, 64)}))(source)
    with pytest.raises(CheckpointError, match=rf"model: {name} has shape \[190, 64\], the model \[192, 64\]; correct"):
        import_checkpoint(source, folder.parent / "imported")


def test_an_existing_folder_is_not_touched(folder: Path) -> None:
    (folder.parent / "imported").mkdir()
    with pytest.raises(CheckpointError, match="imported: exists already"):
        import_checkpoint(folder, folder.parent / "imported")
    assert not list((folder.parent / "imported").iterdir())


def test_a_disk_that_is_full_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megatron_coca.checkpoints.importing.write_safetensors", full)
    with pytest.raises(CheckpointError, match="imported: cannot be written .No space left"):
        import_checkpoint(folder, folder.parent / "imported")
    assert list(folder.parent.iterdir()) == [folder]


STRANGE = (0, -1, 2**63 - 1, 10**32, -(10**400), 1e308, 5e-324, math.nan, math.inf, True, "", "a\0b", "\ud800", [], {})
SIZES = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size"),
    *("vocab_size", "max_position_embeddings"),
)


@pytest.mark.parametrize("key", [*SIZES, "rms_norm_eps", "rope_theta", "rope_scaling", "head_dim", "attention_dropout"])
def test_strange_values_of_a_foreign_config(key: str, folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"suppress_tokens": [5, 10]}')  # as of padding
    for value in STRANGE:
        config(**{key: value})(folder)
        try:
            read_config(folder)
        except CheckpointError as error:
            text = str(error)
            assert "config.json: " in text and len(text) < 1000, f"{key} {value!r}: {text[:1000]}"
        else:
            assert value not in (-1, 10**32, -(10**400)) or key not in SIZES, f"{key} {value!r}"
    for value in (10**32, 2**63 - 1):
        if key in SIZES:
            config(**{key: value})(folder)
            with pytest.raises(CheckpointError, match=r"config.json: (.*expected a|.*supported)"):
                read_config(folder)


def test_a_foreign_config_repeats_no_key(folder: Path) -> None:
    text = (folder / "config.json").read_text().replace('"hidden_size"', '"hidden_size": 3, "hidden_size"', 1)
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match="config.json: not valid JSON .*'hidden_size' appears"):
        read_config(folder)
