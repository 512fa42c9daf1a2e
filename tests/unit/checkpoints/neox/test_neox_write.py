"""What cannot be written for GPT-NeoX, the configuration that is written, and the tool."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megatron_coca import cli
from megatron_coca.checkpoints import CheckpointError, open_checkpoint
from megatron_coca.checkpoints.exporting import export_neox
from megatron_coca.commands.export import main
from megatron_coca.config import load_config
from megatron_coca.model import build_model
from tests.checkpoint_files import write_checkpoint
from tests.parity.exported import LLAMA, NEOX, SHAPE, random_checkpoint

TWO_LENGTHS = {"rope_type": "linear", "factor": 4.0, "original_max_position_embeddings": 8}
REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "KERPLE": (
        {"pos_emb": "kerple_log"},
        1,
        "GPT-NeoX's layout cannot represent the model: pos_emb kerple_log: GPT-NeoX",
    ),
    "CLEX": (
        {"rope_scaling": {"rope_type": "clex"}},
        1,
        "GPT-NeoX's layout cannot represent the model: rope_scaling clex: GPT-NeoX has no weights",
    ),
    "norm": ({"use_bias_in_norms": False}, 1, "GPT-NeoX's layernorm always has a bias"),
    "attention": (
        LLAMA | {"gpt_j_residual": True},
        1,
        "gpt_j_residual: without use_bias_in_mlp, GPT-NeoX omits the attention output",
    ),
    "activation": (
        {"use_bias_in_mlp": False},
        1,
        "use_bias_in_mlp: without this key, GPT-NeoX supports only gated activations",
    ),
    "base": ({"rotary_emb_base": 5000.5}, 1, "rotary_emb_base: must be a whole number"),
    "width": ({"intermediate_size": 63}, 1, "the width inside the MLP must be even"),
    "heads": ({}, 3, r"num_attention_heads \(4\) is not a multiple of 3; .*vocabulary \(512\) is not a multiple of 3"),
    "key heads": (
        LLAMA | {"num_kv_heads": 1},
        2,
        r"cannot represent the model: num_kv_heads \(1\) is not a multiple of 2$",
    ),
    "ranks": ({}, 0, "model_parallel_size: must be"),
    "two lengths": (
        {"logit_scaling": "log_n", "rope_scaling": TWO_LENGTHS},
        1,
        "logit_scaling .* depend on seq_length.*in the GPT-NeoX plugin on .*original_max_position",
    ),
    "two lengths, a map": (
        {"relative_positions": {"type": "rerope"}, "rope_scaling": TWO_LENGTHS},
        1,
        "the defaults of relative_positions: depend on seq_length",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_the_layout_cannot_represent(name: str, tmp_path: Path) -> None:
    keys, ranks, message = REFUSED[name]
    checkpoint = random_checkpoint(tmp_path / "run", **keys)
    with pytest.raises(CheckpointError, match=message):
        export_neox(checkpoint, tmp_path / "out" / "neox", model_parallel_size=ranks)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_an_extension_can_be_left_out(tmp_path: Path) -> None:
    extended = {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    checkpoint = random_checkpoint(tmp_path / "run", **extended)
    assert export_neox(checkpoint, tmp_path / "extended").foreign == ("rope_scaling",)
    plain = export_neox(checkpoint, tmp_path / "plain", {"rope_scaling": None})
    assert plain.foreign == () and not (plain.step / "configs" / "model.yml").read_text().startswith("#")
    assert open_checkpoint(plain.folder).trained.position.rope_scaling is None


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "keys",
    [
        NEOX | {"bias_gelu_fusion": True, "rotary_emb_base": 500000.0},
        LLAMA | {"num_kv_heads": 2, "rms_norm_epsilon": 1e-5},
        {"pos_emb": "learned", "max_position_embeddings": 40, "expansion_factor": 2.0},
        {"pos_emb": "coca", "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": False}},
        {"relative_positions": {"type": "self_extend", "window": 8}, "logit_scaling": "log_n"},
        {"relative_positions": {"type": "rerope", "window": 8}, "rope_scaling": TWO_LENGTHS},
    ],
)
def test_the_configuration_comes_back(keys: dict[str, Any], ranks: int, tmp_path: Path) -> None:
    checkpoint = random_checkpoint(tmp_path / "run", **keys)
    done = export_neox(checkpoint, tmp_path / "neox", model_parallel_size=ranks)
    before, after = (open_checkpoint(place).trained for place in (checkpoint, done.folder))
    assert before.model.ffn_hidden_size == after.model.ffn_hidden_size
    assert before.model.padded_vocab_size == after.model.padded_vocab_size
    spelled = {"vocab_size", "make_vocab_size_divisible_by", "intermediate_size", "expansion_factor"}
    kept = set(type(before.model).model_fields) - spelled - {"use_bias_in_norms"}
    assert {name: getattr(before.model, name) for name in kept} == {name: getattr(after.model, name) for name in kept}
    assert before.position == after.position


def test_entries_that_stock_gpt_neox_reads(tmp_path: Path) -> None:
    """Its types are exact, no key is repeated, and its padding gives our number of rows for any tokenizer."""
    checkpoint = random_checkpoint(tmp_path / "run", **LLAMA)
    done = export_neox(checkpoint, tmp_path / "neox", model_parallel_size=2)
    keys = yaml.safe_load((done.step / "configs" / "model.yml").read_text())
    assert type(keys["rotary_emb_base"]) is int and type(keys["rotary_pct"]) is float
    assert type(keys["rms_norm_epsilon"]) is float and not keys.keys() & {"vocab_size", "rope_scaling"}
    multiple = keys["make_vocab_size_divisible_by"] * keys["model_parallel_size"]
    assert all(-(-count // multiple) * multiple == 512 for count in (300, 500, 512))
    rank = torch.load(done.step / "mp_rank_01_model_states.pt", weights_only=True)
    assert rank["module"] is None and rank["mp_world_size"] == 2 and rank["iteration"] == 7
    assert rank["args"].items() <= (keys | {"padded_vocab_size": 512}).items()


def test_weights_that_do_not_fit_their_configuration(tmp_path: Path) -> None:
    config = load_config([], SHAPE)
    weights = build_model(config).state_dict()
    weights["norm.weight"] = weights.pop("norm.bias")[:8].clone()
    checkpoint = write_checkpoint(tmp_path / "run", config, weights)
    with pytest.raises(CheckpointError, match=r"missing norm.bias; norm.weight .*\[8\], the model \[32\]"):
        export_neox(checkpoint, tmp_path / "neox")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_folder_that_exists_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "neox").mkdir()
    with pytest.raises(CheckpointError, match="neox: exists already; name a new folder"):
        export_neox(random_checkpoint(tmp_path / "run"), tmp_path / "neox")
    assert not list((tmp_path / "neox").iterdir())


@pytest.mark.parametrize(
    "failure", [OSError(28, "No space left on device"), RuntimeError("PytorchStreamWriter failed")]
)
def test_a_failed_write_leaves_nothing(failure: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise failure

    checkpoint = random_checkpoint(tmp_path / "run")
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointError, match="neox: cannot be written .*(No space|PytorchStream)"):
        export_neox(checkpoint, tmp_path / "neox")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_tool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = random_checkpoint(tmp_path / "run", **NEOX | {"pos_emb": "coca"})
    more = ["--dtype", "bfloat16", "--model-parallel-size", "2", "--pipe-parallel-size", "0"]
    assert main(["neox", str(run), str(tmp_path / "neox"), *more, "--set", "rotary_emb_base=50000"]) == 0
    said = capsys.readouterr()
    assert "`finetune: true`\n" in said.out
    assert "does not support its keys pos_emb" in said.err
    opened = open_checkpoint(tmp_path / "neox")
    assert opened.trained.position.rotary_emb_base == 50000.0 and opened.trained.position.pos_emb == "coca"
    assert {entry.dtype for entry in opened.weights().entries.values()} == {torch.bfloat16}
    again = ["export", "neox", str(run), str(tmp_path / "neox")]
    assert cli.main([*again, *more, "--set", "rotary_emb_base=50000"]) == 0
    assert capsys.readouterr().out == said.out
    for others in ([], [*more, "--set", "rotary_emb_base=40000"], ["--dtype", "float16", *more[2:]]):
        assert cli.main([*again, *others]) == 2 and "exists already" in capsys.readouterr().err
