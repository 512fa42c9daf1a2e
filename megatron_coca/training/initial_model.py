"""The model at step 0 of a run, with random weights or with those of a checkpoint."""

import logging
import re
from typing import NamedTuple

from megatron_coca.checkpoints import CheckpointError, OpenedCheckpoint, open_checkpoint
from megatron_coca.checkpoints.compare import POSITION_WEIGHTS, check_same_architecture, extension_note
from megatron_coca.checkpoints.opened import load_weights
from megatron_coca.checkpoints.tokenizer import made_of
from megatron_coca.config import KEYS, Config
from megatron_coca.data import Tokenizer
from megatron_coca.data.tokenizers.kinds import first_difference
from megatron_coca.model import GPT, assemble_model, draw_learned_positions, empty_model

logger = logging.getLogger(__name__)

POSITION_KEYS = ("seq_length", *(key for key, place in KEYS.items() if place.group == "position"))
CLEX_WEIGHTS = re.compile(r"positions\.(others\.\w+\.)?clex\..+")
"""Weights of a learned frequency extension; other position weights belong to `pos_emb`."""
GATE_WEIGHTS = re.compile(r".+\.position_gates\..+")
"""Weights of a forgetting gate."""


class InitialModel(NamedTuple):
    """A model, and the identity of the checkpoint that its weights are from; None if they are random."""

    model: GPT
    origin: str | None


def initial_model(config: Config, device: str, tokenizer: Tokenizer | None = None, verify: bool = True) -> InitialModel:
    """Build a model for `device` with its weights in host memory, the same on every rank.

    With `finetune` the weights are those of the checkpoint `load`, which may have another position method. Its learned
    position weights are then dropped, and those of the new method are drawn at random.

    Args:
        tokenizer: that of the run's data, or None if unknown.
        verify: as for `open_checkpoint`.

    Raises:
        CheckpointError: there is nothing to load, the weights are of another architecture, or their tokenizer gives
            other ids than `tokenizer`.
        DataError: the tokenizer of the checkpoint is damaged.
    """
    keys = config.checkpoint
    if not keys.finetune or keys.load is None:
        return InitialModel(assemble_model(config, device), None)
    source = open_checkpoint(keys.load, verify, keys.iteration, {"imports": config.position.imports})
    saved = source.trained
    check_same_architecture(source.folder, saved, config)
    check_same_tokenizer(source, config, tokenizer)

    model = empty_model(config, device, memory="cpu")
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
    load_weights(model, taken, learned)

    drawn, note = [name for name in learned if name not in taken.entries], extension_note(saved, config)
    summary = [f"starts from the weights of {source.folder}", *([] if note is None else [note])]
    changed = _changed_positions(saved, config)
    summary += [f"with another {', '.join(changed)}"] if changed else []
    summary += [f"without {', '.join(dropped)}"] if dropped else []
    summary += [f"{', '.join(drawn)} drawn"] if drawn else []
    logger.info("; ".join(summary))
    return InitialModel(model, source.identity)


def _same_positions(saved: Config, wanted: Config) -> dict[re.Pattern[str], bool]:
    """Return for each kind of position weights whether the saved ones have the same meaning in the wanted model.

    CLEX needs the same frequencies, gates need the same gate, and all others the same method.
    """
    both = (saved, wanted)
    kinds = [[(name, p.pos_emb, p.pos_emb_options) for name, p in each.layer_types.items()] for each in both]
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
    """Return the keys of positions that differ, each with both values."""

    def kind(value: object) -> object:  # instead of a section with many options
        keys = [key for key in ("rope_type", "type") if isinstance(value, dict) and key in value]
        return value[keys[0]] if isinstance(value, dict) and keys else value

    before, after = saved.flat(), wanted.flat()
    return [
        f"{key} (saved {kind(before[key])!r}, now {kind(after[key])!r})"
        for key in POSITION_KEYS
        if before[key] != after[key]
    ]


def check_same_tokenizer(source: OpenedCheckpoint, config: Config, ours: Tokenizer | None) -> None:
    """Raise a CheckpointError if the weights were trained with other token ids, or have another number of rows."""

    def describe(tokenizer: Tokenizer | None, rows: int) -> str:
        if tokenizer is None:
            return f"an unknown tokenizer ({rows} rows of the embedding)"
        name = f"{tokenizer.tokenizer_type} {tokenizer.fingerprint[:12]}"
        return f"{name} with vocab_size {tokenizer.vocab_size} ({rows} rows of the embedding)"

    (theirs, why), rows, wanted = source.tokenizer(), source.trained.model.padded_vocab_size, config.model
    sides = f"it has {describe(theirs, rows)}, and the run {describe(ours, wanted.padded_vocab_size)}"
    same = theirs is None or ours is None or made_of(ours, source.folder) or first_difference(theirs, ours) is None
    if not same:
        raise CheckpointError(
            f"{source.folder}: the weights were trained with another tokenizer than the data of this run: {sides}; "
            "prepare the data with the tokenizer of the checkpoint (megatron-coca prepare --tokenizer-type ... "
            "--vocab-file ...), or, to train them for the new tokenizer, import them with it first "
            "(megatron-coca import ... --set tokenizer_type=... vocab_file=...)"
        )
    if theirs is None and ours is not None:
        message = "cannot verify that the weights of %s were trained with the tokenizer of this run's data (%s)"
        logger.warning(message, source.folder, why)
    if rows != wanted.padded_vocab_size:
        remedy = (
            f"set make_vocab_size_divisible_by={rows}"
            if wanted.vocab_size is not None and wanted.vocab_size <= rows
            else "prepare the data with the tokenizer of the checkpoint, or start from another one"
        )
        raise CheckpointError(f"{source.folder}: the embeddings are of different sizes: {sides}; {remedy}")
