"""The base class of tokenizers, the tokenizer for bytes, and a check of whether two tokenizers agree.

Every tokenizer keeps the bytes of its files, so that a checkpoint can include them. If a text contains the characters
of the end-of-document symbol, they are not encoded as that symbol. Only the preparation of a corpus adds this symbol. A
tokenizer uses a single thread; use several processes for parallel work.
"""

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatron_coca.data.errors import DataError
from megatron_coca.data.tokenizers.chat import ChatTemplate
from megatron_coca.data.tokenizers.text_rules import TextRules

DESCRIPTION = "tokenizer_type.json"
# The symbols that end documents, in order of preference: the symbol of megatron-coca, of GPT-2 and GPT-NeoX, of
# LLaMA 3, of Gemma, of LLaMA, of Cohere, and of DeepSeek. In Gemma's vocabulary, </s> is an HTML tag.
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
        rows: number of rows of the model's embedding, if this number is smaller than `vocab_size`; otherwise None.
            Encoding raises `DataError` for an id without a row.
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
        # If a special token ends the turn, its id is returned, because decoded text does not contain it. Otherwise the
        # text that ends the turn is returned.
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
        """The id with which the training texts began, or else the id that the model's own library adds before texts;
        None if there is neither.
        """
        trained = self.trained_start
        return self.start if trained is None else trained

    def start_warning(self) -> str | None:
        """Return a warning for a command without ``--start-token``. Return None if the texts of this tokenizer do not
        usually begin with a start token.
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
        with explaining_surrogates(text):
            return self._with_rows(self._encode(text))

    def encode_prompt(self, text: str, add: bool = False) -> list[int]:
        """Return the token ids of `text` as the model's own library encodes a prompt. The names of special tokens are
        encoded as these tokens. With `add`, the library's start and end tokens are added. Raises `DataError` as
        `encode` does.
        """
        with explaining_surrogates(text):
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
        """Return `ids` unchanged. Raises `DataError` for an id if the embedding has no row for it."""
        if self.rows is not None and ids and (largest := max(ids)) >= self.rows:
            raise DataError(
                f"token {self.piece(largest)!r}: has id {largest}, but the embedding of the model has {self.rows} "
                "rows; leave the token out of the text, or use a model with a row for it"
            )
        return ids

    def encode_rendered(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Encode a rendered chat. Return (token ids, (first character, end) of each token). The names of special tokens
        are encoded as these tokens. Raises `DataError` if this type of tokenizer cannot locate tokens in a text.
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
        """Like `decode`, but the text includes the names of special tokens, if this type of tokenizer has them."""
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
def explaining_surrogates(text: str) -> Iterator[None]:
    """Raise a `DataError` that names the surrogate if the body fails and `text` contains a lone surrogate."""
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


class CharLevelTokenizer(Tokenizer):
    """A tokenizer that encodes UTF-8 bytes as in GPT-NeoX. It has 512 ids. Id 0 ends a document, and id 1 is padding. A
    NUL in a text has id 256, not 0.
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
    Comparing tokens also distinguishes small vocabularies that differ only in words that the probes do not contain.
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
