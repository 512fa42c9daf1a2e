"""Convert chats from the many forms in data sets to the one form that chat templates expect."""

import json
from collections.abc import Mapping
from typing import Any

from megatron_coca.data.readers.source import RejectedRecord
from megatron_coca.data.readers.streams import decode

ROLES = {"human": "user", "gpt": "assistant"}
"""The usual names of the roles in ShareGPT records."""
SYSTEM = "system"
COUNTING = ("weight", "train", "training", "trainable")
"""Keys that state whether a message counts in the loss, in the formats of OpenAI, Axolotl and verl."""
_CALLS = "tool_calls"


def chat_text(messages: Any, tools: Any, system: Any = None) -> str:
    """Return the messages and tools of a chat as JSON, `{"messages": [...], "tools": [...] or null}`.

    - `messages`, `tools`, `tool_calls` and `arguments` may be JSON text. Such text is parsed.
    - The keys `from` and `value` are renamed to `role` and `content`.
    - `system`, a system message that the record has outside the list of messages, becomes the first message.
    - The keys in `COUNTING` are removed. If they state that the message does not count, `weight: 0` takes their place.
    - Every message has the key `content`, which may be null. Other keys with the value null are removed, and so are
      empty `tool_calls`.
    - If the content is a list of text parts, the parts are joined to one text.

    Raises `RejectedRecord` if the messages or tools cannot be converted to this form, or if the arguments of a call are
    text but not JSON.
    """
    messages, tools = _parsed(messages), _parsed(tools)
    messages = [_parsed(each) for each in messages] if isinstance(messages, list) else messages
    if not (isinstance(messages, list) and messages and all(isinstance(each, Mapping) for each in messages)):
        raise RejectedRecord("messages are not a list of objects")
    tools = [tools] if isinstance(tools, Mapping) and tools else tools
    tools = [_tool(_parsed(each)) for each in tools] if isinstance(tools, list) else tools
    if tools and not (isinstance(tools, list) and all(isinstance(each, Mapping) for each in tools)):
        raise RejectedRecord("tools are not a list of objects")
    chat = {"messages": _with_system([_message(each) for each in messages], system), "tools": tools or None}
    try:
        return json.dumps(chat, ensure_ascii=False, default=_text)
    except RecursionError as error:
        raise RejectedRecord("messages have too many levels of lists") from error


def _with_system(messages: list[dict[str, Any]], system: Any) -> list[dict[str, Any]]:
    system = decode(system) if isinstance(system, bytes) else system
    if system is None or (isinstance(system, str) and not system.strip()):
        return messages
    if not isinstance(system, str):
        raise RejectedRecord("the system message is not text", f"it is of type {type(system).__name__}")
    own = [message["content"] for message in messages if message["role"] == SYSTEM]
    if own and own != [system]:
        raise RejectedRecord("two system messages", "one in the messages, and a different one in the record")
    return messages if own else [{"role": SYSTEM, "content": system}, *messages]


def _weight(message: Mapping[str, Any]) -> dict[str, int]:
    values = {key: message[key] for key in COUNTING if message.get(key) is not None}
    for key, value in values.items():
        if value not in (0, 1):
            raise RejectedRecord("the weight of a message is not 0 or 1", f"{key}: {value!r}")
    return {} if all(values.values()) else {"weight": 0}


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    weight = _weight(message)
    message = {key: value for key, value in message.items() if key not in COUNTING} | weight
    if "from" in message:
        role, content = message["from"], message.get("value")
        message = {"role": ROLES.get(role, role) if isinstance(role, str) else role, "content": content} | weight
    if not isinstance(message.get("role"), str):
        raise RejectedRecord("a message has no role")
    known = {"content": None} | _without_nulls(message)
    known["content"] = _content(known["content"])
    calls = _parsed(known.pop(_CALLS, None))
    if isinstance(calls, Mapping | list) and calls:
        known[_CALLS] = [_call(_parsed(each)) for each in (calls if isinstance(calls, list) else [calls])]
    elif calls:
        raise RejectedRecord("tool_calls are not a list of objects")
    if "function_call" in known:
        known["function_call"] = _with_arguments(_parsed(known["function_call"]))
    # The role comes first and then the content, so that equal chats are equal texts.
    return {"role": known.pop("role"), "content": known.pop("content"), **known}


def _content(content: Any) -> Any:
    """Return the joined text if the content is a list of text parts. From other lists, keys with the value null are
    removed. Raises `RejectedRecord` for an object, and for a list with values that are not parts.
    """
    if isinstance(content, Mapping):
        raise RejectedRecord("the content of a message is not text", "it is an object")
    if not isinstance(content, list):
        return content
    parts = [{"text": each} if isinstance(each, str) else each for each in content]
    if not all(isinstance(each, Mapping) for each in parts):
        raise RejectedRecord("the content of a message is not text", "it is a list of values that are not parts")
    parts = [_without_nulls(each) for each in parts]
    is_text = [isinstance(each.get("text"), str) and each.keys() <= {"type", "text"} for each in parts]
    return "".join(each["text"] for each in parts) if all(is_text) else parts


def _call(call: Any) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise RejectedRecord("tool_calls are not a list of objects")
    known = _with_arguments(call)
    if "function" in known:
        known["function"] = _with_arguments(_parsed(known["function"]))
    return known


def _with_arguments(call: Any) -> Any:
    """Return a call without keys that are null, and with its arguments parsed if they are JSON text."""
    if not isinstance(call, Mapping):
        return call
    known = _without_nulls(call)
    if "arguments" not in known:
        return known
    arguments = _parsed(known["arguments"])
    if isinstance(arguments, str):  # perhaps truncated JSON, which a template would print within other JSON
        raise RejectedRecord("the arguments of a call are not a JSON object", f"{arguments[:80]!r}")
    return known | {"arguments": arguments}


def _tool(tool: Any) -> Any:
    """Return the description of a tool with its parameters parsed if they are JSON text."""
    if not isinstance(tool, Mapping):
        return tool
    known = dict(tool)
    for key in ("function", "parameters"):
        if key in known:
            known[key] = _tool(_parsed(known[key])) if key == "function" else _parsed(known[key])
    return known


def _without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _parsed(value: Any) -> Any:
    """Return the object or list in a JSON text. Other values are returned unchanged, and empty text becomes None."""
    text = decode(value) if isinstance(value, bytes) else value
    if not isinstance(text, str):
        return value
    if not text or text.isspace():
        return None
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return parsed if isinstance(parsed, Mapping | list) else text


def _text(value: Any) -> str:
    """Return the text of a value that JSON cannot represent, such as bytes or a date in a table."""
    return decode(value) if isinstance(value, bytes) else str(value)
