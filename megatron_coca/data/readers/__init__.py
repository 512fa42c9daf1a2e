"""Readers: corpora as they are distributed, to a stream of documents."""

from typing import Any

from megatron_coca.data.errors import DataError
from megatron_coca.data.readers.files import FileReader, read_documents
from megatron_coca.data.readers.folders import corpus_files
from megatron_coca.data.readers.huggingface import HuggingFaceReader
from megatron_coca.data.readers.repositories import RepositoryReader
from megatron_coca.data.readers.source import Reader, SourceSpec

READERS: dict[str, type[Reader]] = {
    "files": FileReader,
    "repositories": RepositoryReader,
    "huggingface": HuggingFaceReader,
}
"""By ``SourceSpec.reader``."""

__all__ = ["READERS", "corpus_files", "open_reader", "read_documents"]


def open_reader(spec: SourceSpec) -> Reader:
    """The reader that a source asks for. ``DataError`` for an unknown one, and for what it cannot be asked."""
    if spec.reader not in READERS:
        raise DataError(f"{spec.name}: no reader {spec.reader!r}. There are {', '.join(READERS)}.")
    make: Any = READERS[spec.reader]  # a protocol says nothing about how it is made
    return make(spec)
