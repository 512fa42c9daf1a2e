"""Readers for corpora in the formats in which they are distributed. Each reader yields a stream of documents."""

from collections.abc import Callable

from megatron_coca.data.errors import DataError
from megatron_coca.data.readers.files import FileReader, read_documents
from megatron_coca.data.readers.folders import corpus_files
from megatron_coca.data.readers.huggingface_datasets import HuggingFaceReader
from megatron_coca.data.readers.repositories import RepositoryReader
from megatron_coca.data.readers.source import Reader, SourceSpec

READERS: dict[str, Callable[[SourceSpec], Reader]] = {
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
    return READERS[spec.reader](spec)
