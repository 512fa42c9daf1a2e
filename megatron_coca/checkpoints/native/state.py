"""Optimizer state on disk, in a form that does not depend on the parallel layout of the run.

Every rank writes its pieces to one file: flat float32 ranges of named parameters and of their moments. A run with any
number of ranks, ZeRO stage and tensor-parallel size can read any range of any parameter from these files.

    state/rank_00000.safetensors    tensors `kind:name:start`; metadata `places`: shape and shard of every parameter
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_coca.checkpoints.files import CheckpointError, UnreadableError
from megatron_coca.checkpoints.weights import WeightEntry, Weights
from megatron_coca.config.base import shown
from megatron_coca.config.model import GATED_ACTIVATIONS, ModelConfig
from megatron_coca.support.regular_files import open_regular

WEIGHT = "weight"
"""The kind of pieces that contain weights. The other kinds are names of optimizer states."""


SLICES = "places"
"""Key under which the metadata of a file contain the slices of its parameters."""


class TensorShard(NamedTuple):
    """Shard `rank` of a tensor that is split into `ranks` shards along `dim`.

    Each block of a packed projection is split separately. `blocks` are the sizes of the blocks along `dim`. A plain
    matrix has one block.
    """

    dim: int
    rank: int
    ranks: int
    blocks: tuple[int, ...]

    def cut(self, full: Tensor) -> Tensor:
        """Return this shard of the whole tensor."""
        blocks = full.split(self.blocks, self.dim)
        return torch.cat([block.chunk(self.ranks, self.dim)[self.rank] for block in blocks], self.dim)

    def copy_into(self, shard: Tensor, full: Tensor) -> None:
        """Copy this shard into the whole tensor."""
        begin = taken = 0
        for block in self.blocks:
            size = block // self.ranks
            full.narrow(self.dim, begin + self.rank * size, size).copy_(shard.narrow(self.dim, taken, size))
            begin, taken = begin + block, taken + size

    def full_shape(self, local: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the whole tensor, given the shape of a shard."""
        return (*local[: self.dim], sum(self.blocks), *local[self.dim + 1 :])


class ParameterSlice(NamedTuple):
    """Shape of a parameter on a rank, and the rank's shard, or None if the rank has the whole parameter."""

    shape: tuple[int, ...]
    shard: TensorShard | None = None

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return self.shape if self.shard is None else self.shard.full_shape(self.shape)

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> "ParameterSlice":
        """Build a slice from its JSON form, a nested list. Raises ValueError or TypeError if the list is invalid."""
        shape, shard = values
        numbers = [*shape, *(() if shard is None else (*shard[:3], *shard[3]))]
        if not all(type(number) is int and 0 <= number < 2**40 for number in numbers):
            raise ValueError(f"{shown(values)} is not the shape and shard of a parameter")
        if shard is None:
            return cls(tuple(shape))
        dim, rank, ranks, blocks = shard
        if not (dim < len(shape) and rank < ranks <= 2**20):
            raise ValueError(f"{shown(shard)} is not a shard of a parameter")
        return cls(tuple(shape), TensorShard(dim, rank, ranks, tuple(blocks)))


class StatePiece(NamedTuple):
    """A range of one parameter, or of one of its optimizer states, on a rank.

    Attributes:
        name: name of the parameter in the model.
        kind: ``WEIGHT`` or the name of the optimizer state.
        start: start of the range in the rank's flattened parameter.
        tensor: the 1-D values. The tensor is the engine's own memory, so writing into it restores the state.
    """

    name: str
    kind: str
    start: int
    tensor: Tensor


def file_name(rank: int) -> str:
    """Return the name of the file that a rank writes to the state folder."""
    return f"rank_{rank:05d}.safetensors"


def write_pieces(path: Path, pieces: Iterable[StatePiece], slices: Mapping[str, ParameterSlice]) -> None:
    """Write the file of one rank. The tensors of `pieces` must be on the CPU."""
    tensors = {f"{piece.kind}:{piece.name}:{piece.start}": piece.tensor for piece in pieces}
    names = sorted({key.split(":")[1] for key in tensors})
    save_file(tensors, path, metadata={SLICES: json.dumps({name: slices[name] for name in names})})


class _Range(NamedTuple):
    """Elements [start, start + numel) of a flattened parameter. The offsets of `read(begin, stop)` count from start."""

    read: Callable[[int, int], Tensor]
    start: int
    numel: int
    shard: TensorShard | None


class PieceReader:
    """Reads the pieces of all ranks on demand. Subclasses define where the pieces are read from."""

    def __init__(self, folder: Path) -> None:
        """`folder` appears in error messages."""
        self._folder = folder
        self._ranges: dict[tuple[str, str], list[_Range]] = defaultdict(list)
        self._slices: dict[str, ParameterSlice] = {}
        self._recent: tuple[tuple[str, str, TensorShard | None], tuple[Tensor, Tensor]] | None = None

    def _add_slices(self, slices: Mapping[str, ParameterSlice]) -> None:
        self._slices |= {name: parameter for name, parameter in slices.items() if name not in self._slices}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every whole parameter, by name."""
        return {name: parameter.full_shape for name, parameter in self._slices.items()}

    def fill(self, piece: StatePiece, parameter: ParameterSlice) -> None:
        """Copy saved values into `piece`. `parameter` is the slice of the piece's parameter that this rank has now.

        Raises CheckpointError if the saved state is incomplete or has another shape.
        """
        saved = self._slice(piece.name).full_shape
        if saved != parameter.full_shape:
            raise CheckpointError(
                f"{self._folder}: {piece.name} has shape {list(saved)}, but {list(parameter.full_shape)} in the model; "
                "resume with the configuration of the checkpoint"
            )
        stop = piece.start + piece.tensor.numel()
        same = [part for part in self._ranges[piece.kind, piece.name] if part.shard == parameter.shard]
        if same:
            for part, first, last in self._covering(same, piece.start, stop, piece.kind, piece.name):
                values = part.read(first - part.start, last - part.start)
                piece.tensor[first - piece.start : last - piece.start].copy_(values)
            return
        # The last parameter is cached, because a parameter with few trained rows has many consecutive pieces.
        key = (piece.name, piece.kind, parameter.shard)
        if self._recent is None or self._recent[0] != key:
            whole, present = self._gathered(piece.name, piece.kind)
            if parameter.shard is not None:
                whole, present = parameter.shard.cut(whole), parameter.shard.cut(present)
            self._recent = key, (whole.reshape(-1), present.reshape(-1))
        values, present = self._recent[1]
        missing = (~present[piece.start : stop]).nonzero()
        if len(missing):
            raise self._incomplete(piece.kind, piece.name, piece.start + int(missing[0]))
        piece.tensor.copy_(values[piece.start : stop])

    def whole(self, name: str, kind: str = WEIGHT) -> Tensor:
        """Return a whole parameter, or one of its optimizer states, in float32 on the CPU.

        The states of untrained elements are 0. Raises CheckpointError if the saved weights are incomplete.
        """
        self._require_weight(name)
        return self._gathered(name, kind)[0]

    def _slice(self, name: str) -> ParameterSlice:
        if name not in self._slices:
            raise CheckpointError(
                f"{self._folder}: no parameter {name}; resume with the configuration of the checkpoint"
            )
        return self._slices[name]

    def _require_weight(self, name: str) -> None:
        parameter = self._slice(name)
        for ranges in self._by_shard(name, WEIGHT).values():
            self._covering(ranges, 0, prod(parameter.shape), WEIGHT, name)

    def _gathered(self, name: str, kind: str) -> tuple[Tensor, Tensor]:
        """Return the float32 values of a parameter or state in all files, and a bool tensor of found elements."""
        parameter = self._slice(name)
        values, present = torch.zeros(parameter.full_shape), torch.zeros(parameter.full_shape, dtype=torch.bool)
        for shard, ranges in self._by_shard(name, kind).items():
            local = values if shard is None else torch.zeros(parameter.shape)
            local_present = present if shard is None else torch.zeros(parameter.shape, dtype=torch.bool)
            for part in ranges:
                local.view(-1).narrow(0, part.start, part.numel).copy_(part.read(0, part.numel))
                local_present.view(-1).narrow(0, part.start, part.numel).fill_(True)
            if shard is not None:
                shard.copy_into(local, values)
                shard.copy_into(local_present, present)
        return values, present

    def _by_shard(self, name: str, kind: str) -> dict[TensorShard | None, list[_Range]]:
        shard = self._slices[name].shard
        shards = [None] if shard is None else [shard._replace(rank=rank) for rank in range(shard.ranks)]
        return {shard: [part for part in self._ranges[kind, name] if part.shard == shard] for shard in shards}

    def _covering(
        self, ranges: Sequence[_Range], begin: int, stop: int, kind: str, name: str
    ) -> list[tuple[_Range, int, int]]:
        """Return the ranges that together cover [begin, stop), each with the start and the end of the part to read from
        it.
        """
        parts, reached = [], begin
        for part in sorted(ranges, key=lambda part: part.start):
            last = min(stop, part.start + part.numel)
            if part.start <= reached < last:
                parts.append((part, reached, last))
                reached = last
        if reached < stop:
            raise self._incomplete(kind, name, reached)
        return parts

    def _incomplete(self, kind: str, name: str, reached: int) -> CheckpointError:
        return CheckpointError(
            f"{self._folder}: {kind} of {name} is incomplete, no file has element {reached}; copy the files of all "
            "ranks"
        )


class StateReader(PieceReader):
    """Reads pieces from the named files of a folder. Use it as a context manager."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        """`names` come from `native.state_files`. Raises CheckpointError if there are none, or if a file is invalid."""
        super().__init__(folder)
        self._files = ExitStack()
        paths = [folder / name for name in sorted(names)]
        if not paths:
            raise CheckpointError(f"{folder}: no optimizer state; use another step, or set finetune=true")
        for path in paths:
            self._open(path)

    def __enter__(self) -> "StateReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def _open(self, path: Path) -> None:
        try:
            open_regular(path).close()
            file = self._files.enter_context(safe_open(path, "pt"))
            recorded = json.loads(file.metadata()[SLICES])
            slices = {name: ParameterSlice.from_json(values) for name, values in recorded.items()}
            ranges = [self._range(file, key, slices) for key in file.keys()]  # noqa: SIM118 - `file` is not a mapping
        except OSError as error:
            raise UnreadableError.of(path, error) from error
        except (SafetensorError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path}: not a valid optimizer state file ({error}); copy it again, or use another step"
            ) from error
        self._add_slices(slices)
        for kind, name, found in ranges:
            self._ranges[kind, name].append(found)

    @staticmethod
    def _range(file: Any, key: str, slices: Mapping[str, ParameterSlice]) -> tuple[str, str, _Range]:
        """Return the kind, the parameter name and the range of one tensor in a file."""
        kind, name, first = key.split(":")
        (numel,), start, parameter = file.get_slice(key).get_shape(), int(first), slices[name]
        if not 0 <= start <= start + numel <= prod(parameter.shape):
            raise ValueError(f"{key} has {numel} elements, which exceed the parameter's shape {list(parameter.shape)}")

        def read(begin: int, stop: int) -> Tensor:
            # get_tensor memory-maps the file, get_slice copies
            return file.get_tensor(key) if stop - begin == numel else file.get_slice(key)[begin:stop]

        return kind, name, _Range(read, start, numel, parameter.shard)


class LocalWeight(NamedTuple):
    """A range of a weight in the memory of a rank. `parameter` is a ParameterSlice or its JSON form."""

    name: str
    start: int
    numel: int
    parameter: Any


def local_weights(pieces: Iterable[StatePiece], slices: Mapping[str, ParameterSlice]) -> list[LocalWeight]:
    """Return the pieces of a rank that contain weights, as `LocalWeight`s sorted by name."""
    own = sorted((piece.name, piece.start, piece.tensor.numel()) for piece in pieces if piece.kind == WEIGHT)
    return [LocalWeight(name, start, numel, slices[name]) for name, start, numel in own]


class LocalWeightReader(PieceReader):
    """Reads weights from the memory of all ranks.

    Attributes:
        order: rank and range of every read, in the order in which `weights` performs the reads.
    """

    def __init__(
        self, folder: Path, held: Sequence[Sequence[LocalWeight]], read: Callable[[int, LocalWeight], Tensor]
    ) -> None:
        """`held` lists the weights in the memory of each rank; `read` fetches a range from a rank as a 1-D tensor."""
        super().__init__(folder)
        fetched: dict[_Range, tuple[int, LocalWeight]] = {}
        for rank, weights in enumerate(held):
            slices = {weight.name: ParameterSlice.from_json(weight.parameter) for weight in weights}
            self._add_slices(slices)
            for weight in weights:

                def fetch(begin: int, stop: int, rank: int = rank, weight: LocalWeight = weight) -> Tensor:
                    return read(rank, weight)[begin:stop]

                part = _Range(fetch, weight.start, weight.numel, slices[weight.name].shard)
                self._ranges[WEIGHT, weight.name].append(part)
                fetched[part] = rank, weight
        groups = (group for name in self._slices for group in self._by_shard(name, WEIGHT).values())
        self.order = [fetched[part] for group in groups for part in group]


def weights(reader: PieceReader, dtype: torch.dtype, source: Path) -> Weights:
    """Return all whole weights in `dtype`. `source` is the checkpoint's folder."""
    entries = {name: WeightEntry(dtype, shape) for name, shape in reader.shapes.items()}
    return Weights(entries, lambda name: reader.whole(name).to(dtype), source)


class LayerShards(NamedTuple):
    """Tensor-parallel sharding of one layer in every block.

    Attributes:
        layer: last part of the layer's name. It begins with the number of the block if the heads of layers differ.
        dim: sharded dimension of the weight. 0 splits rows and the bias; 1 splits columns and not the bias.
        blocks: sizes along `dim` of the parts of a packed weight, which are split separately.
    """

    layer: str
    dim: int
    blocks: tuple[int, ...]

    def layer_spec(self) -> dict[str, Any]:
        """Return the layer's entry for `partition_config` of DeepSpeed's AutoTP."""
        spec: dict[str, Any] = {
            "patterns": [rf".*\.{re.escape(self.layer)}\.weight$"],
            "partition_type": ("column", "row")[self.dim],
        }
        packed = {"shape": [list(self.blocks), -1], "partition_dim": 0} if len(self.blocks) > 1 else {}
        return spec | packed

    def holds(self, name: str) -> bool:
        """Return whether this sharding applies to the named parameter."""
        return name.endswith((f"{self.layer}.weight", f"{self.layer}.bias")[: 2 - self.dim])

    def shard(self, rank: int, ranks: int) -> TensorShard:
        """Return the shard of one tensor rank."""
        return TensorShard(self.dim, rank, ranks, self.blocks)


def layer_shards(model: ModelConfig) -> tuple[LayerShards, ...]:
    """Return the tensor-parallel sharding of the layers in a block."""
    width = model.ffn_hidden_size
    return (
        *(shards for prefix, shape in shapes_by_prefix(model) for shards in _attention_shards(prefix, shape)),
        LayerShards("attention.position_gates.projection", 0, (model.num_attention_heads,)),
        LayerShards("mlp.linear1", 0, (width, width) if model.activation in GATED_ACTIVATIONS else (width,)),
        LayerShards("mlp.linear2", 1, (width,)),
    )


def shapes_by_prefix(model: ModelConfig) -> Iterator[tuple[str, ModelConfig]]:
    """Yield pairs of a prefix and the shape of the heads in layers with this prefix.

    If the heads of layers differ, the prefix is blocks.N. for block N. Otherwise, an empty prefix covers all blocks.
    """
    if not model.head_shapes:
        yield "", model
    for number, layer_type in enumerate(model.layer_names if model.head_shapes else ()):
        yield f"blocks.{number}.", model.with_heads(layer_type)


def _attention_shards(prefix: str, model: ModelConfig) -> Iterator[LayerShards]:
    queries, keys = model.attention_width, model.num_kv_heads * model.head_dim
    # [q | k | v] for each head in turn, or all queries, then all keys, then all values.
    blocks = (queries, keys, keys) if keys != queries else (3 * queries,)
    yield LayerShards(f"{prefix}attention.query_key_value", 0, (queries, keys) if model.values_from_keys else blocks)
    yield LayerShards(f"{prefix}attention.dense", 1, (queries,))
    if model.output_gates:
        yield LayerShards(f"{prefix}attention.output_gate", 0, (model.output_gates,))
