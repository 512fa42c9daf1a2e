"""Convert messages to the values that a chat template reads.

Without this conversion, a template that prints an object or a list would print it in Python's notation, and null as
`None`. A model would then learn this text. With the conversion, null content is printed as empty text, and a template
that prints the arguments of a tool call or a list of content parts fails.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from typing_extensions import override

Messages = Sequence[Mapping[str, Any]]
_REASONING = ("reasoning_content", "thinking", "reasoning")


class NoText(str):
    """The content of a message if it is null: an empty text that also equals null in a template."""

    __slots__ = ()
    __hash__ = str.__hash__

    @override
    def __eq__(self, other: object) -> bool:
        return other is None or str.__eq__(self, other)

    @override
    def __ne__(self, other: object) -> bool:
        return not self == other


def is_none(value: Any) -> bool:
    """Return True for null and for `NoText`. Templates use this function as the test `none`."""
    return value is None or isinstance(value, NoText)


class _NotPrinted:
    """A container that a template must not print. The template may read its items."""

    meaning = ""

    @override
    def __str__(self) -> str:
        raise TypeError(f"it prints {self.meaning} in Python's notation")


class _Parts(_NotPrinted, list[Any]):
    meaning = "a list of parts"


class _Arguments(_NotPrinted, dict[str, Any]):
    meaning = "the arguments of a tool call"


def forms(messages: Messages) -> Iterator[list[dict[str, Any]]]:
    """Yield the messages in the forms that a template may accept. In the first form, the arguments of tool calls are
    objects. If there are such arguments, they are JSON text in a second form.
    """
    objects = [_given(message, _Arguments) for message in messages]
    yield objects
    texts = [_given(message, lambda value: json.dumps(value, ensure_ascii=False)) for message in messages]
    if texts != objects:
        yield texts


def _given(message: Mapping[str, Any], arguments: Any) -> dict[str, Any]:
    """Return a copy of a message for a template. Its reasoning is stored under the names that templates read. Null
    content becomes `NoText`, and a list as content becomes `_Parts`. The function `arguments` is applied to the
    arguments of the tool calls.
    """
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    given = dict(message) if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}
    content = given.get("content")
    if "content" in given and content is None:
        given["content"] = NoText()
    elif isinstance(content, list):
        given["content"] = _Parts(content)
    if isinstance(calls := given.get("tool_calls"), list):
        given["tool_calls"] = [_call(call, arguments) for call in calls]
    return given


def _call(call: Any, arguments: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    given = dict(call)
    if isinstance(given.get("arguments"), Mapping):
        given["arguments"] = arguments(given["arguments"])
    if "function" in given:
        given["function"] = _call(given["function"], arguments)
    return given
