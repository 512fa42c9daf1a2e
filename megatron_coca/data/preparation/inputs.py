"""What there is to read, as it is found when a preparation begins or goes on."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_coca.data.preparation.plan import Source
from megatron_coca.data.readers import open_reader
from megatron_coca.data.readers.source import Unit


@dataclass(frozen=True)
class Inputs:
    """The inputs of all sources.

    Attributes:
        units: (number of the source, unit), in the order of reading.
        unread: of each source, how many files in its folders are none of its units, by the reason.
    """

    units: Sequence[tuple[int, Unit]]
    unread: Sequence[Counter[str]]

    def of(self, source: int) -> list[Unit]:
        """The units of one source."""
        return [unit for owner, unit in self.units if owner == source]


def find_inputs(sources: Sequence[Source]) -> Inputs:
    """List what the sources name. ``DataError`` for a path that is missing or unreadable."""
    readers = [open_reader(source.spec) for source in sources]
    units = [(number, unit) for number, reader in enumerate(readers) for unit in reader.units()]
    return Inputs(units, [reader.unread() for reader in readers])
