"""GPT-NeoX's self-attention with this package's position methods and backends.

GPT-NeoX still runs the projections, tensor parallelism and the key-value cache. This module receives the unrotated
heads of one rank. The keys and values of cached tokens come before those of new tokens.
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
from megatron_coca.attention.positions.offsets import HeadOffsets
from megatron_coca.config import Config, load_config
from megatron_coca.neox_plugin.checkpoints import check_in_checkpoints, rename_in_checkpoints
from megatron_coca.neox_plugin.keys import resolve, uses_plugin
from megatron_coca.neox_plugin.upstream import incompatible

SELF_ATTENTION = "megatron.model.transformer.ParallelSelfAttention"


class PluginAttention:
    """Attention with a position method, for tensors in GPT-NeoX's layout."""

    def __init__(self, config: Config, device_type: str) -> None:
        """Raises BackendError if the configured backend is not available."""
        check_kernel("operand_kernel", config.position.operand_kernel, device_type)
        method = build_method(config.position, config.model)
        needs = method.needs(device_type, config.model.attention_dropout)
        _, self._backend = select_backend(config.position.attention_backend, needs)
        self._method = method.with_backend(self._backend)
        self._encoding = PositionEncoding(self._method)
        self._contexts: dict[tuple[Any, ...], PositionContext] = {}

    def offsets(self, rank: int, heads: int) -> HeadOffsets | None:
        """Build the constant angles of a layer for the `heads` query heads of a tensor-parallel rank, or return None if
        the method has no such angles. Every rank draws the angles of all heads and keeps those of its own heads.
        """
        made = self._method.layer_offsets()
        if made is not None:
            made.bias = torch.nn.Parameter(made.bias.detach()[rank * heads : (rank + 1) * heads].clone())
        return made

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, dropout: float, training: bool, offset: Tensor | None = None
    ) -> Tensor:
        """Return the attention output [batch, heads, tokens, head_dim].

        `q` is [tokens, batch, heads, head_dim]; `k` and `v` are [all tokens, batch, key heads, head_dim]. The queries
        belong to the last tokens. `dropout` applies to the attention weights. `offset` has the constant angles of the
        layer's heads, if the method has any.
        """
        context = self._context(len(q), len(k), q, training)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        return self._backend.attend(self._method.prepare(q, k, v, context, dropout, offset=offset))

    def _context(self, queries: int, keys: int, like: Tensor, training: bool) -> PositionContext:
        """Return the context that all layers share. Only the most recent context is cached."""
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
    """Return the attention object that all layers of a model share. `config` is the configuration as YAML."""
    return PluginAttention(load_config([], yaml.safe_load(config)), device_type)


def attention_factory(
    upstream: type, rng_tracker: Callable[[], Any], tensor_rank: Callable[[], int]
) -> Callable[..., Any]:
    """Return a function that replaces the class `upstream` (ParallelSelfAttention).

    If the configuration selects the plugin's attention, the function builds an instance of a subclass that uses it;
    otherwise it builds an instance of `upstream`. `rng_tracker` returns GPT-NeoX's tracker of the random states of
    tensor-parallel ranks. `tensor_rank` returns the number of this rank among these ranks.
    """

    class PluginSelfAttention(upstream):
        """GPT-NeoX's attention layer with the plugin's implementation of attention."""

        def __init__(self, neox_args: Any, *args: Any, rotary: bool = False, **kwargs: Any) -> None:
            super().__init__(neox_args, *args, rotary=False, **kwargs)
            if getattr(self, "rotary_emb", None) is not None:
                raise incompatible(f"rotates queries and keys in {SELF_ATTENTION} despite rotary=False")
            device = "cuda" if torch.cuda.is_available() else "cpu"
            attention = plugin_attention(resolve(neox_args).to_yaml(), device)
            self._attend: Callable[..., Tensor] = attention
            self.position_offsets = attention.offsets(tensor_rank(), self.num_attention_heads_per_partition)
            if self.position_offsets is not None:  # GPT-NeoX exempts parameters named `bias` from weight decay
                self.position_offsets.to(self.dense.weight)
                # No rank has the angles of another rank's heads.
                setattr(self.position_offsets.bias, "model_parallel", True)  # noqa: B010
            self._dropout = neox_args.attention_dropout
            self._attended = False
            check_first_forward(self)
            rename_in_checkpoints(self)

        def attention(
            self, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor, layer_past: Any, attention_mask: Any
        ) -> Tensor:
            return self.flash_attention(query_layer, key_layer, value_layer)

        def flash_attention(self, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor) -> Tensor:
            self._attended = True
            dropout = self._dropout if self.training else 0.0
            offset = None if self.position_offsets is None else self.position_offsets()
            if not dropout:
                return self._attend(query_layer, key_layer, value_layer, 0.0, self.training, offset)
            with rng_tracker().fork():
                return self._attend(query_layer, key_layer, value_layer, dropout, self.training, offset)

    def make(neox_args: Any, *args: Any, **kwargs: Any) -> Any:
        if uses_plugin(neox_args):
            return PluginSelfAttention(neox_args, *args, **kwargs)
        layer = upstream(neox_args, *args, **kwargs)
        check_in_checkpoints(layer, neox_args)
        return layer

    return make


def check_first_forward(layer: Any) -> None:
    """Check in the first forward pass of `layer` that GPT-NeoX calls a method that the plugin overrides.

    If it calls none, the model would have no position method, so the forward pass raises IncompatibleError.
    """

    def check(module: Any, inputs: Any, output: Any) -> None:
        handle.remove()
        if not module._attended:
            raise incompatible(f"ran {SELF_ATTENTION} but called neither its attention nor its flash_attention method")

    handle = layer.register_forward_hook(check)
