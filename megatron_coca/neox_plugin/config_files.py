"""A small YAML file for the plugin, such as `pos_emb: coca`, given after GPT-NeoX's own files that set the same keys.

Upstream refuses a key that is in two files. That stays so, except for the keys that say how positions enter: a later file
that asks for the plugin's attention replaces those of earlier files. The copies of the files that upstream puts into each
checkpoint's `configs` then hold the values that were used, so that they can be given again in any order.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from functools import wraps
from math import lcm
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from megatron_coca.config import ConfigError
from megatron_coca.config.source import OVERRIDES
from megatron_coca.neox_plugin.keys import (
    EXTENDING,
    METHODS,
    POSITION,
    REFUSED,
    extend,
    is_asked_for,
    problems_of,
    resolve,
    translated,
)
from megatron_coca.neox_plugin.wrapping import Function, called, wrap

logger = logging.getLogger(__name__)

REPLACEABLE = (*POSITION, "seq_length", "max_position_embeddings", "attention_config", *REFUSED)
"""What a later file may replace: how positions enter, how far they reach, and what contradicts the plugin's attention."""


class File(NamedTuple):
    """A file of the command line.

    Attributes:
        path: as given.
        text: all of it, comments included.
        values: its keys, with underscores, and their values.
    """

    path: str
    text: str
    values: dict[str, Any]


class Replaced(NamedTuple):
    """A key of an earlier file that a later one sets again."""

    key: str
    earlier: File
    later: File


def replacing(original: Function) -> Function:
    """Upstream's `NeoXArgs.from_ymls`, which reads several files, with replacements."""

    def from_ymls(
        cls: Any, paths_to_yml_files: Sequence[str], overwrite_values: Mapping[str, Any] | None = None
    ) -> Any:
        files = [read(path) for path in paths_to_yml_files]
        found = _replaced(files)
        duplicates = _duplicates(files, found)
        if duplicates:
            _refuse_mistakes(files, cls.__dataclass_fields__)
        if not found:
            return original(cls, paths_to_yml_files, overwrite_values)
        _refuse_other_duplicates(files, duplicates)
        for key, earlier, later in found:
            before, after = earlier.values[key], later.values[key]
            logger.warning("%s: %s replaces the %s of %s", later.path, f"{key}: {after}", before, earlier.path)
        values = {key: value for file in files for key, value in file.values.items()}
        copies = {Path(file.path).name: _copy(file, found) for file in files}
        return cls(**values | {"config_files": copies} | dict(overwrite_values or {}))

    return from_ymls


def read(path: str) -> File:
    """As upstream reads it. A file that is no mapping has no keys here; upstream says what is wrong with it."""
    text = Path(path).read_text()
    values = yaml.load(text, Loader=yaml.FullLoader)
    values = values if isinstance(values, dict) else {}
    return File(path, text, {str(key).replace("-", "_"): value for key, value in values.items()})


def asks(values: Mapping[str, Any]) -> bool:
    """Whether the keys of a file ask for the plugin's attention."""
    return str(values.get("pos_emb")).lower() in METHODS or any(
        values.get(key) not in (None, "none") for key in EXTENDING
    )


def _replaced(files: Sequence[File]) -> list[Replaced]:
    """One for each pair of files of which the later replaces a key of the earlier."""
    return [
        Replaced(key, earlier, later)
        for number, later in enumerate(files)
        if asks(later.values)
        for earlier in files[:number]
        for key in later.values
        if key in REPLACEABLE and key in earlier.values
    ]


def _duplicates(files: Sequence[File], found: Sequence[Replaced]) -> list[Replaced]:
    """The keys that are in two files and that the later one may not replace."""
    allowed = {(each.key, each.earlier.path, each.later.path) for each in found}
    return [
        Replaced(key, earlier, later)
        for number, later in enumerate(files)
        for earlier in files[:number]
        for key in later.values
        if key in earlier.values and (key, earlier.path, later.path) not in allowed
    ]


def _refuse_mistakes(files: Sequence[File], fields: Mapping[str, Any]) -> None:
    """Name what is misspelt before a duplicate is refused: a file with `pos_emb: cocaa` does not ask for the plugin's
    attention, so that its key would only be called a duplicate.
    """
    known = {name: field.type for name, field in fields.items()}
    problems = [f"{file.path}: {line}" for file in files for line in problems_of(file.values, known)]
    if problems:
        raise ConfigError(problems)


def _refuse_other_duplicates(files: Sequence[File], duplicates: Sequence[Replaced]) -> None:
    problems = [
        f"{later.path}: {key} is in {earlier.path} too; after another file, one that asks for the plugin's attention "
        f"replaces only {', '.join(REPLACEABLE)}. Remove {key} from one of them"
        for key, earlier, later in duplicates
    ]
    names = [Path(file.path).name for file in files]
    problems += [
        f"{name}: several files have this name, and a checkpoint keeps a copy of each; rename them"
        for name in sorted({name for name in names if names.count(name) > 1})
    ]
    if problems:
        raise ConfigError(problems)


def _copy(file: File, found: Sequence[Replaced]) -> str:
    """The text of a file with the values that later files gave its keys."""
    values = {each.key: each.later.values[each.key] for each in found if each.earlier.path == file.path}
    if not values:
        return file.text
    wanted, text = file.values | values, file.text
    root = yaml.compose(text, Loader=yaml.FullLoader)
    for name, node in reversed(root.value):  # from the end, so that places before it stay where they are
        key = str(name.value).replace("-", "_")
        if key in values:
            start = node.start_mark.index
            length = len(text[start : node.end_mark.index].rstrip())
            text = text[:start] + json.dumps(values[key]) + text[start + length :]
    return text if _holds(text, wanted) else yaml.safe_dump(wanted)


def _holds(text: str, wanted: Mapping[str, Any]) -> bool:
    """Whether the edited text says what it should: with anchors, for one, it does not."""
    try:
        values = yaml.load(text, Loader=yaml.FullLoader)
    except yaml.YAMLError:
        return False
    return isinstance(values, dict) and {str(key).replace("-", "_"): value for key, value in values.items()} == wanted


LAUNCHER = str(Path(__file__).with_name("__main__.py"))
"""As a path, not as a module: DeepSpeed's launcher for Slurm knows scripts only."""


def extend_arguments(arguments: type) -> None:
    """Give NeoXArgs the plugin's keys and what they need: checks, the size of the vocabulary, the launcher."""
    extend(arguments, {kind.__name__: kind for kind in arguments.__bases__})
    fields = {name: field.type for name, field in arguments.__dataclass_fields__.items()}  # type: ignore[attr-defined]
    wrap(arguments, "__init__", lambda original: _translating(original, fields))
    read = vars(arguments)["from_ymls"].__func__
    arguments.from_ymls = classmethod(wraps(read)(replacing(read)))  # type: ignore[attr-defined]
    wrap(arguments, "calculate_derived", _with_adamw)
    wrap(arguments, "validate_values", _with_positions)
    wrap(arguments, "build_tokenizer", _with_vocabulary)
    wrap(arguments, "get_deepspeed_main_args", _launching_with_plugin)


def _translating(original: Function, fields: Mapping[str, Any]) -> Function:
    def init(self: Any, **values: Any) -> None:
        original(self, **translated(values, fields))

    return init


def _with_adamw(original: Function) -> Function:
    """Upstream's Adam is AdamW, and it knows no other name for it."""

    def calculate_derived(self: Any) -> None:
        if self.optimizer is not None and str(self.optimizer.get("type")).lower() == "adamw":
            self.optimizer = self.optimizer | {"type": "Adam"}
        original(self)

    return calculate_derived


def _with_positions(original: Function) -> Function:
    def validate_values(self: Any) -> bool:
        valid = original(self)
        if valid and is_asked_for(self):
            try:
                resolve(self)
            except ConfigError as error:
                raise ConfigError([line.removeprefix(f"{OVERRIDES}: ") for line in error.problems]) from error
        return valid

    return validate_values


def _with_vocabulary(original: Function) -> Function:
    """Upstream pads what the tokenizer counts; `vocab_size` is padded instead of that where it is set, as in our trainer."""

    def build_tokenizer(self: Any) -> None:
        original(self)
        if self.vocab_size is None:
            return
        called(self, "megatron.neox_arguments.NeoXArgs.build_tokenizer")
        counted = self.tokenizer.vocab_size
        if counted > self.vocab_size:
            raise ConfigError(
                [
                    f"vocab_size: {self.vocab_size}, but the tokenizer has {counted} tokens; set vocab_size: {counted} "
                    "or larger, or leave it out"
                ]
            )
        multiple = lcm(self.make_vocab_size_divisible_by, self.model_parallel_size)
        self.padded_vocab_size = -(-self.vocab_size // multiple) * multiple

    return build_tokenizer


def _launching_with_plugin(original: Function) -> Function:
    """The processes that deepy.py starts run the script through this package, and so activate the plugin themselves."""

    def get_deepspeed_main_args(self: Any) -> list[str]:
        arguments = original(self)
        at = len(arguments) - 1 - arguments[::-1].index(self.user_script)
        return [*arguments[:at], LAUNCHER, *arguments[at:]]

    return get_deepspeed_main_args
