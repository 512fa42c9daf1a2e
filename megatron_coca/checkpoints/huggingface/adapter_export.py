"""Export the adapters of a native checkpoint as a PEFT folder, which belongs to a Hugging Face folder of the same
network.

One matrix of the transformers class may contain several of our parts, for example `query_key_value` of GPT-NeoX. Then
the adapters of these parts become one adapter. Its rank is the sum of their ranks, and its B has zeros in the rows that
an adapter does not change. The class may also divide one of our matrices, as LLaMA's class divides `mlp.linear1`. Then
the adapters of the pieces have the same A. In both cases, the product is exact.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_coca.checkpoints.compare import comparable
from megatron_coca.checkpoints.files import CheckpointError
from megatron_coca.checkpoints.huggingface import weight_map
from megatron_coca.checkpoints.huggingface.adapted import SETTINGS, STORED, WRAPPED, open_adapted, read_adapters
from megatron_coca.checkpoints.huggingface.config_json import CONFIG
from megatron_coca.checkpoints.huggingface.read import EMBEDDING, GENERATION, HEAD
from megatron_coca.checkpoints.huggingface.tokenizer_files import own_files
from megatron_coca.checkpoints.huggingface.weight_map import FUSED_TURNED, TURNED, Heads, Row
from megatron_coca.checkpoints.huggingface.write import EXPORTERS, export, kind_of
from megatron_coca.checkpoints.low_rank import AdaptedWeights, Change
from megatron_coca.checkpoints.opened import OpenedCheckpoint
from megatron_coca.checkpoints.weights import Weights
from megatron_coca.config import Config
from megatron_coca.config.model import EXPERTS
from megatron_coca.config.source import Overrides
from megatron_coca.work.folders import atomic_dir

A, B, NORMS = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
"""Parameters of an adapter in PEFT's files."""
CLASS_HEAD = "lm_head.weight"
"""The name of the output head in the classes of transformers. Their files may use another name."""
ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-12}
"""The dtype in which weights are merged -> the maximum difference between the merged weights of checkpoint and export,
as a fraction of the largest weight. Checkpoint and export are merged in different orders.
"""


@dataclass(frozen=True)
class ExportedAdapters:
    """Result of an export: the folder with the adapters, and the Hugging Face folder of the model that they change."""

    folder: Path
    base: Path


def export_adapters(
    opened: OpenedCheckpoint, folder: Path, overrides: Overrides = (), base: Path | None = None
) -> ExportedAdapters:
    """Export the adapters of a checkpoint as a folder for `peft.PeftModel.from_pretrained`, with the tokenizer of the
    model that they change.

    Args:
        opened: a native checkpoint with adapters.
        folder: the folder to write. After an error it does not exist.
        overrides: config overrides, as for `load_model`.
        base: a new folder for the model that the adapters change. It is needed unless that model is a Hugging Face
            folder with the network and position method of the run.

    Raises:
        CheckpointError: the checkpoint has no adapters, PEFT cannot represent them, `base` is needed, or a folder
            exists or cannot be written.
        ConfigError: an override is invalid.
    """
    if opened.base is None or opened.own_weights is None:
        raise CheckpointError(f"{opened.folder}: has no adapters; use `megatron-coca export huggingface`")
    config = opened.configure(overrides)
    weights = AdaptedWeights(opened.base.weights(), opened.own_weights(), opened.trained)
    kind = kind_of(opened.base, config)
    place = opened.base.folder
    plain = opened.base.settings is not None and (place / CONFIG).is_file() and not (place / SETTINGS).exists()
    same = plain and comparable(opened.base.trained) == comparable(config)
    if base is not None:
        frozen = replace(opened, weights=lambda: _before(weights), base=None, settings=opened.base.settings)
        place, kind = base, export(frozen, base, overrides).model_type
    elif not same:
        raise CheckpointError(
            f"{opened.folder}: its adapters change the model in {place}, which is not a Hugging Face folder with the "
            "network and position method of the run; name a new folder to export that model to, with --with-base FOLDER"
        )
    adapters = _Adapters(weights, config, weight_map.expand(EXPORTERS[kind].rows(config), config.model.num_layers))
    tensors = {name: value.contiguous() for name, value in adapters.tensors()}
    with atomic_dir(folder, CheckpointError) as partial:
        save_file(tensors, partial / STORED[0], {"format": "pt"})
        adapters.settings(str(place.resolve())).save_pretrained(str(partial))
        for name, content in own_files(place).files.items():  # programs look for a tokenizer beside the adapters
            if name != GENERATION:
                (partial / name).write_bytes(content)
        _check(partial, place, weights)
    return ExportedAdapters(folder, place)


def _before(weights: AdaptedWeights) -> Weights:
    """Return the weights before the adapters change them. Weights that the base model lacks have trained values."""
    after = weights.weights()
    names = [name for name in after.entries if name in weights.base.entries]
    entries = {**after.entries, **{name: weights.base.entries[name] for name in names}}
    return replace(after, entries=entries, read=lambda name: (weights.base if name in names else after).read(name))


@dataclass
class _Adapters:
    """Builds the tensors of a PEFT folder, and collects its settings."""

    weights: AdaptedWeights
    config: Config
    rows: list[Row]
    ranks: dict[str, int] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    turned: bool = False

    @cached_property
    def merged(self) -> Weights:
        """The weights with the adapters merged."""
        return self.weights.weights()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and values of all tensors in the folder."""
        by_name, heads = {row.ours: row for row in self.rows}, weight_map.heads_of(self.config)
        tied = not self.config.model.no_weight_tying
        for name, changes in self.weights.changes.items():
            if (row := by_name.get(name)) is None:
                raise CheckpointError(
                    f"{self.weights.own.source}: the format has no name for {name}; use `megatron-coca export "
                    "huggingface`, which merges all changes"
                )
            number = int(name.split(".")[1]) if name.startswith("blocks.") else None
            if number is not None and ".mlp." in name and self.config.model.mlp_names[number] == EXPERTS:
                raise CheckpointError(
                    f"{self.weights.own.source}: PEFT cannot represent {name}, a part of a mixture of experts that is "
                    "trained as a whole; use `megatron-coca export huggingface`, which merges all changes"
                )
            own = heads if number is None else self._heads(heads, number)
            parts = set(row.theirs)
            if any(each.parts for each in changes):
                for theirs, value in self._adapter(name, row, [each for each in changes if each.parts], own):
                    parts.discard(f"{theirs.rpartition('.lora_')[0]}.weight")
                    yield f"{WRAPPED}{theirs}", value
            if any(each.whole for each in changes):
                yield from self._trained_whole(name, row, changes, own, parts)
            if tied and name == EMBEDDING:
                yield f"{WRAPPED}{CLASS_HEAD}", self.merged.read(name).clone()
                self.whole.add(CLASS_HEAD.rpartition(".")[0])

    def _heads(self, heads: Heads, number: int) -> Heads:
        model = self.config.model
        shape = model.with_heads(model.layer_names[number])
        return replace(heads, query=shape.num_attention_heads, key=shape.num_kv_heads, width=shape.head_dim)

    def _trained_whole(
        self, name: str, row: Row, changes: list[Change], heads: Heads, free: set[str]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield each weight of the class that contains rows which were trained as a whole. `free` are the names of the
        weights without adapters.
        """
        value, marks = self.merged.read(name), torch.zeros(self.weights.shapes[name])
        for each in changes:
            if each.whole is not None:
                marks[slice(None) if each.rows is None else each.rows.numbers()] = 1
        split = (row.packing.split(each, heads, len(row.theirs)) for each in (value, marks))
        for theirs, part, marked in zip(row.theirs, *split, strict=True):
            if not marked.any():
                continue
            if theirs not in free:
                raise CheckpointError(
                    f"{self.weights.own.source}: PEFT cannot represent {theirs}, which has adapters and rows that are "
                    "trained as a whole; use `megatron-coca export huggingface`, which merges them"
                )
            named = CLASS_HEAD if name == HEAD else theirs
            self.whole.add(named.rpartition(".")[0])
            yield f"{WRAPPED}{named}", part

    def _adapter(self, name: str, row: Row, changes: list[Change], heads: Heads) -> Iterator[tuple[str, Tensor]]:
        """Yield the adapters of the matrices of the class that contain our weight `name`."""
        own, total = self.weights.own, self.weights.shapes[name][0]
        rank = self.weights.lora.rank
        outer, touched = torch.zeros(total, rank * len(changes)), torch.zeros(total, len(changes))
        norms = self._norms(name) if self.weights.lora.dora else None
        inner = [own.read(each.parts[A]) for each in changes]
        outer = outer.to(torch.promote_types(inner[0].dtype, torch.float32))
        for number, each in enumerate(changes):
            index = slice(None) if each.rows is None else each.rows.numbers()
            outer[index, number * rank : (number + 1) * rank] = own.read(each.parts[B]).to(outer.dtype)
            touched[index, number] = 1
            if norms is not None:
                norms[index] = own.read(each.parts[NORMS]).to(norms.dtype)[:, None]
        split = [self._split(row, each, heads) for each in (outer, touched, *([] if norms is None else [norms]))]
        for place, theirs in enumerate(row.theirs):
            used = [number for number in range(len(changes)) if split[1][place][:, number].any()]
            if not used:
                continue
            module = theirs.removesuffix(".weight")
            self.ranks[module] = rank * len(used)
            columns = [column for number in used for column in range(number * rank, (number + 1) * rank)]
            yield f"{module}.{A}", torch.cat([inner[number] for number in used]).to(outer.dtype)
            yield f"{module}.{B}", split[0][place][:, columns]
            if norms is not None:
                yield f"{module}.{NORMS}", split[2][place][:, 0]

    def _norms(self, name: str) -> Tensor:
        """Return the norms of the rows of a weight, [rows, 1].

        With these norms, DoRA does not change rows without adapters.
        """
        weight = self.weights.base.read(name)
        return weight.to(torch.promote_types(weight.dtype, torch.float32)).norm(dim=1, keepdim=True)

    def _split(self, row: Row, rows: Tensor, heads: Heads) -> list[Tensor]:
        parts = row.packing.split(rows, heads, len(row.theirs))
        if row.packing in (TURNED, FUSED_TURNED):  # these packings transpose only the weight, not B
            self.turned = True
            return [part.t() for part in parts]
        return list(parts)

    def settings(self, base: str) -> Any:
        """Return PEFT's settings for the adapters. Call this only after all tensors are built."""
        from peft import LoraConfig

        own, lora = self.weights.lora.settings, self.weights.lora
        wider = {_in_layer(module): rank for module, rank in self.ranks.items() if rank != lora.rank}
        power = 0.5 if lora.rslora else 1.0
        alphas = {name: lora.alpha * math.pow(rank / lora.rank, power) for name, rank in wider.items()}
        return LoraConfig(
            **own,
            rank_pattern=wider,
            alpha_pattern={name: int(alpha) if alpha.is_integer() else alpha for name, alpha in alphas.items()},
            target_modules=sorted({_in_layer(module) for module in self.ranks}),
            modules_to_save=sorted({_in_layer(module) for module in self.whole}) or None,
            fan_in_fan_out=self.turned,
            lora_dropout=lora.dropout,
            base_model_name_or_path=base,
            task_type="CAUSAL_LM",
            inference_mode=True,
        )


def _in_layer(module: str) -> str:
    """Return the name of a module in its layer, or its whole name if it is in no layer."""
    return re.sub(r"^.*?\.\d+\.", "", module)


def _check(folder: Path, base: Path, weights: AdaptedWeights) -> None:
    """Read the written folder with its model. Raises CheckpointError if the weights differ from the checkpoint's."""
    read, expected = open_adapted(read_adapters(folder), base).weights(), weights.weights()
    if different := read.entries.keys() ^ expected.entries.keys():
        raise CheckpointError(f"{folder}: does not have the same weights as the checkpoint ({min(different)})")
    for name in expected.entries:
        ours, theirs = expected.read(name), read.read(name)
        if name not in weights.changes:
            same = torch.equal(ours, theirs)
        else:
            dtype = torch.promote_types(ours.dtype, torch.float32)
            limit = ROUNDING[dtype] * float(ours.abs().max())
            same = bool((ours.to(dtype) - theirs.to(dtype)).abs().max() <= limit)
        if not same:
            raise CheckpointError(f"{folder}: {name} differs from the checkpoint; report this as a bug")
