"""Sliding-window perplexity of exported models, computed from the protocol's text with only transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_coca import load_model
from megatron_coca.checkpoints.exporting import export
from megatron_coca.evaluation import sliding_window_perplexity
from tests.parity.exported import LLAMA, NEOX, TRAINED, random_checkpoint
from tests.plain_perplexity import plain_loop

DYNAMIC = {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "rotary_pct": 1.0}
SHAPES: dict[str, dict[str, Any]] = {
    "neox": NEOX,
    "neox dynamic": NEOX | DYNAMIC,
    "llama dynamic": LLAMA | DYNAMIC,
    "llama yarn, grouped": LLAMA | {"num_kv_heads": 2, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
}
LENGTHS = (4 * TRAINED + 45, 4 * TRAINED, 6 * TRAINED + 1)


def documents() -> list[Tensor]:
    draw = torch.Generator().manual_seed(5)
    return [torch.randint(500, (length,), generator=draw) for length in LENGTHS]


@pytest.mark.parametrize(
    ("name", "stride"),
    [("neox", 13), ("neox dynamic", TRAINED), ("llama dynamic", 13), ("llama yarn, grouped", TRAINED)],
)
def test_perplexity_is_that_of_transformers(name: str, stride: int, tmp_path: Path) -> None:
    checkpoint = random_checkpoint(tmp_path / "run", **SHAPES[name])
    folder = export(checkpoint, tmp_path / "exported").folder
    windows = [TRAINED, 2 * TRAINED, 4 * TRAINED]
    arrays = [document.numpy().astype(np.int64) for document in documents()]
    found = sliding_window_perplexity(load_model(checkpoint), arrays, windows, stride, progress=False)
    for window, ours in zip(windows, found, strict=True):
        # A fresh one for each window: transformers' dynamic extension remembers the longest input it has seen.
        theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        perplexity, count = plain_loop(theirs, documents(), window, stride)
        assert ours.tokens_scored == count == sum(LENGTHS) - len(LENGTHS)
        assert ours.perplexity == pytest.approx(perplexity, rel=1e-5)
    assert len({round(each.perplexity, 2) for each in found}) > 1, "windows differ, so that the comparison can fail"
