"""Limit the time of calls of a service's library, because the whole run waits for them."""

import threading
from collections.abc import Callable
from typing import TypeVar

SECONDS = 30
"""Seconds to wait for a service at the start of a run, and until the remaining data are sent at its end."""
Returned = TypeVar("Returned")


def within(seconds: float, name: str, action: Callable[[], Returned]) -> Returned:
    """Return the result of `action`, which runs in a thread called `name`.

    Raises:
        TimeoutError: the action takes longer; its thread continues until the process ends.
        Exception: the error of the action.
    """
    results: list[Returned] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(action())
        except Exception as error:  # each library has its own exceptions
            errors.append(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    thread.join(seconds)
    for error in errors:
        raise error
    if not results:
        raise TimeoutError(f"{name} does not answer within {seconds:g} s")
    return results[0]
