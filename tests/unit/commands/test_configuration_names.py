"""Every command reads configurations under GPT-NeoX's names: `-d FOLDER`, without .yml, and without vocab_size."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_coca import cli
from megatron_coca.commands import estimate, generate, inspect, train
from megatron_coca.commands.evaluate import parser as evaluate_parser
from megatron_coca.config import load_config
from megatron_coca.evaluation.options import read_variants
from megatron_coca.support.errors import InputError
from tests.checkpoint_files import TINY, talkative_model, write_checkpoint
from tests.command_parsers import parsers

MODEL = {"num-layers": 1, "hidden-size": 32, "num-attention-heads": 2, "seq-length": 16, "no-weight-tying": True}
READS = ("inputs", "changes", "variant", "config")
"""Arguments that name configurations."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """GPT-NeoX's kind of folder: a model, and the settings of a computer."""
    (tmp_path / "own").mkdir()
    run = {"train_iters": 4, "train_micro_batch_size_per_gpu": 1, "optimizer": {"params": {"lr": 0.1}}}
    (tmp_path / "own/19M.yml").write_text(json.dumps(MODEL | run))
    (tmp_path / "own/local_setup.yml").write_text(json.dumps({"load": str(tmp_path / "run"), "pos_emb": "coca"}))
    return tmp_path / "own"


def test_commands_that_read_configurations_take_their_folder() -> None:
    commands = (train.parser(), estimate.parser(), inspect.parser(), generate.parser(), evaluate_parser())
    everything = [each for command in commands for each in parsers(command)]
    reading = [each for each in everything if {action.dest for action in each._actions} & {*READS}]
    assert len(reading) == 17, [each.prog for each in reading]
    assert all("-d" in each.format_help() and "--conf_dir" in each.format_help() for each in reading)


def facts(arguments: list[str]) -> tuple[int, str]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        return cli.main(arguments), out.getvalue()


@pytest.mark.parametrize(
    "command",
    [["estimate"], ["inspect", "method", "--length", "16", "--output", "page.html"]],
    ids=["estimate", "inspect method"],
)
def test_names_and_paths_are_the_same(
    command: list[str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words, options = command[: 2 if command[0] == "inspect" else 1], command[2:]
    named = facts([*words, "-d", "own", "19M", "local_setup", *options])
    assert named == facts([*words, "own/19M.yml", "own/local_setup.yml", *options])
    assert named[0] == 0 and ("parameters" in named[1] or "coca" in named[1])


def test_variants_are_named_like_configurations(folder: Path) -> None:
    line = ["perplexity", "--checkpoint", "x", "-d", str(folder), "--variant", "A", "local_setup", "seq_length=8"]
    (variant,) = read_variants(evaluate_parser().parse_args(line))
    assert (variant.files, variant.overrides) == ((str(folder / "local_setup.yml"),), ("seq_length=8",))


@pytest.mark.parametrize("step", [None, 7])
def test_generate_reads_the_checkpoint_that_load_names(
    step: int | None, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config([], TINY)
    write_checkpoint(tmp_path / "run", config, talkative_model(config).state_dict())
    ten = ["--prompt", "the sea", "--max-new-tokens", "10"]
    assert generate.main(["--checkpoint", str(tmp_path / "run"), *ten]) == 0
    wanted = capsys.readouterr().out
    keys = [] if step is None else [f"iteration={step}"]
    assert generate.main(["-d", str(folder), "local_setup", *keys, *ten]) == 0
    assert capsys.readouterr().out == wanted != "\n"


def test_generate_without_a_checkpoint_names_the_key(folder: Path) -> None:
    with pytest.raises(InputError, match="--checkpoint: not set; .*with the key load"):
        generate.main(["-d", str(folder), "19M"])


@pytest.mark.parametrize(
    ("keys", "size", "source"),
    [
        ({}, 1024, "that of the built-in corpus"),
        ({"data_path": "d/x", "vocab_file": "no.json"}, 50304, "assumed, because no.json is not here"),
        ({"data_path": "d/x"}, 50304, "assumed, because d/x is not here"),
    ],
    ids=["no data", "no tokenizer", "no file"],
)
def test_estimate_finds_or_assumes_a_vocabulary(
    keys: dict[str, Any],
    size: int,
    source: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["-d", str(folder), "19M", *(f"{key}={value}" for key, value in keys.items())]
    assert cli.main(["estimate", *given]) == 0
    found = capsys.readouterr()
    assert f"vocab_size: not set; it is {size:,}, {source}" in found.err
    assert cli.main(["estimate", *given, f"vocab_size={size}"]) == 0
    assert capsys.readouterr().out == found.out, "the same as with the key"
    assert not (tmp_path / "data").exists(), "nothing is prepared"


def test_estimate_reads_the_tokenizer_if_it_is_here(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vocabulary = {"<|endoftext|>": 0, **{chr(33 + number): number + 1 for number in range(90)}}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    files = [f"vocab_file={tmp_path / 'vocab.json'}", f"merge_file={tmp_path / 'merges.txt'}", "data_path=d/x"]
    assert cli.main(["estimate", "-d", str(folder), "19M", *files]) == 0
    assert "it is 91, that of the tokenizer\n" in capsys.readouterr().err


def test_estimate_takes_the_gpus_that_the_model_needs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["estimate", "-d", str(folder), "19M", "model_parallel_size=2", "vocab_size=512"]
    assert cli.main(line) == 0
    assert "tensor 2" in capsys.readouterr().out
    assert cli.main([*line, "num_gpus=1"]) == 2
    assert "does not divide 1 processes" in capsys.readouterr().err
