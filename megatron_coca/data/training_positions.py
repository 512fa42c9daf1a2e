"""Random positions for training samples instead of 0, 1, ..., so that a model sees positions beyond its training
length.

`randomized` is the method of Ruoss et al. (2023), "Randomized Positional Encodings Boost Length Generalization of
Transformers". `pose` is the method of Zhu et al. (2024), "PoSE: Efficient Context Window Extension of LLMs via
Positional Skip-wise Training". `stretched` is the method of Chen et al. (2024), "CLEX: Continuous Length Extrapolation
for Large Language Models". Positions are drawn on the host and depend only on the seed, the step and the sample number.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron_coca.data.permutation import derive_key, random_words


def _subset(words: np.ndarray, length: int, largest: int) -> np.ndarray:
    """Return a sorted random subset of 0 .. largest-1. `words` contains one random word for each of these numbers."""
    return np.sort(np.argpartition(words, length - 1)[:length] if length < largest else np.arange(largest))


def _shifted(words: np.ndarray, length: int, largest: int) -> np.ndarray:
    """Return consecutive positions that start at a random offset r: r, r+1, ..."""
    return np.arange(length) + int(words[0] % np.uint64(largest - length + 1))


def _pose(words: np.ndarray, length: int, largest: int) -> np.ndarray:
    """Return consecutive positions, cut at a random place into two chunks; a random offset is added to the second
    chunk.
    """
    cut = 1 + int(words[0] % np.uint64(max(length - 1, 1)))
    return np.arange(length) + (np.arange(length) >= cut) * int(words[1] % np.uint64(largest - length + 1))


def _stretched(words: np.ndarray, length: int, largest: int) -> np.ndarray:
    """Return a sorted random subset of 0 .. largest-1 that contains 0 and largest-1."""
    inner = _subset(words[: largest - 2], length - 2, largest - 2) + 1 if length > 2 else np.arange(0)
    return np.concatenate(([0], inner, [largest - 1]))[-length:] if length > 1 else np.arange(length)


DRAWN: dict[str, tuple[Callable[[int], int], Callable[[np.ndarray, int, int], np.ndarray]]] = {
    "randomized": (lambda largest: largest, _subset),
    "shifted": (lambda largest: 1, _shifted),
    "pose": (lambda largest: 2, _pose),
    "stretched": (lambda largest: largest, _stretched),
}
"""Maps each `training_positions.type` to two functions. The first returns the number of random words that are needed to
draw positions below a bound. The second takes (words, number of tokens, bound) and returns increasing positions, int64
[tokens].
"""


@dataclass(frozen=True)
class DrawnPositions:
    """Draws the positions of samples.

    Attributes:
        type: a key of `DRAWN`.
        largest: all positions are below this bound, which is at least the sample length. With `stretched`, the bound is
            a multiple of the sample length. An integer t is then drawn for every step, and the positions of the step
            are below t times the sample length.
        seed: the seed of the run.
    """

    type: str
    largest: int
    seed: int

    def draw(self, numbers: np.ndarray, length: int, begins: np.ndarray | None = None, step: int = 0) -> np.ndarray:
        """Draw positions, int64 [n, length], for samples of `step`. `numbers`, int64 [n], are their global numbers.

        `begins`, bool [n, length], marks the tokens that start a document; with it, the positions of each document in a
        sample are drawn separately. All documents of a step have the same bound, even with `stretched`.
        """
        (words_for, make), largest = DRAWN[self.type], self.largest
        if self.type == "stretched":
            word = random_words(np.array([step]), 1, derive_key("stretch", self.seed))[0, 0]
            largest = length * (1 + int(word % np.uint64(largest // length)))
        count = words_for(largest)
        starts = np.zeros((len(numbers), length), dtype=bool) if begins is None else begins.copy()
        starts[:, 0] = True
        rows, firsts = np.nonzero(starts)
        ends = np.append(np.where(np.diff(rows) == 0, firsts[1:], length), length)
        words = random_words(numbers[rows] * length + firsts, count, derive_key("positions", self.seed))
        drawn = np.empty((len(numbers), length), dtype=np.int64)
        for row, first, end, own in zip(rows.tolist(), firsts.tolist(), ends.tolist(), words, strict=True):
            drawn[row, first:end] = make(own, end - first, largest)
        return drawn
