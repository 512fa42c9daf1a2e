"""Chats: render messages with a tokenizer's chat template as transformers does, and locate the answers in the text."""

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import jinja2

from megatron_coca.data.errors import DataError
from megatron_coca.data.tokenizers.chat_sandbox import Budget, TooManySteps, compiled, render
from megatron_coca.data.tokenizers.chat_values import Messages, forms
from megatron_coca.data.tokenizers.end_tokens import read_object
from megatron_coca.support.regular_files import read_regular

AnswerSpans = list[tuple[int, int]]
"""Parts of a text, each as (index of the first character, end index)."""
ANSWERING = "assistant"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
RESERVED = frozenset(("messages", "tools", "documents", "add_generation_prompt", "mark_generation"))
"""The variables that `ChatTemplate.render` itself passes to a template."""
KEEPING = (
    "use a template that keeps every turn (--chat-template chatml, or another one that docs/chat.md lists), put the "
    "answers into {% generation %} in the template, or use --messages last"
)
"""The remedy for templates with answers that cannot be located."""


SHIPPED = Path(__file__).parents[2] / "configs/chat"
STEPS, STEPS_PER_MESSAGE, STEPS_PER_CHARACTER = 1_000_000, 1_000, 4
"""To render a chat, a template may take `STEPS` steps (see `chat_sandbox`) and additional steps for each message and
each character of the chat. `STEPS` steps take about a second.
"""
STEPS_FOR_ANSWERS = 30_000_000
"""The maximum number of steps that a template may take to locate the answers of a chat. These steps take about a
minute. To locate the answers, the template renders the chat again up to each answer.
"""
_SHOWN = 300
"""Error messages of a template are cut to this many characters before they are shown."""
_MARKS = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
"""The private-use characters of Unicode."""


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja2 template that renders a chat.

    Attributes:
        source: the text of the template.
        symbols: the special tokens that the template may print, such as `bos_token`.
        variables: further values that the template reads, such as `enable_thinking`.
        now: the time that the template may print, in ISO 8601; None means the current time.
    """

    source: str
    symbols: Mapping[str, str]
    now: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)

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
        than `budget`, which is by default the budget for rendering this chat once.
        """
        budget = _budget(messages, tools) if budget is None else budget
        others = {"tools": tools, "documents": None, "add_generation_prompt": prompt, "mark_generation": mark}
        variables = {**self.variables, **others, **self.symbols}
        first: Exception | None = None
        for form in forms(messages):
            try:
                now = datetime.now() if self.now is None else datetime.fromisoformat(self.now)
                return render(self.source, variables | {"messages": form}, budget, now)
            except TooManySteps as error:
                raise DataError(
                    f"chat template: cannot be used ({error}); correct the template, or choose another one"
                ) from error
            except Exception as error:  # a template may raise any exception, such as RecursionError or OverflowError
                first = first or error
        reason = repr(str(first)[:_SHOWN] or type(first).__name__)[1:-1]
        raise DataError(
            f"chat template: does not accept the messages ({reason}); correct the messages or the template"
        ) from first

    def answers(self, messages: Messages, tools: Any = None, last: bool = False) -> tuple[str, AnswerSpans]:
        """Render a chat and return (text, parts of the text that are answers). If the template contains `{% generation
        %}` blocks, the answers are the texts in these blocks. Otherwise, an answer is the text that an assistant
        message adds to the prompt for this message. With `last`, only the last answer is located. Answers of messages
        with `weight: 0` are left out.

        Raises `DataError` as `render` does. Also raises `DataError` if the template renders an answer differently when
        further messages follow. Without `{% generation %}` blocks, the number of steps grows with the square of the
        number of messages, up to `STEPS_FOR_ANSWERS`.
        """
        first = _budget(messages, tools)
        text = self.render(messages, tools, budget=first)
        if _GENERATION.search(self.source):
            spans = self._generated(messages, tools, text)
            return text, _counted(spans, messages, last)
        numbers = [number for number, message in enumerate(messages) if message.get("role") == ANSWERING]
        numbers = [number for number in (numbers[-1:] if last else numbers) if messages[number].get("weight") != 0]
        if first.spent * len(numbers) > STEPS_FOR_ANSWERS:
            raise DataError(
                f"chat template: takes too many steps to find the answers among {len(messages)} messages; put the "
                "answers into {% generation %} in the template, so that it is rendered only twice"
            )
        budget = Budget(STEPS_FOR_ANSWERS, first.steps)
        return text, [self._answer(messages[: number + 1], tools, text, budget) for number in numbers]

    def _answer(self, messages: Messages, tools: Any, text: str, budget: Budget) -> tuple[int, int]:
        """Locate the last of `messages` in `text`. `text` is the rendered chat, which begins with these messages."""
        after = self.render(messages, tools, budget=budget.part())
        if not text.startswith(after):
            raise DataError(
                "chat template: renders a message differently if further messages follow, so the answers cannot be "
                f"located; {KEEPING}"
            )
        prompt = self.render(messages[:-1], tools, True, budget=budget.part())
        if after.startswith(prompt):
            return len(prompt), len(after)
        # The prompt may end with text that is not in the rendered message, such as a tag that opens a thought. Then the
        # answer begins after the text that the prompt shares with the rendered chat, whatever the answer is. Rendering
        # another answer shows which text this is.
        asked = self.render(messages[:-1], tools, budget=budget.part())
        other = {"role": ANSWERING, "content": chr(_MARKS[0].start)}
        begin = _common(prompt, self.render([*messages[:-1], other], tools, budget=budget.part()))
        if len(begin) > len(asked) and after.startswith(begin) and begin.startswith(asked):
            return len(begin), len(after)
        raise DataError(
            f"chat template: the prompt for an answer ends with {prompt[len(_common(prompt, after)) :]!r:.60}, "
            f"but answers do not begin with it, so they cannot be located; {KEEPING}"
        )

    def _generated(self, messages: Messages, tools: Any, text: str) -> AnswerSpans:
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


def _counted(spans: AnswerSpans, messages: Messages, last: bool) -> AnswerSpans:
    """Return the spans of the answers that count in the loss."""
    answers = [message for message in messages if message.get("role") == ANSWERING]
    if all(message.get("weight") != 0 for message in answers):
        return spans[-1:] if last else spans
    if len(spans) != len(answers):
        raise DataError(
            f"chat template: prints {len(answers)} answers in {len(spans)} {{% generation %}} blocks, so it is unknown "
            "which of them have weight 0; use a block for each answer"
        )
    chosen = [*zip(spans, answers, strict=True)][-1 if last else 0 :]
    return [span for span, message in chosen if message.get("weight") != 0]


def _common(one: str, other: str) -> str:
    """Return the longest text with which both texts begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((place for place, (mine, theirs) in pairs if mine != theirs), min(len(one), len(other)))]


def _budget(messages: Messages, tools: Any) -> Budget:
    """Return the budget for rendering a chat once."""
    try:
        characters = len(json.dumps([list(messages), tools], default=str, skipkeys=True, ensure_ascii=False))
    except (ValueError, RecursionError):  # lists that contain themselves, or very deeply nested lists
        characters = 0
    return Budget(STEPS + STEPS_PER_MESSAGE * len(messages) + STEPS_PER_CHARACTER * characters)


def saved_template(saved: Mapping[str, Any]) -> ChatTemplate | None:
    """Return the template in the description of a saved tokenizer, or None. Raises ValueError if the template is not
    text.
    """
    source, symbols, now = (saved.get(name) for name in ("chat_template", "chat_symbols", "chat_time"))
    variables = saved.get("chat_variables", {})
    if source is None:
        return None
    if not (isinstance(source, str) and isinstance(symbols, dict) and isinstance(now, str | None)):
        raise ValueError("chat_template, chat_symbols and chat_time are not text")
    if not isinstance(variables, dict):
        raise ValueError("chat_variables are not an object")
    if not all(isinstance(text, str) for text in symbols.values()):
        raise ValueError("chat_symbols are not text")
    return ChatTemplate(source, symbols, now, variables)


def find_template(folder: Path) -> ChatTemplate | None:
    """Return the chat template of a Hugging Face folder, or None. The template is the file `chat_template.jinja`, or
    else the key `chat_template` of `tokenizer_config.json`, or else the same key of `chat_template.json`, which models
    that read images use.

    Raises `DataError` if `chat_template.jinja` cannot be read as text.
    """
    found = read_object(folder / "special_tokens_map.json") | read_object(folder / "tokenizer_config.json")
    source = found.get("chat_template") or read_object(folder / "chat_template.json").get("chat_template")
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


def shipped_templates() -> dict[str, Path]:
    """Return the paths of the chat templates in this package, by name."""
    return {path.stem: path for path in sorted(SHIPPED.glob("*.jinja"))}


def template_path(named: str, beside: Path = Path()) -> Path:
    """Return the path of a chat template: a file in the folder `beside`, or else a template of this package."""
    path = beside / os.path.expanduser(named)
    return path if path.exists() else shipped_templates().get(named, path)


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


def with_variables(template: ChatTemplate, variables: Mapping[str, Any] | None) -> ChatTemplate:
    """Return the template with `variables` added to its variables.

    Raises `DataError` for a name that the template does not read or that this program sets.
    """
    for name in variables or ():
        if name in RESERVED or name in template.symbols:
            raise DataError(f"--chat-template-kwargs: {name} is set by this program; leave it out")
        if not re.search(rf"\b{re.escape(name)}\b", template.source):
            raise DataError(
                f"--chat-template-kwargs: the chat template does not read {name!r}; correct the name, or leave it out"
            )
    return replace(template, variables={**template.variables, **(variables or {})})


def _read_template(path: Path) -> str:
    try:
        return read_regular(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: the chat template cannot be read ({error}); check the path and that the file is UTF-8 text"
        ) from error
