"""The position method in GPT-NeoX checkpoints: recorded when saving, compared when loading.

GPT-NeoX's weight names do not depend on the position method, and neither its load nor its converter to Hugging Face
reads `pos_emb`: a CoCA model would silently be read as a rotary one. Therefore the query-key-value projection of the
plugin's attention has its own name in checkpoints, PROJECTION, on which GPT-NeoX's strict load and its converter fail
without the plugin.
"""

import logging
from argparse import ArgumentParser
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from megatron_coca.config import Config, ConfigError
from megatron_coca.neox_plugin.keys import EXTENDING, read, resolve, selects_plugin, uses_plugin
from megatron_coca.neox_plugin.upstream import Function, record_call

logger = logging.getLogger(__name__)

SAVED_LENGTH = "max_position_embeddings"
"""GPT-NeoX requires the checkpoint's value, although weights depend on it only with a learned position table."""

PLAIN, PROJECTION = "query_key_value.", "megatron_coca_query_key_value."
"""Prefix of the projection within attention: GPT-NeoX's, and that of checkpoints of the plugin's attention."""

RECORD = "megatron_coca"
"""Key in a checkpoint's `args` with the values of POSITIONS."""

FIXED = ("pos_emb", "rotary_pct")
POSITIONS = (*FIXED, "rotary_emb_base", *EXTENDING)
"""Recorded keys. Weights depend on those in FIXED; the others may be changed for longer inputs."""

NOTE = "MEGATRON_COCA.md"
"""A file in the step's folder that documents how to use the weights."""

CONVERTER = "megatron-coca export huggingface CHECKPOINT FOLDER"
"""Replacement of GPT-NeoX's tools/ckpts/convert_neox_to_hf.py, in this repository."""


def saved_name(name: str) -> str:
    """Return the name of a weight in checkpoints of the plugin's attention."""
    return name.replace(f"attention.{PLAIN}", f"attention.{PROJECTION}")


def plain_name(name: str) -> str:
    """Return GPT-NeoX's name of a checkpoint's weight."""
    return name.replace(f"attention.{PROJECTION}", f"attention.{PLAIN}")


def _rename_prefix(state: MutableMapping[str, Any], old: str, new: str) -> None:
    for name in [name for name in state if name.startswith(old)]:
        state[new + name[len(old) :]] = state.pop(name)


def rename_in_checkpoints(layer: Any) -> None:
    """Save the projection of a plugin layer under PROJECTION; load it under both names."""

    def on_save(module: Any, state: MutableMapping[str, Any], prefix: str, metadata: Any) -> None:
        _rename_prefix(state, prefix + PLAIN, prefix + PROJECTION)

    def on_load(state: MutableMapping[str, Any], prefix: str, *rest: Any) -> None:
        _rename_prefix(state, prefix + PROJECTION, prefix + PLAIN)

    layer._register_state_dict_hook(on_save)
    layer._register_load_state_dict_pre_hook(on_load)


def refuse_in_checkpoints(layer: Any, neox_args: Any) -> None:
    """Reject checkpoints of the plugin's attention in a layer with GPT-NeoX's own, except for fine-tuning."""

    def on_load(state: MutableMapping[str, Any], prefix: str, *rest: Any) -> None:
        if not any(name.startswith(prefix + PROJECTION) for name in state):
            return
        if not _fine_tunes(neox_args):
            raise ConfigError(
                f"pos_emb: {neox_args.pos_emb}, but the checkpoint {neox_args.load} was trained with the attention "
                "of megatron_coca; set pos_emb and the other position keys as in its configs/*.yml"
            )
        _rename_prefix(state, prefix + PROJECTION, prefix + PLAIN)

    layer._register_load_state_dict_pre_hook(on_load)


def _fine_tunes(neox_args: Any) -> bool:
    """Return whether the weights are only initial ones; evaluation and generation set no_load_optim."""
    return bool(neox_args.finetune) and not neox_args.no_load_optim


def record_of(config: Config) -> dict[str, Any]:
    """Return the recorded values by key; mappings contain only values that differ from the defaults."""
    values = config.position.model_dump(by_alias=True)
    short = config.position.model_dump(by_alias=True, exclude_defaults=True, exclude_none=True)
    return {name: short.get(name, values[name]) for name in POSITIONS}


class _RecordingModel:
    """A model whose checkpoints contain a record of its positions."""

    def __init__(self, model: Any, record: Mapping[str, Any]) -> None:
        self._model, self._record = model, record

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    def save_checkpoint(self, folder: str, *args: Any, client_state: dict[str, Any], **kwargs: Any) -> Any:
        client_state["args"][RECORD] = dict(self._record)
        return self._model.save_checkpoint(folder, *args, client_state=client_state, **kwargs)


def recorded_save(original: Function) -> Function:
    """Wrap GPT-NeoX's `save_ds_checkpoint` to save the record in `args` and NOTE in the step's folder."""

    def save_ds_checkpoint(iteration: int, model: Any, neox_args: Any) -> None:
        if not uses_plugin(neox_args):
            original(iteration, model, neox_args)
            return
        record = record_of(resolve(neox_args))
        original(iteration, _RecordingModel(model, record), neox_args)
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            (Path(neox_args.save) / f"global_step{iteration}" / NOTE).write_text(note(record))

    return save_ds_checkpoint


def note(record: Mapping[str, Any]) -> str:
    """Return the content of NOTE."""
    keys = yaml.safe_dump(
        {name: value for name, value in record.items() if value not in (None, "none")}, sort_keys=False
    )
    return f"""# Trained with the attention of megatron_coca

    {keys.strip().replace(chr(10), chr(10) + "    ")}

These are not plain rotary positions: without the plugin of megatron_coca, GPT-NeoX computes different results with \
these
weights. To make it fail instead, the weights `attention.{PLAIN}*` are called
`attention.{PROJECTION}*` here; GPT-NeoX's load and `tools/ckpts/convert_neox_to_hf.py` report that name as
missing. Do not rename them. Use

- for Hugging Face transformers: `{CONVERTER}`
- for megatron_coca: this folder as `load`, or `megatron-coca import CHECKPOINT FOLDER`
- for GPT-NeoX: `python -m megatron_coca.neox_plugin deepy.py ...` with the YAML files in `configs`

from the repository of megatron_coca. CHECKPOINT is this folder or its parent, FOLDER is the output.
"""


def refuse_conversion(script: str, arguments: Sequence[str]) -> None:
    """Raise ConfigError if `script` is GPT-NeoX's converter to Hugging Face, which writes a rotary model, and the
    checkpoint was trained with the plugin's attention.
    """
    if Path(script).name != "convert_neox_to_hf.py":
        return
    parser = ArgumentParser(add_help=False)
    parser.add_argument("--input_dir", type=Path)
    parser.add_argument("--config_file", type=Path)
    options, _ = parser.parse_known_args(arguments)
    files = [options.config_file] if options.config_file is not None else []
    has_note = False
    if options.input_dir is not None:
        files += sorted((options.input_dir / "configs").glob("*.*"))
        has_note = (options.input_dir / NOTE).exists()
    configs = [str(file) for file in files if file.is_file() and selects_plugin(read(str(file)).values)]
    if has_note or configs:
        evidence = f" ({configs[0]})" if configs else ""
        raise ConfigError(
            f"{options.input_dir}: was trained with the attention of megatron_coca{evidence}, and {script} writes "
            f"only rotary models; run `{CONVERTER}` in the repository of megatron_coca"
        )


def checked_args(original: Function) -> Function:
    """Wrap GPT-NeoX's `check_checkpoint_args` to compare positions too. With the plugin's attention,
    `max_position_embeddings` may differ from the checkpoint's.

    The result raises ConfigError if the weights were trained with other positions, or if the run is longer than the
    checkpoint's and the position method depends on a training length that is not set.
    """

    def check_checkpoint_args(neox_args: Any, checkpoint_args: dict[str, Any]) -> None:
        record_call(neox_args, "megatron.checkpointing.check_checkpoint_args")
        saved = dict(checkpoint_args)
        _check_positions(neox_args, saved.pop(RECORD, None))
        if uses_plugin(neox_args) and neox_args.pos_emb.lower() != "learned":
            _check_training_length(neox_args, saved.pop(SAVED_LENGTH, None))
        original(neox_args, saved)

    return check_checkpoint_args


def _check_positions(neox_args: Any, saved: Mapping[str, Any] | None) -> None:
    if saved is None:
        if uses_plugin(neox_args):
            logger.warning(
                "%s has no record of its position method; using pos_emb: %s", neox_args.load, neox_args.pos_emb
            )
        return
    if uses_plugin(neox_args):
        current = record_of(resolve(neox_args))
    else:
        current = {name: getattr(neox_args, name) for name in POSITIONS} | {"pos_emb": neox_args.pos_emb.lower()}
    differences = {
        name: f"{name}: {current[name]}, but {neox_args.load} was trained with {saved[name]}"
        for name in POSITIONS
        if name in saved and saved[name] != current[name]
    }
    errors = [f"{differences[name]}; set it as in its configs/*.yml" for name in FIXED if name in differences]
    if errors and not _fine_tunes(neox_args):
        raise ConfigError(*errors)
    for line in differences.values():
        logger.warning("%s", line)


def _check_training_length(neox_args: Any, saved: int | None) -> None:
    if saved is None or neox_args.seq_length <= saved:
        return
    config = resolve(neox_args)
    position, length = config.position, config.model.seq_length
    scaling, distance_map = position.rope_scaling, position.relative_positions
    if scaling is not None and scaling.original_max_position_embeddings:
        return
    if position.extension.measures_length:
        key = "rope_scaling"
    elif position.logit_scaling != "none":
        key = "logit_scaling"
    elif distance_map is not None and distance_map.settings(saved) != distance_map.settings(length):
        key = "relative_positions"
    else:
        return
    raise ConfigError(
        f"{key}: depends on the training length. seq_length is {neox_args.seq_length}, the checkpoint has"
        f" {SAVED_LENGTH}: {saved}; set the training length as `original_max_position_embeddings` in rope_scaling"
        " (with rope_type default if there is no extension)"
    )
