"""The identity of a unit, which is part of the names of its blocks. It depends on the content of a file and not on its
folder, so that a copy at another path needs no new blocks.
"""

import hashlib
import os
from collections.abc import Mapping
from functools import cache
from importlib import metadata

from megatron_coca.data.errors import DataError
from megatron_coca.data.readers.source import ReadUnit

END_BYTES = 64 << 10
"""The digest of a file covers this many bytes at each end: the whole file if it has at most twice this size."""
version = cache(metadata.version)  # `metadata.version` reads and parses a file at each call; every block needs it
_TOKEN_LIBRARIES = ("sentencepiece", "tokenizers")


def identity(unit: ReadUnit) -> list[object]:
    """Return (name, size, digest of both ends) of a file. The name is included because it determines how the file is
    read.

    For a repository, a folder of a data set and an object in a store, the result is (path, size, stamp). Raises
    `DataError` if the file cannot be read.
    """
    if not os.path.isfile(unit.path):
        return [os.fsencode(unit.path).hex(), unit.size, unit.stamp]
    digest = hashlib.blake2b(digest_size=16)
    try:
        with open(unit.path, "rb") as file:
            digest.update(file.read(END_BYTES))
            file.seek(max(file.tell(), unit.size - END_BYTES))
            digest.update(file.read(END_BYTES))
    except OSError as error:
        raise DataError(f"{unit.path}: cannot be read ({error}); check the path and the permissions") from error
    return [os.fsencode(os.path.basename(unit.path)).hex(), unit.size, digest.hexdigest()]


def token_libraries() -> Mapping[str, str]:
    """Return the versions of the libraries that determine the tokens of a text."""
    return {name: version(name) for name in _TOKEN_LIBRARIES}
