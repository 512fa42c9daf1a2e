"""The benchmark of the families: its models are those of the table, its record is complete and prints as a row."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from megatron_coca.checkpoints.huggingface import families
from megatron_coca.checkpoints.huggingface.config_json import OURS, READERS, parse_config
from megatron_coca.checkpoints.huggingface.families import published_code
from megatron_coca.model.cost import parameter_count
from tools import bench_families

COSTS = {f"import_{unit}_{way}" for unit in ("seconds", "bytes") for way in ("ours", "transformers")}
SPEEDS = {f"tokens_per_second_{times}L_{way}" for times in (1, 4, 16) for way in ("ours", "transformers")}
RATIOS = {f"ratio_{quartiles}{times}L" for times in (1, 4, 16) for quartiles in ("", "quartiles_")}
FIELDS = {"benchmark", "family", "parameters", "error_1L", "error_4L", "logits_std"} | COSTS | SPEEDS | RATIOS


@pytest.mark.parametrize("name", bench_families.FAMILIES)
def test_a_model_is_read_with_the_parameters_of_its_class(name: str, tmp_path: Path) -> None:
    kind, values = bench_families.FAMILIES[name]
    settings = getattr(transformers, f"{kind}Config")(**values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings)
    config = parse_config(settings.to_dict(), tmp_path / "config.json")
    saved = model.state_dict()  # the constants of xIELU are saved, too
    kept = (buffer for key, buffer in model.named_buffers() if key in saved)
    count = sum(tensor.numel() for tensor in (*model.parameters(), *kept))
    assert count == parameter_count(config).total and 25e6 < count < 55e6
    assert config.model.seq_length in (2048, 4096, 4097)  # BLOOM has no key for it; tables have the last label's too


def test_every_family_is_measured() -> None:
    measured = {getattr(transformers, f"{kind}Config").model_type for kind, _ in bench_families.FAMILIES.values()}
    without_class = {"gpt-sw3", *published_code.FAMILIES}
    assert measured == families.FAMILIES.keys() - without_class | (READERS.keys() - {OURS})


def test_an_unknown_family(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_families.main(["qwen3", "qwen33"])
    error = capsys.readouterr().err
    assert "qwen33: unknown family" in error and " gpt_neox, llama" in error


def test_a_row_without_logits_and_speeds() -> None:
    costs = dict.fromkeys(sorted(COSTS), 2e6)
    assert bench_families.row({"family": "glm4"} | costs).split("|")[4:6] == [" 2000000.0 s, 2 MB "] * 2


@pytest.mark.slow
def test_a_family_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A small Gemma 3, with the processes of the command."""
    shape = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "head_dim": 8}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "sliding_window": 6}
    monkeypatch.setitem(bench_families.FAMILIES, "gemma3", ("Gemma3Text", shape))
    monkeypatch.setitem(bench_families.BLOCK, "vocab_size", 96)
    monkeypatch.setattr(bench_families, "TRAINED", 8)
    output = tmp_path / "families.jsonl"
    assert bench_families.main(["gemma3", "--rounds", "1", "--output", str(output)]) == 0
    (line,) = output.read_text().splitlines()
    record = json.loads(line)
    assert record.keys() >= FIELDS and record["family"] == "gemma3"
    assert record["error_4L"] < 1e-4 < 1e-2 < record["logits_std"]
    assert all(record[name] > 0 for name in COSTS | SPEEDS)
    assert capsys.readouterr().out.splitlines()[-1] == bench_families.row(record)
    assert bench_families.row(record).count("|") == 9
