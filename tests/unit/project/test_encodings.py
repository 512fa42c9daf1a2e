"""Text files are UTF-8 in every locale: without `encoding`, Python writes them in the encoding of the locale."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[3] / "megatron_coca"
POSITION = {"read_text": 0, "write_text": 1}
"""The methods of a path that read or write text, with the position of their argument `encoding`."""


def without_encoding(source: str) -> list[int]:
    """Return the lines that read or write text without naming an encoding."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [
        call.lineno
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and len(call.args) <= POSITION.get(call.func.attr, -1)
        and not any(keyword.arg == "encoding" for keyword in call.keywords)
    ]


@pytest.mark.always
def test_text_files_name_their_encoding() -> None:
    assert without_encoding("path.read_text()\npath.write_text('a')\npath.read_text('utf-8')\npath.open()") == [1, 2]
    found = {path.name: lines for path in PACKAGE.rglob("*.py") if (lines := without_encoding(path.read_text()))}
    assert not found
