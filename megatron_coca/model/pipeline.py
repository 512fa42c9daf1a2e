"""Pipeline stages of a model.

Pipeline stages send each other only hidden states. Every stage receives the whole micro-batch and computes positions,
document boundaries and position contexts from it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

from megatron_coca.attention.inputs import PackedDocuments
from megatron_coca.model.gpt import GPT, Contexts, resolve_positions, weighted

TOKEN_TABLE = "embedding.word_embeddings"
"""Path of the token embedding. If the weights are tied, it is also the output head."""


class StageInput(NamedTuple):
    """A micro-batch, which contains the arguments of `LanguageModelLoss`. `samples` is int64 [batch, length + 1]; the
    other tensors are [batch, length].
    """

    samples: Tensor
    documents: Tensor | None = None
    positions: Tensor | None = None
    loss_mask: Tensor | None = None
    loss_weight: float = 1.0


@dataclass(frozen=True)
class Span:
    """The layers [begin, end) of a model with `count` layers. The first layer is the embedding, then come the blocks,
    and the last layer is the final norm with the output head.
    """

    begin: int
    end: int
    count: int

    @property
    def has_embedding(self) -> bool:
        """True for the first pipeline stage, which has the embedding."""
        return self.begin == 0

    @property
    def has_head(self) -> bool:
        """True for the last pipeline stage, which has the final norm and the output head."""
        return self.end == self.count

    @property
    def blocks(self) -> range:
        """Indices of this stage's blocks in the whole model."""
        return range(max(self.begin, 1) - 1, min(self.end, self.count - 1) - 1)


@dataclass(frozen=True)
class Sharing:
    """A module that is copied to several pipeline stages and trained as one module. `path` is its name in the model,
    and `weights` are the names of its parameters. `stages` are the stages with a copy; the first of them owns it.
    """

    path: str
    weights: tuple[str, ...]
    stages: tuple[int, ...]


LayerWeight = Callable[[GPT, int], int]

PARTITION_METHODS: dict[str, LayerWeight] = {
    "type:transformer|mlp": lambda model, layer: int(0 < layer <= len(model.blocks)),
    "parameters": lambda model, layer: _parameters(model, layer),
    "uniform": lambda model, layer: 1,
}
"""The functions (model, layer) -> cost of the layer, by `pipe_partition_method`. The partition into pipeline stages
balances these costs.
"""


def layer_weights(model: GPT, method: str) -> list[int]:
    """Return the cost of each layer of the whole model. `method` is a key of `PARTITION_METHODS`."""
    weigh = PARTITION_METHODS[method]
    return [weigh(model, layer) for layer in range(len(model.blocks) + 2)]


def _parameters(model: GPT, layer: int) -> int:
    """Count the parameters of a layer. A tied embedding counts in both the first and the last layer."""
    parts = (model.norm, model.output_transform, model.final_linear or model.embedding.word_embeddings)
    head = nn.ModuleList(part for part in parts if part is not None)
    head.register_parameter("bias", model.final_bias)
    layers = [model.embedding, *model.blocks, head]
    return sum(parameter.numel() for parameter in layers[layer].parameters())


class PipelineStage(nn.Module):
    """One pipeline stage. It maps hidden states [batch, length, hidden_size] to hidden states of the same shape; each
    call processes the next micro-batch that was passed to `feed`. The first stage ignores its argument, and the last
    stage returns the scalar loss.

    Attributes:
        model: the model without the layers of other stages.
        spans: the layers of every stage.
        index: index of this stage.
        sharing: the modules that several pipeline stages share.
        names: for each parameter of this stage, its name in the complete model.
    """

    def __init__(self, model: GPT, bounds: Sequence[int], index: int) -> None:
        """Remove the layers of other stages from `model`. `bounds` lists the first layer of each stage, followed by the
        total number of layers (see `Span`).
        """
        super().__init__()
        count = len(model.blocks) + 2
        self.spans = tuple(Span(begin, end, count) for begin, end in pairwise(bounds))
        self.index, self.span = index, self.spans[index]
        self.sharing = tuple(_sharing(model, self.spans))
        names = {parameter: name for name, parameter in model.named_parameters()}
        _keep(model, self.span)
        self.model = model
        self.names = {parameter: names[parameter] for parameter in model.parameters()}
        self._fed: deque[StageInput] = deque()

    @property
    def copies(self) -> frozenset[str]:
        """Names of this stage's parameters that an earlier stage owns."""
        return frozenset(
            f"{shared.path}.{weight}"
            for shared in self.sharing
            if self.index in shared.stages[1:]
            for weight in shared.weights
        )

    def feed(self, micro_batches: Iterable[StageInput]) -> None:
        """Set the micro-batches for the next forward calls. Unused micro-batches of an earlier call are discarded."""
        self._fed = deque(micro_batches)

    def forward(self, x: Tensor) -> Tensor:
        batch = self._fed.popleft()
        input_ids = batch.samples[:, :-1]
        positions, reached, packed = resolve_positions(input_ids, batch.positions, batch.documents)
        if self.span.has_embedding:
            x = self.model.embedding(input_ids, positions, reached)
        if self.span.blocks:
            x = self.model.through_blocks(x, self._contexts(batch.samples, positions, reached, x.dtype, packed))
        return self._loss(x, batch) if self.span.has_head else x

    def _contexts(
        self, samples: Tensor, positions: Tensor, reached: int, dtype: torch.dtype, documents: PackedDocuments | None
    ) -> Contexts:
        length = min(reached, samples.shape[1] - 1)  # randomly drawn positions do not reveal the number of tokens
        return self.model.contexts(positions, length, dtype, documents=documents, reached=reached, batch=len(samples))

    def _loss(self, x: Tensor, batch: StageInput) -> Tensor:
        hidden = x if self.span.blocks else self.model.norm(x)
        return weighted(self.model.loss(hidden, batch.samples[:, 1:], batch.loss_mask), batch.loss_weight)


def _sharing(model: GPT, spans: Sequence[Span]) -> Iterator[Sharing]:
    types, holders = model.layer_types, {}
    for name, encoding in model.encodings().items():
        path = "positions" if encoding is model.positions else f"positions.others.{name}"
        holding = (index for index, span in enumerate(spans) if name in {types[block] for block in span.blocks})
        holders[path] = tuple(holding)
    if model.final_linear is None:
        holders[TOKEN_TABLE] = (0, len(spans) - 1)
    for path, stages in holders.items():
        names = (name for name, _ in model.get_submodule(path).named_parameters())
        weights = tuple(name for name in names if not name.startswith("others."))
        if weights and len(stages) > 1:
            yield Sharing(path, weights, stages)


def _keep(model: GPT, span: Span) -> None:
    """Delete the layers of the other stages from the model."""
    tied_head = span.has_head and model.final_linear is None
    if not span.has_embedding and tied_head:
        model.embedding.position_embeddings = model.embedding.embedding_layernorm = model.embedding.projection = None
    elif not span.has_embedding:
        del model.embedding
    if not span.has_head:
        model.norm, model.final_linear, model.output_transform, model.final_bias = nn.Identity(), None, None, None
    if not span.blocks:
        del model.positions
    model.blocks = nn.ModuleList(model.blocks[number] for number in span.blocks)
    for name, encoding in model.encodings().items() if span.blocks else ():
        if name not in model.layer_types:
            encoding.bias = encoding.clex = None
