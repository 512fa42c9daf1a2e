"""Null contents, lists of parts and arguments of tool calls in chat templates."""

from typing import Any

import pytest

from megatron_coca.data import DataError
from megatron_coca.data.tokenizers.chat import ChatTemplate

CALL = {"type": "function", "function": {"name": "look", "arguments": {"place": "sea"}}}
CALLED = [{"role": "assistant", "content": None, "tool_calls": [CALL]}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}]
ARGUMENTS = "{% for m in messages %}{% set f = m.tool_calls[0].function %}{{ f.name }} "


def rendered(body: str, messages: Any) -> str:
    return ChatTemplate("{% for m in messages %}" + body + "{% endfor %}", {}).render(messages)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("[{{ m.content }}]", "[]"),
        ("[{{ m['content'] | trim }}]", "[]"),
        ("[{{ 'x' + m.content ~ 'y' }}]", "[xy]"),
        ("{{ m.content is none }} {{ m.content is not none }}", "True False"),
        ("{{ m.content == none }} {{ m.content != none }} {{ none == m.content }}", "True False True"),
        ("{{ 'content' in m }} {{ m.content is defined }} {% if m.content %}full{% endif %}", "True True "),
        ("{{ m.other is none }} {{ none is none }} {{ 3 is none }}", "False True False"),
    ],
)
def test_null_content_is_no_text_and_still_null(body: str, text: str) -> None:
    assert rendered(body, CALLED) == text


@pytest.mark.parametrize(
    "arguments",
    [
        "{{ f.arguments | tojson }}",
        "{{ '{' }}{% for name, value in f.arguments.items() %}{{ name | tojson }}: {{ value | tojson }}{% endfor %}}",
        "{% if f.arguments is string %}{{ f.arguments }}{% else %}{{ f.arguments | tojson }}{% endif %}",
        "{{ '' + f.arguments }}",
        "{{ f.arguments }}",
    ],
)
def test_arguments_have_the_form_that_the_template_accepts(arguments: str) -> None:
    text = ChatTemplate(ARGUMENTS + arguments + "{% endfor %}", {}).render(CALLED)
    assert text == 'look {"place": "sea"}'


def test_parts_are_not_printed_in_the_notation_of_python() -> None:
    each = "{% for part in m.content %}{{ part.text or '<image>' }}{% endfor %}"
    assert rendered(each, PARTS) == "a<image>"
    for body in (
        "{{ m.content }}",
        "{{ m.content | string }}",
        "{{ '' ~ m.content }}",
        "{{ '%s' | format(m.content) }}",
    ):
        with pytest.raises(DataError, match="prints a list of parts in Python's notation"):
            rendered(body, PARTS)
