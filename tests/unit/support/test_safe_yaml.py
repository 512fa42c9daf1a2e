"""YAML that somebody else wrote: bombs, deep nesting, control characters and values that PyYAML's constructors choke
on.

Configurations, recipes of corpora, suites of evaluation and the configuration of a downloaded checkpoint end in their
own error with file and line, soon and in little memory.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_coca.checkpoints import CheckpointError
from megatron_coca.checkpoints.neox.layout import read_config
from megatron_coca.config import ConfigError, load_config
from megatron_coca.data.errors import DataError
from megatron_coca.data.preparation.recipe import read_recipe
from megatron_coca.evaluation.results import EvaluationError
from megatron_coca.evaluation.suite import read_suite
from megatron_coca.support import safe_yaml
from megatron_coca.support.safe_yaml import MAX_BYTES, MAX_DEPTH, MAX_NODES, read_yaml

READERS: dict[str, tuple[Callable[[Path], Any], type[Exception]]] = {
    "configuration": (load_config, ConfigError),
    "recipe": (read_recipe, DataError),
    "suite": (read_suite, EvaluationError),
    "checkpoint": (lambda path: read_config(path.parent.parent, 64), CheckpointError),
}


def powers(first: str, later: str, levels: int) -> str:
    """Lines of which each names the one before nine times: ``later`` with ``*a0`` to ``*a<levels>`` in it."""
    lines = [f"a{i}: &a{i} " + later.format(",".join([f"*a{i - 1}"] * 9)) for i in range(1, levels)]
    return "\n".join([f"a0: &a0 {first}", *lines])


HOSTILE: dict[str, tuple[str, str]] = {
    "aliases": (powers("x", "[{}]", 9), "7: not valid YAML: more than 100,000 values"),
    "merge keys": (powers("{k: 1}", "{{<<: [{}]}}", 12), "6: not valid YAML: more than 100,000 values"),
    "brackets": ("a: " + "[" * 1000 + "]" * 1000, "1: not valid YAML: nested deeper than 64 levels"),
    "indentation": ("".join(" " * i + "a:\n" for i in range(500)), "65: not valid YAML: nested deeper than 64 levels"),
    "itself": ("a: 1\nb: &b {c: *b}", "2: not valid YAML: a value that contains itself"),
    "NUL": ("a: 1\nb: \0", "2: not valid YAML: the character U+0000 is not allowed"),
    "bell": ("a: 1\n\nb: \a", "3: not valid YAML: the character U+0007 is not allowed"),
    "two documents": (
        "a: 1\n---\nb: 2",
        "2: not valid YAML: expected a single document in the stream, but found another",
    ),
    "no number": ("a: !!int ''", "1: not valid YAML: '' cannot be read as int"),
    "no date": ("a: !!timestamp x", "1: not valid YAML: 'x' cannot be read as timestamp"),
    "no choice": ("a: !!bool x", "1: not valid YAML: 'x' cannot be read as bool"),
    "digits": ("a: " + "9" * 5000, "1: not valid YAML: '999"),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_an_error_with_file_and_line(tmp_path: Path, reader: str, name: str) -> None:
    read, error = READERS[reader]
    text, message = HOSTILE[name]
    path = tmp_path / "configs" / "model.yml"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(error) as caught:
        read(path)
    assert f"{path}:{message}" in str(caught.value) and len(caught.value.args) == 1


@pytest.mark.parametrize("reader", ["configuration", "recipe", "suite"])
def test_a_large_file_is_not_read_to_its_end(tmp_path: Path, reader: str) -> None:
    read, error = READERS[reader]
    path = tmp_path / "large.yml"
    with path.open("wb") as stream:
        stream.truncate(1 << 40)
    with pytest.raises(error, match="large.yml: not valid YAML: larger than 1 MiB"):
        read(path)


def test_hostile_overrides_are_an_error_without_a_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yml"
    path.write_text("{}")
    with pytest.raises(ConfigError, match="command line: seed: .*nested deeper than 64 levels"):
        load_config(path, ["seed=" + "[" * 1000])


def test_what_is_within_the_limits_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.yml"
    items = MAX_NODES // 10
    path.write_text("a: &a " + "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1) + f"\nb: *a\nc: [{'1, ' * items}]\n")
    values = read_yaml(path)
    assert values["a"] is values["b"] and len(values["c"]) == items
    path.write_bytes(b"\xef\xbb\xbfa: 1\r\nb: |\r\n  x\r\n" + b"#" * (MAX_BYTES - 40))
    assert read_yaml(path) == {"a": 1, "b": "x\n"}


@pytest.mark.parametrize("text", [r'a: ["x\0y"]', r'"k\uD800": 1', r'a: {b: "\uDFFF"}'])
def test_characters_that_no_name_may_hold_are_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.yml"
    path.write_text(text)
    with pytest.raises(safe_yaml.YamlFault, match=r"the character U\+[0-9A-F]{4} is not allowed"):
        read_yaml(path)


@pytest.mark.parametrize("text", ["a: 0123", "a: -0123", "a: [1, 00_17]"])
def test_a_leading_zero_is_an_error(tmp_path: Path, text: str) -> None:
    """In YAML 1.1, 0123 is 83."""
    path = tmp_path / "a.yml"
    path.write_text(f"b: 1\n{text}\n")
    with pytest.raises(safe_yaml.YamlFault, match="begins with 0, which makes it octal") as raised:
        read_yaml(path)
    assert raised.value.line == 2
    with pytest.raises(ConfigError, match="command line: seed: .*'0123' begins with 0.*write 123"):
        load_config({"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "seq_length": 4}, ["seed=0123"])


def test_zero_and_other_numbers_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.yml"
    path.write_text("[0, 00, -0, 10, 0x1F, '0123', 0.5, 089]")
    assert read_yaml(path) == [0, 0, 0, 10, 31, "0123", 0.5, "089"]


def test_every_key_is_text(tmp_path: Path) -> None:
    path = tmp_path / "a.yml"
    path.write_text("{no: 1, 2024: 2, 1.5: 3, ~: 4, 2024-01-31: 5, x: &x {y: 6}, z: {<<: *x}}")
    wanted = {"no": 1, "2024": 2, "1.5": 3, "~": 4, "2024-01-31": 5, "x": {"y": 6}, "z": {"y": 6}}
    assert read_yaml(path) == wanted
    path.write_text("a: 1\n2024: 1\n'2024': 2\n")
    with pytest.raises(safe_yaml.YamlFault, match="the key '2024' is given twice") as raised:
        read_yaml(path)
    assert raised.value.line == 3
    path.write_text("tokenizer_type: CharLevelTokenizer\nsources:\n  no: {paths: [a.txt]}\n  2024: {paths: [b.txt]}\n")
    assert [source.spec.name for source in read_recipe(path).sources] == ["no", "2024"]


@pytest.mark.parametrize(
    "text", ["a: b\tc", "[a?b]", "a: !", "a: b\n\ufeff c: 1", "|-#\n", "a: [", "a: {b: [1, x], c: *d}", "a: 1"]
)
def test_both_parsers_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    path = tmp_path / "a.yml"
    path.write_text(text)

    def read() -> Any:
        try:
            return read_yaml(path)
        except safe_yaml.YamlFault as error:
            return error.line, error.reason

    found = read()
    monkeypatch.setattr("yaml.__with_libyaml__", False)
    assert read() == found
