"""A model cut into pipeline stages: each holds some of its layers, and computes by itself what it can.

Only hidden states travel between stages. Positions, document boundaries and the frame of the position method follow
from the micro batch, which every stage is given.
"""

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

from megatron_coca.attention.context import PositionContext
from megatron_coca.attention.inputs import PackedDocuments
from megatron_coca.model.gpt import GPT, resolve_positions

TOKEN_TABLE = "embedding.word_embeddings"
"""The table of tokens; with tied weights it is the output head's too."""


class StageInput(NamedTuple):
    """A micro batch as LanguageModelLoss takes it: samples int64 [batch, length + 1]; the rest [batch, length]."""

    samples: Tensor
    documents: Tensor | None = None
    positions: Tensor | None = None
    loss_mask: Tensor | None = None


@dataclass(frozen=True)
class Span:
    """The layers [begin, end) of a model of `count` layers: the embedding, the blocks, final norm with output head."""

    begin: int
    end: int
    count: int

    @property
    def has_embedding(self) -> bool:
        """Whether the embedding is among them."""
        return self.begin == 0

    @property
    def has_head(self) -> bool:
        """Whether the final norm and the output head are among them."""
        return self.end == self.count

    @property
    def blocks(self) -> range:
        """The blocks among them, by their numbers in the model."""
        return range(max(self.begin, 1) - 1, min(self.end, self.count - 1) - 1)


@dataclass(frozen=True)
class Sharing:
    """A module whose parameters several stages hold and train as one.

    Attributes:
        path: its name in the model, by which it is found.
        weights: its parameters' names.
        stages: those that hold it; the first one owns it.
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
"""What a layer weighs when layers are divided among stages, by `pipe_partition_method`."""


def layer_weights(model: GPT, method: str) -> list[int]:
    """The weight of every layer of the whole model, by a name of `PARTITION_METHODS`."""
    weigh = PARTITION_METHODS[method]
    return [weigh(model, layer) for layer in range(len(model.blocks) + 2)]


def _parameters(model: GPT, layer: int) -> int:
    """A tied table counts on both sides, as both hold it."""
    head = nn.ModuleList([model.norm, model.final_linear or model.embedding.word_embeddings])
    layers = [model.embedding, *model.blocks, head]
    return sum(parameter.numel() for parameter in layers[layer].parameters())


class Stage(nn.Module):
    """One stage of a pipeline: hidden states [batch, length, hidden_size] -> the same, for the micro batches that it
    was fed, in their order. The first stage takes no notice of its argument; the last one returns the scalar loss.

    Attributes:
        model: what is left of the model.
        spans: the layers of every stage.
        index: of this stage.
        sharing: the modules that several stages hold.
        names: every parameter of this stage, with its name in the whole model.
    """

    def __init__(self, model: GPT, bounds: Sequence[int], index: int) -> None:
        """Takes its layers out of `model`, which is of no use afterwards.

        `bounds` are the first layers of all stages, then the number of layers (see `Span`).
        """
        super().__init__()
        count = len(model.blocks) + 2
        self.spans = tuple(Span(begin, end, count) for begin, end in zip(bounds[:-1], bounds[1:], strict=True))
        self.index, self.span = index, self.spans[index]
        self.sharing = tuple(_sharing(model, self.spans))
        names = {parameter: name for name, parameter in model.named_parameters()}
        _keep(model, self.span)
        self.model = model
        self.names = {parameter: names[parameter] for parameter in model.parameters()}
        self._fed: deque[StageInput] = deque()

    @property
    def copies(self) -> frozenset[str]:
        """Names of the parameters that an earlier stage holds too, and owns."""
        return frozenset(
            f"{shared.path}.{weight}"
            for shared in self.sharing
            if self.index in shared.stages[1:]
            for weight in shared.weights
        )

    def feed(self, micro_batches: Iterable[StageInput]) -> None:
        """The micro batches of the calls to come; what was fed before and not used is dropped."""
        self._fed = deque(micro_batches)

    def forward(self, x: Tensor) -> Tensor:
        batch = self._fed.popleft()
        input_ids = batch.samples[:, :-1]
        positions, length, packed = resolve_positions(input_ids, batch.positions, batch.documents)
        if self.span.has_embedding:
            x = self.model.embedding(input_ids, positions, length)
        if self.span.blocks:
            x = self.model.through_blocks(x, self._frame(batch.samples, positions, length, x.dtype, packed))
        return self._loss(x, batch) if self.span.has_head else x

    def _frame(
        self, samples: Tensor, positions: Tensor, length: int, dtype: torch.dtype, documents: PackedDocuments | None
    ) -> PositionContext:
        drawing = self.training and self.model.method.clex is not None
        with _draws_of(samples) if drawing else nullcontext():
            return self.model.positions(positions, length, dtype, documents=documents)

    def _loss(self, x: Tensor, batch: StageInput) -> Tensor:
        hidden = x if self.span.blocks else self.model.norm(x)
        return self.model.loss(hidden, batch.samples[:, 1:], batch.loss_mask)


def _sharing(model: GPT, spans: Sequence[Span]) -> Iterator[Sharing]:
    holders = {"positions": tuple(index for index, span in enumerate(spans) if span.blocks)}
    if model.final_linear is None:
        holders[TOKEN_TABLE] = (0, len(spans) - 1)
    for path, stages in holders.items():
        weights = tuple(name for name, _ in model.get_submodule(path).named_parameters())
        if weights and len(stages) > 1:
            yield Sharing(path, weights, stages)


def _keep(model: GPT, span: Span) -> None:
    """Drop what a stage with these layers does not compute."""
    tied_head = span.has_head and model.final_linear is None
    if not span.has_embedding and tied_head:
        model.embedding.position_embeddings = None
    elif not span.has_embedding:
        del model.embedding
    if not span.has_head:
        model.norm, model.final_linear = nn.Identity(), None
    if not span.blocks:
        del model.positions
    model.blocks = nn.ModuleList(model.blocks[number] for number in span.blocks)


@contextmanager
def _draws_of(samples: Tensor) -> Iterator[None]:
    """Random numbers on the CPU that follow from the samples alone: what all stages must draw alike for one micro
    batch, without telling each other.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(zlib.crc32(samples.cpu().numpy().tobytes()))
        yield
