"""Assemble the modelling file of an export from modeling_coca.py and the formulas that it imports.

An exported folder contains one Python file, which needs only torch and transformers. Its template is `modeling_coca.py`
beside this module, which imports formulas from the package. Each of these imports is replaced by the source code of the
imported names and of everything that they use. A user's formulas are added in the same way, each as an entry in the
table of its kind. The file is assembled at every export and is not in the repository, so that every formula is defined
once and is always up to date.
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
AVAILABLE = sys.stdlib_module_names | {"torch", "typing_extensions"}  # torch depends on typing_extensions
MARK = "# ASSEMBLED\n"
STAND_INS = frozenset({"ModelConfig", "Options", "Rotary"})
"""Classes in the template that replace the package's classes of the same name."""
TABLES = {
    "rotary_frequencies": "FREQUENCIES",
    "rope_scaling": "EXTENSIONS",
    "relative_positions": "DISTANCE_MAPS",
    "logit_scaling": "LOGIT_SCALINGS",
}
FLAGS = ("rotary", "biased", "length_dependent", "switches", "learned", "training_only", "evaluation_only")
"""Attributes of declared choices that the template reads."""


class NotCarriedError(ValueError):
    """A formula uses something that cannot be copied into the modelling file."""


def _describe(choice: methods.Choice) -> dict[str, Any]:
    """Return the parts of a declaration that the modelling file needs: name, flags and constant option defaults."""
    flags = {flag: getattr(choice, flag) for flag in FLAGS if hasattr(choice, flag)}
    constant = (option for option in choice.options if not option.required and option.by_length is None)
    return {"name": choice.name, **flags, "options": {option.name: option.default for option in constant}}


CHOICES = {
    key: {name: _describe(row) for name, row in rows.items() if row.compute is None}
    for key, rows in methods.TABLES.items()
}
"""The package's own declarations, by key and name. The modelling file contains them as a literal."""


class _Module:
    """The top-level statements of a module and their source code, by the names that they bind."""

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
        raise NotCarriedError(f"{name}: no source file; define the formula in a file") from error


def _names_read(source: str) -> set[str]:
    """Return the names that a statement uses from its module."""
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
    """The definitions in a modelling file. Each appears once, after the definitions that it uses."""

    def __init__(self, template: _Module) -> None:
        self.imports: set[str] = set()
        self.texts: list[str] = []
        self.begun: set[str] = set()
        origins = {name: _origin(found[0][0], name) for name, found in template.statements.items()}
        self.homes = {name: origin or template.name for name, origin in origins.items() if not _is_ours(origin)}
        """Each name in the file -> the module that defines it, or the dotted name that an import binds to it."""

    def add(self, module: _Module, name: str) -> None:
        """Add the definition of a name and the definitions of everything that it uses."""
        if name in STAND_INS and _is_ours(module.name):
            return
        if name not in module.statements and not hasattr(builtins, name):
            raise NotCarriedError(f"{module.name}: no definition of {name} at the top level; move the definition there")
        for node, text in module.statements.get(name, ()):
            origin = _origin(node, name)
            source, _, original = origin.rpartition(".")
            if _is_ours(origin) and original == name and origin not in sys.modules:
                lazy = source == PACKAGE  # the package imports its names lazily
                self.add(_module(getattr(sys.modules[source], name).__module__ if lazy else source), name)
                continue
            if origin and origin.partition(".")[0] not in AVAILABLE:
                raise NotCarriedError(
                    f"{module.name}: imports {name}, which is not part of {PACKAGE}, torch or Python; remove the import"
                )
            home, defined = origin or module.name, name in self.homes
            if self.homes.setdefault(name, home) != home:
                raise NotCarriedError(f"{module.name}: the modelling file defines another {name}; rename it here")
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
    """Return the module and the name of a user's formula."""
    own = getattr(compute, "__module__", "")
    for place in (own, *sys.modules):
        for name, value in list(getattr(sys.modules.get(place), "__dict__", {}).items()):
            if value is compute and not _is_ours(place):
                return place, name
    raise NotCarriedError("the formula is not defined at the top level of a file; move it there")


def modelling_file(choices: Iterable[methods.Choice] = ()) -> str:
    """Return the source code of the modelling file for a model with these choices.

    Raises NotCarriedError if a user's formula cannot be copied into the file.
    """
    own = [choice for choice in choices if choice.compute is not None]
    return _assembled(own) if own else _file_without_own_formulas()


@cache
def _file_without_own_formulas() -> str:
    return _assembled(())


def _assembled(own: Iterable[methods.Choice]) -> str:
    """Return the source code for a model with these choices of a user, whose formulas the package does not have."""
    text = TEMPLATE.read_text(encoding="utf-8")
    template = _Module(TEMPLATE.name, text)
    assembly, declared, rows = _Assembly(template), {key: dict(named) for key, named in CHOICES.items()}, []
    for node in (node for node in template.body if isinstance(node, ast.ImportFrom) and _is_ours(str(node.module))):
        text = text.replace(f"{template.statements[node.names[0].name][0][1]}\n", "")
        for alias in node.names if node.module != __name__ else ():
            assembly.add(_module(str(node.module)), alias.name)
    for choice in own:
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
