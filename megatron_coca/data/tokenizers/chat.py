"""Chats: render messages with a tokenizer's chat template as transformers does, and locate the answers in the text."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import jinja2

from megatron_coca.data.errors import DataError
from megatron_coca.data.tokenizers.chat_sandbox import Budget, TooManySteps, compiled, render
from megatron_coca.data.tokenizers.end_tokens import read_object
from megatron_coca.support.regular_files import read_regular

Messages = Sequence[Mapping[str, Any]]
Spans = list[tuple[int, int]]
"""Parts of a text, each as (index of the first character, end index)."""
ANSWERING = "assistant"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_REASONING = ("reasoning_content", "thinking", "reasoning")


STEPS, STEPS_PER_MESSAGE, STEPS_PER_CHARACTER = 1_000_000, 1_000, 4
"""The steps (see `chat_sandbox`) that a template may take to render a chat: about a second, and more for longer chats.
"""
STEPS_FOR_ANSWERS = 30_000_000
"""The steps that a template may take to locate the answers, for which it renders every prefix of the chat: about a
minute.
"""
_SHOWN = 300
"""Maximum number of characters of a template's own error message that are shown."""
_MARKS = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
"""The private-use characters of Unicode."""


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja2 template that renders a chat.

    Attributes:
        source: the text of the template.
        symbols: the special tokens that the template may print, such as `bos_token`.
        now: the time that the template may print, in ISO 8601; None means the current time.
    """

    source: str
    symbols: Mapping[str, str]
    now: str | None = None

    @property
    def asks_for_time(self) -> bool:
        """True if the template may print the current time."""
        return "strftime_now" in self.source

    def render(
        self,
        messages: Messages,
        tools: Any = None,
        prompt: bool = False,
        mark: Callable[[str], str] | None = None,
        budget: Budget | None = None,
    ) -> str:
        """Render a chat as text. With `prompt`, the text ends with the start of the next answer
        (`add_generation_prompt`).

        Raises `DataError` if the template is invalid, if it does not accept the messages, or if it takes more steps
        than `budget` (by default the steps for rendering this chat once).
        """
        variables = {
            "messages": [_with_reasoning(message) for message in messages],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": prompt,
            "mark_generation": mark,
            **self.symbols,
        }
        try:
            now = datetime.now() if self.now is None else datetime.fromisoformat(self.now)
            return render(self.source, variables, _budget(messages, tools) if budget is None else budget, now)
        except TooManySteps as error:
            raise DataError(
                f"chat template: cannot be used ({error}); correct the template, or choose another one"
            ) from error
        except Exception as error:  # a template may raise any exception, such as RecursionError or OverflowError
            reason = repr(str(error)[:_SHOWN] or type(error).__name__)[1:-1]
            raise DataError(
                f"chat template: does not accept the messages ({reason}); correct the messages or the template"
            ) from error

    def answers(self, messages: Messages, tools: Any = None) -> tuple[str, Spans]:
        """Render a chat and return (text, parts of the text that are answers). If the template contains `{% generation
        %}` blocks, the answers are the text in these blocks; otherwise they are the text that each assistant message
        adds after its prompt.

        Raises `DataError` as `render` does, and also if the template renders earlier messages differently in longer
        chats. Without `{% generation %}` blocks, the number of steps grows with the square of the number of messages,
        up to `STEPS_FOR_ANSWERS`.
        """
        first = _budget(messages, tools)
        text = self.render(messages, tools, budget=first)
        if _GENERATION.search(self.source):
            return text, self._generated(messages, tools, text)
        spans, budget = [], Budget(STEPS_FOR_ANSWERS)
        if first.spent * sum(message.get("role") == ANSWERING for message in messages) > STEPS_FOR_ANSWERS:
            raise DataError(
                f"chat template: takes too many steps to find the answers among {len(messages)} messages; put the "
                "answers into {% generation %} in the template, so that it is rendered only twice"
            )
        for number, message in enumerate(messages):
            if message.get("role") != ANSWERING:
                continue
            before = self.render(messages[:number], tools, True, budget=budget)
            after = self.render(messages[: number + 1], tools, budget=budget)
            if not (text.startswith(after) and after.startswith(before)):
                raise DataError(
                    "chat template: renders a message differently if further messages follow, so the answers cannot be "
                    "located; put the answers into {% generation %} in the template"
                )
            spans.append((len(before), len(after)))
        return text, spans

    def _generated(self, messages: Messages, tools: Any, text: str) -> Spans:
        """Locate the answers by rendering the chat again with marks around the `{% generation %}` blocks. The mark is a
        character that `text` does not contain.
        """
        used = set(text)
        mark = next((mark for mark in map(chr, chain(*_MARKS)) if mark not in used), None)
        if mark is None:
            raise DataError(
                "chat: contains every private-use character, so none of them can mark the answers; remove one of "
                "them from the text"
            )
        marked = self.render(messages, tools, mark=lambda part: mark + part + mark).split(mark)
        edges = [0]
        for part in marked:
            edges.append(edges[-1] + len(part))
        return list(pairwise(edges))[1::2]

    def end_of_turn(self) -> str:
        """Return the text that the template prints after an answer."""
        asked = [{"role": "user", "content": "?"}]
        answered = self.render([*asked, {"role": ANSWERING, "content": "ANSWER"}])
        return answered.rpartition("ANSWER")[2]


def _budget(messages: Messages, tools: Any) -> Budget:
    """Return the budget for rendering a chat once."""
    try:
        characters = len(json.dumps([list(messages), tools], default=str, skipkeys=True, ensure_ascii=False))
    except (ValueError, RecursionError):  # lists that contain themselves, or very deeply nested lists
        characters = 0
    return Budget(STEPS + STEPS_PER_MESSAGE * len(messages) + STEPS_PER_CHARACTER * characters)


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message with its reasoning under all names that templates read."""
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return dict(message) if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def saved_template(saved: Mapping[str, Any]) -> ChatTemplate | None:
    """Return the template in the description of a saved tokenizer, or None. Raises ValueError if the template is not
    text.
    """
    source, symbols, now = (saved.get(name) for name in ("chat_template", "chat_symbols", "chat_time"))
    if source is None:
        return None
    if not (isinstance(source, str) and isinstance(symbols, dict) and isinstance(now, str | None)):
        raise ValueError("chat_template, chat_symbols and chat_time are not text")
    if not all(isinstance(text, str) for text in symbols.values()):
        raise ValueError("chat_symbols are not text")
    return ChatTemplate(source, symbols, now)


def find_template(folder: Path) -> ChatTemplate | None:
    """Return the chat template of a Hugging Face folder, or None. The template is the file `chat_template.jinja`, or
    else the key `chat_template` of `tokenizer_config.json`.

    Raises `DataError` if `chat_template.jinja` cannot be read as text.
    """
    found = read_object(folder / "special_tokens_map.json") | read_object(folder / "tokenizer_config.json")
    source = found.get("chat_template")
    if isinstance(source, list):
        named = [entry for entry in source if isinstance(entry, dict) and entry.get("name") == "default"]
        source = named[0].get("template") if named else None
    path = folder / "chat_template.jinja"
    if path.is_file():
        source = _read_template(path)
    names = {name: value for name, value in found.items() if name.endswith("_token")}
    symbols = {name: value.get("content") if isinstance(value, dict) else value for name, value in names.items()}
    texts = {name: value for name, value in symbols.items() if isinstance(value, str)}
    return ChatTemplate(source, texts) if isinstance(source, str) else None


def with_source(template: ChatTemplate | None, path: Path) -> ChatTemplate:
    """Read a template from a file and give it the symbols of `template`. Raises `DataError` if the file cannot be read
    or the template is invalid.
    """
    source = _read_template(path)
    try:
        compiled(source)
    except jinja2.TemplateSyntaxError as error:
        raise DataError(f"{path}:{error.lineno}: {error.message}") from error
    except Exception as error:  # also errors of Python, which compiles the generated code
        raise DataError(f"{path}: the chat template cannot be used ({error}); correct the template") from error
    return ChatTemplate(source, {} if template is None else template.symbols)


def _read_template(path: Path) -> str:
    try:
        return read_regular(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: the chat template cannot be read ({error}); check the path and that the file is UTF-8 text"
        ) from error
