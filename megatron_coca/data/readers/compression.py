"""Decompress streams and read tar archives in bounded memory, with an error for truncated or damaged data."""

import bz2
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import zstandard

from megatron_coca.data.errors import DataError

FEED = 1 << 14  # compressed bytes per call of a decoder
# The zstandard package cannot bound the output of a call: 4 bytes may stand for a block of 128 KiB, so this is 16 MiB
# at most. Larger values are not faster.
_ZSTD_FEED = 512
WINDOW = 1 << 27
"""Maximum window in bytes of a zstd frame, unless records may be longer: zstd's own default."""

_TOO_MUCH_MEMORY = ("too much memory", "Memory usage limit")  # in the errors of zstandard and lzma


@dataclass(frozen=True)
class Compression:
    """Decoder of one compression format.

    Attributes:
        name: for messages.
        decoder: makes an object for one frame (gzip: member; bzip2, xz: stream) with ``decompress``, ``eof`` and
            ``unused_data``, like ``bz2.BZ2Decompressor``; takes the maximum window in bytes.
        errors: exceptions of ``decompress`` for damaged data.
        parts: (decoder, compressed bytes, size) to the plain bytes, at most ``size`` at a time.
        feed: compressed bytes per call of ``parts``.
    """

    name: str
    decoder: Callable[[int], Any]
    errors: tuple[type[Exception], ...]
    parts: Callable[[Any, bytes, int], Iterator[bytes]]
    feed: int = FEED


def _zlib_parts(decoder: Any, data: bytes, size: int) -> Iterator[bytes]:
    while True:
        plain = decoder.decompress(data, size)
        yield plain
        data = decoder.unconsumed_tail
        if decoder.eof or (not data and len(plain) < size):
            return


def _bounded_parts(decoder: Any, data: bytes, size: int) -> Iterator[bytes]:
    """For bzip2 and xz, whose decoders buffer their input and report when they need more."""
    yield decoder.decompress(data, size)
    while not (decoder.eof or decoder.needs_input):
        yield decoder.decompress(b"", size)


def _zstd_parts(decoder: Any, data: bytes, size: int) -> Iterator[bytes]:
    plain = decoder.decompress(data)
    return (plain[start : start + size] for start in range(0, len(plain), size))


COMPRESSIONS: dict[str, Compression] = {
    ".gz": Compression("gzip", lambda window: zlib.decompressobj(wbits=31), (zlib.error,), _zlib_parts),
    ".zst": Compression(
        "zstd",
        lambda window: zstandard.ZstdDecompressor(max_window_size=window).decompressobj(),
        (zstandard.ZstdError,),
        _zstd_parts,
        _ZSTD_FEED,
    ),
    ".bz2": Compression("bzip2", lambda window: bz2.BZ2Decompressor(), (OSError, ValueError), _bounded_parts),
    ".xz": Compression(
        "xz",
        lambda window: lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=window + (1 << 24)),
        (lzma.LZMAError,),
        _bounded_parts,
    ),
}
"""By the last suffix of a file name."""


def decompressed(
    place: str, blocks: Iterable[bytes], kind: Compression, size: int, window: int = WINDOW
) -> Iterator[bytes]:
    """Decompress ``blocks`` into blocks of at most ``size`` bytes.

    Memory holds one such block (16 MiB for zstd) and the ``window`` of earlier bytes, however far the data expands.
    Frames may follow one another, as ``pzstd``, ``pigz``, ``pbzip2`` and ``cat`` write them; zeros between and after
    them are padding. Raises ``DataError`` for damaged data, a frame that needs a larger window, or an end inside a
    frame, after everything before it was yielded.
    """
    decoder, frames = None, 0
    for data in (block[start : start + kind.feed] for block in blocks for start in range(0, len(block), kind.feed)):
        while data:
            data = data if decoder else data.lstrip(b"\0")
            if not data:
                break
            decoder = decoder or kind.decoder(window)
            try:
                yield from filter(None, kind.parts(decoder, data, size))
            except kind.errors as error:
                if any(sign in str(error) for sign in _TOO_MUCH_MEMORY):
                    raise DataError(
                        f"{place}: the {kind.name} data needs more than {window >> 20} MiB to decompress ({error}). "
                        "Compress it with a smaller window (without --long), or set max_record_mib of the source above "
                        f"{window >> 20}."
                    ) from error
                raise DataError(
                    f"{place}: damaged {kind.name} data ({error}). Fetch or compress the file again."
                ) from error
            data = decoder.unused_data if decoder.eof else b""
            frames, decoder = (frames + 1, None) if decoder.eof else (frames, decoder)
    if decoder or not frames:
        raise DataError(
            f"{place}: cannot be read to its end (the {kind.name} data stops in the middle). Is the file complete?"
        )


_MAX_HEADER = 1 << 20  # bytes; names and attributes of a file take some kilobytes


class _ForwardFile:
    """File object over ``blocks`` for ``tarfile``, which only moves forward in it."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks, self._block, self._used, self._before = blocks, b"", 0, 0

    def tell(self) -> int:
        return self._before + self._used

    def take(self, limit: int) -> bytes:
        """The next available bytes, at most ``limit``; empty at the end."""
        while self._used == len(self._block):
            self._before += self._used
            self._block, self._used = next(self._blocks, b""), 0
            if not self._block:
                return b""
        taken = self._block[self._used : self._used + limit]
        self._used += len(taken)
        return taken

    def read(self, size: int) -> bytes:
        """Read ``size`` bytes; ``tarfile`` reads only headers this way, contents are read with ``take``."""
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
    """Remembers that the last block was the end-of-archive mark."""

    ended = False


class _Header(tarfile.TarInfo):
    """Raises for a damaged or missing header, which ``tarfile`` takes for the end of the archive."""

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
            raise tarfile.ReadError(f"{error} where a file header or the end of the archive was expected") from error
        archive.ended = False
        return header


class MemberContent:
    """Iterator over the bytes of one file in an archive, in blocks. ``DataError`` if the archive ends inside it.

    Attributes:
        lost: the archive itself failed inside this file, so that nothing after it can be read.
    """

    def __init__(self, place: str, stream: _ForwardFile, size: int) -> None:
        self._place, self._stream, self._left = place, stream, size
        self.lost = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> bytes:
        if not self._left:
            raise StopIteration
        self.lost = True  # until the block has been read
        block = self._stream.take(self._left)
        if not block:
            raise DataError(
                f"{self._place}: cannot be read to its end ({self._left} bytes are missing). Is the archive complete?"
            )
        self.lost = False
        self._left -= len(block)
        return block


def members(place: str, blocks: Iterator[bytes]) -> Iterator[tuple[str, MemberContent | None]]:
    """Yield (name, content) of all members of a tar archive except folders; content is None for links and devices.

    Content that is not read before the next member is requested is skipped. Concatenated archives are read as one.
    Raises ``DataError`` for a damaged header, or an archive without its end.
    """
    stream = _ForwardFile(blocks)
    try:
        # backslashreplace: undecodable names must not break reports; ignore_zeros: read past the first end mark.
        options = {"tarinfo": _Header, "ignore_zeros": True, "encoding": "utf-8", "errors": "backslashreplace"}
        with _Archive(fileobj=stream, mode="r", **options) as archive:  # type: ignore[arg-type]
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # else memory grows with every member
                if not member.isdir():
                    plain = member.isreg() and not member.issparse()
                    yield member.name, MemberContent(f"{place}!{member.name}", stream, member.size) if plain else None
    except (tarfile.TarError, ValueError, OverflowError) as error:
        raise DataError(f"{place}: cannot be read to its end ({error}). Is the archive complete?") from error
