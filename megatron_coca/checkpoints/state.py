"""Optimizer state on disk, independent of how the run that wrote it was divided among processes.

Every rank writes the pieces that it holds into a file of its own: flat float32 stretches of named parameters and of
their moments, with the place of each. A reader with another number of ranks, another ZeRO stage or another division of
matrices finds any stretch of any parameter in them.

    state/rank_00000.safetensors    tensors `kind:name:start`; metadata `places`: the shard of every parameter in it
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_coca.checkpoints.errors import CheckpointError, UnreadableError
from megatron_coca.checkpoints.weights import WeightEntry, Weights
from megatron_coca.config.model import GATED_ACTIVATIONS, ModelConfig

WEIGHT = "weight"
"""The kind of a piece of the weights themselves; other kinds are names of optimizer states."""


class TensorShard(NamedTuple):
    """Part `index` of `count` of a tensor cut along `dim`: of each of the blocks, whose sizes are given, one part.

    Blocks are what a packed projection holds one after the other; a plain matrix is one block.
    """

    dim: int
    index: int
    count: int
    blocks: tuple[int, ...]

    def cut(self, full: Tensor) -> Tensor:
        """This part of the whole tensor."""
        parts = [block.chunk(self.count, self.dim)[self.index] for block in full.split(self.blocks, self.dim)]
        return torch.cat(parts, self.dim)

    def place(self, part: Tensor, full: Tensor) -> None:
        """Write this part into the whole tensor."""
        begin = taken = 0
        for block in self.blocks:
            size = block // self.count
            full.narrow(self.dim, begin + self.index * size, size).copy_(part.narrow(self.dim, taken, size))
            begin, taken = begin + block, taken + size

    def full_shape(self, local: Sequence[int]) -> tuple[int, ...]:
        """The whole tensor's shape, from that of a part."""
        return (*local[: self.dim], sum(self.blocks), *local[self.dim + 1 :])


class ParameterSlice(NamedTuple):
    """The shape of a parameter on a rank, and which part of the whole it is (None: all of it)."""

    shape: tuple[int, ...]
    shard: TensorShard | None = None

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The whole parameter's shape."""
        return self.shard.full_shape(self.shape) if self.shard is not None else self.shape


class StatePiece(NamedTuple):
    """A stretch of one parameter, or of one of its optimizer states, as a rank holds it.

    Attributes:
        name: the parameter's name in the model.
        kind: ``WEIGHT`` or the optimizer state's name.
        start: where the stretch begins in the rank's flattened parameter.
        tensor: 1-D; the memory that the engine works on, so that writing into it restores the state.
    """

    name: str
    kind: str
    start: int
    tensor: Tensor


def file_name(rank: int) -> str:
    """The file of a rank's pieces, within the folder of the state."""
    return f"rank_{rank:05d}.safetensors"


def write_pieces(path: Path, pieces: Iterable[StatePiece], places: Mapping[str, ParameterSlice]) -> None:
    """Write a rank's file; tensors must lie in CPU memory."""
    tensors = {f"{piece.kind}:{piece.name}:{piece.start}": piece.tensor for piece in pieces}
    names = {key.split(":")[1] for key in tensors}
    described = {name: places[name] for name in sorted(names)}
    save_file(tensors, path, metadata={"places": json.dumps(described)})


class _Source(NamedTuple):
    """Where a stretch is: `read` gives all of it, `read_part` its elements from one place up to another."""

    read: Callable[[], Tensor]
    read_part: Callable[[int, int], Tensor]
    start: int
    numel: int
    shard: TensorShard | None


class PieceReader:
    """The pieces of all ranks, read as they are needed, wherever they are; subclasses say where."""

    def __init__(self, folder: Path) -> None:
        """`folder` of the state, for messages."""
        self._folder = folder
        self._sources: dict[tuple[str, str], list[_Source]] = defaultdict(list)
        self._places: dict[str, ParameterSlice] = {}
        self._recent: tuple[tuple[str, str, TensorShard | None], tuple[Tensor, Tensor]] | None = None

    def _add_places(self, places: Mapping[str, ParameterSlice]) -> None:
        self._places |= {name: place for name, place in places.items() if name not in self._places}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The whole shape of every parameter, in the order of the files."""
        return {name: place.full_shape for name, place in self._places.items()}

    @property
    def stored(self) -> dict[str, int]:
        """Elements of each kind in all files; what several ranks hold counts again. Weights that are not trained have no
        other kind.
        """
        found: Counter[str] = Counter()
        for (kind, _), sources in self._sources.items():
            found[kind] += sum(source.numel for source in sources)
        return dict(found)

    def require_complete(self) -> None:
        """Look for a gap, without reading values.

        Raises:
            CheckpointError: a stretch of a parameter is in no file, or one state of the optimizer for it and not another.
        """
        states = sorted({kind for kind, _ in self._sources} - {WEIGHT})
        for name in self._places:
            self._require_weight(name)
            covered = [
                sorted((each.shard or (), each.start, each.numel) for each in self._sources[kind, name])
                for kind in states
            ]
            for kind, stretches in zip(states, covered, strict=True):
                if stretches != covered[0]:
                    raise CheckpointError(
                        f"{self._folder}: {kind} of {name} covers other elements than {states[0]} does"
                    )

    def fill(self, piece: StatePiece, place: ParameterSlice) -> None:
        """Copy what was saved into the memory of `piece`, whose parameter lies at `place` now.

        Raises:
            CheckpointError: the state does not hold all of it.
        """
        stop = piece.start + piece.tensor.numel()
        same = [source for source in self._sources[piece.kind, piece.name] if source.shard == place.shard]
        if same:
            self._copy(same, piece.start, stop, piece)
            return
        values, held = self._part(piece.name, piece.kind, place.shard)
        missing = (~held[piece.start : stop]).nonzero()
        if len(missing):
            raise self._incomplete(piece.kind, piece.name, piece.start + int(missing[0]))
        piece.tensor.copy_(values[piece.start : stop])

    def whole(self, name: str, kind: str = WEIGHT) -> Tensor:
        """A parameter, or one of its states, in its whole shape, float32 on the CPU; what is not trained has a state of 0.

        Raises:
            CheckpointError: the state does not hold all of the parameter.
        """
        self._require_weight(name)
        return self._gathered(name, kind)[0]

    def _require_weight(self, name: str) -> None:
        place = self._place(name)
        for sources in self._by_shard(name, WEIGHT).values():
            self._stretches(sources, 0, prod(place.shape), WEIGHT, name)

    def _place(self, name: str) -> ParameterSlice:
        if name not in self._places:
            raise CheckpointError(f"{self._folder}: holds no parameter {name}")
        return self._places[name]

    def _part(self, name: str, kind: str, shard: TensorShard | None) -> tuple[Tensor, Tensor]:
        """Part `shard` of what `_gathered` gives, flattened. The last one is kept: pieces of one parameter are many where
        only some of its rows are trained, and are asked for one after the other.
        """
        if self._recent is None or self._recent[0] != (name, kind, shard):
            found = self._gathered(name, kind)
            values, held = (each if shard is None else shard.cut(each) for each in found)
            self._recent = (name, kind, shard), (values.reshape(-1), held.reshape(-1))
        return self._recent[1]

    def _gathered(self, name: str, kind: str) -> tuple[Tensor, Tensor]:
        """What all files have of a parameter or one of its states, float32, and bool: where they have any."""
        place = self._place(name)
        values, held = torch.zeros(place.full_shape), torch.zeros(place.full_shape, dtype=torch.bool)
        for shard, sources in self._by_shard(name, kind).items():
            part = values if shard is None else torch.zeros(place.shape)
            there = held if shard is None else torch.zeros(place.shape, dtype=torch.bool)
            for source in sources:
                part.view(-1).narrow(0, source.start, source.numel).copy_(source.read())
                there.view(-1).narrow(0, source.start, source.numel).fill_(True)
            if shard is not None:
                shard.place(part, values)
                shard.place(there, held)
        return values, held

    def _by_shard(self, name: str, kind: str) -> dict[TensorShard | None, list[_Source]]:
        found: dict[TensorShard | None, list[_Source]] = defaultdict(list)
        for source in self._sources[kind, name]:
            found[source.shard].append(source)
        shard = self._places[name].shard
        wanted = [None] if shard is None else [shard._replace(index=index) for index in range(shard.count)]
        return {each: found[each] for each in wanted}

    def _copy(self, sources: Sequence[_Source], begin: int, stop: int, piece: StatePiece) -> None:
        """Fill the tensor of `piece` with the stretch [begin, stop) of a flattened parameter."""
        for source, first, last in self._stretches(sources, begin, stop, piece.kind, piece.name):
            part = source.read_part(first - source.start, last - source.start)
            piece.tensor[first - begin : last - begin].copy_(part)

    def _stretches(
        self, sources: Sequence[_Source], begin: int, stop: int, kind: str, name: str
    ) -> list[tuple[_Source, int, int]]:
        """Which source gives what of [begin, stop)."""
        found, reached = [], begin
        for source in sorted(sources, key=lambda each: each.start):
            last = min(stop, source.start + source.numel)
            if source.start <= reached < last:
                found.append((source, reached, last))
                reached = last
        if reached < stop:
            raise self._incomplete(kind, name, reached)
        return found

    def _incomplete(self, kind: str, name: str, reached: int) -> CheckpointError:
        return CheckpointError(
            f"{self._folder}: {kind} of {name} is not complete: elements from {reached} on are in no file; files "
            "of some ranks are missing"
        )


class StateReader(PieceReader):
    """The pieces in the files of one folder. Use it as a context manager.

    Only the files that are named are opened: a folder may hold others, which are not of this checkpoint.

    Raises:
        CheckpointError: no file is named, or one cannot be read.
    """

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        """`names` of the files in `folder`, as `native.state_files` gives them."""
        super().__init__(folder)
        self._files = ExitStack()
        paths = [folder / name for name in sorted(names)]
        if not paths:
            raise CheckpointError(f"{folder}: holds no state of any rank")
        for path in paths:
            self._open(path)

    def __enter__(self) -> "StateReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()

    def _open(self, path: Path) -> None:
        try:
            file = self._files.enter_context(safe_open(path, "pt"))
            places = {name: _place(given) for name, given in json.loads(file.metadata()["places"]).items()}
        except OSError as error:
            raise UnreadableError.of(path, error) from error
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path}: cannot be read as state of a rank: {error}") from error
        self._add_places(places)
        for key in file.keys():  # noqa: SIM118 - a safetensors file is no mapping
            kind, name, start = key.split(":")
            (numel,) = file.get_slice(key).get_shape()
            read, part = partial(file.get_tensor, key), partial(_slice, file, key)
            self._sources[kind, name].append(_Source(read, part, int(start), numel, places[name].shard))


def _slice(file: Any, key: str, begin: int, stop: int) -> Tensor:
    return file.get_slice(key)[begin:stop]


class LocalWeight(NamedTuple):
    """A stretch of a weight that a rank has in its memory, `place` as JSON can hold it."""

    name: str
    start: int
    numel: int
    place: Any


def local_weights(pieces: Iterable[StatePiece], places: Mapping[str, ParameterSlice]) -> list[LocalWeight]:
    """The weights among a rank's pieces."""
    own = sorted((piece.name, piece.start, piece.tensor.numel()) for piece in pieces if piece.kind == WEIGHT)
    return [LocalWeight(*each, places[each[0]]) for each in own]


class LocalWeightReader(PieceReader):
    """The weights of all ranks while they are still in the ranks' memory.

    Attributes:
        order: the rank and the stretch of everything that is read, in the order in which `weights` reads it.
    """

    def __init__(
        self, folder: Path, held: Sequence[Sequence[LocalWeight]], read: Callable[[int, LocalWeight], Tensor]
    ) -> None:
        """`held` by rank; `read` fetches a stretch from a rank, 1-D."""
        super().__init__(folder)
        fetched: dict[_Source, tuple[int, LocalWeight]] = {}
        for rank, stretches in enumerate(held):
            self._add_places({each.name: _place(each.place) for each in stretches})
            for each in stretches:
                fetch = partial(read, rank, each)
                source = _Source(fetch, partial(_part, fetch), each.start, each.numel, _place(each.place).shard)
                self._sources[WEIGHT, each.name].append(source)
                fetched[source] = rank, each
        groups = (group for name in self._places for group in self._by_shard(name, WEIGHT).values())
        self.order = [fetched[source] for group in groups for source in group]


def _part(fetch: Callable[[], Tensor], begin: int, stop: int) -> Tensor:
    return fetch()[begin:stop]


def _place(given: Sequence[Any]) -> ParameterSlice:
    """A place as JSON holds it."""
    shape, shard = given
    if shard is None:
        return ParameterSlice(tuple(shape))
    dim, index, count, blocks = shard
    return ParameterSlice(tuple(shape), TensorShard(dim, index, count, tuple(blocks)))


def weights(reader: PieceReader, dtype: torch.dtype, source: Path) -> Weights:
    """Every weight in its whole shape, in `dtype`; `source` is the folder of the checkpoint."""
    entries = {name: WeightEntry(dtype, shape) for name, shape in reader.shapes.items()}
    return Weights(entries, lambda name: reader.whole(name).to(dtype), source)


class LayerShards(NamedTuple):
    """Layers cut alike.

    Attributes:
        layer: the end of their names.
        dim: of the weight; 0 cuts rows, and the bias with them, 1 cuts columns, and leaves the bias whole.
        blocks: sizes along `dim` of what is packed in the weight; each is cut by itself.
    """

    layer: str
    dim: int
    blocks: tuple[int, ...]

    def layer_spec(self) -> dict[str, Any]:
        """As DeepSpeed's AutoTP has it in its `partition_config`."""
        spec: dict[str, Any] = {
            "patterns": [rf".*\.{re.escape(self.layer)}\.weight$"],
            "partition_type": ("column", "row")[self.dim],
        }
        packed = {"shape": [list(self.blocks), -1], "partition_dim": 0} if len(self.blocks) > 1 else {}
        return spec | packed

    def holds(self, name: str) -> bool:
        """Whether the named parameter is cut by this."""
        return name.endswith((f"{self.layer}.weight", f"{self.layer}.bias")[: 2 - self.dim])

    def shard(self, index: int, count: int) -> TensorShard:
        """What rank `index` of `count` has of such a parameter."""
        return TensorShard(self.dim, index, count, self.blocks)


def layer_shards(model: ModelConfig) -> tuple[LayerShards, ...]:
    """How the layers of a block are cut."""
    queries, keys = model.hidden_size, model.num_kv_heads * model.head_dim
    grouped, width = keys != queries, model.ffn_hidden_size
    return (
        # Head by head [q | k | v], or all queries, all keys, all values.
        LayerShards("attention.query_key_value", 0, (queries, keys, keys) if grouped else (3 * queries,)),
        LayerShards("attention.dense", 1, (queries,)),
        LayerShards("mlp.linear1", 0, (width, width) if model.activation in GATED_ACTIVATIONS else (width,)),
        LayerShards("mlp.linear2", 1, (width,)),
    )
