"""When a hidden number counts as found."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from megatron_coca.evaluation.stretch.measuring import _scores

STUB, A, SPACE, ONE, TWO, SIX = range(6)
NEXT = {STUB: (A, SPACE), SPACE: (ONE, SIX), ONE: (TWO, SIX), TWO: (A, ONE), SIX: (TWO, A)}
"""The likeliest and the second likeliest token after each token."""


class Bigrams:
    """A model that knows the number 12, but would write "a" before it."""

    def parameters(self) -> Iterator[torch.Tensor]:
        yield torch.zeros(1)

    def hidden_states(self, ids: torch.Tensor, cache: Any = None, last: int = 0) -> torch.Tensor:
        return ids[:, -last:] if last else ids

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        table = torch.zeros(len(NEXT) + 1, 6)
        for token, (first, second) in NEXT.items():
            table[token, first], table[token, second] = 6.0, 4.0
        return table[hidden]


class NoCache:
    def __len__(self) -> int:
        return 0

    def cut(self, length: int) -> None: ...

    def cache_for(self, *_: Any) -> "NoCache":
        return self

    def keep(self, *_: Any) -> None: ...


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        ([[SPACE, ONE, TWO], [SPACE, SIX, SIX]], True),  # the space tells nothing about the number
        ([[SPACE, SIX, TWO], [SPACE, ONE, TWO]], False),
        ([[SPACE, ONE, TWO], [A, SIX, SIX]], False),  # the answers do not begin with the same token
        ([[A], [SPACE]], True),
        ([[SPACE], [A]], False),
    ],
)
def test_tokens_of_all_numbers_do_not_decide(answers: list[list[int]], found: bool) -> None:
    model: Any = Bigrams()
    shared: Any = NoCache()
    scores, greedy = _scores(model, shared, np.array([STUB]), answers)
    assert greedy is found and len(scores) == 2
