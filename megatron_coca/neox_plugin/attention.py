"""GPT-NeoX's self-attention with this package's position methods and backends.

Projections, their weights, tensor parallelism and the key-value cache stay GPT-NeoX's. This code gets the heads of one
rank before rotation, with the keys and values of cached tokens first.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import yaml
from torch import Tensor

from megatron_coca.attention.build import build_method, select_backend
from megatron_coca.attention.context import PositionContext
from megatron_coca.attention.method import PositionEncoding, check_kernel
from megatron_coca.config import Config, load_config
from megatron_coca.neox_plugin.checkpoints import refuse_in_checkpoints, rename_in_checkpoints
from megatron_coca.neox_plugin.keys import resolve, uses_plugin
from megatron_coca.neox_plugin.upstream import Function, incompatible, missing_calls

SELF_ATTENTION = "megatron.model.transformer.ParallelSelfAttention"


class PluginAttention:
    """Attention with a position method, in GPT-NeoX's layout of heads."""

    def __init__(self, config: Config, device_type: str) -> None:
        """Raises BackendError if the configured backend is not available."""
        check_kernel("operand_kernel", config.position.operand_kernel, device_type)
        self._method = build_method(config.position, config.model)
        needs = self._method.needs(device_type, config.model.attention_dropout)
        _, self._backend = select_backend(config.position.attention_backend, needs)
        self._encoding = PositionEncoding(self._method)
        self._contexts: dict[tuple[Any, ...], PositionContext] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, training: bool) -> Tensor:
        """Return [batch, heads, tokens, head_dim] for q [tokens, batch, heads, head_dim] and k, v
        [all tokens, batch, key heads, head_dim]; the queries belong to the last tokens. `dropout` is of the weights.
        """
        context = self._context(len(q), len(k), q, training)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        return self._backend.attend(self._method.prepare(q, k, v, context, dropout))

    def _context(self, queries: int, keys: int, like: Tensor, training: bool) -> PositionContext:
        """Return the context shared by all layers; only the latest one is kept."""
        cache_key = (queries, keys, like.device, like.dtype, training)
        if cache_key not in self._contexts:
            positions = torch.arange(keys, device=like.device)
            with torch.no_grad():
                encoding = self._encoding.train(training)
                context = encoding(positions[keys - queries :], keys, like.dtype, positions, reached=keys)
                self._contexts = {cache_key: context}
        return self._contexts[cache_key]


@lru_cache(maxsize=4)
def plugin_attention(config: str, device_type: str) -> PluginAttention:
    """Return the attention that all layers of a model share; `config` is its configuration as YAML."""
    return PluginAttention(load_config([], yaml.safe_load(config)), device_type)


def attention_factory(upstream: type, rng_tracker: Callable[[], Any]) -> Callable[..., Any]:
    """Return a replacement of `upstream` (ParallelSelfAttention) that builds an instance of it, or of a subclass with
    the plugin's attention if the configuration selects that.

    `rng_tracker` returns GPT-NeoX's tracker of the random states of tensor-parallel ranks. The two classes are
    attributes of the result, `upstream` and `plugin`.
    """

    class PluginSelfAttention(upstream):
        """GPT-NeoX's layer with the plugin's attention."""

        def __init__(self, neox_args: Any, *args: Any, rotary: bool = False, **kwargs: Any) -> None:
            super().__init__(neox_args, *args, rotary=False, **kwargs)
            if getattr(self, "rotary_emb", None) is not None:
                raise incompatible(
                    "rotates queries and keys itself despite rotary=False", [f"{SELF_ATTENTION}.rotary_emb"]
                )
            device = "cuda" if torch.cuda.is_available() else "cpu"
            self._attend: Callable[..., Tensor] = plugin_attention(resolve(neox_args).to_yaml(), device)
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
            with rng_tracker().fork():
                return self._attend(query_layer, key_layer, value_layer, dropout, self.training)

    def make(neox_args: Any, *args: Any, **kwargs: Any) -> Any:
        if uses_plugin(neox_args):
            return PluginSelfAttention(neox_args, *args, **kwargs)
        layer = upstream(neox_args, *args, **kwargs)
        refuse_in_checkpoints(layer, neox_args)
        return layer

    make.upstream, make.plugin = upstream, PluginSelfAttention  # type: ignore[attr-defined]
    return make


class _CallCounter:
    """Attention that counts its calls."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        self.attend, self.calls = attend, 0

    def __call__(self, *args: Any) -> Tensor:
        self.calls += 1
        return self.attend(*args)


def check_first_forward(layer: Any, neox_args: Any) -> None:
    """Check in the first forward pass of `layer` that GPT-NeoX called the functions that the plugin replaces, which
    signatures alone do not show. If not, the pass raises IncompatibleError.
    """

    def count(module: Any, inputs: Any) -> None:
        if not isinstance(module._attend, _CallCounter):  # left in place by a pass that raised
            module._attend = _CallCounter(module._attend)

    def check(module: Any, inputs: Any, output: Any) -> None:
        counter = module._attend
        module._attend = counter.attend
        for handle in handles:
            handle.remove()
        problems = missing_calls(neox_args, module.training)
        if counter.calls == 0:
            problems = [f"{SELF_ATTENTION}.attention and .flash_attention, by its forward", *problems]
        if problems:
            raise incompatible("ran the model without calling what megatron_coca.neox_plugin replaces", problems)

    handles = [layer.register_forward_pre_hook(count), layer.register_forward_hook(check)]


def checked_model(original: Function, factory: Any) -> Function:
    """Wrap GPT-NeoX's `get_model` to check that it built the plugin's layers; `factory` is from `attention_factory`."""

    def get_model(neox_args: Any, *args: Any, **kwargs: Any) -> Any:
        model = original(neox_args, *args, **kwargs)
        if uses_plugin(neox_args):
            layers = [
                isinstance(module, factory.plugin) for module in model.modules() if isinstance(module, factory.upstream)
            ]
            if not all(layers) or not _on_any_rank(bool(layers), neox_args):
                raise incompatible(
                    "built the model without the layer that megatron_coca.neox_plugin replaces", [SELF_ATTENTION]
                )
        return model

    return get_model


def _on_any_rank(present: bool, neox_args: Any) -> bool:
    """Return whether `present` is true on any rank: a pipeline stage may have no transformer layer."""
    if (neox_args.pipe_parallel_size or 0) < 2 or not torch.distributed.is_initialized():
        return present
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    flag = torch.tensor(int(present), device=device)
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
    return bool(flag)
