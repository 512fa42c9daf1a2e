"""Sliding-window perplexity of exported models, computed again from the protocol's text by transformers alone."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatron_coca import load_model
from megatron_coca.checkpoints.huggingface.export import export
from megatron_coca.evaluation import sliding_window_perplexity
from tests.parity.exported import LLAMA, NEOX, TRAINED, random_checkpoint

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


@torch.no_grad()
def plain_loop(model: PreTrainedModel, window: int, stride: int) -> tuple[float, int]:
    """Perplexity and the number of scored tokens: one window at a time, all logits of it."""
    total, count = 0.0, 0
    for document in documents():
        scored = 1
        while scored < len(document):
            end = window if scored == 1 else min(scored + stride, len(document))
            read = document[:window] if scored == 1 else document[end - 1 - window : end - 1]
            assert len(read) == window
            logs = model(read[None]).logits[0].double().log_softmax(dim=-1)
            targets = document[scored:end]
            rows = logs[scored - 1 : end - 1] if scored == 1 else logs[window - len(targets) :]
            total -= rows[torch.arange(len(targets)), targets].sum().item()
            count, scored = count + len(targets), end
    return math.exp(total / count), count


@pytest.mark.parametrize("stride", [13, TRAINED])
@pytest.mark.parametrize("name", SHAPES)
def test_perplexity_is_that_of_transformers(name: str, stride: int, tmp_path: Path) -> None:
    checkpoint = random_checkpoint(tmp_path / "run", **SHAPES[name])
    folder = export(checkpoint, tmp_path / "exported").folder
    windows = [TRAINED, 2 * TRAINED, 4 * TRAINED]
    arrays = [document.numpy().astype(np.int64) for document in documents()]
    found = sliding_window_perplexity(load_model(checkpoint), arrays, windows, stride, progress=False)
    for window, ours in zip(windows, found, strict=True):
        # A fresh one for each window: transformers' dynamic extension remembers the longest input it has seen.
        theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        perplexity, count = plain_loop(theirs, window, stride)
        assert ours.tokens_scored == count == sum(LENGTHS) - len(LENGTHS)
        assert ours.perplexity == pytest.approx(perplexity, rel=1e-5)
    assert len({round(each.perplexity, 2) for each in found}) > 1, "windows differ, so that the comparison can fail"
