"""Progress of evaluations that read documents in windows. It counts windows and tokens, so that it advances even within
one document.
"""

import math
import time

from megatron_coca.support.console import Progress, short


class WindowProgress(Progress):
    """Progress in windows and in tokens that the model reads. The remaining time is computed from the tokens."""

    def __init__(self, title: str, windows: int, tokens: int, show: bool = True) -> None:
        """`windows` is the number of all windows, and `tokens` the sum of their lengths."""
        super().__init__(title, windows, "windows", show=show)
        self._tokens, self._read = tokens, 0.0

    def read(self, windows: float, tokens: float) -> None:
        """Count windows, or a part of one window, and the total number of tokens in them."""
        self._read += tokens
        self.details = [f"{short(round(self._read))} of {short(self._tokens)} tokens"]
        if self._read > 0:
            self.remaining((time.monotonic() - self._began) / self._read * max(0.0, self._tokens - self._read))
        done = self.done + windows
        self.advance((round(done) if math.isclose(done, round(done)) else done) - self.done)  # parts add up to 1
