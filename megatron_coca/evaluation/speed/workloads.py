"""What is timed: passes through the first attention layer, through the whole model, and decoding with a cache."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_coca.attention.frame import Frame
from megatron_coca.attention.layer import SelfAttention
from megatron_coca.evaluation.speed.records import What
from megatron_coca.model import GPT

DECODED = 8
"""Tokens decoded one after another in one call, because one takes too little time to be measured well."""


@dataclass(frozen=True)
class Workload:
    """A call that can be repeated, and how many tokens (of one row; per call) its time is divided by."""

    call: Callable[[], object]
    tokens: int
    passes: int = 1


def first_layer(model: GPT) -> SelfAttention:
    """The attention of the first block."""
    return next(module for module in model.modules() if isinstance(module, SelfAttention))


def _ids(model: GPT, length: int, batch: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(model.vocab_size, (batch, length), generator=generator).to(device)


def _layer(model: GPT, length: int, batch: int) -> tuple[SelfAttention, Tensor, Frame]:
    """The first attention layer, hidden states for it, and the frame, which all layers of a pass share."""
    layer = first_layer(model)
    weight = layer.dense.weight
    generator = torch.Generator().manual_seed(length)
    hidden = torch.randn(batch, length, weight.shape[0], generator=generator).to(weight)
    with torch.no_grad():
        frame = model.positions(torch.arange(length, device=weight.device), length, weight.dtype)
    return layer, hidden, frame


def layer_forward(model: GPT, length: int, batch: int) -> Workload:
    """Projections and attention, hidden states to hidden states; without the tables that all layers share."""
    model.eval()
    layer, hidden, frame = _layer(model, length, batch)

    def call() -> Tensor:
        with torch.no_grad():
            return layer(hidden, frame)

    return Workload(call, length * batch)


def layer_forward_backward(model: GPT, length: int, batch: int) -> Workload:
    """The same, and the gradients of the hidden states and of the layer's weights."""
    model.train()
    layer, hidden, frame = _layer(model, length, batch)
    hidden.requires_grad_()
    wanted = [hidden, *layer.parameters()]
    gradient = torch.ones_like(hidden)

    def call() -> object:
        return torch.autograd.grad(layer(hidden, frame), wanted, gradient, allow_unused=True)

    return Workload(call, length * batch)


def model_forward(model: GPT, length: int, batch: int) -> Workload:
    """All tokens through the model, and the logits of the last: what a prompt costs."""
    model.eval()
    ids = _ids(model, length, batch, first_layer(model).dense.weight.device)

    def call() -> Tensor:
        with torch.no_grad():
            return model.logits(model.hidden_states(ids, last=1))

    return Workload(call, length * batch)


def model_forward_backward(model: GPT, length: int, batch: int) -> Workload:
    """The loss of all tokens and the gradients of all weights: a training step without the optimizer."""
    model.train()
    ids = _ids(model, length + 1, batch, first_layer(model).dense.weight.device)

    def call() -> None:
        model.loss(model.hidden_states(ids[:, :-1]), ids[:, 1:]).backward()
        for parameter in model.parameters():
            parameter.grad = None

    return Workload(call, length * batch)


def decode(model: GPT, length: int, batch: int) -> Workload:
    """Tokens one by one after `length` cached ones, which are drawn instead of computed; the cache forgets them again."""
    model.eval()
    cache, method = model.new_cache(length=length + DECODED), model.method
    weight = first_layer(model).dense.weight
    kv_heads = _kv_heads(first_layer(model))
    generator = torch.Generator().manual_seed(length)
    for layer in cache.layers:
        widths = method.cached_width, method.head_dim
        layer.append(*(torch.randn(batch, kv_heads, length, width, generator=generator).to(weight) for width in widths))
    positions = torch.arange(length, device=weight.device)
    ids = _ids(model, DECODED, batch, weight.device)

    def call() -> None:
        cache.positions = positions
        with torch.no_grad():
            for step in range(DECODED):
                model(ids[:, step : step + 1], cache=cache)
        for layer in cache.layers:
            layer.cut(length)

    return Workload(call, batch, DECODED)


def _kv_heads(layer: SelfAttention) -> int:
    rows = layer.query_key_value.out_features // layer.head_dim
    return rows // (layer.queries_per_key + 2)


WORKLOADS: dict[What, Callable[[GPT, int, int], Workload]] = {
    "layer forward": layer_forward,
    "layer forward+backward": layer_forward_backward,
    "model forward": model_forward,
    "model forward+backward": model_forward_backward,
    "decode": decode,
}
