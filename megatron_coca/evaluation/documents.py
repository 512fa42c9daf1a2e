"""Documents for evaluation, read from text or prepared shards, filtered by minimum length and truncated."""

import hashlib
import logging
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_coca import data as corpora
from megatron_coca.config.data import DataConfig
from megatron_coca.config.source import given_values
from megatron_coca.data import Shard, Tokenizer
from megatron_coca.data.builtin import FOLDER
from megatron_coca.data.preparation.manifest import MANIFEST
from megatron_coca.data.remote_shards import local_prefix
from megatron_coca.data.shards import SUFFIXES
from megatron_coca.data.tokenizers.kinds import DESCRIPTION, first_difference
from megatron_coca.data.tokenizers.losses import Sample, passages_of, sampled
from megatron_coca.evaluation.results import DocumentsRecord, EvaluationError
from megatron_coca.evaluation.subject import Evaluation
from megatron_coca.support.console import Progress
from megatron_coca.support.remote_files import is_url, not_read

logger = logging.getLogger(__name__)

TEST_DATA = "test_data_paths"


@dataclass(frozen=True)
class Documents:
    """Documents as token arrays (int64, one-dimensional, at most `max_length` tokens), and their sources."""

    arrays: tuple[np.ndarray, ...]
    sources: tuple[str, ...]
    max_length: int
    repeated: int | None = None
    start: int | None = None

    def record(self) -> DocumentsRecord:
        """Return the record of these documents; the hash does not depend on the stored dtype."""
        digest = hashlib.sha256()
        for tokens in self.arrays:
            digest.update(len(tokens).to_bytes(8, "little"))
            digest.update(tokens.astype("<i8").tobytes())
        return DocumentsRecord(
            sha256=digest.hexdigest(),
            count=len(self.arrays),
            tokens=sum(len(tokens) for tokens in self.arrays),
            max_length=self.max_length,
            repeated=self.repeated,
            start=self.start,
            sources=list(self.sources),
        )


class DocumentSource(NamedTuple):
    path: str  # path of a text file, or prefix of a shard
    is_shard: bool


def find_sources(names: Sequence[str]) -> list[DocumentSource]:
    """Resolve each name, which is a shard prefix, a shard's .bin or .idx file, a text file, or a folder of text files.

    The files of a folder are sorted. Raises EvaluationError for an empty list, a folder of shards or a missing path.
    Raises DataError for an unknown format.
    """
    if not names:
        raise EvaluationError("--data: no test data given; name text files or shard prefixes")
    sources = []
    for name in names:
        prefix = name.removesuffix(".bin").removesuffix(".idx")
        if is_url(name):
            prefix = local_prefix(prefix)
        if is_url(name) or any(Path(prefix + suffix).is_file() for suffix in SUFFIXES):
            sources.append(DocumentSource(prefix, True))
            continue
        if not Path(name).exists():
            raise EvaluationError(
                f"{name}: no such text file, folder or shard ({name}.bin and {name}.idx); correct --data, "
                "or prepare the corpus first"
            )
        if shards := [str(path.with_suffix("")) for path in sorted(Path(name).rglob("*.idx"))]:
            raise EvaluationError(
                f"{name}: is a folder of shards, which may include training data; name the test shards with --data: "
                f"{' '.join(shards)}"
            )
        sources += [DocumentSource(str(file), False) for file in corpora.corpus_files([Path(name)])]
    return sources


def check_tokenizers(sources: Iterable[DocumentSource], tokenizer: Tokenizer | None) -> None:
    """Check that the checkpoint's tokenizer prepared the shards; warn once about all shards that cannot be checked.

    A different tokenizer with the same vocabulary size makes the perplexity meaningless, and no other check notices it.
    Raises EvaluationError for a different tokenizer, DataError for a damaged manifest.
    """
    unverified = []
    for path in (source.path for source in sources if source.is_shard):
        manifest, description = (Path(path).parent / name for name in (MANIFEST, DESCRIPTION))
        if tokenizer is not None and manifest.is_file():
            fingerprint = corpora.read_manifest(manifest)["tokenizer"]["fingerprint"]
            _check_tokenizer(path, manifest, fingerprint, tokenizer)
        elif tokenizer is not None and description.is_file():
            fingerprint = corpora.load_saved_tokenizer(description.parent).fingerprint
            _check_tokenizer(path, description, fingerprint, tokenizer)
        else:
            unverified.append(path)
    if unverified:
        reason = "the checkpoint has no tokenizer" if tokenizer is None else "no tokenizer was saved with these shards"
        logger.warning(
            "%s: %s; cannot verify that they were prepared with the model's tokenizer", ", ".join(unverified), reason
        )


def _check_tokenizer(shard: str, file: Path, fingerprint: str, tokenizer: Tokenizer) -> None:
    """Compare fingerprints, then token ids. Raises EvaluationError for a different tokenizer.

    An exported or imported checkpoint can have different tokenizer files that produce the same ids. A chat model such
    as Qwen 3 can declare one end-of-text token, while `prepare` finds a different one in the vocabulary.
    """
    if fingerprint == tokenizer.fingerprint:
        return
    if (file.parent / DESCRIPTION).is_file():
        saved = corpora.load_saved_tokenizer(file.parent)
        if saved.fingerprint == fingerprint and first_difference(saved, tokenizer) is None:
            return
    raise EvaluationError(
        f"{shard}: prepared with a different tokenizer ({fingerprint[:12]}, recorded in {file}) from the checkpoint's "
        f"({tokenizer.fingerprint[:12]}); name text with --data, or prepare the corpus with the checkpoint's tokenizer"
    )


def tokens_of(
    source: DocumentSource, tokenizer: Tokenizer | None, sample: Sample | None = None
) -> Iterator[np.ndarray]:
    """Yield the documents of one source, in order. Each ends with the tokenizer's `eod`, as in prepared shards.

    The beginning of each text is also encoded and decoded. `sample` collects what the tokenizer loses. Raises DataError
    for unreadable files, and EvaluationError for a text file if the checkpoint has no tokenizer.
    """
    if source.is_shard:
        shard = Shard(source.path)
        yield from (np.asarray(shard.document(index), dtype=np.int64) for index in range(shard.documents))
    elif tokenizer is None:
        raise EvaluationError(
            f"{source.path}: is a text file, but the checkpoint has no tokenizer; name a shard with --data"
        )
    else:
        for document in corpora.read_documents(Path(source.path)):
            if sample is not None:
                sample.merge(sampled(tokenizer, passages_of([document.text], 1)))
            yield np.array([*tokenizer.encode(document.text), tokenizer.eod], dtype=np.int64)


def collect_documents(
    names: Sequence[str],
    tokenizer: Tokenizer | None,
    vocab_size: int,
    max_length: int,
    num_documents: int | None = None,
    repeated: int | None = None,
    start: int | None = None,
    joined: bool = False,
) -> Documents:
    """Return all documents of at least `max_length` tokens, or the first `num_documents` of them, truncated to
    `max_length`.

    The token `start` is put before each document that does not already begin with it.

    With `repeated`, a document needs only `repeated` tokens. Its first `repeated` tokens are tiled to `max_length`, the
    method of Su's pages on ReRoPE (kexue.fm/archives/9708). With `joined`, if too few documents are long enough, the
    rest of the data is joined into one text and divided into documents.

    `find_sources` resolves `names`. Text files need the tokenizer. Raises DataError for unreadable sources. Raises
    EvaluationError for token ids outside 0 .. vocab_size-1, or if no document is long enough.
    """
    sources = find_sources(names)
    check_tokenizers(sources, tokenizer)
    kept: list[np.ndarray] = []
    rest, waiting = [np.zeros(0, np.int64)], (num_documents or 0) * max_length if joined else 0
    longest, needed = 0, repeated or max_length
    sample = Sample()
    documents = ((source, tokens) for source in sources for tokens in tokens_of(source, tokenizer, sample))
    with Progress("reading documents", unit="documents") as reading:
        for source, tokens in documents:
            reading.advance()
            if start is not None and not (len(tokens) and tokens[0] == start):
                tokens = np.insert(tokens, 0, start)
            _check_ids(source, tokens, vocab_size)
            longest = max(longest, len(tokens))
            if len(tokens) >= needed:
                kept.append(np.resize(tokens[:needed], max_length))
                tokens = tokens[needed:]
            if waiting > 0:
                rest.append(tokens)
                waiting -= len(tokens)
            if len(kept) == num_documents:
                break
    if joined:
        together, missing = np.concatenate(rest), (num_documents or 0) - len(kept)
        kept += np.split(together, range(max_length, len(together) + 1, max_length))[:-1][:missing]
    if not kept and joined:
        raise EvaluationError(
            f"{', '.join(names)}: has fewer than {max_length} tokens; name longer texts with --data, or lower lengths"
        )
    if not kept:
        raise EvaluationError(
            f"{', '.join(names)}: no document has the required {needed} tokens (the longest has {longest}); "
            "use smaller windows, or a corpus with longer documents"
        )
    note_losses(names, kept, sample, tokenizer)
    return Documents(tuple(kept), tuple(names), max_length, repeated, start)


def note_losses(names: Sequence[str], kept: Sequence[np.ndarray], sample: Sample, tokenizer: Tokenizer | None) -> None:
    """Warn about unknown tokens and about text that the tokenizer loses. Both make documents easier to predict."""
    if tokenizer is None:
        return
    if loss := sample.loss(tokenizer.vocab_size):
        logger.warning("%s: the tokenizer loses text: %s", ", ".join(names), loss)
    unknown = 0 if tokenizer.unknown is None else sum(int((tokens == tokenizer.unknown).sum()) for tokens in kept)
    if unknown:
        total = sum(len(tokens) for tokens in kept)
        logger.warning("%s: %d of %d tokens are unknown to the tokenizer", ", ".join(names), unknown, total)


def _check_ids(source: DocumentSource, tokens: np.ndarray, vocab_size: int) -> None:
    if len(tokens) and (tokens.max() >= vocab_size or tokens.min() < 0):
        invalid = int(tokens.max() if tokens.max() >= vocab_size else tokens.min())
        raise EvaluationError(
            f"{source.path}: token id {invalid} is outside the model's vocabulary of {vocab_size}, so the data was "
            "prepared with a different tokenizer; prepare it again with the checkpoint's tokenizer"
        )


def read_subject_documents(args: Namespace, evaluation: Evaluation, longest: int) -> Documents:
    """Read the documents selected by the options of `add_document_options`, each at least `longest` tokens long.

    Raises EvaluationError or DataError.
    """
    if args.max_length is not None and args.max_length < longest:
        raise EvaluationError(f"--max-length {args.max_length}: must be at least {longest}, the longest input")
    trained = evaluation.opened.trained
    documents = collect_documents(
        args.data or default_data(evaluation),
        evaluation.tokenizer,
        trained.model.vocab_size or trained.model.padded_vocab_size,
        args.max_length or longest,
        args.num_documents,
        args.repeat,
        evaluation.chosen_start(args.start_token),
    )
    usual = evaluation.tokenizer.usual_start if evaluation.tokenizer is not None else None
    if any(tokens[0] != usual for tokens in documents.arrays):  # prepared documents may begin with this token
        evaluation.warn_of_start(args.start_token)
    return documents


def default_data(evaluation: Evaluation) -> list[str]:
    """Return the run's test shards, or those of the built-in corpus if the run's config names no data.

    Raises EvaluationError if the config names only training data, DataError if the built-in corpus cannot be built.
    """
    data = evaluation.opened.trained.data
    if names := test_data(evaluation):
        return names
    if data.data_path or data.train_data_paths:
        raise EvaluationError(
            "test_data_paths: not set in the run's config; name text files or shard prefixes with --data"
        )
    manifest = corpora.ensure_builtin(builtin_root(data))
    prefixes = [source["test"]["prefix"] for source in corpora.read_manifest(manifest)["sources"]]
    return [str(manifest.parent / prefix) for prefix in prefixes if prefix is not None]


def test_data(evaluation: Evaluation) -> list[str]:
    """Return the prefixes of the test shards from the user's overrides or, without these, from the checkpoint's config.

    Raises EvaluationError if the prefixes in the checkpoint's config are URLs, because a checkpoint may be untrusted.
    """
    variant = evaluation.options.variants[0]
    if TEST_DATA in given_values(variant.overrides, variant.files):
        return list(evaluation.opened.trained.override(variant.overrides, variant.files).data.test_data_paths or ())
    names = evaluation.opened.trained.data.test_data_paths or []
    if addresses := [name for name in names if is_url(name)]:
        remedy = f"name it with --set '{TEST_DATA}=[URL]'"
        raise EvaluationError(f"{evaluation.options.checkpoint}: {TEST_DATA}: {not_read(addresses, remedy)}")
    return list(names)


def builtin_root(data: DataConfig) -> Path:
    """Return the folder of the built-in corpus.

    This is the folder in the checkpoint's config if the corpus is already there, and the default folder otherwise. A
    checkpoint may be untrusted, so it must not choose where files are written.
    """
    recorded = Path(data.data_root)
    return recorded if (recorded / FOLDER).is_dir() else Path(DataConfig.model_fields["data_root"].default)
