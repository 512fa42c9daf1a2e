"""Encoding of the harness's texts, equal to that of the harness's class for Hugging Face models.

This module can be imported without lm_eval.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_coca.data import DataError, Tokenizer
from megatron_coca.evaluation.tasks.answers import end_tokens
from megatron_coca.evaluation.tasks.lm_eval.task import TruncatedPart

logger = logging.getLogger(__name__)

MARK = "\ue000"
"""A private-use character that marks the end of a continued message during rendering."""


@dataclass(frozen=True)
class InputLimits:
    """Limits of inputs, in tokens.

    Attributes:
        max_length: limit of an input, including new tokens in generation; None: no limit.
        window: tokens of a window of rolling log-likelihoods.
        truncate: the part that inputs longer than the limit lose.
    """

    max_length: int | None
    window: int
    truncate: TruncatedPart = "beginning"

    def shortened(self, tokens: list[int], room: int, kept: int = 1) -> list[int]:
        """Return at most `room` tokens. The last `kept` tokens always remain."""
        if len(tokens) <= room:
            return tokens
        first = min(room // 2, room - kept) if self.truncate == "middle" else 0
        return [*tokens[:first], *tokens[len(tokens) - (room - first) :]]


@dataclass(frozen=True)
class PromptEncoding:
    """The encoding of prompts, and the tokens and strings that end an answer.

    Names of special tokens in a text are encoded as these tokens, unless the model's folder says otherwise.

    Attributes:
        start: the id put before every text, or None.
        adds: whether every text gets the start and end tokens of the model's own library; ignored if `start` is set.
        chat: whether prompts are chats, in which the end of a turn ends an answer.
        begun: whether the model knows the token that begins texts. Data prepared by this project does not contain it.
    """

    tokenizer: Tokenizer
    start: int | None = None
    adds: bool = False
    chat: bool = False
    begun: bool = False

    @property
    def prefix(self) -> int:
        """Token id before a text without context: `start`, the token that begins texts, or the token that ends them."""
        if self.start is not None:
            return self.start
        if not self.begun:
            return self.tokenizer.eod
        return self.tokenizer.eos if self.tokenizer.bos is None else self.tokenizer.bos

    @cached_property
    def ends(self) -> tuple[int, ...]:
        return tuple(end_tokens(self.tokenizer, self.chat))

    @cached_property
    def stops(self) -> tuple[str, ...]:
        """Strings that end an answer in addition to a task's strings, such as the name of the token that ends texts."""
        spelled = [self.tokenizer.piece(self.tokenizer.eos)] if self.tokenizer.names_tokens else []
        return (*spelled, *(self.tokenizer.turn_ends()[1] if self.chat else ()))

    def encode(self, text: str, add: bool | None = None) -> list[int]:
        """Return token ids.

        `add` is whether tokens are put around the text. The default is True unless the text begins with `prefix`.
        """
        self._warn_of_names(text)
        if add is None:
            add = not text.startswith(self.tokenizer.piece(self.prefix))
        if self.start is not None:
            return [*([self.start] if add else []), *self.tokenizer.encode_prompt(text)]
        return self.tokenizer.encode_prompt(text, add and self.adds)

    def _warn_of_names(self, text: str) -> None:
        found = next((name for name in self._unread if name in text), None)
        if found is not None:
            self._unread.clear()
            logger.warning(
                "a prompt has %s, which %s reads as plain text; put the model's tokenizer.json into its folder",
                *(found, self.tokenizer.tokenizer_type),
            )

    @cached_property
    def _unread(self) -> list[str]:
        """Names of special tokens that the tokenizer reads as plain text, for a warning shown once."""
        return [*self.tokenizer.unread_names]


def render_chat(tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]], prompt: bool, told: set[str]) -> str:
    """Return the text of a chat. With `prompt` it ends at the beginning of an answer, otherwise with the last message.

    If the template does not support the role "system", the system message is left out. `told` collects the warnings
    that were shown. Raises DataError if there is no template.
    """
    if tokenizer.chat is None:
        raise DataError("chat template: the tokenizer has none; put the model's chat_template.jinja into its folder")
    try:
        return _rendered(tokenizer, messages, prompt)
    except DataError as error:
        others = [message for message in messages if message["role"] != "system"]
        if len(others) == len(messages):
            raise
        if str(error) not in told:
            told.add(str(error))
            logger.warning("%s; the system message is left out", error)
        return _rendered(tokenizer, others, prompt)


def _rendered(tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]], prompt: bool) -> str:
    assert tokenizer.chat is not None
    if prompt:
        return tokenizer.chat.render(messages, prompt=True)
    last = messages[-1]
    marked = {**last, "content": f"{last['content']}{MARK} "}
    text, mark, rest = tokenizer.chat.render([*messages[:-1], marked]).rpartition(MARK)
    if not mark:
        raise DataError(f"chat template: leaves out the last message ({last['content'][:60]!r}); use another template")
    # A template that trims messages has removed the space after the mark, and would also remove spaces before the mark.
    return text if rest.startswith(" ") else text.rstrip()
