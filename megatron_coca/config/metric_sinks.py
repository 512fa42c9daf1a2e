"""The key `metric_sinks`: the sinks of a run, and their options as the sinks declare them."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, create_model

from megatron_coca.config.base import ConfigGroup, PathName
from megatron_coca.sinks import SINKS, MetricSink

METRIC_SINKS = "metric_sinks"
KINDS: dict[str, Any] = {"text": Annotated[str, Field(min_length=1)], "flag": bool, "folder": PathName}
"""Type of a declared option, by its kind."""


def selectable() -> dict[str, type[MetricSink]]:
    """Return the sinks that `metric_sinks` can name. All other sinks have GPT-NeoX's own keys."""
    return {name: sink for name, sink in SINKS.items() if sink.key is None}


def names_within(path: str) -> tuple[str, ...]:
    """Return the names in the mapping `metric_sinks`, or the options in `metric_sinks.NAME`."""
    known, (_, _, name) = selectable(), path.partition(".")
    if not name:
        return tuple(known)
    return tuple(option.name for option in known[name].options) if name in known else ()


def read_sinks(value: Any) -> dict[str, dict[str, Any]]:
    """Validate the mapping, and return the options of every selected sink. An option that is not set has its default.

    Raises:
        ValidationError: a sink or an option is unknown, missing or of the wrong type.
    """
    known = selectable()
    options = {name: (_options_of(sink) | None, None) for name, sink in known.items()}
    whole: Any = create_model(METRIC_SINKS, __base__=ConfigGroup, **options)  # type: ignore[call-overload]
    if isinstance(value, Mapping):
        value = {name: _without_null(given) for name, given in value.items()}
    read = whole.model_validate(value)
    return {name: getattr(read, name).model_dump() for name in known if getattr(read, name) is not None}


def _without_null(options: Any) -> Any:
    """Return a mapping of options without those that are not set."""
    if not isinstance(options, Mapping):
        return options
    return {name: value for name, value in options.items() if value is not None}


def _options_of(sink: type[MetricSink]) -> type[ConfigGroup]:
    fields: dict[str, Any] = {}
    for option in sink.options:
        kind = KINDS[option.kind]
        missing = ... if option.required else option.default
        fields[option.name] = (kind if missing is not None else kind | None, missing)
    return create_model(sink.name, __base__=ConfigGroup, **fields)
