"""Resolve the paths of a corpus to files, and file names to formats."""

import json
import os
import re
import stat
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import NoReturn

from megatron_coca.data.errors import DataError
from megatron_coca.data.readers.columnar_files import TABLE_FORMATS
from megatron_coca.data.readers.compression import COMPRESSIONS
from megatron_coca.data.readers.remote import DataFiles, opened
from megatron_coca.data.readers.source import is_utf8, printable
from megatron_coca.data.readers.streams import JSON_LINES, StreamFormat
from megatron_coca.support.regular_files import inside, read_regular
from megatron_coca.support.remote_files import is_url

TEXT_SUFFIXES = (".txt", ".text", ".md")
# A file with only a compression suffix ("wiki.zst") is read as JSON lines, the usual content of such files.
_BARE = ""
FORMATS: dict[str, StreamFormat] = dict.fromkeys((".jsonl", ".json", ".ndjson", _BARE), JSON_LINES)
_EXTRACT = re.compile(r"wiki_\d\d+")  # output files of WikiExtractor --json
ARCHIVE = ".tar"
READABLE = (
    ".jsonl, .json, .ndjson, .txt, .text, .md, wiki_00 (WikiExtractor --json) or .tar, each plain or with .gz, .zst, "
    ".bz2 or .xz; .parquet, .arrow"
)
_TABLE = "convert the table to .jsonl or .parquet, for instance with pandas"
_CONVERSIONS = {
    **dict.fromkeys((".csv", ".tsv", ".xls", ".xlsx"), _TABLE),
    **dict.fromkeys((".zip", ".7z", ".rar"), "unpack the archive"),
    **dict.fromkeys((".pdf", ".html", ".htm", ".epub", ".doc", ".docx"), "convert the document to .txt"),
}
"""What a user should do with files of known types that no reader supports. Renaming these files would not help."""
_SHORT = {".tgz": ".tar.gz", ".tbz2": ".tar.bz2", ".txz": ".tar.xz", ".tzst": ".tar.zst"}
# The names of files that describe the data next to them. If such a file were read, it would become a document or be
# reported as damaged.
_DESCRIPTION = re.compile(
    r"readme\.md|dataset_dict\.json|dataset_infos?\.json|state\.json|(.*[-_.])?(md5|sha\d+)sums?\.txt"
)
_MISNAMED = "name that is not UTF-8"
REPOSITORIES = "to read the source code in Git repositories, use --reader repositories (`reader` of a recipe's source)"
_STATE = "state.json"
_SAVED = {_STATE, "dataset_info.json"}
_SPLITS = "dataset_dict.json"


@dataclass(frozen=True)
class FileKind:
    """The format of a file, as determined by its name.

    Attributes:
        form: suffix that stands for the format of the content. It is in `FORMATS`, `TEXT_SUFFIXES` or `TABLE_FORMATS`,
            or is `ARCHIVE`.
        compression: a suffix in `COMPRESSIONS`, or empty.
    """

    form: str
    compression: str


def kind_of(name: str) -> FileKind | None:
    """Return the format of a file, determined by the end of its name (case-insensitive), or None if it is unknown."""
    base, compression = _split_name(name)
    inner = ".jsonl" if _EXTRACT.fullmatch(base) else PurePath(base).suffix
    if inner in TABLE_FORMATS:
        return None if compression else FileKind(inner, "")
    if inner == _BARE and not compression:
        return None
    return FileKind(inner, compression) if inner in (*FORMATS, *TEXT_SUFFIXES, ARCHIVE) else None


def unread_reason(name: str) -> str | None:
    """Return the reason to skip a file with this name in a folder or an archive, or None to read the file."""
    base = PurePath(name).name
    if base.startswith("."):
        return "hidden file"
    if _DESCRIPTION.fullmatch(base.lower()):
        return "description of the data"
    return None if kind_of(base) else f"not a readable file ({_ending(base)})"


def unknown_type(name: str) -> str:
    """Return the error message for a file name without a known format."""
    base, compression = _split_name(name)
    example = f": {base}.jsonl{compression}, for example" if compression else ""
    if ".xml" in base:
        return "XML is not supported; convert a dump with WikiExtractor --json, or use wikimedia/wikipedia from the Hub"
    if conversion := _CONVERSIONS.get(PurePath(base).suffix):
        return f"unsupported file type ({_ending(name)}); {conversion} (supported: {READABLE})"
    return (
        f"unknown file type ({_ending(name)}); rename the file to a suffix that matches its content "
        f"({READABLE}){example}"
    )


def _split_name(name: str) -> tuple[str, str]:
    """Return (lower-case file name without folder and compression suffix, compression suffix or an empty string)."""
    lower = PurePath(name).name.lower()
    lower = next((lower.removesuffix(short) + long for short, long in _SHORT.items() if lower.endswith(short)), lower)
    compression = PurePath(lower).suffix if PurePath(lower).suffix in COMPRESSIONS else ""
    return lower.removesuffix(compression), compression


def _ending(name: str) -> str:
    """Return the suffix of a file name, for messages and counts. Numbers and sentences after a dot do not count as a
    suffix, because every file could have a different one.
    """
    base, compression = _split_name(name)
    suffix = PurePath(base).suffix
    return (suffix if suffix[1:2].isalpha() and len(suffix) <= 9 else "") + compression or "no known ending"


def corpus_files(paths: Sequence[Path | str]) -> list[Path | str]:
    """Resolve paths and URLs to files and objects. A folder resolves to all readable files in it, in sorted order.

    Hidden files, hidden folders and links to folders are skipped. A folder saved by `datasets` resolves to the files
    listed in its `state.json`. Raises `DataError` for a missing path, for a file of an unknown type, and for a folder
    that cannot be read, contains no readable file, or was saved with several splits.
    """
    return [file for path in paths for file in _listed(path)[0]]


def unread_files(paths: Sequence[Path | str]) -> Counter[str]:
    """Count, by reason, the files that `corpus_files` skips in the folders among `paths`."""
    return sum((_listed(path)[1] for path in paths), Counter[str]())


def is_saved_dataset(folder: Path) -> bool:
    """Return True if `datasets` saved a single data set in this folder."""
    return all((folder / name).is_file() for name in _SAVED)


def holds_repository(path: Path | str) -> bool:
    """Return True if a local folder or one of its subfolders is a Git repository."""
    if is_url(path) or not Path(path).is_dir():
        return False
    return any((folder / ".git").exists() for folder in (Path(path), *Path(path).glob("*/")))


def saved_splits(folder: Path) -> list[str]:
    """Return the splits that `datasets` saved in this folder, or an empty list if it saved no `DatasetDict` there."""
    listing = folder / _SPLITS
    if not listing.is_file():
        return []
    try:
        return list(json.loads(read_regular(listing))["splits"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise DataError(f"{listing}: cannot be read ({error!r}); save the data set again") from error


def _listed(path: Path | str) -> tuple[Sequence[Path | str], Counter[str]]:
    """Return (files to read, number of skipped files by reason)."""
    return _remote_listing(str(path)) if is_url(path) else _listing(Path(path))


def _remote_listing(url: str) -> tuple[list[str], Counter[str]]:
    files, name = opened(url)
    if not url.endswith("/") and files.facts(name) is not None:
        if kind_of(name) is None:
            raise DataError(f"{url}: {unknown_type(name)}")
        return [url], Counter()
    hidden = re.compile(r"(.*/)?\.")
    reasons = {
        each: "hidden file" if hidden.match(each) else unread_reason(each) for each in sorted(DataFiles(url).names())
    }
    unread = Counter(reason for reason in reasons.values() if reason is not None)
    found = [f"{url.rstrip('/')}/{each}" for each, reason in reasons.items() if reason is None]
    if not found:
        raise DataError(f"{url}: no such object, and no readable file ({READABLE}) below this URL; check the path")
    return found, unread


def _listing(path: Path) -> tuple[list[Path], Counter[str]]:
    """Return (files to read, number of skipped files by reason)."""
    if not is_utf8(str(path)):
        raise DataError(f"{printable(str(path))}: the name is not valid UTF-8; rename the file or folder")
    if not path.exists():
        raise DataError(f"{path}: no such file or folder; check the path of the corpus")
    if not path.is_dir():
        if kind_of(path.name) is None:
            raise DataError(f"{path}: {unknown_type(path.name)}")
        return [path], Counter()
    files, unread = list[Path](), Counter[str]()
    for folder, folders, names in os.walk(path, onerror=_unreadable):
        entered = []
        for name in folders:
            if name.startswith("."):
                unread["hidden folder"] += 1
            elif os.path.islink(os.path.join(folder, name)):
                unread["link to a folder"] += 1
            elif not is_utf8(name):
                unread[_MISNAMED] += 1
            else:
                entered.append(name)
        folders[:] = entered
        for name, reason in _reasons(Path(folder), names).items():
            if reason is None:
                files.append(Path(folder) / name)
            else:
                unread[reason] += 1
    if not files:
        most = sorted(unread.items(), key=lambda counted: (-counted[1], counted[0]))[:3]
        skipped = "".join(f"; {count} {reason}" for reason, count in most)
        remedy = f"{REPOSITORIES}, or check the path" if holds_repository(path) else "check the path"
        raise DataError(f"{path}: no readable file ({READABLE}) in this folder{skipped}; {remedy}")
    return sorted(files), unread


def _reasons(folder: Path, names: list[str]) -> dict[str, str | None]:
    """Return, for each file in a folder, the reason to skip it, or None to read it."""
    if _SPLITS in names and len(splits := saved_splits(folder)) > 1:
        raise DataError(
            f"{folder}: contains the splits {', '.join(splits)}, which would be mixed; give the folder of a single "
            "split, or use the reader huggingface with the option split"
        )
    if set(names) >= _SAVED:
        state = folder / _STATE
        try:
            saved = [entry["filename"] for entry in json.loads(read_regular(state))["_data_files"]]
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise DataError(f"{state}: cannot be read ({error!r}); save the data set again") from error
        for name in saved:
            if not isinstance(name, str) or Path(name).name != name:
                raise DataError(f"{state}: {name!r:.80} is no file name in the folder; save the data set again")
            inside(folder, name, DataError)
        # All other Arrow files in the folder are caches with the same rows. If a file that `state.json` names is
        # missing, the error is reported when the file is opened.
        skipped = {name: unread_reason(name) or "next to a saved data set" for name in names if name not in saved}
        return {**dict.fromkeys(saved), **skipped}
    return {name: unread_reason(name) or _irregular(os.path.join(folder, name)) for name in names}


def _irregular(path: str) -> str | None:
    """Return the reason to skip a path that is not a regular file. Return None for a regular file, or if the path must
    be opened to find out.
    """
    if not is_utf8(path):
        return _MISNAMED
    try:
        return None if stat.S_ISREG(os.stat(path).st_mode) else "not a regular file"
    except OSError:
        return "dangling link" if os.path.islink(path) else None


def _unreadable(error: OSError) -> NoReturn:
    raise DataError(f"{error.filename}: the folder cannot be read ({error.strerror}); check the permissions")
