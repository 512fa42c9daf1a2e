"""An error is at the layer that causes it: a key of the command line is never an error of a file."""

from pathlib import Path

import pytest

from megatron_coca import cli
from megatron_coca.config import ConfigError, load_config
from tests.checkpoint_files import TINY, write_checkpoint

MODEL = """\
num_layers: 2
hidden_size: 32
num_attention_heads: 4
seq_length: 16
vocab_size: 512
zero_optimization: {stage: 1}
optimizer: {params: {lr: 1.0e-3}}
train_micro_batch_size_per_gpu: 4
train_iters: 20
"""
HOST = "precision: fp32\nnum_workers: 0\n"


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    (tmp_path / "model.yml").write_text(MODEL)
    (tmp_path / "host.yml").write_text(HOST)
    return [str(tmp_path / "model.yml"), str(tmp_path / "host.yml")]


def problems(files: list[str], *keys: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load_config(files, keys)
    return error.value.problems


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (["hidden_size=33"], "command line, with {model}:3: num_attention_heads: 4 heads"),
        (["bf16.enabled=true"], "command line, with {host}:1: precision: bf16 and fp32"),
        (["zero_optimization.stage=7"], "command line: zero_optimization: stage 7"),
        (["train_data_paths=[a]"], "command line: valid_data_paths: missing"),
        (["training_positions.type=shifted"], "command line: training_positions.max: required, but missing"),
        (["kv_channels=3"], "command line: rotary_pct: 1.0 of 3 features per head"),
        (["rope_scaling.rope_type=yarn"], "command line: rope_scaling: rope_type yarn needs"),
        (["rope_scaling.factr=2"], "command line: rope_scaling.factr: unknown key"),
        (["hidden_sise=3"], "command line: hidden_sise: unknown key"),
        (["optimizer.params.lr=abc"], "command line: optimizer.params.lr: expected a number"),
        (["train_batch_size=6"], "command line: train_batch_size: 6 is not a multiple"),
        (["num_layers=null"], "command line: num_layers: required, but missing"),
        (["stages=[{until: 30}, {}]"], "command line: stages[0].until: step 30 leaves no step"),
        (["stages=[{until: 10}, {}]", "train_iters=5"], "command line: stages[0].until: step 10 leaves no step"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_command_line_is_blamed_for_its_keys(keys: list[str], line: str, files: list[str]) -> None:
    found = problems(files, "pos_emb=rotary", *keys, "seed=3")
    assert any(each.startswith(line.format(model=files[0], host=files[1])) for each in found), found
    assert all(each.startswith("command line") for each in found), found


def test_a_file_is_blamed_for_its_own_error_whatever_is_on_the_command_line(files: list[str]) -> None:
    Path(files[0]).write_text(MODEL.replace("hidden_size: 32", "hidden_size: 33"))
    (line,) = problems(files, "seed=3", "num_workers=1")
    assert line.startswith(f"{files[0]}:3: num_attention_heads: 4 heads")


def test_an_overlay_is_blamed_with_the_place_that_it_contradicts(files: list[str]) -> None:
    Path(files[1]).write_text("hidden_size: 33\n")
    (line,) = problems(files, "seed=3")
    assert line.startswith(f"{files[1]}, with {files[0]}:3: num_attention_heads: 4 heads")


def test_stages_of_a_file_and_steps_of_the_command_line(files: list[str]) -> None:
    Path(files[1]).write_text("stages: [{until: 10}, {}]\n")
    line, *_ = problems(files, "train_iters=5")
    assert line.startswith(f"command line, with {files[1]}:1: stages[0].until: step 10 leaves no step")


@pytest.mark.parametrize(
    "command",
    ["train {files} {key}", "estimate {files} {key}", "inspect mixture {files} {key}",
     "inspect method {files} {key} --output x.html", "generate --checkpoint {run} --prompt a {key}",
     "export huggingface {run} {new} --set {key}", "export neox {run} {new} --set {key}",
     "import {run} {new} --set {key}", "evaluate passkey --checkpoint {run} --lengths 16 --set {key}",
     "evaluate passkey --checkpoint {run} --lengths 16 --variant a {files} {key}",
     "evaluate speed --config {files} --lengths 16 --set {key}"],
)  # fmt: skip
def test_commands_blame_the_command_line(
    command: str, files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save = write_checkpoint(tmp_path / "run", load_config([], TINY))
    line = command.format(files=" ".join(files), key="hidden_size=33", run=save, new=tmp_path / "new")
    assert cli.main(line.split()) == 2
    shown = capsys.readouterr().err
    lines = [each for each in shown.splitlines() if "heads do not divide hidden_size 33" in each]
    assert lines and all("command line" in each for each in lines), shown
