"""The model at step 0 of a run, with random weights or with weights from a checkpoint."""

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from megatron_coca.checkpoints import CheckpointError, OpenedCheckpoint, native, open_checkpoint
from megatron_coca.checkpoints.compare import POSITION_WEIGHTS, check_same_architecture, extension_note
from megatron_coca.checkpoints.load import local_folder, open_adapted_model, source_overrides
from megatron_coca.checkpoints.native import AdaptedModel
from megatron_coca.checkpoints.opened import load_weights
from megatron_coca.checkpoints.tokenizer import made_of
from megatron_coca.config import KEYS, Config, ConfigError, adds_norms
from megatron_coca.data import Tokenizer
from megatron_coca.data.tokenizers.kinds import first_difference
from megatron_coca.model import GPT, assemble_model, draw_learned_positions, empty_model, initial_norms
from megatron_coca.support.remote_files import is_url
from megatron_coca.training.checkpointing.saving import DTYPES

logger = logging.getLogger(__name__)


POSITION_KEYS = ("seq_length", *(key for key, place in KEYS.items() if place.group == "position"))
CLEX_WEIGHTS = re.compile(r"positions\.(others\.\w+\.)?clex\..+")
"""Weights of a learned frequency extension. Position weights that match neither this pattern nor `GATE_WEIGHTS` belong
to `pos_emb`.
"""
GATE_WEIGHTS = re.compile(r".+\.position_gates\..+")
"""Weights of forgetting gates."""


class InitialModel(NamedTuple):
    """A model, the identity of the checkpoint from which its weights were loaded (None if they are random), and, in a
    run with adapters, the record of the model that the adapters change.
    """

    model: GPT
    origin: str | None
    adapts: AdaptedModel | None = None


def initial_model(config: Config, device: str, tokenizer: Tokenizer | None = None, verify: bool = True) -> InitialModel:
    """Build a model for `device` with its weights in host memory. All ranks get the same weights.

    With `finetune`, the weights are loaded from the checkpoint `load`. If the run has another position method than the
    checkpoint, the learned position weights of the checkpoint are dropped, and the run's position weights are drawn at
    random. If the checkpoint lacks the run's norms of queries and keys, these norms begin with their initial weights.

    Args:
        tokenizer: the tokenizer of the run's data, or None if unknown.
        verify: see `open_checkpoint`.

    Raises:
        CheckpointError: there is no checkpoint to load, its architecture is different, or its tokenizer assigns
            different ids than `tokenizer`.
        ConfigError: a run with adapters names no model to change, or adds weights that would stay untrained.
        DataError: the checkpoint's tokenizer is damaged.
    """
    keys = config.checkpoint
    if not keys.finetune or keys.load is None:
        if config.optimizer.lora is not None:
            raise ConfigError("lora: needs a model to change; set finetune=true, and load to the model's folder")
        return InitialModel(assemble_model(config, device), None)
    source = open_checkpoint(keys.load, verify, keys.iteration, source_overrides(config))
    check_same_architecture(source.folder, source.trained, config)
    check_same_tokenizer(source, config, tokenizer)
    model = _loaded_model(source, config, device)
    return InitialModel(model, source.identity, None if config.optimizer.lora is None else _record(source, config))


def model_to_adapt(config: Config, device: str, folder: Path, verify: Callable[[Path], None]) -> InitialModel:
    """Build the model that the adapters of a run change, in host memory. The run resumes from the checkpoint `folder`.

    The weights are those of the model that the checkpoint names or, if a stage begins to train adapters, those of the
    checkpoint itself. `verify` is called with the folder of a native checkpoint before its weights are read.

    Raises:
        CheckpointError: the model is not found, or it has changed since the adapters began.
        ConfigError: see `initial_model`.
    """
    keys, overrides = config.checkpoint, source_overrides(config)
    adapts = native.adapted_model(native.read_meta(folder))
    if adapts is None:
        source = open_checkpoint(folder, verify=False, overrides={"imports": overrides["imports"]})
        adapts = AdaptedModel(identity=source.identity, place=folder.name)
    else:
        moved = keys.load if keys.finetune and keys.load is not None and not adapts.is_beside else None
        if moved is not None and not is_url(moved) and not Path(moved).exists():
            moved = None
        source = open_adapted_model(adapts, folder, verify=False, overrides=overrides, place=moved)
    if native.is_step_folder(source.folder):
        verify(source.folder)
    check_same_architecture(source.folder, source.trained, config)
    if adapts.is_beside and (keys.save is None or os.path.realpath(keys.save) != os.path.realpath(folder.parent)):
        adapts = adapts.model_copy(update={"place": os.path.abspath(folder.parent / adapts.place)})
    return InitialModel(_loaded_model(source, config, device), None, adapts)


def _record(source: OpenedCheckpoint, config: Config) -> AdaptedModel:
    """Return the record of the model that the key `load` names. A later launch finds the model by this record."""
    keys, folder = config.checkpoint, source.folder
    if not native.is_step_folder(folder):
        folder = local_folder(str(keys.load), keys.iteration)
    base = None if keys.base_model is None else os.path.abspath(local_folder(keys.base_model))
    place = os.path.abspath(folder)
    return AdaptedModel(identity=source.identity, place=place, base_model=base, ignore_keys=keys.ignore_keys)


def _loaded_model(source: OpenedCheckpoint, config: Config, device: str) -> GPT:
    """Build the model of a run with the weights of `source`, in host memory. With adapters, the weights are in the
    training dtype, because most of them are never trained.
    """
    saved, lora = source.trained, config.optimizer.lora
    dtype = torch.float32 if lora is None else DTYPES[config.precision.dtype]
    model = empty_model(config, device, dtype=dtype, memory="cpu")
    learned = draw_learned_positions(model, config.model, config.seed)
    weights, own = source.weights(), model.state_dict()
    same = _same_positions(saved, config)
    dropped = [
        name
        for name in weights.entries
        if POSITION_WEIGHTS.fullmatch(name)
        and (name not in own or not next(alike for kind, alike in same.items() if kind.fullmatch(name)))
    ]
    taken = weights.only(name for name in weights.entries if name not in dropped)
    norms = initial_norms(config.model) if adds_norms(saved.model, config.model) else {}
    load_weights(model, taken.adding(norms), learned)

    drawn, note = [name for name in learned if name not in taken.entries], extension_note(saved, config)
    if lora is not None:
        for part, names in (("positions", drawn), ("norms", list(norms))):
            if names and part not in lora.also:
                raise ConfigError(
                    f"lora: the run has new weights ({names[0]}), which would never be trained; add {part} to lora.also"
                )
    summary = [f"starts from the weights of {source.folder}", *([] if note is None else [note])]
    changed = _changed_positions(saved, config)
    summary += [f"changes {', '.join(changed)}"] if changed else []
    summary += ["adds norms of queries and keys"] if norms else []
    summary += [f"drops {', '.join(dropped)}"] if dropped else []
    summary += [f"initializes {', '.join(drawn)}"] if drawn else []
    logger.info("; ".join(summary))
    return model


def _same_positions(saved: Config, wanted: Config) -> dict[re.Pattern[str], bool]:
    """Return, for each kind of position weights, whether the saved weights have the same meaning in the wanted model.

    CLEX weights need the same frequencies, gate weights the same gate, and all other position weights the same method.
    """
    both = (saved, wanted)
    kinds = [[(name, p.score_form) for name, p in each.layer_types.items()] for each in both]
    gates = [[(name, p.forgetting_gate) for name, p in each.layer_types.items()] for each in both]
    same_layers = saved.model.layer_names == wanted.model.layer_names
    lengths = {each.position.original_length(each.model.seq_length) for each in both}
    same_frequencies = (
        saved.position.rope_scaling == wanted.position.rope_scaling
        and saved.position.rotary_emb_base == wanted.position.rotary_emb_base
        and len(lengths) == 1
    )
    return {
        CLEX_WEIGHTS: same_frequencies,
        GATE_WEIGHTS: same_layers and gates[0] == gates[1],
        POSITION_WEIGHTS: same_layers and kinds[0] == kinds[1],
    }


def _changed_positions(saved: Config, wanted: Config) -> list[str]:
    """Return the position keys that differ, each with both values."""

    def kind(key: str, value: object) -> object:  # a section with many options is shown by its type only
        if key == "pos_emb_options" and isinstance(value, dict):
            return {name: option for name, option in value.items() if name != "type"}
        keys = [key for key in ("rope_type", "type") if isinstance(value, dict) and key in value]
        return value[keys[0]] if isinstance(value, dict) and keys else value

    before, after = saved.flat(), wanted.flat()
    return [
        f"{key} (saved {kind(key, before[key])!r}, now {kind(key, after[key])!r})"
        for key in POSITION_KEYS
        if before[key] != after[key]
    ]


def check_same_tokenizer(source: OpenedCheckpoint, config: Config, ours: Tokenizer | None) -> None:
    """Raise a CheckpointError if the weights were trained with different token ids, or if their embedding has a
    different number of rows.
    """

    def describe(tokenizer: Tokenizer | None, rows: int) -> str:
        if tokenizer is None:
            return f"an unknown tokenizer ({rows} embedding rows)"
        name = f"{tokenizer.tokenizer_type} {tokenizer.fingerprint[:12]}"
        return f"{name} with vocab_size {tokenizer.vocab_size} ({rows} embedding rows)"

    (theirs, why), rows, wanted = source.tokenizer(), source.trained.model.padded_vocab_size, config.model
    sides = f"the checkpoint has {describe(theirs, rows)}, and the run has {describe(ours, wanted.padded_vocab_size)}"
    same = theirs is None or ours is None or made_of(ours, source.folder) or first_difference(theirs, ours) is None
    if not same:
        raise CheckpointError(
            f"{source.folder}: the weights were trained with a different tokenizer than the data of this run: {sides}; "
            "prepare the data with the checkpoint's tokenizer (megatron-coca prepare --tokenizer-type ... "
            "--vocab-file ...) or, to adapt the weights to the new tokenizer, first import them with it "
            "(megatron-coca import ... --set tokenizer_type=... vocab_file=...)"
        )
    if theirs is None and ours is not None:
        message = "cannot verify that the weights of %s were trained with the tokenizer of this run's data (%s)"
        logger.warning(message, source.folder, why)
    if rows != wanted.padded_vocab_size:
        remedy = (
            f"set make_vocab_size_divisible_by={rows}"
            if wanted.vocab_size is not None and wanted.vocab_size <= rows
            else f"set vocab_size={rows}, because the last tokens were added later and have no row"
            if theirs is not None and theirs.rows is not None and wanted.vocab_size == theirs.vocab_size
            else "prepare the data with the checkpoint's tokenizer, or start from another checkpoint"
        )
        raise CheckpointError(f"{source.folder}: the embedding sizes differ: {sides}; {remedy}")
