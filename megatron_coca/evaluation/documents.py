"""The documents that are scored: text tokenised on the way, or prepared shards; only those long enough, truncated."""

import hashlib
import logging
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from tqdm import tqdm

from megatron_coca.config import Config
from megatron_coca.data import Shard, corpus_files, ensure_builtin, load_saved_tokenizer, read_documents, read_manifest
from megatron_coca.data.preparation.manifest import MANIFEST
from megatron_coca.data.shards import SUFFIXES
from megatron_coca.data.tokenizers.kinds import DESCRIPTION, agree
from megatron_coca.evaluation.options import positive_int
from megatron_coca.evaluation.results import EvaluationError, Record
from megatron_coca.evaluation.subject import EvaluatedCheckpoint

logger = logging.getLogger(__name__)

_SHOWN = 6


class Encoder(Protocol):
    """What is asked of a tokenizer: `eod` ends a document, `fingerprint` names its files."""

    eod: int
    fingerprint: str

    def encode(self, text: str) -> list[int]: ...


class DocumentsRecord(Record):
    """On what was measured: `sha256` of lengths and token ids; `tokens` in all, `max_length` of one document."""

    sha256: str
    count: int
    tokens: int
    max_length: int
    repeated: int | None  # documents are their first tokens, so many of them, again and again
    sources: list[str]


@dataclass(frozen=True)
class Documents:
    """Token arrays (int64, one dimension, at most `max_length`) and where they come from."""

    arrays: tuple[np.ndarray, ...]
    sources: tuple[str, ...]
    max_length: int
    repeated: int | None = None

    @property
    def sha256(self) -> str:
        """Of the lengths and the token ids as little-endian int64, whatever the files stored."""
        digest = hashlib.sha256()
        for tokens in self.arrays:
            digest.update(len(tokens).to_bytes(8, "little"))
            digest.update(tokens.astype("<i8").tobytes())
        return digest.hexdigest()

    def record(self) -> DocumentsRecord:
        """For the result file."""
        return DocumentsRecord(
            sha256=self.sha256,
            count=len(self.arrays),
            tokens=sum(len(tokens) for tokens in self.arrays),
            max_length=self.max_length,
            repeated=self.repeated,
            sources=list(self.sources),
        )


@dataclass(frozen=True)
class DocumentSource:
    """A shard by its prefix, or one text file."""

    place: str
    is_shard: bool


def find_sources(names: Sequence[str]) -> list[DocumentSource]:
    """What `names` stand for: a shard's prefix (or its .bin or .idx), a text file, or a folder's text files, sorted.

    Raises EvaluationError for a name that is none of these, a folder of shards, or where there is no name, DataError for
    an unknown format.
    """
    if not names:
        raise EvaluationError("no test data: name text files or shard prefixes with --data")
    found = []
    for name in names:
        prefix = name.removesuffix(".bin").removesuffix(".idx")
        if any(Path(prefix + suffix).is_file() for suffix in SUFFIXES):
            found.append(DocumentSource(prefix, True))
        elif Path(name).is_dir() and (shards := _shards_in(Path(name))):
            more = f" and {len(shards) - _SHOWN} more" if len(shards) > _SHOWN else ""
            raise EvaluationError(
                f"{name}: is a folder of shards, training data among them perhaps; name those to evaluate on with "
                f"--data: {' '.join(shards[:_SHOWN])}{more}"
            )
        elif Path(name).exists():
            found += [DocumentSource(str(file), False) for file in corpus_files([Path(name)])]
        else:
            raise EvaluationError(
                f"{name}: no text file or folder is there, and no shard ({name}.bin and {name}.idx); correct --data, "
                "or prepare the corpus first"
            )
    return found


def _shards_in(folder: Path) -> list[str]:
    """Prefixes of the shards in a folder and below, those named as test data first."""
    prefixes = [str(path.with_suffix("")) for path in sorted(folder.rglob("*.idx"))]
    return sorted(prefixes, key=lambda prefix: not prefix.endswith("_test"))


def check_tokenizers(sources: Iterable[DocumentSource], tokenizer: Encoder | None) -> None:
    """Refuse shards of another tokenizer than the checkpoint's, and warn of those that may be, in one line.

    Vocabularies of one size hide such a mistake from every other check, and the perplexity would mean nothing.
    Raises EvaluationError for a shard beside which another tokenizer is named, DataError for a damaged manifest.
    """
    prefixes = [source.place for source in sources if source.is_shard]
    folders = {Path(prefix).parent for prefix in prefixes} if tokenizer is not None else set()
    beside = {folder: _fingerprint_beside(folder) for folder in folders}
    unverified = []
    for prefix in prefixes:
        found = beside.get(Path(prefix).parent)
        if tokenizer is None or found is None:
            unverified.append(prefix)
        elif not _made_alike(Path(prefix).parent, found[0], tokenizer):
            raise EvaluationError(
                f"{prefix}: prepared with another tokenizer ({found[0][:12]}, by {found[1]}) than the checkpoint's "
                f"({tokenizer.fingerprint[:12]}); name text with --data, or prepare the corpus with the checkpoint's"
            )
    if unverified:
        lacking = "the checkpoint carries no tokenizer" if tokenizer is None else "no tokenizer is named beside them"
        logger.warning("%s: %s, nothing shows that they were made with the model's", ", ".join(unverified), lacking)


def _made_alike(folder: Path, fingerprint: str, tokenizer: Encoder) -> bool:
    """Whether the tokenizer of a folder's shards, by its fingerprint, gives the ids of `tokenizer`: an exported or imported
    checkpoint has other files for the same ids.
    """
    if fingerprint == tokenizer.fingerprint:
        return True
    beside = load_saved_tokenizer(folder) if (folder / DESCRIPTION).is_file() else None
    return beside is not None and beside.fingerprint == fingerprint and agree(beside, tokenizer)


def _fingerprint_beside(folder: Path) -> tuple[str, Path] | None:
    """What says which tokenizer made the shards in a folder: its fingerprint and the file; None where nothing does."""
    if (folder / MANIFEST).is_file():
        return read_manifest(folder / MANIFEST)["tokenizer"]["fingerprint"], folder / MANIFEST
    if (folder / DESCRIPTION).is_file():
        return load_saved_tokenizer(folder).fingerprint, folder / DESCRIPTION
    return None


def tokens_of(source: DocumentSource, tokenizer: Encoder | None) -> Iterator[np.ndarray]:
    """The documents of one source, in its order, each ending with the tokenizer's `eod` as in prepared shards.

    Raises DataError for files that cannot be read, EvaluationError where a tokenizer is needed and there is none.
    """
    if source.is_shard:
        shard = Shard(source.place)
        yield from (np.asarray(shard.document(index), dtype=np.int64) for index in range(shard.documents))
    elif tokenizer is None:
        raise EvaluationError(
            f"{source.place}: is text, and the checkpoint carries no tokenizer; name a shard prepared with the model's"
        )
    else:
        for document in read_documents(Path(source.place)):
            yield np.array([*tokenizer.encode(document.text), tokenizer.eod], dtype=np.int64)


def check_vocabulary(tokens: np.ndarray, vocab_size: int, source: DocumentSource) -> None:
    """Raises EvaluationError for a token id that the model has no row for."""
    if len(tokens) and (tokens.max() >= vocab_size or tokens.min() < 0):
        worst = int(tokens.max() if tokens.max() >= vocab_size else tokens.min())
        raise EvaluationError(
            f"{source.place}: token id {worst} is outside the model's vocabulary of {vocab_size}; the data was made "
            "with another tokenizer than the model's, prepare it again with the tokenizer of the checkpoint"
        )


def collect_documents(
    names: Sequence[str],
    tokenizer: Encoder | None,
    vocab_size: int,
    max_length: int,
    num_documents: int | None = None,
    progress: bool = True,
    repeated: int | None = None,
) -> Documents:
    """The first `num_documents` (None: all) documents of at least `max_length` tokens, truncated to it.

    With `repeated`, documents of at least so many tokens are enough: the first of them are repeated up to
    `max_length`, as in Su's pages on ReRoPE (kexue.fm/archives/9708).

    `names` as for `find_sources`; the tokenizer is needed for text. Raises DataError and EvaluationError: sources that
    cannot be read, token ids outside 0 .. vocab_size-1, no document long enough.
    """
    sources = find_sources(names)
    check_tokenizers(sources, tokenizer)
    kept: list[np.ndarray] = []
    longest, wanted = 0, repeated or max_length
    with tqdm(desc="documents read", unit="document", disable=not progress) as bar:
        for source, tokens in all_documents(sources, tokenizer):
            bar.update()
            check_vocabulary(tokens, vocab_size, source)
            longest = max(longest, len(tokens))
            if len(tokens) >= wanted:
                kept.append(np.resize(tokens[:wanted], max_length))
            if len(kept) == num_documents:
                break
    if not kept:
        raise EvaluationError(
            f"{', '.join(names)}: no document has the {wanted} tokens that are wanted, the longest has {longest}; "
            "use smaller windows, or a corpus with longer documents"
        )
    return Documents(tuple(kept), tuple(names), max_length, repeated)


def all_documents(
    sources: Iterable[DocumentSource], tokenizer: Encoder | None
) -> Iterator[tuple[DocumentSource, np.ndarray]]:
    """Every document with the source it is from, in order."""
    for source in sources:
        for tokens in tokens_of(source, tokenizer):
            yield source, tokens


def add_document_options(parser: ArgumentParser) -> None:
    """Which documents are read."""
    add = parser.add_argument
    places = "text files, JSONL files, folders of them, or shard prefixes; default: the run's test data"
    add("--data", nargs="+", metavar="PATH", help=places)
    add("--num-documents", type=positive_int, metavar="N", help="only the first N that are long enough")
    lengths = "documents of at least N tokens, truncated to N; default: the largest window or length"
    add("--max-length", type=positive_int, metavar="N", help=lengths)
    repeated = "make each document of its first N tokens, again and again up to --max-length"
    add("--repeat", type=positive_int, metavar="N", help=repeated)


def read_subject_documents(args: Namespace, source: EvaluatedCheckpoint, longest: int) -> Documents:
    """What `add_document_options` ask for, at least `longest` tokens each. Raises EvaluationError, DataError."""
    if args.max_length is not None and args.max_length < longest:
        raise EvaluationError(f"--max-length {args.max_length} is shorter than the window {longest}")
    trained = source.opened.trained
    return collect_documents(
        args.data or default_data(trained),
        source.tokenizer,
        trained.model.vocab_size or trained.model.padded_vocab_size,
        args.max_length or longest,
        args.num_documents,
        repeated=args.repeat,
    )


def default_data(config: Config) -> list[str]:
    """The run's own test shards; those of the built-in corpus where the run names no data at all.

    Raises EvaluationError for a run that names training data only, DataError where the corpus cannot be made.
    """
    if config.data.test_data_paths:
        return list(config.data.test_data_paths)
    if config.data.data_path or config.data.train_data_paths:
        raise EvaluationError("the run's config has no test_data_paths; name text files or shard prefixes with --data")
    manifest = ensure_builtin(Path(config.data.data_root))
    prefixes = [source["test"]["prefix"] for source in read_manifest(manifest)["sources"]]
    return [str(manifest.parent / prefix) for prefix in prefixes if prefix is not None]
