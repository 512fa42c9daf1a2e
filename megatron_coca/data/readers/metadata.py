"""What is known of repositories from elsewhere: a JSONL file with stars and licences."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_coca.data.errors import DataError

Known = tuple[int | None, tuple[str, ...] | None]
"""(stars, licences); None where the file does not say."""


def load_metadata(path: Path) -> dict[str, Known]:
    """Stars and licences by repository, in lower case. ``DataError`` for a line that is no such record."""
    known = {}
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line) if line.strip() else None
                if record is not None:
                    known[record["repository"].lower()] = _stars(record), _licences(record)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise DataError(
                    f'{path}:{number}: needs {{"repository": "owner/name", "stars": 3, "licence": "MIT"}} ({error!r}).'
                ) from error
    return known


def digest(path: Path) -> str:
    """SHA-256 of the file. ``DataError`` where it cannot be read."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error}). Check the path and its permissions.") from error


def _stars(record: Mapping[str, Any]) -> int | None:
    return None if record.get("stars") is None else int(record["stars"])


def _licences(record: Mapping[str, Any]) -> tuple[str, ...] | None:
    found = record.get("licence", record.get("license"))
    return (found,) if isinstance(found, str) else None if found is None else tuple(map(str, found))
