"""Choosing the checkpoint from which a run resumes.

`candidates` lists the checkpoints, `first_valid` verifies them on all ranks and chooses one, `check_same_run` compares
it with the configuration, and `quarantine_newer` moves newer checkpoints away. If there is no checkpoint to resume
from, `initial_model.py` builds the model.
"""

import logging
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
from megatron_coca.config import COMPUTE_KEYS, CheckpointConfig, Config, load_saved_config
from megatron_coca.training.collectives import attempt, decode_failure, encode_failure, from_main
from megatron_coca.training.corpus import Corpus, differing_data
from megatron_coca.training.engine import group as dist
from megatron_coca.training.launch import threads_per_process
from megatron_coca.training.opened_stages import differing_stages
from megatron_coca.training.optimizer import OPTIMIZERS

logger = logging.getLogger(__name__)

FREE_GROUPS = frozenset({"schedule", "data", "batch", "parallel", "checkpoint", "logging", "launch", "faults"})
FREE_KEYS = COMPUTE_KEYS | {"optimizer.params.lr"}
"""Keys that may change when a run is resumed. For data and batch, the values in meta.json are compared instead. The
saved state does not depend on the parallel layout.
"""
ALIASED_KEYS = frozenset({"optimizer.type"})
"""Keys for which several values mean the same; the meanings are compared."""
AGREE_SECONDS, REPORT_SECONDS = 1.0, 30.0
"""Intervals in seconds at which ranks agree on the progress of a verification, and at which they log it."""
MOST_THREADS = 16
"""Maximum number of verification threads per process. More threads do not read faster."""


def _real(path: str | Path) -> Path:
    """Resolve links like `Path.resolve`, which raises an error for a loop of links before Python 3.13."""
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


class Choice(NamedTuple):
    """The checkpoint from which a run resumes (None to start from step 0), and the preferred checkpoints that could not
    be read. They may be valid, so they must not be moved.
    """

    folder: Path | None
    unreadable: tuple[Path, ...] = ()


def first_valid(folders: Sequence[Path], beat: Callable[[str], None] = lambda reached: None) -> Choice:
    """Choose the first of `folders` that is valid and can be resumed, and log why the preferred ones are not.

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
            return Choice(folder, tuple(unreadable))
        except CheckpointError as failure:
            last = failure
            if isinstance(failure, UnreadableError):
                unreadable[folder] = failure
            if dist.is_main() and folder is not folders[-1]:
                logger.warning("%s; falling back to the previous checkpoint", failure)
    if last is None:
        return Choice(None)
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

    The ranks periodically add up the bytes read, so that a rank that is done early still reports progress to the
    watchdog while others read.
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


def check_same_run(folder: Path, corpus: Corpus, shared: Mapping[str, Any]) -> None:
    """Raise a CheckpointError that lists all differences between the run in `folder` and the configured run.

    `shared` (batch size, dtype, finished stages) is compared with meta.json. Changes of free keys are logged.
    """
    own, meta = {"imports": corpus.config.position.imports}, native.read_meta(folder)
    saved = load_saved_config(folder / native.CONFIG, own, same=True).config
    anew = begins_optimizer(corpus.config.checkpoint, folder)
    problems = differing_run(saved, corpus.config, FREE_GROUPS | {"optimizer"} if anew else FREE_GROUPS)
    problems += differing_data(meta.get("data") or {}, corpus.identity, corpus.sources)
    problems += [
        f"{key} (saved {meta.get(key)!r}, now {value!r})"
        for key, value in shared.items()
        if meta.get(key) != value and key != "stages"
    ]
    problems += differing_stages(meta.get("stages") or [], shared.get("stages", []))
    if problems:
        raise CheckpointError(
            f"{folder}: cannot be resumed with a different {', '.join(problems)}; "
            "restore these values, or start a new run from its weights with finetune=true"
        )
    if dist.is_main():
        for line in differing_keys(saved, corpus.config, ALIASED_KEYS, FREE_GROUPS - {"schedule"}):
            logger.warning("resuming with a different %s", line)


def begins_optimizer(keys: CheckpointConfig, folder: Path) -> bool:
    """Return whether `no_load_optim` resets the optimizer states when resuming from `folder`. It does not for the run's
    own checkpoints.
    """
    own = keys.save is not None and _real(folder).parent == _real(keys.save)
    return keys.no_load_optim and not own


def differing_run(saved: Config, wanted: Config, free: frozenset[str] = FREE_GROUPS) -> list[str]:
    """Return a line for every key that differs between two runs, except in the `free` groups."""
    problems = differing_keys(saved, wanted, FREE_KEYS | ALIASED_KEYS, free)
    before, after = saved.optimizer.type, wanted.optimizer.type
    if "optimizer" not in free and OPTIMIZERS[before] is not OPTIMIZERS[after]:
        problems.append(f"optimizer.type (saved {before!r}, now {after!r})")
    return problems


def quarantine_newer(keys: CheckpointConfig, chosen: Choice) -> None:
    """Move the checkpoints in `save` that a later start would prefer over `chosen` to quarantine/.

    They are damaged, or the run does not continue from them. Unreadable checkpoints stay, because they may be valid;
    the next start tries them again. Leftovers of interrupted saves are removed. Every rank must call this, with the
    folder locked.

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
