"""Verify shards: their files against the manifest, against one another, and against the vocabulary."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megatron_coca.data.errors import DataError
from megatron_coca.data.inspection import ShardEntry, manifest_entries, token_blocks
from megatron_coca.data.preparation.manifest import MANIFEST, read_manifest
from megatron_coca.data.shards import Shard, shard_paths
from megatron_coca.data.tokenizers import load_saved_tokenizer
from megatron_coca.data.tokenizers.kinds import DESCRIPTION, Tokenizer

CHECKS = ("index", "content", "ids", "labels")


@dataclass
class Verified:
    """Result for one shard, or for the tokenizer and the manifest of a folder.

    Attributes:
        place: the prefix of the shard, or the folder.
        tokens: of the shard, where it could be opened.
        checked: the ``CHECKS`` that were made: the index and the sizes; the .bin file against its recorded SHA-256;
            the ids; the label shard. The last three need a manifest, or a tokenizer for the ids.
        faults: one sentence each.
    """

    place: Path
    tokens: int | None = None
    checked: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def verify_shards(entries: Sequence[ShardEntry], named: Tokenizer | None = None, show: bool = False) -> list[Verified]:
    """Read all files of all shards and their tokenizers once; a fault in one does not stop the others.

    ``named`` is the tokenizer of shards without a saved one. In a shard with a manifest every document must end with
    the separator, which finds an altered index. Raises ``DataError`` for a damaged manifest.
    """
    folders = {entry.prefix.parent: _verify_folder(entry.prefix.parent, named) for entry in entries}
    results = [result for result, _, _ in folders.values() if result.faults]
    for entry in entries:
        _, vocab_size, eod = folders[entry.prefix.parent]
        result = Verified(entry.prefix)
        try:
            _verify_shard(entry, vocab_size, eod, result, show)
        except DataError as error:
            result.faults.append(str(error))
        results.append(result)
    return results


def _verify_folder(folder: Path, named: Tokenizer | None) -> tuple[Verified, int | None, int | None]:
    """(result, vocabulary size, separator) of a folder; the latter two are None where unknown."""
    result, tokenizer = Verified(folder), named
    try:
        tokenizer = load_saved_tokenizer(folder) if (folder / DESCRIPTION).is_file() else named
    except DataError as error:
        result.faults.append(str(error))
    recorded = read_manifest(folder / MANIFEST).get("tokenizer") if (folder / MANIFEST).is_file() else None
    if not recorded:
        return result, tokenizer.vocab_size if tokenizer else None, None
    listed = manifest_entries(folder)
    in_manifest = {prefix.name for entry in listed for prefix in (entry.prefix, entry.labels) if prefix is not None}
    result.faults += [
        f"{path.with_suffix('')}: not listed in the {MANIFEST} of its folder."
        for path in sorted(folder.glob("*.idx"))
        if path.stem not in in_manifest
    ]
    if tokenizer and recorded["fingerprint"] != tokenizer.fingerprint:
        result.faults.append(f"{folder}: the tokenizer is not the one that {MANIFEST} names.")
    return result, recorded["vocab_size"], recorded["eod"]


def _verify_shard(entry: ShardEntry, vocab_size: int | None, eod: int | None, result: Verified, show: bool) -> None:
    """Check one shard, adding to ``result``. ``DataError`` for a shard that cannot be opened."""
    shard = Shard(entry.prefix)
    result.tokens = shard.len_tokens
    result.checked.append("index")
    if entry.documents is not None and entry.sha256 is None:
        result.faults.append(f"{entry.prefix}: listed in {MANIFEST} without a SHA-256.")
    counts = (("documents", entry.documents, shard.documents), ("tokens", entry.tokens, shard.len_tokens))
    for name, expected, actual in counts:
        if expected is not None and expected != actual:
            result.faults.append(f"{entry.prefix}: {actual:,} {name}, where {MANIFEST} records {expected:,}.")
    digest, outside, first_outside, unended = hashlib.sha256(), 0, 0, 0
    for tokens, lengths in token_blocks(shard, entry.label, show):
        digest.update(tokens.view(np.uint8).data)
        if vocab_size is not None:
            wrong = (tokens < 0) | (tokens >= vocab_size)
            first_outside = int(tokens[wrong][0]) if wrong.any() and not outside else first_outside
            outside += int(wrong.sum())
        last = np.cumsum(lengths)[lengths > 0] - 1
        unended += len(lengths) - int((tokens[last] == eod).sum())
    path = shard_paths(entry.prefix)[0]
    if entry.sha256 is not None:
        result.checked.append("content")
        _compare_content(path, digest.hexdigest(), entry.sha256, result)
    if entry.labels is not None:
        result.checked.append("labels")
        _verify_labels(Shard(entry.prefix, entry.labels), entry, result, show)
    if vocab_size is not None:
        result.checked.append("ids")
    if outside:
        result.faults.append(
            f"{path}: {outside:,} ids outside the vocabulary of {vocab_size:,}, the first {first_outside}. "
            "The file is damaged, or was made with another tokenizer."
        )
    if unended and entry.sha256 is not None and eod is not None:
        result.faults.append(
            f"{path}: {unended:,} documents of the index do not end with the separator, {eod}. "
            "The .bin or the .idx file has changed: restore both, or prepare the corpus again."
        )


def _compare_content(path: Path, digest: str, recorded: str, result: Verified) -> None:
    if digest != recorded:
        result.faults.append(
            f"{path}: its content has changed since it was written: SHA-256 {digest[:12]}, where {MANIFEST} has "
            f"{recorded[:12]}. Restore the file, or prepare the corpus again."
        )


def _verify_labels(shard: Shard, entry: ShardEntry, result: Verified, show: bool) -> None:
    """Check that every label is negative or the token at its place, and the file's SHA-256 where it is recorded."""
    assert shard.labels is not None
    digest, wrong, path = hashlib.sha256(), 0, shard_paths(shard.labels.prefix)[0]
    blocks = zip(token_blocks(shard.labels, f"{entry.label} labels", show), token_blocks(shard), strict=True)
    for (labels, _), (tokens, _) in blocks:
        digest.update(labels.view(np.uint8).data)
        wrong += int(((labels >= 0) & (labels != tokens)).sum())
    if entry.labels_sha256 is not None:
        _compare_content(path, digest.hexdigest(), entry.labels_sha256, result)
    if wrong:
        result.faults.append(
            f"{path}: {wrong:,} labels are neither negative nor the token at their place. Prepare both shards again."
        )
