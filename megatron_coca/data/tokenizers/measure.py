"""How well a tokenizer serves texts that it was not trained on."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from megatron_coca.data.tokenizers.kinds import Tokenizer

HELD_OUT_EVERY = 20
"""One document in so many is not trained on, but measured."""


@dataclass(frozen=True)
class Measure:
    """What a tokenizer makes of some texts.

    Attributes:
        documents: number of texts.
        bytes: of their UTF-8.
        tokens: without separators.
        exact: texts that come back from their tokens as they were.
    """

    documents: int
    bytes: int
    tokens: int
    exact: int

    @property
    def bytes_per_token(self) -> float | None:
        """None where nothing was measured."""
        return self.bytes / self.tokens if self.tokens else None


@dataclass
class HeldOut:
    """Keeps some texts of one source from the training.

    Attributes:
        characters: given out to be trained on.
        texts: kept; every ``HELD_OUT_EVERY``-th, from the second one on.
    """

    characters: int = 0
    texts: list[str] = field(default_factory=list)

    def rest(self, texts: Iterable[str]) -> Iterator[str]:
        """The texts to train on."""
        for number, text in enumerate(texts):
            if number % HELD_OUT_EVERY == 1:
                self.texts.append(text)
            else:
                self.characters += len(text)
                yield text


def measure(tokenizer: Tokenizer, texts: Iterable[str]) -> Measure:
    """Encode and decode ``texts``, one at a time."""
    documents = size = tokens = exact = 0
    for text in texts:
        ids = tokenizer.encode(text)
        documents += 1
        size += len(text.encode())
        tokens += len(ids)
        exact += tokenizer.decode(ids) == text
    return Measure(documents, size, tokens, exact)
