"""Decompress streams and read tar archives in bounded memory. Truncated or damaged data raises an error."""

import bz2
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Self

import zstandard

from megatron_coca.data.errors import DataError

FEED = 512
"""Number of compressed bytes per call of a decoder. It limits the output of a call to 16 MiB, because 4 bytes of zstd
can decompress to 128 KiB. Larger numbers of bytes are not faster.
"""
WINDOW = 1 << 31
"""Maximum window size of a zstd frame in bytes, as with `zstd --long=31`."""


CONTENT_BYTES = 1 << 16
"""Number of bytes that are read at a time from a file in an archive."""


class Compression(NamedTuple):
    """A compression format.

    Attributes:
        name: name of the format in messages.
        decoder: function that creates a decoder for one frame. A frame is called member in gzip, and stream in bzip2
            and xz. A decoder has `decompress`, `eof` and `unused_data`, like `bz2.BZ2Decompressor`.
        error: the exception that `decompress` raises for damaged data.
    """

    name: str
    decoder: Callable[[], Any]
    error: type[Exception]


COMPRESSIONS: dict[str, Compression] = {
    ".gz": Compression("gzip", lambda: zlib.decompressobj(wbits=31), zlib.error),
    ".zst": Compression(
        "zstd", lambda: zstandard.ZstdDecompressor(max_window_size=WINDOW).decompressobj(), zstandard.ZstdError
    ),
    ".bz2": Compression("bzip2", bz2.BZ2Decompressor, OSError),
    ".xz": Compression("xz", lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ), lzma.LZMAError),
}
"""Maps the last suffix of a file name to its compression format."""


def decompressed(place: str, blocks: Iterable[bytes], kind: Compression, size: int) -> Iterator[bytes]:
    """Decompress `blocks`, and yield blocks of at most `size` bytes.

    There may be several frames, as in the output of `pzstd`, `pigz`, `pbzip2` and `cat`. Zero bytes between and after
    frames are padding. Raises `DataError` if the data is damaged or ends inside a frame.
    """
    decoder, frames = None, 0
    for data in (block[start : start + FEED] for block in blocks for start in range(0, len(block), FEED)):
        while data:
            data = data if decoder else data.lstrip(b"\0")
            if not data:
                break
            decoder = decoder or kind.decoder()
            try:
                plain = decoder.decompress(data)
            except kind.error as error:
                raise DataError(
                    f"{place}: the {kind.name} data is damaged ({error}); download or compress the file again"
                ) from error
            yield from (plain[start : start + size] for start in range(0, len(plain), size))
            plain = b""  # frees the memory before the next call
            data = decoder.unused_data if decoder.eof else b""
            frames, decoder = (frames + 1, None) if decoder.eof else (frames, decoder)
    if decoder or not frames:
        raise DataError(
            f"{place}: cannot be read to its end (the {kind.name} data is truncated); check that the file is complete"
        )


class _Archive(tarfile.TarFile):
    """A tar archive that remembers whether the last block was an end-of-archive mark."""

    ended = False


class _Header(tarfile.TarInfo):
    """A member header that raises an error if it is damaged or missing. `tarfile` would treat such a header as the end
    of the archive.
    """

    @classmethod
    def fromtarfile(cls, archive: _Archive) -> Self:  # type: ignore[override]
        try:
            header = super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            archive.ended = True
            raise
        except tarfile.HeaderError as error:
            if archive.ended and isinstance(error, tarfile.EmptyHeaderError):  # type: ignore[attr-defined]
                raise
            raise tarfile.ReadError(f"{error} instead of a file header or the end of the archive") from error
        archive.ended = False
        return header


class _BlockFile:
    """A file object with the content of `blocks`, for `tarfile`. It can only be read forwards."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks, self._block, self._used = blocks, b"", 0

    def read(self, size: int) -> bytes:
        """Return the next available bytes, at most `size`, or empty bytes at the end."""
        if self._used == len(self._block):
            self._block, self._used = next(self._blocks, b""), 0
        taken = self._block[self._used : self._used + size]
        self._used += len(taken)
        return taken


def _content(place: str, stream: Any, size: int) -> Iterator[bytes]:
    """Yield the `size` bytes of an archived file, in blocks. Raises `DataError` if the archive ends inside the file."""
    while size:
        block = stream.read(min(size, CONTENT_BYTES))
        if not block:
            raise DataError(
                f"{place}: cannot be read to its end ({size} bytes are missing); check that the archive is complete"
            )
        size -= len(block)
        yield block


def members(place: str, blocks: Iterator[bytes]) -> Iterator[tuple[str, Iterator[bytes] | None]]:
    """Yield (name, content) for all members of a tar archive except folders. The content is None for links and devices.

    If the caller requests the next member before it has read the content, the rest of the content is skipped.
    Concatenated archives are read as one archive. Raises `DataError` for a damaged header or an incomplete archive.
    """
    try:
        # backslashreplace: names that are not UTF-8 must stay printable. ignore_zeros: read past the first end mark.
        options: Any = {"tarinfo": _Header, "ignore_zeros": True, "encoding": "utf-8", "errors": "backslashreplace"}
        file: Any = _BlockFile(blocks)
        with _Archive.open(fileobj=file, mode="r|", **options) as archive:
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # otherwise memory grows with every member
                if not member.isdir():
                    name, plain = f"{place}!{member.name}", member.isreg() and not member.issparse()
                    yield member.name, _content(name, archive.fileobj, member.size) if plain else None
    except (tarfile.TarError, ValueError, OverflowError) as error:
        raise DataError(f"{place}: cannot be read to its end ({error}); check that the archive is complete") from error
