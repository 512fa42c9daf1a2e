"""Prompts of a given length in tokens, which consist of hidden sentences and as much filler text as fits."""

import hashlib
import itertools
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from megatron_coca.data import Tokenizer, corpus_files, ensure_builtin, read_documents
from megatron_coca.data.tokenizers.chat import ChatTemplate
from megatron_coca.evaluation.results import EvaluationError
from megatron_coca.evaluation.tasks.retrieval.task import FactRecord, HaystackRecord

FILLER = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")
"""Sentences of the passkey task (Mohtashami and Jaggi 2023, "Landmark Attention")."""

BUILTIN = "builtin"
MAX_HAYSTACK_CHARACTERS = 4_000_000  # more than enough for a prompt of 500,000 tokens
MAX_SENTENCE_CHARACTERS = 300  # longer ones, such as tables, are split between words, as prompts add whole sentences
FIRST_TRY = 8  # number of filler units in the first prompt with filler that `fit` tries

_BETWEEN_PARAGRAPHS = re.compile(r"\n\s*\n")
_BETWEEN_SENTENCES = re.compile(r"(?<=[.!?])\s+|(?<=[\u3002\uff01\uff1f])")


class LengthError(EvaluationError):
    """Raised if a task cannot make a prompt of the requested length."""


@dataclass(frozen=True)
class Case:
    """One prompt and its expected answer."""

    number: int  # index among the cases with the same task, length and seed
    prompt: np.ndarray  # token ids, int32 [at most the requested length]
    expected: tuple[str, ...]  # strings that a correct answer contains
    facts: tuple[FactRecord, ...]  # in the order of the prompt
    stub: str = ""  # the beginning of the answer, with which the prompt ends


@dataclass(frozen=True)
class Haystack:
    """Filler sentences, repeated as often as needed.

    If `restarts` is set, the filler begins again after every hidden sentence, as in the passkey task. Otherwise it
    starts with a random sentence, and the sentences follow in order.
    """

    name: str  # name in result files
    sentences: tuple[str, ...]  # without line feeds
    restarts: bool = False

    def record(self) -> HaystackRecord:
        content = "".join(f"{sentence}\n" for sentence in self.sentences)
        digest = hashlib.sha256(content.encode()).hexdigest()
        return HaystackRecord(name=self.name, sentences=len(self.sentences), sha256=digest)


FILLER_HAYSTACK = Haystack("filler", FILLER, restarts=True)
FILLER_BLOCKS = Haystack("filler", (" ".join(FILLER),), restarts=True)
"""The five sentences as one unit, as in the passkey task of the CoCA paper's appendix."""


def load_haystack(names: Sequence[str] | None, data_root: Path) -> Haystack:
    """Return the passkey filler for None, the built-in English corpus for ["builtin"], and otherwise text from files.

    Raises EvaluationError if the files have no text, and DataError if a file cannot be read.
    """
    if not names:
        return FILLER_HAYSTACK
    paths = [ensure_builtin(data_root).parents[1] / "text.jsonl"] if list(names) == [BUILTIN] else [*map(Path, names)]
    texts = (document.text for file in corpus_files(paths) for document in read_documents(file))
    sentences = tuple(_sentences(texts))
    if not sentences:
        raise EvaluationError(f"--haystack {' '.join(names)}: has no text; name other files, or {BUILTIN}")
    return Haystack(" ".join(names), sentences)


def _sentences(texts: Iterable[str]) -> Iterator[str]:
    left = MAX_HAYSTACK_CHARACTERS
    for paragraph in (paragraph for text in texts for paragraph in _BETWEEN_PARAGRAPHS.split(text)):
        for sentence in _BETWEEN_SENTENCES.split(" ".join(paragraph.split())):
            left -= len(sentence)
            if left < 0:
                return
            yield from textwrap.wrap(sentence, MAX_SENTENCE_CHARACTERS, break_on_hyphens=False)


Gap = Callable[[int], int]
"""A function that maps the total number of filler units to the number of units before a hidden sentence."""


def uniform_gap(fraction: float) -> Gap:
    """Choose among all gaps, including both ends. If `fraction` is uniform in [0, 1), all gaps are equally likely."""
    return lambda units: min(units, int(fraction * (units + 1)))


def inner_gap(fraction: float) -> Gap:
    """Choose among the gaps between two units. If `fraction` is uniform in [0, 1), all gaps are equally likely."""
    return lambda units: min(units, 1 + int(fraction * max(units - 1, 0)))


def depth_gap(depth: float) -> Gap:
    return lambda units: round(depth * units)


class Hidden(NamedTuple):
    """A sentence to hide in the haystack. `fact` is the part of the sentence that the answer needs, or None. If the
    sentence repeats the fact, the first mention counts.
    """

    gap: Gap
    text: str
    fact: str | None = None


class Text(NamedTuple):
    """A prompt's text and its facts in order, each as (depth, number of characters before the fact)."""

    text: str
    facts: tuple[tuple[float, int], ...] = ()


@dataclass(frozen=True)
class Draft:
    """A prompt for any number of filler units: a task description, the haystack with hidden sentences, and a question.

    Description, haystack and question are separate lines. With `in_lines`, each hidden sentence and each stretch of
    filler is also a separate line. `first` is the index of the haystack sentence with which the filler starts.
    """

    description: str
    haystack: Haystack
    hidden: Sequence[Hidden]
    question: str
    first: int = 0
    in_lines: bool = False

    def build(self, units: int) -> Text:
        placed = sorted(self.hidden, key=lambda hidden: hidden.gap(units))
        cuts = [0, *(hidden.gap(units) for hidden in placed), units]
        blocks = [self._block(start, end) for start, end in pairwise(cuts)]
        pieces: list[tuple[str, Hidden | None]] = [(blocks[0], None)]
        for hidden, block in zip(placed, blocks[1:], strict=True):
            pieces += [(hidden.text, hidden), (block, None)]
        text, separator, facts = self.description, "\n", []
        for piece, origin in pieces:
            if not piece:
                continue
            text += separator
            if origin is not None and origin.fact is not None:
                facts.append((origin.gap(units) / max(units, 1), len(text) + piece.index(origin.fact)))
            text += piece
            separator = "\n" if self.in_lines else " "
        return Text(f"{text}\n{self.question}", tuple(facts))

    def _block(self, start: int, end: int) -> str:
        if self.haystack.restarts:
            start, end = 0, end - start
        sentences = self.haystack.sentences
        return " ".join(sentences[(self.first + number) % len(sentences)] for number in range(start, end))


class Form(Protocol):
    """An encoder of prompts: a `PromptForm`, or a tokenizer, which encodes the text unchanged."""

    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True)
class PromptForm:
    """The form of a model's prompts: plain text, or a chat with one user message, up to the beginning of the answer.

    Attributes:
        start: the token id put before the prompt, or None.
        chat: the chat template; None for plain text.
        system: the chat's system message, or None.
    """

    tokenizer: Tokenizer
    start: int | None = None
    chat: ChatTemplate | None = None
    system: str | None = None

    def encode(self, text: str) -> list[int]:
        ids = self.tokenizer.encode(text) if self.chat is None else self.tokenizer.encode_rendered(text)[0]
        return ids if self.start is None else [self.start, *ids]

    def framed(self, text: Text, stub: str) -> Text:
        """Return the whole prompt, as plain text or rendered as a chat, with `stub` as the beginning of the answer.

        Raises EvaluationError if the template changes the message.
        """
        if self.chat is None:
            return text._replace(text=" ".join(filter(None, (text.text, stub))))
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        rendered = self.chat.render([*system, {"role": "user", "content": text.text}], prompt=True)
        before = rendered.find(text.text)
        if before < 0:
            raise EvaluationError(
                "--apply-chat-template: the tokenizer's template changes the text of a message, so the positions of "
                "the facts are unknown; use another template, or plain prompts"
            )
        return Text(rendered + stub, tuple((depth, before + offset) for depth, offset in text.facts))


class Fitted(NamedTuple):
    text: Text
    ids: list[int]
    units: int


def shortest(draft: Draft, form: Form, length: int, stub: str = "") -> Fitted:
    """Return the prompt without filler. Raises LengthError if it has more than `length` tokens."""
    fitted = _fitted(draft, form, 0, stub)
    if len(fitted.ids) > length:
        raise LengthError(
            f"length {length}: the prompt has {len(fitted.ids)} tokens even without filler; use a greater length"
        )
    return fitted


def _fitted(draft: Draft, form: Form, units: int, stub: str) -> Fitted:
    text = draft.build(units)
    text = form.framed(text, stub) if isinstance(form, PromptForm) else text
    return Fitted(text, form.encode(text.text), units)


def fit(draft: Draft, form: Form, length: int, stub: str = "") -> Fitted:
    """Return the prompt with as many filler units as fit into `length` tokens, tokenized as a single text.

    The prompt ends with `stub`, which is the beginning of the answer.

    Each new number of units is interpolated between the nearest smaller and larger prompts. Every third attempt halves
    the interval instead, so that sentences of very different lengths cannot cause many attempts.

    Raises LengthError if the prompt is too long even without filler.
    """

    def attempt(units: int) -> Fitted:
        return _fitted(draft, form, units, stub)

    best, other = shortest(draft, form, length, stub), attempt(FIRST_TRY)
    if len(other.ids) <= length:
        best, other = other, best
    too_many = other.units if other.units > best.units else None
    for tries in itertools.count(1):
        if too_many == best.units + 1:
            return best
        per_unit = (len(other.ids) - len(best.ids)) / (other.units - best.units)
        units = best.units + max(1, int((length - len(best.ids)) / max(per_unit, 1)))
        if too_many is not None:
            units = (best.units + too_many) // 2 if tries % 3 == 0 else min(units, too_many - 1)
        tried = attempt(units)
        if len(tried.ids) > length:
            other, too_many = tried, units
        else:
            best, other = tried, other if too_many is not None else best
    raise AssertionError("unreachable")


def facts_of(fitted: Fitted, form: Form) -> tuple[FactRecord, ...]:
    """Return the positions of the facts in tokens, found by encoding the text before each fact."""
    text, count = fitted.text.text, len(fitted.ids)
    return tuple(
        FactRecord(depth=depth, distance=count - len(form.encode(text[:offset].rstrip())))
        for depth, offset in fitted.text.facts
    )
