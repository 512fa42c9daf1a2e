"""Load the configuration that is saved with a checkpoint.

Checkpoints may be untrusted, and `imports` in their configurations names Python files. These files are never run. Users
name the files to run in their own configuration or in an override.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_coca.config.base import ConfigError
from megatron_coca.config.checks.downloaded import not_run
from megatron_coca.config.load import Config
from megatron_coca.config.source import OVERRIDES, Layer, Overrides, given_layer, merge, read_file, read_overrides
from megatron_coca.methods import MARK

logger = logging.getLogger(__name__)

IMPORTS = "imports"


class SavedConfig(NamedTuple):
    """The configuration of a checkpoint.

    Attributes:
        config: the configuration, with the user's files as `imports`.
        changed: the user's files that differ from the files recorded in the checkpoint.
    """

    config: Config
    changed: tuple[str, ...] = ()


def named_imports(values: Mapping[str, Any]) -> list[str]:
    """Return the files, with their digests, that a checkpoint's configuration names in `imports`."""
    names = values.get(IMPORTS) or []
    return [str(name) for name in (names if isinstance(names, list) else [names])]


def load_saved_config(
    source: Path | Mapping[str, Any], overrides: Overrides = (), files: Sequence[str | Path] = (), same: bool = False
) -> SavedConfig:
    """Load the configuration of a checkpoint without running the files that its `imports` names.

    Args:
        source: the file of the configuration, or its keys and values.
        overrides, files: the user's overrides and files. Only their key `imports` is read. They must set this key if
            the checkpoint's configuration sets it.
        same: raise an error, instead of logging a warning, if an imported file differs from the one that the
            checkpoint records.

    Raises:
        ConfigError: all errors.
    """
    problems: list[str] = []
    saved = read_file(source, problems) if isinstance(source, Path) else merge(read_overrides(source, problems))
    if saved is None:
        raise ConfigError(*problems)
    recorded, given = named_imports(saved.values), given_layer(overrides, files)
    layers = [saved._replace(values={key: value for key, value in saved.values.items() if key != IMPORTS})]
    label = source if isinstance(source, Path) else OVERRIDES
    if given.values.get(IMPORTS):
        where = {IMPORTS: given.where.get(IMPORTS, given.label)}
        layers.append(Layer(given.label, {IMPORTS: given.values[IMPORTS]}, where))
    elif recorded:
        problems.append(f"{saved.where.get(IMPORTS, label)}: {IMPORTS}: {not_run(recorded)}")
        raise ConfigError(*problems)
    config = Config.from_layers(layers, problems, used=False)
    digests = {name.partition(MARK)[2] for name in recorded} - {""}
    declared = (name for name in config.position.imports if MARK in name)  # files without a digest declare only sinks
    changed = tuple(name for name in declared if digests and name.partition(MARK)[2] not in digests)
    if changed:
        before = ", ".join(recorded)
        message = f"{label}: {IMPORTS}: {changed[0]}: not the file that the weights were trained with ({before})"
        if same:
            raise ConfigError(f"{message}; restore it, or start a new run from the weights with finetune=true")
        logger.warning("%s; the run uses it anyway", message)
    return SavedConfig(config, changed)
