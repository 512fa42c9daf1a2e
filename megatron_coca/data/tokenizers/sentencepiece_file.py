"""What a SentencePiece model file says of itself, which the library does not tell.

The file is a protocol buffer, ``ModelProto`` in sentencepiece_model.proto. The numbers below are its field numbers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

_TRAINER, _NORMALIZER = 2, 3
_MODEL_TYPE, _SPACE_AS_SUFFIX = 3, 24  # of the trainer's settings
_CHARSMAP, _DUMMY_PREFIX, _REMOVE_SPACES, _ESCAPE_SPACES = 2, 3, 4, 5  # of the normaliser's
_BPE = 2
_FIXED_SIZES = {1: 8, 5: 4}
# Settings that come later win, so that these bytes at the end of a file switch its dummy prefix off.
_NO_DUMMY_PREFIX = bytes([_NORMALIZER << 3 | 2, 2, _DUMMY_PREFIX << 3, 0])


@dataclass(frozen=True)
class ModelSettings:
    """Settings that decide how a text is encoded.

    Attributes:
        is_bpe: the model merges pairs; else it is a unigram model, or one of words or characters.
        dummy_prefix: a space is put in front of every text, as LLaMA's models do.
        plain_spaces: apart from that, text goes in as it is: no rule rewrites characters, and every space becomes the
            library's mark at the beginning of what follows.
    """

    is_bpe: bool
    dummy_prefix: bool
    plain_spaces: bool

    @classmethod
    def read(cls, model: bytes) -> Self:
        """The settings in the bytes of a model that the library has opened."""
        trainer: dict[int, int | bytes] = {}
        normalizer: dict[int, int | bytes] = {}
        for number, value in _fields(model):
            if number in (_TRAINER, _NORMALIZER) and isinstance(value, bytes):
                (trainer if number == _TRAINER else normalizer).update(_fields(value))
        return cls(
            is_bpe=trainer.get(_MODEL_TYPE, 1) == _BPE,
            dummy_prefix=bool(normalizer.get(_DUMMY_PREFIX, 1)),
            plain_spaces=not normalizer.get(_CHARSMAP)
            and not normalizer.get(_REMOVE_SPACES, 1)
            and bool(normalizer.get(_ESCAPE_SPACES, 1))
            and not trainer.get(_SPACE_AS_SUFFIX, 0),
        )


def without_dummy_prefix(model: bytes) -> bytes:
    """The same model, which puts no space in front of a text."""
    return model + _NO_DUMMY_PREFIX


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) of a message's fields, in the order of the file; fixed-size numbers stay bytes."""
    position = 0
    while position < len(message):
        tag, position = _varint(message, position)
        if tag & 7 == 0:
            value, position = _varint(message, position)
            yield tag >> 3, value
            continue
        size = _FIXED_SIZES.get(tag & 7)
        if size is None:
            size, position = _varint(message, position)
        yield tag >> 3, message[position : position + size]
        position += size


def _varint(message: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[position]
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return value, position
