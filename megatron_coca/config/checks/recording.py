"""A check of a key combination, and a view of the configuration that records which keys the check reads."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

from megatron_coca.config.base import ConfigGroup
from megatron_coca.config.schema import Settings


class Check(NamedTuple):
    """A check of a key combination.

    Attributes:
        key: the key that the error message names.
        find: a function that returns the error message, or None if the values are compatible.
    """

    key: str
    find: Callable[[Settings], str | None]


class Finding(NamedTuple):
    """The result of a check: its message, or None, and the keys that it read."""

    message: str | None
    keys: frozenset[str]


class RecordedGroup:
    """A view of a key group that records each key that is read, directly or by a property or method."""

    def __init__(self, group: ConfigGroup, keys: set[str]) -> None:
        self._group, self._keys = group, keys

    def __getattr__(self, name: str) -> Any:
        kind = type(self._group)
        field = kind.model_fields.get(name)
        if field is None:
            return getattr(kind, name).__get__(self)  # a property or method, which reads keys through this view, too
        self._keys.add(field.alias or name)
        extra = field.json_schema_extra
        if isinstance(extra, dict) and name not in self._group.model_fields_set:
            self._keys.add(str(extra["follows"] if "follows" in extra else extra["switch"]))
        return getattr(self._group, name)

    def model_copy(self, update: Mapping[str, Any]) -> "RecordedGroup":
        """Return a view of a changed copy. It adds the keys that are read to the same set."""
        return RecordedGroup(self._group.model_copy(update=update), self._keys)


class RecordedSettings:
    """A view of all key groups of a configuration. It records the keys that are read from all groups in one set."""

    def __init__(self, settings: Settings, keys: set[str]) -> None:
        self._settings, self._keys = settings, keys

    def __getattr__(self, name: str) -> RecordedGroup:
        return RecordedGroup(getattr(self._settings, name), self._keys)


def run(check: Check, settings: Settings) -> Finding:
    """Run a check, and record the keys that it reads."""
    keys: set[str] = set()
    message = check.find(cast(Settings, RecordedSettings(settings, keys)))
    return Finding(message, frozenset(keys))
