"""Verify shards: compare their files with the manifest and with each other."""

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
from megatron_coca.data.tokenizers.kinds import DESCRIPTION


@dataclass
class Verified:
    """The result of checking either one shard, or the tokenizer and the manifest of one folder.

    Attributes:
        place: the prefix of the shard, or the folder.
        tokens: number of tokens in the shard, or None if it could not be opened.
        content: whether the .bin file was compared with the SHA-256 in the manifest. If False, only the index and the
            file sizes were checked.
        faults: error messages, one for each fault.
    """

    place: Path
    tokens: int | None = None
    content: bool = False
    faults: list[str] = field(default_factory=list)


def verify_shards(entries: Sequence[ShardEntry], show: bool = False) -> list[Verified]:
    """Read the files of all shards and their tokenizers once. A fault in one shard does not stop the check of the other
    shards.

    If there is a manifest, also check that every document ends with the separator, which detects an altered index.
    Raises `DataError` for a damaged manifest.
    """
    folders = {entry.prefix.parent: _verify_folder(entry.prefix.parent) for entry in entries}
    results = [result for result, _ in folders.values() if result.faults]
    for entry in entries:
        result = Verified(entry.prefix)
        try:
            _verify_shard(entry, folders[entry.prefix.parent][1], result, show)
        except DataError as error:
            result.faults.append(str(error))
        results.append(result)
    return results


def _verify_folder(folder: Path) -> tuple[Verified, int | None]:
    """Return (result, separator token) for a folder. The separator is None if there is no manifest."""
    result, tokenizer = Verified(folder), None
    try:
        tokenizer = load_saved_tokenizer(folder) if (folder / DESCRIPTION).is_file() else None
    except DataError as error:
        result.faults.append(str(error))
    recorded = read_manifest(folder / MANIFEST).get("tokenizer") if (folder / MANIFEST).is_file() else None
    if not recorded:
        return result, None
    listed = manifest_entries(folder)
    in_manifest = {prefix.name for entry in listed for prefix in (entry.prefix, entry.labels) if prefix is not None}
    result.faults += [
        f"{path.with_suffix('')}: not listed in the {MANIFEST} of its folder; prepare the corpus again, or move the "
        "shard to another folder"
        for path in sorted(folder.glob("*.idx"))
        if path.stem not in in_manifest
    ]
    if tokenizer and recorded["fingerprint"] != tokenizer.fingerprint:
        result.faults.append(
            f"{folder}: the tokenizer differs from the one recorded in {MANIFEST}; restore the tokenizer, or prepare "
            "the corpus again"
        )
    return result, recorded["eod"]


def _verify_shard(entry: ShardEntry, eod: int | None, result: Verified, show: bool) -> None:
    """Check one shard and add the findings to `result`. Raises `DataError` if the shard cannot be opened."""
    shard = Shard(entry.prefix, entry.labels)
    result.tokens, path = shard.len_tokens, shard_paths(entry.prefix)[0]
    if entry.documents is not None and entry.sha256 is None:
        result.faults.append(f"{entry.prefix}: {MANIFEST} has no SHA-256 for this shard; prepare the corpus again")
    counts = (("documents", entry.documents, shard.documents), ("tokens", entry.tokens, shard.len_tokens))
    for name, expected, actual in counts:
        if expected is not None and expected != actual:
            result.faults.append(
                f"{entry.prefix}: has {actual:,} {name}, but {MANIFEST} records {expected:,}; restore the shard, or "
                "prepare the corpus again"
            )
    if entry.sha256 is None:
        return
    result.content, digest, unended = True, hashlib.sha256(), 0
    for tokens, lengths in token_blocks(shard, entry.label, show):
        digest.update(tokens.view(np.uint8).data)
        last = np.cumsum(lengths)[lengths > 0] - 1
        unended += len(lengths) - int((tokens[last] == eod).sum())
    _compare_content(path, digest.hexdigest(), entry.sha256, result)
    if unended and eod is not None:
        result.faults.append(
            f"{path}: {unended:,} documents do not end with the separator {eod}, so the .bin or .idx file has "
            "changed; restore both files, or prepare the corpus again"
        )
    if shard.labels is not None and entry.labels_sha256 is not None:
        labels = shard_paths(shard.labels.prefix)[0]
        with labels.open("rb") as stream:
            _compare_content(labels, hashlib.file_digest(stream, "sha256").hexdigest(), entry.labels_sha256, result)


def _compare_content(path: Path, digest: str, recorded: str, result: Verified) -> None:
    if digest != recorded:
        result.faults.append(
            f"{path}: the content has changed since the file was written (SHA-256 {digest[:12]}, but {MANIFEST} "
            f"records {recorded[:12]}); restore the file, or prepare the corpus again"
        )
