"""The measured costs of a result."""

from functools import cache

import pytest
import torch

from megatron_coca.evaluation import results
from megatron_coca.support.crowded_cores import CrowdedCores


class Machine:
    """A clock, and the usage of two threads beside a busy process."""

    now = 0.0

    def clock(self) -> float:
        return self.now

    def usage(self) -> tuple[float, int]:
        return self.now, int(250 * self.now)


def test_crowded_cores_are_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    watch = cache(lambda threads: CrowdedCores(2, machine.clock, machine.usage, {}))
    monkeypatch.setattr(results, "_cores", watch)
    for seconds, expected in ((20.0, 0), (20.0, 0), (40.0, 1), (40.0, 1)):
        with results.measured(torch.device("cpu")):
            machine.now += seconds
        machine.now += 100.0  # outside of a measurement
        assert caplog.text.count("busy cores: for 40 s") == expected
