"""The running Python's standard library as text and code, read with ``ast``; nothing is imported or run.

Text is what people wrote for people: the language reference behind ``help()`` and the docstrings. Code is the sources
with their docstrings removed, so that no passage occurs in both.
"""

import ast
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path

from megatron_coca.data.errors import DataError
from megatron_coca.data.readers.document import Problems

# Tests and demos; what other projects installed; packages that not every Python of this version or the next one has.
SKIPPED_FOLDERS = frozenset(
    (
        *("test", "tests", "turtledemo", "dist-packages", "site-packages", "__pycache__"),
        *("distutils", "idlelib", "lib2to3", "tkinter", "pydoc_data"),
    )
)
# Tables and settings that a program wrote.
SKIPPED_FILES = ("encodings/cp*", "encodings/mac_*", "encodings/iso8859_*", "encodings/koi8*", "_sysconfigdata*")
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def modules(root: Path | None = None) -> Iterator[tuple[str, Path]]:
    """(dotted name, file) of every module, in sorted order; tests, demos and generated tables are left out."""
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS & set(relative.parts) or any(relative.match(pattern) for pattern in SKIPPED_FILES):
            continue
        yield ".".join(relative.with_suffix("").parts), path


def _docstring_nodes(tree: ast.Module) -> Iterator[tuple[_Documented, ast.Expr]]:
    for node in ast.walk(tree):
        if isinstance(node, _Documented) and ast.get_docstring(node, clean=False) is not None:
            statement = node.body[0]
            assert isinstance(statement, ast.Expr)
            yield node, statement


def docstrings(tree: ast.Module) -> str:
    """All docstrings of a module in the order of the source, blank lines between them."""
    found = [(statement.lineno, ast.get_docstring(node)) for node, statement in _docstring_nodes(tree)]
    return "\n\n".join(text.strip() for _, text in sorted(found) if text and text.strip())


def without_docstrings(source: str, tree: ast.Module) -> str:
    """The source with every docstring cut out; a body that held nothing else keeps a ``pass``."""
    lines = source.encode().split(b"\n")
    begins = [0]
    for line in lines:
        begins.append(begins[-1] + len(line) + 1)
    remaining = bytearray(b"\n".join(lines))
    statements = sorted(_docstring_nodes(tree), key=lambda pair: pair[1].lineno, reverse=True)
    for node, statement in statements:
        assert statement.end_lineno is not None and statement.end_col_offset is not None
        begin = begins[statement.lineno - 1] + statement.col_offset
        end = begins[statement.end_lineno - 1] + statement.end_col_offset
        alone = len(node.body) == 1 and not isinstance(node, ast.Module)
        _cut(remaining, begin, end, b"pass" if alone else b"")
    return remaining.decode().strip("\n") + "\n"


def _cut(source: bytearray, begin: int, end: int, replacement: bytes) -> None:
    """Replace a statement; where nothing replaces it, take the rest of its line or the semicolon behind it as well."""
    if not replacement:
        rest = source[end : _line_end(source, end)].lstrip()
        if rest.startswith(b";"):
            end = source.index(b";", end) + 1
            while source[end : end + 1] == b" ":
                end += 1
        elif not rest:
            end = min(_line_end(source, end) + 1, len(source))
            begin = source.rfind(b"\n", 0, begin) + 1
    source[begin:end] = replacement


def _line_end(source: bytearray, position: int) -> int:
    found = source.find(b"\n", position)
    return len(source) if found < 0 else found


def read_module(path: Path, problems: Problems) -> tuple[str, str]:
    """(docstrings, source without them) of one file; two empty strings where it does not parse, which is reported."""
    try:
        with tokenize.open(path) as stream:
            source = stream.read()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of the library's own escapes: not ours to mend
            warnings.simplefilter("ignore", DeprecationWarning)
            tree = ast.parse(source)
    except (SyntaxError, UnicodeDecodeError, ValueError) as error:
        problems.add(str(path), "not a source of this Python", str(error))
        return "", ""
    return docstrings(tree), without_docstrings(source, tree)


def topics() -> dict[str, str]:
    """The language reference behind ``help()``, by topic."""
    try:
        from pydoc_data.topics import topics as by_name
    except ImportError as error:
        raise DataError(
            "This Python has no pydoc_data, part of its standard library. Install the full Python, or prepare a corpus "
            "of your own with tools/prepare_data.py --input."
        ) from error
    return dict(sorted(by_name.items()))
