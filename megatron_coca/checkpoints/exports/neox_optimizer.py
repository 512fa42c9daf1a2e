"""Write the optimizer's state of a run for GPT-NeoX: the files of DeepSpeed's ZeRO 1 or 2, or of its BF16 optimizer.

Of each group of parameters (with and without weight decay) every tensor rank has one flat float32 vector, padded and
divided evenly among the data ranks, wherever parameters end; the moments are divided alike.
"""

from collections.abc import Iterator, Mapping
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_coca.checkpoints import native
from megatron_coca.checkpoints.files import CheckpointError
from megatron_coca.checkpoints.neox_layout import EMBEDDING, TIED, NeoxLocation, NeoxWeight, table
from megatron_coca.checkpoints.state import WEIGHT, StateReader
from megatron_coca.config import Config
from megatron_coca.config.training import learning_rate

MOMENTS = ("exp_avg", "exp_avg_sq")
ALIGNMENT = 2
"""Elements, times data ranks, that DeepSpeed pads a vector to a multiple of."""
VERSION = "0.19.8"
"""Of DeepSpeed, whose layout this is."""
ADAM = ("Adam", "AdamW", "cpu_adam")
MODULES = (
    *("word_embeddings", "position_embeddings", "input_layernorm", "attention.qk_layernorm"),
    *("attention.query_key_value", "attention.rpe", "attention.dense", "post_attention_layernorm"),
    *("mlp.linear1", "mlp.linear2", "norm", "final_linear"),
)
"""The modules of a layer in GPT-NeoX's order, which is that of the parameters in a group."""


class _Parameter(NamedTuple):
    """A parameter of a tensor rank, of `numel` elements there; `name` is that in the whole model."""

    location: NeoxLocation
    name: str
    weight: NeoxWeight
    numel: int

    @property
    def undecayed(self) -> bool:
        """As `get_params_for_weight_decay_optimization` of GPT-NeoX's megatron/model/utils.py."""
        return "norm" in self.location.name or self.location.name.endswith(".bias")

    @property
    def order(self) -> tuple[int, int, bool]:
        """Sorts parameters as GPT-NeoX's modules have them."""
        module, _, kind = self.location.name.rpartition(".")
        return self.location.layer, MODULES.index(module), kind == "bias"


class NeoxState:
    """The state of one of our checkpoints for `ranks` tensor ranks and `data` data ranks, read rank by rank."""

    def __init__(self, folder: Path, config: Config, ranks: int, data: int, pipeline: bool) -> None:
        """`config` is what the run trained with; `pipeline` says whether there are files by layer.

        Raises CheckpointError if the checkpoint has no such state, or GPT-NeoX no such optimizer.
        """
        if not (folder / native.MANIFEST).is_file():
            raise CheckpointError(
                f"{folder}: is no checkpoint of a run of this package, whose optimizer's state could be exported; "
                "leave the number of data ranks out"
            )
        native.refuse_weights_only(folder)
        optimizer, style = config.optimizer, config.schedule.lr_decay_style
        limits = (
            (data < 1, f"the number of data ranks is {data}, and must be at least 1"),
            (optimizer.type not in ADAM, f"optimizer.type is {optimizer.type}, and Adam's state alone is written"),
            (optimizer.trainable is not None, "trainable is set, and GPT-NeoX trains all weights"),
            (config.schedule.stages is not None, "stages are set, and GPT-NeoX has none"),
            (style == "wsd", "GPT-NeoX has no lr_decay_style wsd"),
        )
        if reasons := [reason for applies, reason in limits if applies]:
            raise CheckpointError(f"{folder}: the optimizer's state cannot be exported: {'; '.join(reasons)}")
        self._folder, self._config, self._pipeline = folder, config, pipeline
        self._ranks, self._data = ranks, data
        self._meta = native.read_meta(folder, resumable=True)

    def schedule(self) -> dict[str, Any]:
        """The state of GPT-NeoX's `AnnealingLR`, which it reads together with the optimizer's."""
        schedule = self._config.schedule
        return {
            "start_lr": self._config.optimizer.lr,
            "warmup_iter": schedule.warmup * schedule.decay_iters,
            "num_iters": self._meta["step"],
            "decay_style": schedule.lr_decay_style,
            "end_iter": schedule.decay_iters,
            "min_lr": schedule.min_lr,
        }

    def files(self, prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield name and content of the file of each rank; `prefix` is "bf16_" where GPT-NeoX trains in bfloat16."""
        with StateReader(self._folder / native.STATE, native.state_files(self._folder)) as reader:
            for rank in range(self._ranks):
                groups = self._groups(reader.shapes, rank)
                for number in range(self._data):
                    name = f"{prefix}zero_pp_rank_{number}_mp_rank_{rank:02}_optim_states.pt"
                    yield name, self._content(reader, groups, rank, number)

    def _groups(self, shapes: Mapping[str, tuple[int, ...]], rank: int) -> list[list[_Parameter]]:
        """Return the parameters of a rank, with weight decay and without; one group where there is none."""
        found: list[_Parameter] = []
        for location, weight in table(self._config).items():
            shared = weight.used and any(weight.ours == each.weight.ours for each in found)
            if (
                weight.ours is None or weight.ours not in shapes or shared
            ):  # what all blocks share is a parameter of the first
                continue
            part = weight.sharding.split(torch.empty(shapes[weight.ours], device="meta"), self._ranks)[rank]
            name = (
                f"{location.layer}.{location.name}"
                if self._pipeline
                else f"sequential.{location.layer}.{location.name}"
            )
            if self._pipeline and location.layer == EMBEDDING and not self._config.model.no_weight_tying:
                name = TIED + location.name
            found.append(_Parameter(location, name, weight, part.numel()))
        found.sort(key=lambda each: each.order)
        if self._config.optimizer.weight_decay == 0:
            return [found]
        return [[each for each in found if each.undecayed == undecayed] for undecayed in (False, True)]

    def _content(self, reader: StateReader, groups: list[list[_Parameter]], rank: int, number: int) -> dict[str, Any]:
        optimizer, updates = self._config.optimizer, int(self._meta["counters"]["step"])
        # The rate of the next step: the groups are read after the schedule.
        rate = learning_rate(self._meta["step"], optimizer.lr or 0.0, self._config.schedule)
        options = {"lr": rate, "betas": optimizer.betas, "eps": optimizer.eps, "bias_correction": True}
        parts = [self._partition(reader, group, rank, number) for group in groups]
        decays = (optimizer.weight_decay, 0.0)[-len(groups) :]
        state: dict[str, Any] = {
            "ds_version": VERSION,
            "zero_stage": 1,
            "partition_count": [self._data] * len(groups),
            "group_paddings": [padding if number == self._data - 1 else 0 for _, _, padding in parts],
            "base_optimizer_state": {
                # PyTorch's Adam counts by parameter, the fused one of DeepSpeed by group.
                "state": {
                    index: {"step": updates} | {kind: flat[kind] for kind in MOMENTS}
                    for index, (flat, _, _) in enumerate(parts)
                },
                "param_groups": [
                    options | {"weight_decay": decay, "step": updates, "params": [index]}
                    for index, decay in enumerate(decays)
                ],
            },
            "single_partition_of_fp32_groups": [flat[WEIGHT] for flat, _, _ in parts],
            "param_slice_mappings": [ranges for _, ranges, _ in parts],
        }
        return {"optimizer_state_dict": state, "ds_version": VERSION}

    def _partition(
        self, reader: StateReader, group: list[_Parameter], rank: int, number: int
    ) -> tuple[dict[str, Tensor], dict[str, SimpleNamespace], int]:
        """Return a data rank's share of the vectors of a group by kind, the ranges of parameters in it, and the number
        of elements that pad the whole.
        """
        ends = list(accumulate((each.numel for each in group), initial=0))
        padding = -ends[-1] % (ALIGNMENT * self._data)
        size = (ends[-1] + padding) // self._data
        begin, stop = number * size, (number + 1) * size
        flat = {kind: torch.zeros(size) for kind in (WEIGHT, *MOMENTS)}
        ranges = {}
        for parameter, (start, end) in zip(group, pairwise(ends), strict=True):
            first, last = max(start, begin), min(end, stop)
            if first >= last:
                continue
            ranges[parameter.name] = SimpleNamespace(numel=last - first, start=first - begin)
            for kind, vector in flat.items():
                if kind == WEIGHT or parameter.weight.used:  # what GPT-NeoX does not use has no gradient
                    part = self._part(reader, parameter.weight, kind, rank).reshape(-1)
                    vector[first - begin : last - begin] = part[first - start : last - start]
        return flat, ranges, padding

    def _part(self, reader: StateReader, weight: NeoxWeight, kind: str, rank: int) -> Tensor:
        assert weight.ours is not None, "buffers have no state"
        whole = reader.whole(weight.ours, kind)
        if weight.sharding.kind == "sum" and kind != WEIGHT:
            return whole  # each of several terms has the gradient of their sum
        return weight.sharding.split(whole, self._ranks)[rank]
