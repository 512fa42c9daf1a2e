"""Lengths of a checkpoint and of the run that loads it."""

from typing import Any

from megatron_coca.config import Config
from megatron_coca.neox_plugin.keys import is_asked_for, resolve
from megatron_coca.neox_plugin.wrapping import Function

SAVED = "max_position_embeddings"
"""What upstream asserts to be as saved. Without a table of positions no weight depends on it."""

OF_ANY_LENGTH = frozenset({"default", "linear", "ntk", "ntk_fixed", "ntk_mixed"})
"""Extensions whose frequencies do not depend on the length that was trained at."""


def checking_lengths(original: Function) -> Function:
    """Upstream's `check_checkpoint_args`, to which another `max_position_embeddings` than the saved one is no obstacle
    with the plugin's attention.

    Raises:
        ValueError: the run is longer than the checkpoint's, and the length that the method is measured by is not said.
    """

    def check_checkpoint_args(neox_args: Any, checkpoint_args: dict[str, Any]) -> None:
        given = dict(checkpoint_args)
        if is_asked_for(neox_args) and neox_args.pos_emb.lower() != "learned":
            _check_trained_length(neox_args, given.pop(SAVED, None))
        original(neox_args, given)

    return check_checkpoint_args


def _check_trained_length(neox_args: Any, saved: int | None) -> None:
    if saved is None or neox_args.seq_length <= saved:
        return
    config = resolve(neox_args)
    scaling = config.position.rope_scaling
    if (scaling is not None and scaling.original_max_position_embeddings) or not (key := _measured(config, saved)):
        return
    raise ValueError(
        f"{key}: depends on the length that the weights were trained at. seq_length is {neox_args.seq_length}, the "
        f"checkpoint has {SAVED}: {saved}; say which one was trained with `original_max_position_embeddings` in rope_scaling "
        "(whose rope_type may be default)"
    )


def _measured(config: Config, saved: int) -> str | None:
    """The key of what would be another method if the training length were the saved one."""
    position, length = config.position, config.model.seq_length
    if position.rope_scaling is not None and position.rope_scaling.rope_type not in OF_ANY_LENGTH:
        return "rope_scaling"
    if position.logit_scaling != "none":
        return "logit_scaling"
    map_ = position.relative_positions
    return "relative_positions" if map_ is not None and map_.settings(saved) != map_.settings(length) else None
