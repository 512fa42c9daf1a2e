"""How a run starts: fresh, resumed, or from given weights."""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from megatron_coca.checkpoints import CheckpointError, OpenedCheckpoint, native, open_checkpoint
from megatron_coca.checkpoints.compare import POSITION_WEIGHTS, differing_keys, refuse_other_architecture
from megatron_coca.checkpoints.errors import UnreadableError
from megatron_coca.checkpoints.huggingface import is_huggingface_folder
from megatron_coca.checkpoints.load import load_weights
from megatron_coca.checkpoints.neox import find_step
from megatron_coca.checkpoints.tokenizer import made_of
from megatron_coca.config import KEYS, CheckpointConfig, Config, load_config
from megatron_coca.data import Tokenizer
from megatron_coca.data.tokenizers.kinds import first_difference
from megatron_coca.model import GPT, assemble_model, draw_learned_positions, empty_model
from megatron_coca.training import engine as dist
from megatron_coca.training.collectives import attempt
from megatron_coca.training.corpus import Corpus, differing_data
from megatron_coca.training.optimizer import OPTIMIZERS
from megatron_coca.training.verification import Choice

FREE_GROUPS = frozenset({"schedule", "data", "batch", "parallel", "checkpoint", "logging", "launch", "faults"})
FREE_KEYS = frozenset(
    {
        "attention_backend",
        "operand_kernel",
        "checkpoint_activations",
        "checkpoint_num_layers",
        "checkpoint_policy",
        "loss_chunk_size",
        "torch_compile",
        "optimizer.params.lr",
    }
)
"""What may change when a run is resumed. Of these, data and batch are checked by what they amount to (meta.json); how
the work is divided among processes is free, because the saved state is not divided by it.
"""
BY_MEANING = frozenset({"optimizer.type"})
"""Keys with several words for one thing; what they amount to must be the same."""


def differing_run(saved: Config, wanted: Config) -> list[str]:
    """A line for every key in which a run that is to go on differs from the one that was saved."""
    return differing_keys(saved, wanted, FREE_KEYS | BY_MEANING, FREE_GROUPS) + _differing_optimizer(saved, wanted)


def _differing_optimizer(saved: Config, wanted: Config) -> list[str]:
    before, after = saved.optimizer.type, wanted.optimizer.type
    same = OPTIMIZERS[before] is OPTIMIZERS[after]
    return [] if same else [f"optimizer.type (saved {before!r}, now {after!r})"]


logger = logging.getLogger(__name__)

POSITION_KEYS = ("seq_length", *(key for key, place in KEYS.items() if place.group == "position"))
FREQUENCIES = "positions.clex."
"""Names of what the extension of frequencies learns; other weights of positions belong to `pos_emb`."""


class InitialModel(NamedTuple):
    """A model, and the identity of the checkpoint that its weights are of, None where they are drawn."""

    model: GPT
    origin: str | None


def initial_model(config: Config, device: str, tokenizer: Tokenizer | None = None, verify: bool = True) -> InitialModel:
    """A model for `device` with its weights in the memory of the host. Every rank has the same.

    With `finetune` they are those that `load` names, whose position method may be another: what only that one had is
    left out, and what the new one learns is drawn. `tokenizer` is that of the run's data, None where it is not known;
    `verify` as for `open_checkpoint`.

    Raises:
        CheckpointError: there is nothing to load, the weights are not of this architecture, or their tokenizer gives
            other ids than `tokenizer`.
        DataError: the tokenizer of the checkpoint is damaged.
    """
    keys = config.checkpoint
    if not keys.finetune or keys.load is None:
        return InitialModel(assemble_model(config, device), None)
    source = open_checkpoint(keys.load, verify, keys.iteration)
    refuse_other_architecture(source.folder, source.trained, config)
    _refuse_other_tokenizer(source, config, tokenizer)
    model = empty_model(config, device, memory="cpu")
    drawn, weights, own = draw_learned_positions(model, config.model, config.seed), source.weights(), model.state_dict()
    means_the_same = _meaning(source.trained, config)
    left_out = [
        name
        for name in weights.entries
        if POSITION_WEIGHTS.fullmatch(name) and (name not in own or not means_the_same(name))
    ]
    taken = weights.only(name for name in weights.entries if name not in left_out)
    load_weights(model, taken, drawn)
    logger.info(_told(source, config, left_out, [name for name in drawn if name not in taken.entries]))
    return InitialModel(model, source.identity)


def _refuse_other_tokenizer(source: OpenedCheckpoint, config: Config, ours: Tokenizer | None) -> None:
    """Tokens have to mean the same to the weights and to the data, and the embedding as many rows."""
    (theirs, why), rows, wanted = source.tokenizer(), source.trained.model.padded_vocab_size, config.model
    sides = f"it has {_described(theirs, rows)}, and the run {_described(ours, wanted.padded_vocab_size)}"
    same = theirs is None or ours is None or made_of(ours, source.folder) or first_difference(theirs, ours) is None
    if not same:
        raise CheckpointError(
            f"{source.folder}: the weights were trained with another tokenizer than the data of this run: {sides}; "
            "prepare the data with the tokenizer of the checkpoint (tools/prepare_data.py --tokenizer-type ... "
            "--vocab-file ...), or, if they are to learn the new one, import them with it first "
            "(tools/import_checkpoint.py ... --set tokenizer_type=... vocab_file=...)"
        )
    if theirs is None and ours is not None:
        logger.warning(
            "nothing shows that the weights of %s were trained with the tokenizer of this run's data (%s)",
            *(source.folder, why),
        )
    if rows != wanted.padded_vocab_size:
        remedy = (
            f"set make_vocab_size_divisible_by={rows}"
            if wanted.vocab_size is not None and wanted.vocab_size <= rows
            else "prepare the data with the tokenizer of the checkpoint, or start from another one"
        )
        raise CheckpointError(f"{source.folder}: the embeddings are of different sizes: {sides}; {remedy}")


def _described(tokenizer: Tokenizer | None, rows: int) -> str:
    if tokenizer is None:
        return f"an unknown tokenizer ({rows} rows of the embedding)"
    return (
        f"{tokenizer.tokenizer_type} {tokenizer.fingerprint[:12]} with {tokenizer.vocab_size} tokens ({rows} rows of the "
        "embedding)"
    )


def _meaning(saved: Config, wanted: Config) -> Callable[[str], bool]:
    """Whether a weight of positions, by its name, serves the same purpose in both: two methods may share a name."""
    same_method = saved.position.pos_emb == wanted.position.pos_emb
    lengths = {each.position.original_length(each.model.seq_length) for each in (saved, wanted)}
    same_frequencies = (
        saved.position.rope_scaling == wanted.position.rope_scaling
        and saved.position.rotary_emb_base == wanted.position.rotary_emb_base
        and len(lengths) == 1
    )
    return lambda name: same_frequencies if name.startswith(FREQUENCIES) else same_method


def _told(source: OpenedCheckpoint, config: Config, left_out: list[str], drawn: list[str]) -> str:
    before, after = source.trained.flat(), config.flat()
    changed = [_change(key, before[key], after[key]) for key in POSITION_KEYS if before[key] != after[key]]
    parts = [f"starts from the weights of {source.folder}"]
    parts += [f"with another {', '.join(changed)}"] if changed else []
    parts += [f"without {', '.join(left_out)}"] if left_out else []
    parts += [f"{', '.join(drawn)} drawn"] if drawn else []
    return "; ".join(parts)


def _change(key: str, before: object, after: object) -> str:
    """Sections of many options are named by their kind alone."""
    return f"{key} (saved {_kind(before)!r}, now {_kind(after)!r})"


def _kind(value: object) -> object:
    return (
        next((value[name] for name in ("rope_type", "type") if name in value), value)
        if isinstance(value, dict)
        else value
    )


def candidates(config: CheckpointConfig) -> list[Path]:
    """The checkpoints to resume from, the preferred one first; none for a fresh start.

    With `auto_resume` the run's own come first, then those of `save_copy`. `load` naming the folder of `save` while
    that holds nothing yet is a first start, so that one command serves first and later launches.

    Raises:
        CheckpointError: `load` holds no checkpoint, `save` or `save_copy` holds some that this run would mix with its
            own, or `auto_resume` has no folder to look into.
    """
    if config.auto_resume and config.save is None:
        raise CheckpointError("auto_resume: needs a folder to resume from; set save=FOLDER")
    folders = _candidates(config)
    if config.save_copy is not None:
        _refuse_copies_of_another_run(Path(config.save_copy), folders)
    return folders


def _candidates(config: CheckpointConfig) -> list[Path]:
    own = _newest_first(config.save, config.save_copy) if config.auto_resume else []
    if own:
        return own
    folders, save = _folders_to_resume(config), Path(config.save) if config.save is not None else None
    if save is not None and native.begun_steps(save) and (not folders or folders[0].resolve().parent != save.resolve()):
        raise CheckpointError(
            f"{save}: already holds a run, up to step {native.begun_steps(save)[-1]}; resume it with load={save} or "
            "auto_resume=true, or choose another save folder"
        )
    return folders


def _refuse_copies_of_another_run(copies: Path, folders: Sequence[Path]) -> None:
    """Raise a CheckpointError where `copies` holds checkpoints and not all are of the run that `folders` are of.

    What cannot be read is damaged, and of no run. Where `folders` are nothing but copies, these must be of one run.
    """
    steps = native.begun_steps(copies)
    if not steps:
        return
    remedy = "take another folder for save_copy, or move them elsewhere"
    if not folders:
        raise CheckpointError(
            f"{copies}: already holds copies of a run, up to step {steps[-1]}, and this one starts afresh; {remedy}, or "
            "resume that run with auto_resume=true"
        )
    found = runs_of(native.step_folder(copies, step) for step in steps)
    own = runs_of(folder for folder in folders if folder.resolve().parent != copies.resolve()) or found
    if None in found or len(found) > 1 or not found <= own:
        raise CheckpointError(
            f"{copies}: holds copies of another run, or of one that its meta.json does not name, than the one to resume "
            f"({folders[0].parent}); {remedy}"
        )


def runs_of(folders: Iterable[Path]) -> set[str | None]:
    """The identities of the runs that have written checkpoints; None stands for versions that wrote none."""
    runs: set[str | None] = set()
    for folder in folders:
        with suppress(CheckpointError):
            runs.add(native.read_json(folder / native.META).get("run"))
    return runs


def _newest_first(*saves: str | None) -> list[Path]:
    """The checkpoints of several save folders by step, falling; of one step in the order of the folders. Also those
    that have lost their manifest: they are damaged, not absent.
    """
    found = [
        (-step, number, native.step_folder(Path(save), step))
        for number, save in enumerate(saves)
        if save is not None
        for step in native.begun_steps(Path(save))
    ]
    return [folder for _, _, folder in sorted(found)]


def _folders_to_resume(config: CheckpointConfig) -> list[Path]:
    if config.load is None or config.finetune:
        return []
    if is_huggingface_folder(Path(config.load)):
        raise CheckpointError(
            f"{config.load}: a Hugging Face folder has no optimizer state; set finetune=true to start from its weights"
        )
    if find_step(Path(config.load)) is not None:
        raise CheckpointError(
            f"{config.load}: the optimizer state of a GPT-NeoX checkpoint is not read; set finetune=true to start from its "
            "weights"
        )
    same = config.save is not None and Path(config.load).resolve() == Path(config.save).resolve()
    if same and not native.begun_steps(Path(config.load)):
        return []
    try:
        named = native.locate(config.load, config.iteration)
    except UnreadableError:
        folders = _newest_first(config.load) if config.iteration is None else []
        if not folders:
            raise
        return folders
    if config.iteration is not None or named == Path(config.load):
        return [named]
    return _newest_first(config.load)


def clear_together(keys: CheckpointConfig, chosen: Choice) -> None:
    """As `clear_the_way`, for all ranks: every one must call it, under the folder's lock.

    Raises:
        CheckpointError: what is in the way cannot be moved or removed.
    """
    cleared, failure = attempt(lambda: clear_the_way(keys.save, chosen, keys.save_copy), OSError, main_only=True)
    if not cleared:
        raise CheckpointError(
            f"{keys.save}: what lies beyond the checkpoint to resume from cannot be moved or removed "
            f"({failure or 'the first process says why'}); allow it, or do it by hand"
        ) from failure


def clear_the_way(save: str | None, chosen: Choice, save_copy: str | None = None) -> None:
    """Set aside the checkpoints in `save` and its copy beyond the one that is resumed: they are damaged, or of a branch
    that is left. A later start would otherwise prefer them. Those that could not be read stay: they may be valid, and
    the next start looks at them again. What interrupted saves have left is removed.
    """
    for given, is_copy in ((save, False), (save_copy, True)):
        if given is None:
            continue
        folder = Path(given)
        native.sweep(folder)
        for step in _beyond(folder, chosen.folder, is_copy, chosen.unreadable) if chosen.folder is not None else ():
            place = native.set_aside(native.step_folder(folder, step))
            logger.warning("%s: moved to %s", native.step_folder(folder, step), place)


def _beyond(folder: Path, resumed: Path, is_copy: bool, unreadable: Collection[Path]) -> list[int]:
    """The steps in a save folder that a start would prefer to `resumed`; of its own step one comes before a copy."""
    reached = int(native.read_json(resumed / native.META)["step"])
    preferred = not is_copy and resumed.resolve().parent != folder.resolve()
    found = [step for step in native.begun_steps(folder) if step > reached or (step == reached and preferred)]
    left = {path.resolve() for path in unreadable}
    return [step for step in found if native.step_folder(folder, step).resolve() not in left]


def refuse_other_run(folder: Path, corpus: Corpus, layout: Mapping[str, Any]) -> None:
    """Raise a CheckpointError naming all that makes the checkpoint in `folder` another run than the one configured.

    `layout` is what a step depends on beside the keys: samples of a step, number format.
    """
    saved = load_config([folder / native.CONFIG])
    meta = native.read_json(folder / native.META)
    problems = differing_run(saved, corpus.config)
    problems += differing_data(meta.get("data") or {}, corpus.identity, [str(s.prefix) for s in corpus.train.shards])
    problems += [
        f"{key} (saved {meta.get(key)!r}, now {value!r})" for key, value in layout.items() if meta.get(key) != value
    ]
    if problems:
        raise CheckpointError(
            f"{folder}: cannot be resumed with another {', '.join(problems)}; "
            "restore these, or start a new run from its weights with finetune=true"
        )
    for line in differing_keys(saved, corpus.config, BY_MEANING, FREE_GROUPS - {"schedule"}) if dist.is_main() else ():
        logger.warning("resuming with another %s", line)
