"""`train hf://NAME finetune.yml`: the network comes from a model of the Hugging Face hub."""

from pathlib import Path

import pytest

from megatron_coca.checkpoints import CheckpointError, load
from megatron_coca.commands import train
from megatron_coca.config import ConfigError


def test_a_hub_name_is_the_model_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(name: str) -> Path:
        asked.append(name)
        raise CheckpointError("no network")

    monkeypatch.setattr(load, "from_hub", download)
    with pytest.raises(CheckpointError, match="no network"):
        train.read_config(train.parser().parse_intermixed_args(["hf://some/model", "train_iters=1"]))
    assert asked == ["some/model"]


def test_a_bare_name_of_the_hub_is_answered_with_the_right_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="name it hf://some/model"):
        train.read_config(train.parser().parse_intermixed_args(["some/model", "train_iters=1"]))
    (tmp_path / "some").mkdir()
    with pytest.raises(ConfigError, match=r"some/model\.yml: no such file"):
        train.read_config(train.parser().parse_intermixed_args(["some/model", "train_iters=1"]))
