"""Detection of the end of a generated answer, by a token or by a string."""

from collections.abc import Callable, Collection, Sequence

from megatron_coca.data import Tokenizer


def end_tokens(tokenizer: Tokenizer, chat: bool) -> list[int]:
    """Return the tokens that end an answer, without duplicates; in a chat they include the tokens that end a turn."""
    return [*dict.fromkeys([*tokenizer.ends, *(tokenizer.turn_ends()[0] if chat else ())])]


def finished_by(
    ends: Collection[int], stops: Sequence[str], text_of: Callable[[list[int]], str]
) -> Callable[[list[int]], bool]:
    """Return a function that takes the tokens of an answer and returns True if the answer has just ended.

    An answer ends with one of the tokens in `ends` or one of the strings in `stops`. `text_of` decodes tokens.
    """
    # A token is at least one byte of text, so the last tokens contain any stop string that has just been completed.
    window = max((len(stop.encode()) for stop in stops), default=0) + 4

    def finished(answer: list[int]) -> bool:
        tail = text_of(answer[-window:]) if stops else ""
        return answer[-1] in ends or any(stop in tail for stop in stops)

    return finished
