"""What all ranks do together, and fail at together where it fails on one."""

import json
import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from megatron_coca.atomic_write import exclusive_lock
from megatron_coca.checkpoints import CheckpointError, native
from megatron_coca.checkpoints.errors import UnreadableError
from megatron_coca.config import Config
from megatron_coca.training.engine import group as dist

Errors = type[Exception] | tuple[type[Exception], ...]
"""What counts as a failure of an action; other errors end the process."""


def attempt(
    action: Callable[[], Any], errors: Errors, main_only: bool = False, group: Any = None
) -> tuple[bool, Exception | None]:
    """Run `action` on every rank, or on the first: whether it succeeded on all, and why not.

    The error is that of this rank, or where it has none, a CheckpointError with the text of another one's: all ranks can
    say the same. `group` is the process group that the ranks agree in, by default that of the run.
    """
    failure: Exception | None = None
    try:
        if dist.is_main() or not main_only:
            action()
    except errors as error:
        failure = error
    if dist.everyone_succeeded(failure is None, group):
        return True, None
    texts = dist.gather_texts("" if failure is None else str(failure) or type(failure).__name__, group)
    return False, failure or CheckpointError(next(filter(None, texts)))


def from_main(action: Callable[[], Any]) -> Any:
    """What `action` gives on the first rank, which JSON must be able to hold, on every rank. Every one must call it.

    Raises:
        CheckpointError, UnreadableError: the first rank's `action` has; the same on every rank.
    """
    result, failure = None, None
    if dist.is_main():
        try:
            result = action()
        except CheckpointError as error:
            failure = error
    result, told = json.loads(dist.broadcast_text(json.dumps([result, encode_failure(failure)])))
    if failure is not None:
        raise failure
    if told:
        raise decode_failure(told)
    return result


def encode_failure(failure: CheckpointError | None) -> str:
    """An error as a text, for another rank; an empty one for none."""
    return "" if failure is None else json.dumps([isinstance(failure, UnreadableError), str(failure)])


def decode_failure(text: str) -> CheckpointError:
    """The error that `encode_failure` has made a text of."""
    unreadable, message = json.loads(text)
    return (UnreadableError if unreadable else CheckpointError)(message)


def require_writable(config: Config) -> None:
    """Make the folders of `save`, `save_copy` and `log_dir` and write to them, so that a run that could not fails
    before it trains.

    Every rank must call it.

    Raises:
        CheckpointError: one of them cannot be written.
    """
    keys = config.checkpoint
    folders = [folder for folder in (keys.save, keys.save_copy, config.logging.log_dir) if folder is not None]

    def probe_folders() -> None:
        for folder in folders:
            Path(folder).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as probe:
                probe.write(b"x")

    succeeded, failure = attempt(probe_folders, OSError, main_only=True)
    if not succeeded:
        raise CheckpointError(
            f"{' or '.join(folders)}: cannot be written ({failure or 'the first process says why'}); choose another folder"
        ) from failure


class FolderLocks:
    """Locks on the folders of `save` and `save_copy` (None: there is none) for this run, in which every rank must take
    part. They go with the process, however it ends. Use it as a context manager.
    """

    def __init__(self, *folders: str | None) -> None:
        self._free = [folder for folder in folders if folder is not None]
        self._held = ExitStack()
        self._looked = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.close()

    def take(self) -> None:
        """Lock those of the folders that exist by now. The first call comes before anything in them is looked at, so
        that no other run changes it afterwards; the second once those that were missing are made.

        Raises:
            CheckpointError: another run is training into one of the folders, has begun to since the first call, or a
                folder cannot be locked.
        """
        from_main(self._take)
        self._looked = True

    def _take(self) -> None:
        for folder in [each for each in self._free if os.path.isdir(each)]:
            busy = f"{folder}: another run is training into this folder; wait for it, or choose another"
            self._held.enter_context(exclusive_lock(Path(folder) / native.LOCK, CheckpointError, busy))
            self._free.remove(folder)
            if self._looked and native.begun_steps(Path(folder)):
                raise CheckpointError(
                    f"{folder}: another run has written checkpoints into it since this one started; resume that run with "
                    "auto_resume=true, or choose another folder"
                )
