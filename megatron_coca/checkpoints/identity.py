"""The identity of a checkpoint: digests of its content, independent of its path.

Hashing 13 GB takes longer than many evaluations, so large tensors are sampled. A tensor of at most 1 MiB is read
whole. Of a larger one 16 ranges of 64 KiB are read; the first is at its start and the last at its end. That is 1 MiB
for each tensor, or 0.2 GB for a model of 7 billion parameters, which takes seconds on a local disk. Training, merged
adapters and rounding change all of a tensor and are always noticed. A change of a few rows of a large tensor is missed
if it lies between two ranges. Our own checkpoints do not have this limit: their identity is the sha256 of the weights'
file, as the manifest has it.
"""

import hashlib
import json
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from megatron_coca.checkpoints.files import CheckpointError, UnreadableError
from megatron_coca.checkpoints.unsupported import WITHOUT_EFFECT
from megatron_coca.checkpoints.weights import is_archive, read_layout
from megatron_coca.config import KEYS, Config
from megatron_coca.config.schema import default_of
from megatron_coca.support.regular_files import open_regular

RANGE, RANGES = 1 << 16, 16
"""Bytes of a sampled range, and ranges of a tensor that is larger than all of them."""
WHOLE_FILE, FILE_RANGES = 1 << 26, 256
"""Bytes of a file of data that is read whole, and ranges of a larger one."""
OF_THE_WRITER = ("version", ".data/serialization_id", ".format_version", ".storage_alignment")
"""Records of PyTorch's archives that say how they were written."""


def network_digest(config: Config) -> str:
    """Return the sha256 of all keys that decide what given weights compute, without those at their defaults.

    A key that is added later, at its default, does not change it.
    """
    flat = config.flat()
    keys = {
        key: flat[key]
        for key, place in KEYS.items()
        if place.group in ("model", "position") and key not in WITHOUT_EFFECT and flat[key] != default_of(key, flat)
    }
    return hashlib.sha256(json.dumps(keys, sort_keys=True).encode()).hexdigest()


def tensors_identity(config: Config, files: Mapping[str, Path]) -> str:
    """Return the identity of a model in safetensors files, given the file of each weight.

    It covers the configuration, and names, dtypes, shapes and values (sampled) of the weights. The division into files
    does not matter. Raises UnreadableError.
    """
    digest = _begun(config)
    places = {path: read_layout(path) for path in dict.fromkeys(files.values())}
    for name in sorted(files):
        entry = places[files[name]][name]
        digest.update(f"{name} {entry.code} {list(entry.shape)}\n".encode())
        _read_into(digest, files[name], [(entry.begin, entry.nbytes)])
    return digest.hexdigest()


def pickles_identity(config: Config, paths: Iterable[Path]) -> str:
    """Return the identity of a model in pickled files: the configuration, and for each file its name, the checksums of
    all tensors, which PyTorch's archives have, and ranges of its bytes. Raises UnreadableError.
    """
    digest = _begun(config)
    for path in sorted(paths):
        digest.update(f"{path.name}\n".encode())
        parts = [(0, path.stat().st_size)]
        if is_archive(path):
            records = _records(path)
            listed = sorted((record.filename.partition("/")[2], record.file_size, record.CRC) for record in records)
            digest.update(json.dumps([entry for entry in listed if entry[0] not in OF_THE_WRITER]).encode())
            # They can be left out by the writer.
            parts = [(record.header_offset, record.file_size) for record in records if not record.CRC]
        _read_into(digest, path, parts)
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    """Return a sha256 of the size of a file and of its bytes, for one above 64 MiB of 256 ranges of 64 KiB.

    Raises OSError.
    """
    size, digest = path.stat().st_size, hashlib.sha256()
    digest.update(f"{size}\n".encode())
    with open_regular(path) as file:
        _sample(digest, file, 0, size, WHOLE_FILE, FILE_RANGES)
    return digest.hexdigest()


def _begun(config: Config) -> Any:
    return hashlib.sha256(network_digest(config).encode())


def _records(path: Path) -> list[zipfile.ZipInfo]:
    """Return the list of an archive's records. Raises CheckpointError."""
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            return archive.infolist()
    except (OSError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path}: is damaged or not a weights file ({error}); fetch it again") from error


def _read_into(digest: Any, path: Path, parts: Iterable[tuple[int, int]]) -> None:
    """Add bytes of a file to a digest: of each part (begin, bytes) all, or ranges of a large one."""
    try:
        with open_regular(path) as file:
            for begin, size in parts:
                _sample(digest, file, begin, size)
    except OSError as error:
        raise UnreadableError.of(path, error) from error


def _sample(
    digest: Any, file: BinaryIO, begin: int, size: int, whole: int = RANGE * RANGES, count: int = RANGES
) -> None:
    """Add `size` bytes from `begin` on, of more than `whole` only `count` ranges from the first to the last byte."""
    ranges = [(begin + number, RANGE) for number in range(0, size, RANGE)]
    if size > whole:
        ranges = [(begin + (size - RANGE) * number // (count - 1), RANGE) for number in range(count)]
    for start, length in ranges:
        file.seek(start)
        digest.update(file.read(min(length, begin + size - start)))
