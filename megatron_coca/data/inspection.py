"""Inspect prepared data: find shards, decode samples, compute statistics of document lengths."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron_coca.data.blend import Blend
from megatron_coca.data.errors import DataError
from megatron_coca.data.preparation.manifest import MANIFEST, read_manifest
from megatron_coca.data.readers import open_reader
from megatron_coca.data.readers.source import ReadingProblems, SourceSpec
from megatron_coca.data.shards import SUFFIXES, Shard, shard_paths
from megatron_coca.data.tokenizers.kinds import Tokenizer
from megatron_coca.support.console import Progress
from megatron_coca.support.regular_files import inside

BLOCK_DOCUMENTS = 1 << 18
BLOCK_TOKENS = 1 << 20


@dataclass(frozen=True)
class ShardEntry:
    """A shard and its entry in the manifest. If there is no manifest, `split` is empty, and the attributes that come
    from the manifest are None.

    Attributes:
        source: name of the source in the manifest, or the file name if there is no manifest.
        split: train, valid or test.
        prefix: path of the files without their suffix.
        largest_id: largest token id; None if the manifest was written before this attribute existed.
        sha256: SHA-256 of the .bin file, in hexadecimal.
        labels, labels_sha256: prefix of the label shard and SHA-256 of its .bin file, if there is a label shard.
    """

    source: str
    split: str
    prefix: Path
    documents: int | None = None
    tokens: int | None = None
    largest_id: int | None = None
    sha256: str | None = None
    labels: Path | None = None
    labels_sha256: str | None = None

    @property
    def label(self) -> str:
        return f"{self.source} {self.split}".rstrip()


def find_shards(names: Sequence[str | Path]) -> list[ShardEntry]:
    """Find shards. Each name is the prefix of a shard, one of its two files, or a folder of shards.

    Raises `DataError` for a folder without shards, a missing shard or a damaged manifest.
    """
    entries: dict[Path, ShardEntry] = {}
    for name in map(Path, names):
        prefix = name.with_suffix("") if name.suffix in SUFFIXES else name
        for entry in _folder_entries(name) if name.is_dir() else [shard_entry(prefix)]:
            entries.setdefault(entry.prefix.resolve(), entry)
    if not entries:
        raise DataError("shards: no path given; give a prefix (the path without .bin or .idx) or a folder")
    return list(entries.values())


def _folder_entries(folder: Path) -> list[ShardEntry]:
    if (folder / MANIFEST).is_file():
        return manifest_entries(folder)
    entries = [ShardEntry(path.stem, "", path.with_suffix("")) for path in sorted(folder.glob("*.idx"))]
    if not entries:
        raise DataError(
            f"{folder}: contains neither {MANIFEST} nor an .idx file; give a folder that `megatron-coca prepare` wrote"
        )
    return entries


def shard_entry(prefix: Path) -> ShardEntry:
    """Return the shard at `prefix` with its entry in the manifest of its folder. Raises `DataError` for a damaged
    manifest.
    """
    known = manifest_entries(prefix.parent) if (prefix.parent / MANIFEST).is_file() else []
    return next((entry for entry in known if entry.prefix == prefix), ShardEntry(prefix.name, "", prefix))


def manifest_entries(folder: Path) -> list[ShardEntry]:
    entries = []
    for source in read_manifest(folder / MANIFEST)["sources"]:
        for split, facts in source.items():
            if isinstance(facts, dict) and facts.get("prefix"):
                names = ("documents", "tokens", "largest_id", "sha256", "labels_sha256")
                values = {name: facts.get(name) for name in names}
                labels = inside(folder, facts["labels"], DataError) if facts.get("labels") else None
                prefix = inside(folder, facts["prefix"], DataError)
                entries.append(ShardEntry(source["name"], split, prefix, labels=labels, **values))
    return entries


def document_lengths(shard: Shard) -> Iterator[np.ndarray]:
    """Yield the token counts of successive documents, separators included, as int64 arrays of up to BLOCK_DOCUMENTS
    counts.
    """
    for begin in range(0, shard.documents, BLOCK_DOCUMENTS):
        yield shard.document_lengths(begin, min(begin + BLOCK_DOCUMENTS, shard.documents))


def token_blocks(shard: Shard, label: str = "", show: bool = False) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield blocks of whole documents as (tokens in the shard's dtype, length of each document).

    A block has up to BLOCK_TOKENS tokens, or a single document that is longer than that. The file is not memory-mapped,
    because mapped pages would count as memory of the process. With `show`, a progress bar is shown, and its title
    contains `label`.
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
                    raise DataError(f"{path}: the file was truncated while it was read; restore the file")
                progress.advance(tokens.nbytes)
                yield tokens, lengths[begin:end]
                begin, read = end, int(ends[end - 1])


MAX_SAMPLES = 1 << 62  # sample numbers must fit into int64
ANSWER = ("⟦", "⟧")
SAMPLE_BOUNDARY = "──────── document ends ────────"


def _check_sample_number(number: int) -> None:
    if number > MAX_SAMPLES:
        raise DataError(f"sample {number}: the largest sample number is 2^62; give a smaller number")


def mixture(blend: Blend, samples: int) -> list[dict[str, Any]]:
    """Return the size of each source in tokens and its share of the first `samples` samples of a run."""
    _check_sample_number(samples)
    shares = blend.mixture(samples)
    return [
        {"tokens_on_disk": shard.len_tokens, **asdict(share)} for shard, share in zip(blend.shards, shares, strict=True)
    ]


@dataclass(frozen=True)
class SampleView:
    """One sample of a run.

    Attributes:
        number: number of the sample in the order of the run.
        source: prefix of the shard.
        epoch: number of the pass over the source in which the sample is read, counted from 1.
        first_token: offset of the first token in the shard. None for samples of whole documents, which may lie in
            several places of the shard.
        parts: for each document in the sample, its tokens, int64.
        starts_document: whether the sample begins with the first token of a document.
        counted: for each item of `parts`, a mask of the tokens that count in the loss, bool. None if every target
            counts.
    """

    number: int
    source: str
    epoch: int
    first_token: int | None
    parts: list[np.ndarray]
    starts_document: bool
    counted: list[np.ndarray] | None = None

    def facts(self) -> dict[str, Any]:
        """Return all attributes except the tokens, as a mapping for JSON."""
        lengths = [len(part) for part in self.parts]
        values = {name: value for name, value in vars(self).items() if name not in ("parts", "counted")}
        labelled = {} if self.counted is None else {"tokens_in_loss": int(np.concatenate(self.counted).sum())}
        return values | {"tokens": sum(lengths), "tokens_by_document": lengths} | labelled


def view_sample(blend: Blend, number: int) -> SampleView:
    """Return sample `number` as training reads it. Raises `DataError` if `number` is not in 0 .. `MAX_SAMPLES`."""
    _check_sample_number(number)
    located = blend.by_source([number])[0]
    shard = blend.shards[located.source]
    if blend.pack_impl == "packed":
        start, begins = int(located.starts[0]), shard.document_begins(located.starts, blend.seq_length + 1)[0]
    else:
        start, begins = None, blend.document_begins([located])[0]
    edges, tokens = np.flatnonzero(begins[1:]) + 1, blend.tokens([located])
    parts, mask = np.split(tokens[0], edges), blend.loss_mask([located], tokens)
    counted = None if mask is None else np.split(np.concatenate(([False], mask[0])), edges)
    epoch = int(blend.locate(np.array([number]))[1][0]) // blend.epoch_samples[located.source] + 1
    return SampleView(number, str(shard.prefix), epoch, start, parts, bool(begins[0]), counted)


def sample_text(view: SampleView, tokenizer: Tokenizer | None, pieces: bool = False) -> str:
    """Format a sample as a heading and its text. With `pieces`, every token is listed instead of the text. A line
    separates the documents.

    Raises `DataError` if `tokenizer` is None.
    """
    if tokenizer is None:
        raise DataError(
            "tokenizer: not saved with the shards; set vocab_file in the configuration to the tokenizer that the "
            "shards were prepared with"
        )
    tokens = sum(map(len, view.parts))
    first = view.first_token
    place = f"{tokens:,} tokens" if first is None else f"tokens {first:,} to {first + tokens:,} ({tokens:,} tokens)"
    heading = (
        f"sample {view.number:,}: {view.source}, epoch {view.epoch}, {place} from {len(view.parts)} document(s), "
        f"starting {'at the beginning of' if view.starts_document else 'within'} the first document"
    )
    if view.counted is None:
        texts = [_decoded(part, tokenizer, pieces) for part in view.parts]
    else:
        heading += f"; {ANSWER[0]}{ANSWER[1]} mark the {view.facts()['tokens_in_loss']:,} tokens that count in the loss"
        parts = zip(view.parts, view.counted, strict=True)
        texts = [with_answers(*part, partial(_decoded, tokenizer=tokenizer, pieces=pieces), pieces) for part in parts]
    return f"{heading}\n\n" + f"\n{SAMPLE_BOUNDARY}\n".join(texts)


def with_answers(
    tokens: np.ndarray,
    counted: np.ndarray,
    text_of: Callable[[np.ndarray], str],
    pieces: bool = False,
    marks: tuple[str, str] = ANSWER,
) -> str:
    """Return the text of a document with marks around the tokens that count in the loss; `text_of` decodes tokens."""
    edges = np.flatnonzero(np.diff(counted)) + 1
    runs = map(text_of, np.split(tokens, edges))
    first = bool(counted[0]) if len(counted) else False
    marked = (f"{marks[0]}{run}{marks[1]}" if (number % 2 == 0) == first else run for number, run in enumerate(runs))
    return (" " if pieces else "").join(marked)


def read_chat(path: str, number: int) -> tuple[str, dict[str, Any]]:
    """Return (path of the file, record) for the chat with this number, counted from 0, in a file or folder. The record
    has the keys `messages` and `tools`, which `encode_chat` reads.

    Raises `DataError` if there is no chat with this number, or if a file cannot be read.
    """
    reader, problems, seen = open_reader(SourceSpec("chat", (path,), messages="answers")), ReadingProblems(), 0
    for unit in reader.units():
        for chunk in reader.chunks(unit):
            for document in reader.documents(chunk, problems):
                if seen == number:
                    return unit.path, json.loads(document.text)
                seen += 1
    faulty = f" and {problems.total} faulty records, such as {problems.named[0]}" if problems.total else ""
    remedy = f"give a --number from 0 to {seen - 1}" if seen else "correct the file"
    raise DataError(f"{path}: has {seen} chats{faulty}; {remedy}")


def _decoded(tokens: np.ndarray, tokenizer: Tokenizer, pieces: bool) -> str:
    if pieces:
        return " ".join(f"{token}:{tokenizer.piece(token)}" for token in tokens.tolist())
    return tokenizer.decode(tokens.tolist())


QUANTILES = {"1%": 0.01, "10%": 0.1, "50%": 0.5, "90%": 0.9, "99%": 0.99}
THRESHOLDS = (512, 2048, 8192, 32768)


def length_facts(lengths: np.ndarray) -> dict[str, Any]:
    """Return statistics of document lengths, int32 [documents], as a mapping for JSON: counts, quantiles, and the share
    of the tokens in documents above each of `THRESHOLDS`.

    The quantile q is the smallest length L for which at least the share q of the documents has at most L tokens.
    """
    tokens = int(lengths.sum(dtype=np.int64))
    longer = {str(length): lengths[lengths > length].sum(dtype=np.int64) / max(1, tokens) for length in THRESHOLDS}
    quantiles = np.quantile(lengths, list(QUANTILES.values()), method="inverted_cdf")
    return {
        "documents": len(lengths),
        "tokens": tokens,
        "min": int(lengths.min()),
        **dict(zip(QUANTILES, map(int, quantiles), strict=True)),
        "max": int(lengths.max()),
        "mean": tokens / len(lengths),
        "share_of_tokens_in_longer": {name: float(share) for name, share in longer.items()},
    }


def lengths_by_source(entries: Sequence[ShardEntry]) -> dict[str, dict[str, Any]]:
    """Return `length_facts` of all shards of each source. Raises `DataError` for a damaged shard."""
    blocks: dict[str, list[np.ndarray]] = {}
    for entry in entries:
        of_source = blocks.setdefault(entry.source, [])
        of_source += [lengths.astype(np.int32) for lengths in document_lengths(Shard(entry.prefix))]
    return {source: length_facts(np.concatenate(found)) for source, found in blocks.items()}
