"""Files as blocks of bytes, and blocks cut where records end."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import IO

from megatron_coca.data.errors import DataError

BLOCK = 1 << 20  # bytes; a chunk is at least one block where there is as much, and little more
MAX_RECORD = 1 << 30  # bytes; no document is as long, but a corpus read with the wrong delimiter is


@dataclass(frozen=True)
class Cut:
    """Where a stream may be cut.

    Attributes:
        ends: a record ends after each of these; none where the whole stream is one record.
        counted: what tells how many records went by. Its occurrences must not overlap, so that they add up.
    """

    ends: tuple[bytes, ...]
    counted: bytes


def raw_blocks(place: str, raw: IO[bytes], size: int) -> Iterator[bytes]:
    """The bytes of an open file in blocks of ``size``; ``DataError`` where the disk does not give them."""
    while True:
        try:
            block = raw.read(size)
        except OSError as error:
            raise DataError(f"{place}: cannot be read to its end ({error}). Check the disk and the file.") from error
        if not block:
            return
        yield block


def pieces(place: str, blocks: Iterable[bytes], cut: Cut, size: int) -> Iterator[bytes]:
    """Whole records, about ``size`` bytes of them at a time; a longer record is gathered until it ends.

    What follows the last delimiter is a record too, unless the stream turns out to be damaged there: then the complete
    records come first and the ``DataError`` after them.

    Raises:
        DataError: what ``blocks`` raises; a record of more than ``MAX_RECORD`` bytes.
    """
    held, searched = bytearray(), 0
    try:
        for block in blocks:
            held += block
            if len(held) >= size:
                end = _last_end(held, cut.ends, searched)
                if end:
                    yield _head(held, end)
                    del held[:end]
                searched = len(held)
                _check_length(place, searched)
    except DataError:
        if end := _last_end(held, cut.ends, searched):
            yield _head(held, end)
        raise
    if held or not cut.ends:
        yield bytes(held)


def _last_end(held: bytearray, ends: tuple[bytes, ...], searched: int) -> int:
    """Length of ``held`` up to the last delimiter; 0 where there is none. None lies within the first ``searched``."""
    found = ((held.rfind(end, max(0, searched - len(end) + 1)), end) for end in ends)
    return max((at + len(end) for at, end in found if at >= 0), default=0)


def _head(held: bytearray, end: int) -> bytes:
    with memoryview(held) as view:
        return bytes(view[:end])


def _check_length(place: str, length: int) -> None:
    if length > MAX_RECORD:
        raise DataError(
            f"{place}: a record goes on for more than {MAX_RECORD >> 30} GiB. Is it JSON with one object per line? "
            "Text can be read by line or by paragraph."
        )
