"""Reads YAML text into plain values, keeping the line of every key and refusing keys given twice."""

import re
from typing import Any

import yaml

from megatron_coca.config.schema import CLOSED
from megatron_coca.safe_yaml import MAX_DEPTH, LimitedLoader, fault

MAX_PATHS = 1 << 24
"""Characters of the dotted paths of all keys: a few long names may be repeated by aliases."""


class _Loader(LimitedLoader):
    """YAML 1.1, except that `1e-4` is a number and dates are text."""


_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?"
    r"|[0-9][0-9_]*[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))$|\.(?:nan|NaN|NAN)$"
)
_REPLACED = {"tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp"}
_Loader.yaml_implicit_resolvers = {
    letter: [entry for entry in entries if entry[0] not in _REPLACED]
    for letter, entries in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def normalise(name: str, parent: str = "") -> str:
    """`name` with hyphens as underscores, unless it stands in a mapping that is passed through as written."""
    ours = parent == "" or parent in CLOSED
    return name.replace("-", "_") if ours else name


class _Dumper(yaml.SafeDumper):
    """Quotes exactly the texts that _Loader would not read as text."""


_Dumper.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def dump(values: dict[str, Any]) -> str:
    """`values` as YAML that a Reader turns into the same values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class YamlReader:
    """Reads one YAML document.

    Attributes:
        where: `label:line` by dotted path (only the label where lines mean nothing).
        problems: faults found, one line each.
        failed: whether the text could not be read to its end.
    """

    def __init__(self, label: str, text: str, numbered: bool = True) -> None:
        self.label, self.text, self.numbered = label, text, numbered
        self.where: dict[str, str] = {}
        self.problems: list[str] = []
        self.failed = False
        self._path_characters = 0

    def read(self) -> Any:
        """The document's value; YAML faults become problems."""
        try:
            self._loader = _Loader(self.text)
            try:
                node = self._loader.get_single_node()
                return None if node is None else self._value(node, "")
            finally:
                self._loader.dispose()
        except yaml.YAMLError as error:
            found = fault(error, self.text)
            found.line = found.line if self.numbered else None
            self.problems.append(found.at(self.label))
            self.failed = True
            return None

    def _at(self, node: yaml.Node) -> str:
        return f"{self.label}:{node.start_mark.line + 1}" if self.numbered else self.label

    def _value(self, node: yaml.Node, path: str) -> Any:
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self._value(child, f"{path}[{index}]") for index, child in enumerate(node.value)]
        return self._loader.construct_object(node)

    def _mapping(self, node: yaml.MappingNode, path: str) -> dict[str, Any]:
        self._refuse_duplicates(node, path)
        self._loader.flatten_mapping(node)
        values: dict[str, Any] = {}
        for name_node, value_node in node.value:
            name = normalise(_name(name_node), path)
            inner = f"{path}.{name}" if path else name
            self._check_path(inner, name_node)
            self.where[inner] = self._at(name_node)
            values[name] = self._value(value_node, inner)
        return values

    def _check_path(self, path: str, node: yaml.Node) -> None:
        """A dotted name stands for mappings within one another."""
        self._path_characters += len(path)
        if path.count(".") > MAX_DEPTH:
            problem = f"a key of more than {MAX_DEPTH} names with dots between them"
        elif self._path_characters > MAX_PATHS:
            problem = f"keys whose dotted names have more than {MAX_PATHS:,} characters in all"
        else:
            return
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)

    def _refuse_duplicates(self, node: yaml.MappingNode, path: str) -> None:
        seen: dict[str, yaml.Node] = {}
        for name_node, _ in node.value:
            name = normalise(_name(name_node), path)
            first = seen.setdefault(name, name_node)
            if first is not name_node and name_node.tag != "tag:yaml.org,2002:merge":
                lines = f"on lines {first.start_mark.line + 1} and {name_node.start_mark.line + 1}"
                names = (
                    f"as `{first.value}` and `{name_node.value}`" if first.value != name_node.value else "by one name"
                )
                key = f"{path}.{name}" if path else name
                self.problems.append(f"{self._at(name_node)}: {key}: given twice, {lines}, {names}; keep one of them")


def _name(node: yaml.Node) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise yaml.MarkedYAMLError(problem="a key that is not plain text", problem_mark=node.start_mark)
    return str(node.value)
