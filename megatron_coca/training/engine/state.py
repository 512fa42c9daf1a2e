"""Weights and optimizer states in the memory of an engine, divided into pieces of named parameters.

Both engines flatten parameters and assign each rank a range of the result. The layout depends on the engine and on the
ZeRO stage; `LAYOUTS` in layouts.py finds the ranges.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

from megatron_coca.attention.layer import PackedRows, packed_rows
from megatron_coca.checkpoints.native.state import WEIGHT, StatePiece
from megatron_coca.config import Config, ModelConfig
from megatron_coca.training.adapters import checkpoint_name
from megatron_coca.training.engine import layouts
from megatron_coca.training.optimizer import ORTHOGONAL, QK_NORMS, Lion, Muon

Names = Mapping[nn.Parameter, str]
SPLIT = re.compile(
    r"(?P<packed>blocks\.(?P<block>\d+)\..*\.query_key_value)\.(?P<projection>query|key|value)\.(?P<kind>weight|bias)"
)
"""Names of the parameters of `SplitProjection`."""
MOMENTS: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq"),
    torch.optim.SGD: (),
    Lion: ("exp_avg",),
    Muon: ("exp_avg",),
}
"""The state tensors that each optimizer keeps per parameter. Muon's entry is for its matrices; its other parameters
have AdamW's state tensors.
"""
STEP, ADDED_AT = "step", "added_at"
"""Counters: the optimizer's step count, and the step count at which norms of queries and keys were added, if they were
added after other parameters.
"""


class Packed(NamedTuple):
    """A query, key or value parameter, as `rows` of the packed projection `name`; `row_shape` is () for a bias."""

    name: str
    rows: PackedRows
    row_shape: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the packed parameter on this rank."""
        return (self.rows.total, *self.row_shape)

    def pieces(self, piece: StatePiece) -> Iterator[StatePiece]:
        """Split a piece of this parameter into pieces of the packed parameter, without copying."""
        width, stop = self.row_shape[0] if self.row_shape else 1, piece.start + piece.tensor.numel()
        for start, begin, last in self.rows.ranges(piece.start, stop, width):
            yield StatePiece(self.name, piece.kind, start, piece.tensor[begin - piece.start : last - piece.start])


def saved_names(model: nn.Module, lora: bool, prefix: str = "model.") -> dict[nn.Parameter, str]:
    """Return the parameters of `model` that are saved, with their names in checkpoints. With adapters (`lora`), only
    trained parameters are saved. `prefix` is removed from the names.
    """
    named = ((name.removeprefix(prefix), parameter) for name, parameter in model.named_parameters())
    return {each: checkpoint_name(name) for name, each in named if each.requires_grad or not lora}


def packed_parameters(names: Names, model: ModelConfig) -> dict[str, Packed]:
    """Return the parameters of projections that are split into three layers, by name. Each is described as rows of the
    packed projection.
    """
    found, layer_types = {}, model.layer_names
    for parameter, name in names.items():
        match = SPLIT.fullmatch(name)
        if match is not None:
            rows, *row_shape = layouts.whole_shape(parameter)
            # All tensor-parallel ranks have the same number of queries and the same number of keys.
            shape = model.with_heads(layer_types[int(match["block"])])
            group = shape.num_attention_heads // shape.num_kv_heads
            keys = rows // group if match["projection"] == "query" else rows
            parts = packed_rows(keys * group, keys, shape.head_dim, not shape.values_from_keys)
            packed = parts[match["projection"]]
            found[name] = Packed(f"{match['packed']}.{match['kind']}", packed, tuple(row_shape))
    return found


def packed_pieces(pieces: Iterable[StatePiece], packed: Mapping[str, Packed]) -> Iterator[StatePiece]:
    """Replace pieces of the parameters in `packed` with pieces of the packed parameters, without copying."""
    for piece in pieces:
        if piece.name in packed:
            yield from packed[piece.name].pieces(piece)
        else:
            yield piece


def model_pieces(optimizer: Any, names: Names, config: Config) -> list[StatePiece]:
    """Return this rank's pieces of every parameter in `names`; see `pieces`."""
    return list(packed_pieces(pieces(optimizer, names), _packed(names, config)))


def local_shapes(names: Names, config: Config) -> dict[str, tuple[int, ...]]:
    """Return the shape on this rank of every parameter in `names`."""
    packed = _packed(names, config)
    shapes = {name: layouts.whole_shape(weight) for weight, name in names.items() if name not in packed}
    return shapes | {projection.name: projection.shape for projection in packed.values()}


def _packed(names: Names, config: Config) -> dict[str, Packed]:
    """Return the parameters that checkpoints contain as rows of a packed parameter. With adapters there are none."""
    return {} if config.optimizer.lora is not None else packed_parameters(names, config.model)


def _replicas(optimizer: Any) -> Any:
    """Return the group of ranks among which ZeRO 1 and 2, or the native engine, divide the optimizer states; None for
    other optimizers.
    """
    return layouts.layout(optimizer).replicas(optimizer)


def moments_of(kind: type[torch.optim.Optimizer], name: str) -> tuple[str, ...]:
    """Return the state tensors that an optimizer keeps for a parameter with this name in a checkpoint."""
    return MOMENTS[kind if kind is not Muon or ORTHOGONAL.search(name) else torch.optim.AdamW]


def _moments(optimizer: Any, flat: Tensor) -> tuple[str, ...]:
    own = layouts.torch_optimizer(optimizer)
    if isinstance(own, Muon):
        return MOMENTS[Muon if own.is_orthogonal(flat) else torch.optim.AdamW]
    return next(names for kind, names in MOMENTS.items() if isinstance(own, kind))


def _state(optimizer: Any, flat: Tensor) -> dict[str, Any]:
    """Return the optimizer's state for a tensor; if it does not exist yet, create it as the first step would."""
    state, moments = layouts.torch_optimizer(optimizer).state[flat], _moments(optimizer, flat)
    if not state and moments:
        state[STEP] = torch.zeros((), dtype=torch.float32, device=flat.device)
        state.update({name: torch.zeros_like(flat) for name in moments})
    return state


def pieces(optimizer: Any, names: Names) -> list[StatePiece]:
    """Return this rank's pieces of every named parameter; `optimizer` is an object of a class in `LAYOUTS`.

    Frozen parameters have only weights, in the training dtype. ZeRO 1 and 2 do not partition frozen parameters:
    one of the ranks that have a copy of the parameter returns it, and `refresh` sends it to the other ranks.
    """
    found: list[StatePiece] = []
    for flat_range in layouts.layout(optimizer).ranges(optimizer):
        state = _state(optimizer, flat_range.flat)
        moments = _moments(optimizer, flat_range.flat)
        values = {WEIGHT: flat_range.flat.detach()} | {name: state[name] for name in moments}
        name = names[flat_range.parameter]
        found += [StatePiece(name, kind, flat_range.start, flat_range.of(tensor)) for kind, tensor in values.items()]
    for parameter, owner in _frozen_owners(optimizer, names):
        start, part = layouts.trained_part(parameter)
        if part.numel() and (owner is None or owner == torch.distributed.get_rank(_replicas(optimizer))):
            found.append(StatePiece(names[parameter], WEIGHT, start, part))
    return found


def _frozen_owners(optimizer: Any, names: Names) -> Iterator[tuple[nn.Parameter, int | None]]:
    """Yield each frozen parameter and, with ZeRO 1 and 2, the rank in the optimizer's group that returns its piece. The
    rank is None if all ranks return pieces. With ZeRO 3, each rank returns its own range. Without ZeRO, each rank
    returns a copy, and only the first copy is saved.
    """
    group = _replicas(optimizer)
    frozen = [parameter for parameter in names if not parameter.requires_grad]
    for number, parameter in enumerate(frozen):
        yield parameter, None if group is None else number % torch.distributed.get_world_size(group)


def in_known_order(optimizer: Any) -> bool:
    """Return whether every range contains the values of its parameter, as it must before the first step. Some DeepSpeed
    keys silently reorder ranges.
    """
    for flat_range in layouts.layout(optimizer).ranges(optimizer):
        start, part = layouts.trained_part(flat_range.parameter)
        trained = part.narrow(0, flat_range.start - start, flat_range.numel)
        if not torch.equal(flat_range.of(flat_range.flat.detach()).to(trained), trained):
            return False
    return True


def counters(optimizer: Any, names: Names, added_at: float | None = None) -> dict[str, float]:
    """Return the optimizer's step count and, in fp16, the numbers in the loss scaler's state.

    `added_at` is the step count at which norms of queries and keys were added. These norms then have a separate step
    count.
    """
    numbers = {name: value for name, value in layouts.loss_scaling(optimizer).items() if isinstance(value, int | float)}
    counted = {f"loss_scaler.{name}": float(value) for name, value in numbers.items()}
    if added_at is not None:
        return {STEP: _step(optimizer, names, added_at), ADDED_AT: added_at} | counted
    states = [state for state in layouts.torch_optimizer(optimizer).state.values() if STEP in state]
    return {STEP: float(states[0][STEP]) if states else 0.0} | counted


def _step(optimizer: Any, names: Names, added_at: float) -> float:
    states, step = layouts.torch_optimizer(optimizer).state, 0.0
    for each in layouts.layout(optimizer).ranges(optimizer):
        if STEP in states[each.flat]:
            added = QK_NORMS.search(names[each.parameter])
            step = float(states[each.flat][STEP]) + (added_at if added else 0.0)
            if not added:
                break
    return step


def set_counters(optimizer: Any, values: Mapping[str, float], names: Names) -> None:
    """Restore the values returned by `counters`."""
    for flat in layouts.layout(optimizer).flat_tensors(optimizer):
        state = _state(optimizer, flat)
        if STEP in state:
            state[STEP].fill_(values[STEP])
    if ADDED_AT in values:
        for each in layouts.layout(optimizer).ranges(optimizer):
            state = _state(optimizer, each.flat)
            if STEP in state and QK_NORMS.search(names[each.parameter]):
                state[STEP].fill_(values[STEP] - values[ADDED_AT])
    scaling = layouts.loss_scaling(optimizer)
    for name, own in list(scaling.items()):
        if f"loss_scaler.{name}" in values:
            scaling[name] = type(own)(values[f"loss_scaler.{name}"])


def refresh(optimizer: Any, names: Names) -> None:
    """Update the trained weights after the pieces have been overwritten. Every rank must call this."""
    layouts.layout(optimizer).refresh(optimizer)
    for parameter, owner in _frozen_owners(optimizer, names):
        if owner is not None:
            torch.distributed.broadcast(parameter.data, group=_replicas(optimizer), group_src=owner)
