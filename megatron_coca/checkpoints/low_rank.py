"""Merge the adapters in a checkpoint into the weights of the model that they change.

The checkpoint contains only trained parameters, under our names of the modules and PEFT's names of the parameters:

    blocks.0.attention.query_key_value.query.lora_A.weight   [rank, inputs]
    blocks.0.attention.query_key_value.query.lora_B.weight   [outputs, rank]
    blocks.0.attention.query_key_value.key.weight            rows of a packed projection that are trained as a whole
    norm.weight                                              another weight that is trained as a whole

Queries, keys and values are separate matrices in training (`SplitProjection`), so each can have its own adapter.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_coca.attention.layer import PARTS, PackedRows, packed_rows
from megatron_coca.checkpoints.files import CheckpointError
from megatron_coca.checkpoints.huggingface.adapted import merged
from megatron_coca.checkpoints.weights import WeightEntry, Weights
from megatron_coca.config import Config
from megatron_coca.config.optimization import LoraConfig
from megatron_coca.model import empty_model

ADAPTER = re.compile(r"\.(lora_\w+\.weight)$")
"""Pattern of the end of an adapter parameter's name."""
PACKED = "attention.query_key_value"


def adapted_identity(base: str, own: str, lora: LoraConfig) -> str:
    """Return the identity of a model with adapters.

    `base` is the identity of the model that the adapters change, `own` is the digest of the file with the trained
    weights, and `lora` are the settings of the adapters.
    """
    return hashlib.sha256(json.dumps([base, own, lora.settings], sort_keys=True).encode()).hexdigest()


def model_entries(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight of a model, by name. Nothing is allocated."""
    plain = config.override({"attention_backend": "auto", "operand_kernel": "torch", "torch_compile": False})
    model = empty_model(plain, "cpu", training=False, memory="meta")
    return {name: tuple(weight.shape) for name, weight in model.state_dict().items()}


class Change(NamedTuple):
    """A change of some rows of a weight: a new value, or an adapter.

    Attributes:
        module: the name of the module in training.
        rows: the rows that change; None for all rows.
        whole: the name of the trained weight that replaces the rows, or None.
        parts: PEFT's name of each parameter of the adapter -> its name in the checkpoint.
    """

    module: str
    rows: PackedRows | None
    whole: str | None
    parts: Mapping[str, str]


class AdaptedWeights:
    """The weights of a model with adapters.

    Attributes:
        base: the weights of the model that the adapters change.
        own: the trained weights in the checkpoint.
        config: the configuration that the adapters were trained with.
        shapes: the shape of every weight of the model, by its name.
    """

    def __init__(self, base: Weights, own: Weights, config: Config) -> None:
        """Raises CheckpointError if `base` and `own` both lack a weight of the model, or if `own` has other weights."""
        self.base, self.own, self.config = base, own, config
        assert config.optimizer.lora is not None
        self.lora, self.shapes = config.optimizer.lora, model_entries(config)
        if missing := [name for name in self.shapes if name not in base.entries and name not in own.entries]:
            raise CheckpointError(
                f"{own.source}: {missing[0]} is neither in the checkpoint nor in the model that its adapters change "
                f"({base.source}); use another step"
            )
        known = {name for change in self.changes.values() for each in change for name in self._names(each)}
        if unknown := own.entries.keys() - known:
            raise CheckpointError(f"{own.source}: {min(unknown)} belongs to no weight of the model; use another step")

    @staticmethod
    def _names(change: Change) -> Iterator[str]:
        yield from change.parts.values()
        if change.whole is not None:
            yield change.whole

    @cached_property
    def changes(self) -> dict[str, list[Change]]:
        """The name of each weight that changes -> its changes."""
        adapters: dict[str, dict[str, str]] = {}
        for name in self.own.entries:
            if part := ADAPTER.search(name):
                adapters.setdefault(name[: part.start()], {})[peft_name(part[1])] = name
        found = {}
        for name in self.shapes:
            module, _, kind = name.rpartition(".")
            modules = self._parts_of(module) if module.endswith(PACKED) else {module: None}
            own = [
                Change(
                    place,
                    rows,
                    f"{place}.{kind}" if f"{place}.{kind}" in self.own.entries else None,
                    adapters.get(place, {}) if kind == "weight" else {},
                )
                for place, rows in modules.items()
            ]
            if own := [each for each in own if each.whole or each.parts]:
                found[name] = own
        return found

    def _parts_of(self, module: str) -> dict[str, PackedRows | None]:
        """Map each part of a packed projection to its rows, and the projection itself to None."""
        number = int(module.removeprefix("blocks.").partition(".")[0])
        shape = self.config.model.with_heads(self.config.model.layer_names[number])
        queries, keys = shape.attention_width, shape.num_kv_heads * shape.head_dim
        rows = packed_rows(queries, keys, shape.head_dim, not shape.values_from_keys)
        return {module: None} | {f"{module}.{part}": rows[part] for part in PARTS if part in rows}

    def weights(self) -> Weights:
        """Return all weights. Weights with adapters are in float32, or in float64 for a model in float64."""
        entries = {name: self._entry(name) for name in self.shapes}
        return replace(self.own, entries=entries, read=self._read, origins={})

    def _entry(self, name: str) -> WeightEntry:
        changes = self.changes.get(name, [])
        if not changes:
            return self.base.entries[name]
        stored = [self.own.entries[each.whole].dtype for each in changes if each.whole is not None]
        dtype = self.base.entries[name].dtype if name in self.base.entries else stored[0]
        if any(each.parts for each in changes):
            dtype = torch.promote_types(dtype, torch.float32)
        return WeightEntry(dtype, self.shapes[name])

    def _read(self, name: str) -> Tensor:
        changes, dtype = self.changes.get(name, []), self._entry(name).dtype
        if changes and changes[0].whole is not None and changes[0].rows is None and not changes[0].parts:
            return self.own.read(changes[0].whole).to(dtype)
        value = self.base.read(name).to(dtype)
        if not changes:
            return value
        value = value.clone()
        for each in changes:
            index = slice(None) if each.rows is None else each.rows.numbers()
            if each.whole is not None:
                value[index] = self.own.read(each.whole).to(dtype)
                continue
            parts = {part: self.own.read(own) for part, own in each.parts.items()}
            try:
                value[index] = merged(each.module, "weight", value[index].clone(), parts, self.lora.settings)
            except (RuntimeError, ValueError, LookupError) as error:
                raise CheckpointError(
                    f"{self.own.source}: peft cannot merge the adapter of {each.module} "
                    f"({str(error).splitlines()[0]:.200}); use another step"
                ) from error
        return value


def peft_name(part: str) -> str:
    """Return the name of a parameter in PEFT's files, where the names of DoRA's norms do not end in `.weight`."""
    return part.removesuffix(".weight") if part.startswith("lora_magnitude_vector") else part
