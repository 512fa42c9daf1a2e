"""The architecture that an export chooses, its errors, which leave nothing on disk, and packed weights."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_coca import cli
from megatron_coca.checkpoints import CheckpointError
from megatron_coca.checkpoints.compare import comparable, contradicts
from megatron_coca.checkpoints.exporting import export
from megatron_coca.checkpoints.huggingface import tokenizer_files as export_tokenizer
from megatron_coca.checkpoints.huggingface import transformers_check, weight_map
from megatron_coca.checkpoints.huggingface.config_json import parse_config, read_config
from megatron_coca.checkpoints.huggingface.model_source import modelling_file
from megatron_coca.checkpoints.huggingface.transformers_check import Written
from megatron_coca.checkpoints.huggingface.write import EXPORTERS, MODELLING_FILE, _shared_keys
from megatron_coca.commands.export import main
from megatron_coca.config import load_config
from megatron_coca.data import train_sentencepiece
from tests.parity.exported import LLAMA, NEOX, SHAPE, random_checkpoint

WRITTEN: dict[str, tuple[dict[str, Any], str]] = {
    "neox": (NEOX, "gpt_neox"),
    "llama": (LLAMA, "llama"),
    "llama with biases": (LLAMA | {"use_bias_in_attn_linear": True, "use_bias_in_mlp": True}, "llama"),
    "dynamic": (LLAMA | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "llama"),
    "CoCA": (NEOX | {"pos_emb": "coca"}, "coca_dense"),
    "ALiBi": (LLAMA | {"pos_emb": "alibi"}, "coca_dense"),
    "map": (NEOX | {"relative_positions": {"type": "rerope"}}, "coca_dense"),
    "logits": (LLAMA | {"logit_scaling": "log_n"}, "coca_dense"),
    "ntk": (LLAMA | {"rope_scaling": {"rope_type": "ntk", "factor": 2.0}}, "coca_dense"),
    "ramp": (LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "ramp": "rotations"}}, "coca_dense"),
    "partial": (LLAMA | {"rotary_pct": 0.5}, "phi3"),
    "layernorm in LLaMA": (LLAMA | {"norm": "layernorm"}, "coca_dense"),
    "activation": (NEOX | {"activation": "softsign"}, "coca_dense"),
    "one norm": (NEOX | {"gpt_j_tied": True}, "coca_dense"),
    "grouped neox": (NEOX | {"num_kv_heads": 2}, "coca_dense"),
    "parallel llama": (LLAMA | {"gpt_j_residual": True, "pos_emb": "coca"}, "coca_dense"),
}
"""A stock architecture wherever one computes the model, else the modelling file's of the same shape."""


@pytest.mark.parametrize("name", WRITTEN)
def test_the_written_architecture(name: str, tmp_path: Path) -> None:
    keys, kind = WRITTEN[name]
    done = export(random_checkpoint(tmp_path / "run", **keys), tmp_path / "model")
    config = json.loads((done.folder / "config.json").read_text())
    assert done.model_type == config["model_type"] == kind
    assert done.remote == (done.folder / MODELLING_FILE).is_file() == ("position" in config)
    if done.remote:
        assert (done.folder / MODELLING_FILE).read_text() == modelling_file()


def test_families_that_do_not_fit_are_not_mentioned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    latents = {"kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "num_kv_heads": 4}
    assert export(random_checkpoint(tmp_path / "run", **LLAMA | latents), tmp_path / "model").model_type != "llama"
    assert "ignored" not in caplog.text


@pytest.mark.parametrize("name", ["dynamic", "ALiBi", "one norm"])
def test_an_architecture_that_is_passed_over_describes_another_model(name: str) -> None:
    config = load_config([], SHAPE | WRITTEN[name][0])
    described, passed = comparable(config), 0
    for kind in EXPORTERS:
        written = {"model_type": kind} | EXPORTERS[kind].keys(config, _shared_keys(config, kind))
        try:
            if contradicts(described, read_config(written, Path("config.json"))[0]):
                passed += 1
                assert comparable(parse_config(written, Path("config.json"))) != described, kind
        except CheckpointError:
            continue
    assert passed > 9


def test_an_extension_can_be_left_out(tmp_path: Path) -> None:
    keys, _ = WRITTEN["ntk"]
    done = export(random_checkpoint(tmp_path / "run", **keys), tmp_path / "model", {"rope_scaling": None})
    assert done.model_type == "llama"


def test_a_hugging_face_folder_keeps_its_tokenizer(tmp_path: Path) -> None:
    once = export(random_checkpoint(tmp_path / "run", **NEOX), tmp_path / "once").folder
    scaling = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    again = export(once, tmp_path / "again", scaling)
    assert again.tokenizer_note is None
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors"):
        assert (again.folder / name).read_bytes() == (once / name).read_bytes()
    ends = [json.loads((folder / "config.json").read_text())["eos_token_id"] for folder in (once, again.folder)]
    assert ends[0] == ends[1] is not None


def test_a_folder_that_exists_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(CheckpointError, match="model: exists already; name a new folder"):
        export(random_checkpoint(tmp_path / "run", **NEOX), tmp_path / "model")
    assert not list((tmp_path / "model").iterdir())


def test_a_complete_folder_is_compared_outside_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill during the second comparison must not leave files in a folder that may be published."""
    source, model = random_checkpoint(tmp_path / "run", **NEOX), tmp_path / "model"
    export(source, model)
    files, seen = sorted(os.listdir(model)), []

    def record(written: Written, folder: Path, ids: torch.Tensor) -> Any:
        seen.append((folder.parent, sorted(os.listdir(model))))
        return compare(written, folder, ids)

    compare = transformers_check._their_logits
    monkeypatch.setattr(transformers_check, "_their_logits", record)
    (tmp_path / ".model.partial" / ".excerpt0").mkdir(parents=True)  # of a killed comparison
    export(source, model)
    assert seen == [(tmp_path / ".model.partial", files)]
    assert sorted(os.listdir(model)) == files and sorted(os.listdir(tmp_path)) == ["model", "run"]


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megatron_coca.checkpoints.huggingface.write.write_safetensors", full)
    checkpoint = random_checkpoint(tmp_path / "run", **NEOX)
    with pytest.raises(CheckpointError, match="model: cannot be written .No space left"):
        export(checkpoint, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("heads", [weight_map.Heads(4, 4), weight_map.Heads(4, 2), weight_map.Heads(4, 1)])
@pytest.mark.parametrize("trailing", [(), (5,)])
def test_packing_by_head_and_back(heads: weight_map.Heads, trailing: tuple[int, ...]) -> None:
    rows = (heads.query * 6, heads.key * 6, heads.key * 6)
    parts = [torch.randn(count, *trailing) for count in rows]
    packed = weight_map.BY_HEAD.join(parts, heads)
    assert packed.shape == (sum(rows), *trailing)
    back = weight_map.BY_HEAD.split(packed, heads, 3)
    assert all(torch.equal(one, other) for one, other in zip(parts, back, strict=True))
    if heads.query == heads.key:
        assert torch.equal(packed[6:12], parts[1][:6]), "the first head's key follows its query"


def test_a_tokenizer_that_cannot_be_expressed_is_copied_with_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = train_sentencepiece(["the sea was calm and a boat lay near"] * 9, 280, tmp_path / "spm")
    monkeypatch.setattr(export_tokenizer, "PROBES", ("the sea", "a \u2581 mark"))
    checkpoint = random_checkpoint(tmp_path / "run", tokenizer=tokenizer, **NEOX)
    done = export(checkpoint, tmp_path / "model")
    assert done.tokenizer_note is not None and "the folder has tokenizer.model instead" in done.tokenizer_note
    assert (done.folder / "tokenizer.model").is_file() and not (done.folder / "tokenizer.json").exists()


def test_the_tool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = random_checkpoint(tmp_path / "run", tokenizer=None, **LLAMA)
    changes = ["rope_scaling.rope_type=dynamic", "rope_scaling.factor=4"]
    assert main(["huggingface", str(run), str(tmp_path / "model"), "--dtype", "bfloat16", "--set", *changes]) == 0
    said = capsys.readouterr()
    assert "model: a llama model" in said.out and "the checkpoint has none" in said.err
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert "trust_remote_code" not in said.out
    assert config["dtype"] == "bfloat16" and config["rope_parameters"]["rope_type"] == "dynamic"
    assert config["vocab_size"] == 512 and config["intermediate_size"] == 52
    assert main(["huggingface", str(run), str(tmp_path / "other"), "--set", "logit_scaling=log_n"]) == 0
    assert "other: a coca_dense model" in (said := capsys.readouterr().out) and "trust_remote_code=True" in said
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "model").iterdir()}
    again = ["export", "huggingface", str(run), str(tmp_path / "model")]
    assert cli.main([*again, "--dtype", "bfloat16", "--set", *changes]) == 0, "a scheduler has started it again"
    assert "model: a llama model" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "model").iterdir()} == before
    for others in ([], ["--dtype", "float16", "--set", *changes]):
        assert cli.main([*again, *others]) == 2 and "exists already" in capsys.readouterr().err
    other = random_checkpoint(tmp_path / "run2", tokenizer=None, **LLAMA | {"seed": 5})
    again[2] = str(other)
    assert cli.main([*again, "--dtype", "bfloat16", "--set", *changes]) == 2
    assert "exists already" in capsys.readouterr().err
