"""The one error that a faulty configuration raises."""

import difflib
from collections.abc import Iterable, Sequence


class ConfigError(ValueError):
    """Every fault found in a configuration, one line each.

    Attributes:
        problems: lines of the form ``<file or command line>: <key>: <what is wrong>``.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        return "\n".join(self.problems)


def nearest(word: str, known: Iterable[str]) -> str:
    """The hint ``; did you mean `x`?`` for the known word closest to `word`, or an empty string."""
    lowered = {candidate.lower(): candidate for candidate in known}
    match = difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=0.6)
    return f"; did you mean `{lowered[match[0]]}`?" if match else ""
