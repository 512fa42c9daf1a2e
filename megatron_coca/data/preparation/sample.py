"""Texts to train a tokenizer on: some of every part of a corpus, none of them held out."""

from collections.abc import Iterator, Sequence

from megatron_coca.data.errors import DataError
from megatron_coca.data.preparation.plan import Rules, Source, position, split_of
from megatron_coca.data.readers import open_reader
from megatron_coca.data.readers.document import Document, Problems
from megatron_coca.data.readers.source import Reader, Unit

PARSED_BYTES = 1 << 30
"""Of a source larger than this on the disk, only about so much is parsed."""


def training_texts(sources: Sequence[Source], rules: Rules, characters: int) -> Iterator[str]:
    """Up to about ``characters`` characters of training text, an equal share per source.

    Documents are chosen by a hash of their key, from all units of a source in proportion to their size, so that they
    come from everywhere in a corpus larger than that. Faults are not reported: the preparation reads the same files.
    Raises ``DataError`` for a source without one usable document, where everything is held out, and for a damaged file,
    unless the rules say to take what it gives.
    """
    held_out = True
    for source in sources:
        for text in _source_texts(source, rules, characters // len(sources)):
            held_out = False
            yield text
    if held_out:
        raise DataError("There is no text to train a tokenizer on: all documents are held out. Hold out fewer.")


def _source_texts(source: Source, rules: Rules, share: int) -> Iterator[str]:
    reader = open_reader(source.spec)
    units = reader.units()
    size = sum(unit.size for unit in units)
    problems = Problems()
    quota, found = 0.0, False
    for unit in units:
        quota += share * (unit.size / size if size else 1 / len(units))
        for document in _sparse(reader, unit, size, problems, rules.skip_damaged):
            found = True
            wanted = position(f"tokenizer/{document.key}") < share / max(1, min(size, PARSED_BYTES))
            if quota > 0 and wanted and (source.split or split_of(document.key, rules)) == "train":
                quota -= len(document.text)
                yield document.text
    if not found:
        raise DataError(nothing_usable(source, units, problems))


def _sparse(reader: Reader, unit: Unit, size: int, problems: Problems, skip_damaged: bool) -> Iterator[Document]:
    """The documents of a unit, or of so many of its chunks that ``PARSED_BYTES`` of the source's ``size`` are read."""
    try:
        for number, chunk in enumerate(reader.chunks(unit)):
            if number == 0 or size <= PARSED_BYTES or position(f"{chunk.path}/{number}") < PARSED_BYTES / size:
                yield from reader.documents(chunk, problems)
    except DataError:
        if not skip_damaged:
            raise


def nothing_usable(source: Source, units: Sequence[Unit], problems: Problems) -> str:
    """What to tell of a source that gave no document."""
    left_out = "; ".join(f"{count} left out: {reason}" for reason, count in problems.filtered.most_common(3))
    named = "; ".join(filter(None, (*problems.named[:3], left_out))) or "the files are empty"
    places = ", ".join(unit.path for unit in units[:3])
    return f"{source.spec.name}: no usable document in {places} ({named}). Check the files, the fields and the filters."
