"""`train hf://NAME finetune.yml`: the network comes from a model of the Hugging Face hub."""

from pathlib import Path

import pytest

from megatron_coca.checkpoints import CheckpointError, load
from megatron_coca.commands import train


def test_a_hub_name_is_the_model_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(name: str) -> Path:
        asked.append(name)
        raise CheckpointError("no network")

    monkeypatch.setattr(load, "_from_hub", download)
    with pytest.raises(CheckpointError, match="no network"):
        train.read_config(train.parser().parse_intermixed_args(["hf://some/model", "train_iters=1"]))
    assert asked == ["some/model"]
