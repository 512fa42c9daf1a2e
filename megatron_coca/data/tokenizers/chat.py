"""Chats: messages rendered by a tokenizer's template as transformers renders them, and which tokens are answers."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatron_coca.data.errors import DataError
from megatron_coca.regular_files import read_regular

Messages = Sequence[Mapping[str, Any]]
Spans = list[tuple[int, int]]
"""First character and end of parts of a text."""
ANSWERING = "assistant"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_REASONING = ("reasoning_content", "thinking", "reasoning")


class _Generation(jinja2.ext.Extension):
    """The block ``{% generation %}``: tells the context's ``mark`` its text, and prints what that returns."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        mark = jinja2.nodes.Name("mark_generation", "load")
        marked = jinja2.nodes.Filter(None, "marked", [mark], [], None, None)
        return jinja2.nodes.FilterBlock(body, marked).set_lineno(line)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


@cache
def _compiled(source: str) -> jinja2.Template:
    """Compile a template with the settings, filters and functions that transformers gives it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters |= {"tojson": _tojson, "marked": lambda text, mark: mark(text) if mark else text}
    environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment.from_string(source)


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja2 template of a chat.

    Attributes:
        source: the template.
        symbols: ``bos_token`` and others, which the template may print.
    """

    source: str
    symbols: Mapping[str, str]

    def render(
        self, messages: Messages, tools: Any = None, prompt: bool = False, mark: Callable[[str], str] | None = None
    ) -> str:
        """The text of a chat; with ``prompt`` up to where the next answer begins (``add_generation_prompt``).

        Raises ``DataError`` for a template or messages that it refuses.
        """
        try:
            return _compiled(self.source).render(
                messages=[_with_reasoning(message) for message in messages],
                tools=tools,
                documents=None,
                add_generation_prompt=prompt,
                mark_generation=mark,
                **self.symbols,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise DataError(f"the chat template refuses the messages ({error})") from error

    def answers(self, messages: Messages, tools: Any = None) -> tuple[str, Spans]:
        """The text of a chat, and where its answers are: in ``{% generation %}`` if the template has it, else what
        rendering one more message adds behind the prompt for it.

        Raises ``DataError`` as ``render``, and for a template that renders earlier messages otherwise in longer chats.
        """
        text = self.render(messages, tools)
        if _GENERATION.search(self.source):
            return text, self._generated(messages, tools, text)
        spans = []
        for number, message in enumerate(messages):
            if message.get("role") != ANSWERING:
                continue
            before, after = self.render(messages[:number], tools, True), self.render(messages[: number + 1], tools)
            if not (text.startswith(after) and after.startswith(before)):
                raise DataError(
                    "the chat template renders a message otherwise when others follow, so its answers cannot be told; "
                    "put them into {% generation %} in the template"
                )
            spans.append((len(before), len(after)))
        return text, spans

    def _generated(self, messages: Messages, tools: Any, text: str) -> Spans:
        """Render once more with marks around the generated parts, which the text does not contain."""
        mark = next(mark for mark in map(chr, range(0xE000, 0xF8FF)) if mark not in text)
        marked = self.render(messages, tools, mark=lambda part: mark + part + mark).split(mark)
        edges = [0]
        for part in marked:
            edges.append(edges[-1] + len(part))
        return list(pairwise(edges))[1::2]

    def end_of_turn(self) -> str:
        """What the template puts behind an answer."""
        asked = [{"role": "user", "content": "?"}]
        answered = self.render([*asked, {"role": ANSWERING, "content": "ANSWER"}])
        return answered.rpartition("ANSWER")[2]


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with its reasoning under the names that templates read."""
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return dict(message) if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def find_template(folder: Path) -> ChatTemplate | None:
    """The template saved in a Hugging Face folder: ``chat_template.jinja``, or the key of ``tokenizer_config.json``."""
    found: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        with suppress(OSError, ValueError):
            found |= json.loads(read_regular(folder / name))
    source = found.get("chat_template")
    if isinstance(source, list):
        source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
    with suppress(OSError):
        source = read_regular(folder / "chat_template.jinja").decode()
    names = {name: value for name, value in found.items() if name.endswith("_token")}
    symbols = {name: value["content"] if isinstance(value, dict) else value for name, value in names.items()}
    texts = {name: value for name, value in symbols.items() if isinstance(value, str)}
    return None if source is None else ChatTemplate(source, texts)


def with_source(template: ChatTemplate | None, path: Path) -> ChatTemplate:
    """The template in a file, with the symbols of another. ``DataError`` if it cannot be read or has an error."""
    try:
        source = read_regular(path).decode()
        _compiled(source)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot read the chat template ({error}).") from error
    except jinja2.TemplateSyntaxError as error:
        raise DataError(f"{path}:{error.lineno}: {error.message}") from error
    return ChatTemplate(source, {} if template is None else template.symbols)
