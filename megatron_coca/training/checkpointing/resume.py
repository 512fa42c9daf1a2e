"""Choosing the checkpoint from which a run resumes.

`candidates` lists the checkpoints, `first_valid` verifies them on all ranks and chooses one, `check_same_run` compares
it with the configuration, and `quarantine_newer` moves newer checkpoints away. If there is no checkpoint to resume
from, `initial_model.py` builds the model.
"""

import logging
import math
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from megatron_coca.checkpoints import CheckpointError, native
from megatron_coca.checkpoints.compare import differing_keys
from megatron_coca.checkpoints.files import Comparison, UnreadableError
from megatron_coca.checkpoints.huggingface.read import is_huggingface_folder
from megatron_coca.checkpoints.neox.read import find_step
from megatron_coca.config import (
    COMPUTE_KEYS,
    FORM_KEYS,
    KEYS,
    CheckpointConfig,
    Config,
    RunStage,
    adds_norms,
    form_keys,
    load_saved_config,
    stage_at,
    weight_changes,
)
from megatron_coca.data.identity import differing_data
from megatron_coca.training.collectives import attempt, decode_failure, encode_failure, from_main
from megatron_coca.training.corpus import Corpus
from megatron_coca.training.engine import group as dist
from megatron_coca.training.engine.state import ADDED_AT, STEP
from megatron_coca.training.launch import threads_per_process
from megatron_coca.training.opened_stages import differing_stages
from megatron_coca.training.optimizer import OPTIMIZERS

logger = logging.getLogger(__name__)

FREE_GROUPS = frozenset({"schedule", "data", "batch", "parallel", "checkpoint", "logging", "launch", "faults"})
FREE_KEYS = COMPUTE_KEYS | {"optimizer.params.lr"}
"""Keys that may change when a run is resumed. For data and batch, the values in meta.json are compared instead. Keys of
the parallel layout may change, because the saved state does not depend on it.
"""
ALIASED_KEYS = frozenset({"optimizer.type"})
"""Keys with several names for the same value, such as Adam and AdamW. These values count as equal."""
UNRECORDED_KEYS = frozenset({"metric_sinks"})
"""Keys that the configuration of a checkpoint does not contain."""
AGREE_SECONDS, REPORT_SECONDS = 1.0, 30.0
"""Intervals in seconds at which ranks agree on the progress of a verification, and at which they log it."""
MOST_THREADS = 16
"""Maximum number of verification threads per process. More threads do not read faster."""


def _real(path: str | Path) -> Path:
    """Resolve links. Unlike `Path.resolve` before Python 3.13, this raises no error for a loop of links."""
    return Path(os.path.realpath(path))


def candidates(config: CheckpointConfig) -> list[Path]:
    """Return the checkpoints from which the run can resume, in order of preference; empty for a fresh start.

    With `auto_resume`, these are the checkpoints in `save`, if any. If `load` and `save` are the same folder and it
    contains no checkpoint yet, this is a fresh start, so that the same command works for the first and all later
    launches.

    Raises:
        CheckpointError: `load` contains no checkpoint, `save` contains checkpoints of another run, or `auto_resume` is
            set without `save`.
    """
    if config.auto_resume and config.save is None:
        raise CheckpointError("auto_resume: requires a save folder; set save=FOLDER")
    folders = _newest_first(config.save) if config.auto_resume and config.save is not None else []
    if not folders:
        folders, save = _named_by_load(config), Path(config.save) if config.save is not None else None
        steps = native.begun_steps(save) if save is not None else []
        if save is not None and steps and (not folders or _real(folders[0]).parent != _real(save)):
            raise CheckpointError(
                f"{save}: already contains a run, up to step {steps[-1]}; resume it with load={save} or "
                "auto_resume=true, or choose another save folder"
            )
    return folders


def _newest_first(save: str) -> list[Path]:
    """Return all checkpoints in a folder by descending step, including damaged ones without a manifest."""
    return [native.step_folder(Path(save), step) for step in reversed(native.begun_steps(Path(save)))]


def _named_by_load(config: CheckpointConfig) -> list[Path]:
    if config.load is None or config.finetune:
        return []
    load = Path(config.load)
    if is_huggingface_folder(load):
        raise CheckpointError(
            f"{load}: a Hugging Face folder has no optimizer state; set finetune=true to start from its weights"
        )
    if find_step(load) is not None:
        if config.save is not None and _real(load) == _real(config.save):
            raise CheckpointError(f"{load}: contains GPT-NeoX checkpoints; choose another save folder for this run")
        return []  # neox_resume.py converts the checkpoint after the data is opened
    if config.save is not None and _real(load) == _real(config.save) and not native.begun_steps(load):
        return []
    try:
        named = native.locate(load, config.iteration)
    except UnreadableError:
        folders = _newest_first(config.load) if config.iteration is None else []
        if not folders:
            raise
        return folders
    return [named] if config.iteration is not None or named == load else _newest_first(config.load)


def runs_of(folders: Iterable[Path]) -> set[str | None]:
    """Return the run ids of all readable checkpoints; None stands for a checkpoint without an id."""
    runs: set[str | None] = set()
    for folder in folders:
        with suppress(CheckpointError):
            runs.add(native.read_meta(folder).get("run"))
    return runs


def home_of_copy(meta: Mapping[str, Any], save: str) -> str | None:
    """Return the folder from which the checkpoint with this `meta.json` was copied to `save`; None if it is no copy.

    The checkpoint is a copy if it was written to another folder, and that folder still has checkpoints of the same run.
    If the other folder has none, the run was moved.
    """
    home = meta.get("save")
    if not isinstance(home, str) or _real(home) == _real(save):
        return None
    with suppress(OSError):  # one of the two folders does not exist
        if os.path.samefile(home, save):
            return None
    try:
        folders = [native.step_folder(Path(home), step) for step in native.begun_steps(Path(home))]
    except OSError:
        return None
    return home if meta.get("run") in runs_of(folders) else None


class ResumePoint(NamedTuple):
    """The checkpoint from which a run resumes, or None to start from step 0, and any preferred checkpoints that could
    not be read. An unreadable checkpoint may be valid, so it must not be moved.
    """

    folder: Path | None
    unreadable: tuple[Path, ...] = ()


def first_valid(folders: Sequence[Path], beat: Callable[[str], None] = lambda reached: None) -> ResumePoint:
    """Choose the first of `folders` that is valid and can be resumed, and log why any folders before it were not
    chosen.

    Every rank must call this with the same folders. `beat` reports progress to the watchdog.

    Raises:
        CheckpointError: none of the folders can be resumed; an existing run never restarts silently from step 0. The
            error is an UnreadableError if one of the folders could not be read.
    """
    unreadable: dict[Path, UnreadableError] = {}
    last: CheckpointError | None = None
    for folder in folders:
        try:
            verify_distributed(folder, beat, resumable=True)
            return ResumePoint(folder, tuple(unreadable))
        except CheckpointError as failure:
            last = failure
            if isinstance(failure, UnreadableError):
                unreadable[folder] = failure
            if dist.is_main() and folder is not folders[-1]:
                logger.warning("%s; falling back to the previous checkpoint", failure)
    if last is None:
        return ResumePoint(None)
    raise next(iter(unreadable.values()), last)


def verify_distributed(folder: Path, beat: Callable[[str], None], resumable: bool = False) -> None:
    """Compare all files of a checkpoint with its manifest. The ranks share the work, so every rank must call this.

    With `resumable`, also check that a run can be resumed from the checkpoint.

    Raises:
        UnreadableError: a rank cannot read a file, which may still be valid.
        CheckpointError: see `native.verify`.
    """

    def list_files() -> list[tuple[str, int, str]]:
        try:
            manifest = native.verify(folder, contents=False, links=not resumable)
            if resumable:
                native.require_run_state(folder)
            for name in native.unlisted(folder):
                logger.warning("%s: not listed in %s, and therefore ignored", folder / name, native.MANIFEST)
            digests = native.expected_digests(folder, manifest)
            return [(str(path), path.stat().st_size, digest) for path, digest in digests.items()]
        except OSError as error:
            raise UnreadableError.of(folder, error) from error

    beat(f"verifying {folder}")
    files = from_main(list_files)
    own = {Path(path): digest for path, _, digest in files[dist.rank() :: dist.world_size()]}  # by descending size
    _compare(folder, own, sum(size for _, size, _ in files), beat)


def _compare(folder: Path, own: Mapping[Path, str], total: int, beat: Callable[[str], None]) -> None:
    """Compare this rank's files until all ranks are done or one has failed. An error on one rank is raised on all.

    The ranks periodically add up the bytes that they have read. A rank that is done early can therefore report progress
    to its watchdog while other ranks read.
    """
    start = reported = time.monotonic()
    before, threads = 0.0, min(MOST_THREADS, threads_per_process(os.environ))

    def rate(read: float) -> str:
        seconds = time.monotonic() - start
        speed = read / 1e9 / max(seconds, 1e-9)
        return f"{read / 1e9:.3f} of {total / 1e9:.3f} GB in {seconds:.1f} s, {speed:.2f} GB/s"

    with Comparison(own, threads) as comparison:
        while True:
            over = comparison.wait(AGREE_SECONDS)
            failed = comparison.failure is not None
            read, running, failing = dist.sum_over_ranks([comparison.bytes_read, not over, failed])
            if read > before:  # a rank that hangs in a read must not report progress
                before = read
                beat(f"verifying {folder}: {rate(read)}")
            if failing or not running:
                break
            if time.monotonic() - reported >= REPORT_SECONDS:
                reported = time.monotonic()
                logger.info("verifying %s: %s", folder, rate(read))
        failure = comparison.failure
    if not failing:
        message = "verified %s: %s with %d process(es) of %d thread(s)"
        logger.info(message, folder, rate(read), dist.world_size(), threads)
        return
    if isinstance(failure, UnreadableError) and dist.world_size() > 1:
        failure = UnreadableError(f"{failure} (on rank {dist.rank()}, {socket.gethostname()})")
    failures = [decode_failure(text) for text in dist.gather_texts(encode_failure(failure)) if text]
    raise next((failure for failure in failures if isinstance(failure, UnreadableError)), failures[0])


RECORDED = {"batch": "train_batch_size", "dtype": "precision"}
"""Values in meta.json, and the keys that set them."""


def check_same_run(folder: Path, corpus: Corpus, shared: Mapping[str, Any]) -> None:
    """Raise a CheckpointError that lists all differences between the run in `folder` and the configured run.

    `shared` (batch size, dtype, finished stages) is compared with meta.json. Changes of free keys are logged. A run
    that continues a checkpoint of another folder may also change the position method and add norms of queries and keys.
    """
    saved, meta = saved_config(folder, corpus.config), native.read_meta(folder)
    anew, loads = begins_optimizer(corpus.config.checkpoint, folder), is_loaded(corpus.config.checkpoint, folder)
    form = form_keys(saved, corpus.config) if loads else frozenset()
    recorded = {
        key: f"{key} (saved {meta.get(name)!r}, now {shared[name]!r})"
        for name, key in RECORDED.items()
        if name in shared and meta.get(name) != shared[name]
    }  # compared with meta.json, because the saved configuration may not set these keys
    free = FREE_GROUPS | {"optimizer"} if anew else FREE_GROUPS
    problems = differing_run(saved, corpus.config, free, form | recorded.keys())
    if anew:  # all other keys of the optimizer may change
        problems += differing_keys(saved, corpus.config, frozenset(KEYS) - {"lora"})
    if loads:
        problems += [f"{key} ({reason})" for key, reason in weight_changes(saved, corpus.config)]
    problems += differing_data(meta.get("data") or {}, corpus.identity, corpus.sources)
    problems += recorded.values()
    problems += differing_stages(meta.get("stages") or [], shared.get("stages", []))
    if problems:
        stage = "" if loads or not changes_form(saved, corpus.config) else "change the position method in a new stage, "
        raise CheckpointError(
            f"{folder}: cannot be resumed with a different {', '.join(problems)}; "
            f"restore these values, {stage}or start a new run from its weights with finetune=true"
        )
    if dist.is_main():
        for line in differing_keys(saved, corpus.config, ALIASED_KEYS | UNRECORDED_KEYS, FREE_GROUPS - {"schedule"}):
            logger.warning("resuming with a different %s", line)
        step = meta["step"]
        before, after = (_rate(config, step) for config in (saved, corpus.config))
        if before is not None and after is not None and not math.isclose(before, after, rel_tol=1e-6):
            logger.warning("the learning rate of step %d changes from %.4g to %.4g", step + 1, before, after)


def _rate(config: Config, step: int) -> float | None:
    """Return the learning rate after `step` completed steps, or None if the configuration does not determine it."""
    if config.optimizer.lr is None or config.schedule.train_iters is None:
        return None
    stages = config.run_stages()
    return stages[stage_at(stages, step)].learning_rate(step)


def saved_config(folder: Path, wanted: Config) -> Config:
    """Return the configuration in a checkpoint. The files in `imports` are those of `wanted`. Raises the same errors as
    `load_saved_config`.
    """
    return load_saved_config(folder / native.CONFIG, {"imports": wanted.position.imports}, same=True).config


def changes_form(saved: Config, wanted: Config) -> bool:
    """Return whether the two models differ in their position method or in their norms of queries and keys."""
    before, after = saved.flat(), wanted.flat()
    return any(before[key] != after[key] for key in FORM_KEYS)


def is_loaded(keys: CheckpointConfig, folder: Path) -> bool:
    """Return whether the run continues a checkpoint of another folder, which `load` names."""
    return keys.load is not None and not _is_own(keys, folder)


def _is_own(keys: CheckpointConfig, folder: Path) -> bool:
    return keys.save is not None and _real(folder).parent == _real(keys.save)


def begins_optimizer(keys: CheckpointConfig, folder: Path) -> bool:
    """Return whether `no_load_optim` resets the optimizer states when resuming from `folder`. It never resets them
    when resuming from the run's own checkpoints.
    """
    return keys.no_load_optim and not _is_own(keys, folder)


def differing_run(
    saved: Config, wanted: Config, free: frozenset[str] = FREE_GROUPS, free_keys: frozenset[str] = frozenset()
) -> list[str]:
    """Return a line for every key that differs between two runs, except in the groups `free` and in `free_keys`."""
    problems = differing_keys(saved, wanted, FREE_KEYS | ALIASED_KEYS | free_keys, free)
    before, after = saved.optimizer.type, wanted.optimizer.type
    if "optimizer" not in free and OPTIMIZERS[before] is not OPTIMIZERS[after]:
        problems.append(f"optimizer.type (saved {before!r}, now {after!r})")
    return problems


class StageStart(NamedTuple):
    """How a stage continues from a checkpoint.

    Attributes:
        folder: the checkpoint.
        new_optimizer: whether the optimizer states are reset to those before the first step.
        new_losses: whether the loss guard forgets earlier losses, because the length, the data or the position method
            has changed.
        adds_norms: whether the model has norms of queries and keys that are not in the checkpoint.
        counters: the optimizer's counters, which are the argument of `Engine.restored`.
        adds_adapters: whether the stage begins to train adapters, so that the checkpoint has none.
    """

    folder: Path
    new_optimizer: bool
    new_losses: bool
    adds_norms: bool
    counters: dict[str, float]
    adds_adapters: bool = False


def continuation(folder: Path, stage: RunStage[Config]) -> StageStart:
    """Return how `stage` continues from the checkpoint in `folder`. The result is the same on all ranks."""
    meta, saved = native.read_meta(folder, resumable=True), saved_config(folder, stage.config)
    begins, counters = meta["step"] == stage.first, dict(meta["counters"])
    anew = begins_optimizer(stage.config.checkpoint, folder) or (begins and stage.reset_optimizer)
    added = adds_norms(saved.model, stage.config.model)
    if anew:
        counters = {name: value for name, value in counters.items() if name != ADDED_AT} | {STEP: 0.0}
    elif added:
        counters[ADDED_AT] = counters[STEP]
    adapters = stage.config.optimizer.lora is not None and saved.optimizer.lora is None
    return StageStart(folder, anew, begins or changes_form(saved, stage.config), added, counters, adapters)


def quarantine_newer(keys: CheckpointConfig, chosen: ResumePoint) -> None:
    """Move checkpoints in `save` that a later start would prefer over `chosen` to quarantine/: those that are damaged,
    and those from which the run does not continue.

    Unreadable checkpoints stay, because they may be valid; the next start tries them again. Leftovers of interrupted
    saves are removed. Every rank must call this, with the folder locked.

    Raises:
        CheckpointError: a folder cannot be moved or removed.
    """

    def move() -> None:
        if keys.save is None:
            return
        folder = Path(keys.save)
        native.sweep(folder)
        if chosen.folder is None:
            return
        resumed = int(native.read_meta(chosen.folder)["step"])
        unreadable = {_real(path) for path in chosen.unreadable}
        for step in native.begun_steps(folder):
            path = native.step_folder(folder, step)
            if step > resumed and _real(path) not in unreadable:
                logger.warning("%s: moved to %s", path, native.set_aside(path))

    failure = attempt(move, OSError, main_only=True)
    if failure is not None:
        raise CheckpointError(
            f"{keys.save}: checkpoints newer than the one to resume from cannot be moved or removed "
            f"({failure}); fix the permissions, or move them manually"
        ) from failure
