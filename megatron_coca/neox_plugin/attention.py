"""Upstream's self-attention with a position method and a backend of ours.

Projections, their weights, tensor parallelism and the key-value cache stay upstream's: what reaches this code are the
heads of this rank before any rotation, with those of cached tokens in front of the keys.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megatron_coca.attention.build import build_method, select_backend
from megatron_coca.attention.context import PositionContext
from megatron_coca.attention.method import PositionEncoding, check_operand_kernel
from megatron_coca.config import Config, load_config
from megatron_coca.neox_plugin.checkpoints import refuse_in_checkpoints, rename_in_checkpoints
from megatron_coca.neox_plugin.keys import is_asked_for, resolve
from megatron_coca.neox_plugin.wrapping import Function, incompatible, not_called


class Positioned:
    """Attention of a position method, in upstream's layout of heads."""

    def __init__(self, config: Config, device_type: str) -> None:
        """Raises BackendError where the named backend cannot serve."""
        check_operand_kernel(config.position.operand_kernel, device_type)
        self._method = build_method(config.position, config.model)
        needs = self._method.needs(device_type, config.model.attention_dropout)
        _, self._backend = select_backend(config.position.attention_backend, needs)
        self._encoding = PositionEncoding(self._method)
        self._frames: dict[tuple[Any, ...], PositionContext] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, training: bool) -> Tensor:
        """[batch, heads, tokens, head_dim] of q [tokens, batch, heads, head_dim], which are the last tokens of those of
        k and v [all tokens, batch, key heads, head_dim]. `dropout` is that of the attention weights.
        """
        frame = self._frame(len(q), len(k), q, training)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        if q.shape[2] == k.shape[2]:
            return self._backend.attend(self._method.prepare(q, k, v, frame, dropout))
        return self._backend.attend(self._method.prepare_cached(q, self._method.cached(k), v, frame))

    def _frame(self, queries: int, keys: int, like: Tensor, training: bool) -> PositionContext:
        """The same for all layers, so that of the last call is kept; it depends on nothing else."""
        place = (queries, keys, like.device, like.dtype, training)
        if place not in self._frames:
            positions = torch.arange(keys, device=like.device)
            with torch.no_grad():
                encoding = self._encoding.train(training)
                self._frames = {place: encoding(positions[keys - queries :], keys, like.dtype, positions)}
        return self._frames[place]


@lru_cache(maxsize=4)
def positioned(config: str, device_type: str) -> Positioned:
    """One for all layers of a model, by the YAML of what it is built from."""
    return Positioned(load_config([], _flat(config)), device_type)


def _flat(text: str) -> dict[str, Any]:
    import yaml

    return yaml.safe_load(text)


def dispatcher(upstream: type, random_states: Callable[[], Any]) -> Callable[..., Any]:
    """What takes the place of `upstream` (ParallelSelfAttention): it makes an instance of it, or of a subclass with
    our attention where the configuration asks for that.

    `random_states` gives upstream's tracker of the random states of tensor ranks. The two classes are attributes of the
    result, `upstream` and `positioned`.
    """

    class PositionedSelfAttention(upstream):
        """Upstream's layer, whose raw heads are attended to by ours."""

        def __init__(self, neox_args: Any, *given: Any, rotary: bool = False, **named: Any) -> None:
            super().__init__(neox_args, *given, rotary=False, **named)
            if getattr(self, "rotary_emb", None) is not None:
                raise incompatible(
                    "rotates queries and keys itself although it is told not to", [f"{SELF_ATTENTION}.rotary_emb"]
                )
            device = "cuda" if torch.cuda.is_available() else "cpu"
            self._attend = positioned(resolve(neox_args).to_yaml(), device)
            self._dropout = neox_args.attention_dropout
            check_first_forward(self, neox_args)
            rename_in_checkpoints(self)

        def attention(
            self, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor, layer_past: Any, attention_mask: Any
        ) -> Tensor:
            return self.flash_attention(query_layer, key_layer, value_layer)

        def flash_attention(self, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor) -> Tensor:
            dropout = self._dropout if self.training else 0.0
            if not dropout:
                return self._attend(query_layer, key_layer, value_layer, 0.0, self.training)
            with random_states().fork():
                return self._attend(query_layer, key_layer, value_layer, dropout, self.training)

    def make(neox_args: Any, *given: Any, **named: Any) -> Any:
        if is_asked_for(neox_args):
            return PositionedSelfAttention(neox_args, *given, **named)
        layer = upstream(neox_args, *given, **named)
        refuse_in_checkpoints(layer, neox_args)
        return layer

    make.upstream, make.positioned = upstream, PositionedSelfAttention  # type: ignore[attr-defined]
    return make


SELF_ATTENTION = "megatron.model.transformer.ParallelSelfAttention"


class _Counted:
    """Attention, and how often it was called."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        self.attend, self.calls = attend, 0

    def __call__(self, *given: Any) -> Tensor:
        self.calls += 1
        return self.attend(*given)


def check_first_forward(layer: Any, neox_args: Any) -> None:
    """Let the first forward pass of `layer`, and no later one, check that upstream called what the plugin replaces:
    signatures alone do not show that. The pass ends in an IncompatibleError otherwise.
    """

    def count(module: Any, given: Any) -> None:
        if not isinstance(module._attend, _Counted):  # it is one where an earlier pass ended in an error
            module._attend = _Counted(module._attend)

    def check(module: Any, given: Any, output: Any) -> None:
        counted = module._attend
        module._attend = counted.attend
        for handle in handles:
            handle.remove()
        problems = not_called(neox_args, module.training)
        if counted.calls == 0:
            problems = [f"{SELF_ATTENTION}.attention and .flash_attention, by its forward", *problems]
        if problems:
            raise incompatible("ran the model without calling what megatron_coca.neox_plugin replaces", problems)

    handles = [layer.register_forward_pre_hook(count), layer.register_forward_hook(check)]


def checking_model(original: Function, kinds: Any) -> Function:
    """Upstream's `get_model`, which must have built the plugin's layers where the configuration asks for them; `kinds` is
    the result of `dispatcher`.
    """

    def get_model(neox_args: Any, *given: Any, **named: Any) -> Any:
        model = original(neox_args, *given, **named)
        if is_asked_for(neox_args):
            layers = [
                isinstance(part, kinds.positioned) for part in model.modules() if isinstance(part, kinds.upstream)
            ]
            if not all(layers) or not _anywhere(bool(layers), neox_args):
                raise incompatible(
                    "built the model without the layer that megatron_coca.neox_plugin replaces", [SELF_ATTENTION]
                )
        return model

    return get_model


def _anywhere(present: bool, neox_args: Any) -> bool:
    """Whether `present` holds on any rank: a pipeline stage may have no transformer layer."""
    if (neox_args.pipe_parallel_size or 0) < 2 or not torch.distributed.is_initialized():
        return present
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    found = torch.tensor(int(present), device=device)
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
    return bool(found)
