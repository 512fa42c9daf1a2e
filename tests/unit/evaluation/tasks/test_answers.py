"""An answer ends with a token or with a string, however the tokens divide it."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_coca.evaluation.tasks.answers import end_tokens, finished_by

PIECES = ["a", "Ques", "tion", ":", "\n", "ü"]


def text_of(tokens: list[int]) -> str:
    return "".join(PIECES[token] for token in tokens)


@pytest.mark.parametrize(
    ("answer", "ends", "stops", "length"),
    [
        ([0, 0, 3, 0], {3}, [], 3),
        ([0, 1, 2, 3, 0], set(), ["Question:"], 4),
        ([0, 1, 2, 0, 4], set(), ["Question:", "\n"], 5),
        ([0, 5, 0], set(), ["ü"], 2),
        ([0, 1, 4], {3}, ["\n\n"], None),
    ],
    ids=["a token", "a string of three tokens", "the second string", "two bytes", "neither"],
)
def test_an_answer_ends_with_the_token_that_completes_it(
    answer: list[int], ends: set[int], stops: list[str], length: int | None
) -> None:
    finished = finished_by(ends, stops, text_of)
    ended = [count for count in range(1, len(answer) + 1) if finished(answer[:count])]
    assert next(iter(ended), None) == length


def test_the_end_of_a_turn_ends_answers_of_chats_only() -> None:
    tokenizer: Any = SimpleNamespace(ends=[7, 9], turn_ends=lambda: ([8, 7], []))
    assert end_tokens(tokenizer, chat=False) == [7, 9]
    assert end_tokens(tokenizer, chat=True) == [7, 9, 8]
