"""Which shards are meant, where their facts stand, and their documents one after another."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from megatron_coca.data.errors import DataError
from megatron_coca.data.preparation.manifest import MANIFEST, read_manifest
from megatron_coca.data.shards import HEADER, SUFFIXES, Shard, check_index, read_header, shard_paths
from megatron_coca.data.tokenizers.kinds import DESCRIPTION, Tokenizer, agree
from megatron_coca.data.tokenizers.load import load_saved_tokenizer

_AT_ONCE = 1 << 18


class DocumentEnds:
    """Where the documents of a shard end, read along with its tokens.

    Attributes:
        empty: documents without any token, among those that were read.
    """

    def __init__(self, prefix: Path) -> None:
        self._lengths = document_lengths(prefix)
        self._waiting = np.empty(0, dtype=np.int64)
        self._read = self.empty = 0

    def before(self, place: int) -> np.ndarray:
        """Last tokens of further documents, those that lie before token ``place``: int64 [any]."""
        while not len(self._waiting) or self._waiting[-1] < place:
            lengths = next(self._lengths, None)
            if lengths is None:
                break
            ends = self._read + np.cumsum(lengths)
            self._read, self.empty = int(ends[-1]), self.empty + int((lengths == 0).sum())
            self._waiting = np.concatenate((self._waiting, ends[lengths > 0] - 1))
        count = int(np.searchsorted(self._waiting, place))
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken


def document_lengths(prefix: Path) -> Iterator[np.ndarray]:
    """Tokens of each document in order, with the one that ends it: int64, some at a time.

    Raises:
        DataError: a file is missing, truncated, of another format, or the two do not belong together.
    """
    header = read_header(prefix)
    one_sequence_each = check_index(prefix, header)
    path, documents = shard_paths(prefix)[1], header.entries - 1
    sequences = np.memmap(path, dtype="<i4", mode="r", offset=HEADER.size, shape=(header.sequences,))
    boundaries = np.memmap(path, dtype="<i8", mode="r", offset=header.boundaries_at, shape=(header.entries,))
    for begin in range(0, documents, _AT_ONCE):
        end = min(begin + _AT_ONCE, documents)
        if one_sequence_each:
            yield sequences[begin:end].astype(np.int64)
        else:
            edges = np.array(boundaries[begin : end + 1])
            # A document of no sequence has no token, which reduceat cannot express.
            sums = np.concatenate(([0], np.cumsum(sequences[edges[0] : edges[-1]], dtype=np.int64)))
            yield np.diff(sums[edges - edges[0]])


_TOKENS_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class ShardEntry:
    """A shard and what its manifest says of it.

    Attributes:
        source: its name in the manifest, or that of its files; after its folder where another folder has one of that
            name.
        split: train, valid or test; empty where no manifest tells.
        prefix: path of its files without their ending.
        bytes: of the UTF-8 text, None where no manifest tells; the following too.
        documents, tokens: in the shard.
        sha256: of the tokens' file, in hexadecimal digits.
    """

    source: str
    split: str
    prefix: Path
    bytes: int | None = None
    documents: int | None = None
    tokens: int | None = None
    sha256: str | None = None

    @property
    def label(self) -> str:
        """Source and split."""
        return f"{self.source} {self.split}".rstrip()


def find_shards(names: Sequence[str | Path]) -> list[ShardEntry]:
    """The shards that ``names`` stand for: prefixes, files of a pair, or folders with all that lies in them.

    Raises ``DataError`` for a folder without shards, a missing shard and a damaged manifest.
    """
    found: dict[Path, ShardEntry] = {}
    for name in map(Path, names):
        prefix = name.with_suffix("") if name.suffix in SUFFIXES else name
        for entry in _of_folder(name) if name.is_dir() else [shard_entry(prefix)]:
            found.setdefault(entry.prefix.resolve(), entry)
    if not found:
        raise DataError("No shard is named. Give a prefix (the path without .bin or .idx) or a folder.")
    return _told_apart(list(found.values()))


def _told_apart(entries: list[ShardEntry]) -> list[ShardEntry]:
    """The entries, those of equal name in several folders named after their folders as well."""
    folders: dict[str, set[Path]] = {}
    for entry in entries:
        folders.setdefault(entry.source, set()).add(entry.prefix.parent.resolve())
    return [
        replace(entry, source=str(entry.prefix.parent / entry.source)) if len(folders[entry.source]) > 1 else entry
        for entry in entries
    ]


def _of_folder(folder: Path) -> list[ShardEntry]:
    if (folder / MANIFEST).is_file():
        return _manifest_entries(folder)
    entries = [ShardEntry(path.stem, "", path.with_suffix("")) for path in sorted(folder.glob("*.idx"))]
    if not entries:
        raise DataError(
            f"{folder}: holds neither {MANIFEST} nor an .idx file. Name the folder that prepare_data.py made."
        )
    return entries


def shard_entry(prefix: Path) -> ShardEntry:
    """A shard by its prefix, with what a manifest beside it says. ``DataError`` for a damaged manifest."""
    known = _manifest_entries(prefix.parent) if (prefix.parent / MANIFEST).is_file() else []
    return next((entry for entry in known if entry.prefix == prefix), ShardEntry(prefix.name, "", prefix))


def _manifest_entries(folder: Path) -> list[ShardEntry]:
    entries = []
    for source in read_manifest(folder / MANIFEST)["sources"]:
        for split, facts in source.items():
            if isinstance(facts, dict) and facts.get("prefix"):
                told = (facts.get(name) for name in ("bytes", "documents", "tokens", "sha256"))
                entries.append(ShardEntry(source["name"], split, folder / facts["prefix"], *told))
    return entries


def common_tokenizer(entries: Sequence[ShardEntry], named: Tokenizer | None = None) -> Tokenizer | None:
    """``named``, or the tokenizer that lies beside the shards; None where there is none.

    Raises ``DataError`` where those beside the shards differ, from one another or from ``named``.
    """
    folders = dict.fromkeys(entry.prefix.parent for entry in entries)
    beside = {str(folder): load_saved_tokenizer(folder) for folder in folders if (folder / DESCRIPTION).is_file()}
    found = beside | ({"the named one": named} if named else {})
    if not all(agree(one, other) for one, other in pairwise(found.values())):
        raise DataError(f"The tokenizers of {', '.join(found)} differ. Inspect shards of one tokenizer at a time.")
    return next(iter(found.values()), None)


def required(tokenizer: Tokenizer | None) -> Tokenizer:
    """The tokenizer; ``DataError`` where there is none."""
    if tokenizer is None:
        raise DataError(
            "No tokenizer lies beside the shards. Name theirs with --tokenizer-type and --vocab-file (--merge-file)."
        )
    return tokenizer


def documents(prefix: Path) -> Iterator[np.ndarray]:
    """All documents of a shard, in order: int64 [length] each, with the id that ends it. Reads many at once."""
    shard, offset = Shard(prefix), 0
    for lengths in document_lengths(prefix):
        ends = np.cumsum(lengths)
        begin = 0
        while begin < len(lengths):
            read = int(ends[begin - 1]) if begin else 0
            end = max(begin + 1, int(np.searchsorted(ends, read + _TOKENS_AT_ONCE, side="right")))
            tokens = shard.tokens(offset + read, int(ends[end - 1]) - read)
            yield from np.split(tokens, ends[begin : end - 1] - read)
            begin = end
        offset += int(ends[-1])


def some_documents(prefix: Path, count: int | None) -> Iterator[tuple[int, np.ndarray]]:
    """(number, tokens) of ``count`` documents spread evenly over a shard; of all, where ``count`` is None."""
    if count is None:
        yield from enumerate(documents(prefix))
        return
    shard = Shard(prefix)
    for number in np.unique(np.linspace(0, shard.documents - 1, min(count, shard.documents)).astype(np.int64)).tolist():
        yield number, shard.document(number)


def without_separator(tokens: np.ndarray, eod: int) -> np.ndarray:
    """A document's own tokens: all but the one that ends it."""
    return tokens[:-1] if len(tokens) and tokens[-1] == eod else tokens


def plain(value: Any) -> Any:
    """The same for JSON: numbers of NumPy become Python's, and keys texts."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else str(value) if isinstance(value, Path) else value
