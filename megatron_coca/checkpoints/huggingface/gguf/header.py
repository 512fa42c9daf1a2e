"""Read the header of a GGUF file, which may come from a stranger.

Every count in the header is checked against the size of the file.
"""

from pathlib import Path
from typing import Any

MOST_VALUES = 1 << 22
"""Maximum number of values in a header. The largest vocabularies need a tenth of this number. The package gguf makes an
object for each value.
"""


def read_header(path: Path) -> Any:
    """Return the `GGUFReader` of a file.

    Raises ValueError if the header announces more values than the file has or `MOST_VALUES` allows. For other damage,
    raises any error of the package gguf.
    """
    import gguf

    class HeaderReader(gguf.GGUFReader):
        """A reader that stops with an error if values lie beyond the end of the file or exceed `MOST_VALUES` in number.

        The package's own reader returns empty values beyond the end of the file, as many as the header asks for.
        """

        _values = 0

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            found = super()._get(offset, dtype, count, override_order)
            self._values += 1
            if len(found) != int(count) or offset < 0:
                raise ValueError(f"it announces more than its {len(self.data):,} bytes contain")
            if self._values > MOST_VALUES:
                raise ValueError(f"its header has more than {MOST_VALUES:,} values")
            return found

    return HeaderReader(path)
