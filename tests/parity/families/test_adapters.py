"""Reading a folder with adapters of peft is an error. Its message has lines that merge them."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from megatron_coca import cli, load_model
from megatron_coca.checkpoints import CheckpointError, open_checkpoint
from megatron_coca.checkpoints.adapters import merging_lines
from megatron_coca.config import load_config
from megatron_coca.training.checkpointing.initial_model import initial_model
from tests.parity.foreign import TRAINED, llama, theirs, tokens, write


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write(llama(), tmp_path / "base")


def adapters(base: Path, folder: Path) -> Path:
    """Random ones, as peft saves them; transformers finds them there if a model is beside them."""
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=4, target_modules=["q_proj"]))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight += torch.randn(weight.shape) * ("lora_" in name)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("place", ["alone", "beside the model"])
def test_the_lines_merge_them(place: str, base: Path, tmp_path: Path) -> None:
    before = load_model(base)(tokens(TRAINED))
    folder = adapters(base, tmp_path / "adapters" if place == "alone" else base)
    expected = theirs(folder, tokens(TRAINED))
    assert (expected - before).abs().max() > 0.5, "transformers applies them"
    with pytest.raises(CheckpointError, match="has PEFT adapters .adapter_config.json, adapter_model.safetensors"):
        load_model(folder)
    *moves, last = map(shlex.split, merging_lines(folder))
    if moves:
        assert place == "beside the model" and moves[0] == ["mkdir", f"{folder}-adapters"]
        Path(moves[0][1]).mkdir()
        for file in folder.glob("adapter_*"):
            shutil.move(file, moves[0][1])
    assert last[:2] == ["python", "-c"]
    exec(last[2], {})  # the program that a user is told to run
    with torch.no_grad():
        torch.testing.assert_close(load_model(f"{folder}-merged")(tokens(TRAINED)), expected, rtol=1e-5, atol=1e-5)


def test_every_way_to_a_checkpoint(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (base / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "a'b; touch x", "r": 4}))
    given, output = str(base), str(tmp_path / "output")
    perplexity = ["perplexity", "--windows", "16", "--stride", "8", "--data", str(base / "config.json")]
    commands = [
        ["import", given, output],
        ["export", "huggingface", given, output],
        ["export", "neox", given, output],
        ["evaluate", *perplexity, "--checkpoint", given],
        ["generate", "--checkpoint", given, "--prompt", "a"],
    ]
    for command in commands:
        assert cli.main(command) == 2
        said = capsys.readouterr().err
        assert "has PEFT adapters (adapter_config.json)" in said and "merge_and_unload" in said, command
        assert shlex.split(said.splitlines()[-1])[:2] == ["python", "-c"], "a name is no code"
    config = open_checkpoint(write(llama(), tmp_path / "plain")).trained
    with pytest.raises(CheckpointError, match="has PEFT adapters"):
        initial_model(load_config([], config.flat() | {"load": given, "finetune": True}), "cpu")
    (base / "adapter_config.json").rename(base / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="adapter_model.bin but no adapter_config.json"):
        open_checkpoint(base)
