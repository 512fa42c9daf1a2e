"""Probe each workload with one call: its peak memory, or why it is not measured."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from megatron_coca.attention.layer import SelfAttention
from megatron_coca.evaluation.results import out_of_memory
from megatron_coca.evaluation.speed import WHOLE_SEQUENCES, What
from megatron_coca.evaluation.speed.cases import DENSE, Built
from megatron_coca.model import GPT

DECODED = 8
"""Tokens decoded in one call; a single one takes too little time to be measured well."""


@dataclass(frozen=True)
class Workload:
    """A call that can be repeated; `tokens` of one pass, and `passes` in one call."""

    call: Callable[[], object]
    tokens: int
    passes: int = 1


def first_layer(model: GPT) -> SelfAttention:
    return next(module for module in model.modules() if isinstance(module, SelfAttention))


def token_ids(model: GPT, length: int, batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(model.vocab_size, (batch, length), generator=generator)
    return ids.to(first_layer(model).dense.weight.device)


def layer_work(model: GPT, length: int, batch: int, backward: bool) -> Workload:
    """Projections and attention of one layer, without the tables that all layers share; backward to the hidden states
    and the layer's weights.
    """
    model.train(backward)
    layer = first_layer(model)
    weight = layer.dense.weight
    generator = torch.Generator().manual_seed(length)
    hidden = torch.randn(batch, length, weight.shape[0], generator=generator).to(weight).requires_grad_(backward)
    with torch.no_grad():
        tokens = torch.arange(length, device=weight.device)
        contexts = model.contexts(tokens, length, weight.dtype, reached=length, batch=batch)
        frame = contexts[model.layer_types[0]]
    gradient = torch.ones_like(hidden) if backward else None

    def call() -> object:
        with torch.set_grad_enabled(backward):
            output = layer(hidden, frame)
            if not backward:
                return output
            return torch.autograd.grad(output, [hidden, *layer.parameters()], gradient, allow_unused=True)

    return Workload(call, length * batch)


def model_work(model: GPT, length: int, batch: int, backward: bool) -> Workload:
    """A prompt through the model and the logits of its last token; backward: the loss of all tokens and the gradients
    of all weights, a training step without the optimizer.
    """
    model.train(backward)
    ids = token_ids(model, length + backward, batch)

    def call() -> None:
        if not backward:
            with torch.no_grad():
                model.logits(model.hidden_states(ids, last=1))
            return
        model.loss(model.hidden_states(ids[:, :-1]), ids[:, 1:]).backward()
        for parameter in model.parameters():
            parameter.grad = None

    return Workload(call, length * batch)


def decode(model: GPT, length: int, batch: int) -> Workload:
    """Tokens one by one after `length` cached ones, which are random numbers; afterwards the cache is cut back."""
    model.eval()
    cache = model.new_cache(length=length + DECODED)
    first = first_layer(model)
    weight = first.dense.weight
    packed = first.query_key_value.weight
    assert isinstance(packed, Tensor)
    kv_heads = packed.shape[0] // first.head_dim // (first.queries_per_key + 2)
    generator = torch.Generator().manual_seed(length)
    for layer, name in zip(cache.layers, model.layer_types, strict=True):
        method = model.methods[name]
        tensors = 1 + (len(method.bands) if method.keys_stay(cache.length) else 1)
        shape = batch, kv_heads, min(length, method.window or length), method.head_dim
        layer.append(*(torch.randn(shape, generator=generator).to(weight) for _ in range(tensors)))
    positions = torch.arange(length, device=weight.device)
    ids = token_ids(model, DECODED, batch)

    def call() -> None:
        cache.positions = positions
        with torch.no_grad():
            for step in range(DECODED):
                model(ids[:, step : step + 1], cache=cache)
        for layer, name in zip(cache.layers, model.layer_types, strict=True):
            if length < (model.methods[name].window or length + 1):  # a full window holds as much after any token
                layer.cut(length)

    return Workload(call, batch, DECODED)


WORKLOADS: dict[What, Callable[[GPT, int, int], Workload]] = {
    "layer forward": partial(layer_work, backward=False),
    "layer forward+backward": partial(layer_work, backward=True),
    "model forward": partial(model_work, backward=False),
    "model forward+backward": partial(model_work, backward=True),
    "decode": decode,
}
"""The call of each kind of work, of a model, length and batch size."""

MAX_SHARE_OF_FREE = 0.8
SCORES: dict[What, tuple[int, int]] = {
    "layer forward": (5, 0),
    "layer forward+backward": (8, 0),
    "model forward": (5, 0),
    "model forward+backward": (6, 2),
    "decode": (0, 0),
}
"""N x N tensors that a dense backend holds at most: while one layer is computed, and for each layer until the backward
pass. This estimate excludes only what is far beyond the memory."""


@dataclass(frozen=True)
class Plan:
    """Measurements of every method."""

    whats: Sequence[What]
    lengths: Sequence[int]
    batch: int
    rounds: int


@dataclass(frozen=True)
class Probe:
    """The memory of one call of a method, or why the method is not measured."""

    what: What
    length: int
    peak: int | None = None
    kind: Literal["refused", "out of memory"] | None = None
    reason: str = ""


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) * 1024


def measured_peak(call: Callable[[], object], device: torch.device) -> int:
    """Return the most bytes of tensors that a call holds at once beyond those before it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        call()
    assert run.profiler is not None and run.profiler.kineto_results is not None
    events = [event for event in run.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def probe(built: Built, plan: Plan) -> Iterator[Probe]:
    """Call all work of a method at every length; calls whose scores cannot fit the memory are not made."""
    device = first_layer(built.model).dense.weight.device
    for what, length in product(plan.whats, sorted(plan.lengths)):
        if what == "decode" and built.case.contracted:
            yield Probe(what, length, kind="refused", reason=WHOLE_SEQUENCES)
        elif reason := too_large(built, what, length, plan.batch):
            yield Probe(what, length, kind="out of memory", reason=reason)
        else:
            try:
                work = WORKLOADS[what](built.model, length, plan.batch)
                yield Probe(what, length, measured_peak(work.call, device))
            except ValueError as error:
                yield Probe(what, length, kind="refused", reason=str(error))
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                reason = f"the memory of {device} does not suffice ({gib(free_bytes(device))} were free)"
                yield Probe(what, length, kind="out of memory", reason=reason)


def too_large(built: Built, what: What, length: int, batch: int) -> str:
    """The reason to skip N x N scores that exceed the memory by far; empty if they may fit."""
    if built.backend not in DENSE:
        return ""
    model, weight = built.case.config.model, first_layer(built.model).dense.weight
    working, kept = SCORES[what]
    tensors = (working + kept * model.num_layers) * batch * model.num_attention_heads
    needed, free = tensors * length**2 * weight.element_size(), MAX_SHARE_OF_FREE * free_bytes(weight.device)
    if needed <= free:
        return ""
    return f"its {length} x {length} scores take about {gib(needed)}, free are {gib(free)}"


def gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
