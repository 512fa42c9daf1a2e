"""The end of a generated answer: by a token, or by a text."""

from collections.abc import Callable, Collection, Sequence

from megatron_coca.data import Tokenizer


def end_tokens(tokenizer: Tokenizer, chat: bool) -> list[int]:
    """Return the tokens that end an answer, each once; in a chat also those that end a turn."""
    return [*dict.fromkeys([*tokenizer.ends, *(tokenizer.turn_ends()[0] if chat else ())])]


def finished_by(
    ends: Collection[int], stops: Sequence[str], text_of: Callable[[list[int]], str]
) -> Callable[[list[int]], bool]:
    """Return a function that is true for the tokens of an answer that has just ended, by one of the tokens `ends` or
    by one of the texts `stops`; `text_of` decodes tokens.
    """
    # A token is at least a byte of text, so the last tokens contain any text that has just ended.
    window = max((len(stop.encode()) for stop in stops), default=0) + 4

    def finished(answer: list[int]) -> bool:
        tail = text_of(answer[-window:]) if stops else ""
        return answer[-1] in ends or any(stop in tail for stop in stops)

    return finished
