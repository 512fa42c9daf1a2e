"""Where an engine keeps weights and optimizer states, as pieces of named parameters.

DeepSpeed flattens parameters and gives each rank a stretch of the result; how, depends on the ZeRO stage. A strategy
for each kind of optimizer knows its way about; nothing else does.
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

SPLIT = re.compile(r"(?P<packed>.*\.query_key_value)\.(?P<part>query|key|value)\.(?P<kind>weight|bias)")
"""Names of the parameters of `SplitProjection`."""


class Packed(NamedTuple):
    """Where a parameter lies in a packed one.

    Attributes:
        name: of the packed parameter.
        rows: that this one has of it, on this rank.
        row_shape: the shape of one row, () for a bias.
    """

    name: str
    rows: PackedRows
    row_shape: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The packed parameter's shape on this rank."""
        return (self.rows.total, *self.row_shape)

    def pieces(self, piece: StatePiece) -> Iterator[StatePiece]:
        """The same memory as stretches of the packed parameter."""
        width, stop = self.row_shape[0] if self.row_shape else 1, piece.start + piece.tensor.numel()
        for start, begin, last in self.rows.stretches(piece.start, stop, width):
            yield StatePiece(self.name, piece.kind, start, piece.tensor[begin - piece.start : last - piece.start])


def local_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """The shape of a parameter on this rank, also where ZeRO 3 has divided it further."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def packed_places(names: Mapping[nn.Parameter, str], model: ModelConfig) -> dict[str, Packed]:
    """Where the parameters of projections in three layers lie, by their names; all others are not in it."""
    found = {}
    for parameter, name in names.items():
        match = SPLIT.fullmatch(name)
        if match is not None:
            rows, *row_shape = local_shape(parameter)
            # Tensor ranks have equal shares of the queries and of the keys.
            group = model.num_attention_heads // model.num_kv_heads
            keys = rows // group if match["part"] == "query" else rows
            packed = packed_rows(keys * group, keys, model.head_dim)[match["part"]]
            found[name] = Packed(f"{match['packed']}.{match['kind']}", packed, tuple(row_shape))
    return found


def packed_pieces(pieces: Iterable[StatePiece], places: Mapping[str, Packed]) -> Iterator[StatePiece]:
    """The same memory, with `places` taken for what they are parts of."""
    for piece in pieces:
        if piece.name in places:
            yield from places[piece.name].pieces(piece)
        else:
            yield piece


Names = Mapping[nn.Parameter, str]
MOMENTS: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq"),
    torch.optim.SGD: (),
}
"""The tensors that an optimizer keeps for each parameter."""
STEP = "step"


class Stretch(NamedTuple):
    """Where a part of a parameter lies in what the optimizer steps.

    Attributes:
        parameter: the trained one.
        flat: the tensor that the optimizer steps.
        begin: where the part begins in it.
        numel: its length.
        start: where it begins in the flattened parameter.
    """

    parameter: nn.Parameter
    flat: Tensor
    begin: int
    numel: int
    start: int

    def of(self, values: Tensor) -> Tensor:
        """This part of a tensor laid out as the one that the optimizer steps."""
        return values.view(-1).narrow(0, self.begin, self.numel)


def pieces(optimizer: Any, names: Names) -> list[StatePiece]:
    """What this rank holds of every named parameter; `optimizer` is DeepSpeed's or, without ZeRO, PyTorch's.

    Of those that are not trained there are weights alone, in the training dtype. ZeRO 1 and 2 divide no weights: each of
    these is named by one of the ranks that hold it, and `refresh` gives it to the others.
    """
    found: list[StatePiece] = []
    for stretch in STRATEGIES[_kind(optimizer)](optimizer):
        state = _state(base(optimizer), stretch.flat)
        values = {WEIGHT: stretch.flat.detach()} | {name: state[name] for name in _moments(base(optimizer))}
        name = names[stretch.parameter]
        found += [StatePiece(name, kind, stretch.start, stretch.of(tensor)) for kind, tensor in values.items()]
    mine = (parameter for parameter, owner in _frozen_owners(optimizer, names) if owner in (None, _own_rank(optimizer)))
    return found + [piece for parameter in mine for piece in _frozen(parameter, names[parameter])]


def in_known_order(optimizer: Any) -> bool:
    """Whether the stretches are where they are taken to be, by their values: some of DeepSpeed's keys reorder them
    without saying so. To be asked before the first step.
    """
    return all(
        torch.equal(stretch.of(stretch.flat.detach()).to(trained), trained)
        for stretch in STRATEGIES[_kind(optimizer)](optimizer)
        for trained in [_trained(stretch)]
    )


def _trained(stretch: Stretch) -> Tensor:
    """The same part of the parameter that is trained."""
    parameter: Any = stretch.parameter
    if hasattr(parameter, "ds_tensor"):
        return parameter.ds_tensor.detach().narrow(0, 0, stretch.numel)
    return parameter.detach().reshape(-1).narrow(0, stretch.start, stretch.numel)


def counters(optimizer: Any) -> dict[str, float]:
    """The numbers beside the tensors: steps that the optimizer took, and the loss scale's state in float16."""
    states = [state for state in base(optimizer).state.values() if STEP in state]
    found = {STEP: float(states[0][STEP]) if states else 0.0}
    scaler = getattr(optimizer, "loss_scaler", None)
    kept = vars(scaler) if scaler is not None else {}
    return found | {
        f"loss_scaler.{name}": float(value) for name, value in kept.items() if isinstance(value, int | float)
    }


def set_counters(optimizer: Any, values: Mapping[str, float]) -> None:
    """Restore what `counters` gave."""
    for tensor in _optimized(optimizer):
        state = _state(base(optimizer), tensor)
        if STEP in state:
            state[STEP].fill_(values[STEP])
    scaler = getattr(optimizer, "loss_scaler", None)
    for name, value in values.items():
        attribute = name.removeprefix("loss_scaler.")
        if attribute != name and hasattr(scaler, attribute):
            setattr(scaler, attribute, type(getattr(scaler, attribute))(value))


def base(optimizer: Any) -> torch.optim.Optimizer:
    """PyTorch's optimizer inside DeepSpeed's."""
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer.optimizer


def refresh(optimizer: Any, names: Names) -> None:
    """Make the weights that are computed with follow the pieces, which were written to. Every rank must call it."""
    REFRESH[_kind(optimizer)](optimizer)
    for parameter, owner in _frozen_owners(optimizer, names):
        if owner is not None:
            torch.distributed.broadcast(parameter.data, group=optimizer.dp_process_group, group_src=owner)


def _kind(optimizer: Any) -> type:
    return next(kind for kind in STRATEGIES if isinstance(optimizer, kind))


def _state(optimizer: torch.optim.Optimizer, tensor: Tensor) -> dict[str, Any]:
    """The optimizer's state of `tensor`, made as its first step would where there is none yet."""
    state = optimizer.state[tensor]
    moments = _moments(optimizer)
    if not state and moments:
        state[STEP] = torch.zeros((), dtype=torch.float32, device=tensor.device)
        state.update({name: torch.zeros_like(tensor) for name in moments})
    return state


def _moments(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    return next(names for kind, names in MOMENTS.items() if isinstance(optimizer, kind))


def _plain(optimizer: torch.optim.Optimizer) -> Iterator[Stretch]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield Stretch(parameter, parameter, 0, parameter.numel(), 0)


def _partitioned(optimizer: Any) -> Iterator[Stretch]:
    """ZeRO 1 and 2: a rank's stretch of each group of parameters, laid end to end, is one float32 tensor."""
    for group, flat in zip(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True):
        for parameter in group:
            mapping = parameter._hp_mapping
            if mapping is not None:
                inner, outer = mapping.hp_fragment_address, mapping.lp_fragment_address
                yield Stretch(parameter, flat, inner.start, inner.numel, outer.start)


def _fully_partitioned(optimizer: Any) -> Iterator[Stretch]:
    """ZeRO 3: a rank's stretch of each parameter, filled up at its end, lies in the float32 tensor of a sub-group."""
    rank = torch.distributed.get_rank(optimizer.dp_process_group)
    for group, parameters in enumerate(optimizer.fp16_groups):
        flat = optimizer.fp32_partitioned_groups_flat[group]
        for parameter in parameters:
            _, begin, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
            start = rank * size
            held = min(size, parameter.ds_numel - start)
            if held > 0:
                yield Stretch(parameter, flat, begin, held, start)


def _frozen_owners(optimizer: Any, names: Names) -> Iterator[tuple[nn.Parameter, int | None]]:
    """The parameters that no optimizer steps, and which of the ranks that share its work speaks for each; None where all
    do, because each has its own part (ZeRO 3) or the first one is asked anyway (without ZeRO).
    """
    frozen = [parameter for parameter in names if not parameter.requires_grad]
    divided = isinstance(optimizer, DeepSpeedZeroOptimizer)
    ranks = torch.distributed.get_world_size(optimizer.dp_process_group) if divided else 1
    for number, parameter in enumerate(frozen):
        yield parameter, number % ranks if divided else None


def _own_rank(optimizer: Any) -> int | None:
    """This rank's number among those that share the optimizer's work under ZeRO 1 and 2."""
    shares = isinstance(optimizer, DeepSpeedZeroOptimizer)
    return torch.distributed.get_rank(optimizer.dp_process_group) if shares else None


def _frozen(parameter: nn.Parameter, name: str) -> Iterator[StatePiece]:
    """A parameter that no optimizer steps; under ZeRO 3 the rank's stretch of it."""
    if not hasattr(parameter, "ds_tensor"):
        yield StatePiece(name, WEIGHT, 0, parameter.detach().view(-1))
        return
    size = parameter.ds_tensor.ds_numel
    start = torch.distributed.get_rank(parameter.ds_process_group) * size
    held = min(size, parameter.ds_numel - start)
    if held > 0:
        yield StatePiece(name, WEIGHT, start, parameter.ds_tensor.detach().narrow(0, 0, held))


def _optimized(optimizer: Any) -> list[Tensor]:
    """The tensors that PyTorch's optimizer steps."""
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        return list(optimizer.single_partition_of_fp32_groups)
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return list(optimizer.fp32_partitioned_groups_flat)
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


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
    optimizer.checkpoint_event_prologue()  # gives back gathered copies of the parameters
    for flat, trained in zip(
        optimizer.fp32_partitioned_groups_flat, optimizer.fp16_partitioned_groups_flat, strict=True
    ):
        if flat.numel():
            trained.data.copy_(flat.data)
    optimizer.checkpoint_event_epilogue()  # and gathers those again that always stay whole


STRATEGIES: dict[type, Callable[[Any], Iterator[Stretch]]] = {
    DeepSpeedZeroOptimizer: _partitioned,
    DeepSpeedZeroOptimizer_Stage3: _fully_partitioned,
    torch.optim.Optimizer: _plain,
}
"""How the stretches are found, by the kind of DeepSpeed's optimizer; without ZeRO it leaves PyTorch's as it is."""

REFRESH: dict[type, Callable[[Any], None]] = {
    DeepSpeedZeroOptimizer: _refresh_partitioned,
    DeepSpeedZeroOptimizer_Stage3: _refresh_fully_partitioned,
    torch.optim.Optimizer: lambda optimizer: None,
}
"""How trained weights follow the float32 ones; PyTorch's optimizer steps the trained weights themselves."""
