"""Read the optimizer state in GPT-NeoX checkpoints, written by DeepSpeed's ZeRO 1 or 2 or its BF16 optimizer.

A model rank is a pair of pipeline stage and tensor rank. Each pair of data rank and model rank has a file
`..._optim_states.pt`. The file contains the data rank's partition of some flat float32 vectors, the moments of this
partition, and the ranges of the parameters in this partition. Concatenating the partitions of a parameter in the order
of data ranks gives the parameter on that model rank.
"""

import re
from collections import defaultdict
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_coca.checkpoints.files import CheckpointError
from megatron_coca.checkpoints.native.state import WEIGHT
from megatron_coca.checkpoints.neox.layout import COPY, EMBEDDING, TIED, NeoxLocation, NeoxSharding, table
from megatron_coca.checkpoints.neox.read import NeoxFiles, matching
from megatron_coca.checkpoints.weights import load_pickle
from megatron_coca.config import Config

FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
PARAMETER = re.compile(r"(?:sequential\.)?(\d+)\.(.+)")
STEP = "step"


class NeoxOptimizer:
    """The float32 weights and moments of one step.

    Attributes:
        step: number of optimizer updates so far. It is smaller than the iteration if float16 updates overflowed.
        options: betas, epsilon and weight decay of the training run.
        moments: names of the optimizer states.
    """

    def __init__(self, folder: Path, config: Config, ranks: int) -> None:
        """`config` and `ranks` are the result of `configure`. Raises CheckpointError if there is no optimizer state."""
        self._folder, self._files, self._ranks = folder, NeoxFiles(folder), ranks
        self._known = table(config)
        self._parts: dict[tuple[str, NeoxLocation], dict[int, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
        numbers = matching(folder, FILE)
        if not numbers:
            raise CheckpointError(
                f"{folder}: no *_optim_states.pt, so it was saved without ZeRO or without the optimizer; set "
                "no_load_optim=true to continue from this step with a new optimizer, or finetune=true to start a run "
                "from the weights"
            )
        self.step, self.options = 0.0, dict[str, Any]()
        for path, (_, model_rank) in sorted(numbers.items(), key=lambda item: item[1]):
            try:
                self._open(path, model_rank)
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                raise CheckpointError(
                    f"{path}: not a partition of DeepSpeed's ZeRO 1 or 2 ({error!r}); copy it again, or set "
                    "no_load_optim=true"
                ) from error
        self.moments = {kind for kind, _ in self._parts} - {WEIGHT}
        self._locations = dict[str | None, NeoxLocation]()
        for location, weight in self._known.items():
            if weight.used:
                self._locations.setdefault(
                    weight.ours, location
                )  # a parameter that all blocks share belongs to the first block

    def _open(self, path: Path, model_rank: int) -> None:
        state = load_pickle(path, TYPES)["optimizer_state_dict"]
        base = state["base_optimizer_state"]
        decayed = max(base["param_groups"], key=lambda group: group["weight_decay"])
        self.options = {name: decayed[name] for name in ("betas", "eps", "weight_decay") if name in decayed}
        vectors = zip(state["param_slice_mappings"], state["single_partition_of_fp32_groups"], strict=True)
        for number, (ranges, weights) in enumerate(vectors):
            moments = dict(base["state"][number])
            # DeepSpeed's fused Adam saves the step count in the parameter groups.
            self.step = float(moments.pop(STEP, base["param_groups"][number].get(STEP, 0)))
            for name, place in ranges.items():
                for kind, flat in {WEIGHT: weights, **moments}.items():
                    part = flat[place.start : place.start + place.numel]
                    self._parts[kind, self._location(name)][model_rank].append(part)

    def _location(self, name: str) -> NeoxLocation:
        match = PARAMETER.fullmatch(name)
        location = NeoxLocation(EMBEDDING, name.removeprefix(TIED)) if name.startswith(TIED) else None
        location = NeoxLocation(int(match[1]), match[2]) if match is not None else location
        if location not in self._known:
            raise CheckpointError(
                f"{self._folder}: the optimizer state has {name}, but the model does not; copy the YAML files of the "
                "training run into the folder configs"
            )
        return location

    def read(self, kind: str, name: str) -> Tensor:
        """Return the whole float32 weight with our name `name`, or one of its moments.

        Raises CheckpointError if the files of some ranks are missing.
        """
        location = self._locations[name]
        by_rank = self._parts[kind, location]
        joined = []
        for rank in range(self._ranks):
            shape = self._files.state(location.layer, rank)[location.name].shape
            # Pipeline stages that share the embedding have the same optimizer state for it.
            partitions = next((by_rank[number] for number in sorted(by_rank) if number % self._ranks == rank), [])
            if sum(part.numel() for part in partitions) != prod(shape):
                raise CheckpointError(
                    f"{self._folder}: {kind} of {location} is incomplete; copy the optim_states.pt files of all ranks"
                )
            joined.append(torch.cat(partitions).reshape(shape).float())
        sharding = self._known[location].sharding
        # The gradient of each term of a sum equals the gradient of the sum, so the moments are copies.
        merged: NeoxSharding = COPY if sharding.kind == "sum" and kind != WEIGHT else sharding
        return merged.merge(joined, f"{kind} of {location}")


class _Record:
    """Replaces DeepSpeed's types in the state files, so that no DeepSpeed code runs. Only their attributes are read."""

    def __init__(self, *values: Any) -> None:
        self.values = values


TYPES = [
    (_Record, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_Record, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Record, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_Record, "deepspeed.utils.tensor_fragment.fragment_address"),
]
