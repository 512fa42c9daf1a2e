"""Checks of key combinations, one file per topic. The keys that a failing check reads are recorded."""

from collections.abc import Iterator

from megatron_coca.config.checks import data, latent, mixtures, model, mup, optimization, parallelism, position, running
from megatron_coca.config.checks.recording import Check, run
from megatron_coca.config.schema import Settings

CHECKS: tuple[Check, ...] = (
    *model.CHECKS,
    *latent.CHECKS,
    *mixtures.CHECKS,
    *mup.CHECKS,
    *position.CHECKS,
    *optimization.CHECKS,
    *parallelism.CHECKS,
    *running.CHECKS,
    *data.CHECKS,
)


def find_faults(settings: Settings, unreliable: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Yield the key and the message of every failing check.

    `unreliable` contains the invalid keys, which have their defaults in `settings`. Checks that read one of them are
    ignored.
    """
    for check in CHECKS:
        message = check.find(settings)
        # A check takes ten times as long if its keys are recorded, so only a failed check is repeated with recording.
        if message is not None and unreliable.isdisjoint(run(check, settings).keys):
            yield check.key, message
