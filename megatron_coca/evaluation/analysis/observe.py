"""The queries, keys and operands of every layer, seen while a model runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.nn as nn
from torch import Tensor

from megatron_coca.attention.frame import Frame
from megatron_coca.attention.inputs import AttentionInputs
from megatron_coca.attention.layer import SelfAttention
from megatron_coca.attention.method import PositionMethod


@dataclass(frozen=True)
class Seen:
    """One layer's attention in one forward pass.

    Attributes:
        layer: its number, from 0.
        q: [batch, heads, length, head_dim], before anything is rotated.
        k: [batch, kv_heads, length, head_dim], likewise; for CoCA what the T projection gives.
        inputs: what the backend is given.
    """

    layer: int
    q: Tensor
    k: Tensor
    inputs: AttentionInputs


Visit = Callable[[Seen], None]


class _Watched:
    """A position method that shows what it prepares."""

    def __init__(self, method: PositionMethod, layer: int, visit: Visit) -> None:
        self._method, self._layer, self._visit = method, layer, visit

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, frame: Frame, *rest: Any) -> AttentionInputs:
        inputs = self._method.prepare(q, k, v, frame, *rest)
        self._visit(Seen(self._layer, q, k, inputs))
        return inputs


@contextmanager
def observed(model: nn.Module, visit: Visit) -> Iterator[None]:
    """While it lasts, `visit` is called with what every layer of `model` attends with, layer after layer.

    Only one layer's tensors are alive at a time, unless `visit` keeps them. Forward passes without a cache are seen.
    """
    layers = [module for module in model.modules() if isinstance(module, SelfAttention)]
    methods = [layer.method for layer in layers]
    try:
        for index, (layer, method) in enumerate(zip(layers, methods, strict=True)):
            layer.method = _Watched(method, index, visit)  # type: ignore[assignment]
        yield
    finally:
        for layer, method in zip(layers, methods, strict=True):
            layer.method = method
