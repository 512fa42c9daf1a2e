"""Position methods that the user declares in Python files. The key `imports` names the files, which can also declare
sinks of metrics.
"""

import ast
import hashlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from megatron_coca.methods.declaration import TABLES, Choice
from megatron_coca.sinks import SINKS

MARK = "#sha256="
_REGISTERED: list[Choice] = []
"""Every choice that was declared with `register`, in the order of the calls."""
_OF_METHODS: set[str] = set()
"""The modules of files that declare choices."""


class ImportedFileError(ValueError):
    """A file cannot be read or run, or is not the file that a checkpoint was trained with."""


def register(choice: Choice, compute: Any) -> Choice:
    """Add a user's choice, or replace a user's choice that has the same name.

    Args:
        choice: the declaration.
        compute: the formula, with the arguments and the result of built-in choices of the same kind (see the table in
            CONTRIBUTING.md and the example in docs/own_methods.md).

    Raises:
        ValueError: a built-in choice has this name.
    """
    table = TABLES[choice.key]
    if choice.name in table and table[choice.name].compute is None:
        raise ValueError(f"{choice.key}: {choice.name} is a built-in choice; use another name")
    object.__setattr__(choice, "compute", compute)
    table[choice.name] = choice
    _REGISTERED.append(choice)
    return choice


def _digest(source: bytes) -> str:
    """Return a digest of the file's Python code. Comments and layout do not change it."""
    try:
        code = ast.dump(ast.parse(source)).encode()
    except (SyntaxError, ValueError):
        code = source
    return hashlib.sha256(code).hexdigest()[:16]


def import_file(name: str, folder: Path) -> str:
    """Run a file, and return its absolute path with a digest of its contents. Unchanged files are run only once.

    `name` is relative to `folder`. It may end with a digest, and it does in a checkpoint's configuration. The file must
    then match this digest. The path of a file that declares only sinks has no digest, because the file does not change
    the weights.

    Raises:
        ImportedFileError: the file cannot be read, fails, or does not match the digest.
    """
    given, _, wanted = name.partition(MARK)
    path = (folder / given).resolve()
    try:
        source = path.read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ImportedFileError(f"{path}: {reason}; name it with imports=[FILE]") from error
    digest = _digest(source)
    if wanted and wanted != digest:
        raise ImportedFileError(
            f"{path}: not the file that the weights were trained with (sha256 {wanted}..., now {digest}...); restore"
            f" it, or set imports=[FILE] to use this file anyway"
        )
    module = f"megatron_coca_imports.{path.stem}_{digest}"
    if module not in sys.modules:
        spec = importlib.util.spec_from_file_location(module, path)
        assert spec is not None and spec.loader is not None
        loaded = sys.modules[module] = importlib.util.module_from_spec(spec)
        try:
            before = len(_REGISTERED)
            spec.loader.exec_module(loaded)
            if len(_REGISTERED) > before:
                _OF_METHODS.add(module)
        except Exception as error:
            del sys.modules[module]
            raise ImportedFileError(f"{path}: {type(error).__name__}: {error}") from error
    only_sinks = module not in _OF_METHODS and any(sink.__module__ == module for sink in SINKS.values())
    return str(path) if only_sinks else f"{path}{MARK}{digest}"
