"""Read untrusted YAML with limits on size, depth, and the number of values after the expansion of aliases.

PyYAML's safe loader runs no code, but a few hundred bytes of aliases to aliases expand to more values than fit into
memory, and nested brackets overflow the stack. All of the package except the GPT-NeoX plugin reads YAML here.
"""

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

MAX_BYTES = 1 << 20  # size of a file
MAX_NODES = 100_000  # values and keys, after the expansion of aliases
MAX_DEPTH = 64  # nested mappings and sequences; a level takes six frames of Python's stack

NOT_IN_TEXT = re.compile("[\0\ud800-\udfff]")
"""NUL, which ends names in the operating system, and surrogates, which UTF-8 cannot encode. YAML escapes can produce
them.
"""

DISPUTED = re.compile("[\t\ufeff!?]|[|>][-+0-9]*#")
"""Pattern of text that libyaml and PyYAML's own parser may read differently."""

_STRING, _MERGE = "tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"
_OCTAL = re.compile(r"[-+]?0[0-7_]+")
_TOO_LARGE = f"larger than {MAX_BYTES >> 20} MiB; check that it is the right file"


class YamlFault(Exception):
    """A file or text is not YAML, or exceeds a limit. ``line`` counts from 1, or is None for the whole file."""

    def __init__(self, line: int | None, reason: str) -> None:
        super().__init__(reason)
        self.line, self.reason = line, reason

    def at(self, label: str) -> str:
        """Return the message for a file, ``<label>:<line>: not valid YAML: <reason>``."""
        return f"{label}{'' if self.line is None else f':{self.line}'}: not valid YAML: {self.reason}"


class LimitedLoader(yaml.SafeLoader):
    """Loader of YAML 1.1 that enforces the limits. Raises ``yaml.YAMLError`` for every fault.

    libyaml parses ten times as fast as PyYAML's own parser. PyYAML's parser is used only for text that matches
    `DISPUTED`, and for text in which libyaml finds a fault, because PyYAML's error messages are more precise.
    """

    def __init__(self, text: str) -> None:
        if len(text) > MAX_BYTES:
            raise yaml.YAMLError(_TOO_LARGE)
        super().__init__(text)
        if yaml.__with_libyaml__ and not DISPUTED.search(text):
            with suppress(yaml.YAMLError, UnicodeError):
                self.state = iter(list(yaml.parse(text, Loader=yaml.CSafeLoader))).__next__
        self._level = 0
        self._sizes: dict[int, int] = {}  # nodes in each finished node, by its id

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event, alias = self.peek_event(), self.check_event(yaml.AliasEvent)
        if self._level > MAX_DEPTH:
            raise _error(f"nested deeper than {MAX_DEPTH} levels", event.start_mark)
        self._level += 1
        node = super().compose_node(parent, index)
        self._level -= 1
        if node is not None:
            self._measure(node, alias, event.start_mark)
        return node

    def _measure(self, node: yaml.Node, alias: bool, mark: Any) -> None:
        """Record the size of a node. Its children have already been composed."""
        if alias and id(node) not in self._sizes:
            raise _error("a value that contains itself", mark)
        if not alias:
            children: list[yaml.Node] = []
            if isinstance(node, yaml.MappingNode):
                children = [child for pair in node.value for child in pair]
            elif isinstance(node, yaml.SequenceNode):
                children = node.value
            self._sizes[id(node)] = 1 + sum(self._sizes[id(child)] for child in children)
        if self._sizes[id(node)] > MAX_NODES:
            raise _error(f"more than {MAX_NODES:,} values after the expansion of aliases", mark)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            # PyYAML's constructors raise these for invalid scalars.
            kind = node.tag.removeprefix("tag:yaml.org,2002:")
            raise _error(f"{node.value!r:.40} cannot be read as {kind}", node.start_mark) from error

    def construct_yaml_int(self, node: Any) -> int:
        """Read an integer. A leading zero raises an error, because it would make the number octal: 0123 would be 83."""
        value = self.construct_scalar(node)
        digits = value.lstrip("+-0_")
        if _OCTAL.fullmatch(value) and digits:
            raise _error(
                f"{value!r:.40} begins with 0, which makes it octal in YAML 1.1; write {digits:.40}, or quote a text",
                node.start_mark,
            )
        return super().construct_yaml_int(node)


LimitedLoader.add_constructor("tag:yaml.org,2002:int", LimitedLoader.construct_yaml_int)


class _UniqueKeys(LimitedLoader):
    """Loader that reports duplicate keys, which PyYAML accepts (the last one wins), and characters in `NOT_IN_TEXT`.

    Every key is read as text, as in a configuration, even keys such as `no` and `2024`.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        if isinstance(node, yaml.MappingNode):
            node.value = [(_as_text(key), value) for key, value in node.value]
        seen: dict[tuple[str, Any], Any] = {}
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and seen.setdefault((key.tag, key.value), key) is not key:
                raise _error(f"the key {key.value!r:.80} is given twice", key.start_mark)
        return super().construct_mapping(node, deep)

    def construct_scalar(self, node: Any) -> Any:
        value = super().construct_scalar(node)
        found = NOT_IN_TEXT.search(value)
        if found is not None:
            raise _error(f"the character U+{ord(found[0]):04X} is not allowed", node.start_mark)
        return value


def read_text(path: Path) -> str:
    """Read a UTF-8 file, with or without a byte order mark.

    Raises ``YamlFault`` if the file is larger than ``MAX_BYTES``, without reading the rest. Also raises ``OSError`` and
    ``UnicodeDecodeError``.
    """
    with path.open("rb") as stream:
        raw = stream.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise YamlFault(None, _TOO_LARGE)
    return raw.decode("utf-8-sig").replace("\r\n", "\n")


def read_yaml(path: Path) -> Any:
    """Read a YAML file. Raises ``YamlFault`` and the exceptions of ``read_text``. A duplicate key is a fault, too."""
    text = read_text(path)
    try:
        loader = _UniqueKeys(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise fault(error, text) from error


def fault(error: yaml.YAMLError, text: str) -> YamlFault:
    """Convert PyYAML's error about ``text`` into a line and a reason."""
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        return YamlFault(line, f"the character U+{ord(text[error.position]):04X} is not allowed")
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    reason = getattr(error, "problem", None) or str(error).partition("\n")[0]
    context = getattr(error, "context", None)
    if reason.startswith("but ") and context:  # PyYAML puts the first half of the sentence in `context`
        reason = f"{context}, {reason}"
    return YamlFault(None if mark is None else mark.line + 1, reason)


def _as_text(key: yaml.Node) -> yaml.Node:
    """Return the node of a key as a text node. The merge key `<<` remains unchanged."""
    if not isinstance(key, yaml.ScalarNode) or key.tag in (_STRING, _MERGE):
        return key
    return yaml.ScalarNode(_STRING, key.value, key.start_mark, key.end_mark, key.style)


def _error(problem: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def as_list(value: Any) -> Any:
    """Return a list with `value` if it is a string, else `value`. A YAML file may have one string instead of a list."""
    return [value] if isinstance(value, str) else value
