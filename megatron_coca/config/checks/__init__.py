"""Checks between keys, with a file for each topic. Every check records the keys that it reads."""

from collections.abc import Iterator

from megatron_coca.config.checks import data, model, optimization, parallelism, position, running
from megatron_coca.config.checks.recording import Check, run
from megatron_coca.config.schema import Settings

CHECKS: tuple[Check, ...] = (
    *model.CHECKS,
    *position.CHECKS,
    *optimization.CHECKS,
    *parallelism.CHECKS,
    *running.CHECKS,
    *data.CHECKS,
)


def find_faults(settings: Settings, unreliable: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Yield key and message of every failing check.

    `unreliable` keys are invalid and have their defaults in `settings`. A message that depends on one of them is
    dropped.
    """
    for check in CHECKS:
        found = run(check, settings)
        if found.message is not None and unreliable.isdisjoint(found.keys):
            yield check.key, found.message
