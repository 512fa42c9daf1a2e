"""All places that one run reports to."""

from collections.abc import Callable

from megatron_coca.config import Config, ConfigError
from megatron_coca.training.reporting import sinks
from megatron_coca.training.reporting.console import Console, open_console
from megatron_coca.training.reporting.figures import UNSAVED, run_folder
from megatron_coca.training.reporting.sinks import Sink


class Reporters:
    """All sinks of one run; does nothing on ranks other than the first."""

    def __init__(self, config: Config, start: int, active: bool) -> None:
        """`start` is the number of completed steps.

        Raises:
            ConfigError: a library is missing, or a place cannot be reached or written.
        """
        self._console: Console | None = open_console(config, start) if active else None
        self._sinks: list[Sink] = [self._console] if self._console else []
        for key, build in _sinks(config, start) if active else ():
            self._sinks.append(_opened(key, build))

    def advance(self) -> None:
        """One step is done."""
        if self._console:
            self._console.advance()

    def report(self, step: int, **figures: float | None) -> None:
        """Hand the figures of `step` to every sink."""
        for sink in self._sinks:
            sink.report(step, figures)

    def note(self, step: int, message: str) -> None:
        """Hand a line on something odd to every sink."""
        for sink in self._sinks:
            sink.note(step, message)

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            sink.close()


def _sinks(config: Config, start: int) -> list[tuple[str, Callable[[], Sink]]]:
    """The sinks that the configuration asks for, each with the key that does."""
    keys, folder = config.logging, run_folder(config)
    # Lines in the common folder are those of another run, which this one does not continue.
    known = start if folder != UNSAVED else 0
    found: list[tuple[str, Callable[[], Sink]]] = [("log_dir", lambda: sinks.JsonLines(folder, known))]
    if keys.tensorboard_dir is not None:
        tensorboard = keys.tensorboard_dir
        found.append(("tensorboard_dir", lambda: sinks.TensorBoard(tensorboard, start)))
    if keys.use_wandb:
        found.append(("use_wandb", lambda: sinks.WandB(config, folder, known)))
    return found


def _opened(key: str, build: Callable[[], Sink]) -> Sink:
    try:
        return build()
    except ImportError as error:
        raise ConfigError([f"{key}: {error}; install the extra: pip install 'megatron-coca[logging]'"]) from error
    except OSError as error:
        raise ConfigError([f"{key}: {error}; a folder that can be written is needed"]) from error
