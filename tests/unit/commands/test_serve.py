"""`megatron-coca serve`: the commands that serve an export, or why there are none."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_coca import cli
from megatron_coca.checkpoints.exporting import export
from tests.parity.exported import LLAMA, random_checkpoint

Served = Callable[..., str]
YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Served:
    """What the command prints for the export `out` of a model with some keys, of 32 tokens of training."""
    monkeypatch.chdir(tmp_path)

    def run(*options: str, **keys: Any) -> str:
        for folder in ("run", "out"):
            shutil.rmtree(tmp_path / folder, ignore_errors=True)
        export(random_checkpoint(tmp_path / "run", **LLAMA, **keys), tmp_path / "out")
        capsys.readouterr()
        assert cli.main(["serve", "out", *options]) == 0
        return capsys.readouterr().out

    return run


def test_our_modelling_file(served: Served) -> None:
    lines = served("--length", "100", pos_emb="coca").splitlines()
    assert "  transformers serve --trust-remote-code --force-model out" in lines
    vllm = "vllm serve out --trust-remote-code --model-impl transformers --max-model-len 100"
    assert f"  VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 {vllm}" in lines
    sglang = "python -m sglang.launch_server --model-path out --trust-remote-code --model-impl transformers"
    assert f"  SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 {sglang} --context-length 100" in lines
    assert any("runs modeling_coca.py" in line for line in lines)


def test_mixtures_of_experts_in_our_modelling_file(served: Served) -> None:
    text = served(pos_emb="coca", moe_num_experts=4, moe_top_k=2)
    assert "vLLM was not tried with mixtures of experts" in text
    assert "was not tried" not in served(pos_emb="coca")


def test_a_stock_class(served: Served) -> None:
    text = served()
    assert "trust" not in text and "\n  vllm serve out\n" in text and "--model-path out\n" in text


@pytest.mark.parametrize(
    ("keys", "length", "reason"),
    [
        ({}, 33, "--length 33: the table of rotations has 32 rows"),
        ({"rope_scaling": YARN}, 129, "--length 129: the table of rotations has 128 rows"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, 8, "would compute wrong numbers without an error"),
        ({"pos_emb": "learned", "max_position_embeddings": 64}, 65, "--length 65: the model has 64 learned positions"),
        ({"pos_emb": "alibi"}, 8, "vLLM does not support the model's own mask"),
    ],
)
def test_a_reason(keys: dict[str, Any], length: int, reason: str, served: Served) -> None:
    text = served("--length", str(length), **keys)
    assert "vLLM cannot serve the folder:" in text and reason in text and "vllm serve" not in text


def test_one_text_at_a_time(served: Served) -> None:
    assert "Send one text at a time" in served(rope_scaling={"rope_type": "dynamic", "factor": 4.0})


@pytest.mark.parametrize(("keys", "length"), [({"rope_scaling": YARN}, 128), ({}, 32), ({"pos_emb": "none"}, 900)])
def test_a_length_that_fits(keys: dict[str, Any], length: int, served: Served) -> None:
    assert f"--max-model-len {length}\n" in served("--length", str(length), **keys)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"r": 8}, "vllm serve me/base --enable-lora --lora-modules mine=mine --max-lora-rank 8\n"),
        ({"r": 8, "rank_pattern": {"q_proj": 32}}, "--max-lora-rank 32\n"),
        ({"r": 8, "use_dora": True}, "vLLM does not apply adapters with use_dora"),
        ({"r": 8, "base_model_name_or_path": "--trust-remote-code"}, "vllm serve BASE --enable-lora"),
        ({"r": 8, "base_model_name_or_path": "a b; rm"}, "vllm serve BASE --enable-lora"),
    ],
)
def test_adapters(
    settings: dict[str, Any],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    given = {"peft_type": "LORA", "base_model_name_or_path": "me/base"} | settings
    (tmp_path / "mine/adapter_config.json").write_text(json.dumps(given))
    assert cli.main(["serve", "mine"]) == 0
    assert expected in capsys.readouterr().out


def test_adapters_of_our_export_need_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, settings in (
        ("mine/adapter_config.json", {"peft_type": "LORA", "base_model_name_or_path": "base", "r": 8}),
        ("base/config.json", {"model_type": "coca_dense"}),
    ):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(json.dumps(settings))
    assert cli.main(["serve", "mine"]) == 0
    out = capsys.readouterr().out
    assert "transformers serve --trust-remote-code --force-model mine\n" in out
    assert "runs modeling_coca.py of base" in out
    assert "--max-lora-rank 8 --trust-remote-code --model-impl transformers\n" in out


def test_a_run_is_exported_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save = random_checkpoint(tmp_path / "run").parent
    assert cli.main(["serve", str(save)]) == 2
    message = f"export a checkpoint with `megatron-coca export huggingface {save} FOLDER`, and name that folder"
    assert message in capsys.readouterr().err
