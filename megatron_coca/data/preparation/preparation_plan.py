"""The plan of a preparation: the sources, the rules that apply to all of them, the splits, and the text on which a
tokenizer is trained.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from megatron_coca.data.errors import DataError
from megatron_coca.data.preparation.faults import REMEDIES, check_faults, remedy_of
from megatron_coca.data.preparation.text_cuts import cut_text
from megatron_coca.data.readers import open_reader
from megatron_coca.data.readers.source import Document, ReadingProblems, ReadUnit, SourceSpec

SPLITS = ("train", "valid", "test")
MAX_RECORD_MIB = 2048
"""The largest value that `SourceSpec.max_record_mib` may have, because the index of a shard stores 32-bit lengths."""


@dataclass(frozen=True)
class CorpusSource:
    """A source, and how its documents are used.

    Attributes:
        spec: the files of the source and how they are read.
        weight: share of the training tokens, relative to the other sources. If it is None, the source is weighted by
            its token count.
        set_weights: relative weights of the sets, for a source that is divided into sets.
        duplicates: `exact` drops documents that repeat the text of an earlier document; `keep` drops none.
        fraction: the fraction of the documents that is used. A hash of the text chooses the documents.
        split: the split of all documents. If it is None, a hash of the document's key chooses the split of each
            document.
        max_faulty: maximum share of faulty records.
        cut: whether each long text is cut into parts, one for each split (`text_cuts`).
        train_from: if it is not None, documents are used for training whenever the hash of their key is at least this
            number.
    """

    spec: SourceSpec
    weight: float | None = None
    set_weights: Mapping[str, float] = field(default_factory=dict)
    duplicates: Literal["exact", "keep"] = "exact"
    fraction: float = 1.0
    split: str | None = None
    max_faulty: float = 0.1
    cut: bool = False
    train_from: float | None = None


@dataclass(frozen=True)
class Rules:
    """The rules that apply to all sources.

    Attributes:
        valid_fraction, test_fraction: fractions of the documents that are held out for validation and test. A hash of
            the document's key chooses the documents.
        strict: whether the first unusable record stops the preparation with an error. Otherwise unusable records are
            skipped, counted and listed.
        accept_tokenizer: whether a tokenizer that loses text is accepted.
        shard_gib: a source with at least twice this many GiB on disk is divided into shards. Each shard covers about
            this many GiB. If it is None, there is only one shard for each source, set and split.
    """

    valid_fraction: float = 0.01
    test_fraction: float = 0.01
    strict: bool = False
    accept_tokenizer: bool = False
    shard_gib: float | None = None

    @property
    def shard_bytes(self) -> int | None:
        """`shard_gib` in bytes."""
        return None if self.shard_gib is None else max(1, int(self.shard_gib * (1 << 30)))


@dataclass(frozen=True)
class Execution:
    """Settings that do not affect the result.

    Attributes:
        workers: number of worker processes; 0 does all work in this process.
        progress: whether to show a progress bar.
    """

    workers: int = 0
    progress: bool = True


def hash_fraction(key: str) -> float:
    """Map a key to a number in [0, 1) by its SHA-256. The number is the same on every machine and in every run."""
    digest = hashlib.sha256(key.encode(errors="surrogatepass")).digest()  # a file name need not be valid UTF-8
    return int.from_bytes(digest[:8], "big") / 2**64


def split_of(key: str, rules: Rules) -> str:
    """Return the split of a document with this key: "test" if the hash of the key is below `test_fraction`, "valid" if
    the hash is below `test_fraction + valid_fraction`, and otherwise "train".
    """
    fraction = hash_fraction(key)
    if fraction < rules.test_fraction:
        return "test"
    return "valid" if fraction < rules.test_fraction + rules.valid_fraction else "train"


def parts_of(source: CorpusSource, document: Document, rules: Rules) -> list[tuple[Document, str]]:
    """Return one pair (document, split) for a document, or one pair for each of its parts if the source cuts texts."""
    if source.split is not None:
        return [(document, source.split)]
    if source.cut:
        parts = cut_text(document.text, rules.valid_fraction, rules.test_fraction)
        return [(replace(document, text=text), split) for text, split in parts]
    trains = source.train_from is not None and hash_fraction(document.key) >= source.train_from
    return [(document, "train" if trains else split_of(document.key, rules))]


def shard_name(source: str, part: str, split: str, number: int | None = None) -> str:
    """Return the file name of a shard. It consists of source, set and split, and of the shard's number if the source is
    divided. The set is converted to lower case, and every run of characters that are not letters or digits becomes `-`.

    >>> shard_name("pile", "OpenWebText2", "train"), shard_name("pile", "PubMed Central", "test", 7)
    ('pile_openwebtext2_train', 'pile_pubmed-central_test_00007')
    """
    slug = re.sub(r"[^a-z0-9]+", "-", part.lower()).strip("-")
    return "_".join(filter(None, (source, slug, split, "" if number is None else f"{number:05d}")))


def has_labels(source: CorpusSource) -> bool:
    """Return True if label shards are written next to the shards of this source."""
    return source.spec.messages in ("answers", "last")


def check(sources: Sequence[CorpusSource], rules: Rules) -> None:
    """Raise `DataError` for invalid sources and rules."""
    names = [source.spec.name for source in sources]
    if not names or len(set(names)) != len(names):
        raise DataError(f"sources: there must be at least one, and their names must be unique, not {names}")
    for source in sources:
        _check_source(source)
    missing = [source.spec.name for source in sources if source.weight is None]
    if missing and len(missing) != len(sources):
        raise DataError(
            f"{', '.join(missing)}: no weight, but other sources have weights; give a weight to all sources or to none"
        )
    held_out = rules.valid_fraction + rules.test_fraction
    if not (rules.valid_fraction >= 0 and rules.test_fraction >= 0 and held_out <= 1):  # also false for NaN
        raise DataError(
            f"valid_fraction, test_fraction: {rules.valid_fraction}, {rules.test_fraction} and their sum must be "
            "between 0 and 1"
        )
    if rules.shard_gib is not None and not 0 < rules.shard_gib < float("inf"):
        raise DataError(f"shard_gib: must be a positive number, not {rules.shard_gib}")


def _check_source(source: CorpusSource) -> None:
    name = source.spec.name
    if not name.replace("-", "").replace("_", "").isalnum() or not name.isascii():
        raise DataError(f"{name}: not usable in file names; use only letters, digits, - and _ in the name of a source")
    if source.duplicates not in ("exact", "keep"):
        raise DataError(f"{name}: duplicates: must be exact or keep, not {source.duplicates!r}")
    if not 0 < source.fraction <= 1:
        raise DataError(f"{name}: fraction: must be above 0 and at most 1, not {source.fraction}")
    if not 0 <= source.max_faulty <= 1:
        raise DataError(f"{name}: max_faulty: must be between 0 and 1, not {source.max_faulty}")
    if source.split not in (None, *SPLITS):
        raise DataError(f"{name}: split: must be one of {', '.join(SPLITS)}, not {source.split!r}")
    for owner, weight in {name: source.weight, **source.set_weights}.items():
        if weight is not None and not 0 < weight < float("inf"):
            raise DataError(f"{name}: the weight of {owner} must be a positive number, not {weight}")


@dataclass(frozen=True)
class Inputs:
    """The input units of all sources.

    Attributes:
        units: pairs (number of the source, unit) in reading order.
        unread: for each source, how many files in its folders are not read, counted by reason.
    """

    units: Sequence[tuple[int, ReadUnit]]
    unread: Sequence[Counter[str]]

    def of(self, source: int) -> list[ReadUnit]:
        """Return the units of one source."""
        return [unit for owner, unit in self.units if owner == source]


def find_inputs(sources: Sequence[CorpusSource]) -> Inputs:
    """List the inputs of all sources. Raises `DataError` for a missing or unreadable path."""
    readers = [open_reader(source.spec) for source in sources]
    units = [(number, unit) for number, reader in enumerate(readers) for unit in reader.units()]
    return Inputs(units, [reader.unread() for reader in readers])


PARSED_BYTES = 1 << 30
"""`training_texts` parses at most about this many bytes of each source."""


def training_texts(sources: Sequence[CorpusSource], rules: Rules, characters: int) -> Iterator[str]:
    """Yield about `characters` characters of training text, with equal shares from all sources. A source with less text
    than its share yields all of its text.

    Each unit of a source yields an amount of text in proportion to its size on disk. Unusable records are not reported
    here, because the preparation reads the same files and reports them. Raises `DataError` if a source has no usable
    document or too many faulty records, if all documents are held out, or if a file is damaged or changes while it is
    read.
    """
    held_out = True
    for source in sources:
        for text in _source_texts(source, rules, characters // len(sources)):
            held_out = False
            yield text
    if held_out:
        raise DataError(
            "train_tokenizer: there is no training text, because all documents are held out; lower valid_fraction "
            "or test_fraction"
        )


def _source_texts(source: CorpusSource, rules: Rules, share: int) -> Iterator[str]:
    reader = open_reader(source.spec)
    units = reader.units()
    size = sum(unit.size for unit in units)
    problems = ReadingProblems()
    due, usable = 0.0, 0  # `due`: how many more characters to yield for the part of the source that was read so far
    for unit in units:
        due += 0 if size else share / len(units)
        for number, chunk in enumerate(reader.chunks(unit)):
            due += share * chunk.read / size if size else 0
            if number and size > PARSED_BYTES and hash_fraction(f"{chunk.path}/{number}") >= PARSED_BYTES / size:
                continue
            documents = list(reader.documents(chunk, problems))
            usable += len(documents)
            if due <= 0:
                continue
            parts = [part for document in documents for part in parts_of(source, document, rules)]
            texts = [part.text for part, split in parts if split == "train"]
            # The order is random but reproducible.
            for text in sorted(texts, key=lambda text: hash_fraction(f"tokenizer/{text}")):
                due -= len(text)
                yield text
                if due <= 0:
                    break
        reader.check_unchanged(unit)
    check_faults(source.spec.name, usable, problems, source.max_faulty)
    if not usable:
        raise DataError(no_usable_document(source, units, problems))


def no_usable_document(source: CorpusSource, units: Sequence[ReadUnit], problems: ReadingProblems) -> str:
    """Return the error message for a source without usable documents."""
    left_out = "; ".join(f"{count} left out: {reason}" for reason, count in problems.filtered.most_common(3))
    reasons = "; ".join(filter(None, (*problems.named[:3], left_out))) or "the files are empty"
    paths = ", ".join(unit.path for unit in units[:3])
    kind, remedy = remedy_of(problems)
    known = f", or {remedy}" if kind in REMEDIES and remedy not in reasons else ""
    return (
        f"{source.spec.name}: no usable document in {paths} ({reasons}); check the files, fields and filters of the "
        f"source{known}"
    )
