"""Which files a path stands for."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_coca.data.errors import DataError
from megatron_coca.data.readers.formats import READABLE, is_corpus_file, kind_of

_STATE = "state.json"
_SAVED = {_STATE, "dataset_info.json"}


def corpus_files(paths: Sequence[Path]) -> list[Path]:
    """The files that ``paths`` stand for: files as they are, folders as their readable files in sorted order.

    Links to folders are followed, hidden files and folders passed over. Of a folder that ``datasets`` saved, the files
    that its ``state.json`` lists.

    Raises:
        DataError: a missing path, a file of an unknown type, a folder that cannot be read or holds no readable file.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise DataError(f"{path}: no such file or folder. Check the path of the corpus.")
        found = sorted(_files(path)) if path.is_dir() else [path]
        if not found:
            raise DataError(f"{path}: the folder holds no readable file ({READABLE}).")
        if kind_of(found[0].name) is None:
            raise DataError(f"{path}: unknown type of file. Readable are {READABLE}.")
        files += found
    return files


def is_saved_dataset(folder: Path) -> bool:
    """Whether ``datasets`` saved one data set in this folder."""
    return all((folder / name).is_file() for name in _SAVED)


def _files(folder: Path) -> Iterator[Path]:
    seen = {os.path.realpath(folder)}
    for at, folders, names in os.walk(folder, followlinks=True, onerror=_unreadable):
        # A link may lead to a folder above it, or to one that is read anyway; the folder itself goes before it.
        entered: dict[str, str] = {}
        for name in sorted(folders, key=lambda name: (os.path.islink(os.path.join(at, name)), name)):
            real = os.path.realpath(os.path.join(at, name))
            if not name.startswith(".") and real not in seen:
                entered.setdefault(real, name)
        seen |= entered.keys()
        folders[:] = entered.values()
        here = _saved_files(Path(at)) if set(names) >= _SAVED else filter(is_corpus_file, names)
        yield from (Path(at, name) for name in here)  # one that is missing is reported when it is opened


def _saved_files(folder: Path) -> list[str]:
    """Names of a saved data set's files; those that ``datasets`` left beside them as a cache hold rows again."""
    try:
        return [entry["filename"] for entry in json.loads((folder / _STATE).read_text())["_data_files"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(f"{folder / _STATE}: cannot be read ({error!r}). Save the data set again.") from error


def _unreadable(error: OSError) -> None:
    raise DataError(f"{error.filename}: the folder cannot be read ({error.strerror}). Check its permissions.")
