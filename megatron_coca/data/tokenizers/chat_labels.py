"""The tokens of a chat, and which of them count in the loss."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from megatron_coca.data.errors import DataError
from megatron_coca.data.tokenizers.kinds import Tokenizer

Counted = Literal["answers", "last", "all"]
"""The tokens of a chat that count in the loss: the tokens of all answers, those of the last answer, or all tokens."""


class ChatTokens(NamedTuple):
    """A tokenized chat.

    Attributes:
        text: the rendered chat.
        tokens: the token ids, int64 [n]. The last token is the one that ends documents.
        counts: bool [n], whether each token counts in the loss.
    """

    text: str
    tokens: np.ndarray
    counts: np.ndarray


def encode_chat(tokenizer: Tokenizer, record: Mapping[str, Any], counted: Counted) -> ChatTokens:
    """Render and encode a chat. `record` contains the chat in the keys `messages` and `tools`.

    Raises `DataError` if the tokenizer has no chat template, or if the template does not accept the chat.
    """
    template = tokenizer.chat
    if template is None:
        raise DataError("the tokenizer has no chat template; pass --chat-template")
    if counted == "all":
        text, spans = template.render(record["messages"], record["tools"]), None
    else:
        text, spans = template.answers(record["messages"], record["tools"], last=counted == "last")
    ids, places = tokenizer.encode_rendered(text)
    tokens = np.array(ids if ids[-1:] == [tokenizer.eod] else [*ids, tokenizer.eod], dtype=np.int64)
    if spans is None:
        return ChatTokens(text, tokens, np.ones(len(tokens), dtype=bool))
    begins, ends = np.array([*places, (0, 0)], dtype=np.int64).T
    answers = np.zeros(len(places) + 1, dtype=bool)
    for first, last in spans:
        answers |= (begins < last) & (ends > first)
    answers[-1] = bool(places) and answers[-2]  # the separator after an answer counts in the loss, too
    return ChatTokens(text, tokens, answers[: len(tokens)])


def roles_of(record: Mapping[str, Any]) -> str:
    """List the roles in a chat for an error message, in the order in which they first occur."""
    return ", ".join(dict.fromkeys(str(message.get("role")) for message in record["messages"]))
