"""Corpora to shards: read, split by key, tokenize, write; streaming, and under the final name only when complete."""

import hashlib
import json
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megatron_coca.data.aside import written_aside
from megatron_coca.data.corpora import Document, Problems, corpus_files, read_documents
from megatron_coca.data.errors import DataError
from megatron_coca.data.shards import Shard, ShardWriter
from megatron_coca.data.tokenizers.kinds import DESCRIPTION, Tokenizer

FORMAT = 1  # of the manifest and the split; raise it when either changes meaning
MANIFEST = "manifest.json"
SPLITS = ("train", "test")
_TOKENIZER_FACTS = ("tokenizer_type", "vocab_size", "eod", "fingerprint")
_LIBRARIES = ("megatron-core", "sentencepiece", "tokenizers", "numpy")


@dataclass(frozen=True)
class SourceSpec:
    """A named source: files or folders, and the field of a JSON record that holds its text."""

    name: str
    paths: Sequence[Path]
    text_field: str = "text"


@dataclass
class SplitReport:
    """What was written for one source and split. ``prefix`` is relative to the manifest, None where nothing fell in."""

    prefix: str | None = None
    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    sha256: str | None = None


@dataclass
class SourceReport:
    """What became of one source; ``bytes`` of its splits count the UTF-8 text."""

    name: str
    train: SplitReport = field(default_factory=SplitReport)
    test: SplitReport = field(default_factory=SplitReport)
    problems: dict[str, int] = field(default_factory=dict)
    problems_named: list[str] = field(default_factory=list)


def split_of(key: str, test_fraction: float) -> str:
    """ "test" for about ``test_fraction`` of all keys, else "train"; the same on every machine and in every run."""
    position = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64
    return "test" if position < test_fraction else "train"


class _SplitWriter:
    """Opens its shard with the first document, so that an empty split leaves no file."""

    def __init__(self, folder: Path, name: str, tokenizer: Tokenizer) -> None:
        self._folder, self._name, self._tokenizer = folder, name, tokenizer
        self._writer: ShardWriter | None = None
        self.report = SplitReport()

    def add(self, document: Document) -> None:
        if self._writer is None:
            self._writer = ShardWriter(self._folder / self._name, self._tokenizer.vocab_size)
        self._writer.add([*self._tokenizer.encode(document.text), self._tokenizer.eod])
        self.report.bytes += len(document.text.encode())

    def finish(self) -> SplitReport:
        if self._writer is not None:
            self._writer.finish()
            written = Shard(self._folder / self._name)  # checks what is on the disk
            self.report.prefix, self.report.tokens = self._name, written.len_tokens
            self.report.documents = written.documents
            with (self._folder / f"{self._name}.bin").open("rb") as stream:
                self.report.sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
        return self.report

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _write_source(
    source: SourceSpec, folder: Path, tokenizer: Tokenizer, test_fraction: float, strict: bool, progress: bool
) -> SourceReport:
    files = corpus_files(source.paths)
    problems = Problems(strict)
    writers = {split: _SplitWriter(folder, f"{source.name}_{split}", tokenizer) for split in SPLITS}
    try:
        with _bar(source.name, files, progress) as bar:
            for path in files:
                for document in read_documents(path, source.text_field, problems, bar.update):
                    writers[split_of(document.key, test_fraction)].add(document)
        reports = {split: writer.finish() for split, writer in writers.items()}
    finally:
        for writer in writers.values():
            writer.close()
    if not any(report.documents for report in reports.values()):
        raise DataError(f"{source.name}: {_nothing_usable(files, problems)}")
    return SourceReport(source.name, **reports, problems=dict(problems.counts), problems_named=problems.named)


def _bar(name: str, files: Sequence[Path], progress: bool) -> tqdm:
    total = sum(path.stat().st_size for path in files)
    return tqdm(total=total, desc=f"tokenize {name}", unit="B", unit_scale=True, disable=not progress)


def _nothing_usable(files: Sequence[Path], problems: Problems) -> str:
    named = "; ".join(problems.named[:3]) or "the files are empty"
    return f"no usable document in {', '.join(map(str, files[:3]))} ({named}). Check the files and the text field."


def _check(sources: Sequence[SourceSpec], test_fraction: float) -> None:
    names = [source.name for source in sources]
    if not names or len(set(names)) != len(names):
        raise DataError(f"Sources need names that differ; given are {names}.")
    for name in names:
        if not name.replace("-", "").replace("_", "").isalnum():
            raise DataError(f"Source name {name!r}: letters, digits, - and _ only, since it names files.")
    if not 0 <= test_fraction <= 1:
        raise DataError(f"test_fraction must lie in [0, 1], not {test_fraction}.")
    for source in sources:
        corpus_files(source.paths)


def prepare(
    sources: Sequence[SourceSpec],
    output: Path,
    tokenizer: Tokenizer,
    test_fraction: float = 0.03,
    strict: bool = False,
    progress: bool = True,
) -> Path:
    """Tokenize ``sources`` into ``<output>/<name>_{train,test}.{bin,idx}``, beside the tokenizer and a manifest.

    Every document ends in ``tokenizer.eod``. Unusable records are skipped, counted and named in the manifest;
    ``strict`` makes the first one fatal.

    Returns:
        Path of ``manifest.json``.

    Raises:
        DataError: a path is missing, a source has no usable document, ``output`` exists or cannot be written. Nothing
            is left under ``output`` then.
    """
    _check(sources, test_fraction)
    output = Path(output)
    with written_aside(output) as folder:
        reports = [_write_source(s, folder, tokenizer, test_fraction, strict, progress) for s in sources]
        tokenizer.save(folder)
        manifest = _manifest(reports, tokenizer, test_fraction)
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return output / MANIFEST


def _manifest(reports: Sequence[SourceReport], tokenizer: Tokenizer, test_fraction: float) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "test_fraction": test_fraction,
        "tokenizer": {name: getattr(tokenizer, name) for name in _TOKENIZER_FACTS} | {"description": DESCRIPTION},
        "sources": [asdict(report) for report in reports],
        "versions": {"python": platform.python_version()} | {name: version(name) for name in _LIBRARIES},
    }


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest that ``prepare`` wrote. ``DataError`` where it is missing, damaged or of another format."""
    try:
        manifest = json.loads(Path(path).read_text())
        found = manifest["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: cannot read the manifest ({error}). Prepare the corpus again.") from error
    if found != FORMAT:
        raise DataError(f"{path}: format {found}, this version reads {FORMAT}. Prepare the corpus again.")
    return manifest


def training_texts(
    sources: Sequence[SourceSpec], test_fraction: float, limit: int, on_read: Callable[[int], object] | None = None
) -> Iterator[str]:
    """Texts to train a tokenizer on: about ``limit`` characters, an equal share per source, none from the test split.

    Documents are chosen by a hash of their key, so that they come from everywhere in a corpus larger than ``limit``.
    """
    for source in sources:
        files = corpus_files(source.paths)
        share = limit // len(sources)
        fraction = min(1.0, share / max(1, sum(path.stat().st_size for path in files)))
        problems = Problems()  # reported by the preparation itself, which reads the same files
        found = 0
        for path in files:
            for document in read_documents(path, source.text_field, problems, on_read):
                found += 1
                chosen = split_of(f"tokenizer/{document.key}", fraction) == "test"
                if chosen and share > 0 and split_of(document.key, test_fraction) == "train":
                    share -= len(document.text)
                    yield document.text
        if not found:
            raise DataError(f"{source.name}: {_nothing_usable(files, problems)}")
