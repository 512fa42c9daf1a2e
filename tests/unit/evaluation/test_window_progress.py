"""Progress that counts windows and tokens."""

import pytest

from megatron_coca.evaluation.window_progress import WindowProgress
from megatron_coca.support import console


def test_the_time_left_follows_from_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    with WindowProgress("title", windows=4, tokens=10000, show=False) as progress:
        now = 10.0
        progress.read(1, 1000)
        assert progress._texts() == ["1/4 windows", "0:01:30 left", "1k of 10k tokens"]
        for _ in range(30):  # the layers of one window
            now += 1.0
            progress.read(1 / 30, 4000 / 30)
        assert progress._texts() == ["2/4 windows", "0:00:40 left", "5k of 10k tokens"]
