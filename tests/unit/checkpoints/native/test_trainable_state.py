"""The state of a run that trains some rows of a packed projection: moments of these rows only, in every layout."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from megatron_coca.attention.layer import PARTS, packed_rows
from megatron_coca.checkpoints import CheckpointError
from megatron_coca.checkpoints.native.state import (
    WEIGHT,
    ParameterSlice,
    StatePiece,
    TensorShard,
    file_name,
    write_pieces,
)
from megatron_coca.config import load_config
from megatron_coca.training.engine.state import packed_parameters, packed_pieces
from tests.checkpoint_files import open_state

HEAD_DIM = 2
NAME, WIDTH = "blocks.0.attention.query_key_value", 8
TRAINED = ("key", "value")
KINDS = (WEIGHT, "exp_avg", "exp_avg_sq")


def model(key_heads: int) -> object:
    keys = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 4, "num_kv_heads": key_heads, "seq_length": 8}
    return load_config([], keys | {"vocab_size": 8}).model


def rows_of(key_heads: int) -> dict[str, torch.Tensor]:
    rows = packed_rows(4 * HEAD_DIM, key_heads * HEAD_DIM, HEAD_DIM)
    return {part: rows[part].numbers() for part in PARTS}


def whole(key_heads: int, kind: str) -> torch.Tensor:
    rows = (4 + 2 * key_heads) * HEAD_DIM
    return torch.arange(float(rows * WIDTH)).view(rows, WIDTH) + 1000 * KINDS.index(kind)


def shard(key_heads: int, index: int, count: int) -> TensorShard | None:
    queries, keys = 4 * HEAD_DIM, key_heads * HEAD_DIM
    blocks = (3 * queries,) if keys == queries else (queries, keys, keys)
    return TensorShard(0, index, count, blocks) if count > 1 else None


def held(key_heads: int, data: int, tensor: int) -> Iterator[tuple[list[StatePiece], dict[str, ParameterSlice]]]:
    """The pieces of every rank: each part of its rows in `data` stretches, moments of the trained parts only."""
    for index in range(tensor):
        part_rows = rows_of(key_heads)
        local = {part: rows.chunk(tensor)[index] for part, rows in part_rows.items()}
        names = {
            torch.nn.Parameter(torch.empty(len(rows), WIDTH)): f"{NAME}.{part}.weight" for part, rows in local.items()
        }
        places = packed_parameters(names, model(key_heads))  # type: ignore[arg-type]
        packed = next(iter(places.values()))
        for rank in range(data):
            pieces = []
            for part, rows in local.items():
                for kind in KINDS if part in TRAINED else (WEIGHT,):
                    flat = whole(key_heads, kind)[rows].flatten()
                    edges = [round(k * len(flat) / data) for k in range(data + 1)]
                    begin, stop = list(pairwise(edges))[rank]
                    pieces.append(StatePiece(f"{NAME}.{part}.weight", kind, begin, flat[begin:stop].clone()))
            place = ParameterSlice(packed.shape, shard(key_heads, index, tensor))
            yield list(packed_pieces(pieces, places)), {packed.name: place}


def write(folder: Path, key_heads: int, data: int, tensor: int) -> None:
    folder.mkdir()
    for rank, (pieces, places) in enumerate(held(key_heads, data, tensor)):
        write_pieces(folder / file_name(rank), pieces, places)


GRIDS = [(1, 1), (3, 1), (1, 2), (2, 2)]


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("saved", GRIDS)
@pytest.mark.parametrize("wanted", GRIDS)
def test_any_grid_reads_what_any_other_wrote(
    tmp_path: Path, key_heads: int, saved: tuple[int, int], wanted: tuple[int, int]
) -> None:
    write(tmp_path / "state", key_heads, *saved)
    with open_state(tmp_path / "state") as reader:
        for pieces, places in held(key_heads, *wanted):
            for piece in pieces:
                expected = piece.tensor.clone()
                piece.tensor.fill_(-1.0)
                reader.fill(piece, places[piece.name])
                assert torch.equal(piece.tensor, expected), piece


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("saved", GRIDS)
def test_the_packed_weight_and_the_moments_of_its_trained_rows(
    tmp_path: Path, key_heads: int, saved: tuple[int, int]
) -> None:
    write(tmp_path / "state", key_heads, *saved)
    with open_state(tmp_path / "state") as reader:
        assert reader.shapes == {f"{NAME}.weight": tuple(whole(key_heads, WEIGHT).shape)}
        assert torch.equal(reader.whole(f"{NAME}.weight"), whole(key_heads, WEIGHT))
        moment, expected = reader.whole(f"{NAME}.weight", "exp_avg"), whole(key_heads, "exp_avg")
        for part, rows in rows_of(key_heads).items():
            assert torch.equal(moment[rows], expected[rows] if part in TRAINED else torch.zeros_like(expected[rows]))


def test_pieces_are_the_same_memory() -> None:
    flat = torch.zeros(8 * WIDTH)
    names = {torch.nn.Parameter(torch.empty(8, WIDTH)): f"{NAME}.key.weight"}
    places = packed_parameters(names, model(4))  # type: ignore[arg-type]
    pieces = list(packed_pieces([StatePiece(f"{NAME}.key.weight", WEIGHT, 0, flat)], places))
    assert len(pieces) == 4, "a stretch for each head"
    for number, piece in enumerate(pieces):
        piece.tensor.fill_(number + 1.0)
    assert flat.view(4, -1).unique(dim=1).flatten().tolist() == [1.0, 2.0, 3.0, 4.0]


def test_rows_have_the_shape_of_their_layer() -> None:
    """Heads of two widths; in block 1, the keys are also the values."""
    keys = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 4, "seq_length": 8, "vocab_size": 8}
    keys |= {"attention_config": ["global", "local"], "layer_types": {"local": {}}}
    keys |= {"head_shapes": {"local": {"kv_channels": 6, "num_kv_heads": 2, "values_from_keys": True}}}
    names = {
        torch.nn.Parameter(torch.empty(rows, WIDTH)): f"blocks.{number}.attention.query_key_value.key.weight"
        for number, rows in ((0, 8), (1, 12))
    }
    first, second = packed_parameters(names, load_config([], keys).model).values()
    assert (first.shape, second.shape) == ((24, WIDTH), (24 + 12, WIDTH))
    assert second.rows.numbers().tolist() == list(range(24, 36))


def test_biases_are_packed_as_rows_are() -> None:
    names = {torch.nn.Parameter(torch.empty(8)): f"{NAME}.value.bias"}
    (packed,) = packed_parameters(names, model(4)).values()  # type: ignore[arg-type]
    assert (packed.name, packed.shape) == (f"{NAME}.bias", (24,))
    pieces = list(packed.pieces(StatePiece("", WEIGHT, 1, torch.arange(1.0, 8.0))))
    assert [(piece.start, piece.tensor.tolist()) for piece in pieces] == [
        (5, [1.0]),
        (10, [2.0, 3.0]),
        (16, [4.0, 5.0]),
        (22, [6.0, 7.0]),
    ]


@pytest.mark.parametrize("saved", [(1, 1), (1, 2)])
def test_moments_that_are_not_there_are_not_taken_for_zeros(tmp_path: Path, saved: tuple[int, int]) -> None:
    """A run that trains other parts, in the same division and in another."""
    write(tmp_path / "state", 4, *saved)
    with open_state(tmp_path / "state") as reader:
        wanted = StatePiece(f"{NAME}.weight", "exp_avg", 0, torch.zeros(4))
        with pytest.raises(CheckpointError, match="exp_avg of .* is incomplete, .*element 0"):
            reader.fill(wanted, ParameterSlice((24, WIDTH)))


def test_a_missing_file_is_found_for_moments_too(tmp_path: Path) -> None:
    write(tmp_path / "state", 4, 3, 1)
    (tmp_path / "state" / file_name(1)).unlink()
    with open_state(tmp_path / "state") as reader, pytest.raises(CheckpointError, match="is incomplete"):
        reader.whole(f"{NAME}.weight", "exp_avg")
