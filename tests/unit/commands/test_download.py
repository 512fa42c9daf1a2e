"""`megatron-coca download` and the files that it asks the hub for."""

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_coca import cli
from megatron_coca.checkpoints.hub import FILES, PICKLES


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The calls of a hub that has every model, of which only owner/pickled has no safetensors files."""
    calls: list[dict[str, Any]] = []
    shape = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=1, max_position_embeddings=32))

    def snapshot(name: str, **options: Any) -> str:
        calls.append({"name": name, **options})
        if name == "owner/none":
            raise OSError("offline")
        if name == "owner/adapters":
            options["local_dir"].mkdir()
            for file in ("adapter_config.json", "adapter_model.safetensors"):
                (options["local_dir"] / file).write_text("{}")
        elif name != "owner/pickled":
            model.save_pretrained(options["local_dir"])
        return str(options["local_dir"])

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    return calls


def test_a_model_is_downloaded_and_described(asked: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["download", "hf://owner/it"]) == 0
    assert [(call["name"], call["local_dir"]) for call in asked] == [("owner/it", Path("models/it"))]
    said = capsys.readouterr().out
    assert "models/it: Hugging Face folder, weights fit" in said and "pos_emb: rotary" in said
    assert cli.main(["download", "owner/it", "--output", "elsewhere"]) == 0
    assert asked[-1]["local_dir"] == Path("elsewhere") and Path("elsewhere/config.json").exists()


def test_pickles_are_asked_for_only_without_safetensors(asked: list[dict[str, Any]]) -> None:
    assert cli.main(["download", "owner/it"]) == 0
    assert [call["allow_patterns"] for call in asked] == [FILES]
    assert cli.main(["download", "owner/pickled"]) == 2
    assert [call["allow_patterns"] for call in asked[1:]] == [FILES, [*FILES, *PICKLES]]


def test_adapters_say_how_they_are_used(asked: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    Path("models").mkdir()
    assert cli.main(["download", "owner/adapters"]) == 0
    assert "with --checkpoint models/adapters --base MODEL" in capsys.readouterr().out


def test_no_network(asked: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["download", "owner/none"]) == 2
    assert "hf://owner/none: cannot be downloaded (offline)" in capsys.readouterr().err
