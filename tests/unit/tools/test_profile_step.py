"""The profile of a step: idle time between kernels that may overlap, and the slowest kernels."""

from pathlib import Path

import pytest

from tools.gpu import profile_step
from tools.gpu.cases import read_lines
from tools.gpu.profile_step import Ran, busy, slowest, summary

KERNELS = [
    Ran("product", 0.0, 400.0),
    Ran("copy", 100.0, 200.0),
    Ran("norm", 300.0, 500.0),
    Ran("product", 800.0, 1000.0),
]


def test_overlapping_kernels_count_once() -> None:
    assert busy(KERNELS) == 700.0 and busy(reversed(KERNELS)) == 700.0 and busy([]) == 0.0


def test_figures_are_those_of_a_step() -> None:
    assert summary(KERNELS, 2) == {"milliseconds": 0.5, "idle_share": 0.3, "kernels": 2.0}
    first, *rest = slowest(KERNELS, 2)
    assert first == {"case": "product", "status": "ok", "milliseconds": 0.3, "share": 0.6667, "launches": 1.0}
    assert [line["case"] for line in rest] == ["norm", "copy"]


@pytest.mark.parametrize("accepted", [False, True])
def test_a_device_without_kernels_fails(accepted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the CPU. The stand-in device has none, either."""
    steps: list[int] = []
    monkeypatch.setattr(profile_step, "own_step", lambda config: (lambda batches: steps.append(len(batches)), "sdpa"))
    monkeypatch.setattr(profile_step, "recorded", lambda call: call() and [])
    for name in ("init_distributed", "shut_down"):
        monkeypatch.setattr(profile_step.group, name, lambda: None)
    monkeypatch.setattr(profile_step.launch, "complete_environment", lambda variables: None)
    keys = ["num_layers=1", "hidden_size=32", "num_attention_heads=2", "seq_length=16", "vocab_size=64"]
    keys += ["train_micro_batch_size_per_gpu=1", "--output", str(tmp_path / "x")]
    assert profile_step.main(keys + ["--without-values"] * accepted) == (not accepted)
    (line,) = [each for each in read_lines(tmp_path / "x") if each["status"] != "started"]
    assert len(steps) == profile_step.WARMUP + profile_step.STEPS
    assert line["kernels"] == 0 if accepted else "saw no kernel" in line["error"]
