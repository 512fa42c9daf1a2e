"""Whether two tokenizers give the same ids: of one vocabulary there are files of several kinds."""

from collections.abc import Sequence
from typing import Protocol

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
"""Texts of many scripts, on which tokenizers that are to give the same ids have to agree."""


class Encoder(Protocol):
    """What is asked of a tokenizer here."""

    eod: int
    fingerprint: str

    def encode(self, text: str) -> Sequence[int]:
        """Token ids of a text."""


def first_difference(one: Encoder, other: Encoder) -> str | None:
    """The first probe that gets other ids, or None."""
    return next((text for text in PROBES if list(one.encode(text)) != list(other.encode(text))), None)


def agree(one: Encoder, other: Encoder) -> bool:
    """Whether two tokenizers end documents alike and are made of one file, or give the same ids for all probes."""
    if one.fingerprint == other.fingerprint:
        return True
    return one.eod == other.eod and first_difference(one, other) is None
