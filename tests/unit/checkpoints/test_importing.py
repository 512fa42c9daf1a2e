"""Import: the written checkpoint, its use, and how files are read."""

import json
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_coca import cli, load_model
from megatron_coca.checkpoints import CheckpointError, load_checkpoint, native, open_checkpoint
from megatron_coca.checkpoints.exporting import export
from megatron_coca.checkpoints.importing import import_checkpoint, starting_config
from megatron_coca.checkpoints.inspection import checkpoints_in, describe, describe_text
from megatron_coca.checkpoints.weights import open_pickles
from megatron_coca.commands import import_checkpoint as tool
from megatron_coca.config import load_config
from megatron_coca.support import console
from megatron_coca.training.checkpointing.initial_model import initial_model
from tests.checkpoint_files import write_checkpoint
from tests.tokenizer_files import train_bpe

AUTHORS = Path(__file__).parents[2] / "golden" / "authors"
LLAMA, NEOX = AUTHORS / "coca_llama", AUTHORS / "coca_gpt_neox"
SINGLE = "model.safetensors"


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The authors' LLaMA as a checkpoint of ours. Not to be changed."""
    return import_checkpoint(LLAMA, tmp_path_factory.mktemp("imported") / "save").folder


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether all are equal bit by bit."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def test_what_is_written(imported: Path) -> None:
    step = imported / "global_step0"
    assert native.files(imported) == [
        *(f"global_step0/{name}" for name in ("config.yml", "manifest.json", "meta.json", SINGLE)),
        "latest",
    ]
    assert native.verify(step)["holds"] == "weights"
    meta = native.read_json(step / "meta.json")
    assert meta["step"] == 0 and "torch" in meta["versions"]
    identity = open_checkpoint(LLAMA).identity
    assert meta["imported"] == {"source": "coca_llama", "identity": identity, "model_type": "llama"}


@pytest.mark.parametrize(("source", "overrides"), [(LLAMA, ()), (NEOX, ["pos_emb=coca"])])
def test_the_authors_logits(source: Path, overrides: Any, tmp_path: Path) -> None:
    done = import_checkpoint(source, tmp_path / "save", overrides)
    reference = load_file(source / "reference.safetensors")
    model = load_model(done.folder)
    with torch.inference_mode():
        logits = model(reference["input_ids.96"])
    torch.testing.assert_close(logits, reference["logits.none.96"], atol=1e-4, rtol=0)
    assert done.config.position.pos_emb == "coca"
    assert done.parameters == sum(tensor.numel() for tensor in model.state_dict().values())


def test_weights_are_those_that_are_loaded_from_the_source(imported: Path) -> None:
    assert same(load_file(imported / "global_step0" / SINGLE), load_model(LLAMA).state_dict())
    opened = load_checkpoint(imported)
    assert opened.step == 0 and opened.identity == native.describe(imported / "global_step0" / SINGLE)["sha256"]


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda name: f"_orig_mod.{name}",
        lambda name: f"module.{name}",
        lambda name: f"module._orig_mod.{name}",
        lambda name: name.replace("self_attn", "_orig_mod.self_attn").replace("mlp.", "_fsdp_wrapped_module.mlp."),
        lambda name: name.replace("mlp.", "_checkpoint_wrapped_module.mlp.") if "layers.1" in name else name,
    ],
)
def test_names_of_wrappers_are_left_out(wrapped: Callable[[str], str], tmp_path: Path) -> None:
    """As torch.compile, DistributedDataParallel, FSDP and activation checkpointing add them to a state dict."""
    for name in ("config.json", SINGLE):
        shutil.copyfile(LLAMA / name, tmp_path / name)
    held = load_file(tmp_path / SINGLE)
    save_file({wrapped(name): values for name, values in held.items()}, tmp_path / SINGLE)
    assert same(load_model(tmp_path).state_dict(), load_model(LLAMA).state_dict())
    save_file({wrapped(name): values.clone() for name, values in held.items()} | held, tmp_path / SINGLE)
    with pytest.raises(CheckpointError, match="has weights that .*config.json does not have"):
        load_model(tmp_path)


def test_import_and_export_show_how_much_is_read(
    imported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "SHORT", 0.0)
    import_checkpoint(LLAMA, tmp_path / "save")
    export(imported, tmp_path / "export")
    lines = [line[20:] for line in capsys.readouterr().err.splitlines()]
    size = console.short(sum(tensor.nbytes for tensor in load_file(imported / "global_step0" / SINGLE).values()))
    tasks = f"importing {LLAMA}", f"exporting {tmp_path / 'export'}", "reading export back"
    begun, ended = [line for line in lines if " in " not in line], [line for line in lines if " in 0:00:" in line]
    assert begun == [f"{task}: 0/{size}B" for task in tasks]
    assert [line.partition(" in ")[0] for line in ended] == [f"{task}: {size}/{size}B" for task in tasks]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounded(dtype: str, imported: Path, tmp_path: Path) -> None:
    import_checkpoint(LLAMA, tmp_path / "save", dtype=dtype)
    exact = load_file(imported / "global_step0" / SINGLE)
    assert same(
        load_file(tmp_path / "save" / "global_step0" / SINGLE),
        {name: tensor.to(getattr(torch, dtype)) for name, tensor in exact.items()},
    )


def test_an_extension_becomes_part_of_it(tmp_path: Path) -> None:
    import_checkpoint(LLAMA, tmp_path / "save", ["rope_scaling.rope_type=dynamic", "rope_scaling.factor=4"])
    reference = load_file(LLAMA / "reference.safetensors")
    with torch.inference_mode():
        logits = load_model(tmp_path / "save")(reference["input_ids.96"])
    torch.testing.assert_close(logits, reference["logits.dynamic4.96"], atol=1e-4, rtol=0)


def test_contents_are_compared_unless_asked_not_to(imported: Path, tmp_path: Path) -> None:
    shutil.copytree(imported, tmp_path / "save")
    weights = tmp_path / "save" / "global_step0" / SINGLE
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{SINGLE}: content has changed"):
        open_checkpoint(tmp_path / "save")
    assert open_checkpoint(tmp_path / "save", verify=False).step == 0


def test_no_run_goes_on_from_it(imported: Path, tmp_path: Path) -> None:
    step = imported / "global_step0"
    with pytest.raises(CheckpointError, match="global_step0: has weights only, .* set finetune=true"):
        native.require_run_state(step)
    assert native.verify(step)["holds"] == "weights"


def test_a_run_may_go_on_from_others(tmp_path: Path) -> None:
    config = load_config([], {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 16}).override(
        {"vocab_size": 64}
    )
    save = write_checkpoint(tmp_path / "run", config, tokenizer=None)
    native.require_run_state(native.locate(save))
    assert native.read_json(native.locate(save) / native.MANIFEST)["holds"] == "run"


@pytest.mark.parametrize(
    ("holds", "message"),
    [("run", "does not list state/"), ("everything", "holds: 'everything' is not one of")],
)
def test_a_manifest_that_says_something_else(holds: str, message: str, imported: Path, tmp_path: Path) -> None:
    step = shutil.copytree(imported / "global_step0", tmp_path / "global_step0")
    manifest = native.read_json(step / native.MANIFEST)
    native.write_json(step / native.MANIFEST, manifest | {"holds": holds})
    with pytest.raises(CheckpointError, match=message):
        native.verify(step)


def test_inspected(imported: Path) -> None:
    (step,) = checkpoints_in(imported)
    found = describe(step)
    assert found.damage is None and found.holds == "weights" and found.parameters == 82368
    text = describe_text(found)
    assert "weights only: set finetune=true" in text
    assert "imported, source: coca_llama" in text and "no state" not in text
    json.dumps(found.facts())


def test_of_a_run_the_weights_and_the_tokenizer_are_taken(tmp_path: Path) -> None:
    keys = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 16, "vocab_size": 512}
    save = write_checkpoint(tmp_path / "run", load_config([], keys))
    done = import_checkpoint(save, tmp_path / "save")
    assert same(load_model(done.folder).state_dict(), load_model(save).state_dict())
    meta = native.read_json(done.folder / "global_step0" / native.META)
    assert meta["imported"]["step"] == 7 and meta["imported"]["source"] == "global_step7"
    assert done.tokenizer_note is None and done.config.data.tokenizer_type == "CharLevelTokenizer"
    assert open_checkpoint(done.folder).tokenizer_folder is not None


def test_the_tool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(tmp_path / "save")
    assert tool.main([str(NEOX), target, "--set", "pos_emb=coca", "--dtype", "bfloat16"]) == 0
    told = capsys.readouterr()
    assert "79,488 parameters, pos_emb coca, weights only\n" in told.out
    assert "no tokenizer is used" in told.err
    assert cli.main(["import", str(NEOX), target, "--set", "pos_emb=coca", "--dtype", "bfloat16"]) == 0
    assert capsys.readouterr().out == told.out
    for others in (["--set", "pos_emb=coca"], ["--dtype", "bfloat16"]):
        assert cli.main(["import", str(NEOX), target, *others]) == 2 and "exists already" in capsys.readouterr().err


# How files are read


def in_one(folder: Path, weights: dict[str, Tensor], save: Callable[[Any, Path], Any], name: str) -> None:
    save(weights, folder / f"{name[0]}{name[1]}")


def in_three(folder: Path, weights: dict[str, Tensor], save: Callable[[Any, Path], Any], name: str) -> None:
    """So that the parts of one weight of ours lie in several files."""
    names = [f"{name[0]}-0000{number}-of-00003{name[1]}" for number in (1, 2, 3)]
    index = {weight: names[number % 3] for number, weight in enumerate(sorted(weights))}
    for file in names:
        save({weight: weights[weight] for weight, place in index.items() if place == file}, folder / file)
    (folder / f"{name[0]}{name[1]}.index.json").write_text(json.dumps({"weight_map": index}))


def in_one_and_three(folder: Path, weights: dict[str, Tensor], save: Callable[[Any, Path], Any], name: Any) -> None:
    """The same weights twice."""
    in_one(folder, weights, save, name)
    in_three(folder, weights, save, name)


def old(weights: Any, path: Path) -> None:
    torch.save(weights, path, _use_new_zipfile_serialization=False)


KINDS: dict[str, tuple[Callable[[Any, Path], Any], tuple[str, str]]] = {
    "safetensors": (save_file, ("model", ".safetensors")),
    "pickle": (torch.save, ("pytorch_model", ".bin")),
    "old pickle": (old, ("pytorch_model", ".bin")),
}


@pytest.mark.parametrize("divide", [in_one, in_three, in_one_and_three])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_files(kind: str, divide: Callable[..., None], imported: Path, tmp_path: Path) -> None:
    save, name = KINDS[kind]
    source = tmp_path / "source"
    source.mkdir()
    shutil.copyfile(LLAMA / "config.json", source / "config.json")
    divide(source, load_file(LLAMA / SINGLE), save, name)
    done = import_checkpoint(source, tmp_path / "save")
    found = load_file(done.folder / "global_step0" / SINGLE)
    assert same(found, load_file(imported / "global_step0" / SINGLE))


def test_safetensors_are_preferred_to_pickles(tmp_path: Path) -> None:
    for name in ("config.json", SINGLE):
        shutil.copyfile(LLAMA / name, tmp_path / name)
    (tmp_path / "pytorch_model.bin").write_bytes(b"not read")
    assert same(load_model(tmp_path).state_dict(), load_model(LLAMA).state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_buffers_that_older_versions_of_transformers_saved(dtype: torch.dtype, tmp_path: Path) -> None:
    """Masks and frequencies, which follow from config.json."""
    extra = {
        LLAMA: {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(8, dtype=dtype)},
        NEOX: {
            "gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 32, 32).bool(),
            "gpt_neox.layers.0.attention.masked_bias": torch.tensor(-1e9, dtype=torch.float32),
            "gpt_neox.layers.1.attention.rotary_emb.inv_freq": torch.ones(8, dtype=dtype),
        },
    }
    for source, more in extra.items():
        folder = tmp_path / source.name
        folder.mkdir()
        shutil.copyfile(source / "config.json", folder / "config.json")
        torch.save(load_file(source / SINGLE) | more, folder / "pytorch_model.bin")
        assert same(load_model(folder).state_dict(), load_model(source).state_dict())


def test_a_tied_head_may_be_in_the_file(tmp_path: Path) -> None:
    weights, config = load_file(LLAMA / SINGLE), json.loads((LLAMA / "config.json").read_text())
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    torch.save(weights, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    done = import_checkpoint(tmp_path, tmp_path / "save")
    assert not done.config.model.no_weight_tying
    assert "final_linear.weight" not in load_file(done.folder / "global_step0" / SINGLE)


def test_of_old_pickles_one_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f"{name}{number}": tmp_path / f"{name}.bin" for name in "abc" for number in range(4)}
    for path in set(files.values()):
        old({name: torch.randn(9) for name, place in files.items() if place == path}, path)
    weights = open_pickles(files, tmp_path)
    held: list[weakref.ref[Tensor]] = []
    load = torch.load

    def watched(*given: Any, **options: Any) -> Any:
        assert not any(tensor() is not None for tensor in held), "the weights that were read before are gone"
        content = load(*given, **options)
        held.extend(weakref.ref(tensor) for tensor in content.values())
        return content

    monkeypatch.setattr(torch, "load", watched)
    assert len([name for name, _ in weights]) == 12
    assert len(held) == 12, "each file is read once"


def test_a_run_from_a_folder_with_an_unused_token_has_the_rows_of_the_folder(tmp_path: Path) -> None:
    """data.yml of `prepare` names the number of ids of the tokenizer, which has a padding token without a row."""
    from transformers import LlamaConfig, LlamaForCausalLM

    size = train_bpe(["some text"], 288, tmp_path / "tokenizer.json").vocab_size
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    added = content["added_tokens"][0] | {"id": size, "content": "[PAD]"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content | {"added_tokens": [*content["added_tokens"], added]}))
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=size, **shape)).save_pretrained(tmp_path)
    for ids in (size, size + 1):
        model = starting_config(tmp_path, {"vocab_size": ids}).model
        assert (model.vocab_size, model.padded_vocab_size) == (size, size)
    assert starting_config(tmp_path, {"vocab_size": size + 2}).model.vocab_size == size + 2
    explicit = starting_config(tmp_path).override({"vocab_size": size + 1})
    with pytest.raises(CheckpointError, match=rf"set vocab_size={size}, because the last tokens were added later"):
        initial_model(explicit, "cpu")
