"""Inspect prepared data: find shards, decode documents and samples, count document lengths."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from megatron_coca.console import Progress
from megatron_coca.data.errors import DataError
from megatron_coca.data.order import Blend
from megatron_coca.data.preparation.manifest import MANIFEST, read_manifest
from megatron_coca.data.shards import SUFFIXES, Shard, shard_paths
from megatron_coca.data.tokenizers import load_saved_tokenizer
from megatron_coca.data.tokenizers.kinds import DESCRIPTION, Tokenizer, agree

BLOCK_DOCUMENTS = 1 << 18
BLOCK_TOKENS = 1 << 20


@dataclass(frozen=True)
class ShardEntry:
    """A shard and its entry in the manifest; ``split`` is empty and the rest None without a manifest.

    Attributes:
        source: its name in the manifest, or that of its files; preceded by the folder where two folders share a name.
        split: train, valid or test.
        prefix: path of its files without their suffix.
        sha256: of the .bin file, hexadecimal.
        labels, labels_sha256: prefix of its label shard, if it has one, and the same of it.
    """

    source: str
    split: str
    prefix: Path
    documents: int | None = None
    tokens: int | None = None
    sha256: str | None = None
    labels: Path | None = None
    labels_sha256: str | None = None

    @property
    def label(self) -> str:
        return f"{self.source} {self.split}".rstrip()


def find_shards(names: Sequence[str | Path]) -> list[ShardEntry]:
    """Shards by prefix, by one of their files, or all those of a folder.

    Raises ``DataError`` for a folder without shards, a missing shard and a damaged manifest.
    """
    entries: dict[Path, ShardEntry] = {}
    for name in map(Path, names):
        prefix = name.with_suffix("") if name.suffix in SUFFIXES else name
        for entry in _folder_entries(name) if name.is_dir() else [shard_entry(prefix)]:
            entries.setdefault(entry.prefix.resolve(), entry)
    if not entries:
        raise DataError("No shard is named. Give a prefix (the path without .bin or .idx) or a folder.")
    folders: dict[str, set[Path]] = {}
    for path, entry in entries.items():
        folders.setdefault(entry.source, set()).add(path.parent)
    return [
        replace(entry, source=str(entry.prefix.parent / entry.source)) if len(folders[entry.source]) > 1 else entry
        for entry in entries.values()
    ]


def _folder_entries(folder: Path) -> list[ShardEntry]:
    if (folder / MANIFEST).is_file():
        return manifest_entries(folder)
    entries = [ShardEntry(path.stem, "", path.with_suffix("")) for path in sorted(folder.glob("*.idx"))]
    if not entries:
        raise DataError(f"{folder}: contains neither {MANIFEST} nor an .idx file. Name a folder of prepare_data.py.")
    return entries


def shard_entry(prefix: Path) -> ShardEntry:
    """The shard at ``prefix`` with its entry in the folder's manifest. ``DataError`` for a damaged manifest."""
    known = manifest_entries(prefix.parent) if (prefix.parent / MANIFEST).is_file() else []
    return next((entry for entry in known if entry.prefix == prefix), ShardEntry(prefix.name, "", prefix))


def manifest_entries(folder: Path) -> list[ShardEntry]:
    entries = []
    for source in read_manifest(folder / MANIFEST)["sources"]:
        for split, facts in source.items():
            if isinstance(facts, dict) and facts.get("prefix"):
                names = ("documents", "tokens", "sha256", "labels_sha256")
                values = {name: facts.get(name) for name in names}
                labels = folder / facts["labels"] if facts.get("labels") else None
                prefix = folder / facts["prefix"]
                entries.append(ShardEntry(source["name"], split, prefix, labels=labels, **values))
    return entries


def common_tokenizer(entries: Sequence[ShardEntry], named: Tokenizer | None = None) -> Tokenizer:
    """The tokenizer saved with the shards, or ``named``. ``DataError`` where there is none, or where they differ."""
    folders = dict.fromkeys(entry.prefix.parent for entry in entries)
    tokenizers = {str(folder): load_saved_tokenizer(folder) for folder in folders if (folder / DESCRIPTION).is_file()}
    tokenizers |= {"the named one": named} if named else {}
    if not all(agree(one, other) for one, other in pairwise(tokenizers.values())):
        raise DataError(f"The tokenizers of {', '.join(tokenizers)} differ. Inspect shards of one tokenizer at a time.")
    return require_tokenizer(next(iter(tokenizers.values()), None))


def require_tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    """The tokenizer; ``DataError`` where there is none."""
    if tokenizer is None:
        raise DataError(
            "No tokenizer is saved with the shards. Name theirs with --tokenizer-type and --vocab-file (--merge-file)."
        )
    return tokenizer


def document_lengths(shard: Shard) -> Iterator[np.ndarray]:
    """Yield the token counts of successive documents, separators included: int64 [up to BLOCK_DOCUMENTS]."""
    for begin in range(0, shard.documents, BLOCK_DOCUMENTS):
        yield shard.document_lengths(begin, min(begin + BLOCK_DOCUMENTS, shard.documents))


def token_blocks(shard: Shard, label: str = "", show: bool = False) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield blocks of whole documents: (tokens in the shard's dtype, length of each document).

    A block has up to BLOCK_TOKENS tokens, or one longer document. The file is read, not mapped: mapped pages would
    count as memory of the process. ``show`` shows progress with the shard's ``label``.
    """
    path, total = shard_paths(shard.prefix)[0], shard.len_tokens * shard.dtype.itemsize
    with path.open("rb", buffering=0) as stream, Progress(f"reading {label}", total, "B", show=show) as progress:
        for lengths in document_lengths(shard):
            ends, begin, read = np.cumsum(lengths), 0, 0
            while begin < len(lengths):
                end = max(begin + 1, int(np.searchsorted(ends, read + BLOCK_TOKENS, side="right")))
                count = int(ends[end - 1]) - read
                tokens = np.fromfile(stream, dtype=shard.dtype, count=count)
                if len(tokens) < count:
                    raise DataError(f"{path}: became shorter while it was read. Restore the file.")
                progress.advance(tokens.nbytes)
                yield tokens, lengths[begin:end]
                begin, read = end, int(ends[end - 1])


MAX_SAMPLES = 1 << 62  # sample numbers are int64
ANSWER = ("⟦", "⟧")
SAMPLE_BOUNDARY = "──────── document ends ────────"


def _check_sample_number(number: int) -> None:
    if number > MAX_SAMPLES:
        raise DataError(f"{number}: samples are numbered up to 2^62 only. Take a smaller number.")


def mixture(blend: Blend, samples: int) -> list[dict[str, Any]]:
    """For each source its size in tokens and its share of the first ``samples`` samples of a run."""
    _check_sample_number(samples)
    shares = blend.mixture(samples)
    return [
        {"tokens_on_disk": shard.len_tokens, **asdict(share)} for shard, share in zip(blend.shards, shares, strict=True)
    ]


@dataclass(frozen=True)
class SampleView:
    """One sample of a run.

    Attributes:
        number: in the order of the run.
        source: prefix of the shard.
        epoch: pass over the source, from 1.
        first_token: offset in the shard.
        parts: tokens of each document in it, int64 [any].
        starts_document: the sample begins with the first token of a document.
        counted: for data with labels, which tokens count in the loss, bool like ``parts``.
    """

    number: int
    source: str
    epoch: int
    first_token: int
    parts: list[np.ndarray]
    starts_document: bool
    counted: list[np.ndarray] | None = None

    def facts(self) -> dict[str, Any]:
        """All attributes except the tokens, for JSON."""
        lengths = [len(part) for part in self.parts]
        values = {name: value for name, value in vars(self).items() if name not in ("parts", "counted")}
        labelled = {} if self.counted is None else {"tokens_in_loss": int(np.concatenate(self.counted).sum())}
        return values | {"tokens": sum(lengths), "tokens_by_document": lengths} | labelled


def view_sample(blend: Blend, number: int) -> SampleView:
    """Sample ``number`` as training reads it. ``DataError`` below 0 and beyond ``MAX_SAMPLES``."""
    _check_sample_number(number)
    located = blend.by_source([number])[0]
    shard, start, count = blend.shards[located.source], int(located.starts[0]), blend.seq_length + 1
    if blend.pack_impl == "packed":
        begins = shard.document_begins(located.starts, count)[0]
    else:
        begins = blend.document_begins([located])[0]
    edges, tokens = np.flatnonzero(begins[1:]) + 1, blend.tokens([located])
    parts, mask = np.split(tokens[0], edges), blend.loss_mask([located], tokens)
    counted = None if mask is None else np.split(np.concatenate(([False], mask[0])), edges)
    epoch = int(blend.locate(np.array([number]))[1][0]) // blend.epoch_samples[located.source] + 1
    return SampleView(number, str(shard.prefix), epoch, start, parts, bool(begins[0]), counted)


def sample_text(view: SampleView, tokenizer: Tokenizer, pieces: bool = False) -> str:
    """A heading and the text, or with ``pieces`` each token, with a line between documents."""
    tokens = sum(map(len, view.parts))
    heading = (
        f"sample {view.number:,}: {view.source}, epoch {view.epoch}, tokens {view.first_token:,} to "
        f"{view.first_token + tokens:,} ({tokens:,}), of {len(view.parts)} document(s), starting "
        f"{'at the beginning of' if view.starts_document else 'within'} the first"
    )
    if view.counted is None:
        texts = [_decoded(part, tokenizer, pieces) for part in view.parts]
    else:
        heading += f"; {ANSWER[0]}{ANSWER[1]} around the {view.facts()['tokens_in_loss']:,} tokens in the loss"
        texts = [_with_answers(*part, tokenizer, pieces) for part in zip(view.parts, view.counted, strict=True)]
    return f"{heading}\n\n" + f"\n{SAMPLE_BOUNDARY}\n".join(texts)


def _with_answers(tokens: np.ndarray, counted: np.ndarray, tokenizer: Tokenizer, pieces: bool) -> str:
    """The text of a document with marks around the tokens that count in the loss."""
    edges = np.flatnonzero(np.diff(counted)) + 1
    runs = [_decoded(run, tokenizer, pieces) for run in np.split(tokens, edges)]
    first = bool(counted[0]) if len(counted) else False
    marked = (f"{ANSWER[0]}{run}{ANSWER[1]}" if (number % 2 == 0) == first else run for number, run in enumerate(runs))
    return (" " if pieces else "").join(marked)


def document_text(shard: Shard, number: int, tokenizer: Tokenizer, pieces: bool = False) -> str:
    """A heading and the text of one document. ``DataError`` for a number that the shard does not have."""
    tokens = shard.document(number)
    return f"document {number:,} of {shard.prefix}: {len(tokens):,} tokens\n\n{_decoded(tokens, tokenizer, pieces)}"


def _decoded(tokens: np.ndarray, tokenizer: Tokenizer, pieces: bool) -> str:
    if pieces:
        return " ".join(f"{token}:{tokenizer.piece(token)}" for token in tokens.tolist())
    return tokenizer.decode(tokens.tolist())


QUANTILES = {"1%": 0.01, "10%": 0.1, "50%": 0.5, "90%": 0.9, "99%": 0.99}
THRESHOLDS = (512, 2048, 8192, 32768)
_SHORT = 1 << 20  # lengths below have a counter each; longer documents are few


@dataclass(frozen=True)
class Lengths:
    """Document lengths in tokens that occur (``values``, ascending) and documents of each (``counts``): int64 [n]."""

    values: np.ndarray
    counts: np.ndarray

    @property
    def documents(self) -> int:
        return int(self.counts.sum())

    @property
    def tokens(self) -> int:
        return int((self.values * self.counts).sum())

    def quantile(self, share: float) -> int:
        """The smallest length that at least ``share`` of the documents do not exceed."""
        return int(self.values[np.searchsorted(np.cumsum(self.counts), share * self.documents)])

    def share_in_longer(self, length: int) -> float:
        """Fraction of the tokens that is in documents of more than ``length`` tokens."""
        longer = self.values > length
        return int((self.values * self.counts)[longer].sum()) / max(1, self.tokens)

    def facts(self) -> dict[str, Any]:
        """Return the size, quantiles and shares as a mapping for JSON."""
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "min": int(self.values[0]),
            **{name: self.quantile(share) for name, share in QUANTILES.items()},
            "max": int(self.values[-1]),
            "mean": self.tokens / self.documents,
            "share_of_tokens_in_longer": {str(length): self.share_in_longer(length) for length in THRESHOLDS},
        }


def count_lengths(blocks: Iterable[np.ndarray]) -> Lengths:
    """Count lengths given as blocks of int64 [any]; keeps one counter per length below 2^20, and all longer lengths."""
    short = np.zeros(_SHORT, dtype=np.int64)
    long = [np.empty(0, dtype=np.int64)]
    for block in blocks:
        counts = np.bincount(block[block < _SHORT])
        short[: len(counts)] += counts
        long.append(block[block >= _SHORT])
    values, counts = np.unique(np.concatenate(long), return_counts=True)
    below = np.flatnonzero(short)
    return Lengths(np.concatenate((below, values)), np.concatenate((short[below], counts)))


def lengths_by_source(entries: Sequence[ShardEntry]) -> dict[str, Lengths]:
    """Document lengths of each source, all its splits together. ``DataError`` for a damaged shard."""
    return {
        source: count_lengths(
            block for entry in entries if entry.source == source for block in document_lengths(Shard(entry.prefix))
        )
        for source in dict.fromkeys(entry.source for entry in entries)
    }
