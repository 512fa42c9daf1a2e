"""Assemble the modelling file of an export from modeling_coca.py and the formulas that it imports.

An exported folder has one file that needs only torch and transformers. Its template is `modeling_coca.py` beside this
module, which imports formulas from the package. Each of these imports is replaced by the source of the imported names
and of everything that they read. Formulas of the user are added in the same way, each as a row of the table of its
kind. The file is assembled at every export and not kept in the repository, so that every formula is written once and is
always current.
"""

import ast
import builtins
import inspect
import pprint
import symtable
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import megatron_coca.model  # noqa: F401 - loads the modules of all formulas
from megatron_coca import methods

TEMPLATE = Path(__file__).with_name("modeling_coca.py")
PACKAGE = __name__.partition(".")[0]
AVAILABLE = sys.stdlib_module_names | {"torch", "typing_extensions"}  # torch itself needs the latter
MARK = "# ASSEMBLED\n"
STAND_INS = frozenset({"ModelConfig", "Options", "Rotary"})
"""Classes of the template that replace the package's classes of the same name."""
TABLES = {"rope_scaling": "EXTENSIONS", "relative_positions": "DISTANCE_MAPS", "logit_scaling": "LOGIT_SCALINGS"}
FLAGS = ("rotary", "biased", "length_dependent", "switches", "learned", "training_only", "evaluation_only")
"""Attributes of declarations that the template reads."""


class NotCarriedError(ValueError):
    """A formula reads something that cannot be written into the modelling file."""


def _describe(choice: methods.Choice) -> dict[str, Any]:
    """Return the parts of a declaration that the modelling file reads: its name, flags, and constant defaults."""
    flags = {flag: getattr(choice, flag) for flag in FLAGS if hasattr(choice, flag)}
    constant = (option for option in choice.options if not option.required and option.by_length is None)
    return {"name": choice.name, **flags, "options": {option.name: option.default for option in constant}}


CHOICES = {
    key: {name: _describe(row) for name, row in rows.items() if row.compute is None}
    for key, rows in methods.TABLES.items()
}
"""The package's own declarations by key and name, which become a literal in the modelling file."""


class _Module:
    """The top-level statements of a module with their text, by the names that they bind."""

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text, lines, self.body = name, text, text.splitlines(), ast.parse(text).body
        self.statements: dict[str, list[tuple[ast.stmt, str]]] = {}
        for node, following in zip(self.body, [*self.body[1:], self.body[-1]], strict=True):
            first = min([node.lineno, *(part.lineno for part in getattr(node, "decorator_list", ()))])
            described = isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(following, ast.Expr)
            source = "\n".join(lines[first - 1 : (following if described else node).end_lineno])
            for symbol in symtable.symtable(source, name, "exec").get_symbols():
                if symbol.is_assigned() or symbol.is_imported():
                    self.statements.setdefault(symbol.get_name(), []).append((node, source))


@cache
def _module(name: str) -> _Module:
    try:
        return _Module(name, inspect.getsource(sys.modules[name]))
    except (OSError, TypeError) as error:
        raise NotCarriedError(f"{name}: has no source file; define the formula in a file") from error


def _names_read(source: str) -> set[str]:
    """Return the names that a statement reads from its module."""
    tables, names = [symtable.symtable(source, "formula", "exec")], set()
    while tables:
        table = tables.pop()
        tables += table.get_children()
        read = [name for name in table.get_symbols() if name.is_referenced()]
        names |= {name.get_name() for name in read if name.is_global() or table.get_type() == "module"}
    return names


def _origin(node: ast.stmt, name: str) -> str:
    """Return the dotted name that an import binds to `name`; empty for other statements."""
    if not isinstance(node, ast.Import | ast.ImportFrom):
        return ""
    (alias,) = (alias.name for alias in node.names if (alias.asname or alias.name).partition(".")[0] == name)
    return f"{'.' * node.level}{node.module}.{alias}" if isinstance(node, ast.ImportFrom) else alias


class _Assembly:
    """The formulas of a modelling file: each definition once, after the definitions that it reads."""

    def __init__(self, template: _Module) -> None:
        self.imports: set[str] = set()
        self.texts: list[str] = []
        self.begun: set[str] = set()
        origins = {name: _origin(found[0][0], name) for name, found in template.statements.items()}
        self.homes = {name: origin or template.name for name, origin in origins.items() if not _is_ours(origin)}
        """The module that defines each name of the file, or the dotted name of an imported one."""

    def add(self, module: _Module, name: str) -> None:
        """Add the definition of a name and of everything that it reads."""
        if name in STAND_INS and _is_ours(module.name):
            return
        if name not in module.statements and not hasattr(builtins, name):
            raise NotCarriedError(f"{module.name}: does not define {name} at its top level; move the definition there")
        for node, text in module.statements.get(name, ()):
            origin = _origin(node, name)
            source, _, original = origin.rpartition(".")
            if _is_ours(origin) and original == name and origin not in sys.modules:
                lazy = source == PACKAGE  # the package imports its names when they are used
                self.add(_module(getattr(sys.modules[source], name).__module__ if lazy else source), name)
                continue
            if origin and origin.partition(".")[0] not in AVAILABLE:
                raise NotCarriedError(
                    f"{module.name}: imports {name}, which is not part of {PACKAGE}, torch or Python; do without it"
                )
            home, defined = origin or module.name, name in self.homes
            if self.homes.setdefault(name, home) != home:
                raise NotCarriedError(f"{module.name}: the modelling file has another {name}; rename yours")
            if origin and not defined:
                renamed = original if original == name else f"{original} as {name}"
                self.imports.add(f"{f'from {source} ' if source else ''}import {renamed}")
            elif not origin and text not in self.begun:
                self.begun.add(text)
                for read in sorted(_names_read(text)):
                    self.add(module, read)
                self.texts.append(text)


def _is_ours(name: str) -> bool:
    return name.partition(".")[0] == PACKAGE


def _home(compute: Any) -> tuple[str, str]:
    """Return the module and the name of a formula that the user defines."""
    own = getattr(compute, "__module__", "")
    for place in (own, *sys.modules):
        for name, value in list(getattr(sys.modules.get(place), "__dict__", {}).items()):
            if value is compute and not _is_ours(place):
                return place, name
    raise NotCarriedError("its formula has no name at the top level of a file; define it there")


def modelling_file(choices: Iterable[methods.Choice] = ()) -> str:
    """Return the text of the modelling file for a model with these choices.

    Raises NotCarriedError if a formula of the user cannot be written into it.
    """
    text = TEMPLATE.read_text()
    template = _Module(TEMPLATE.name, text)
    assembly, declared, rows = _Assembly(template), {key: dict(named) for key, named in CHOICES.items()}, []
    for node in (node for node in template.body if isinstance(node, ast.ImportFrom) and _is_ours(str(node.module))):
        text = text.replace(f"{ast.get_source_segment(template.text, node)}\n", "")
        for alias in node.names if node.module != __name__ else ():
            assembly.add(_module(str(node.module)), alias.name)
    for choice in (choice for choice in choices if choice.compute is not None):
        try:
            place, name = _home(choice.compute)
            assembly.add(_module(place), name)
        except NotCarriedError as error:
            raise NotCarriedError(f"{choice.key} {choice.name}: {error}") from error
        table = TABLES.get(choice.key) or ("BIASES" if getattr(choice, "biased", False) else "SCORE_FORMS")
        rows.append(f'{table}["{choice.name}"] = {name}')
        declared[choice.key][choice.name] = _describe(choice)
    rows.append(f"CHOICES = {pprint.pformat(declared, width=120, sort_dicts=False)}\n")
    parts = ["\n".join(sorted(assembly.imports)), *assembly.texts, "\n".join(rows)]
    return text.replace("\n\n\n\n", "\n\n\n").replace(MARK, "\n\n\n".join(parts))
