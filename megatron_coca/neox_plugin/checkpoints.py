"""Record the position method in GPT-NeoX checkpoints when saving, and compare it when loading.

`megatron_coca/checkpoints/neox/names.py` lists the names in the checkpoint and explains why they are needed.
"""

import logging
from collections.abc import Mapping, MutableMapping
from typing import Any

from megatron_coca.checkpoints.neox.names import FIXED, PLAIN, POSITIONS, PROJECTION, RECORD, record_of
from megatron_coca.config import ConfigError
from megatron_coca.neox_plugin.keys import resolve, uses_plugin
from megatron_coca.neox_plugin.upstream import Function

logger = logging.getLogger(__name__)

SAVED_LENGTH = "max_position_embeddings"
"""GPT-NeoX requires this key to have the checkpoint's value, although only a learned position table depends on it."""


def _rename_prefix(state: MutableMapping[str, Any], old: str, new: str) -> None:
    for name in [name for name in state if name.startswith(old)]:
        state[new + name[len(old) :]] = state.pop(name)


def rename_in_checkpoints(layer: Any) -> None:
    """Save the projection of a plugin layer with the name PROJECTION. Load it with the name PROJECTION or PLAIN."""

    def on_save(module: Any, state: MutableMapping[str, Any], prefix: str, metadata: Any) -> None:
        _rename_prefix(state, prefix + PLAIN, prefix + PROJECTION)

    def on_load(state: MutableMapping[str, Any], prefix: str, *rest: Any) -> None:
        _rename_prefix(state, prefix + PROJECTION, prefix + PLAIN)

    layer._register_state_dict_hook(on_save)
    layer._register_load_state_dict_pre_hook(on_load)


def check_in_checkpoints(layer: Any, neox_args: Any) -> None:
    """Let loading a plugin checkpoint into GPT-NeoX's own attention raise ConfigError, except for fine-tuning."""

    def on_load(state: MutableMapping[str, Any], prefix: str, *rest: Any) -> None:
        if not any(name.startswith(prefix + PROJECTION) for name in state):
            return
        if not _fine_tunes(neox_args):
            raise ConfigError(
                f"pos_emb: {neox_args.pos_emb} does not fit {neox_args.load}, which was trained with the attention of "
                "megatron_coca; copy pos_emb and the other position keys from the checkpoint's configs/*.yml"
            )
        _rename_prefix(state, prefix + PROJECTION, prefix + PLAIN)

    layer._register_load_state_dict_pre_hook(on_load)


def _fine_tunes(neox_args: Any) -> bool:
    """Return whether the run fine-tunes. Evaluation and generation, which set no_load_optim, do not count."""
    return bool(neox_args.finetune) and not neox_args.no_load_optim


class _RecordingModel:
    """Wraps a model to add a record of the position method to its checkpoints."""

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
    """Wrap GPT-NeoX's `save_ds_checkpoint` to save the record of the position method in `args`."""

    def save_ds_checkpoint(iteration: int, model: Any, neox_args: Any) -> None:
        if uses_plugin(neox_args):
            model = _RecordingModel(model, record_of(resolve(neox_args)))
        original(iteration, model, neox_args)

    return save_ds_checkpoint


def checked_args(original: Function) -> Function:
    """Wrap GPT-NeoX's `check_checkpoint_args` to compare the position method too.

    With the plugin's attention, `max_position_embeddings` may differ from the checkpoint's value.

    The returned function raises ConfigError if the weights were trained with another position method. It also raises
    ConfigError if `seq_length` exceeds the checkpoint's training length, the method depends on that length, and
    `original_max_position_embeddings` is not set.
    """

    def check_checkpoint_args(neox_args: Any, checkpoint_args: dict[str, Any]) -> None:
        saved = dict(checkpoint_args)
        _check_positions(neox_args, saved.pop(RECORD, None))
        if uses_plugin(neox_args) and neox_args.pos_emb.lower() != "learned":
            _check_training_length(neox_args, saved.pop(SAVED_LENGTH, None))
        original(neox_args, saved)

    return check_checkpoint_args


def _check_positions(neox_args: Any, saved: Mapping[str, Any] | None) -> None:
    if saved is None:
        if uses_plugin(neox_args):
            logger.warning("%s: no record of the position method; using pos_emb: %s", neox_args.load, neox_args.pos_emb)
        return
    saved = {"rotary_frequencies": None, **saved}  # records of earlier versions lack this key
    if uses_plugin(neox_args):
        current = record_of(resolve(neox_args))
    else:
        current = {name: getattr(neox_args, name) for name in POSITIONS} | {"pos_emb": neox_args.pos_emb.lower()}
    differences = {
        name: f"{name}: {current[name]}, but {neox_args.load} was trained with {saved[name]}"
        for name in POSITIONS
        if name in saved and saved[name] != current[name]
    }
    errors = [
        f"{differences[name]}; use the value in the checkpoint's configs" for name in FIXED if name in differences
    ]
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
    if position.frequencies is not None:
        key = "rotary_frequencies"
    elif position.extension.measures_length:
        key = "rope_scaling"
    elif position.logit_scaling != "none":
        key = "logit_scaling"
    elif distance_map is not None and distance_map.settings(saved) != distance_map.settings(length):
        key = "relative_positions"
    else:
        return
    raise ConfigError(
        f"{key}: depends on the training length, but seq_length is {neox_args.seq_length} and {SAVED_LENGTH} is "
        f"{saved} in the checkpoint; set original_max_position_embeddings in rope_scaling to the training length (with "
        "rope_type default if there is no extension)"
    )
