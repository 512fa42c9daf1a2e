"""Errors, JSON, file lists and checksums of checkpoint files.

The checksum is sha256: 1.8 GB/s on one core with SHA instructions. Several threads compute it, because hashlib releases
the GIL. The checksum of the weights file also identifies a checkpoint in evaluation results.
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
"""Bytes per read."""


class CheckpointError(InputError):
    """A checkpoint is missing, damaged, in an unknown format or of another architecture.

    The message names the file and the remedy.
    """


class UnreadableError(CheckpointError):
    """A file cannot be read (I/O error, permission). The checkpoint may be valid: do not move or delete it."""

    @classmethod
    def of(cls, path: Path, error: OSError) -> "UnreadableError":
        """Return the error for `path` with the reason that the file system gave."""
        reason = error.strerror or str(error)
        return cls(f"{path}: cannot be read ({reason}); check the disk and the permissions (nothing was changed)")


class ServiceError(CheckpointError):
    """An object store does not answer. The input is valid: the same command works when the store is back."""

    status = UNAVAILABLE


def describe(path: Path) -> dict[str, Any]:
    """Return the entry of a file in a manifest: size in bytes and sha256."""
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def files(folder: Path) -> list[str]:
    """Return the sorted relative names of all files and symbolic links below a folder.

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
        raise CheckpointError(f"{path}: cannot be read as JSON ({error}); copy the file again") from error
    except OSError as error:
        raise UnreadableError.of(path, error) from error
    return parse_json(content, path)


def read_json_if_present(path: Path) -> dict[str, Any]:
    """As `read_json`, but return an empty mapping if there is no such file."""
    return read_json(path) if path.is_file() else {}


def parse_json(content: bytes, source: str | Path) -> dict[str, Any]:
    """Return the JSON mapping in `content`. Raises CheckpointError, which names `source`."""
    try:
        mapping = json.loads(content, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source}: cannot be read as JSON ({error}); copy the file again") from error
    if not isinstance(mapping, dict):
        raise CheckpointError(f"{source}: is not a JSON mapping; copy the file again")
    return mapping


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON mapping. Raises ValueError for a repeated key, of which json would keep the last value."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        ((repeated, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {repeated!r:.80} is given twice")
    return mapping


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a mapping as indented JSON."""
    path.write_text(json.dumps(content, indent=1) + "\n")


class Comparison:
    """Compares files with their sha256 in threads. The threads stop when this context manager exits.

    Attributes:
        bytes_read: bytes read so far.
    """

    def __init__(self, expected: Mapping[Path, str], threads: int) -> None:
        """`expected` has the hexadecimal digest of each file, the largest file first."""
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
        """Wait at most `seconds`. Return whether all files are compared or one has failed."""
        if not self._futures:
            return True
        return not wait(self._futures, seconds, FIRST_EXCEPTION).not_done or self.failure is not None

    @property
    def failure(self) -> CheckpointError | None:
        """The first error: UnreadableError if a file cannot be read, CheckpointError if its content differs."""
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
                f"{path}: its content has changed since the checkpoint was written (sha256 differs); copy it "
                "again, or use another step"
            )
