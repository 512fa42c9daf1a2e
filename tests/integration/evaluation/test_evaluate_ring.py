"""Perplexity of windows that several processes divide by tokens."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_coca.commands import evaluate
from megatron_coca.config import load_config
from megatron_coca.evaluation import sequence_ring
from tests.checkpoint_files import write_checkpoint

MODEL: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "num_kv_heads": 1}
MODEL |= {"seq_length": 16, "vocab_size": 512, "pos_emb": "coca", "tokenizer_type": "CharLevelTokenizer"}
MODEL |= {"init_method_std": 0.3, "no_weight_tying": True}
VARIANTS = ["--variant", "plain", "--variant", "NTK", "rope_scaling.rope_type=dynamic", "rope_scaling.factor=4"]
VARIANTS += ["--variant", "ReRoPE", "relative_positions.type=rerope", "relative_positions.window=8"]
NAMES = ("plain", "NTK", "ReRoPE")
RELATIVE = 1e-6
"""Sums in another order, in float32; 1e-7 was seen."""


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("run")
    checkpoint = write_checkpoint(folder, load_config([], MODEL))
    text = folder / "text.jsonl"
    text.write_text("".join(json.dumps({"text": line * 6}) + "\n" for line in ("Call me Ishmael. ", "It is a truth. ")))
    line = ["perplexity", "--checkpoint", checkpoint, "--data", text, "--windows", "16,61", "--stride", "7"]
    return [*map(str, line), "--device", "cpu"]


def results(folder: Path) -> dict[str, Any]:
    found = [json.loads(path.read_text()) for path in folder.glob("*.json") if not path.name.endswith(".cost.json")]
    return {each["label"]: each for each in found}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_divided_windows_have_the_same_perplexity(
    ranks: int, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = [*arguments, *VARIANTS, "--vocabulary", "300", "--output"]
    ring = [*line, str(tmp_path / "ring"), "--context-parallel-size", str(ranks)]
    assert evaluate.main([*line, str(tmp_path / "whole")]) == 0 and evaluate.main(ring) == 0
    whole, divided = results(tmp_path / "whole"), results(tmp_path / "ring")
    assert whole.keys() == divided.keys() == set(NAMES)
    for label in NAMES:
        assert divided[label]["environment"]["backend"] == f"merge, {ranks} processes"
        for one, other in zip(whole[label]["results"], divided[label]["results"], strict=True):
            assert one["tokens_scored"] == other["tokens_scored"]
            assert one["correct_by_document"] == other["correct_by_document"]
            assert one["nll_by_document"] == pytest.approx(other["nll_by_document"], rel=RELATIVE)
    monkeypatch.setattr(sequence_ring.SequenceRing, "use", lambda *_: pytest.fail("nothing is left to measure"))
    assert evaluate.main(ring) == 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--jobs", "2"], "not supported with --jobs and --part"),
        (["--windows", "7", "--stride", "3"], "window 7: two chunks per rank need 8 tokens"),
        (["--set", "attention_backend=sdpa"], "only merge and reference return it"),
    ],
)
def test_what_cannot_be_divided(
    options: list[str], text: str, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [*arguments, "--context-parallel-size", "4", "--output", str(tmp_path), *options]
    assert evaluate.main(line) == 2
    assert text in capsys.readouterr().err
    assert not any(result["results"] for result in results(tmp_path).values())
