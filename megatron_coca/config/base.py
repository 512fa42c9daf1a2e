"""Base of all key groups: the error class, value ranges, and the functions that declare keys."""

import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from megatron_coca.support.errors import InputError
from megatron_coca.support.plain_text import plain


class ConfigError(InputError, ValueError):
    """All errors in a configuration, one per line.

    Attributes:
        problems: the lines, `<file or command line>: <key>: <message>`.
    """

    def __init__(self, *problems: str) -> None:
        self.problems = list(problems)
        super().__init__(*problems)

    def __str__(self) -> str:
        return plain("\n".join(self.problems))


def nearest(word: str, known: Iterable[str], prefix: str = "") -> str:
    """Return the hint ``; did you mean `x`?`` for the known word that is closest to `word`, or an empty string. In
    the hint, `prefix` is before this word.
    """
    lowered = {candidate.lower(): candidate for candidate in known}
    match = difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=0.6)
    return f"; did you mean `{prefix}{lowered[match[0]]}`?" if match else ""


def shown(value: Any) -> str:
    """Return a value as text for a message, shortened to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


class ConfigGroup(BaseModel):
    """A frozen group of keys. The alias of a field, if set, is the dotted path of the key in YAML."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


PathName = Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser)]
"""A file, folder, prefix of files, or URL. A leading `~` becomes the home folder."""

MAX_COUNT = 2**31 - 1
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
"""A number of steps, tokens or rows. The product of any two fits into 64 bits."""
WholeNumber = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Size = Annotated[int, Field(ge=1, le=2**20)]
"""A number of features, heads, samples or ranks. It is limited because memory and loops grow with it."""
Positive = Annotated[float, Field(gt=0.0, le=1.0e30)]
NotNegative = Annotated[float, Field(ge=0.0, le=1.0e30)]
Seconds = Annotated[float, Field(gt=0.0, le=1.0e9)]
"""A time in seconds. Timers of the operating system and of collectives also accept twice the maximum."""
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]


def key(default: Any, description: str, path: str | None = None) -> Any:
    """Declare a key with a default, a description and, if it is nested in YAML, its dotted path."""
    return Field(default=default, description=description, alias=path)


def required(description: str) -> Any:
    """Declare a key without a default."""
    return Field(description=description)


def derived(default: Any, compute: Callable[[Mapping[str, Any]], Any], switch: str, description: str) -> Any:
    """Declare a key with a computed default. If the key is not set, `compute` returns its value, from the earlier
    fields of its group. This value is `default` unless the key `switch` is set.
    """
    extra = {"default": default, "switch": switch}
    return Field(default_factory=compute, description=description, json_schema_extra=extra)


def follows(name: str, description: str) -> Any:
    """Declare a key whose default is the value of `name`, an earlier field of the same group."""
    return Field(default_factory=lambda data: data[name], description=description, json_schema_extra={"follows": name})
