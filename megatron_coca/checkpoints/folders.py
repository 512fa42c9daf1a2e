"""Folders that are complete or absent."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_coca.checkpoints import native
from megatron_coca.checkpoints.errors import CheckpointError


def refuse_existing(folder: Path) -> None:
    """Raise a CheckpointError where `folder` exists: what is written anew replaces nothing."""
    if folder.exists():
        raise CheckpointError(f"{folder}: exists already; name a new folder, or remove this one")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill in under a hidden name beside `folder`; at the end it is flushed to disk and renamed, and after
    an exception it is removed.

    Raises:
        CheckpointError: `folder` exists, or cannot be written.
    """
    refuse_existing(folder)
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        for path in (*partial.rglob("*"), partial):
            native.flush(path)
        partial.rename(folder)
        native.flush(folder.parent)
    except OSError as error:
        raise CheckpointError(
            f"{folder}: cannot be written ({error.strerror or error}); name another folder"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
