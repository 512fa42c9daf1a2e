"""Plan of a preparation: sources, the rules that apply to all of them, their splits, and text to train a tokenizer
on.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from megatron_coca.data.errors import DataError
from megatron_coca.data.preparation.faults import check_faults
from megatron_coca.data.readers import open_reader
from megatron_coca.data.readers.source import ReadingProblems, ReadUnit, SourceSpec

SPLITS = ("train", "valid", "test")
MAX_RECORD_MIB = 2048
"""The largest `SourceSpec.max_record_mib`: an index has 32-bit lengths."""


@dataclass(frozen=True)
class CorpusSource:
    """A source and the treatment of its documents.

    Attributes:
        spec: its files and how they are read.
        weight: share of the training tokens, relative to the other sources; None weights by tokens.
        set_weights: relative weights of its sets, for a source that is divided into them.
        duplicates: drop documents with a text that occurred before (`exact`), or none (`keep`).
        fraction: use this fraction of the documents, chosen by a hash of their text.
        split: put all documents into one split instead of splitting by the hash of their key.
        max_faulty: the largest share of records that may be faulty.
    """

    spec: SourceSpec
    weight: float | None = None
    set_weights: Mapping[str, float] = field(default_factory=dict)
    duplicates: Literal["exact", "keep"] = "exact"
    fraction: float = 1.0
    split: str | None = None
    max_faulty: float = 0.1


@dataclass(frozen=True)
class Rules:
    """Rules for all sources.

    Attributes:
        valid_fraction, test_fraction: fractions of the documents, held out by a hash of their key.
        strict: the first unusable record is an error; otherwise it is skipped, counted and named.
        accept_tokenizer: accept a tokenizer that loses text.
    """

    valid_fraction: float = 0.01
    test_fraction: float = 0.01
    strict: bool = False
    accept_tokenizer: bool = False


@dataclass(frozen=True)
class Execution:
    """Settings that do not affect the result.

    Attributes:
        workers: worker processes; 0 works in this process.
        progress: show a bar.
    """

    workers: int = 0
    progress: bool = True


def hash_fraction(key: str) -> float:
    """Map a key to a number in [0, 1) by its SHA-256: the same on every machine and in every run."""
    digest = hashlib.sha256(key.encode(errors="surrogatepass")).digest()  # the name of a file may not be UTF-8
    return int.from_bytes(digest[:8], "big") / 2**64


def split_of(key: str, rules: Rules) -> str:
    """The split of a document: "test" below `test_fraction`, then "valid", else "train"."""
    fraction = hash_fraction(key)
    if fraction < rules.test_fraction:
        return "test"
    return "valid" if fraction < rules.test_fraction + rules.valid_fraction else "train"


def shard_name(source: str, part: str, split: str) -> str:
    """Name the files of a shard by source, set and split. The set is in lower case, with `-` for all characters other
    than letters and digits.

    >>> shard_name("pile", "OpenWebText2", "train"), shard_name("pile", "PubMed Central", "test")
    ('pile_openwebtext2_train', 'pile_pubmed-central_test')
    """
    slug = re.sub(r"[^a-z0-9]+", "-", part.lower()).strip("-")
    return "_".join(filter(None, (source, slug, split)))


def has_labels(source: CorpusSource) -> bool:
    """True if label shards are written beside those of the source."""
    return source.spec.messages in ("answers", "last")


def check(sources: Sequence[CorpusSource], rules: Rules) -> None:
    """Raise `DataError` for invalid sources and rules."""
    names = [source.spec.name for source in sources]
    if not names or len(set(names)) != len(names):
        raise DataError(f"sources: names must be unique, not {names}")
    for source in sources:
        _check_source(source)
    missing = [source.spec.name for source in sources if source.weight is None]
    if missing and len(missing) != len(sources):
        raise DataError(
            f"{', '.join(missing)}: no weight, but other sources have one; give a weight to all of them or none"
        )
    held_out = rules.valid_fraction + rules.test_fraction
    if not (rules.valid_fraction >= 0 and rules.test_fraction >= 0 and held_out <= 1):  # nor NaN
        raise DataError(
            f"valid_fraction, test_fraction: {rules.valid_fraction} and {rules.test_fraction} and their sum "
            "must lie in [0, 1]"
        )


def _check_source(source: CorpusSource) -> None:
    name = source.spec.name
    if not name.replace("-", "").replace("_", "").isalnum() or not name.isascii():
        raise DataError(f"{name}: not a name for files; use only letters, digits, - and _ in the name of a source")
    if source.duplicates not in ("exact", "keep"):
        raise DataError(f"{name}: duplicates must be exact or keep, not {source.duplicates!r}")
    if not 0 < source.fraction <= 1:
        raise DataError(f"{name}: fraction must lie in (0, 1], not {source.fraction}")
    if not 0 <= source.max_faulty <= 1:
        raise DataError(f"{name}: max_faulty must lie in [0, 1], not {source.max_faulty}")
    if source.split not in (None, *SPLITS):
        raise DataError(f"{name}: split {source.split!r} is none of {', '.join(SPLITS)}")
    for owner, weight in {name: source.weight, **source.set_weights}.items():
        if weight is not None and not 0 < weight < float("inf"):
            raise DataError(f"{name}: the weight of {owner} must be a positive number, not {weight}")


@dataclass(frozen=True)
class Inputs:
    """The inputs of all sources.

    Attributes:
        units: (number of the source, unit) in reading order.
        unread: for each source, the files in its folders that are not read, counted by reason.
    """

    units: Sequence[tuple[int, ReadUnit]]
    unread: Sequence[Counter[str]]

    def of(self, source: int) -> list[ReadUnit]:
        """The units of one source."""
        return [unit for owner, unit in self.units if owner == source]


def find_inputs(sources: Sequence[CorpusSource]) -> Inputs:
    """List the inputs of the sources. Raises `DataError` for a path that is missing or unreadable."""
    readers = [open_reader(source.spec) for source in sources]
    units = [(number, unit) for number, reader in enumerate(readers) for unit in reader.units()]
    return Inputs(units, [reader.unread() for reader in readers])


PARSED_BYTES = 1 << 30
"""At most about this many bytes of a source are parsed."""


def training_texts(sources: Sequence[CorpusSource], rules: Rules, characters: int) -> Iterator[str]:
    """Yield about `characters` characters of training text with an equal share from each source, or all text if there
    is less.

    The texts are spread evenly over all units of a source, by size on disk. Problems of records are not reported,
    because the preparation reads the same files. Raises `DataError` if a source has no usable document or too many
    faulty records, if everything is held out, or if a file is damaged or changes.
    """
    held_out = True
    for source in sources:
        for text in _source_texts(source, rules, characters // len(sources)):
            held_out = False
            yield text
    if held_out:
        raise DataError(
            "train_tokenizer: no text, because all documents are held out; lower valid_fraction or test_fraction"
        )


def _source_texts(source: CorpusSource, rules: Rules, share: int) -> Iterator[str]:
    reader = open_reader(source.spec)
    units = reader.units()
    size = sum(unit.size for unit in units)
    problems = ReadingProblems()
    due, usable = 0.0, 0  # characters that are due after the part that was read
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
            texts = [d.text for d in documents if (source.split or split_of(d.key, rules)) == "train"]
            for text in sorted(texts, key=lambda text: hash_fraction(f"tokenizer/{text}")):  # a random choice
                due -= len(text)
                yield text
                if due <= 0:
                    break
        reader.check_unchanged(unit)
    check_faults(source.spec.name, usable, problems, source.max_faulty)
    if not usable:
        raise DataError(no_usable_document(source, units, problems))


def no_usable_document(source: CorpusSource, units: Sequence[ReadUnit], problems: ReadingProblems) -> str:
    """The message for a source without a document."""
    left_out = "; ".join(f"{count} left out: {reason}" for reason, count in problems.filtered.most_common(3))
    reasons = "; ".join(filter(None, (*problems.named[:3], left_out))) or "the files are empty"
    paths = ", ".join(unit.path for unit in units[:3])
    return f"{source.spec.name}: no usable document in {paths} ({reasons}); check files, fields and filters"
