"""Which files a path stands for, and which it does not."""

import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from megatron_coca.data.errors import DataError
from megatron_coca.data.readers.compression import COMPRESSIONS
from megatron_coca.data.readers.streams import Cut, JsonLines, StreamFormat, TextParagraphs
from megatron_coca.data.readers.tables import TABLE_FORMATS
from megatron_coca.data.readers.wikipedia import EXTRACT, EXTRACT_NAME, WikiExtract, WikipediaPages

TEXT_SUFFIXES = (".txt", ".text", ".md")
# A name with no ending but the compression's ("wiki.zst") is taken for JSON lines, the usual content of such files.
_BARE = ""
FORMATS: dict[str, StreamFormat] = {
    **dict.fromkeys((".jsonl", ".json", ".ndjson", _BARE), JsonLines()),
    ".xml": WikipediaPages(),
    EXTRACT: WikiExtract(),
}
ENDINGS: dict[str, bytes] = {".xml": b"</mediawiki>"}
"""What a stream of a form has to end in: the only sign of an end between two of its records."""
ARCHIVE = ".tar"
READABLE = (
    ".jsonl, .json, .ndjson, .txt, .text, .md, .xml (Wikipedia), wiki_00 (WikiExtractor) or .tar, each plain or with "
    ".gz, .zst, .bz2 or .xz; .parquet, .arrow"
)
_SHORT = {".tgz": ".tar.gz", ".tbz2": ".tar.bz2", ".txz": ".tar.xz", ".tzst": ".tar.zst"}
_PART = re.compile(r"-p\d+p\d+$")  # the pages that one part of a large Wikipedia's dump holds
# What lies beside data; taken for documents it would be read, or reported as damaged.
_BESIDE_DATA = re.compile(
    r"readme\.md|dataset_dict\.json|dataset_infos?\.json|state\.json|.*-multistream-index\d*\.txt.*|"
    r"(.*[-_.])?(md5|sha\d+)sums?\.txt"
)
_SHOWN_ENDING = re.compile(r"(\.[a-z]\w{0,7})?\.[a-z]\w{0,7}$")

# A run of line ends holds several blank lines, or one, by where it is cut; so paragraphs go by the number of the line.
_CUTS: dict[bytes | None, Cut] = {
    None: Cut((), counted=b"\n"),
    TextParagraphs.delimiter: Cut((b"\n\n", b"\n\r\n"), counted=b"\n"),
}


@dataclass(frozen=True)
class FileKind:
    """What a file's name says.

    Attributes:
        form: suffix of what is inside: of ``FORMATS``, ``TEXT_SUFFIXES``, ``TABLE_FORMATS``, or ``ARCHIVE``.
        compression: a suffix of ``COMPRESSIONS``, or empty.
    """

    form: str
    compression: str


def kind_of(name: str) -> FileKind | None:
    """By the end of a file's name, without regard to case; None where no reader takes it."""
    base, compression = _parted(name)
    inner = EXTRACT if EXTRACT_NAME.fullmatch(base) else PurePath(base).suffix
    if inner in TABLE_FORMATS:
        return None if compression else FileKind(inner, "")
    if inner == _BARE and not compression:
        return None
    return FileKind(inner, compression) if inner in (*FORMATS, *TEXT_SUFFIXES, ARCHIVE) else None


def unread_reason(name: str) -> str | None:
    """Why a file of this name in a folder or an archive is not read; None where it is."""
    base = PurePath(name).name
    if base.startswith("."):
        return "hidden file"
    if _BESIDE_DATA.fullmatch(base.lower()):
        return "description of the data"
    return None if kind_of(base) else f"not a readable file ({_ending(base)})"


def unknown_type(name: str) -> str:
    """What is wrong with the name of a file that ``kind_of`` knows no kind for, and what to do."""
    base, compression = _parted(name)
    example = f": {base}.jsonl{compression}, for example" if compression else ""
    return (
        f"unknown type of file ({_ending(name)}). Readable are {READABLE}. If it holds one of these, give it its "
        f"ending{example}."
    )


def cut_of(form: StreamFormat) -> Cut:
    """Where a stream of this format may be cut."""
    end = form.delimiter
    return _CUTS.get(end) or Cut((end or b"",), end or b"")


def _parted(name: str) -> tuple[str, str]:
    """The name without folder, compression and number of the part, in lower case; and the compression."""
    lower = PurePath(name).name.lower()
    lower = next((lower.removesuffix(short) + long for short, long in _SHORT.items() if lower.endswith(short)), lower)
    compression = PurePath(lower).suffix if PurePath(lower).suffix in COMPRESSIONS else ""
    return _PART.sub("", lower.removesuffix(compression)), compression


def _ending(name: str) -> str:
    """For messages and counts; of the many endings that are numbers or sentences, none."""
    lower = PurePath(name).name.lower()
    suffix = PurePath(lower).suffix
    shown = _SHOWN_ENDING.search(lower)
    if shown is None:
        return "another ending" if suffix else "no ending"
    return shown.group() if suffix in COMPRESSIONS else suffix


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
