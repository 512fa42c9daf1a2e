"""The tokenizers behind one protocol.

Every tokenizer keeps the bytes of the file(s) it was made from, so that a checkpoint can carry it. The literal
characters of the end-of-document symbol inside a text never encode to that symbol: only the preparation of a corpus
writes it.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import sentencepiece

from megatron_coca.data.errors import DataError

DESCRIPTION = "tokenizer_type.json"
# In order of preference: ours, GPT-2's and GPT-NeoX's, LLaMA 3's, LLaMA's.
EOD_SYMBOLS = ("<eod>", "<|endoftext|>", "<|end_of_text|>", "</s>")


@runtime_checkable
class Tokenizer(Protocol):
    """What the framework asks of a tokenizer. ``eod`` is the id that ends each document of a prepared corpus."""

    tokenizer_type: str
    vocab_size: int
    eod: int
    fingerprint: str

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, without any start or end symbol."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; ``eod`` gives nothing. ``DataError`` for an id outside the vocabulary."""

    def save(self, folder: Path) -> None:
        """Write the model file(s) and a description that ``load_saved_tokenizer`` reads back."""


class FileTokenizer(ABC):
    """What the tokenizers share. ``files`` maps vocab_file and merge_file, where there is one, to (name, bytes)."""

    tokenizer_type: str

    def __init__(self, files: dict[str, tuple[str, bytes]]) -> None:
        self._files = files
        content = b"".join(data for _, data in files.values()) or self.tokenizer_type.encode()
        self.fingerprint = hashlib.sha256(content).hexdigest()
        self.vocab_size, self.eod = self._open({argument: data for argument, (_, data) in files.items()})

    @abstractmethod
    def _open(self, data: dict[str, bytes]) -> tuple[int, int]:
        """Build the library's object; return vocab_size and eod."""

    @abstractmethod
    def encode(self, text: str) -> list[int]: ...

    @abstractmethod
    def _decode(self, ids: list[int]) -> str: ...

    def decode(self, ids: Sequence[int]) -> str:
        listed = [int(i) for i in ids]
        for i in listed:
            if not 0 <= i < self.vocab_size:
                raise DataError(f"Token id {i} is outside the vocabulary of {self.vocab_size} ({self.tokenizer_type}).")
        return self._decode([i for i in listed if i != self.eod])

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in self._files.values():
            (folder / name).write_bytes(data)
        description = {"tokenizer_type": self.tokenizer_type, "vocab_size": self.vocab_size, "eod": self.eod}
        description |= {argument: name for argument, (name, _) in self._files.items()}
        description["fingerprint"] = self.fingerprint
        (folder / DESCRIPTION).write_text(json.dumps(description, indent=1) + "\n")


def _first_symbol(lookup: Callable[[str], int | None]) -> int:
    for name in EOD_SYMBOLS:
        if (found := lookup(name)) is not None:
            return found
    raise DataError(f"The vocabulary has no symbol that ends a document: one of {', '.join(EOD_SYMBOLS)} is needed.")


def _is_merge(line: str) -> bool:
    return bool(line.strip()) and not line.startswith("#version")


class SentencePieceTokenizer(FileTokenizer):
    """A SentencePiece model. Exact (``decode(encode(x)) == x``) for models that ``train_sentencepiece`` made."""

    tokenizer_type = "SPMTokenizer"
    _SPACE_MARK = "\u2581"  # SentencePiece's own spelling of a space; in a text it goes through as bytes instead

    def _open(self, data: dict[str, bytes]) -> tuple[int, int]:
        self._model = sentencepiece.SentencePieceProcessor(model_proto=data["vocab_file"])
        size = self._model.get_piece_size()
        marks = [self._model.piece_to_id(f"<0x{byte:02X}>") for byte in self._SPACE_MARK.encode()]
        self._space_mark_ids = marks if all(self._model.is_byte(i) for i in marks) else None
        eod = _first_symbol(lambda name: i if (i := self._model.piece_to_id(name)) != self._model.unk_id() else None)
        # A control symbol is never matched in a text; a user-defined one is: encode() takes it in two parts.
        self._eod_text = None if self._model.is_control(eod) else self._model.id_to_piece(eod)
        return size, eod

    def encode(self, text: str) -> list[int]:
        if self._eod_text and self._eod_text in text:
            pieces = text.split(self._eod_text)
            heads = [self._eod_text[:2]] * (len(pieces) - 1) + [""]
            tails = ["", *[self._eod_text[2:]] * (len(pieces) - 1)]
            parts = zip(tails, pieces, heads, strict=True)
            return [i for part in parts for i in self._encode_marks("".join(part))]
        return self._encode_marks(text)

    def _encode_marks(self, text: str) -> list[int]:
        if self._space_mark_ids is None or self._SPACE_MARK not in text:
            return self._model.encode(text)
        ids: list[int] = []
        for number, part in enumerate(text.split(self._SPACE_MARK)):
            ids += self._space_mark_ids if number else []
            ids += self._model.encode(part) if part else []
        return ids

    def _decode(self, ids: list[int]) -> str:
        return self._model.decode(ids)


class HFTokenizer(FileTokenizer):
    """A Hugging Face ``tokenizer.json``."""

    tokenizer_type = "HFTokenizer"

    def _open(self, data: dict[str, bytes]) -> tuple[int, int]:
        self._model = self._build(data)
        self._model.encode_special_tokens = True  # the characters of a special token in a text are ordinary characters
        return self._model.get_vocab_size(), _first_symbol(self._model.token_to_id)

    def _build(self, data: dict[str, bytes]) -> Any:
        import tokenizers

        return tokenizers.Tokenizer.from_str(data["vocab_file"].decode("utf-8"))

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text, add_special_tokens=False).ids

    def _decode(self, ids: list[int]) -> str:
        return self._model.decode(ids)


class GPT2BPETokenizer(HFTokenizer):
    """GPT-2's ``vocab.json`` and ``merges.txt``."""

    tokenizer_type = "GPT2BPETokenizer"

    def _build(self, data: dict[str, bytes]) -> Any:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        lines = data["merge_file"].decode("utf-8").split("\n")
        merges = [(left, right) for left, right in (line.split(" ") for line in lines if _is_merge(line))]
        model = Tokenizer(models.BPE(vocab=json.loads(data["vocab_file"]), merges=merges))
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()
        return model


class HFGPT2Tokenizer(GPT2BPETokenizer):
    """As ``GPT2BPETokenizer``, with the ``<|padding|>`` symbol that GPT-NeoX adds after the vocabulary."""

    tokenizer_type = "HFGPT2Tokenizer"

    def _build(self, data: dict[str, bytes]) -> Any:
        model = super()._build(data)
        model.add_special_tokens(["<|padding|>"])
        return model


class CharLevelTokenizer(FileTokenizer):
    """UTF-8 bytes, as GPT-NeoX: 512 ids, 0 ends a document, 1 is padding. A NUL in a text, which would be 0, is 256."""

    tokenizer_type = "CharLevelTokenizer"
    _NUL = 256

    def _open(self, data: dict[str, bytes]) -> tuple[int, int]:
        return 512, 0

    def encode(self, text: str) -> list[int]:
        return [byte or self._NUL for byte in text.encode("utf-8")]

    def _decode(self, ids: list[int]) -> str:
        return bytes(i % self._NUL for i in ids if i <= self._NUL).decode("utf-8", errors="replace")
