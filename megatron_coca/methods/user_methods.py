"""Position methods from files of the user, which the key `imports` names."""

import ast
import hashlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from megatron_coca.methods.declaration import TABLES, Choice

MARK = "#sha256="


class ImportedFileError(ValueError):
    """A file cannot be read or run, or its contents are not those that a checkpoint was trained with."""


def register(choice: Choice, compute: Any) -> Choice:
    """Add a choice from outside of the package, or replace an earlier one from outside of the same name.

    Args:
        choice: its declaration.
        compute: its formula, as the built-in ones of the same kind (CONTRIBUTING.md, "A method of your own").

    Raises:
        ValueError: the name is one of the package's own.
    """
    table = TABLES[choice.key]
    if choice.name in table and table[choice.name].compute is None:
        raise ValueError(f"{choice.key}: {choice.name} is a name of megatron_coca; give yours another one")
    object.__setattr__(choice, "compute", compute)
    table[choice.name] = choice
    return choice


def _digest(source: bytes) -> str:
    """A digest of what the file says to Python: comments and layout do not count."""
    try:
        said = ast.dump(ast.parse(source)).encode()
    except (SyntaxError, ValueError):
        said = source
    return hashlib.sha256(said).hexdigest()[:16]


def import_file(name: str, folder: Path) -> str:
    """Run a file, once for its contents, and return its absolute path with a digest of these.

    `name` is relative to `folder`; a digest in it, as a checkpoint's configuration has, must be that of the file.

    Raises:
        ImportedFileError: the file cannot be read, fails, or has other contents.
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
            f"{path}: is not the file that the weights were trained with (sha256 {wanted}..., now {digest}...); restore"
            f" it, or name a file with imports=[FILE] to use that as it is"
        )
    module = f"megatron_coca_imports.{path.stem}_{digest}"
    if module not in sys.modules:
        spec = importlib.util.spec_from_file_location(module, path)
        assert spec is not None and spec.loader is not None
        loaded = sys.modules[module] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(loaded)
        except Exception as error:
            del sys.modules[module]
            raise ImportedFileError(f"{path}: {type(error).__name__}: {error}") from error
    return f"{path}{MARK}{digest}"
