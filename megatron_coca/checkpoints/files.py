"""Errors, JSON, file lists and checksums of checkpoint files.

The checksum is sha256, which runs at 1.8 GB/s on one core with SHA instructions. Files are hashed in several threads,
because hashlib releases the GIL. The checksum of the weights file also identifies a checkpoint in evaluation results.
"""

import hashlib
import json
import os
import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Self

from megatron_coca.support.errors import UNAVAILABLE, InputError
from megatron_coca.support.regular_files import read_regular

BLOCK = 1 << 20
"""Number of bytes per read."""


class CheckpointError(InputError):
    """A checkpoint is missing or damaged, has an unknown format, or does not fit the model.

    The message names the file and the remedy.
    """


class UnreadableError(CheckpointError):
    """A file cannot be read (I/O error, missing permission). The checkpoint may be valid: do not move or delete it."""

    @classmethod
    def of(cls, path: Path, error: OSError) -> "UnreadableError":
        """Return the error for `path`, with the file system's reason."""
        reason = error.strerror or str(error)
        return cls(f"{path}: cannot be read ({reason}); check the disk and the permissions (nothing was changed)")


class ServiceError(CheckpointError):
    """An object store does not answer. The same command will work when the store is available again."""

    status = UNAVAILABLE


def describe(path: Path) -> dict[str, Any]:
    """Return the manifest entry of a file: its size in bytes and its sha256."""
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def files(folder: Path) -> list[str]:
    """Return the sorted relative paths of all files and symbolic links below a folder.

    Raises OSError if a folder cannot be listed.
    """

    def fail(error: OSError) -> None:
        raise error

    names = []
    for parent, folders, entries in os.walk(folder, onerror=fail):
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        names += [str(Path(parent, name).relative_to(folder)) for name in (*entries, *links)]
    return sorted(names)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON mapping. Raises CheckpointError, or UnreadableError if the file system fails."""
    try:
        content = read_regular(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"{path}: not found; copy the file again") from error
    except OSError as error:
        raise UnreadableError.of(path, error) from error
    return parse_json(content, path)


def read_json_if_present(path: Path) -> dict[str, Any]:
    """Read a JSON mapping as `read_json` does, but return an empty mapping if the file does not exist."""
    return read_json(path) if path.is_file() else {}


def parse_json(content: bytes, source: str | Path) -> dict[str, Any]:
    """Return the JSON mapping in `content`. Raises CheckpointError, which names `source`."""
    try:
        mapping = json.loads(content, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source}: not valid JSON ({error}); copy the file again") from error
    if not isinstance(mapping, dict):
        raise CheckpointError(f"{source}: not a JSON mapping; copy the file again")
    return mapping


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON mapping. Raises ValueError for a repeated key; `json` would keep only its last value."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        ((repeated, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {repeated!r:.80} appears twice")
    return mapping


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a mapping as indented JSON."""
    path.write_bytes(json_bytes(content))


def json_bytes(content: Mapping[str, Any]) -> bytes:
    """Return a mapping as the bytes of an indented JSON file."""
    return (json.dumps(content, indent=1) + "\n").encode()


class Comparison:
    """Verifies the sha256 of files in threads. The threads stop when this context manager exits.

    Attributes:
        bytes_read: number of bytes read so far.
    """

    def __init__(self, expected: Mapping[Path, str], threads: int) -> None:
        """`expected` maps each file to its hexadecimal digest, with the largest file first."""
        self.bytes_read = 0
        self._expected, self._lock, self._stop = dict(expected), threading.Lock(), threading.Event()
        self._pool = ThreadPoolExecutor(max(1, min(threads, len(expected))), "verification")
        self._futures: list[Future[None]] = []

    def __enter__(self) -> Self:
        self._futures = [self._pool.submit(self._compare, path, digest) for path, digest in self._expected.items()]
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait at most `seconds`. Return whether all files are verified or one has failed."""
        if not self._futures:
            return True
        return not wait(self._futures, seconds, FIRST_EXCEPTION).not_done or self.failure is not None

    @property
    def failure(self) -> CheckpointError | None:
        """The first error, or None: UnreadableError for an unreadable file, CheckpointError for changed content."""
        for future in self._futures:
            error = future.exception() if future.done() and not future.cancelled() else None
            if isinstance(error, CheckpointError):
                return error
            if error is not None:
                raise error
        return None

    def _compare(self, path: Path, expected: str) -> None:
        digest, block = hashlib.sha256(), memoryview(bytearray(BLOCK))
        try:
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(block):
                    digest.update(block[:count])
                    with self._lock:
                        self.bytes_read += count
                    if self._stop.is_set():
                        return
        except OSError as error:
            raise UnreadableError.of(path, error) from error
        if digest.hexdigest() != expected:
            raise CheckpointError(
                f"{path}: content has changed since the checkpoint was written (sha256 differs); copy the file "
                "again, or use another step"
            )
