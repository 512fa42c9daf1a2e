"""Detect tokenizers that lose text: passages that decode differently, unknown tokens, too many tokens."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from megatron_coca.data.tokenizers.kinds import Tokenizer

PASSAGE = 1024
"""Characters of a passage."""
MOST_LOST, MOST_UNKNOWN = 0.1, 0.01
"""Largest shares of passages that decode differently, and of unknown tokens."""
MOST_TOKENS_PER_BYTE, LARGE_VOCABULARY = 0.75, 4096
"""A vocabulary of at least this size should need fewer tokens per byte than this."""


@dataclass
class Sample:
    """Counts over passages of text that were encoded and decoded.

    Attributes:
        passages: number of passages.
        lost: passages that decode differently.
        tokens: tokens of all passages.
        unknown: unknown tokens.
        bytes: UTF-8 bytes of all passages.
    """

    passages: int = 0
    lost: int = 0
    tokens: int = 0
    unknown: int = 0
    bytes: int = 0

    def add(self, tokenizer: Tokenizer, passage: str) -> None:
        """Encode and decode a passage."""
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
        """Recreate a sample from the counts by name."""
        return cls(**{name: int(facts.get(name, 0)) for name in cls.__dataclass_fields__})

    def loss(self, vocab_size: int, factor: float = 1.0) -> str:
        """Describe the losses of a tokenizer with `vocab_size` ids, if a share is above `factor` times its limit; else
        empty.
        """
        found = []
        if self.lost > factor * MOST_LOST * self.passages:
            share = self.lost / self.passages
            found.append(f"{share:.0%} of {self.passages:,} sampled passages do not come back when decoded")
        if self.unknown > factor * MOST_UNKNOWN * self.tokens:
            found.append(f"{self.unknown / self.tokens:.1%} of their tokens are unknown")
        if vocab_size >= LARGE_VOCABULARY and self.tokens > MOST_TOKENS_PER_BYTE * self.bytes:
            found.append(f"{self.tokens / self.bytes:.2f} tokens per byte with {vocab_size:,} ids")
        return "; ".join(found)

    def __str__(self) -> str:
        return (
            f"{self.passages:,} sampled passages, of which {self.lost / max(1, self.passages):.1%} do not come back, "
            f"{self.unknown / max(1, self.tokens):.2%} unknown tokens, "
            f"{self.tokens / max(1, self.bytes):.2f} tokens per byte"
        )


def sampled(tokenizer: Tokenizer, texts: Iterable[str]) -> Sample:
    """The counts over `texts`, one passage each."""
    sample = Sample()
    for text in texts:
        sample.add(tokenizer, text)
    return sample


def passages_of(texts: Sequence[str], count: int) -> Iterator[str]:
    """Yield at most `count` passages: the first of every text, then the second of every text, and so on.

    They do not start or end with white space, which some tokenizers treat as the end of a text.
    """
    start, longest = 0, max(map(len, texts), default=0)
    while count > 0 and start < longest:
        for text in texts:
            passage = text[start : start + PASSAGE].strip()
            if passage and count > 0:
                count -= 1
                yield passage
        start += PASSAGE
