"""Tokenizers of Hugging Face's library: tokenizer.json, and GPT-2's pair of files."""

import json
import re
from typing import Any

from megatron_coca.data.errors import DataError
from megatron_coca.data.tokenizers.kinds import FileTokenizer

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


class HFTokenizer(FileTokenizer):
    """A Hugging Face ``tokenizer.json``, or a folder with one.

    Truncation, padding and dropout that the file asks for are switched off: a corpus is written whole, and every text
    in one way. Exact for byte-level models without a normaliser; GPT-NeoX-20B's composes characters (NFC).
    """

    tokenizer_type = "HFTokenizer"

    def _open(self, data: dict[str, bytes]) -> int:
        self._model = self._build(data)
        self._model.encode_special_tokens = True  # the characters of a special token in a text are ordinary characters
        self._model.no_truncation()
        self._model.no_padding()
        if getattr(self._model.model, "dropout", None):
            self._model.model.dropout = None
        vocabulary = self._model.get_vocab()
        self.fallback_ids = frozenset(i for name, i in vocabulary.items() if _BYTE.fullmatch(name))
        self.unknown_id = vocabulary.get(getattr(self._model.model, "unk_token", None))
        return max(vocabulary.values(), default=-1) + 1  # ids may have gaps

    def _build(self, data: dict[str, bytes]) -> Any:
        import tokenizers

        return tokenizers.Tokenizer.from_str(data["vocab_file"].decode("utf-8"))

    def _lookup(self, symbol: str) -> int | None:
        return self._model.token_to_id(symbol)

    def _find_eod(self, symbol: str | None) -> int:
        found = super()._find_eod(symbol)
        if symbol is not None and found in self.encode(symbol):
            raise DataError(
                f"{symbol!r} cannot end documents: text that spells it would become the separator. Name a special token."
            )
        return found

    def _encode(self, text: str) -> list[int]:
        # A batch of one: without offsets, which nobody asks for, and on one thread whatever TOKENIZERS_PARALLELISM is.
        return self._model.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _decode(self, ids: list[int]) -> str:
        return self._model.decode(ids)

    def piece(self, token: int) -> str:
        return self._model.id_to_token(token) or f"<{token}>"


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


def _is_merge(line: str) -> bool:
    return bool(line.strip()) and not line.startswith("#version")
