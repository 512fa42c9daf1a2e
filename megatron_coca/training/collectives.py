"""Actions that fail on all ranks together: if one rank fails, all ranks raise an error."""

import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from typing import Any

from megatron_coca.checkpoints import CheckpointError, native
from megatron_coca.checkpoints.files import ServiceError, UnreadableError
from megatron_coca.config import Config
from megatron_coca.support.errors import why_not_written
from megatron_coca.training.engine import group as dist
from megatron_coca.training.sinks import UNSAVED, metric_folders, run_folder, unsaved_folder
from megatron_coca.work.locks import Busy, HeldLock, exclusive_lock

logger = logging.getLogger(__name__)

KINDS: dict[str, type[CheckpointError]] = {
    kind.__name__: kind for kind in (CheckpointError, UnreadableError, ServiceError)
}
"""Error classes that are preserved when an error is sent to other ranks."""
Errors = type[Exception] | tuple[type[Exception], ...]
"""Exceptions that count as a failure of an action; any other exception ends the process."""


def attempt(action: Callable[[], Any], errors: Errors, main_only: bool = False, group: Any = None) -> Exception | None:
    """Run `action` on every rank, or only on rank 0; return None if it succeeded on all of them.

    If the action failed on this rank, return its error. If it failed only on other ranks, return a CheckpointError with
    the text of the first of their errors.
    The ranks agree on the outcome in the process group `group`, by default the run's group.
    """
    failure: Exception | None = None
    try:
        if dist.is_main() or not main_only:
            action()
    except errors as error:
        failure = error
    if dist.everyone_succeeded(failure is None, group):
        return None
    texts = dist.gather_texts("" if failure is None else str(failure) or type(failure).__name__, group)
    return failure or CheckpointError(next(filter(None, texts)))


def from_main(action: Callable[[], Any]) -> Any:
    """Run `action` on rank 0 and return its JSON-serializable result on every rank. Every rank must call this.

    Raises:
        CheckpointError: `action` raised a CheckpointError on rank 0. Every rank then raises it, with the same class if
            that is one of `KINDS`.
    """
    result, failure = None, None
    if dist.is_main():
        try:
            result = action()
        except CheckpointError as error:
            failure = error
    result, encoded = json.loads(dist.broadcast_text(json.dumps([result, encode_failure(failure)])))
    if failure is not None:
        raise failure
    if encoded:
        raise decode_failure(encoded)
    return result


def encode_failure(failure: CheckpointError | None) -> str:
    """Encode an error as text for another rank; None becomes an empty text."""
    return "" if failure is None else json.dumps([type(failure).__name__, str(failure)])


def decode_failure(text: str) -> CheckpointError:
    """Decode a non-empty text from `encode_failure`."""
    kind, message = json.loads(text)
    return KINDS.get(kind, CheckpointError)(message)


def require_writable(config: Config) -> None:
    """Create the folders `save` and `log_dir` and check that they are writable, so that a run fails at its start and
    not at its first checkpoint. Every rank must call this.

    Raises:
        CheckpointError: one of the folders is not writable.
    """
    keys = config.checkpoint
    folders = [folder for folder in (keys.save, config.logging.log_dir) if folder is not None]

    def probe_folders() -> None:
        for folder in folders:
            Path(folder).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as probe:
                probe.write(b"x")

    failure = attempt(probe_folders, OSError, main_only=True)
    if failure is not None:
        raise CheckpointError(
            f"{' or '.join(folders)}: {why_not_written(failure, 'choose another folder')}"
        ) from failure


LOOK = 1.0
"""Seconds between two checks of a run's folders."""


class FolderLock(ExitStack):
    """This run's locks on the `save` folder (if set) and on the folders for its metrics. Every rank must call the
    methods.

    The locks are released at the end of the `with` block, or when the process ends, even if it is killed.
    """

    def __init__(self, folder: str | None) -> None:
        super().__init__()
        self._unlocked, self._is_first_call = folder, True
        self._held: dict[str, HeldLock] = {}
        self._next_look = 0.0

    def choose_log_dir(self, config: Config) -> Config:
        """If the configuration names no folder for metrics, return a copy with a `log_dir` that no other run uses."""
        if config.logging.log_dir is not None or config.checkpoint.save is not None:
            return config
        folder = from_main(self._take_unsaved)
        return config if folder == str(UNSAVED) else config.override({"log_dir": folder})

    def take_metric_folders(self, config: Config) -> None:
        """Lock the folders for metrics. Otherwise, a second run could move or hide the metrics of this run.

        Raises:
            CheckpointError: another run writes to one of the folders, or a folder cannot be locked.
        """
        given = {"log_dir": str(run_folder(config))} | metric_folders(config)
        from_main(lambda: self._take_others(given))

    def _take_unsaved(self) -> str:
        for number in count(1):
            folder = str(unsaved_folder(number))
            with suppress(Busy):
                self._hold(folder, Busy())
                break
        if number > 1:
            logger.warning(
                "another run without `save` writes to %s; this run writes its metrics to %s", UNSAVED, folder
            )
        return folder

    def _take_others(self, folders: Mapping[str, str]) -> None:
        for key, folder in folders.items():
            if os.path.realpath(folder) not in self._held:
                busy = f"{folder}: in use by another run; choose another folder, such as {key}={folder}/NAME"
                self._hold(folder, f"{key}: {busy}")

    def _hold(self, folder: str, busy: str | Busy) -> None:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as failure:
            raise CheckpointError(f"{folder}: {why_not_written(failure, 'choose another folder')}") from failure
        held = self.enter_context(exclusive_lock(Path(folder) / native.LOCK, CheckpointError, busy))
        self._held[os.path.realpath(folder)] = held

    def is_lost(self) -> bool:
        """Return whether a locked folder was deleted or replaced, so that another run can lock it. Only the rank that
        holds the locks looks at the folders, at most once a second. The ranks need not call this method together.
        """
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + LOOK
        return any(not held.intact() for held in self._held.values())

    def retake(self) -> str:
        """If folders were deleted, create and lock them again, and return a message about them.

        Raises:
            CheckpointError: another run has locked one of them since, or has saved to it.
        """
        return str(from_main(self._retake))

    def _retake(self) -> str:
        lost = [folder for folder, held in self._held.items() if not held.intact()]
        for folder in lost:
            begun = (Path(folder) / native.LOCK).exists()  # another run began here; if it has ended, the lock is free
            busy = f"{folder}: was deleted while this run was using it, and another run has begun there"
            self._hold(folder, f"{busy}; give each run its own folder")
            if begun and native.begun_steps(Path(folder)):
                raise CheckpointError(f"{busy} and saved checkpoints; give each run its own folder")
        return f"{', '.join(lost)}: deleted while this run was using it; created again, but empty"

    def take(self) -> None:
        """Lock the `save` folder if it exists. Call this before reading anything in the folder, so that no other run
        changes its content afterwards, and again after the folder has been created.

        Raises:
            CheckpointError: another run uses the folder or has written to it since the first call, or the folder
                cannot be locked.
        """
        from_main(self._take)
        self._is_first_call = False

    def _take(self) -> None:
        folder = self._unlocked
        if folder is None or not os.path.isdir(folder):
            return
        busy = f"{folder}: another run is saving to this folder; wait for its end, or choose another folder"
        self._hold(folder, busy)
        self._unlocked = None
        if not self._is_first_call and native.begun_steps(Path(folder)):
            raise CheckpointError(
                f"{folder}: another run has written checkpoints to this folder since this run started; resume that run "
                "with auto_resume=true, or choose another folder"
            )
