"""Writing checkpoints so that GPT-NeoX, and DeepSpeed under it, load their weights.

The optimizer's state is not written: set `finetune: true`, or `no_load_optim: true` and `no_load_rng: true`.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_coca.atomic_write import atomic_dir, refuse_existing
from megatron_coca.checkpoints import native
from megatron_coca.checkpoints.errors import CheckpointError
from megatron_coca.checkpoints.importing import check_fit
from megatron_coca.checkpoints.load import Overrides, open_checkpoint
from megatron_coca.checkpoints.neox_config import (
    COMPUTED,
    CONFIGS,
    HELD,
    MODEL_FILE,
    foreign_keys,
    model_yaml,
    reasons,
    undivided,
)
from megatron_coca.checkpoints.neox_layout import NeoxLocation, buffers, layers, table
from megatron_coca.checkpoints.weights import DTYPES, Weights
from megatron_coca.config import Config
from megatron_coca.neox_plugin.checkpoints import NOTE, RECORD, note, record_of, saved_name


@dataclass(frozen=True)
class ExportedNeox:
    """What was written.

    Attributes:
        folder: for GPT-NeoX's `load`.
        step: the folder of the one step in it.
        foreign: keys of its configuration that stock GPT-NeoX refuses.
        note: what there is to say of its tokenizer, or None.
    """

    folder: Path
    step: Path
    foreign: tuple[str, ...]
    note: str | None


def export_neox(
    checkpoint: str | Path,
    folder: str | Path,
    overrides: Overrides = (),
    dtype: str | None = None,
    model_parallel_size: int = 1,
    pipe_parallel_size: int = 1,
) -> ExportedNeox:
    """Write a checkpoint as a save folder of GPT-NeoX.

    Args:
        checkpoint: whatever `open_checkpoint` reads.
        folder: what to write; it must not exist. It is complete or absent.
        overrides: how the weights are used, as for `load_model`.
        dtype: of the weights; by default as saved, then they are equal bit by bit.
        model_parallel_size: tensor ranks, of which each has a file. GPT-NeoX must be run with as many.
        pipe_parallel_size: 1 writes a file for each layer, which any number of pipeline stages from 1 on loads; 0 all
            layers into one, which `pipe_parallel_size: 0` wants.

    Raises:
        CheckpointError: the checkpoint is not in order, GPT-NeoX has no such model, it cannot be divided so, or `folder`
            exists or cannot be written. Nothing is written then.
        ConfigError: an override that is not valid.
        DataError: the tokenizer that overrides name, or that the checkpoint carries, cannot be opened.
    """
    opened, folder = open_checkpoint(checkpoint), Path(folder)
    config = opened.configure(overrides)
    refuse_existing(folder, CheckpointError)
    against = reasons(config, COMPUTED + HELD) + undivided(config, model_parallel_size)
    if against:
        raise CheckpointError(f"{opened.folder}: GPT-NeoX's layout cannot hold it: {'; '.join(against)}")
    weights = opened.weights()
    check_fit(config, weights)
    tokenizer, told = opened.tokenizer(overrides)
    weights = weights if dtype is None else weights.to(DTYPES[dtype])
    name = native.step_folder(folder, opened.step or 0).name
    with atomic_dir(folder, CheckpointError) as partial:
        step = partial / name
        (step / CONFIGS).mkdir(parents=True)
        (step / CONFIGS / MODEL_FILE).write_text(model_yaml(config, model_parallel_size, pipe_parallel_size))
        if tokenizer is not None:
            tokenizer.save(step / native.TOKENIZER)
        WRITERS[min(pipe_parallel_size, 1)](step, _Source(config, weights, model_parallel_size, opened.step or 0))
        if foreign_keys(config):
            (step / NOTE).write_text(note(record_of(config)))
        (partial / native.LATEST).write_text(name)
    return ExportedNeox(folder, folder / name, tuple(foreign_keys(config)), told)


@dataclass(frozen=True)
class _Source:
    """What is written: a model's weights, for so many tensor ranks, after so many steps."""

    config: Config
    weights: Weights
    ranks: int
    step: int

    def layers(self) -> Iterator[tuple[int, list[dict[str, Tensor]]]]:
        """The state dict of every layer on every rank, a layer at a time, with the plugin's names where GPT-NeoX needs it."""
        foreign = bool(foreign_keys(self.config))
        held, kept = table(self.config), buffers(self.config)
        dtype = next(iter(self.weights.entries.values())).dtype
        for layer in layers(self.config.model):
            states: list[dict[str, Tensor]] = [{} for _ in range(self.ranks)]
            for place, each in held.items():
                if place.layer == layer and each.ours in self.weights.entries:
                    place = place._replace(name=saved_name(place.name)) if foreign else place
                    _put(states, place, each.division.split(self.weights.read(each.ours), self.ranks))
            for place, buffer in kept.items():
                if place.layer == layer and buffer.values is not None:
                    values = buffer.values(self.config.model).to(dtype)
                    _put(states, place, buffer.division(self.config.model).split(values, self.ranks))
            yield layer, states

    def bookkeeping(self, module: dict[str, Tensor] | None) -> dict[str, Any]:
        """What DeepSpeed and GPT-NeoX read besides weights. `args` are compared with the running configuration: only
        what the weights depend on is in it.
        """
        model = self.config.model
        names = ["num_layers", "hidden_size", "num_attention_heads", "padded_vocab_size"]
        names += ["max_position_embeddings"] * (self.config.position.pos_emb == "learned")
        record = {RECORD: record_of(self.config)} if foreign_keys(self.config) else {}
        return {
            "module": module,
            **{"optimizer": None, "lr_scheduler": None},
            **{"global_steps": self.step, "global_samples": 0, "skipped_steps": 0},
            **{"dp_world_size": 1, "mp_world_size": self.ranks},
            "iteration": self.step,
            "args": {name: getattr(model, name) for name in names} | {"model_parallel_size": self.ranks} | record,
        }


def _put(states: list[dict[str, Tensor]], place: NeoxLocation, parts: list[Tensor]) -> None:
    for state, part in zip(states, parts, strict=True):
        # Of a view, the file would hold all that it is a view of.
        state[place.name] = part.clone(memory_format=torch.contiguous_format)


def _save(content: dict[str, Any], path: Path) -> None:
    try:
        torch.save(content, path)
    except RuntimeError as error:  # what PyTorch's writer makes of a full disk
        raise OSError(f"{path.name}: {error}") from error


def _write_layers(folder: Path, source: _Source) -> None:
    for layer, states in source.layers():
        for rank, state in enumerate(states):
            _save(OrderedDict(state), folder / f"layer_{layer:02}-model_{rank:02}-model_states.pt")
    for rank in range(source.ranks):
        _save(source.bookkeeping(None), folder / f"mp_rank_{rank:02}_model_states.pt")


def _write_ranks(folder: Path, source: _Source) -> None:
    modules: list[dict[str, Tensor]] = [OrderedDict() for _ in range(source.ranks)]
    for layer, states in source.layers():
        for module, state in zip(modules, states, strict=True):
            module |= {f"sequential.{layer}.{name}": tensor for name, tensor in state.items()}
    for rank, module in enumerate(modules):
        _save(source.bookkeeping(module), folder / f"mp_rank_{rank:02}_model_states.pt")


WRITERS: tuple[Callable[[Path, _Source], None], ...] = (_write_ranks, _write_layers)
"""By `pipe_parallel_size`: a file per tensor rank holds the whole model, or a layer."""
