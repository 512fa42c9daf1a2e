"""Tokenizers of Hugging Face files: tokenizer.json, or vocab.json with merges.txt."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any

from megatron_coca.data.errors import DataError
from megatron_coca.data.tokenizers.kinds import Tokenizer, explaining_surrogates


class LibraryError(DataError):
    """The library `tokenizers` failed on a text or a file for the given reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"tokenizer: the library tokenizers failed ({reason:.200}); correct tokenizer.json, or leave out the text"
        )
        self.reason = reason

    def __reduce__(self) -> tuple[type["LibraryError"], tuple[str]]:  # worker processes pickle the error
        return LibraryError, (self.reason,)


@contextmanager
def library_errors_as_data_errors() -> Iterator[None]:
    """Raise a `LibraryError` if the library `tokenizers` fails in the body.

    The errors of the library have the type Exception, not a subclass of it. If the Rust code of the library panics, a
    PanicException is raised. It is a BaseException, like KeyboardInterrupt, and another process cannot unpickle it.
    """
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise LibraryError(str(error)) from error


class HFTokenizer(Tokenizer):
    """A Hugging Face `tokenizer.json`.

    Truncation, padding and dropout are disabled even if the file enables them. For byte-level models without a
    normalizer, `decode` reproduces the text exactly. The tokenizer of GPT-NeoX-20B has a normalizer, which composes
    characters (NFC).
    """

    tokenizer_type = "HFTokenizer"
    _ends_in_text: tuple[int, str] | None = None
    """The id and the name of the end token if a text can contain it as an ordinary word; otherwise None."""

    @library_errors_as_data_errors()
    def _open(self, data: dict[str, bytes]) -> int:
        self._model = self.build(data)
        self._model.encode_special_tokens = True  # treat the names of special tokens in a text as ordinary characters
        self._model.no_truncation()
        self._model.no_padding()
        if getattr(self._model.model, "dropout", None):
            self._model.model.dropout = None
        vocabulary = self._model.get_vocab()
        return max(vocabulary.values(), default=-1) + 1  # there may be gaps between the ids

    def build(self, data: dict[str, bytes]) -> Any:
        """Create the `tokenizers.Tokenizer` of the library from the contents of the files."""
        import tokenizers

        return tokenizers.Tokenizer.from_str(data["vocab_file"].decode("utf-8"))

    def _lookup(self, symbol: str) -> int | None:
        return self._model.token_to_id(symbol)

    @cached_property
    def unknown(self) -> int | None:
        symbol = getattr(self._model.model, "unk_token", None)
        if symbol is not None:
            return self._model.token_to_id(symbol)
        # For a unigram model, only the file contains the id.
        return None if hasattr(self._model.model, "unk_token") else json.loads(self._model.to_str())["model"]["unk_id"]

    def _find_eod(self, symbol: str | None) -> int:
        eod = super()._find_eod(symbol)
        self._make_special(eod)
        name, ids = self._model.id_to_token(eod), list[int]()
        with suppress(DataError):  # the library cannot encode this name
            ids = self._encode(name)
        if eod != self.unknown and eod in ids:
            if symbol is not None:
                raise DataError(
                    f"end_token: {symbol!r} is not a special token, so text could contain it; choose a special token"
                )
            self._ends_in_text = (eod, name)
        return eod

    def _make_special(self, token: int) -> None:
        """Turn a token that was added to the vocabulary as an ordinary token into a special one, so that text cannot
        contain it.
        """
        added = self._model.get_added_tokens_decoder().get(token)
        if added is not None and not added.special:
            self._model.add_special_tokens([added])

    @property
    def base_size(self) -> int:
        return max(self._model.get_vocab(with_added_tokens=False).values(), default=-1) + 1

    @cached_property
    def _stripping(self) -> dict[int, str]:
        """Maps id to content, for the tokens that absorb the white space next to them in a text."""
        added = self._model.get_added_tokens_decoder().items()
        return {token: each.content for token, each in added if each.lstrip or each.rstrip}

    @library_errors_as_data_errors()
    def _encode(self, text: str) -> list[int]:
        # Encoding a batch of one text skips the offsets, and uses a single thread regardless of TOKENIZERS_PARALLELISM.
        ids: list[int] = self._model.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if self._ends_in_text is not None and self._ends_in_text[0] in ids:
            raise DataError(
                f"text: contains {self._ends_in_text[1]!r}, an ordinary word with which this tokenizer ends documents; "
                "leave the word out, or choose a special token with --end-token of prepare (end_token in a recipe)"
            )
        return ids

    @property
    @library_errors_as_data_errors()
    def start(self) -> int | None:
        if self._surrounds_itself:
            return super().start
        added = self._model.encode("", add_special_tokens=True).ids
        return added[0] if added and added[0] != self.eod else None

    @property
    def names_tokens(self) -> bool:
        return not self.rules.splits

    @property
    def _surrounds_itself(self) -> bool:
        """True if the rules decide which start and end tokens are added, as in transformers. Otherwise the
        post-processor in the file decides.
        """
        return self.rules.add_bos is not None or self.rules.add_eos is not None

    def encode_rendered(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoded = self._naming(text, False)
        ids, places = self._with_rows(encoded.ids), encoded.offsets
        for number, token in enumerate(ids) if self._stripping else ():
            if (content := self._stripping.get(token)) is not None:  # the white space next to a token is not part of it
                begin = text.find(content, *places[number])
                places[number] = places[number] if begin < 0 else (begin, begin + len(content))
        return ids, places

    def encode_prompt(self, text: str, add: bool = False) -> list[int]:
        if not add or self._surrounds_itself:
            return super().encode_prompt(text, add)
        with explaining_surrogates(text):
            return self._with_rows(self._naming(text, True, self.rules.splits).ids)

    def _encode_named(self, text: str) -> list[int]:
        return self._naming(text, False, self.rules.splits).ids

    @library_errors_as_data_errors()
    def _naming(self, text: str, add: bool, split: bool = False) -> Any:
        """Encode a text. The names of special tokens are encoded as these tokens unless `split` is set. With `add`,
        start and end tokens are added.
        """
        self._model.encode_special_tokens = split
        try:
            return self._model.encode(text, add_special_tokens=add)
        finally:
            self._model.encode_special_tokens = True

    @library_errors_as_data_errors()
    def _decode(self, ids: list[int]) -> str:
        return self._model.decode(ids)

    @library_errors_as_data_errors()
    def spell(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(i) for i in ids], skip_special_tokens=False)

    def piece(self, token: int) -> str:
        return self._model.id_to_token(token) or f"<{token}>"


class GPT2BPETokenizer(HFTokenizer):
    """A byte-level BPE tokenizer in GPT-2's files `vocab.json` and `merges.txt`."""

    tokenizer_type = "GPT2BPETokenizer"

    def build(self, data: dict[str, bytes]) -> Any:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        lines = data["merge_file"].decode("utf-8").split("\n")
        lines = [line for line in lines if line.strip() and not line.startswith("#version")]
        merges = [(left, right) for left, right in (line.split(" ") for line in lines)]
        model = Tokenizer(models.BPE(vocab=json.loads(data["vocab_file"]), merges=merges))
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()
        return model


class HFGPT2Tokenizer(GPT2BPETokenizer):
    """Like `GPT2BPETokenizer`, but with the symbol `<|padding|>`, which GPT-NeoX adds after the vocabulary."""

    tokenizer_type = "HFGPT2Tokenizer"

    def build(self, data: dict[str, bytes]) -> Any:
        model = super().build(data)
        model.add_special_tokens(["<|padding|>"])
        return model
