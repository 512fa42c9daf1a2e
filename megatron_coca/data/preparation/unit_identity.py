"""The identity of a unit. The names of the unit's blocks depend on it. The identity of a file depends on the file's
name and content but not on its folder, so a copy in another folder needs no new blocks.
"""

import hashlib
import os
from collections.abc import Mapping
from functools import cache
from importlib import metadata

from megatron_coca.data.errors import DataError
from megatron_coca.data.readers.source import ReadUnit

END_BYTES = 64 << 10
"""The digest of a file covers this many bytes at each end. If the file has at most twice this size, the digest covers
the whole file.
"""
version = cache(metadata.version)  # every block needs versions, and `metadata.version` would parse a file each time
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
