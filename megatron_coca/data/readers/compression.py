"""Compressed bytes to plain ones, block by block: every frame of a file, and an error where the last one is cut off."""

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron_coca.data.errors import DataError

FEED = 1 << 14  # compressed bytes handed over at once: they may grow a thousandfold, and the result lies in memory
_ZSTD_WINDOW = 2**31  # the largest that ``zstd --long=31`` writes


@dataclass(frozen=True)
class Compression:
    """How one kind of compression is undone.

    Attributes:
        name: for messages.
        decoder: makes an object for one frame (gzip: member; bzip2, xz: stream) with ``decompress``, ``eof`` and
            ``unused_data``, as ``bz2.BZ2Decompressor`` has them.
        errors: what ``decompress`` raises for damaged data.
    """

    name: str
    decoder: Callable[[], Any]
    errors: Callable[[], tuple[type[Exception], ...]]


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise DataError("Reading .zst needs the zstandard package: pip install zstandard") from error
    return zstandard


COMPRESSIONS: dict[str, Compression] = {
    ".gz": Compression("gzip", lambda: zlib.decompressobj(wbits=31), lambda: (zlib.error,)),
    ".zst": Compression(
        "zstd",
        lambda: _zstandard().ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj(),
        lambda: (_zstandard().ZstdError,),
    ),
    ".bz2": Compression("bzip2", bz2.BZ2Decompressor, lambda: (OSError, ValueError)),
    ".xz": Compression("xz", lambda: lzma.LZMADecompressor(format=lzma.FORMAT_XZ), lambda: (lzma.LZMAError,)),
}
"""By the last suffix of a file's name."""


def decompressed(place: str, blocks: Iterable[bytes], kind: Compression, size: int) -> Iterator[bytes]:
    """The content of compressed ``blocks``, in blocks of at most ``size`` bytes.

    Frames follow one another, as ``pzstd``, ``pigz``, ``pbzip2`` and ``cat`` leave them; zeros between them and behind
    the last are padding.

    Raises:
        DataError: damaged data, or an end inside a frame; after everything before it was yielded.
    """
    decoder, errors, frames = None, kind.errors(), 0
    for data in _fed(blocks):
        while data:
            data = data if decoder else data.lstrip(b"\0")
            if not data:
                break
            decoder = decoder or kind.decoder()
            try:
                plain = decoder.decompress(data)
            except errors as error:
                raise DataError(
                    f"{place}: damaged {kind.name} data ({error}). Fetch or compress the file again."
                ) from error
            yield from (plain[start : start + size] for start in range(0, len(plain), size))
            data = decoder.unused_data if decoder.eof else b""
            frames, decoder = (frames + 1, None) if decoder.eof else (frames, decoder)
    if decoder or not frames:
        raise DataError(
            f"{place}: cannot be read to its end (the {kind.name} data stops in the middle). Is the file complete?"
        )


def _fed(blocks: Iterable[bytes]) -> Iterator[bytes]:
    return (block[start : start + FEED] for block in blocks for start in range(0, len(block), FEED))
