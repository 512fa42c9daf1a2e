"""What a file's name says of what is in it: its format, its compression, or why no reader takes it."""

import re
from dataclasses import dataclass
from pathlib import PurePath

from megatron_coca.data.readers.compression import COMPRESSIONS
from megatron_coca.data.readers.formats import JsonLines, StreamFormat, TextParagraphs
from megatron_coca.data.readers.streams import Cut
from megatron_coca.data.readers.tables import TABLE_FORMATS
from megatron_coca.data.readers.wiki_extract import EXTRACT, EXTRACT_NAME, WikiExtract
from megatron_coca.data.readers.wikipedia import WikipediaPages

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
