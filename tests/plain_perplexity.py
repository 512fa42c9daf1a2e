"""Sliding-window perplexity computed from the protocol's text, with only a model of transformers."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel


@torch.no_grad()
def plain_loop(model: PreTrainedModel, documents: Sequence[Tensor], window: int, stride: int) -> tuple[float, int]:
    """Perplexity and the number of scored tokens: one window at a time, all logits of it."""
    total, count = 0.0, 0
    for document in documents:
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
