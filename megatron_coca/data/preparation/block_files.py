"""Block files: zip archives that contain the tokenized chunks of a block and the digests of its documents."""

import json
import secrets
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from io import BytesIO
from pathlib import Path

import numpy as np

from megatron_coca.data.errors import DataError
from megatron_coca.data.preparation.workers import TokenizedChunk
from megatron_coca.data.readers.source import ReadingProblems
from megatron_coca.data.tokenizers.losses import Sample
from megatron_coca.support.atomic_write import flush

BLOCK_FORMAT = 4  # a part of the names of blocks; increase it if the content or the meaning of a block file changes
DOCUMENT = np.dtype([("high", "<u8"), ("low", "<u8"), ("unit", "<i4")])
"""The record of a document for duplicate removal: the two halves of the digest of its text, and the number of its unit.
The units of a block are numbered from 0.
"""
_DOCUMENTS = "documents"
_COLUMNS = ("target", "lengths", "text_bytes", "tokens", "digests", "labels")


def write_block(
    path: Path,
    results: Iterator[tuple[int, TokenizedChunk | DataError | None]],
    advance: Callable[[float], None],
) -> str:
    """Write a block file and return an empty string. If a unit is damaged, write no file and return the error message.

    `results` yields pairs (number of the unit within the block, result). A result is a tokenized chunk. After the last
    chunk of a unit, the result is the error about this unit, or None if there is no error. `advance` is called with the
    size of each chunk.
    """
    # The suffix is random, because processes in different pods can have the same process number.
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    documents = [np.empty(0, dtype=DOCUMENT)]
    try:
        with zipfile.ZipFile(unfinished, "w") as file:
            for index, (unit, result) in enumerate(results):
                if isinstance(result, TokenizedChunk):
                    file.writestr(f"{unit}/{index}", _encoded(result))
                    documents.append(_documents(result, unit))
                    advance(result.read)
                elif result is not None:
                    return str(result)
            file.writestr(_DOCUMENTS, np.concatenate(documents).tobytes())
            # When the file is opened, the comment is compared with the file name, to detect a copy under another name.
            file.comment = path.name.encode()
        flush(unfinished)
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return ""


def _documents(chunk: TokenizedChunk, unit: int) -> np.ndarray:
    documents = np.empty(len(chunk.digests), dtype=DOCUMENT)
    halves = np.ascontiguousarray(chunk.digests).view(">u8")
    documents["high"], documents["low"], documents["unit"] = halves[:, 0], halves[:, 1], unit
    return documents


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a block file. An error inside the `with` block becomes a `DataError` with the path."""
    try:
        with zipfile.ZipFile(path) as file:
            if file.comment != path.name.encode():
                raise ValueError(f"the file is a copy of {file.comment.decode(errors='replace')}")
            yield file
    except FileNotFoundError as error:
        raise DataError(f"{path}: the file is missing; run the same command again to build the block") from error
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: cannot be read ({error}); delete this file and run the same command again") from error


def read_block(path: Path) -> Iterator[tuple[int, TokenizedChunk]]:
    """Yield (number of the unit within the block, chunk) for the chunks of a block, in order. Raises `DataError` for a
    damaged block.
    """
    with _opened(path) as file:
        for name in file.namelist():
            if name != _DOCUMENTS:
                yield int(name.partition("/")[0]), _decoded(file.read(name))  # reading also checks the CRC


def read_digests(path: Path) -> np.ndarray:
    """Return the records of a block's documents in order, as an array of type `DOCUMENT`. Raises `DataError` for a
    damaged block.
    """
    with _opened(path) as file:
        return np.frombuffer(file.read(_DOCUMENTS), dtype=DOCUMENT)


def _encoded(chunk: TokenizedChunk) -> bytes:
    """Encode a chunk as an .npz file with an array for each of its columns. One more array contains its other
    attributes as JSON.
    """
    facts = {
        "targets": chunk.targets,
        "sets": sorted(chunk.sets),
        "problems": chunk.problems.facts(),
        "read": chunk.read,
        "sample": asdict(chunk.sample),
    }
    columns = {name: column for name in _COLUMNS if (column := getattr(chunk, name)) is not None}
    stream = BytesIO()
    np.savez(stream, facts=np.frombuffer(json.dumps(facts).encode(), dtype=np.uint8), **columns)
    return stream.getvalue()


def _decoded(content: bytes) -> TokenizedChunk:
    with np.load(BytesIO(content), allow_pickle=False) as file:
        columns = dict(file)
    facts = json.loads(columns.pop("facts").tobytes())
    return TokenizedChunk(
        targets=[(part, split) for part, split in facts["targets"]],
        sets=frozenset(facts["sets"]),
        problems=ReadingProblems.restored(facts["problems"]),
        read=facts["read"],
        sample=Sample.restored(facts.get("sample", {})),
        **columns,
    )
