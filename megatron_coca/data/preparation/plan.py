"""What is to be prepared and how: the sources with their treatment, and the rules that hold for all."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from megatron_coca.data.errors import DataError, OutOfMemory
from megatron_coca.data.readers import open_reader
from megatron_coca.data.readers.source import Chunk, Document, Reader, ReadingProblems, ReadUnit, SourceSpec

SPLITS = ("train", "valid", "test")
MAX_RECORD_MIB = 2048
"""The largest ``SourceSpec.max_record_mib``: larger records do not fit an index of 32-bit lengths."""


@dataclass(frozen=True)
class CorpusSource:
    """A source, and what becomes of its documents.

    Attributes:
        spec: where it lies and how it is read.
        weight: its share of the training tokens, relative to the other sources; None means as many as it has.
        set_weights: relative weights of its sets, for a source that is divided into them.
        duplicates: drop documents whose text occurred before (``exact``), also those much like one before (``near``),
            or none (``keep``).
        fraction: of the documents, by a hash of their text.
        split: puts all documents on one side instead of by the hash of their key.
    """

    spec: SourceSpec
    weight: float | None = None
    set_weights: Mapping[str, float] = field(default_factory=dict)
    duplicates: Literal["exact", "near", "keep"] = "exact"
    fraction: float = 1.0
    split: str | None = None


@dataclass(frozen=True)
class Rules:
    """What holds for all sources.

    Attributes:
        valid_fraction, test_fraction: of the documents, held out by a hash of their key.
        strict: the first record that cannot be used is an error; else it is skipped, counted and named.
        skip_damaged: a file that cannot be read to its end is counted and named, what comes before is kept; else it is
            an error.
    """

    valid_fraction: float = 0.01
    test_fraction: float = 0.01
    strict: bool = False
    skip_damaged: bool = False


@dataclass(frozen=True)
class Execution:
    """How the work is done; nothing of it changes the result.

    Attributes:
        workers: further processes; 0 works in this one.
        save_seconds: between two moments that can be gone back to: the work that a kill can cost.
        progress: show a bar.
    """

    workers: int = 0
    save_seconds: float = 10.0
    progress: bool = True


def position(key: str) -> float:
    """A number in [0, 1) by the SHA-256 of a key, the same on every machine and in every run."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64


def split_of(key: str, rules: Rules) -> str:
    """The split of a document: "test" below ``test_fraction``, then "valid", else "train"."""
    place = position(key)
    if place < rules.test_fraction:
        return "test"
    return "valid" if place < rules.test_fraction + rules.valid_fraction else "train"


def shard_name(source: str, part: str, split: str) -> str:
    """Name of a shard's files: the source, the part in lower case with ``-`` for all but letters and digits, the split.

    >>> shard_name("pile", "OpenWebText2", "train"), shard_name("pile", "PubMed Central", "test")
    ('pile_openwebtext2_train', 'pile_pubmed-central_test')
    """
    slug = re.sub(r"[^a-z0-9]+", "-", part.lower()).strip("-")
    return "_".join(filter(None, (source, slug, split)))


def check(sources: Sequence[CorpusSource], rules: Rules) -> None:
    """Raise ``DataError`` for what cannot be meant."""
    names = [source.spec.name for source in sources]
    if not names or len(set(names)) != len(names):
        raise DataError(f"Sources need names that differ; given are {names}.")
    for source in sources:
        _check_source(source)
    _check_files(sources)
    given = [source.weight for source in sources if source.weight is not None]
    if given and len(given) != len(sources):
        missing = [source.spec.name for source in sources if source.weight is None]
        raise DataError(f"{', '.join(missing)}: no weight, where other sources have one. Weight all of them or none.")
    held_out = rules.valid_fraction + rules.test_fraction
    if not (rules.valid_fraction >= 0 and rules.test_fraction >= 0 and held_out <= 1):  # nor NaN
        raise DataError(
            f"valid_fraction {rules.valid_fraction} and test_fraction {rules.test_fraction} must lie in [0, 1], "
            "and their sum as well."
        )


def _check_files(sources: Sequence[CorpusSource]) -> None:
    """Two shards must not have one name; sets that are not listed are known only when they come."""
    owners: dict[str, str] = {}
    for source in sources:
        for part in source.spec.sets if source.spec.divide else ("",):
            name = shard_name(source.spec.name, part, "")
            told = f"{source.spec.name}, set {part!r}," if part else source.spec.name
            if name in owners:
                raise DataError(f"{owners[name]} and {told} would both be written to {name}_train. Rename a source.")
            owners[name] = told


def _check_source(source: CorpusSource) -> None:
    name = source.spec.name
    if not name.replace("-", "").replace("_", "").isalnum() or not name.isascii():
        raise DataError(f"Source name {name!r}: letters, digits, - and _ only, since it names files.")
    if not 0 < source.fraction <= 1:
        raise DataError(f"{name}: fraction must lie in (0, 1], not {source.fraction}.")
    if not 1 <= source.spec.max_record_mib <= MAX_RECORD_MIB:
        raise DataError(f"{name}: max_record_mib must lie in 1 to {MAX_RECORD_MIB}, not {source.spec.max_record_mib}.")
    if source.split not in (None, *SPLITS):
        raise DataError(f"{name}: split {source.split!r} is none of {', '.join(SPLITS)}.")
    for what, weight in {name: source.weight, **source.set_weights}.items():
        if weight is not None and not 0 < weight < float("inf"):
            raise DataError(f"{name}: the weight of {what} must be a positive number, not {weight}.")


@dataclass(frozen=True)
class Inputs:
    """The inputs of all sources.

    Attributes:
        units: (number of the source, unit), in the order of reading.
        unread: of each source, how many files in its folders are none of its units, by the reason.
    """

    units: Sequence[tuple[int, ReadUnit]]
    unread: Sequence[Counter[str]]

    def of(self, source: int) -> list[ReadUnit]:
        """The units of one source."""
        return [unit for owner, unit in self.units if owner == source]


def find_inputs(sources: Sequence[CorpusSource]) -> Inputs:
    """List what the sources name. ``DataError`` for a path that is missing or unreadable."""
    readers = [open_reader(source.spec) for source in sources]
    units = [(number, unit) for number, reader in enumerate(readers) for unit in reader.units()]
    return Inputs(units, [reader.unread() for reader in readers])


PARSED_BYTES = 1 << 30
"""Of a source larger than this on the disk, only about so much is parsed."""


def training_texts(sources: Sequence[CorpusSource], rules: Rules, characters: int) -> Iterator[str]:
    """About ``characters`` characters of training text, an equal share per source; all there is where that is less.

    They come evenly from all units of a source, by what each takes on the disk. Faults are not reported: the
    preparation reads the same files.

    Raises:
        DataError: a source without one usable document; everything is held out; a damaged file, unless the rules say
            to take what it gives.
    """
    held_out = True
    for source in sources:
        for text in _source_texts(source, rules, characters // len(sources)):
            held_out = False
            yield text
    if held_out:
        raise DataError("There is no text to train a tokenizer on: all documents are held out. Hold out fewer.")


def _source_texts(source: CorpusSource, rules: Rules, share: int) -> Iterator[str]:
    reader = open_reader(source.spec)
    units = reader.units()
    size = sum(unit.size for unit in units)
    problems = ReadingProblems()
    due, found = 0.0, False
    for unit in units:
        due += 0 if size else share / len(units)
        for chunk, parsed in _chunks(reader, unit, size, rules):
            due += share * chunk.read / size if size else 0
            documents = list(reader.documents(chunk, problems)) if parsed else []
            found = found or bool(documents)
            for text in _scattered(documents, source, rules) if due > 0 else ():
                due -= len(text)
                yield text
                if due <= 0:
                    break
    if not found:
        raise DataError(nothing_usable(source, units, problems))


def _chunks(reader: Reader, unit: ReadUnit, size: int, rules: Rules) -> Iterator[tuple[Chunk, bool]]:
    """The chunks of a unit, and whether each is among those of a source of ``size`` bytes that are parsed."""
    try:
        for number, chunk in enumerate(reader.chunks(unit)):
            yield chunk, number == 0 or size <= PARSED_BYTES or position(f"{chunk.path}/{number}") < PARSED_BYTES / size
    except DataError as error:
        if isinstance(error, OutOfMemory) or not rules.skip_damaged:
            raise


def _scattered(documents: Sequence[Document], source: CorpusSource, rules: Rules) -> list[str]:
    """Texts to train on in the order of their hash: the first of them are a fair choice."""
    trained = [d.text for d in documents if (source.split or split_of(d.key, rules)) == "train"]
    return sorted(trained, key=lambda text: position(f"tokenizer/{text}"))


def nothing_usable(source: CorpusSource, units: Sequence[ReadUnit], problems: ReadingProblems) -> str:
    """What to tell of a source that gave no document."""
    left_out = "; ".join(f"{count} left out: {reason}" for reason, count in problems.filtered.most_common(3))
    named = "; ".join(filter(None, (*problems.named[:3], left_out))) or "the files are empty"
    places = ", ".join(unit.path for unit in units[:3])
    return f"{source.spec.name}: no usable document in {places} ({named}). Check the files, the fields and the filters."
