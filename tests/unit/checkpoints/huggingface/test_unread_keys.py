"""Keys of config.json without an effect are logged and ignored, and others can be ignored by hand."""

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_coca.checkpoints import CheckpointError, load_model
from megatron_coca.checkpoints.huggingface.families import FAMILIES
from megatron_coca.checkpoints.huggingface.unread_keys import NEVER_READ, keys_of_class
from megatron_coca.checkpoints.load import open_checkpoint
from megatron_coca.commands import evaluate, export, generate, import_checkpoint, train
from megatron_coca.evaluation.options import subject_options
from megatron_coca.support.arguments import source_keys

LLAMA = Path(__file__).parents[3] / "golden" / "authors" / "coca_llama"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A LLaMA folder with a key that transformers reads and this package does not."""
    return with_keys(tmp_path / "source", sliding_window=512)


def with_keys(folder: Path, **keys: Any) -> Path:
    folder.mkdir(exist_ok=True)
    shutil.copyfile(LLAMA / "model.safetensors", folder / "model.safetensors")
    values = json.loads((LLAMA / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | keys))
    return folder


@pytest.mark.parametrize("installed", [True, False])
def test_keys_that_the_class_does_not_read_are_logged(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without transformers, these are the keys of a list."""
    if not installed:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        keys_of_class.cache_clear()
    plain = load_model(LLAMA)(ids := torch.arange(20).view(1, 20))
    folder = with_keys(tmp_path / "source", use_sdpa=True, _model_name_or_path="x", neftune_noise_alpha=5)
    assert torch.equal(load_model(folder)(ids), plain)
    assert "ignored _model_name_or_path, neftune_noise_alpha, use_sdpa, because" in caplog.text
    with_keys(folder, attn_logit_softcapping=50.0)
    if installed:
        assert torch.equal(load_model(folder)(ids), plain)
        assert "ignored attn_logit_softcapping, because LlamaConfig" in caplog.text
    else:
        with pytest.raises(CheckpointError, match="attn_logit_softcapping: not supported"):
            load_model(folder)
        keys_of_class.cache_clear()


@pytest.mark.slow
def test_no_class_reads_a_key_of_the_list() -> None:
    """Of the families that are published with their own code, transformers has no class."""
    known = {kind: keys_of_class(kind) for kind in ("llama", "gpt_neox", *FAMILIES)}
    without = {kind for kind, keys in known.items() if keys is None}
    assert without == {"internlm2", "exaone", "xverse", "qwen", "chatglm", "baichuan"}
    assert {kind: found for kind, keys in known.items() if keys and (found := keys.names & NEVER_READ)} == {}


def test_a_key_ignored_by_hand_is_part_of_the_identity(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An unknown name is an error."""
    given = {"ignore_keys": ["sliding_window"]}
    opened = open_checkpoint(folder, overrides=given)
    assert "config.json: ignored sliding_window, as requested" in caplog.text
    assert opened.trained.position.sliding_window_width is None
    plain = open_checkpoint(with_keys(folder))
    assert opened.identity != plain.identity == open_checkpoint(LLAMA).identity
    with pytest.raises(CheckpointError, match="config.json: sliding_window: not in the file"):
        open_checkpoint(folder, overrides=given)


def test_every_command_that_opens_a_folder_has_the_option(folder: Path, tmp_path: Path) -> None:
    option = ["--ignore-key", "sliding_window"]
    assert import_checkpoint.main([str(folder), str(tmp_path / "imported"), *option]) == 0
    meta = json.loads((tmp_path / "imported" / "global_step0" / "meta.json").read_text())
    assert meta["imported"]["ignored_keys"] == ["sliding_window"]
    exported = ["huggingface", str(folder), str(tmp_path / "exported"), *option]
    assert export.main(exported) == 0 and "sliding_window" not in (tmp_path / "exported" / "config.json").read_text()
    options = train.parser().parse_args([str(folder), "train_iters=1", "train_batch_size=1", *option])
    config, _ = train.read_config(options)
    assert config.checkpoint.ignore_keys == ["sliding_window"] and config.checkpoint.load == str(folder)
    chosen = generate.parser().parse_intermixed_args(["--checkpoint", str(folder), *option, *option[:1], "b"])
    assert source_keys(chosen) == ['ignore_keys=["sliding_window", "b"]']
    command = ["perplexity", "--checkpoint", str(folder), "--data", "x", "--windows", "32", "--stride", "1", *option]
    (variant,) = subject_options(evaluate.parser().parse_args(command)).variants
    assert variant.overrides == ('ignore_keys=["sliding_window"]',) and variant.label == "source"
