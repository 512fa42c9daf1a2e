"""Synthetic tasks as training data. Samples are computed from the seed and the sample number, without files.

Every task generates the tokens of a sample and a mask of the inputs that are followed by an answer. Random numbers are
hashes of (seed, split, sample number), so that a resumed run reads the same samples.

A fact is a pair of a key and a value, and every fact has a token of its own. Token ids come in this order: filler,
facts, keys, values. In `ordered_recall`, further tokens, which ask questions, come after the values. Tasks without
facts have only filler tokens and one separator.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megatron_coca.data.blend import Blend, SourceShare, UncheckedBatch
from megatron_coca.data.errors import DataError
from megatron_coca.data.permutation import derive_key, random_words


@dataclass(frozen=True)
class TaskSettings:
    """A task and its sizes, as in the configuration. The first `filler_tokens` token ids are used for random filler or
    text.
    """

    task: str = "recall"
    facts: int = 8
    keys: int = 16
    values: int = 16
    ngram: int = 3
    filler_tokens: int = 32
    text: bool = False
    loss: str = "answers"
    updates: int | None = None
    back: int | None = None

    @property
    def vocab_size(self) -> int:
        """Number of token ids of the task."""
        if not self.has_facts:
            return self.filler_tokens + 1
        ordered = self.keys + self.farthest if self.task == ORDERED else 0
        return self.filler_tokens + self.keys * self.values + self.keys + self.values + ordered

    @property
    def has_facts(self) -> bool:
        """True for tasks that ask for facts. Only these tasks use keys and values."""
        return self.task in FACT_TASKS

    @property
    def farthest(self) -> int:
        """The largest k for which `ordered_recall` asks for the value of the k-th fact before the question."""
        return self.back or self.facts

    def fact(self, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Return the tokens of facts. Each fact states the value of a key."""
        return self.filler_tokens + keys * self.values + values

    def key(self, keys: np.ndarray) -> np.ndarray:
        """Return the tokens that ask for the values of keys."""
        return self.filler_tokens + self.keys * self.values + keys

    def value(self, values: np.ndarray) -> np.ndarray:
        """Return the tokens that answer with values."""
        return self.filler_tokens + self.keys * self.values + self.keys + values

    def first(self, keys: np.ndarray) -> np.ndarray:
        """Return the tokens that ask for the first values of keys (`ordered_recall`)."""
        return self.filler_tokens + self.keys * self.values + self.keys + self.values + keys

    def earlier(self, facts: np.ndarray) -> np.ndarray:
        """Return the tokens that ask for the value of an earlier fact (`ordered_recall`). In `facts`, 1 stands for the
        last fact before the question and 2 for the fact before that.
        """
        return self.first(np.array(self.keys)) + facts - 1


class Draws:
    """Random numbers for samples. Each call returns new columns. A number depends only on (seed, split, sample number,
    column).
    """

    def __init__(self, numbers: np.ndarray, seed: int, split: str) -> None:
        self.numbers, self._key, self._column = numbers, derive_key("synthetic", seed, split), 0

    def uniform(self, count: int) -> np.ndarray:
        """Return random numbers in [0, 1), float64 [samples, count]."""
        words = random_words(self.numbers, count, self._key, self._column)
        self._column += count
        return (words >> np.uint64(11)) * 2.0**-53

    def integers(self, count: int, below: int | np.ndarray) -> np.ndarray:
        """Return random integers in [0, below), int64 [samples, count]."""
        return (self.uniform(count) * below).astype(np.int64)

    def subset(self, count: int, of: int) -> np.ndarray:
        """Return `count` different integers from 0 .. of-1 in random order, int64 [samples, count]."""
        return np.argsort(self.uniform(of), axis=1)[:, :count]


Generated = tuple[np.ndarray, np.ndarray]
"""Tokens, int64 [samples, length + 1], and a mask of the inputs that are followed by an answer, bool [samples, length].
"""


def _answers(shape: tuple[int, int], rows: np.ndarray, inputs: np.ndarray) -> np.ndarray:
    mask = np.zeros((shape[0], shape[1] - 1), dtype=bool)
    mask[rows, inputs] = True
    return mask


def recall(settings: TaskSettings, filler: np.ndarray, draws: Draws) -> Generated:
    """Generate facts at random positions. Somewhere after each fact, there is a question about it: a key token, then
    the value.

    A sample has `facts` facts of one token each, and as many questions of two tokens each. They occupy random slots
    between filler tokens. Slots are paired at random, and the fact is in the earlier slot of its pair. The keys of a
    sample are distinct.
    """
    samples, width = filler.shape
    facts = settings.facts
    keys, values = draws.subset(facts, settings.keys), draws.integers(facts, settings.values)
    slots = np.sort(draws.subset(2 * facts, width - facts), axis=1)
    pairs = np.sort(draws.subset(2 * facts, 2 * facts).reshape(samples, facts, 2), axis=2)
    # A question is one token longer than its slot, so it shifts everything after it by one token.
    asked = np.zeros((samples, 2 * facts), dtype=np.int64)
    np.put_along_axis(asked, pairs[:, :, 1], 1, axis=1)
    places = slots + np.cumsum(asked, axis=1) - asked
    told, question = (np.take_along_axis(places, pairs[:, :, side], axis=1) for side in (0, 1))
    tokens, rows = filler.copy(), np.arange(samples)[:, None]
    tokens[rows, told] = settings.fact(keys, values)
    tokens[rows, question], tokens[rows, question + 1] = settings.key(keys), settings.value(values)
    return tokens, _answers(tokens.shape, rows, question)


def recall_question(
    settings: TaskSettings, filler: np.ndarray, draws: Draws
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Generate evaluation inputs for `recall`: facts at random positions, and one question at the end.

    Returns (inputs int64 [samples, length], correct answer tokens int64 [samples], positions of the facts that the
    questions ask for int64 [samples]). `filler` is int64 [samples, length], and the length must be larger than the
    number of facts.
    """
    samples, length = filler.shape
    keys, values = draws.subset(settings.facts, settings.keys), draws.integers(settings.facts, settings.values)
    places = draws.subset(settings.facts, length - 1)
    tokens = filler.copy()
    tokens[np.arange(samples)[:, None], places] = settings.fact(keys, values)
    tokens[:, -1] = settings.key(keys[:, 0])
    return tokens, settings.value(values[:, 0]), places[:, 0]


QUESTIONS = ("latest", "first", "back")
"""Kinds of questions of `ordered_recall`, drawn with the same probability."""


def ordered_recall(settings: TaskSettings, filler: np.ndarray, draws: Draws) -> Generated:
    """Generate facts that give keys new values, and questions about the order of the facts, both at random positions.

    Every key of a sample gets `updates` different values, one after the other. A question comes after at least one
    fact. It asks for the latest value of a key, for its first value, or for the value of the k-th fact before the
    question, regardless of its key. k is at most `back`. A question has one token that asks and one that answers.
    """
    samples, width = filler.shape
    facts, rows = settings.facts, np.arange(filler.shape[0])[:, None]
    keys, values = _told(settings, draws, samples)
    slots = np.sort(draws.subset(2 * facts, width - facts), axis=1)
    asks = np.zeros((samples, 2 * facts), dtype=bool)  # the first slot always has a fact
    np.put_along_axis(asks, 1 + draws.subset(facts, 2 * facts - 1), True, axis=1)
    places = slots + np.cumsum(asks, axis=1) - asks  # a question takes one token more than its slot
    told, asked = (places[chosen].reshape(samples, facts) for chosen in (~asks, asks))
    before = np.cumsum(~asks, axis=1)[asks].reshape(samples, facts)  # number of facts before each question
    asking, source, _ = _order_questions(settings, draws, keys, before)
    tokens = filler.copy()
    tokens[rows, told] = settings.fact(keys, values)
    tokens[rows, asked] = asking
    tokens[rows, asked + 1] = settings.value(np.take_along_axis(values, source, axis=1))
    return tokens, _answers(tokens.shape, rows, asked)


def ordered_question(
    settings: TaskSettings, filler: np.ndarray, draws: Draws
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Generate evaluation inputs for `ordered_recall`: all facts at random positions, and one question at the end.

    Returns the three results of `recall_question` and the kinds of the questions, int64 [samples]. A kind is an index
    into `QUESTIONS`.
    """
    samples, length = filler.shape
    keys, values = _told(settings, draws, samples)
    places = np.sort(draws.subset(settings.facts, length - 1), axis=1)
    asking, source, kinds = _order_questions(settings, draws, keys, np.full((samples, 1), settings.facts))
    tokens = filler.copy()
    tokens[np.arange(samples)[:, None], places] = settings.fact(keys, values)
    tokens[:, -1] = asking[:, 0]
    answers, where = (np.take_along_axis(of, source, axis=1)[:, 0] for of in (values, places))
    return tokens, settings.value(answers), where, kinds[:, 0]


def chances_without_order(facts: int, updates: int, values: int) -> dict[str, float]:
    """Return how often a random choice is correct for each kind of question in `QUESTIONS`, in evaluation inputs.

    The choice is that of a model that knows the facts but not their order. For the latest or first value of a key, it
    chooses among the values of this key. For the value of the k-th fact before the question, it chooses among the
    values of all facts. Values of different keys can be equal.
    """
    of_key = 1.0 / updates
    return {"latest": of_key, "first": of_key, "back": (1.0 + (facts - updates) / values) / facts}


def _told(settings: TaskSettings, draws: Draws, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw the keys and values of all facts in order, both int64 [samples, facts]. The values of a key differ."""
    facts, updates = settings.facts, settings.updates or 1
    of_sample = draws.subset(facts // updates, settings.keys)
    of_key = np.stack([draws.subset(updates, settings.values) for _ in range(facts // updates)], axis=1)
    which = draws.subset(facts, facts) % (facts // updates)  # every key `updates` times, in random order
    earlier = np.tril(np.ones((facts, facts), dtype=bool), -1)
    update = ((which[:, :, None] == which[:, None, :]) & earlier).sum(axis=2)
    keys = np.take_along_axis(of_sample, which, axis=1)
    return keys, of_key[np.arange(samples)[:, None], which, update]


def _order_questions(
    settings: TaskSettings, draws: Draws, keys: np.ndarray, before: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw questions. `before`, int64 [samples, questions], has the number of facts before each question. Returns three
    arrays of this shape: the tokens that ask, the indices of the facts with the answers, and the kinds of questions.
    """
    count = before.shape[1]
    kinds, chosen = draws.integers(count, len(QUESTIONS)), draws.integers(count, before)
    distance = 1 + draws.integers(count, np.minimum(before, settings.farthest))
    key = np.take_along_axis(keys, chosen, axis=1)
    same = keys[:, None, :] == key[:, :, None]  # [samples, questions, facts]
    same &= np.arange(keys.shape[1]) < before[:, :, None]
    latest, first = keys.shape[1] - 1 - same[:, :, ::-1].argmax(axis=2), same.argmax(axis=2)
    asking = np.choose(kinds, [settings.key(key), settings.first(key), settings.earlier(distance)])
    return asking, np.choose(kinds, [latest, first, before - distance]), kinds


def multi_query(settings: TaskSettings, filler: np.ndarray, draws: Draws) -> Generated:
    """Generate between 1 and `facts` facts at random positions, and one question about each fact at the end, in random
    order.

    Every additional fact is one more distractor for each question.
    """
    samples, width = filler.shape
    counts, facts = 1 + draws.integers(1, settings.facts)[:, 0], settings.facts
    keys, values = draws.subset(facts, settings.keys), draws.integers(facts, settings.values)
    order = draws.uniform(width)
    tokens, mask = filler.copy(), np.zeros((samples, width - 1), dtype=bool)
    for row, count in enumerate(counts.tolist()):
        first = width - 2 * count
        tokens[row, np.argsort(order[row, :first])[:count]] = settings.fact(keys[row, :count], values[row, :count])
        asked = np.argsort(order[row, first : first + count])
        tokens[row, first::2] = settings.key(keys[row, asked])
        tokens[row, first + 1 :: 2] = settings.value(values[row, asked])
        mask[row, first::2] = True
    return tokens, mask


def _copied(settings: TaskSettings, filler: np.ndarray, draws: Draws, step: int) -> Generated:
    half = (filler.shape[1] - 1) // 2
    tokens = filler.copy()
    tokens[:, half] = settings.filler_tokens
    tokens[:, half + 1 : 2 * half + 1] = tokens[:, :half][:, ::step]
    return tokens, _answers(tokens.shape, np.arange(len(tokens))[:, None], np.arange(half, 2 * half)[None])


def copy(settings: TaskSettings, filler: np.ndarray, draws: Draws) -> Generated:
    """Generate random tokens, a separator, and the same tokens again."""
    return _copied(settings, filler, draws, 1)


def reverse(settings: TaskSettings, filler: np.ndarray, draws: Draws) -> Generated:
    """Generate random tokens, a separator, and the same tokens in reverse order."""
    return _copied(settings, filler, draws, -1)


def ngram(settings: TaskSettings, filler: np.ndarray, draws: Draws) -> Generated:
    """Generate random tokens that end with a repeated n-gram. The last token of the n-gram is the answer."""
    samples, width = filler.shape
    size = settings.ngram
    source = draws.integers(1, width - 2 * size + 1) + np.arange(size)
    tokens, rows = filler.copy(), np.arange(samples)[:, None]
    tokens[:, width - size :] = tokens[rows, source]
    return tokens, _answers(tokens.shape, rows, np.full((samples, 1), width - 2))


TASKS: dict[str, Callable[[TaskSettings, np.ndarray, Draws], Generated]] = {
    "recall": recall,
    "ordered_recall": ordered_recall,
    "multi_query": multi_query,
    "copy": copy,
    "reverse": reverse,
    "ngram": ngram,
}
"""Maps the name of a task to its function, which takes (settings, filler int64 [samples, length + 1], random numbers)
and returns (tokens, answer mask).
"""

ORDERED = "ordered_recall"
FACT_TASKS = frozenset({"recall", ORDERED, "multi_query"})


class SyntheticSamples:
    """The samples of a synthetic task, with the interface of `Blend`. The order depends only on the arguments.

    Args:
        settings: the task and its sizes.
        seq_length: number of input tokens of a sample; the sample has one more token, the last target.
        seed, split: determine the samples.
        text: the blend that provides the filler if `settings.text` is set.

    Raises `DataError` if `seq_length` is too short for the task.
    """

    shards, weights, first = (), (), 0

    def __init__(
        self, settings: TaskSettings, seq_length: int, seed: int, split: str = "train", text: Blend | None = None
    ) -> None:
        needed = {"ngram": 2 * settings.ngram}.get(settings.task, 3 * settings.facts if settings.has_facts else 3)
        if seq_length + 1 < needed:
            raise DataError(
                f"seq_length: {seq_length} is too short for the task {settings.task}; set it to at least {needed - 1}"
            )
        self.settings, self.seq_length, self.seed = settings, seq_length, seed
        self._split, self.text = split, text

    @property
    def description(self) -> dict[str, Any]:
        """The settings as a mapping, which is part of the identity of a run's data."""
        return {name: value for name, value in asdict(self.settings).items() if value is not None}

    def read(self, indices: np.ndarray, boundaries: bool = False) -> UncheckedBatch:
        """Generate samples by global number, int64 [n]. The result has no document boundaries."""
        draws = Draws(np.asarray(indices, dtype=np.int64), self.seed, self._split)
        if self.text is not None:
            filler = self.text.batch(indices)
            if filler.max() >= self.settings.filler_tokens:
                raise DataError(
                    f"filler_tokens: {self.settings.filler_tokens} is too small for token id {filler.max()} in the "
                    "text; set it to the vocabulary size of the text's tokenizer"
                )
        else:
            filler = draws.integers(self.seq_length + 1, self.settings.filler_tokens)
        tokens, answers = TASKS[self.settings.task](self.settings, filler, draws)
        return UncheckedBatch(tokens, None, answers if self.settings.loss == "answers" else None)

    def origin(self, index: int) -> str:
        """Return a description of the task, in place of the name of a shard."""
        return f"synthetic task {self.settings.task}"

    def after(self, first: int, tokens: Mapping[str, int]) -> "SyntheticSamples":
        """Return the same samples with sample numbers that start at `first`."""
        later = type(self)(self.settings, self.seq_length, self.seed, self._split, self.text)
        later.first = first
        return later

    def mixture(self, n_samples: int) -> list[SourceShare]:
        """Return a single share: the task provides all `n_samples` samples, and no sample repeats."""
        name = f"synthetic {self.settings.task}"
        return [SourceShare(name, 1.0, n_samples, 1.0, n_samples * self.seq_length, 0.0)]
