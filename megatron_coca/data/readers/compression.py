"""Compressed bytes to plain ones, block by block: every frame of a file, and an error where the last one is cut off."""

import bz2
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

from megatron_coca.data.errors import DataError

FEED = 1 << 14  # compressed bytes handed over at once
# The zstandard package cannot bound what it gives for its input: 4 bytes may stand for a block of 128 KiB, so this is
# 16 MiB at most. Larger ones are not faster.
_ZSTD_FEED = 512
WINDOW = 1 << 27
"""The memory in bytes that a zstd frame may ask for, unless records may be longer: what zstd allows by default."""

_TOO_MUCH_MEMORY = ("too much memory", "Memory usage limit")  # how zstandard and lzma say it

Parts = Callable[[Any, bytes, int], Iterator[bytes]]
"""(decoder, compressed bytes, size) to the plain bytes of one frame, at most ``size`` at a time."""


@dataclass(frozen=True)
class Compression:
    """How one kind of compression is undone.

    Attributes:
        name: for messages.
        decoder: makes an object for one frame (gzip: member; bzip2, xz: stream) with ``decompress``, ``eof`` and
            ``unused_data``, as ``bz2.BZ2Decompressor`` has them; given the largest window, which only zstd needs.
        errors: what ``decompress`` raises for damaged data.
        parts: feeds the decoder.
        feed: compressed bytes that are handed over at once.
    """

    name: str
    decoder: Callable[[int], Any]
    errors: Callable[[], tuple[type[Exception], ...]]
    parts: Parts
    feed: int = FEED


def _zlib_parts(decoder: Any, data: bytes, size: int) -> Iterator[bytes]:
    while True:
        plain = decoder.decompress(data, size)
        yield plain
        data = decoder.unconsumed_tail
        if decoder.eof or (not data and len(plain) < size):
            return


def _bounded_parts(decoder: Any, data: bytes, size: int) -> Iterator[bytes]:
    """For bzip2 and xz, whose decoders keep what they were given and say when they need more."""
    yield decoder.decompress(data, size)
    while not (decoder.eof or decoder.needs_input):
        yield decoder.decompress(b"", size)


def _zstd_parts(decoder: Any, data: bytes, size: int) -> Iterator[bytes]:
    plain = decoder.decompress(data)
    return (plain[start : start + size] for start in range(0, len(plain), size))


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise DataError("Reading .zst needs the zstandard package: pip install zstandard") from error
    return zstandard


COMPRESSIONS: dict[str, Compression] = {
    ".gz": Compression("gzip", lambda window: zlib.decompressobj(wbits=31), lambda: (zlib.error,), _zlib_parts),
    ".zst": Compression(
        "zstd",
        lambda window: _zstandard().ZstdDecompressor(max_window_size=window).decompressobj(),
        lambda: (_zstandard().ZstdError,),
        _zstd_parts,
        _ZSTD_FEED,
    ),
    ".bz2": Compression("bzip2", lambda window: bz2.BZ2Decompressor(), lambda: (OSError, ValueError), _bounded_parts),
    ".xz": Compression(
        "xz",
        lambda window: lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=window + (1 << 24)),
        lambda: (lzma.LZMAError,),
        _bounded_parts,
    ),
}
"""By the last suffix of a file's name."""


def decompressed(
    place: str, blocks: Iterable[bytes], kind: Compression, size: int, window: int = WINDOW
) -> Iterator[bytes]:
    """The content of compressed ``blocks``, in blocks of at most ``size`` bytes.

    Memory holds such a block (for zstd 16 MiB) and the ``window`` of bytes that the compression refers back to,
    whatever a block grows to.

    Frames follow one another, as ``pzstd``, ``pigz``, ``pbzip2`` and ``cat`` leave them; zeros between them and behind
    the last are padding.

    Raises:
        DataError: damaged data, a frame that needs a larger window, or an end inside a frame; after everything before
            it was yielded.
    """
    decoder, errors, frames = None, kind.errors(), 0
    for data in _fed(blocks, kind.feed):
        while data:
            data = data if decoder else data.lstrip(b"\0")
            if not data:
                break
            decoder = decoder or kind.decoder(window)
            try:
                yield from filter(None, kind.parts(decoder, data, size))
            except errors as error:
                raise _undecoded(place, kind, error, window) from error
            data = decoder.unused_data if decoder.eof else b""
            frames, decoder = (frames + 1, None) if decoder.eof else (frames, decoder)
    if decoder or not frames:
        raise DataError(
            f"{place}: cannot be read to its end (the {kind.name} data stops in the middle). Is the file complete?"
        )


def _undecoded(place: str, kind: Compression, error: Exception, window: int) -> DataError:
    if any(sign in str(error) for sign in _TOO_MUCH_MEMORY):
        return DataError(
            f"{place}: the {kind.name} data needs more than {window >> 20} MiB to decompress ({error}). Compress it with "
            f"a smaller window (without --long), or set max_record_mib of the source above {window >> 20}."
        )
    return DataError(f"{place}: damaged {kind.name} data ({error}). Fetch or compress the file again.")


def _fed(blocks: Iterable[bytes], feed: int) -> Iterator[bytes]:
    return (block[start : start + feed] for block in blocks for start in range(0, len(block), feed))


_MAX_HEADER = 1 << 20  # bytes; names and attributes of a file take some kilobytes


class _Forward:
    """As much of a file over ``blocks`` as ``tarfile`` needs to read one that it never goes back in."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks, self._block, self._used, self._before = blocks, b"", 0, 0

    def tell(self) -> int:
        return self._before + self._used

    def take(self, limit: int) -> bytes:
        """The next bytes that are at hand, at most ``limit``; none at the end."""
        while self._used == len(self._block):
            self._before += self._used
            self._block, self._used = next(self._blocks, b""), 0
            if not self._block:
                return b""
        taken = self._block[self._used : self._used + limit]
        self._used += len(taken)
        return taken

    def read(self, size: int) -> bytes:
        """``size`` bytes for ``tarfile``, which reads headers by it; contents go through ``take``."""
        if size > _MAX_HEADER:
            raise tarfile.ReadError(f"a header of {size:,} bytes")
        parts = []
        while size and (part := self.take(size)):
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def seek(self, position: int) -> int:
        while self.tell() < position and self.take(position - self.tell()):
            pass
        return self.tell()


class _Archive(tarfile.TarFile):
    """Knows whether the mark at the end of an archive was the last thing seen."""

    ended = False


class _Header(tarfile.TarInfo):
    """``tarfile`` takes any damaged header, and a missing one, for the end of the archive. This one does not."""

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
            raise tarfile.ReadError(f"{error} where a file or the end of the archive should be") from error
        archive.ended = False
        return header


class Content:
    """The bytes of one file in an archive, in blocks; an iterator. ``DataError`` where the archive is cut off in it.

    Attributes:
        lost: what went wrong, if something did, is the archive's fault: it cannot be read on behind this file.
    """

    def __init__(self, place: str, stream: _Forward, size: int) -> None:
        self._place, self._stream, self._left = place, stream, size
        self.lost = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> bytes:
        if not self._left:
            raise StopIteration
        self.lost = True  # until the block is here
        block = self._stream.take(self._left)
        if not block:
            raise DataError(
                f"{self._place}: cannot be read to its end ({self._left} bytes are missing). Is the archive complete?"
            )
        self.lost = False
        self._left -= len(block)
        return block


def members(place: str, blocks: Iterator[bytes]) -> Iterator[tuple[str, Content | None]]:
    """(name, content in blocks) of everything in a tar archive but folders; content None for links and devices.

    A content must be read before the next member is asked for, or it is skipped. Archives written one after another
    are read as one.

    Raises:
        DataError: a damaged header, or an archive without its end.
    """
    stream = _Forward(blocks)
    try:
        # Undecodable names must not make reports that cannot be printed; ignore_zeros reads on behind the first end.
        options = {"tarinfo": _Header, "ignore_zeros": True, "encoding": "utf-8", "errors": "backslashreplace"}
        with _Archive(fileobj=stream, mode="r", **options) as archive:  # type: ignore[arg-type]
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # else the archive's whole list of contents grows in memory
                if not member.isdir():
                    plain = member.isreg() and not member.issparse()
                    yield member.name, Content(f"{place}!{member.name}", stream, member.size) if plain else None
    except (tarfile.TarError, ValueError, OverflowError) as error:
        raise DataError(f"{place}: cannot be read to its end ({error}). Is the archive complete?") from error
