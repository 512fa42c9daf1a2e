"""SentencePiece tokenizers, such as LLaMA's tokenizer and the tokenizers that megatron-coca trains."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import sentencepiece

from megatron_coca.data.tokenizers.kinds import Tokenizer


@dataclass(frozen=True)
class ModelSettings:
    """The settings of a SentencePiece model that affect how text is encoded.

    Attributes:
        is_bpe: whether the model is a BPE model rather than a unigram, word or character model.
        dummy_prefix: whether a space is added before every text, as in LLaMA's models.
    """

    is_bpe: bool
    dummy_prefix: bool

    @classmethod
    def read(cls, model: bytes) -> Self:
        """Read the settings from the bytes of a valid SentencePiece model."""
        proto = _proto(model)
        trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
        return cls(is_bpe=trainer.model_type == trainer.BPE, dummy_prefix=normalizer.add_dummy_prefix)


def without_dummy_prefix(model: bytes) -> bytes:
    """Return the bytes of the same model without the dummy prefix."""
    proto = _proto(model)
    proto.normalizer_spec.add_dummy_prefix = False
    return proto.SerializeToString()


def _proto(model: bytes) -> Any:
    from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]  # the module creates its classes at run time

    return ModelProto.FromString(model)


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model. `decode(encode(x)) == x` holds for models with byte fallback and without normalization,
    such as LLaMA's models and those of `train_sentencepiece`.
    """

    tokenizer_type = "SPMTokenizer"
    _SPACE_MARK = "\u2581"  # SentencePiece's symbol for a space; this character in a text is encoded as its UTF-8 bytes

    def _open(self, data: dict[str, bytes]) -> int:
        file = data["vocab_file"]
        self._model = sentencepiece.SentencePieceProcessor(model_proto=file)
        settings = ModelSettings.read(file)
        # `_inner` encodes the later parts of a text, which must not begin with a dummy prefix.
        self._inner = self._model
        if settings.dummy_prefix:
            self._inner = sentencepiece.SentencePieceProcessor(model_proto=without_dummy_prefix(file))
        size = self._model.get_piece_size()
        marks = [self._model.piece_to_id(f"<0x{byte:02X}>") for byte in self._SPACE_MARK.encode()]
        self._space_mark_ids = marks if all(map(self._model.is_byte, marks)) else None
        return size

    @property
    def unread_names(self) -> tuple[str, ...]:
        controls = filter(self._model.is_control, range(self.vocab_size))
        return tuple(map(self._model.id_to_piece, controls))

    def _lookup(self, symbol: str) -> int | None:
        token = self._model.piece_to_id(symbol)
        return None if token == self._model.unk_id() else token

    @property
    def unknown(self) -> int | None:
        return self._model.unk_id()

    @cached_property
    def _eod_text(self) -> str | None:
        # Text never matches a control symbol, but it can match a user-defined symbol. Text that contains such a
        # separator is cut inside it, and the parts are encoded separately.
        return None if self._model.is_control(self.eod) else self._model.id_to_piece(self.eod)

    def _encode(self, text: str) -> list[int]:
        separated = self._eod_text is not None and self._eod_text in text
        if not separated and (self._space_mark_ids is None or self._SPACE_MARK not in text):
            return self._model.encode(text)
        ids: list[int] = []
        model = self._model
        for part in self._around_separator(text) if separated else (text,):
            for number, run in enumerate(part.split(self._SPACE_MARK) if self._space_mark_ids else (part,)):
                if number:
                    ids += self._space_mark_ids or ()
                    model = self._inner
                if run:
                    ids += model.encode(run)
                    model = self._inner
        return ids

    def _around_separator(self, text: str) -> Iterator[str]:
        """Split the text after the first two characters of each occurrence of the separator."""
        assert self._eod_text is not None
        head, tail = self._eod_text[:2], self._eod_text[2:]
        parts = text.split(self._eod_text)
        for number, part in enumerate(parts):
            yield (tail if number else "") + part + (head if number < len(parts) - 1 else "")

    def _decode(self, ids: list[int]) -> str:
        return self._model.decode(ids)

    def piece(self, token: int) -> str:
        return self._model.id_to_piece(token)
