"""Which files a path stands for, and which it does not."""

import json
import os
import stat
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron_coca.data.errors import DataError
from megatron_coca.data.readers.kinds import READABLE, kind_of, unknown_type, unread_reason

_STATE = "state.json"
_SAVED = {_STATE, "dataset_info.json"}
_SPLITS = "dataset_dict.json"

Listing = tuple[list[Path], Counter[str]]
"""Files to be read, in sorted order, and those that are not, by the reason."""


def corpus_files(paths: Sequence[Path]) -> list[Path]:
    """The files that ``paths`` stand for: files as they are, folders as their readable files in sorted order.

    Links to folders are followed, hidden files and folders passed over. Of a folder that ``datasets`` saved, the files
    that its ``state.json`` lists.

    Raises:
        DataError: a missing path, a file of an unknown type, a folder that cannot be read, holds no readable file, or
            was saved with several splits.
    """
    return [file for path in paths for file in _listing(Path(path))[0]]


def unread_files(paths: Sequence[Path]) -> Counter[str]:
    """Files in the folders among ``paths`` that ``corpus_files`` passes over, by the reason."""
    return sum((_listing(Path(path))[1] for path in paths), Counter[str]())


def is_saved_dataset(folder: Path) -> bool:
    """Whether ``datasets`` saved one data set in this folder."""
    return all((folder / name).is_file() for name in _SAVED)


def saved_splits(folder: Path) -> list[str]:
    """The splits that ``datasets`` saved in this folder; none where it saved no ``DatasetDict``."""
    listing = folder / _SPLITS
    if not listing.is_file():
        return []
    try:
        return list(json.loads(listing.read_text())["splits"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(f"{listing}: cannot be read ({error!r}). Save the data set again.") from error


def _listing(path: Path) -> Listing:
    if not path.exists():
        raise DataError(f"{path}: no such file or folder. Check the path of the corpus.")
    if path.is_dir():
        files, unread = _walked(path)
        if not files:
            what = "".join(f"; {count} {reason}" for reason, count in sorted(unread.items(), key=_rank)[:3])
            raise DataError(f"{path}: the folder holds no readable file ({READABLE}){what}.")
        return sorted(files), unread
    if kind_of(path.name) is None:
        raise DataError(f"{path}: {unknown_type(path.name)}")
    return [path], Counter()


def _rank(counted: tuple[str, int]) -> tuple[int, str]:
    return -counted[1], counted[0]


def _walked(folder: Path) -> Listing:
    files, unread = list[Path](), Counter[str]()
    seen = {os.path.realpath(folder)}
    for at, folders, names in os.walk(folder, followlinks=True, onerror=_unreadable):
        unread["hidden folder"] += sum(name.startswith(".") for name in folders)
        folders[:] = _entered(at, folders, seen)
        found, passed_over = _told_apart(Path(at), names)
        files += found
        unread.update(passed_over)
    return files, +unread


def _entered(at: str, folders: Iterable[str], seen: set[str]) -> list[str]:
    """The folders to go into. A link may lead to one above it, or to one that is read anyway, which goes before it."""
    entered: dict[str, str] = {}
    for name in sorted(folders, key=lambda name: (os.path.islink(os.path.join(at, name)), name)):
        real = os.path.realpath(os.path.join(at, name))
        if not name.startswith(".") and real not in seen:
            entered.setdefault(real, name)
    seen |= entered.keys()
    return list(entered.values())


def _told_apart(folder: Path, names: list[str]) -> Listing:
    if _SPLITS in names and len(splits := saved_splits(folder)) > 1:
        raise DataError(
            f"{folder}: holds the splits {', '.join(splits)} of a data set, which would be mixed. Name the folder of "
            "one, or take the reader huggingface with the option split."
        )
    if set(names) >= _SAVED:
        files = _saved_files(folder)  # one that is missing is reported when it is opened
        others = set(names).difference(files)
        return [folder / file for file in files], Counter(
            unread_reason(name) or "beside a saved data set" for name in others
        )
    reasons = {name: unread_reason(name) or _irregular(os.path.join(folder, name)) for name in names}
    files = [name for name, reason in reasons.items() if reason is None]
    return [folder / file for file in files], Counter(filter(None, reasons.values()))


def _irregular(path: str) -> str | None:
    """Why this is no file to be read; None for one that is, and for one that only opening can tell of."""
    try:
        return None if stat.S_ISREG(os.stat(path).st_mode) else "not a regular file"
    except OSError:
        return "dangling link" if os.path.islink(path) else None


def _saved_files(folder: Path) -> list[str]:
    """Names of a saved data set's files; those that ``datasets`` left beside them as a cache hold rows again."""
    try:
        return [entry["filename"] for entry in json.loads((folder / _STATE).read_text())["_data_files"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(f"{folder / _STATE}: cannot be read ({error!r}). Save the data set again.") from error


def _unreadable(error: OSError) -> None:
    raise DataError(f"{error.filename}: the folder cannot be read ({error.strerror}). Check its permissions.")
