"""Decompress streams and read tar archives in bounded memory, with an error for truncated or damaged data."""

import bz2
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Self

import zstandard

from megatron_coca.data.errors import DataError

FEED = 512
"""Compressed bytes per call of a decoder. This bounds the output of a call to 16 MiB, because 4 bytes of zstd may stand
for 128 KiB. Larger values are not faster.
"""
WINDOW = 1 << 31
"""Maximum window of a zstd frame in bytes, as for `zstd --long=31`."""


CONTENT_BYTES = 1 << 16
"""Bytes of a file in an archive that are read at a time."""


class Compression(NamedTuple):
    """One compression format.

    Attributes:
        name: its name in messages.
        decoder: makes an object for one frame (gzip: member; bzip2, xz: stream) like `bz2.BZ2Decompressor`, with
            `decompress`, `eof` and `unused_data`.
        error: exception of `decompress` for damaged data.
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
"""Compression formats by the last suffix of a file name."""


def decompressed(place: str, blocks: Iterable[bytes], kind: Compression, size: int) -> Iterator[bytes]:
    """Decompress `blocks` into blocks of at most `size` bytes.

    There may be several frames, as `pzstd`, `pigz`, `pbzip2` and `cat` write them; zeros between and after frames are
    padding. Raises `DataError` for damaged data, or if the data ends inside a frame.
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
                    f"{place}: damaged {kind.name} data ({error}); fetch or compress the file again"
                ) from error
            yield from (plain[start : start + size] for start in range(0, len(plain), size))
            plain = b""  # not kept while the next is made
            data = decoder.unused_data if decoder.eof else b""
            frames, decoder = (frames + 1, None) if decoder.eof else (frames, decoder)
    if decoder or not frames:
        raise DataError(
            f"{place}: cannot be read to its end (the {kind.name} data stops in the middle); check that the "
            "file is complete"
        )


class _Archive(tarfile.TarFile):
    """Remembers whether the last block was the end-of-archive mark."""

    ended = False


class _Header(tarfile.TarInfo):
    """Raises an error for a damaged or missing header, which `tarfile` takes for the end of the archive."""

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
    """File object over `blocks` for `tarfile`, which reads it forwards."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks, self._block, self._used = blocks, b"", 0

    def read(self, size: int) -> bytes:
        """Return the next available bytes, at most `size`; empty at the end."""
        if self._used == len(self._block):
            self._block, self._used = next(self._blocks, b""), 0
        taken = self._block[self._used : self._used + size]
        self._used += len(taken)
        return taken


def _content(place: str, stream: Any, size: int) -> Iterator[bytes]:
    """Yield the `size` bytes of one file in an archive, in blocks. Raises `DataError` if the archive ends inside it."""
    while size:
        block = stream.read(min(size, CONTENT_BYTES))
        if not block:
            raise DataError(
                f"{place}: cannot be read to its end ({size} bytes are missing); check that the archive is complete"
            )
        size -= len(block)
        yield block


def members(place: str, blocks: Iterator[bytes]) -> Iterator[tuple[str, Iterator[bytes] | None]]:
    """Yield (name, content) of all members of a tar archive except folders; content is None for links and devices.

    Content that is not read before the next member is requested is skipped. Concatenated archives are read as one.
    Raises `DataError` for a damaged header or an incomplete archive.
    """
    try:
        # backslashreplace: undecodable names must not break reports; ignore_zeros: read past the first end mark.
        options: Any = {"tarinfo": _Header, "ignore_zeros": True, "encoding": "utf-8", "errors": "backslashreplace"}
        file: Any = _BlockFile(blocks)
        with _Archive.open(fileobj=file, mode="r|", **options) as archive:
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # else memory grows with every member
                if not member.isdir():
                    name, plain = f"{place}!{member.name}", member.isreg() and not member.issparse()
                    yield member.name, _content(name, archive.fileobj, member.size) if plain else None
    except (tarfile.TarError, ValueError, OverflowError) as error:
        raise DataError(f"{place}: cannot be read to its end ({error}); check that the archive is complete") from error
