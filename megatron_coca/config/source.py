"""Read YAML and JSON files and `key=value` overrides into nested mappings, with the file and line of every key."""

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from megatron_coca.config.base import ConfigError
from megatron_coca.config.checks.downloaded import DATA_PATHS, belongs_to_data, foreign_keys
from megatron_coca.config.schema import CLOSED, SELECTORS
from megatron_coca.support.safe_yaml import LimitedLoader, YamlFault, fault, read_text

Overrides = Mapping[str, Any] | Sequence[str]
"""A mapping of dotted keys to values, or strings `key=value`."""
COMMAND_LINE = "command line"
OVERRIDES = "overrides"
MAPPING = "mapping"

_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?"
    r"|[0-9][0-9_]*[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))$|\.(?:nan|NaN|NAN)$"
)
_REPLACED = {"tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp"}


class _Loader(LimitedLoader):
    """YAML 1.1 loader, except that `1e-4` is a number and dates are strings."""


_Loader.yaml_implicit_resolvers = {
    letter: [entry for entry in entries if entry[0] not in _REPLACED]
    for letter, entries in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


class _Dumper(yaml.SafeDumper):
    """YAML writer that quotes exactly the strings that _Loader would read as another type."""


_Dumper.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def dump(values: dict[str, Any]) -> str:
    """Return YAML that YamlReader reads back as the same values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def normalise(name: str, parent: str = "") -> str:
    """Replace hyphens in a name by underscores, unless its mapping is passed through unchanged."""
    return name.replace("-", "_") if parent == "" or parent in CLOSED else name


def _join(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent else name


class YamlReader:
    """Reader of one YAML document.

    Attributes:
        where: the location of every key by dotted path: `label:line`, or only the label if `numbered` is false.
        problems: error messages of one line each.
        failed: True if the text is not valid YAML.
    """

    def __init__(self, label: str, text: str, numbered: bool = True) -> None:
        self.label, self.text, self.numbered = label, text, numbered
        self.where: dict[str, str] = {}
        self.problems: list[str] = []
        self.failed = False
        self._scalars: dict[str, yaml.Node] = {}

    def read(self) -> Any:
        """Return the document's value, or None if it is not valid YAML; errors are added to `problems`."""
        try:
            self._loader = _Loader(self.text)
            try:
                node = self._loader.get_single_node()
                return None if node is None else self._value(node, "")
            finally:
                self._loader.dispose()
        except yaml.YAMLError as error:
            reason = fault(error, self.text)
            reason.line = reason.line if self.numbered else None
            self.problems.append(reason.at(self.label))
            self.failed = True
            return None

    def _location(self, node: yaml.Node) -> str:
        return f"{self.label}:{node.start_mark.line + 1}" if self.numbered else self.label

    def _value(self, node: yaml.Node, path: str) -> Any:
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self._value(child, f"{path}[{index}]") for index, child in enumerate(node.value)]
        return self._loader.construct_object(node)

    def _mapping(self, node: yaml.MappingNode, path: str) -> dict[str, Any]:
        self._check_duplicates(node, path)
        self._loader.flatten_mapping(node)
        entries = {normalise(_name(name_node), path): (name_node, value_node) for name_node, value_node in node.value}
        values: dict[str, Any] = {}
        for name, (name_node, value_node) in entries.items():  # the mapping's own keys replace keys from `<<`
            inner = _join(path, name)
            first = self._scalars.setdefault(inner, name_node) if isinstance(value_node, yaml.ScalarNode) else name_node
            if first is not name_node:  # `optimizer.params.lr` beside `optimizer: {params: {lr: ...}}`
                self._add_duplicate(inner, first, name_node)
            self.where[inner] = self._location(name_node)
            values[name] = self._value(value_node, inner)
        return values

    def _check_duplicates(self, node: yaml.MappingNode, path: str) -> None:
        seen: dict[str, yaml.Node] = {}
        for name_node, _ in node.value:
            name = normalise(_name(name_node), path)
            first = seen.setdefault(name, name_node)
            if first is not name_node and name_node.tag != "tag:yaml.org,2002:merge":
                self._add_duplicate(_join(path, name), first, name_node)

    def _add_duplicate(self, path: str, first: yaml.Node, second: yaml.Node) -> None:
        spellings = f", as `{first.value}` and `{second.value}`" if first.value != second.value else ""
        self.problems.append(
            f"{self._location(second)}: {path}: given twice, on lines"
            f" {first.start_mark.line + 1} and {second.start_mark.line + 1}{spellings}; remove one of them"
        )


def yaml_value(text: str) -> Any:
    """Return the value of `text` in YAML, or None if it is not valid."""
    return YamlReader("", text).read()


def _name(node: yaml.Node) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise yaml.MarkedYAMLError(problem="a key that is not a string", problem_mark=node.start_mark)
    return str(node.value)


class Layer(NamedTuple):
    """Values of a file or an override, or the merged values of several files and overrides.

    Attributes:
        label: the name of the source.
        values: nested mappings.
        where: the `file:line` of every key, by dotted path.
        dropped: options that were dropped in a merge, because a later layer selects another choice.
    """

    label: str
    values: dict[str, Any]
    where: dict[str, str]
    dropped: tuple[str, ...] = ()


def read_file(path: str | Path, problems: list[str]) -> Layer | None:
    """Return the values of a YAML or JSON file, or None if it cannot be read; errors are added to `problems`."""
    path = os.path.expanduser(path)
    try:
        text = read_text(Path(path))
    except (YamlFault, OSError, ValueError) as error:
        problems.append(_unreadable(Path(path), error))
        return None
    reader, read = _parsed(str(path), text.replace("\t", " ") if str(path).endswith(".json") else text)
    problems += reader.problems
    if isinstance(read, dict):
        values = deepcopy(read)
        layer = _expand(Layer(str(path), values, dict(reader.where)))
        foreign = foreign_keys(Path(path), layer.values) if belongs_to_data(Path(path), layer.values) else ()
        problems += [f"{layer.where.get(key, path)}: {key}: {message}" for key, message in foreign]
        _resolve_data_paths(layer.values, Path(path).parent)
        return layer
    if not reader.failed:
        content = "empty" if read is None else f"a {type(read).__name__}"
        problems.append(f"{path}: the file is {content}; expected a mapping of keys to values")
    return None


@lru_cache(maxsize=32)
def _parsed(label: str, text: str) -> tuple[YamlReader, Any]:
    """Return the reader of a document and its value, which the caller must not change. The two are cached. A command
    reads some files many times, such as the recipe of every cell of an ablation, and parsing a document takes 50 times
    as long as copying it.
    """
    reader = YamlReader(label, text)
    return reader, reader.read()


def _resolve_data_paths(values: dict[str, Any], folder: Path) -> None:
    """Replace `./NAME` by the path of NAME in the folder of the file.

    With such paths, shards can be moved together with their data.yml.
    """

    def resolved(value: Any) -> Any:
        if isinstance(value, list):
            return [resolved(inner) for inner in value]
        return str(folder / value[2:]) if isinstance(value, str) and value.startswith("./") else value

    values |= {key: resolved(value) for key, value in values.items() if DATA_PATHS.fullmatch(key)}
    for stage in values["stages"] if isinstance(values.get("stages"), list) else ():
        if isinstance(stage, dict):
            _resolve_data_paths(stage, folder)


def _unreadable(path: Path, error: YamlFault | OSError | ValueError) -> str:
    if isinstance(error, YamlFault):
        return error.at(str(path))
    if isinstance(error, UnicodeDecodeError):
        return f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8"
    if isinstance(error, IsADirectoryError):
        return f"{path}: is a folder; name a YAML file in it"
    if not isinstance(error, FileNotFoundError):
        return f"{str(path)!r}: cannot be read: {getattr(error, 'strerror', None) or error}"
    names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    match = difflib.get_close_matches(path.name, names, n=1, cutoff=0.75)
    return f"{path}: no such file; " + (f"did you mean `{path.parent / match[0]}`?" if match else "correct the path")


def read_overrides(overrides: Overrides, problems: list[str]) -> list[Layer]:
    """Return a layer for each override; errors are added to `problems`."""
    if isinstance(overrides, Mapping):
        return [_override(OVERRIDES, str(path), _plain(value)) for path, value in overrides.items()]
    layers = []
    for item in [overrides] if isinstance(overrides, str) else overrides:
        path, equals, text = item.partition("=")
        reader = YamlReader(f"{COMMAND_LINE}: {path.strip()}", text, numbered=False)
        value = reader.read()
        if not equals or not path.strip():
            problems.append(f"{COMMAND_LINE}: {item}: expected `key=value`")
        elif reader.problems:
            problems += reader.problems
        else:
            layers.append(_override(COMMAND_LINE, path.strip(), value))
    return layers


def given_layer(overrides: Overrides, files: Sequence[str | Path] = ()) -> Layer:
    """Return the values of files and overrides without validation. Sources that cannot be read are skipped."""
    layers = [layer for path in files if (layer := read_file(path, [])) is not None]
    return merge(layers + read_overrides(overrides, []))


def readable_layer(overrides: Overrides, files: Sequence[str | Path] = ()) -> Layer:
    """Return the same as `given_layer`. Raises ConfigError for files that cannot be read."""
    problems: list[str] = []
    layers = [layer for path in files if (layer := read_file(path, problems)) is not None]
    if problems:
        raise ConfigError(*problems)
    return merge(layers + read_overrides(overrides, []))


def given_values(overrides: Overrides, files: Sequence[str | Path] = ()) -> dict[str, Any]:
    """Return the top-level keys of `given_layer`."""
    return given_layer(overrides, files).values


def named_checkpoint(values: Mapping[str, Any]) -> str | None:
    """Return the checkpoint that the keys `load` and `iteration` name: a folder or URL, or None without `load`."""
    load, step = values.get("load"), values.get("iteration")
    if load is None:
        return None
    return os.path.expanduser(str(load)) if step is None else f"{os.path.expanduser(str(load))}/global_step{step}"


def _plain(value: Any) -> Any:
    """Convert Python values to YAML values: tuples to lists, paths to strings."""
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


def mapping_layer(values: Mapping[str, Any]) -> Layer:
    """Return a layer with keys and values from Python."""
    plain = _plain(values)
    where = {path: MAPPING for key, value in plain.items() for path in _paths(value, key)}
    return _expand(Layer(MAPPING, plain, where))


def _override(label: str, path: str, value: Any) -> Layer:
    return _expand(Layer(label, {path: value}, dict.fromkeys(_paths(value, path), label)))


def _paths(value: Any, path: str) -> Iterator[str]:
    yield path
    for name, inner in value.items() if isinstance(value, Mapping) else ():
        yield from _paths(inner, f"{path}.{name}")


def _expand(layer: Layer) -> Layer:
    """Split dotted names at the top level into nested mappings, and replace hyphens by underscores."""
    values: dict[str, Any] = {}
    for path, value in layer.values.items():
        first, *names = path.split(".")
        for name in reversed(names):
            value = {name: value}
        _merge_into(values, {first: value})
    where: dict[str, str] = {}
    for path, location in layer.where.items():
        normalised = ""
        for name in path.split("."):
            normalised = _join(normalised, normalise(name, normalised))
        where[normalised] = location
    return Layer(layer.label, _normalised(values, ""), where)


def _normalised(value: Any, path: str) -> Any:
    if not isinstance(value, Mapping):
        return value
    names = {name: normalise(name, path) for name in value}
    return {names[name]: _normalised(inner, _join(path, names[name])) for name, inner in value.items()}


def merge(layers: Sequence[Layer]) -> Layer:
    """Merge layers into one. Later values win, and mappings are merged key by key."""
    values: dict[str, Any] = {}
    where: dict[str, str] = {}
    dropped: list[str] = []
    for layer in layers:
        for key, name in {**SELECTORS, "training_positions": "type"}.items():
            old, new = values.get(key), layer.values.get(key)
            if not isinstance(old, Mapping) or not isinstance(new, Mapping) or old.get(name) is None:
                continue
            if new.get(name, old[name]) != old[name]:
                del values[key]  # a different choice has different options and a different original length
                chosen = f"{key}.{name} is {new[name]} in {layer.where.get(f'{key}.{name}', layer.label)}"
                options = [f"{key}.{option}" for option in old if option not in (name, *new)]
                dropped += [f"{option} of {where.get(option, 'before')} ({chosen})" for option in options]
        _merge_into(values, layer.values)
        where |= layer.where
    files = list(dict.fromkeys(layer.label for layer in layers if layer.label not in (COMMAND_LINE, OVERRIDES)))
    return Layer(" + ".join(files) or COMMAND_LINE, values, where, tuple(dropped))


def _merge_into(values: dict[str, Any], later: Mapping[str, Any]) -> None:
    for name, value in later.items():
        if isinstance(value, Mapping) and isinstance(values.get(name), dict):
            _merge_into(values[name], value)
        else:
            values[name] = deepcopy(value)
