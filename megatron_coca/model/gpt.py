"""The language model: embedding, blocks, final norm and output head."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from megatron_coca.attention.context import PositionContext, ShardedModule
from megatron_coca.attention.inputs import Backend, PackedDocuments, documents_from_ids, positions_within
from megatron_coca.attention.layer import Cache, CachedTokens
from megatron_coca.attention.method import PositionEncoding, PositionMethod
from megatron_coca.config import ModelConfig
from megatron_coca.config.model import EXPERTS
from megatron_coca.model.experts import Balancing, ExpertMixture, recorded_routing
from megatron_coca.model.layers import (
    MLP,
    Block,
    Embedding,
    absolute,
    build_norm,
    build_output_transform,
    soft_capped,
)
from megatron_coca.model.loss import IGNORED, linear_cross_entropy, next_token_loss

Recomputing = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]

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
"""Selective checkpointing keeps the results of these operations: matrix products and PyTorch's fused attention."""


def _choose(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE


CONTEXTS: dict[str, Recomputing] = {
    "full": noop_context_fn,
    "selective": partial(create_selective_checkpoint_contexts, _choose),
}
"""The recomputation contexts for each `checkpoint_policy`."""

Contexts = Mapping[str, PositionContext]
"""Position contexts by layer type."""
BlockStep = Callable[[Tensor, Contexts], Tensor]


def trained_steps(blocks: nn.ModuleList, model: ModelConfig, draws: bool) -> Iterator[BlockStep]:
    """Yield the functions that a training forward pass calls in turn: one per block or, with activation checkpointing,
    one per group of `checkpoint_num_layers` blocks. The results with and without activation checkpointing are
    bit-identical, because recomputation restores the random state. `draws` is True if the blocks draw random numbers.
    """
    if not model.checkpoint_activations:
        yield from (partial(_through, [block]) for block in blocks)
        return
    recomputing, size = CONTEXTS[model.checkpoint_policy], model.checkpoint_num_layers
    # Without dropout the random state is not read, because CUDA graph capture does not allow reading it.
    for first in range(0, len(blocks), size):
        group = list(blocks)[first : first + size]
        through = partial(_through, group)
        yield partial(checkpoint, through, use_reentrant=False, context_fn=recomputing, preserve_rng_state=draws)


def _through(group: Sequence[nn.Module], x: Tensor, contexts: Contexts) -> Tensor:
    for block in group:
        x = block(x, contexts[str(block.layer_type)])
    return x


class OutputHead(nn.Linear):
    """An untied output matrix. It maps hidden states [..., width] to logits [..., vocabulary]. If it receives labels,
    it computes the loss.

    The loss is computed in this module's forward pass, because ZeRO stage 3 gathers the module's weights only there.
    """

    def __init__(self, width: int, vocabulary: int, bias: bool = False) -> None:
        super().__init__(width, vocabulary, bias=bias)

    def forward(
        self,
        hidden: Tensor,
        labels: Tensor | None = None,
        chunk: int | Literal["auto"] | None = None,
        kernel: str = "auto",
        cap: float | None = None,
    ) -> Tensor:
        """Return the logits or, if `labels` [tokens] are given with `hidden` [tokens, width], the loss of
        `linear_cross_entropy`.
        """
        if labels is None:
            return super().forward(hidden)
        return linear_cross_entropy(hidden, self.weight, labels, chunk, kernel, cap, self.bias)


class GPT(ShardedModule):
    """A causal language model; `model(input_ids)` returns logits [batch, length, padded vocabulary].

    The input may be longer than the training length.

    Attributes:
        methods: the position method of every layer type.
        vocab_size: number of rows of the output head, padding included.
        draws: whether the blocks draw random numbers in training. Adapters with dropout also set it to True.
    """

    def __init__(
        self, model: ModelConfig, methods: Mapping[str, PositionMethod], backends: Mapping[str, Backend]
    ) -> None:
        """`methods` and `backends` map each layer type to its position method and backend. The types are in the order
        in which they first occur in the model.
        """
        super().__init__()
        self.methods, self.vocab_size = dict(methods), model.padded_vocab_size
        self._config, self.draws = model, bool(model.hidden_dropout or model.attention_dropout)
        positions = absolute(methods.values(), model)
        self.embedding = Embedding(model, positions)
        (_, first), *others = methods.items()
        self.positions = PositionEncoding(first, dict(others))
        mlps = [ExpertMixture if kind == EXPERTS else MLP for kind in model.mlp_names]
        self.blocks = nn.ModuleList(
            Block(model, methods[name], backends[name], name, mlp)
            for name, mlp in zip(model.layer_names, mlps, strict=True)
        )
        if model.skip_first_norm:
            self.blocks[0].input_layernorm = nn.Identity()
        self.norm = build_norm(model) if model.norm_position != "residual" else nn.Identity()
        self.output_transform = build_output_transform(model)
        self.final_linear = (
            OutputHead(model.token_width, self.vocab_size, model.use_bias_in_output_head)
            if model.no_weight_tying
            else None
        )
        tied_bias = model.use_bias_in_output_head and not model.no_weight_tying
        self.final_bias = nn.Parameter(torch.zeros(self.vocab_size)) if tied_bias else None

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Return logits [batch, length, padded vocabulary] for input_ids int64 [batch, length]; see `hidden_states`."""
        return self.logits(self.hidden_states(input_ids, positions, documents, cache))

    def hidden_states(
        self,
        input_ids: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Cache | None = None,
        length: int | None = None,
        last: int | None = None,
    ) -> Tensor:
        """Return the hidden states after the final norm, [batch, length, hidden_size].

        Args:
            input_ids: int64 [batch, length]; with a cache, the tokens that follow the cached ones.
            positions: int64 [length] or [batch, length]; by default 0, 1, ... through the sequence or, with
                `documents`, through each document.
            documents: integer [batch, length]. Adjacent tokens with the same number form one document, and attention
                does not cross document boundaries.
            cache: a cache from `new_cache`; the tokens are added to it.
            length: the length that length-dependent extensions use, by default the largest position + 1. Not allowed
                with a cache.
            last: return only the hidden states of this many last tokens, [batch, last, hidden_size], and compute only
                these in the MLP of the last block. For evaluation only.
        """
        if last is not None and self.training:
            raise ValueError("last: supported only in evaluation; call model.eval()")
        if cache is not None:
            self._check_cache(cache, documents, length)
        positions, reached, packed = resolve_positions(input_ids, positions, documents, cache)
        length = length or (cache.length if cache is not None else None) or reached
        with nullcontext() if cache is None else cache.advanced(positions, reached) as seen:
            x = self.embedding(self.share.split(input_ids), self.share.split(positions), reached)
            furthest = reached if cache is None else cache.reached
            contexts = self.contexts(positions, length, x.dtype, seen, packed, furthest, cache, len(input_ids))
            return self.through_blocks(x, contexts, None if cache is None else cache.layers, last)

    @property
    def layer_types(self) -> list[str]:
        """The layer type of every block."""
        return [str(block.layer_type) for block in self.blocks]

    def encodings(self) -> dict[str, PositionEncoding]:
        """Return the modules that compute the position contexts, by layer type."""
        others = cast(list[PositionEncoding], list(self.positions.others.values()))
        return dict(zip(self.methods, (self.positions, *others), strict=True))

    def contexts(
        self,
        positions: Tensor,
        length: int,
        dtype: torch.dtype,
        seen: Tensor | None = None,
        documents: PackedDocuments | None = None,
        reached: int | None = None,
        cache: Cache | None = None,
        batch: int = 1,
    ) -> Contexts:
        """Compute the position context that all layers of a type share, for each layer type. The arguments are those of
        `PositionEncoding`. If a `cache` contains earlier tokens, `seen` contains the positions of the cached and the
        new tokens.
        """
        found, encodings = {}, self.encodings()
        for name in dict.fromkeys(self.layer_types):  # a pipeline stage may have no layers of some types
            method, keys = self.methods[name], seen
            if keys is not None and method.window is not None:
                keys = keys[..., -(method.window - 1 + positions.shape[-1]) :]
            new_keys = cache is not None and method.keys_stay(cache.length)
            found[name] = encodings[name](positions, length, dtype, keys, documents, reached, new_keys, batch)
        return found

    def _check_cache(self, cache: Cache, documents: Tensor | None, length: int | None) -> None:
        if length is not None:
            raise ValueError(
                "length: cannot be combined with a cache, which has its own length; pass the length to new_cache "
                "instead"
            )
        if documents is not None:
            raise ValueError(
                "documents: cannot be combined with a cache, because generation continues one document; pass only "
                "one of the two"
            )
        if self.training or torch.is_grad_enabled():
            raise ValueError("cache: supported only in generation; call model.eval() and use torch.no_grad()")
        if len(cache.layers) != len(self.blocks):
            raise ValueError(
                f"cache: has {len(cache.layers)} layers, but the model has {len(self.blocks)}; create the cache with "
                "new_cache of this model"
            )

    def through_blocks(
        self,
        x: Tensor,
        contexts: Contexts,
        caches: Sequence[CachedTokens] | None = None,
        last: int | None = None,
    ) -> Tensor:
        """Pass hidden states [batch, length, hidden_size] through the blocks and the final norm. `caches` has the cache
        of each layer. With `last`, return only the hidden states of the last tokens.
        """
        if self.training:
            for step in trained_steps(self.blocks, self._config, self.draws):
                x = step(x, contexts)
            return self.norm(x)
        layers = [None] * len(self.blocks) if caches is None else caches
        wanted = [None] * (len(self.blocks) - 1) + [last]
        for block, name, layer, tokens in zip(self.blocks, self.layer_types, layers, wanted, strict=True):
            # This bypasses the compiled block, which would be compiled again for every new length.
            x = block._call_impl(x, contexts[name], layer, tokens)
        return self.norm(x)

    def new_cache(self, length: int | None = None, capacity: int | None = None) -> Cache:
        """Create an empty cache with memory for `capacity` tokens. `length` has the same meaning as in `Cache`."""
        return Cache([self.methods[name].window for name in self.layer_types], length, capacity)

    def outgrown(self, cache: Cache, new: int) -> bool:
        """Return True if `new` more tokens make LongRoPE switch to its frequencies for long texts. The model must then
        process all tokens again, with a new cache. If the cache has a fixed length, LongRoPE never switches.
        """
        switches = {method.switch for method in self.methods.values()} if cache.length is None and len(cache) else ()
        return any(switch is not None and cache.reached <= switch < cache.reached + new for switch in switches)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of `hidden`, which may be any slice of `hidden_states`, in the dtype of `hidden`."""
        head, hidden = self.final_linear, self._transformed(hidden)
        if head is None:
            logits = F.linear(hidden, self.embedding.word_embeddings.weight, self.final_bias)
        else:
            logits = head(hidden)
        return soft_capped(logits, self._config.final_logit_softcapping)

    def _transformed(self, hidden: Tensor) -> Tensor:
        scale = self._config.final_logit_scale
        hidden = hidden if self.output_transform is None else self.output_transform(hidden)
        return hidden if scale == 1.0 else hidden * scale

    def loss(self, hidden: Tensor, labels: Tensor, loss_mask: Tensor | None = None) -> Tensor:
        """Return the mean cross-entropy in nats per token, float32, of labels int64 [batch, length] given
        `hidden_states` [batch, length, hidden_size]. It is computed in chunks of `loss_chunk_size` tokens. If
        `loss_chunk_size` is 0, all tokens are one chunk.

        With `loss_mask`, bool [batch, length], the mean is over the labels that the mask selects. If the mask selects
        no label, the loss is 0.
        """
        chunk = self._config.loss_chunk_size
        if chunk == 0:
            return next_token_loss(self.logits(hidden), labels, loss_mask)
        kept = labels if loss_mask is None else labels.masked_fill(~loss_mask, IGNORED)
        states, targets = self._transformed(hidden).flatten(0, -2), kept.flatten()
        options = chunk, self._config.loss_kernel, self._config.final_logit_softcapping
        if self.final_linear is not None:
            return self.final_linear(states, targets, *options)
        return linear_cross_entropy(
            states, self.embedding.word_embeddings.weight, targets, *options, bias=self.final_bias
        )


def resolve_positions(
    input_ids: Tensor, positions: Tensor | None, documents: Tensor | None, cache: Cache | None = None
) -> tuple[Tensor, int, PackedDocuments | None]:
    """Resolve the arguments of `hidden_states` to (positions of the tokens, largest position + 1, document boundaries
    or None).

    If `positions` and `documents` are in host memory, this function does not wait for the device of `input_ids`.

    Raises:
        ValueError: `documents` and `input_ids` have different shapes.
    """
    if documents is not None and documents.shape != input_ids.shape:
        raise ValueError(
            f"documents: shape {tuple(documents.shape)} differs from the shape of input_ids, "
            f"{tuple(input_ids.shape)}; pass one document number per token"
        )
    packed = documents_from_ids(documents, input_ids.device) if documents is not None else None
    if positions is not None:
        return positions.to(input_ids.device, non_blocking=True), int(positions.max()) + 1, packed
    if packed is not None:
        return positions_within(packed), max(stop - start for row in packed.spans for start, stop in row), packed
    past = len(cache) if cache is not None else 0
    reached = past + input_ids.shape[1]
    return torch.arange(past, reached, device=input_ids.device), reached, packed


class LanguageModelLoss(ShardedModule):
    """A model with its training objective. It maps samples, int64 [batch, length + 1], to the next-token loss in nats
    per token.

    `documents` and `positions`, integer [batch, length], are passed to the model. `loss_mask`, bool [batch, length],
    selects the inputs whose next token counts in the loss. The loss is multiplied by `loss_weight`.

    In training, the gradients also include those of the balancing losses of mixtures of experts. The returned value
    does not include these losses.
    """

    def __init__(self, model: GPT, balancing: Balancing | None = None) -> None:
        """`balancing` is needed to train a model with mixtures of experts."""
        super().__init__()
        self.model, self.balancing = model, balancing

    def forward(
        self,
        samples: Tensor,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
        loss_mask: Tensor | None = None,
        loss_weight: float | Tensor = 1.0,
    ) -> Tensor:
        # Randomly drawn positions do not reveal the number of tokens.
        length = None if positions is None else samples.shape[1] - 1
        mixtures = self.balancing.mixtures if self.balancing is not None and self.training else ()
        with recorded_routing(mixtures):
            hidden = self.model.hidden_states(samples[:, :-1], positions=positions, documents=documents, length=length)
        labels = self.share.split(samples[:, 1:])
        own_mask = None if loss_mask is None else self.share.split(loss_mask)
        mean = self.share.mean(self.model.loss(hidden, labels, own_mask), loss_mask, samples.shape[1] - 1)
        loss = weighted(mean, loss_weight)
        if self.balancing is None or not mixtures:
            return loss
        return loss + self.balancing.gradient_of([each.take_routing() for each in mixtures])


def weighted(loss: Tensor, weight: float | Tensor) -> Tensor:
    """Return the loss times `weight`, or the same tensor if the weight is the number 1."""
    return loss if not isinstance(weight, Tensor) and weight == 1.0 else loss * weight
