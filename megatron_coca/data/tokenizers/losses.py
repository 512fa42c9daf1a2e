"""Detect tokenizers that lose text. The signs are passages that differ after decoding, unknown tokens, and too many
tokens per byte.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from megatron_coca.data.tokenizers.kinds import Tokenizer

PASSAGE = 1024
"""Length of a passage in characters."""
MOST_LOST, MOST_UNKNOWN = 0.1, 0.01
"""Maximum share of passages that differ after decoding, and maximum share of unknown tokens."""
MOST_TOKENS_PER_BYTE, LARGE_VOCABULARY = 0.75, 4096
"""A vocabulary of at least `LARGE_VOCABULARY` ids should need at most `MOST_TOKENS_PER_BYTE` tokens per byte."""


@dataclass
class Sample:
    """Counts over passages of text that were encoded and decoded again.

    Attributes:
        passages: number of passages.
        lost: number of passages that differ after decoding.
        tokens: number of tokens in all passages.
        unknown: number of unknown tokens.
        bytes: number of UTF-8 bytes in all passages.
    """

    passages: int = 0
    lost: int = 0
    tokens: int = 0
    unknown: int = 0
    bytes: int = 0

    def add(self, tokenizer: Tokenizer, passage: str) -> None:
        """Encode and decode a passage, and add its counts."""
        ids = tokenizer.encode(passage)
        self.passages += 1
        self.lost += tokenizer.decode(ids) != passage
        self.tokens += len(ids)
        self.unknown += 0 if tokenizer.unknown is None else ids.count(tokenizer.unknown)
        self.bytes += len(passage.encode())

    def merge(self, other: "Sample") -> None:
        """Add the counts of other passages."""
        for name, count in asdict(other).items():
            setattr(self, name, getattr(self, name) + count)

    @classmethod
    def restored(cls, facts: Mapping[str, Any]) -> Self:
        """Recreate a sample from its saved counts."""
        return cls(**{name: int(facts.get(name, 0)) for name in cls.__dataclass_fields__})

    def loss(self, vocab_size: int, factor: float = 1.0) -> str:
        """Describe the losses of a tokenizer with `vocab_size` ids. Returns an empty string if no limit is exceeded.
        `factor` multiplies the limits of lost passages and unknown tokens, but not the limit of tokens per byte.
        """
        found = []
        if self.lost > factor * MOST_LOST * self.passages:
            share = self.lost / self.passages
            found.append(f"{share:.0%} of {self.passages:,} sampled passages differ after encoding and decoding")
        if self.unknown > factor * MOST_UNKNOWN * self.tokens:
            found.append(f"{self.unknown / self.tokens:.1%} of their tokens are unknown")
        if vocab_size >= LARGE_VOCABULARY and self.tokens > MOST_TOKENS_PER_BYTE * self.bytes:
            found.append(f"{self.tokens / self.bytes:.2f} tokens per byte with {vocab_size:,} ids")
        return "; ".join(found)

    def __str__(self) -> str:
        return (
            f"{self.passages:,} sampled passages, of which {self.lost / max(1, self.passages):.1%} differ after "
            f"encoding and decoding, {self.unknown / max(1, self.tokens):.2%} unknown tokens, "
            f"{self.tokens / max(1, self.bytes):.2f} tokens per byte"
        )


def sampled(tokenizer: Tokenizer, texts: Iterable[str]) -> Sample:
    """Return the counts over `texts`; each text is one passage."""
    sample = Sample()
    for text in texts:
        sample.add(tokenizer, text)
    return sample


def passages_of(texts: Sequence[str], count: int) -> Iterator[str]:
    """Yield at most `count` passages: the first passage of every text, then the second passage of every text, and so
    on.

    Passages are stripped of white space at both ends, because some tokenizers treat white space differently at the
    edges of a text.
    """
    start, longest = 0, max(map(len, texts), default=0)
    while count > 0 and start < longest:
        for text in texts:
            passage = text[start : start + PASSAGE].strip()
            if passage and count > 0:
                count -= 1
                yield passage
        start += PASSAGE
