"""Readers for corpora in the formats in which they are distributed. Each reader yields a stream of documents."""

from megatron_coca.data.errors import DataError
from megatron_coca.data.readers.files import FileReader, read_documents
from megatron_coca.data.readers.folders import corpus_files
from megatron_coca.data.readers.huggingface_datasets import HuggingFaceReader
from megatron_coca.data.readers.repositories import RepositoryReader
from megatron_coca.data.readers.source import Reader, SourceSpec

READERS: dict[str, type[Reader]] = {
    "files": FileReader,
    "repositories": RepositoryReader,
    "huggingface": HuggingFaceReader,
}
"""Maps each value of `SourceSpec.reader` to its reader."""

__all__ = ["READERS", "corpus_files", "open_reader", "read_documents"]


def open_reader(spec: SourceSpec) -> Reader:
    """Open the reader of a source. Raises `DataError` if the reader is unknown or if `spec` has a key that the reader
    does not use.
    """
    if spec.reader not in READERS:
        raise DataError(f"{spec.name}: unknown reader {spec.reader!r}; supported readers: {', '.join(READERS)}")
    reader, unset = READERS[spec.reader], SourceSpec(spec.name, spec.paths)
    keys = frozenset[str]().union(*(each.uses for each in READERS.values()))
    for key in sorted(keys - reader.uses):
        given = getattr(spec, key)
        if given and given != getattr(unset, key):
            users = " or ".join(name for name, each in READERS.items() if key in each.uses)
            raise DataError(
                f"{spec.name}: the reader {spec.reader} does not use {key}; remove {key}, or use the reader {users}"
            )
    return reader(spec)
