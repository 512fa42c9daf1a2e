"""Which activations of the blocks are kept for the backward pass, and which are computed again."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from megatron_coca.attention.frame import Frame
from megatron_coca.config import ModelConfig

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]

EXPENSIVE = frozenset(
    packet.default
    for packet in (
        torch.ops.aten.mm,
        torch.ops.aten.addmm,
        torch.ops.aten.bmm,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
        torch.ops.aten._scaled_dot_product_flash_attention,
        torch.ops.aten._scaled_dot_product_efficient_attention,
        torch.ops.aten._scaled_dot_product_cudnn_attention,
    )
)
"""What `selective` keeps the results of: matrix products and PyTorch's flash attention."""


def _choose(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE


CONTEXTS: dict[str, Contexts] = {
    "full": noop_context_fn,
    "selective": partial(create_selective_checkpoint_contexts, _choose),
}
"""By `checkpoint_policy`."""

Step = Callable[[Tensor, Frame], Tensor]


def trained_steps(blocks: nn.ModuleList, model: ModelConfig) -> Iterator[Step]:
    """What to call one after the other in training: the blocks, or groups of `checkpoint_num_layers` blocks that keep
    what they get and what `checkpoint_policy` keeps, and compute the rest again.

    The results are the same bit for bit: the second computation sees the random state of the first.
    """
    if not model.checkpoint_activations:
        yield from blocks
        return
    contexts, size = CONTEXTS[model.checkpoint_policy], model.checkpoint_num_layers
    for first in range(0, len(blocks), size):
        group = list(blocks)[first : first + size]
        yield partial(checkpoint, partial(_through, group), use_reentrant=False, context_fn=contexts)


def _through(group: Sequence[nn.Module], x: Tensor, frame: Frame) -> Tensor:
    for block in group:
        x = block(x, frame)
    return x
