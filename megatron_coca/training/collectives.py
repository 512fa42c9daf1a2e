"""Actions that fail on all ranks together: if one rank fails, all raise an error."""

import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

from megatron_coca.checkpoints import CheckpointError, native
from megatron_coca.checkpoints.files import ServiceError, UnreadableError
from megatron_coca.config import Config
from megatron_coca.support.atomic_write import exclusive_lock
from megatron_coca.training.engine import group as dist
from megatron_coca.training.sinks import UNSAVED, run_folder, unsaved_folder

logger = logging.getLogger(__name__)

KINDS: dict[str, type[CheckpointError]] = {
    kind.__name__: kind for kind in (CheckpointError, UnreadableError, ServiceError)
}
"""Errors that keep their class when they are sent to other ranks."""
Errors = type[Exception] | tuple[type[Exception], ...]
"""Exceptions that count as a failure of an action; others end the process."""


def attempt(action: Callable[[], Any], errors: Errors, main_only: bool = False, group: Any = None) -> Exception | None:
    """Run `action` on every rank, or only on rank 0; return None if it succeeded on all.

    If it failed on any, return this rank's error, or a CheckpointError with the text of another rank's error. `group`
    is the process group for the agreement, by default that of the run.
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
    """Run `action` on rank 0 and return its JSON-serializable result on every rank. Every rank must call it.

    Raises:
        CheckpointError: `action` raised one on rank 0. Every rank raises it, with the same class if that is in `KINDS`.
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
    """Encode an error as text for another rank; empty for None."""
    return "" if failure is None else json.dumps([type(failure).__name__, str(failure)])


def decode_failure(text: str) -> CheckpointError:
    """Decode the text of `encode_failure`, which must not be empty."""
    kind, message = json.loads(text)
    return KINDS.get(kind, CheckpointError)(message)


def require_writable(config: Config) -> None:
    """Create the folders of `save` and `log_dir`, and check that they can be written, so that a run fails at its start
    instead of at its first checkpoint. Every rank must call it.

    Raises:
        CheckpointError: one of them cannot be written.
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
            f"{' or '.join(folders)}: cannot be written ({failure}); choose another folder"
        ) from failure


class FolderLock(ExitStack):
    """The locks of this run on the folder of `save` (None if not set) and on the folders of its figures. Every rank
    must call its methods.

    The locks are released at the end of the `with` block, or when the process ends, even if it is killed.
    """

    def __init__(self, folder: str | None) -> None:
        super().__init__()
        self._unlocked, self._is_first_call = folder, True
        self._held: set[str] = set()

    def choose_log_dir(self, config: Config) -> Config:
        """If the configuration names no folder for figures, return it with a `log_dir` that no other run uses."""
        if config.logging.log_dir is not None or config.checkpoint.save is not None:
            return config
        folder = from_main(self._take_unsaved)
        return config if folder == str(UNSAVED) else config.override({"log_dir": folder})

    def take_figures(self, config: Config) -> None:
        """Lock `log_dir` and `tensorboard_dir`: a second run would set aside or hide the figures of the first.

        Raises:
            CheckpointError: another run writes into one of them, or it cannot be locked.
        """
        keys = config.logging
        given = {"log_dir": str(run_folder(config)), "tensorboard_dir": keys.tensorboard_dir}
        from_main(lambda: self._take_others({key: folder for key, folder in given.items() if folder is not None}))

    def _take_unsaved(self) -> str:
        for number in count(1):
            folder = str(unsaved_folder(number))
            try:
                self._hold(folder, "")
                break
            except CheckpointError as failure:
                if str(failure):  # not a busy lock
                    raise
        if number > 1:
            logger.warning(
                "another run without `save` writes into %s; the figures of this one go to %s", UNSAVED, folder
            )
        return folder

    def _take_others(self, folders: Mapping[str, str]) -> None:
        for key, folder in folders.items():
            if os.path.realpath(folder) not in self._held:
                busy = f"{folder}: another run writes its figures into it; choose another, such as {key}={folder}/NAME"
                self._hold(folder, f"{key}: {busy}")

    def _hold(self, folder: str, busy: str) -> None:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as failure:
            raise CheckpointError(f"{folder}: cannot be written ({failure}); choose another folder") from failure
        self.enter_context(exclusive_lock(Path(folder) / native.LOCK, CheckpointError, busy))
        self._held.add(os.path.realpath(folder))

    def take(self) -> None:
        """Lock the folder if it exists. Call it before reading anything in it, so that no other run changes it
        afterwards, and again after the folder is created.

        Raises:
            CheckpointError: another run is training into the folder, has written into it since the first call, or it
                cannot be locked.
        """
        from_main(self._take)
        self._is_first_call = False

    def _take(self) -> None:
        folder = self._unlocked
        if folder is None or not os.path.isdir(folder):
            return
        busy = f"{folder}: another run is training into this folder; wait for it, or choose another"
        self._hold(folder, busy)
        self._unlocked = None
        if not self._is_first_call and native.begun_steps(Path(folder)):
            raise CheckpointError(
                f"{folder}: another run has written checkpoints into it since this one started; resume that run "
                "with auto_resume=true, or choose another folder"
            )
