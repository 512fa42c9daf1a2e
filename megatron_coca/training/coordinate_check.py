"""A coordinate check: how much the outputs of a model's parts change in the first steps, at several widths.

With `use_mup`, the changes do not depend on the width (Yang et al. 2022, arXiv:2203.03466, section 6). In the standard
parametrization, they grow with the width if the learning rate stays the same.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn as nn
from torch import Tensor

from megatron_coca.attention.inputs import AttentionInputs, Backend, Needs, expanded
from megatron_coca.attention.layer import SelfAttention
from megatron_coca.config import Config, ConfigError
from megatron_coca.config.checks.mup import OWN
from megatron_coca.model import GPT, build_model
from megatron_coca.training.optimizer import build_optimizer, set_rates, train_only_parts
from megatron_coca.training.starting_rate import NO_RATE

KINDS = ("embedding", "scores", "attention", "mlp", "last block", "logits")
"""Names of the measured outputs of a model's parts. `scores` are the scaled attention scores before any bias."""
WIDTHS = (
    *("intermediate_size", "kv_channels", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"),
    *("v_head_dim", "moe_intermediate_size", "moe_shared_intermediate_size"),
)
"""Keys that change in proportion to hidden_size if they are set."""
ROWS, MOST_TOKENS, VOCABULARY = 4, 64, 256
"""Sequences in the batch, their maximum length, and the vocabulary size if the configuration sets none."""


class Coordinate(NamedTuple):
    """A measurement of one part of a model.

    Attributes:
        width: hidden_size.
        mup: whether the model has `use_mup`.
        kind: one of `KINDS`.
        step: number of optimizer steps before the measurement.
        size: mean absolute value of the output, averaged over the layers too.
        change: mean absolute difference from the output before the first step.
    """

    width: int
    mup: bool
    kind: str
    step: int
    size: float
    change: float


def at_width(config: Config, width: int, mup: bool, base: int) -> Config:
    """Return the configuration of a model with another hidden_size. All other widths change in proportion, and the
    number of heads stays the same. `base` is the base width for muP if the configuration sets none.

    Raises:
        ConfigError: a width is not a whole number, or the model cannot have this width.
    """
    before, changes = config.model.hidden_size, dict[str, Any]()
    for key in WIDTHS:
        given = getattr(config.model, key)
        if given is not None and given * width % before:
            raise ConfigError(
                f"{key}: {given} at hidden_size {before} is no whole number at width {width}; change one of the widths"
            )
        changes |= {key: given * width // before} if given is not None else {}
    own = {"use_mup": True, "mup_base_hidden_size": config.model.mup_base_hidden_size or base}
    without = {"use_mup": False, "mup_base_hidden_size": None, **dict.fromkeys(OWN)}
    vocabulary = config.model.vocab_size or VOCABULARY
    kept = {"hidden_size": width, "vocab_size": vocabulary, "torch_compile": False, "engine": "native"}
    return config.override(changes | kept | (own if mup else without))


def check_coordinates(
    config: Config, widths: Sequence[int], steps: int, dtype: torch.dtype = torch.float32
) -> list[Coordinate]:
    """Train models of all `widths`, with and without `use_mup`, and measure their parts before each step and after the
    last one.

    Each model is trained for `steps` steps on one batch of random tokens. The learning rate is the configured one,
    without a schedule.

    Raises:
        ConfigError: the configuration has no learning rate, or the model cannot have one of the widths.
        BackendError: no backend supports the model.
    """
    if config.optimizer.lr is None:
        raise ConfigError(NO_RATE)
    models = [at_width(config, width, mup, min(widths)) for mup in (True, False) for width in widths]
    return [each for model in models for each in _trained(model, steps, dtype)]


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """Return the exponent of the power of x that fits y best at the points (x, y); NaN if any y is not positive."""
    if len(points) < 2 or min(y for _, y in points) <= 0:
        return math.nan
    xs, ys = zip(*((math.log(x), math.log(y)) for x, y in points), strict=True)
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread


def _trained(config: Config, steps: int, dtype: torch.dtype) -> Iterator[Coordinate]:
    model = build_model(config).to(dtype).train()
    train_only_parts(model, config.optimizer)
    rate, ratio = config.optimizer.lr, config.model.width_ratio
    assert rate is not None and config.model.vocab_size is not None
    optimizer = build_optimizer(model, config.optimizer, width_ratio=ratio)
    set_rates(optimizer.param_groups, rate)
    length = min(config.model.seq_length, MOST_TOKENS)
    generator = torch.Generator().manual_seed(config.seed)
    tokens = torch.randint(config.model.vocab_size, (ROWS, length + 1), generator=generator)
    first: dict[str, list[Tensor]] = {}
    for step in range(steps + 1):
        with _recorded(model) as outputs:
            hidden = model.hidden_states(tokens[:, :-1])
            outputs["logits"].append(model.logits(hidden.detach()).detach()[..., : config.model.vocab_size])
        first = first or outputs
        for kind in KINDS:
            if outputs[kind]:
                size = _mean(each.abs() for each in outputs[kind])
                pairs = zip(outputs[kind], first[kind], strict=True)
                change = _mean((each - before).abs() for each, before in pairs)
                yield Coordinate(config.model.hidden_size, config.model.use_mup, kind, step, size, change)
        if step < steps:
            model.loss(hidden, tokens[:, 1:]).backward()
            if limit := config.optimizer.gradient_clipping:
                nn.utils.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()
            optimizer.zero_grad()


def _mean(parts: Iterator[Tensor]) -> float:
    means = [float(part.double().mean()) for part in parts]
    return sum(means) / len(means)


@contextmanager
def _recorded(model: GPT) -> Iterator[dict[str, list[Tensor]]]:
    """Record the outputs of a model's parts inside the `with` block: for each kind, one tensor per layer."""
    outputs: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}

    def keep(kind: str, module: nn.Module, inputs: Any, output: Tensor) -> None:
        outputs[kind].append(output.detach())

    parts: list[tuple[str, nn.Module | None]] = [("embedding", model.embedding), ("last block", model.blocks[-1])]
    parts += [(kind, getattr(block, kind)) for block in model.blocks for kind in ("attention", "mlp")]
    hooks = [part.register_forward_hook(partial(keep, kind)) for kind, part in parts if part is not None]
    layers = [cast(SelfAttention, block.attention) for block in model.blocks]
    backends = [layer.backend for layer in layers]
    for layer in layers:
        layer.backend = _ScoreRecorder(layer.backend, outputs["scores"].append)
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()
        for layer, backend in zip(layers, backends, strict=True):
            layer.backend = backend


class _ScoreRecorder:
    """A backend that records scores: it calls `keep` with the scaled scores of all visible pairs, without bias. The
    attention output is that of `backend`.
    """

    def __init__(self, backend: Backend, keep: Callable[[Tensor], None]) -> None:
        self._backend, self._keep = backend, keep

    def supports(self, needs: Needs) -> str | None:
        return self._backend.supports(needs)

    @torch.no_grad()
    def _scores(self, inputs: AttentionInputs) -> Tensor:
        """Return the scores [..., pairs] of the first segment, for pairs in which the key is not after the query."""
        segment = expanded(inputs).segments[0]
        query, key = segment.query, segment.key
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        scores = inputs.scale * (query @ key.mT)
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - scores.shape[-2])
        return scores[..., visible]

    def attend(self, inputs: AttentionInputs) -> Tensor:
        self._keep(self._scores(inputs))
        return self._backend.attend(inputs)
