"""Tokens of the harness's texts, as its class for Hugging Face models encodes them. Importing this needs no lm_eval."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_coca.data import DataError, Tokenizer
from megatron_coca.evaluation.tasks.answers import end_tokens

logger = logging.getLogger(__name__)

MARK = "\ue000"
"""The end of a continued message while it is rendered; a character for private use."""


@dataclass(frozen=True)
class InputLimits:
    """Limits of inputs, in tokens.

    Attributes:
        max_length: of an input, including new tokens in generation; None: inputs are read whole.
        window: of a window of rolling log-likelihoods.
    """

    max_length: int | None
    window: int


@dataclass(frozen=True)
class PromptEncoding:
    """Tokens of prompts, and the tokens and texts that end an answer.

    Names of special tokens in a text become these tokens, unless the model's folder says otherwise.

    Attributes:
        start: the id before every text, or None.
        adds: every text gets the start and end tokens of the model's own library. It has no effect with `start`.
        chat: prompts are chats, so the end of a turn ends an answer.
        begun: the model knows the token that begins texts. Data that was prepared here has none.
    """

    tokenizer: Tokenizer
    start: int | None = None
    adds: bool = False
    chat: bool = False
    begun: bool = False

    @property
    def prefix(self) -> int:
        """Id before a text without context: `start`, or the token that begins texts, or the one that ends them."""
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
        """Texts that end an answer besides those of a task, such as the name of the token that ends texts."""
        spelled = [self.tokenizer.piece(self.tokenizer.eos)] if self.tokenizer.names_tokens else []
        return (*spelled, *(self.tokenizer.turn_ends()[1] if self.chat else ()))

    def encode(self, text: str, add: bool | None = None) -> list[int]:
        """Return token ids. `add` puts tokens around the text, by default if it does not begin with the prefix."""
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
        """Names for a warning, which is given once."""
        return [*self.tokenizer.unread_names]


def render_chat(tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]], prompt: bool, told: set[str]) -> str:
    """Return the text of a chat up to the beginning of an answer (`prompt`), or to the end of the last message.

    A template without the role "system" gets the chat without that message; `told` has the warnings so far. Raises
    DataError without a template.
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
        raise DataError(
            f"chat template: leaves out the last message ({last['content'][:60]!r}), to be continued; use another"
        )
    # A template that trims messages has removed the space after the mark, and would remove spaces before it.
    return text if rest.startswith(" ") else text.rstrip()
