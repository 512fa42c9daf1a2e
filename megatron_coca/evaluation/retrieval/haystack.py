"""The text in which something is hidden, and prompts made of it."""

import hashlib
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from megatron_coca.data import corpus_files, ensure_builtin, read_documents
from megatron_coca.evaluation.results import EvaluationError
from megatron_coca.evaluation.retrieval.cases import Mark, Prices, Text
from megatron_coca.evaluation.retrieval.records import HaystackRecord

FILLER = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
"""Of the passkey task (Mohtashami and Jaggi 2023, "Landmark Attention")."""

MAX_CHARACTERS = 4_000_000
"""Read of a corpus at most: more than a prompt of 500,000 tokens holds."""

BUILTIN = "builtin"

LONGEST_SENTENCE = 300
"""Characters. A longer one, such as a table, is cut between words: prompts are filled sentence by sentence."""

_BETWEEN_PARAGRAPHS = re.compile(r"\n\s*\n")
_BETWEEN_SENTENCES = re.compile(r"(?<=[.!?])\s+|(?<=[\u3002\uff01\uff1f])")


@dataclass(frozen=True)
class Haystack:
    """Sentences that are repeated as often as needed.

    Attributes:
        name: for result files.
        sentences: without line feeds.
        restarts: whether every stretch of filler begins with the first sentence, as in the passkey task; else a prompt
            begins with any sentence and goes on in their order.
    """

    name: str
    sentences: tuple[str, ...]
    restarts: bool = False

    def record(self) -> HaystackRecord:
        """For the result file."""
        content = "".join(f"{sentence}\n" for sentence in self.sentences)
        digest = hashlib.sha256(content.encode()).hexdigest()
        return HaystackRecord(name=self.name, sentences=len(self.sentences), sha256=digest)


FILLER_HAYSTACK = Haystack("filler", FILLER, restarts=True)

FILLER_BLOCKS = Haystack("filler", (" ".join(FILLER),), restarts=True)
"""The five sentences as one unit, as the CoCA paper's appendix has them in the passkey task."""


def load_haystack(names: Sequence[str] | None, data_root: Path) -> Haystack:
    """The filler where `names` is None, the built-in corpus' English for "builtin", else files or folders of text.

    Raises:
        EvaluationError: there is no text in them.
        DataError: they cannot be read.
    """
    if not names:
        return FILLER_HAYSTACK
    places = [ensure_builtin(data_root).parents[1] / "text.jsonl"] if list(names) == [BUILTIN] else [*map(Path, names)]
    texts = (document.text for file in corpus_files(places) for document in read_documents(file))
    sentences = tuple(_sentences(texts))
    if not sentences:
        raise EvaluationError(f"--haystack {' '.join(names)}: holds no text; name other files, or {BUILTIN}")
    return Haystack(" ".join(names), sentences)


def _sentences(texts: Iterable[str]) -> Iterator[str]:
    """Line feeds inside a paragraph are spaces."""
    left = MAX_CHARACTERS
    for paragraph in (each for text in texts for each in _BETWEEN_PARAGRAPHS.split(text)):
        for sentence in _BETWEEN_SENTENCES.split(" ".join(paragraph.split())):
            left -= len(sentence)
            if left < 0:
                return
            yield from textwrap.wrap(sentence, LONGEST_SENTENCE, break_on_hyphens=False)


Gap = Callable[[int], int]
"""After how many of so many sentences something is put, 0 .. their number."""


def uniform_gap(place: float) -> Gap:
    """Every gap alike for a `place` that is uniform in [0, 1)."""
    return lambda units: min(units, int(place * (units + 1)))


def inner_gap(place: float) -> Gap:
    """Every gap alike in which a sentence stands before and one behind, for a `place` that is uniform in [0, 1)."""
    return lambda units: min(units, 1 + int(place * max(units - 1, 0)))


def depth_gap(depth: float) -> Gap:
    """The gap nearest to a share of the sentences, 0 .. 1."""
    return lambda units: round(depth * units)


@dataclass(frozen=True)
class Hidden:
    """A sentence put into the haystack.

    Attributes:
        gap: where.
        text: what it says.
        fact: the part of it that is asked for, which it says first at this place; None where nothing of it is.
    """

    gap: Gap
    text: str
    fact: str | None = None


@dataclass
class HaystackDraft:
    """A prompt: what is to be done, the haystack with what is hidden, the question; one piece a line, or with
    `in_lines` False everything between task and question in one line.

    `first` is the number of the sentence that the haystack begins with.
    """

    task: str
    haystack: Haystack
    hidden: Sequence[Hidden]
    question: str
    prices: Prices
    first: int = 0
    in_lines: bool = False
    limit: int | None = None
    _sums: list[int] = field(default_factory=lambda: [0])

    def build(self, units: int) -> Text:
        """As in `fitting.Draft`; facts in the order of the text."""
        placed = sorted(self.hidden, key=lambda each: each.gap(units))
        cuts = [0, *(each.gap(units) for each in placed), units]
        blocks = [self._block(start, end) for start, end in pairwise(cuts)]
        pieces: list[tuple[str, Hidden | None]] = [(blocks[0], None)]
        for each, block in zip(placed, blocks[1:], strict=True):
            pieces += [(each.text, each), (block, None)]
        return self._joined([piece for piece in pieces if piece[0]], units)

    def predict(self, units: int) -> int:
        """As in `fitting.Draft`."""
        if not self.haystack.restarts:
            return self._sum(units)
        cuts = [0, *sorted(each.gap(units) for each in self.hidden), units]
        return sum(self._sum(end - start) for start, end in pairwise(cuts))

    def _joined(self, pieces: Sequence[tuple[str, Hidden | None]], units: int) -> Text:
        text, separator, marks = self.task, "\n", []
        for piece, hidden in pieces:
            text += separator
            if hidden is not None and hidden.fact is not None:
                offset = len(text) + piece.index(hidden.fact)
                marks.append(Mark(hidden.gap(units) / max(units, 1), offset))
            text += piece
            separator = "\n" if self.in_lines else " "
        return Text(f"{text}\n{self.question}", tuple(marks))

    def _block(self, start: int, end: int) -> str:
        if self.haystack.restarts:
            start, end = 0, end - start
        sentences = self.haystack.sentences
        return " ".join(sentences[(self.first + number) % len(sentences)] for number in range(start, end))

    def _sum(self, units: int) -> int:
        """Tokens of the first so many sentences."""
        sentences = self.haystack.sentences
        while len(self._sums) <= units:
            number = self.first + len(self._sums) - 1
            self._sums.append(self._sums[-1] + self.prices(sentences[number % len(sentences)]))
        return self._sums[units]
