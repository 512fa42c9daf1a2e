"""The state of a run on disk: every parallel layout reads the files of every other one."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_coca.checkpoints import CheckpointError
from megatron_coca.checkpoints.native.state import (
    WEIGHT,
    ParameterSlice,
    StatePiece,
    TensorShard,
    file_name,
    weights,
    write_pieces,
)
from tests.checkpoint_files import open_state

NAMES = {"a.weight": (12, 5), "b.bias": (7,), "c.weight": (3, 4)}
KINDS = (WEIGHT, "exp_avg")
PACKED = {"a.weight": (0, (6, 4, 2)), "c.weight": (1, (4,))}
"""Dimension and blocks by which the parameters are cut among tensor ranks."""


def value(name: str, kind: str) -> torch.Tensor:
    shape = NAMES[name]
    numbers = torch.arange(float(torch.tensor(shape).prod())).view(shape)
    return numbers + 1000 * list(NAMES).index(name) + 0.5 * KINDS.index(kind)


def shard(name: str, index: int, count: int) -> TensorShard | None:
    if count == 1 or name not in PACKED:
        return None
    dim, blocks = PACKED[name]
    return TensorShard(dim, index, count, blocks)


def local(name: str, kind: str, part: TensorShard | None) -> torch.Tensor:
    return value(name, kind) if part is None else part.cut(value(name, kind))


def divided(data: int, tensor: int) -> Iterator[tuple[list[StatePiece], dict[str, ParameterSlice]]]:
    """What every rank of a grid holds, each parameter cut into `data` stretches of about equal length."""
    for index in range(tensor):
        parts = {name: shard(name, index, tensor) for name in NAMES}
        places = {name: ParameterSlice(tuple(local(name, WEIGHT, part).shape), part) for name, part in parts.items()}
        for rank in range(data):
            held = []
            for name, part in parts.items():
                for kind in KINDS:
                    flat = local(name, kind, part).reshape(-1)
                    edges = [round(k * flat.numel() / data) for k in range(data + 1)]
                    begin, stop = list(pairwise(edges))[rank]
                    if stop > begin:
                        held.append(StatePiece(name, kind, begin, flat[begin:stop].clone()))
            yield held, places


def write(folder: Path, data: int, tensor: int) -> None:
    folder.mkdir()
    for rank, (held, places) in enumerate(divided(data, tensor)):
        write_pieces(folder / file_name(rank), held, places)


GRIDS = [(1, 1), (3, 1), (2, 2)]


@pytest.mark.parametrize("saved", GRIDS)
@pytest.mark.parametrize("wanted", GRIDS)
def test_any_grid_reads_what_any_other_wrote(tmp_path: Path, saved: tuple[int, int], wanted: tuple[int, int]) -> None:
    write(tmp_path / "state", *saved)
    with open_state(tmp_path / "state") as reader:
        for held, places in divided(*wanted):
            for piece in held:
                expected = piece.tensor.clone()
                piece.tensor.fill_(-1.0)
                reader.fill(piece, places[piece.name])
                assert torch.equal(piece.tensor, expected), piece


@pytest.mark.parametrize("saved", GRIDS)
def test_whole_weights(tmp_path: Path, saved: tuple[int, int]) -> None:
    write(tmp_path / "state", *saved)
    with open_state(tmp_path / "state") as reader:
        assert reader.shapes == NAMES
        found = dict(weights(reader, torch.bfloat16, tmp_path))
    assert all(torch.equal(found[name], value(name, WEIGHT).to(torch.bfloat16)) for name in NAMES)


@pytest.mark.parametrize("saved", [(3, 1), (2, 2)])
def test_a_missing_file_is_found(tmp_path: Path, saved: tuple[int, int]) -> None:
    write(tmp_path / "state", *saved)
    (tmp_path / "state" / file_name(1)).unlink()
    incomplete = pytest.raises(CheckpointError, match="is incomplete, no file has element .*")
    with open_state(tmp_path / "state") as reader, incomplete:
        reader.whole("a.weight")


def test_what_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    with pytest.raises(CheckpointError, match="no optimizer state"):
        open_state(tmp_path / "state")
    (tmp_path / "state" / file_name(0)).write_bytes(b"no safetensors")
    with pytest.raises(CheckpointError, match="not a valid optimizer state file"):
        open_state(tmp_path / "state")
    save_file({"w": torch.zeros(2)}, tmp_path / "state" / file_name(0))
    with pytest.raises(CheckpointError, match="not a valid optimizer state file"):
        open_state(tmp_path / "state")
    (tmp_path / "state" / file_name(0)).unlink()
    write(tmp_path / "other", 1, 1)
    with open_state(tmp_path / "other") as reader:
        with pytest.raises(CheckpointError, match="no parameter d"):
            reader.whole("d")
        with pytest.raises(CheckpointError, match="no parameter d"):
            reader.fill(StatePiece("d", WEIGHT, 0, torch.zeros(2)), ParameterSlice((2,)))


def test_parts_of_packed_blocks_make_the_whole_again() -> None:
    full = value("a.weight", WEIGHT)
    parts = [shard("a.weight", index, 2) for index in range(2)]
    again = torch.empty_like(full)
    for part in parts:
        assert part is not None
        cut = part.cut(full)
        assert cut.shape == (6, 5) and part.full_shape(cut.shape) == (12, 5)
        part.copy_into(cut, again)
    assert torch.equal(again, full)
    assert parts[0] is not None and parts[0].cut(full)[:, 0].tolist() == [0, 5, 10, 30, 35, 50], "a part of each block"
