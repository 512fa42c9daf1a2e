"""Whether shards are what was written: their files against the manifest, one another, and the vocabulary."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from megatron_coca.data.errors import DataError
from megatron_coca.data.inspection.collection import DocumentEnds, ShardEntry, find_shards
from megatron_coca.data.preparation.manifest import MANIFEST, read_manifest
from megatron_coca.data.shards import Shard, shard_paths
from megatron_coca.data.tokenizers.kinds import DESCRIPTION, Tokenizer
from megatron_coca.data.tokenizers.load import load_saved_tokenizer
from megatron_coca.tables import table

_TOKENS_AT_ONCE = 1 << 22
_INDEX = "index"
_CONTENT = "content"
_IDS = "ids"
CHECKS = (_INDEX, _CONTENT, _IDS)
"""What is looked at: the index and the sizes; the tokens' file against its recorded SHA-256; the ids."""


@dataclass
class Verified:
    """What was found of one shard, or of a folder's tokenizer and list.

    Attributes:
        place: the shard's prefix, or the folder.
        checked: those of ``CHECKS`` that could be made; nothing says how ids or content should be where no manifest and
            no tokenizer lies beside a shard.
        faults: what is wrong, a sentence each.
    """

    place: Path
    tokens: int | None = None
    checked: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {"place": self.place, "tokens": self.tokens, "checked": self.checked, "faults": self.faults}


@dataclass(frozen=True)
class _Vocabulary:
    """What ids a shard may hold: below ``size``; ``eod`` ends each document, None where that is not known."""

    size: int
    eod: int | None


def verify_shards(entries: Sequence[ShardEntry], named: Tokenizer | None = None, show: bool = False) -> list[Verified]:
    """Read the files of all shards once, and the tokenizers beside them; nothing that is wrong stops the rest.

    ``named`` is the tokenizer of shards that have none beside them. Where a manifest names a shard, every document must
    end in the separator: an index that was altered does not fit the tokens any more.

    Raises ``DataError`` for a damaged manifest.
    """
    folders = {entry.prefix.parent: _Folder(entry.prefix.parent, named) for entry in entries}
    found = [folder.verified for folder in folders.values() if folder.verified.faults]
    for entry in entries:
        found.append(_verify(entry, folders[entry.prefix.parent].vocabulary, show))
    return found


class _Folder:
    """The tokenizer of a folder of shards, and whether the folder's files agree about it."""

    def __init__(self, folder: Path, named: Tokenizer | None) -> None:
        self.verified = Verified(folder)
        told = read_manifest(folder / MANIFEST).get("tokenizer") if (folder / MANIFEST).is_file() else None
        beside = self._beside(folder) or named
        self.vocabulary = _Vocabulary(beside.vocab_size, None) if beside else None
        if told:
            self.vocabulary = _Vocabulary(told["vocab_size"], told["eod"])
        if told:
            named_here = {entry.prefix.name for entry in find_shards([folder])}
            unnamed = sorted(path.stem for path in folder.glob("*.idx") if path.stem not in named_here)
            self.verified.faults += [
                f"{folder / name}: lies beside {MANIFEST}, which does not name it." for name in unnamed
            ]
        if told and beside and told["fingerprint"] != beside.fingerprint:
            self.verified.faults.append(f"{folder}: the tokenizer is not the one that {MANIFEST} names.")

    def _beside(self, folder: Path) -> Tokenizer | None:
        try:
            return load_saved_tokenizer(folder) if (folder / DESCRIPTION).is_file() else None
        except DataError as error:
            self.verified.faults.append(str(error))
            return None


def _verify(entry: ShardEntry, vocabulary: _Vocabulary | None, show: bool) -> Verified:
    found = Verified(entry.prefix)
    try:
        shard = Shard(entry.prefix)
    except DataError as error:
        found.faults.append(str(error))
        return found
    found.checked.append(_INDEX)
    if entry.documents is not None and entry.sha256 is None:
        found.faults.append(f"{entry.prefix}: {MANIFEST} names it without a SHA-256.")
    found.tokens = shard.len_tokens
    for name, due, actual in (
        ("documents", entry.documents, shard.documents),
        ("tokens", entry.tokens, shard.len_tokens),
    ):
        if due is not None and due != actual:
            found.faults.append(f"{entry.prefix}: {actual:,} {name}, where {MANIFEST} tells of {due:,}.")
    _read_tokens(entry, shard, vocabulary, found, show)
    return found


def _read_tokens(entry: ShardEntry, shard: Shard, vocabulary: _Vocabulary | None, found: Verified, show: bool) -> None:
    digest, ids = hashlib.sha256(), _ids(entry, vocabulary)
    for piece in _pieces(entry, shard, show):
        digest.update(piece.view(np.uint8).data)
        if ids is not None:
            ids.add(piece)
    tokens = shard_paths(entry.prefix)[0]
    if entry.sha256 is not None:
        found.checked.append(_CONTENT)
        if entry.sha256 != digest.hexdigest():
            found.faults.append(
                f"{tokens}: its content is not what was written: SHA-256 {digest.hexdigest()[:12]}, where {MANIFEST} "
                f"has {entry.sha256[:12]}. Restore the file, or prepare the corpus again."
            )
    if ids is not None:
        found.checked.append(_IDS)
        found.faults += [f"{tokens}: {fault}" for fault in ids.faults()]


def _ids(entry: ShardEntry, vocabulary: _Vocabulary | None) -> "_Ids | None":
    if vocabulary is None:
        return None
    written_here = entry.sha256 is not None and vocabulary.eod is not None
    return _Ids(vocabulary, DocumentEnds(entry.prefix) if written_here else None)


def _pieces(entry: ShardEntry, shard: Shard, show: bool) -> Iterator[np.ndarray]:
    """The tokens' file by reads, in the shard's dtype [any]: pages of a memory map would count as this process's."""
    path = shard_paths(entry.prefix)[0]
    total = shard.len_tokens * shard.dtype.itemsize
    bar = tqdm(desc=f"read {entry.label}", total=total, unit="B", unit_scale=True, disable=not show)
    with path.open("rb", buffering=0) as stream, bar:
        while len(piece := np.fromfile(stream, dtype=shard.dtype, count=_TOKENS_AT_ONCE)):
            bar.update(piece.nbytes)
            yield piece


class _Ids:
    """Looks at ids as they come. ``ends`` tells where documents end, None where they need not end in a separator."""

    def __init__(self, vocabulary: _Vocabulary, ends: DocumentEnds | None) -> None:
        self._vocabulary, self._ends = vocabulary, ends
        self._read = self._outside = self._worst = self._unended = 0

    def add(self, piece: np.ndarray) -> None:
        """The next ids of the file."""
        wrong = (piece < 0) | (piece >= self._vocabulary.size)
        if wrong.any():
            self._worst = self._worst if self._outside else int(piece[wrong][0])
            self._outside += int(wrong.sum())
        if self._ends is not None:
            last = self._ends.before(self._read + len(piece)) - self._read
            self._unended += int((piece[last] != self._vocabulary.eod).sum())
        self._read += len(piece)

    def faults(self) -> Iterator[str]:
        """What is wrong with them."""
        if self._outside:
            yield (
                f"{self._outside:,} ids outside the vocabulary of {self._vocabulary.size:,}, the first {self._worst}. "
                "The file is damaged, or was made with another tokenizer."
            )
        unended = self._unended + (self._ends.empty if self._ends is not None else 0)
        if unended:
            yield (
                f"{unended:,} documents of the index do not end in the separator, {self._vocabulary.eod}. "
                "One of the two files is not what was written: restore both, or prepare the corpus again."
            )


def verified_table(found: Sequence[Verified]) -> str:
    """One row per shard, and every fault."""
    rows = [
        [str(v.place), v.tokens, *("yes" if check in v.checked else "-" for check in CHECKS), len(v.faults)]
        for v in found
    ]
    faults = [f"FAULT {fault}" for v in found for fault in v.faults]
    return "\n".join([table(["shard", "tokens", *CHECKS, "faults"], rows), "", *(faults or ["no fault was found"])])
