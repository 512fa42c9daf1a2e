"""The identity of a checkpoint: a digest of its content that does not depend on its path.

Hashing 13 GB takes longer than many evaluations, so large tensors are sampled. A tensor of at most 1 MiB is read
completely. From a larger tensor, 16 ranges of 64 KiB are read, which include its first and its last bytes. This is at
most 1 MiB per tensor, or 0.2 GB for a model of 7 billion parameters, which takes seconds on a local disk. Training,
merging adapters and rounding change a whole tensor, so they always change the identity. A change to a few rows of a
large tensor is missed if the rows fall between two ranges. Native checkpoints do not have this limit: their identity
is the sha256 of the weights file, which is recorded in the manifest.
"""

import hashlib
import json
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from megatron_coca.checkpoints.files import CheckpointError, UnreadableError
from megatron_coca.checkpoints.unsupported import WITHOUT_EFFECT
from megatron_coca.checkpoints.weights import StoredTensor, is_archive, load_pickle, read_layout
from megatron_coca.config import Config
from megatron_coca.config.schema import MODEL_KEYS, not_at_default
from megatron_coca.support.regular_files import open_regular

RANGE, RANGES = 1 << 16, 16
"""Size of a sampled range in bytes, and number of ranges that are read from a large tensor."""
WHOLE_FILE, FILE_RANGES = 1 << 26, 256
"""Maximum size in bytes of a data file that is read completely, and number of ranges read from a larger file."""
OF_THE_WRITER = ("version", ".data/serialization_id", ".format_version", ".storage_alignment")
"""Records in PyTorch archives that depend on the writing program, not on the tensors."""


def network_digest(config: Config) -> str:
    """Return the sha256 of all keys that change what trained weights compute, except keys at their defaults.

    A key that is added to the schema later does not change the digest as long as it has its default value.
    """
    flat = config.flat()
    keys = not_at_default((key for key in MODEL_KEYS if key not in WITHOUT_EFFECT), flat)
    return hashlib.sha256(json.dumps(keys, sort_keys=True).encode()).hexdigest()


def tensors_identity(config: Config, files: Mapping[str, Path]) -> str:
    """Return the identity of a model in safetensors files; `files` maps each weight to its file.

    The identity covers the configuration and the names, dtypes, shapes and sampled values of the weights. It does not
    depend on how the weights are divided into files. Raises UnreadableError.
    """
    layouts = {path: read_layout(path) for path in dict.fromkeys(files.values())}
    return stored_identity(config, {name: (path, layouts[path][name]) for name, path in files.items()})


def stored_identity(config: Config, places: Mapping[str, tuple[Path, StoredTensor]]) -> str:
    """Return the identity of a model. `places` maps each weight to its file and its entry in this file.

    Raises UnreadableError.
    """
    digest = _begun(config)
    for name in sorted(places):
        path, entry = places[name]
        digest.update(f"{name} {entry.code} {list(entry.shape)}\n".encode())
        _read_into(digest, path, [(entry.begin, entry.nbytes)])
    return digest.hexdigest()


def stored_digests(path: Path) -> dict[str, str]:
    """Return a digest of the dtype, shape and sampled values of every tensor in a safetensors file.

    Raises CheckpointError.
    """
    found = {}
    for name, entry in read_layout(path).items():
        digest = hashlib.sha256(f"{entry.code} {list(entry.shape)}".encode())
        _read_into(digest, path, [(entry.begin, entry.nbytes)])
        found[name] = digest.hexdigest()
    return found


def pickled_digests(path: Path) -> dict[str, str]:
    """Return a digest of the dtype, shape, and first and last values of every tensor in a pickled file.

    Raises CheckpointError.
    """
    found = {}
    for name, value in load_pickle(path).items():
        digest = hashlib.sha256(f"{type(value)} {getattr(value, 'dtype', '')} {getattr(value, 'shape', '')}".encode())
        if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta:
            flat = value.detach().flatten()
            for part in (flat[:RANGE], flat[-RANGE:]):
                digest.update(part.contiguous().view(torch.uint8).numpy().tobytes())
        found[str(name)] = digest.hexdigest()
    return found


def with_ignored(identity: str, ignored: Iterable[str]) -> str:
    """Return the identity of a model that is read without the keys in `ignored`, or `identity` if there are none."""
    names = sorted(set(ignored))
    return hashlib.sha256(json.dumps([identity, *names]).encode()).hexdigest() if names else identity


def pickles_identity(config: Config, paths: Iterable[Path]) -> str:
    """Return the identity of a model in pickled files.

    The identity covers the configuration and the name of each file. For a PyTorch archive, it covers the recorded
    checksums of all tensors, and sampled bytes of tensors without a checksum. For other files, it covers sampled bytes.
    Raises UnreadableError.
    """
    digest = _begun(config)
    for path in sorted(paths):
        digest.update(f"{path.name}\n".encode())
        parts = [(0, path.stat().st_size)]
        if is_archive(path):
            records = _records(path)
            listed = sorted((record.filename.partition("/")[2], record.file_size, record.CRC) for record in records)
            digest.update(json.dumps([entry for entry in listed if entry[0] not in OF_THE_WRITER]).encode())
            # The writing program may omit checksums; then the bytes of the record are sampled.
            parts = [(record.header_offset, record.file_size) for record in records if not record.CRC]
        _read_into(digest, path, parts)
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    """Return the sha256 of a file's size and bytes. Of a file above 64 MiB, only 256 ranges of 64 KiB are read.

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
    """Return the entries of a zip archive. Raises CheckpointError."""
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            return archive.infolist()
    except (OSError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path}: damaged or not a weights file ({error}); download it again") from error


def _read_into(digest: Any, path: Path, parts: Iterable[tuple[int, int]]) -> None:
    """Add parts of a file, given as (offset, size) in bytes, to a digest. Large parts are sampled."""
    try:
        with open_regular(path) as file:
            for begin, size in parts:
                _sample(digest, file, begin, size)
    except OSError as error:
        raise UnreadableError.of(path, error) from error


def _sample(
    digest: Any, file: BinaryIO, begin: int, size: int, whole: int = RANGE * RANGES, count: int = RANGES
) -> None:
    """Add `size` bytes, starting at `begin`, to a digest. If `size` exceeds `whole`, add only `count` ranges."""
    ranges = [(begin + number, RANGE) for number in range(0, size, RANGE)]
    if size > whole:
        ranges = [(begin + (size - RANGE) * number // (count - 1), RANGE) for number in range(count)]
    for start, length in ranges:
        file.seek(start)
        digest.update(file.read(min(length, begin + size - start)))
