"""The benchmark of evaluation: agreement with transformers, and its records."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tools import bench_evaluation


class HereInstead:
    """A `ChildProcess` that calls its function in this process."""

    def __init__(self, build: Callable[..., Callable[..., Any]], *arguments: Any) -> None:
        self._call = build(*arguments)

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)


def test_losses_that_disagree() -> None:
    with pytest.raises(RuntimeError, match=r"transformers, float32: .* 2\.0100 .*not 2\.0000"):
        bench_evaluation.check(
            {("ours", "float32"): 2.0, ("ours", "bfloat16"): 2.01, ("transformers", "float32"): 2.01}
        )


@pytest.mark.slow
@pytest.mark.parametrize("layers", [2, None])
def test_windows_and_decoding(layers: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --layers, all layers are kept."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 64}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(tmp_path / "model")
    monkeypatch.setattr(bench_evaluation, "ChildProcess", HereInstead)
    kept = [] if layers is None else ["--layers", str(layers)]
    given = ["--lengths", "1L", "96", *kept, "--rounds", "2", "--scored", "16", "--tokens", "3"]
    assert bench_evaluation.main([str(tmp_path / "model"), *given, "--output", str(tmp_path / "out.jsonl")]) == 0
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(each["length"], each["kind"]) for each in records] == [
        (length, kind) for length in (64, 96) for kind, count in (("window", 6), ("decode", 4)) for _ in range(count)
    ]
    assert all(each["tokens_per_second"] > 0 and each["layers"] == layers for each in records)
    same = [each["against_float32"]["ratio"] for each in records if each["implementation"] == "transformers"][::2]
    assert same == [1.0] * 4
