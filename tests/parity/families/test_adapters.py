"""The lines that merge adapters of peft, which are in the message on adapters that only peft can apply."""

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
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


def adapted(base: Path, rows: int | None = None, **options: Any) -> PeftModel:
    """The base model with random adapters, and with `rows` rows of its embeddings."""
    model = AutoModelForCausalLM.from_pretrained(base)
    torch.manual_seed(1)
    if rows is not None:
        model.resize_token_embeddings(rows, mean_resizing=False)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], **options))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight += torch.randn(weight.shape) * ("lora_" in name or "modules_to_save" in name)
    return model.eval()


def adapters(base: Path, folder: Path) -> Path:
    """Random ones, as peft saves them; transformers finds them there if a model is beside them."""
    adapted(base).save_pretrained(folder)
    return folder


def run(lines: list[str]) -> None:
    """Run the commands that a user is told to run, a program in this process."""
    for line in lines:
        words = shlex.split(line)
        if words[:2] == ["python", "-c"]:
            exec(words[2], {})
        else:
            subprocess.run(line, shell=True, check=True)


@pytest.mark.parametrize("place", ["alone", "beside the model"])
def test_the_lines_merge_them(place: str, base: Path, tmp_path: Path) -> None:
    before = load_model(base)(tokens(TRAINED))
    folder = adapters(base, tmp_path / "adapters" if place == "alone" else base)
    expected = theirs(folder, tokens(TRAINED))
    assert (expected - before).abs().max() > 0.5, "transformers applies them"
    with torch.no_grad():
        found = load_model(folder, {"base_model": str(base)})(tokens(TRAINED))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    lines = merging_lines(folder)
    assert len(lines) == (1 if place == "alone" else 3)
    run(lines)
    with torch.no_grad():
        torch.testing.assert_close(load_model(f"{folder}-merged")(tokens(TRAINED)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("prefix", ["", "base_model.model."])
def test_weights_that_were_trained_beside_them_are_merged_too(prefix: str, base: Path, tmp_path: Path) -> None:
    """LongLoRA stores embeddings and norms in a file of its own, which peft does not read."""
    model, folder = adapted(base), tmp_path / "adapters"
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight += torch.randn(weight.shape) * ("embed" in name or "norm" in name)
    model.save_pretrained(folder)
    own = {name.removeprefix("base_model.model."): weight.data for name, weight in model.named_parameters()}
    beside = {prefix + name: weight for name, weight in own.items() if "embed" in name or "norm" in name}
    torch.save(beside, folder / "trainable_params.bin")
    run(merging_lines(folder))
    with torch.no_grad():
        expected = model(tokens(TRAINED)).logits
        torch.testing.assert_close(load_model(f"{folder}-merged")(tokens(TRAINED)), expected, rtol=1e-5, atol=1e-5)
    torch.save({**beside, "model.vision.weight": torch.zeros(2)}, folder / "trainable_params.bin")
    with pytest.raises(AssertionError, match=r"model\.vision\.weight"):
        run(merging_lines(folder))


def test_a_vocabulary_that_grew(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    rows = json.loads((base / "config.json").read_text())["vocab_size"] + 3
    model = adapted(base, rows, modules_to_save=["embed_tokens", "lm_head"])
    model.save_pretrained(folder)
    run(merging_lines(folder))
    batch = torch.tensor([[rows - 1, *range(8)]])
    with torch.no_grad():
        expected = model(batch).logits
        torch.testing.assert_close(load_model(f"{folder}-merged")(batch), expected, rtol=1e-5, atol=1e-5)


def test_the_merged_model_gets_a_tokenizer(base: Path, tmp_path: Path) -> None:
    """It is that of the adapters, or else that of the base model with the chat template of the adapters."""
    folder, merged = adapters(base, tmp_path / "adapters"), tmp_path / "adapters-merged"
    (base / "tokenizer.json").write_text("base")
    (folder / "chat_template.jinja").write_text("adapters")
    run(merging_lines(folder))
    assert (merged / "tokenizer.json").read_text() == "base"
    assert (merged / "chat_template.jinja").read_text() == "adapters"
    (folder / "tokenizer.json").write_text("adapters")
    run(merging_lines(folder)[1:])
    assert (merged / "tokenizer.json").read_text() == "adapters"
    (tmp_path / "private").write_text("secret")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to(tmp_path / "private")
    with pytest.raises(CheckpointError, match="outside the folder"):
        merging_lines(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "owner/name"}))
    assert "snapshot_download as D; D('owner/name', allow_patterns=" in shlex.split(merging_lines(folder)[0])[2]


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
        assert "has PEFT adapters that only peft can apply" in said and "merge_and_unload" in said, command
        assert shlex.split(said.splitlines()[-1])[:2] == ["python", "-c"], "a name is no code"
    config = open_checkpoint(write(llama(), tmp_path / "plain")).trained
    with pytest.raises(CheckpointError, match="has PEFT adapters"):
        initial_model(load_config([], config.flat() | {"load": given, "finetune": True}), "cpu")
    (base / "adapter_config.json").rename(base / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="adapter_model.bin but no adapter_config.json"):
        open_checkpoint(base)
