"""Weights and optimizer states inside DeepSpeed's optimizers, as pieces of named parameters.

DeepSpeed flattens parameters and gives each rank a range of the result, in a layout that depends on the ZeRO stage;
`LAYOUTS` of deepspeed_internals.py finds the ranges.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

from megatron_coca.attention.layer import PackedRows, packed_rows
from megatron_coca.checkpoints.native.state import WEIGHT, StatePiece
from megatron_coca.config import ModelConfig
from megatron_coca.training.engine import deepspeed_internals as internals
from megatron_coca.training.optimizer import Lion

Names = Mapping[nn.Parameter, str]
SPLIT = re.compile(r"(?P<packed>.*\.query_key_value)\.(?P<projection>query|key|value)\.(?P<kind>weight|bias)")
"""Names of the parameters of `SplitProjection`."""
MOMENTS: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq"),
    torch.optim.SGD: (),
    Lion: ("exp_avg",),
}
"""The tensors that an optimizer keeps for each parameter."""
STEP = "step"


class Packed(NamedTuple):
    """A query, key or value parameter as `rows` of the packed projection `name`; `row_shape` is () for a bias."""

    name: str
    rows: PackedRows
    row_shape: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The packed parameter's shape on this rank."""
        return (self.rows.total, *self.row_shape)

    def pieces(self, piece: StatePiece) -> Iterator[StatePiece]:
        """Divide a piece of this parameter into pieces of the packed one, without copying."""
        width, stop = self.row_shape[0] if self.row_shape else 1, piece.start + piece.tensor.numel()
        for start, begin, last in self.rows.ranges(piece.start, stop, width):
            yield StatePiece(self.name, piece.kind, start, piece.tensor[begin - piece.start : last - piece.start])


def packed_parameters(names: Names, model: ModelConfig) -> dict[str, Packed]:
    """Return the parameters of projections in three layers, by name, as rows of the packed ones."""
    found = {}
    for parameter, name in names.items():
        match = SPLIT.fullmatch(name)
        if match is not None:
            rows, *row_shape = internals.whole_shape(parameter)
            # Tensor-parallel ranks have equal shares of the queries and of the keys.
            group = model.num_attention_heads // model.num_kv_heads
            keys = rows // group if match["projection"] == "query" else rows
            packed = packed_rows(keys * group, keys, model.head_dim)[match["projection"]]
            found[name] = Packed(f"{match['packed']}.{match['kind']}", packed, tuple(row_shape))
    return found


def packed_pieces(pieces: Iterable[StatePiece], packed: Mapping[str, Packed]) -> Iterator[StatePiece]:
    """Replace pieces of parameters in `packed` by pieces of the packed ones, without copying."""
    for piece in pieces:
        if piece.name in packed:
            yield from packed[piece.name].pieces(piece)
        else:
            yield piece


def _moments(optimizer: Any) -> tuple[str, ...]:
    return next(names for kind, names in MOMENTS.items() if isinstance(internals.torch_optimizer(optimizer), kind))


def _state(optimizer: Any, flat: Tensor) -> dict[str, Any]:
    """Return the optimizer's state of a tensor; if there is none, create it as the first step would."""
    state, moments = internals.torch_optimizer(optimizer).state[flat], _moments(optimizer)
    if not state and moments:
        state[STEP] = torch.zeros((), dtype=torch.float32, device=flat.device)
        state.update({name: torch.zeros_like(flat) for name in moments})
    return state


def pieces(optimizer: Any, names: Names) -> list[StatePiece]:
    """Return this rank's pieces of every named parameter; `optimizer` is DeepSpeed's or, without ZeRO, PyTorch's.

    Parameters that are not trained have weights only, in the training dtype. ZeRO 1 and 2 do not partition them: each
    is listed by one of the ranks that hold it, and `refresh` sends it to the others.
    """
    found: list[StatePiece] = []
    for flat_range in internals.layout(optimizer).ranges(optimizer):
        state = _state(optimizer, flat_range.flat)
        values = {WEIGHT: flat_range.flat.detach()} | {name: state[name] for name in _moments(optimizer)}
        name = names[flat_range.parameter]
        found += [StatePiece(name, kind, flat_range.start, flat_range.of(tensor)) for kind, tensor in values.items()]
    for parameter, owner in _frozen_owners(optimizer, names):
        start, part = internals.trained_part(parameter)
        if part.numel() and (owner is None or owner == torch.distributed.get_rank(internals.replica_group(optimizer))):
            found.append(StatePiece(names[parameter], WEIGHT, start, part))
    return found


def _frozen_owners(optimizer: Any, names: Names) -> Iterator[tuple[nn.Parameter, int | None]]:
    """Yield the parameters that no optimizer steps, each with the rank of the optimizer's group that lists it (ZeRO 1
    and 2). The rank is None if all list it: each has its own range (ZeRO 3), or only the first is saved (without ZeRO).
    """
    group = internals.replica_group(optimizer)
    frozen = [parameter for parameter in names if not parameter.requires_grad]
    for number, parameter in enumerate(frozen):
        yield parameter, None if group is None else number % torch.distributed.get_world_size(group)


def in_known_order(optimizer: Any) -> bool:
    """Return True if every range has the values of its parameter, before the first step: some DeepSpeed keys reorder
    ranges silently.
    """
    for flat_range in internals.layout(optimizer).ranges(optimizer):
        start, part = internals.trained_part(flat_range.parameter)
        trained = part.narrow(0, flat_range.start - start, flat_range.numel)
        if not torch.equal(flat_range.of(flat_range.flat.detach()).to(trained), trained):
            return False
    return True


def counters(optimizer: Any) -> dict[str, float]:
    """Return the optimizer's step count and, in fp16, the numbers of the loss scaling's state."""
    states = [state for state in internals.torch_optimizer(optimizer).state.values() if STEP in state]
    numbers = {
        name: value for name, value in internals.loss_scaling(optimizer).items() if isinstance(value, int | float)
    }
    counted = {f"loss_scaler.{name}": float(value) for name, value in numbers.items()}
    return {STEP: float(states[0][STEP]) if states else 0.0} | counted


def set_counters(optimizer: Any, values: Mapping[str, float]) -> None:
    """Restore the values of `counters`."""
    for flat in internals.layout(optimizer).flat_tensors(optimizer):
        state = _state(optimizer, flat)
        if STEP in state:
            state[STEP].fill_(values[STEP])
    scaling = internals.loss_scaling(optimizer)
    for name, own in list(scaling.items()):
        if f"loss_scaler.{name}" in values:
            scaling[name] = type(own)(values[f"loss_scaler.{name}"])


def refresh(optimizer: Any, names: Names) -> None:
    """Update the trained weights after the pieces were overwritten. Every rank must call it."""
    internals.layout(optimizer).refresh(optimizer)
    for parameter, owner in _frozen_owners(optimizer, names):
        if owner is not None:
            torch.distributed.broadcast(parameter.data, group=internals.replica_group(optimizer), group_src=owner)
