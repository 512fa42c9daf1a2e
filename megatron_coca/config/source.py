"""Reads YAML and JSON files and `key=value` overrides, and remembers where every key was written."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_coca.config.base import ConfigError
from megatron_coca.config.yaml_text import YamlReader, normalise
from megatron_coca.safe_yaml import YamlFault, read_text

COMMAND_LINE = "command line"
OVERRIDES = "overrides"


class Layer(NamedTuple):
    """One source of values: nested mappings, and `file:line` by dotted path."""

    label: str
    values: dict[str, Any]
    where: dict[str, str]


def read_file(path: str | Path, problems: list[str]) -> Layer | None:
    """The values of a YAML or JSON file, or None where it cannot be read; `problems` gets what is wrong with it."""
    try:
        text = _read_text(Path(path))
    except ConfigError as error:
        problems += error.problems
        return None
    reader = YamlReader(str(path), text.replace("\t", " ") if str(path).endswith(".json") else text)
    values = reader.read()
    problems += reader.problems
    if not reader.failed and not isinstance(values, dict):
        found = "empty" if values is None else f"a {type(values).__name__}"
        problems.append(f"{path}: the file is {found}; expected a mapping of keys to values")
    return _expand(Layer(str(path), values, reader.where)) if isinstance(values, dict) else None


def _read_text(path: Path) -> str:
    try:
        return read_text(path)
    except YamlFault as fault:
        raise ConfigError([fault.at(str(path))]) from None
    except FileNotFoundError:
        raise ConfigError([f"{path}: no such file{_neighbour(path)}"]) from None
    except IsADirectoryError:
        raise ConfigError([f"{path}: is a folder; name a YAML file in it"]) from None
    except UnicodeDecodeError as fault:
        raise ConfigError([f"{path}: not UTF-8 text (byte {fault.start}); save it as UTF-8"]) from None
    except OSError as fault:
        raise ConfigError([f"{path}: cannot be read: {fault.strerror}"]) from None


def _neighbour(path: Path) -> str:
    names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    match = difflib.get_close_matches(path.name, names, n=1, cutoff=0.75)
    return f"; did you mean `{path.parent / match[0]}`?" if match else ""


def read_overrides(overrides: Mapping[str, Any] | Sequence[str]) -> Iterator[Layer | ConfigError]:
    """One Layer for each override, in order, or the error that stands in its place."""
    if isinstance(overrides, Mapping):
        for path, value in overrides.items():
            yield _override(OVERRIDES, str(path), _plain(value))
        return
    for item in [overrides] if isinstance(overrides, str) else overrides:
        path, equals, text = item.partition("=")
        reader = YamlReader(f"{COMMAND_LINE}: {path.strip()}", text, numbered=False)
        value = reader.read()
        if not equals or not path.strip():
            yield ConfigError([f"{COMMAND_LINE}: {item}: expected `key=value`"])
        else:
            problems = reader.problems
            yield ConfigError(problems) if problems else _override(COMMAND_LINE, path.strip(), value)


def given_values(overrides: Mapping[str, Any] | Sequence[str], files: Sequence[str | Path] = ()) -> dict[str, Any]:
    """The top-level keys that files and overrides give, with their values as written. What cannot be read gives none."""
    read: list[Layer | ConfigError | None] = [read_file(path, []) for path in files]
    read += read_overrides(overrides)
    return merge([layer for layer in read if isinstance(layer, Layer)]).values


def _plain(value: Any) -> Any:
    """Python values as YAML would give them: tuples as lists, paths as text."""
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


def _override(label: str, path: str, value: Any) -> Layer:
    return _expand(Layer(label, {path: value}, dict.fromkeys(_paths(value, path), label)))


def _paths(value: Any, path: str) -> Iterator[str]:
    yield path
    for name, inner in value.items() if isinstance(value, Mapping) else ():
        yield from _paths(inner, f"{path}.{name}")


def _expand(layer: Layer) -> Layer:
    """Split dotted names at the top level into nested mappings, with hyphens as underscores."""
    values: dict[str, Any] = {}
    for path, value in layer.values.items():
        for name in reversed(path.split(".")[1:]):
            value = {name: value}
        _merge_into(values, {path.split(".")[0]: value})
    where = {_underscored(path): place for path, place in layer.where.items()}
    return Layer(layer.label, _normalised(values, ""), where)


def _normalised(value: Any, path: str) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {
        normalise(name, path): _normalised(inner, f"{path}.{normalise(name, path)}" if path else normalise(name))
        for name, inner in value.items()
    }


def _underscored(path: str) -> str:
    parts: list[str] = []
    for name in path.split("."):
        parts.append(normalise(name, ".".join(parts)))
    return ".".join(parts)


CHOOSING = {"rope_scaling": "rope_type", "relative_positions": "type"}
"""Mappings in which one name chooses what the others are options of. Another choice drops the options of the first."""
KEPT = frozenset({"original_max_position_embeddings"})
"""What is said of the weights and not of the choice."""


def merge(layers: Sequence[Layer]) -> Layer:
    """All layers as one: later values win, mappings are merged key by key."""
    values: dict[str, Any] = {}
    where: dict[str, str] = {}
    for layer in layers:
        _drop_options(values, layer.values)
        _merge_into(values, layer.values)
        where |= layer.where
    files = list(dict.fromkeys(layer.label for layer in layers if layer.label not in (COMMAND_LINE, OVERRIDES)))
    return Layer(" + ".join(files) or COMMAND_LINE, values, where)


def _drop_options(values: dict[str, Any], later: Mapping[str, Any]) -> None:
    for key, name in CHOOSING.items():
        old, new = values.get(key), later.get(key)
        if not isinstance(old, Mapping) or not isinstance(new, Mapping) or old.get(name) is None:
            continue
        if new.get(name, old[name]) != old[name]:
            values[key] = {option: value for option, value in old.items() if option in KEPT}


def _merge_into(values: dict[str, Any], later: Mapping[str, Any]) -> None:
    for name, value in later.items():
        if isinstance(value, Mapping) and isinstance(values.get(name), dict):
            _merge_into(values[name], value)
        else:
            values[name] = _copied(value)


def _copied(value: Any) -> Any:
    return {name: _copied(inner) for name, inner in value.items()} if isinstance(value, Mapping) else value
