"""Shards on object stores. The index files and the tokenizer are copied to the host; tokens are read as byte ranges
when samples need them.

The order of a run is a shuffle of the whole shard, so the samples of a step come from all over the shard. A block cache
would fetch megabytes for each sample of a few kilobytes. A full copy would occupy the whole size of the shards on the
disk of every host. Instead, the threads of the loader read ahead, and request exactly the tokens of a step all at once.
"""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np

from megatron_coca.data.errors import DataError
from megatron_coca.data.readers.remote import DataFiles
from megatron_coca.support.atomic_write import write_file
from megatron_coca.support.plain_text import masked
from megatron_coca.support.regular_files import read_regular
from megatron_coca.support.remote_files import is_url, local_folder, not_read
from megatron_coca.work.locks import exclusive_lock

SMALL_BYTES = 256 << 20
"""Files next to the shards, such as the manifest, are copied if they have at most this many bytes."""
LONGEST_NOTE = 1 << 16
NOTE = ".remote"
"""Suffix of a note, the local JSON file `<prefix>.bin.remote`. It describes the tokens of a shard on a store."""
_NAMED: dict[Path, str] = {}
"""Maps the path of each note that this process wrote to the URL that the user gave. The address inside a note is never
used, because the note may have come with a downloaded folder.
"""


def local_prefix(prefix: str, root: str | Path = "data") -> str:
    """Return the local prefix of a shard. If the shard is on a store, everything except its tokens is first copied to a
    folder below `root`/remote.

    All processes of a host share this copy. A file is fetched again if it has changed on the store. Raises `DataError`
    if a file is missing on the store.
    """
    if not is_url(prefix):
        return prefix
    url, _, name = prefix.rpartition("/")
    folder = _copied_folder(url, Path(root, "remote"))
    files = DataFiles(url)
    with exclusive_lock(folder / ".lock", DataError, busy=None):
        _copy(files, f"{name}.idx", folder)
        if (facts := files.facts(f"{name}.bin")) is None:
            raise _missing(f"{prefix}.bin")
        note = folder / f"{name}.bin{NOTE}"
        write_file(note, json.dumps({"url": masked(url), "size": facts[0]}))
        _NAMED[note.resolve()] = url
    return str(folder / name)


@functools.cache
def _copied_folder(url: str, cache: Path) -> Path:
    """Copy the small files of a folder of shards and return the local folder. A process copies a folder only once."""
    folder, files = local_folder(url, cache, DataError), DataFiles(url)
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(folder / ".lock", DataError, busy=None):
        for name in files.names():
            facts = files.facts(name) if "/" not in name and not name.endswith((".bin", ".idx")) else None
            if facts is not None and facts[0] <= SMALL_BYTES:
                _copy(files, name, folder)
    return folder


def _copy(files: DataFiles, name: str, folder: Path) -> None:
    """Copy a file unless the copy is up to date. A file next to the copy, `<name>.state`, records the state of the
    object at the time of the copy.
    """
    if (facts := files.facts(name)) is None:
        raise _missing(f"{files.url}/{name}")
    state, local, known = json.dumps(facts), folder / name, folder / f"{name}.state"
    if local.is_file() and known.is_file() and known.read_text(encoding="utf-8") == state:
        return
    known.unlink(missing_ok=True)
    files.get(name, local)
    if local.stat().st_size != facts[0]:
        raise DataError(f"{files.url}/{name}: the file changed while it was copied; run the same command again")
    write_file(known, state)


def _missing(url: str) -> DataError:
    return DataError(f"{url}: no such object; prepare the corpus into this folder, or correct the path")


class RemoteTokens:
    """The tokens of a shard on a store. The local file `<prefix>.bin.remote` describes them."""

    def __init__(self, note: Path, dtype: np.dtype) -> None:
        """Open the tokens. Raises `DataError` unless `local_prefix` wrote the note in this process."""
        facts, url = _read_note(note), _NAMED.get(note.resolve())
        if url is None:
            address = f"{facts.get('url')}/{note.name.removesuffix('.bin' + NOTE)}"
            raise DataError(f"{note}: {not_read([address], 'name it instead of the local path')}")
        self._files, self._name, self._dtype = DataFiles(url), note.name.removesuffix(NOTE), dtype
        self._size: int = facts["size"]

    @property
    def prefix(self) -> str:
        return masked(f"{self._files.url}/{self._name.removesuffix('.bin')}")

    def __len__(self) -> int:
        return self._size // self._dtype.itemsize

    def windows(self, starts: np.ndarray, count: int) -> np.ndarray:
        """Read `count` tokens from each of `starts`, int64 [n]. Returns [n, count] in the shard's dtype.

        Raises `DataError` if the object on the store has become shorter.
        """
        begins = starts * self._dtype.itemsize
        ends = begins + count * self._dtype.itemsize
        read = self._files.read_ranges(self._name, begins.tolist(), ends.tolist())
        if any(len(piece) != count * self._dtype.itemsize for piece in read):
            raise DataError(
                f"{self._files.url}/{self._name}: the file was truncated while it was in use; upload it again"
            )
        return np.frombuffer(b"".join(read), dtype=self._dtype).reshape(len(read), count)


def remote_size(bin_path: Path) -> int | None:
    """Return the size of the tokens in bytes if they are on a store, or None if they are local."""
    note = bin_path.with_name(bin_path.name + NOTE)
    return _read_note(note)["size"] if note.is_file() else None


def _read_note(note: Path) -> dict[str, Any]:
    try:
        facts = json.loads(read_regular(note, LONGEST_NOTE))
        if not (isinstance(facts, dict) and isinstance(facts.get("size"), int)):
            raise ValueError("no size")
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"{note}: cannot be read ({error}); remove the file, and name the address of the shard instead"
        ) from error
    return facts
