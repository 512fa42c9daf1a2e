"""Change the splits of a source with few documents if a hash of the keys would leave one of its splits empty."""

from collections.abc import Sequence
from dataclasses import replace

from megatron_coca.data.errors import DataError, StoreUnavailable
from megatron_coca.data.preparation.preparation_plan import CorpusSource, Inputs, Rules, hash_fraction, split_of
from megatron_coca.data.preparation.text_cuts import SHORTEST_CUT
from megatron_coca.data.readers import open_reader
from megatron_coca.data.readers.source import Document, ReadingProblems, ReadUnit, content_key

FEW = 20
"""A source with at most this many documents counts as a source with few documents."""


def with_splits(sources: Sequence[CorpusSource], inputs: Inputs, rules: Rules) -> list[CorpusSource]:
    """Return the sources. A source with few documents is changed if the hash would leave one of its splits empty.
    Held-out splits with fraction 0 do not count.

    A changed source cuts its long texts (`CorpusSource.cut`). Sources with only short texts are not cut, and neither
    are chats and documents with their own keys. If all documents of such a source would be held out, the documents with
    the largest hash of their key are used for training (`CorpusSource.train_from`).

    Reading stops after `FEW` documents. Damaged files are not reported here, because the preparation reports them.
    """
    return [_with_split(source, inputs.of(number), rules) for number, source in enumerate(sources)]


def _with_split(source: CorpusSource, units: Sequence[ReadUnit], rules: Rules) -> CorpusSource:
    held_out = rules.valid_fraction + rules.test_fraction
    if source.split or source.fraction < 1 or source.spec.reader != "files" or not 0 < held_out < 1:
        return source
    documents = _few(source, units)
    if not documents:
        return source
    splits = {split_of(document.key, rules) for document in documents}
    fractions = {"train": 1 - held_out, "valid": rules.valid_fraction, "test": rules.test_fraction}
    if all(split in splits for split, fraction in fractions.items() if fraction):
        return source
    own_keys = source.spec.messages or any(document.key != content_key(document.text) for document in documents)
    if not own_keys and any(len(document.text) >= SHORTEST_CUT for document in documents):
        return replace(source, cut=True)
    if "train" not in splits:
        return replace(source, train_from=max(hash_fraction(document.key) for document in documents))
    return source


def _few(source: CorpusSource, units: Sequence[ReadUnit]) -> list[Document]:
    """Return all documents of a source, or an empty list if there are more than `FEW` or if a file is damaged."""
    reader, documents = open_reader(source.spec), list[Document]()
    try:
        for unit in units:
            for chunk in reader.chunks(unit):
                for document in reader.documents(chunk, ReadingProblems()):
                    documents.append(document)
                    if len(documents) > FEW:
                        return []
    except StoreUnavailable:
        raise
    except DataError:
        return []
    return documents
