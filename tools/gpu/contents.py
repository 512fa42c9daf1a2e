"""Find the files of this repository that a command runs, and summarize their content."""

import ast
import os
import shlex
from collections.abc import Iterable, Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOPS = ("megatron_coca", "tests", "tools")
"""Folders of the repository's own modules."""


def digest(command: str, reads: Iterable[str], root: Path = ROOT) -> str:
    """Return a digest of a command and of the files that it runs: the files that it names, `reads` (files or folders),
    and everything that these import from this repository, inside functions too.
    """
    named = [root / word for word in (*shlex.split(command), *reads)]
    files = {file for path in named for file in ([path] if path.is_file() else sorted(path.glob("test_*.py")))}
    content = sha256(command.encode())
    for file in sorted(closure(files, root)):
        content.update(os.path.relpath(file, root).encode() + sha256(file.read_bytes()).digest())
    return content.hexdigest()[:16]


def closure(files: Iterable[Path], root: Path = ROOT) -> set[Path]:
    """Return the files, all modules of this repository that they import, and the YAML files next to these modules."""
    found: set[Path] = set()
    waiting = list(files)
    while waiting:
        file = waiting.pop()
        if file not in found:
            found.add(file)
            waiting += _imported(file, root) if file.suffix == ".py" else ()
    return found | {
        data for folder in {file.parent for file in found if file.suffix == ".py"} for data in folder.glob("*.yaml")
    }


@cache
def _imported(file: Path, root: Path) -> tuple[Path, ...]:
    nodes = _nodes(ast.parse(file.read_text()), inside=file.name != "__init__.py")
    names = {name for name in _names(nodes) if name.partition(".")[0] in TOPS}
    return tuple(path for name in sorted(names) for path in _files(name, root))


def _nodes(node: ast.AST, inside: bool) -> Iterator[ast.AST]:
    """Yield all nodes except those under `if TYPE_CHECKING`. A package's own file has imports in functions that most
    programs never call, so imports in functions count only with `inside`.
    """
    for child in ast.iter_child_nodes(node):
        typing = isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")
        if not typing and (inside or not isinstance(child, ast.FunctionDef)):
            yield child
            yield from _nodes(child, inside)


def _names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)  # these names may be modules


def _files(name: str, root: Path) -> Iterator[Path]:
    """Yield the file of a module and the files of the packages around it."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        path = root.joinpath(*parts[:end])
        yield from (file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file())
