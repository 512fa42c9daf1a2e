"""Weights and optimizer states inside DeepSpeed's optimizers, as pieces of named parameters.

DeepSpeed flattens parameters and gives each rank a stretch of the result, in a layout that depends on the ZeRO stage.
Only this module knows these layouts.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from deepspeed.runtime.utils import all_gather_dp_groups
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from megatron_coca.attention.layer import PackedRows, packed_rows
from megatron_coca.checkpoints.state import WEIGHT, StatePiece
from megatron_coca.config import ModelConfig

Names = Mapping[nn.Parameter, str]
SPLIT = re.compile(r"(?P<packed>.*\.query_key_value)\.(?P<projection>query|key|value)\.(?P<kind>weight|bias)")
"""Names of the parameters of `SplitProjection`."""
MOMENTS: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq"),
    torch.optim.SGD: (),
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
        for start, begin, last in self.rows.stretches(piece.start, stop, width):
            yield StatePiece(self.name, piece.kind, start, piece.tensor[begin - piece.start : last - piece.start])


def local_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the shape of a parameter on this rank, also if ZeRO 3 has partitioned it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def packed_places(names: Names, model: ModelConfig) -> dict[str, Packed]:
    """Return the parameters of projections in three layers, by name, as rows of the packed ones."""
    places = {}
    for parameter, name in names.items():
        match = SPLIT.fullmatch(name)
        if match is not None:
            rows, *row_shape = local_shape(parameter)
            # Tensor-parallel ranks have equal shares of the queries and of the keys.
            group = model.num_attention_heads // model.num_kv_heads
            keys = rows // group if match["projection"] == "query" else rows
            packed = packed_rows(keys * group, keys, model.head_dim)[match["projection"]]
            places[name] = Packed(f"{match['packed']}.{match['kind']}", packed, tuple(row_shape))
    return places


def packed_pieces(pieces: Iterable[StatePiece], places: Mapping[str, Packed]) -> Iterator[StatePiece]:
    """Replace pieces of parameters in `places` by pieces of the packed ones, without copying."""
    for piece in pieces:
        if piece.name in places:
            yield from places[piece.name].pieces(piece)
        else:
            yield piece


class Stretch(NamedTuple):
    """A stretch of a parameter in `flat`, the tensor that the optimizer steps: `begin` is its first element there, and
    `start` that in the flattened parameter.
    """

    parameter: nn.Parameter
    flat: Tensor
    begin: int
    numel: int
    start: int

    def of(self, values: Tensor) -> Tensor:
        """This stretch of a tensor with the layout of `flat`."""
        return values.view(-1).narrow(0, self.begin, self.numel)


def _plain(optimizer: torch.optim.Optimizer) -> Iterator[Stretch]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield Stretch(parameter, parameter, 0, parameter.numel(), 0)


def _partitioned(optimizer: Any) -> Iterator[Stretch]:
    """ZeRO 1 and 2: a rank's stretch of each concatenated parameter group is one float32 tensor."""
    for group, flat in zip(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True):
        for parameter in group:
            mapping = parameter._hp_mapping
            if mapping is not None:
                inner, outer = mapping.hp_fragment_address, mapping.lp_fragment_address
                yield Stretch(parameter, flat, inner.start, inner.numel, outer.start)


def _fully_partitioned(optimizer: Any) -> Iterator[Stretch]:
    """ZeRO 3: a rank's stretch of each parameter, padded at its end, is part of a sub-group's float32 tensor."""
    rank = torch.distributed.get_rank(optimizer.dp_process_group)
    for group, parameters in enumerate(optimizer.fp16_groups):
        flat = optimizer.fp32_partitioned_groups_flat[group]
        for parameter in parameters:
            _, begin, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
            start = rank * size
            numel = min(size, parameter.ds_numel - start)
            if numel > 0:
                yield Stretch(parameter, flat, begin, numel, start)


def _refresh_partitioned(optimizer: Any) -> None:
    for group, flat in enumerate(optimizer.single_partition_of_fp32_groups):
        rank = torch.distributed.get_rank(optimizer.real_dp_process_group[group])
        optimizer.parallel_partitioned_bit16_groups[group][rank].data.copy_(flat.data)
    all_gather_dp_groups(
        groups_flat=optimizer.bit16_groups_flat,
        partitioned_param_groups=optimizer.parallel_partitioned_bit16_groups,
        dp_process_group=optimizer.real_dp_process_group,
        start_alignment_factor=optimizer.nccl_start_alignment_factor,
        allgather_bucket_size=optimizer.allgather_bucket_size,
    )


def _refresh_fully_partitioned(optimizer: Any) -> None:
    optimizer.checkpoint_event_prologue()  # releases gathered copies of the parameters
    for flat, trained in zip(
        optimizer.fp32_partitioned_groups_flat, optimizer.fp16_partitioned_groups_flat, strict=True
    ):
        if flat.numel():
            trained.data.copy_(flat.data)
    optimizer.checkpoint_event_epilogue()  # gathers those again that always stay whole


class OptimizerLayout(NamedTuple):
    """Functions for one kind of DeepSpeed's optimizer: this rank's stretches, the tensors that PyTorch's optimizer
    steps, and a copy of the float32 weights into the trained ones.
    """

    stretches: Callable[[Any], Iterator[Stretch]]
    flat_tensors: Callable[[Any], list[Tensor]]
    refresh: Callable[[Any], None]


LAYOUTS: dict[type, OptimizerLayout] = {
    DeepSpeedZeroOptimizer: OptimizerLayout(
        _partitioned, lambda optimizer: list(optimizer.single_partition_of_fp32_groups), _refresh_partitioned
    ),
    DeepSpeedZeroOptimizer_Stage3: OptimizerLayout(
        _fully_partitioned, lambda optimizer: list(optimizer.fp32_partitioned_groups_flat), _refresh_fully_partitioned
    ),
    torch.optim.Optimizer: OptimizerLayout(
        _plain,
        lambda optimizer: [parameter for group in optimizer.param_groups for parameter in group["params"]],
        lambda optimizer: None,
    ),
}
"""By the kind of DeepSpeed's optimizer; without ZeRO it is PyTorch's, which steps the trained weights themselves."""


def _layout(optimizer: Any) -> OptimizerLayout:
    return next(layout for kind, layout in LAYOUTS.items() if isinstance(optimizer, kind))


def _base(optimizer: Any) -> torch.optim.Optimizer:
    """PyTorch's optimizer inside DeepSpeed's."""
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer.optimizer


def _moments(optimizer: Any) -> tuple[str, ...]:
    return next(names for kind, names in MOMENTS.items() if isinstance(_base(optimizer), kind))


def _state(optimizer: Any, flat: Tensor) -> dict[str, Any]:
    """The optimizer's state of a tensor, created as its first step would if there is none."""
    state, moments = _base(optimizer).state[flat], _moments(optimizer)
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
    for stretch in _layout(optimizer).stretches(optimizer):
        state = _state(optimizer, stretch.flat)
        values = {WEIGHT: stretch.flat.detach()} | {name: state[name] for name in _moments(optimizer)}
        name = names[stretch.parameter]
        found += [StatePiece(name, kind, stretch.start, stretch.of(tensor)) for kind, tensor in values.items()]
    for parameter, owner in _frozen_owners(optimizer, names):
        if owner is None or owner == torch.distributed.get_rank(optimizer.dp_process_group):
            found += _frozen_piece(parameter, names[parameter])
    return found


def _frozen_owners(optimizer: Any, names: Names) -> Iterator[tuple[nn.Parameter, int | None]]:
    """The parameters that no optimizer steps, and which rank of the optimizer's group lists each under ZeRO 1 and 2;
    None if all do, because each has its own stretch (ZeRO 3) or only the first is saved (without ZeRO).
    """
    shared = isinstance(optimizer, DeepSpeedZeroOptimizer)
    ranks = torch.distributed.get_world_size(optimizer.dp_process_group) if shared else 1
    frozen = [parameter for parameter in names if not parameter.requires_grad]
    for number, parameter in enumerate(frozen):
        yield parameter, number % ranks if shared else None


def _frozen_piece(parameter: Any, name: str) -> list[StatePiece]:
    """A parameter that no optimizer steps; under ZeRO 3 this rank's stretch of it."""
    if not hasattr(parameter, "ds_tensor"):
        return [StatePiece(name, WEIGHT, 0, parameter.detach().view(-1))]
    size = parameter.ds_tensor.ds_numel
    start = torch.distributed.get_rank(parameter.ds_process_group) * size
    numel = min(size, parameter.ds_numel - start)
    return [StatePiece(name, WEIGHT, start, parameter.ds_tensor.detach().narrow(0, 0, numel))] if numel > 0 else []


def in_known_order(optimizer: Any) -> bool:
    """Return True if every stretch has the values of its parameter, before the first step: some DeepSpeed keys reorder
    stretches silently.
    """
    for stretch in _layout(optimizer).stretches(optimizer):
        parameter: Any = stretch.parameter
        if hasattr(parameter, "ds_tensor"):
            trained = parameter.ds_tensor.detach().narrow(0, 0, stretch.numel)
        else:
            trained = parameter.detach().reshape(-1).narrow(0, stretch.start, stretch.numel)
        if not torch.equal(stretch.of(stretch.flat.detach()).to(trained), trained):
            return False
    return True


def counters(optimizer: Any) -> dict[str, float]:
    """Return the optimizer's step count and, in fp16, the numbers of the loss scaling's state."""
    states = [state for state in _base(optimizer).state.values() if STEP in state]
    scaler = getattr(optimizer, "loss_scaler", None)
    scaling = vars(scaler) if scaler is not None else {}
    return {STEP: float(states[0][STEP]) if states else 0.0} | {
        f"loss_scaler.{name}": float(value) for name, value in scaling.items() if isinstance(value, int | float)
    }


def set_counters(optimizer: Any, values: Mapping[str, float]) -> None:
    """Restore what `counters` returned."""
    for flat in _layout(optimizer).flat_tensors(optimizer):
        state = _state(optimizer, flat)
        if STEP in state:
            state[STEP].fill_(values[STEP])
    scaler = getattr(optimizer, "loss_scaler", None)
    for name, value in values.items():
        attribute = name.removeprefix("loss_scaler.")
        if attribute != name and hasattr(scaler, attribute):
            setattr(scaler, attribute, type(getattr(scaler, attribute))(value))


def refresh(optimizer: Any, names: Names) -> None:
    """Update the trained weights after the pieces were overwritten. Every rank must call it."""
    _layout(optimizer).refresh(optimizer)
    for parameter, owner in _frozen_owners(optimizer, names):
        if owner is not None:
            torch.distributed.broadcast(parameter.data, group=optimizer.dp_process_group, group_src=owner)
