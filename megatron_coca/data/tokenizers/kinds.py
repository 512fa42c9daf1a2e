"""The base class of tokenizers, the byte tokenizer, and the tokenizers of Hugging Face files.

Every tokenizer keeps the bytes of its files, so that a checkpoint can include them. If a text contains the characters
of the end-of-document symbol, they are not encoded as that symbol: only the preparation of a corpus writes it. A
tokenizer uses a single thread; use several processes for parallel work.
"""

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_coca.data.errors import DataError
from megatron_coca.data.tokenizers.chat import ChatTemplate
from megatron_coca.data.tokenizers.text_rules import TextRules

DESCRIPTION = "tokenizer_type.json"
# In order of preference: the symbols of megatron-coca, of GPT-2 and GPT-NeoX, LLaMA 3, Gemma, LLaMA, Cohere and
# DeepSeek. Gemma's vocabulary also has </s>, but as an HTML tag.
EOD_SYMBOLS = (
    *("<eod>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>", "<EOS_TOKEN>"),
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)
_SURROGATE = re.compile("[\ud800-\udfff]")

Files = Mapping[str, tuple[str, bytes]]
"""The files of a tokenizer. Maps the argument (vocab_file, merge_file) to (file name for saving, bytes)."""


def fingerprint_of(tokenizer_type: str, files: Files, eod: str | None = None) -> str:
    """Return the SHA-256 of the files, or of the type name if there are no files. An `eod` symbol changes the hash."""
    content = b"".join(data for _, data in files.values()) or tokenizer_type.encode()
    return hashlib.sha256(content + (b"\0" + eod.encode() if eod else b"")).hexdigest()


class Tokenizer(ABC):
    """The base class of all tokenizers.

    Args:
        files: vocab_file and, if the type uses it, merge_file, each as (name, bytes).
        eod: the symbol that ends documents. By default it is the first of `EOD_SYMBOLS` that is in the vocabulary.

    Attributes:
        files: the argument `files`.
        vocab_size: the largest id plus one.
        eod: the id that ends each document of a prepared corpus.
        start_symbol: the symbol that begins each text of a prepared corpus, or None. It does not affect `encode`.
        fingerprint: the result of `fingerprint_of`.
        chat: the chat template, or None.
        rules: how the model's own library treats texts. `rules` and `chat` do not affect the encoding of documents, so
            they do not change the fingerprint.
        rows: number of rows of the model's embedding if it is smaller than `vocab_size`, or None. Encoding a text to an
            id without a row is an error.
    """

    tokenizer_type: str
    start_symbol: str | None = None
    chat: ChatTemplate | None = None
    rules: TextRules = TextRules()
    rows: int | None = None

    def __init__(self, files: Files, eod: str | None = None) -> None:
        self.files, self._eod_symbol = files, eod
        self.fingerprint = fingerprint_of(self.tokenizer_type, files, eod)
        self.vocab_size = self._open({argument: data for argument, (_, data) in files.items()})
        self.eod = self._find_eod(eod)

    @abstractmethod
    def _open(self, data: dict[str, bytes]) -> int:
        """Create the library's tokenizer object. Return the largest id plus one."""

    @abstractmethod
    def _lookup(self, symbol: str) -> int | None:
        """Return the id of a symbol, or None if the symbol is not in the vocabulary."""

    @abstractmethod
    def _encode(self, text: str) -> list[int]: ...

    @abstractmethod
    def _decode(self, ids: list[int]) -> str: ...

    @property
    def start(self) -> int | None:
        """The id that the model's own library adds before every text, such as Gemma's `<bos>`, or None if it adds no
        id.
        """
        return self.bos if self.rules.add_bos else None

    @property
    def bos(self) -> int | None:
        """The id of the symbol that begins texts in the model's own library, even if the library does not add it to
        texts.
        """
        return None if self.rules.bos is None else self._lookup(self.rules.bos)

    @property
    def eos(self) -> int:
        """The id of the symbol that ends texts in the model's own library, or `eod` if there is no such symbol."""
        found = None if self.rules.eos is None else self._lookup(self.rules.eos)
        return self.eod if found is None else found

    @property
    def ends(self) -> tuple[int, ...]:
        """The ids that end a generated text; the first is `eod`."""
        others = (token for token in self.rules.ends if token < self.vocab_size)
        return tuple(dict.fromkeys((self.eod, *others, self.eos)))

    def turn_ends(self) -> tuple[list[int], list[str]]:
        """Return (token ids, texts) that end an answer in a chat. Raises `DataError` if there is no chat template."""
        if self.chat is None:
            raise DataError(
                "chat_template: the tokenizer has no chat template; prepare the training data with a chat template, "
                "or use plain text"
            )
        end = self.chat.end_of_turn()
        # A special token ends the turn by its id, because it does not appear in the text. Other tokens end the turn by
        # their text.
        closing = self.encode_rendered(end)[0][:1]
        ends = closing if not self.decode(closing) else []
        return ends, [end.strip() or end] if end and not ends else []

    @property
    def names_tokens(self) -> bool:
        """True if a prompt can name special tokens, so that `encode_prompt` may differ from `encode`."""
        return False

    @property
    def unread_names(self) -> tuple[str, ...]:
        """Names of special tokens that the model's own library recognizes in a prompt but `encode_prompt` does not."""
        return ()

    def token(self, symbol: str) -> int:
        """Return the id of a symbol. Raises `DataError` if the symbol is not in the vocabulary."""
        found = self._lookup(symbol)
        if found is None:
            raise DataError(
                f"{self.tokenizer_type}: the vocabulary has no symbol {symbol!r}; choose a symbol in the vocabulary"
            )
        return found

    @property
    def unknown(self) -> int | None:
        """The id of the unknown token, or None if the vocabulary has no such token."""
        return None

    @property
    def trained_start(self) -> int | None:
        """The id of `start_symbol`, with which prepared texts begin, or None if there is no start symbol."""
        return None if self.start_symbol is None else self.token(self.start_symbol)

    @property
    def usual_start(self) -> int | None:
        """The id with which the training texts began, or else the id that the model's own library adds before texts, or
        None.
        """
        trained = self.trained_start
        return self.start if trained is None else trained

    def start_warning(self) -> str | None:
        """Return a warning that texts usually begin with a start token, for commands without ``--start-token``, or
        None.
        """
        if (start := self.usual_start) is None:
            return None
        owner = "the model's own library adds" if self.trained_start is None else "the training data has"
        symbol = self.piece(start)
        return f"--start-token: not given, but {owner} {symbol} before every text; add --start-token '{symbol}'"

    def begin_texts(self, symbol: str) -> None:
        """Set `start_symbol`. Raises `DataError` if `symbol` is not a special token of the vocabulary."""
        if self.token(symbol) in self.encode(symbol):
            raise DataError(
                f"start_token: {symbol!r} is not a special token, so text could contain it; choose a special token"
            )
        self.start_symbol = symbol

    @abstractmethod
    def piece(self, token: int) -> str:
        """Return the spelling of a token in the vocabulary, for display."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text` without start or end symbols. Raises `DataError` if `text` contains a lone
        surrogate.
        """
        with _explaining_surrogates(text):
            return self._with_rows(self._encode(text))

    def encode_prompt(self, text: str, add: bool = False) -> list[int]:
        """Return the token ids of `text` as the model's own library encodes a prompt: the names of special tokens
        become these tokens and, with `add`, the library's start and end tokens are added. Raises `DataError` as
        `encode` does.
        """
        with _explaining_surrogates(text):
            ids = self._encode_named(text)
        before = [self.bos] if add and self.rules.add_bos and self.bos is not None else []
        return self._with_rows([*before, *ids, *([self.eos] if add and self.rules.add_eos else [])])

    def _encode_named(self, text: str) -> list[int]:
        return self._encode(text)

    @property
    def base_size(self) -> int:
        """The largest id plus one, without tokens that were added to the vocabulary later."""
        return self.vocab_size

    def _with_rows(self, ids: list[int]) -> list[int]:
        """Return the ids. Raises `DataError` for an id that the embedding has no row for."""
        if self.rows is not None and ids and (largest := max(ids)) >= self.rows:
            raise DataError(
                f"token {self.piece(largest)!r}: has id {largest}, but the embedding of the model has {self.rows} "
                "rows; leave the token out of the text, or use a model with a row for it"
            )
        return ids

    def encode_rendered(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return (token ids, (first character, end) of each token) for a rendered chat, in which the names of special
        tokens become these tokens. Raises `DataError` if this type of tokenizer cannot locate tokens in a text.
        """
        raise DataError(f"{self.tokenizer_type}: cannot encode chats; use HFTokenizer with the model's tokenizer.json")

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without `eod`. Raises `DataError` for an id outside the vocabulary."""
        listed = [int(i) for i in ids]
        for i in (min(listed), max(listed)) if listed else ():
            if not 0 <= i < self.vocab_size:
                raise DataError(
                    f"token id {i}: outside the vocabulary of {self.vocab_size} ids ({self.tokenizer_type}); use the "
                    "tokenizer that encoded the text"
                )
        return self._decode([i for i in listed if i != self.eod])

    def spell(self, ids: Sequence[int]) -> str:
        """Like `decode`, but include the names of special tokens, if this type of tokenizer has such names."""
        return self.decode(ids)

    def save(self, folder: Path) -> None:
        """Write the tokenizer files, and a description that `load_saved_tokenizer` reads."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in self.files.values():
            (folder / name).write_bytes(data)
        description = {"tokenizer_type": self.tokenizer_type, "vocab_size": self.vocab_size, "eod": self.eod}
        description |= {argument: name for argument, (name, _) in self.files.items()}
        description |= {"eod_symbol": self._eod_symbol} if self._eod_symbol else {}
        description |= {"start_symbol": self.start_symbol} if self.start_symbol else {}
        if self.chat is not None:
            description |= {"chat_template": self.chat.source, "chat_symbols": dict(self.chat.symbols)}
            description |= {"chat_time": self.chat.now} if self.chat.now else {}
            description |= {"chat_variables": dict(self.chat.variables)} if self.chat.variables else {}
        description |= {"text_rules": rules} if (rules := self.rules.saved()) else {}
        description["fingerprint"] = self.fingerprint
        (folder / DESCRIPTION).write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")

    def _find_eod(self, symbol: str | None) -> int:
        symbols = EOD_SYMBOLS if symbol is None else (symbol,)
        eod = next((i for i in map(self._lookup, symbols) if i is not None), None)
        if eod is None:
            raise DataError(
                f"{self.tokenizer_type}: the vocabulary has none of {', '.join(symbols)} to end documents; choose "
                "another symbol with --end-token of prepare (end_token in a recipe)"
            )
        return eod


@contextmanager
def _explaining_surrogates(text: str) -> Iterator[None]:
    """If the body fails and `text` contains a lone surrogate, raise a `DataError` that says so."""
    try:
        yield
    except Exception as error:  # each library raises a different error for text that UTF-8 cannot represent
        surrogate = _SURROGATE.search(text)
        if surrogate is None:
            raise
        raise DataError(
            f"text: contains a lone surrogate, U+{ord(surrogate[0]):X}, at character {surrogate.start()}, probably "
            "because the text was decoded incorrectly; correct the text, or leave it out"
        ) from error


class LibraryError(DataError):
    """The library `tokenizers` failed on a text or a file for the given reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"tokenizer: the library tokenizers failed ({reason:.200}); correct tokenizer.json, or leave out the text"
        )
        self.reason = reason

    def __reduce__(self) -> tuple[type["LibraryError"], tuple[str]]:  # for worker processes
        return LibraryError, (self.reason,)


@contextmanager
def library_errors_as_data_errors() -> Iterator[None]:
    """Raise a `LibraryError` if the library `tokenizers` fails in the body.

    The library raises errors of the type Exception itself. If its Rust code panics, it raises a PanicException, which
    is a BaseException like KeyboardInterrupt, and which another process cannot unpickle.
    """
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise LibraryError(str(error)) from error


class CharLevelTokenizer(Tokenizer):
    """UTF-8 bytes, as in GPT-NeoX. There are 512 ids; 0 ends a document and 1 is padding. A NUL in a text has id 256,
    not 0.
    """

    tokenizer_type = "CharLevelTokenizer"
    _NUL = 256

    def _open(self, data: dict[str, bytes]) -> int:
        return 512

    def _lookup(self, symbol: str) -> int | None:
        return None

    def _find_eod(self, symbol: str | None) -> int:
        if symbol is not None:
            raise DataError(
                f"{self.tokenizer_type}: has no symbols, because id 0 ends documents; leave out the end token "
                f"{symbol!r}"
            )
        return 0

    def _encode(self, text: str) -> list[int]:
        data = text.encode("utf-8")
        return [byte or self._NUL for byte in data] if b"\0" in data else list(data)

    def encode_rendered(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        spans = [(place, place + 1) for place, character in enumerate(text) for _ in character.encode()]
        return self.encode(text), spans

    def _decode(self, ids: list[int]) -> str:
        return bytes(i % self._NUL for i in ids if i <= self._NUL).decode("utf-8", errors="replace")

    def piece(self, token: int) -> str:
        return repr(bytes([token % self._NUL]))[2:-1] if token <= self._NUL else f"<{token}>"


PROBES = (
    "",
    "The quick brown fox jumps over the lazy dog.",
    " leading, trailing ",
    "several   spaces,\ttabs\tand\nlines\n\n\nof text\r\n",
    "12345 67.89 -0.001e10 (a+b)*c != [d]; x_y = {'z': \"w\"}",
    "def f(x):\n    if x > 0:\n        return x ** 2\n",
    "Füße, naïve, Ελληνικά, русский, עברית, हिन्दी, 日本語の文章、中文句子。한국어",
    "emoji 😀👩‍👩‍👧 and rare 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \u0000\u0001\u007f",
    "aaaaaaaaaaaaaaaaaaaaaaaa bbbbbbbbb abababababab",
)
"""Texts in many scripts. Interchangeable tokenizers must encode them identically."""


def first_difference(one: Tokenizer, other: Tokenizer) -> str | None:
    """Return the first of `PROBES` that two tokenizers encode differently, or the first token that differs, or None.

    Tokens are compared only if both tokenizers have the same type, because each type spells tokens differently.
    Comparing tokens distinguishes small vocabularies by words that are not in the probes.
    """
    probe = next((text for text in PROBES if one.encode(text) != other.encode(text)), None)
    if probe is not None or one.tokenizer_type != other.tokenizer_type:
        return probe
    both = range(min(one.vocab_size, other.vocab_size))
    return next((one.piece(token) for token in both if one.piece(token) != other.piece(token)), None)


def agree(one: Tokenizer, other: Tokenizer) -> bool:
    """Return True if two tokenizers have the same fingerprint, or the same separator and no `first_difference`."""
    if one.fingerprint == other.fingerprint:
        return True
    return one.eod == other.eod and first_difference(one, other) is None


class HFTokenizer(Tokenizer):
    """A Hugging Face `tokenizer.json`.

    Truncation, padding and dropout are disabled even if the file enables them. For byte-level models without a
    normalizer, `decode` reproduces the text exactly. The normalizer of GPT-NeoX-20B composes characters (NFC).
    """

    tokenizer_type = "HFTokenizer"
    _ends_in_text: tuple[int, str] | None = None
    """The id and the name of the end token if a text can contain it, because it is an ordinary word."""

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
        # For a unigram model, the id is only in the file.
        return None if hasattr(self._model.model, "unk_token") else json.loads(self._model.to_str())["model"]["unk_id"]

    def _find_eod(self, symbol: str | None) -> int:
        eod = super()._find_eod(symbol)
        self._make_special(eod)
        name, ids = self._model.id_to_token(eod), list[int]()
        with suppress(DataError):  # the library fails on this text
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
        """The tokens that take the white space next to them in a text."""
        added = self._model.get_added_tokens_decoder().items()
        return {token: each.content for token, each in added if each.lstrip or each.rstrip}

    @library_errors_as_data_errors()
    def _encode(self, text: str) -> list[int]:
        # Encoding a batch of one text skips the offsets, and uses a single thread regardless of TOKENIZERS_PARALLELISM.
        ids: list[int] = self._model.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if self._ends_in_text is not None and self._ends_in_text[0] in ids:
            raise DataError(
                f"text: contains {self._ends_in_text[1]!r}, an ordinary word of this tokenizer, which ends documents; "
                "leave it out, or choose a special token with --end-token of prepare (end_token in a recipe)"
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
        """True if the rules replace the tokens that the post-processor of the file adds, as in transformers."""
        return self.rules.add_bos is not None or self.rules.add_eos is not None

    def encode_rendered(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoded = self._naming(text, False)
        ids, places = self._with_rows(encoded.ids), encoded.offsets
        for number, token in enumerate(ids) if self._stripping else ():
            if (content := self._stripping.get(token)) is not None:  # white space next to it is not part of the token
                begin = text.find(content, *places[number])
                places[number] = places[number] if begin < 0 else (begin, begin + len(content))
        return ids, places

    def encode_prompt(self, text: str, add: bool = False) -> list[int]:
        if not add or self._surrounds_itself:
            return super().encode_prompt(text, add)
        with _explaining_surrogates(text):
            return self._with_rows(self._naming(text, True, self.rules.splits).ids)

    def _encode_named(self, text: str) -> list[int]:
        return self._naming(text, False, self.rules.splits).ids

    @library_errors_as_data_errors()
    def _naming(self, text: str, add: bool, split: bool = False) -> Any:
        """Encode a text. The names of special tokens become these tokens unless `split` is set. With `add`, start and
        end tokens are added.
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
