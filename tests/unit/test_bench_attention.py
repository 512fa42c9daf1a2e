"""The attention benchmark: complete records, no numbers of a backend that computes something else, exact counts."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_coca.attention.backends.reference import ReferenceBackend
from megatron_coca.attention.backends.select import BACKENDS
from megatron_coca.attention.inputs import CAUSAL, AttentionInputs, Band, Needs
from megatron_coca.evaluation.speed.cases import EINSUM
from tools.bench_attention import choose, main, parse
from tools.bench_cases import METHODS, Case, Shape
from tools.bench_parity import attend_rows, by_oracle, by_rows, sample, verdict
from tools.bench_steps import MODES, Workload, steps_of
from tools.bench_timing import visible_pairs

ROOT = Path(__file__).parents[2]

SHAPE = Shape(2, 2, 8, "float32", "cpu", 1, 16)
SMALL = ["--heads", "2", "--head-dim", "8", "--rounds", "2", "--training-length", "16", "--device", "cpu"]
EVERY_RECORD = {
    "benchmark",
    "method",
    "backend",
    "operands",
    "mode",
    "length",
    "batch",
    "heads",
    "kv_heads",
    "head_dim",
}
EVERY_RECORD |= {"dtype", "training_length", "status", "parity", "device", "threads", "python", "versions"}
EVERY_MEASURED = {"seconds", "rounds", "ratio_to_rope", "ratio_to_contraction", "tflops", "ceiling_tflops"}
EVERY_MEASURED |= {"share_of_ceiling", "frame_seconds", "peak_mib", "packed_mib"}

Run = Callable[..., tuple[int, list[dict[str, Any]]]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """run(option, ...): the exit status and the records of a small benchmark."""

    def run_with(*options: str) -> tuple[int, list[dict[str, Any]]]:
        output = tmp_path / "attention.jsonl"
        status = main([*SMALL, "--output", str(output), *options])
        return status, [json.loads(line) for line in output.read_text().splitlines()]

    return run_with


class Wrong:
    """The reference with one number off: the output of a query, or only a gradient of it."""

    def __init__(self, forward: float = 1.0, backward: float = 1.0) -> None:
        self.forward, self.backward = forward, backward

    def supports(self, needs: Needs) -> str | None:
        return None

    def attend(self, inputs: AttentionInputs) -> Tensor:
        value = inputs.value * self.backward
        value = value + (inputs.value * (self.forward - self.backward)).detach()
        return ReferenceBackend().attend(inputs.replace(value=value))


class Raising(Wrong):
    def attend(self, inputs: AttentionInputs) -> Tensor:
        raise NotImplementedError("no such kernel")


def test_records_are_complete(run: Run) -> None:
    methods, modes = ("rotary", "coca", "alibi", "contraction"), ("forward", "forward+backward", "decode")
    status, records = run("--methods", *methods, "--backends", "sdpa", "reference", "--lengths", "32", "64")
    assert status == 0 and all(record["status"] == "measured" for record in records)
    assert all(record.keys() >= EVERY_RECORD | EVERY_MEASURED for record in records)
    found = {(each["method"], each["backend"], each["mode"], each["length"]) for each in records}
    expected = {(m, b, mode, n) for m in methods[:3] for b in ("sdpa", "reference") for mode in modes for n in (32, 64)}
    assert found == expected | {("contraction", EINSUM, mode, n) for mode in modes[:2] for n in (32, 64)}
    assert all(each["seconds"] > 0 and each["tflops"] > 0 and each["ratio_to_rope"] > 0 for each in records)
    assert all(each["ratio_to_contraction"] > 0 for each in records if each["mode"] != "decode")


def test_rope_is_its_own_measure(run: Run) -> None:
    _, records = run("--methods", "rotary", "--backends", "sdpa", "--lengths", "32", "--modes", "forward")
    assert [record["ratio_to_rope"] for record in records if record["operands"] == "torch"] == [1.0]


def test_the_cache_of_coca_is_three_quarters(run: Run) -> None:
    _, records = run("--methods", "rotary", "coca", "--backends", "sdpa", "--lengths", "32", "--modes", "decode")
    kept = {record["method"]: (record["cache_bytes_per_token"], record["cache_ratio_to_rope"]) for record in records}
    assert kept == {"rotary": (2 * 2 * 8 * 4, 1.0), "coca": (2 * 12 * 4, 0.75)}


@pytest.mark.parametrize(
    ("backend", "refused", "reason"),
    [
        (Wrong(forward=1.01), {"forward", "forward+backward", "decode"}, "out is off"),
        (Wrong(backward=1.01), {"forward+backward"}, "dv is off"),
        (Wrong(forward=float("nan")), {"forward", "forward+backward", "decode"}, "out is off by nan"),
        (Raising(), {"forward", "forward+backward", "decode"}, "raised NotImplementedError: no such kernel"),
    ],
)
def test_wrong_numbers_are_refused(
    run: Run, monkeypatch: pytest.MonkeyPatch, backend: Wrong, refused: set[str], reason: str
) -> None:
    monkeypatch.setitem(BACKENDS, "sdpa", backend)
    status, records = run("--methods", "rotary", "--backends", "sdpa", "reference", "--lengths", "32")
    assert status == 1
    found = [record for record in records if record["status"] == "refused"]
    assert {(record["backend"], record["mode"]) for record in found} == {("sdpa", mode) for mode in refused}
    assert all(reason in record["reason"] and "seconds" not in record for record in found)
    assert {record["backend"] for record in records if record["status"] == "measured"} >= {"reference"}


def test_a_fault_at_a_long_length_alone_is_found() -> None:
    """One that the comparison with the oracle, at a short length, does not see."""

    class Longer(Wrong):
        def attend(self, inputs: AttentionInputs) -> Tensor:
            out = ReferenceBackend().attend(inputs)
            return torch.cat((out[:, :, :200], out[:, :, 200:] * 1.01), dim=2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BACKENDS, "sdpa", Longer())
        steps = steps_of(Case("rotary", "sdpa"))
    short, truth = by_oracle("rotary", "torch", SHAPE, "forward")
    long = Workload.build("rotary", "torch", SHAPE, SHAPE.packed(256))
    assert verdict(short, "forward", steps, truth)[1] is None
    assert verdict(long, "forward", steps, by_rows(long, "forward"))[1] is not None


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [name for name in METHODS if name != "contraction"])
def test_every_method_passes_by_dense_scores(name: str, mode: str, kv_heads: int) -> None:
    """The two float64 references agree with each other and with production, so a refusal means the backend."""
    shape = Shape(2, kv_heads, 8, "float32", "cpu", 1, 16)
    new_tokens = 1 if mode == "decode" else None
    work = Workload.build(name, "torch", shape, shape.packed(40), new_tokens)
    short, truth = by_oracle(name, "torch", shape, mode)
    steps = steps_of(Case(name, "reference"))
    assert verdict(short, mode, steps, truth)[1] is None
    assert verdict(work, mode, steps, by_rows(work, mode))[1] is None


def test_rows_are_rows_of_the_whole() -> None:
    work = Workload.build("rotary+lm_infinite", "torch", SHAPE, SHAPE.packed(40))
    inputs, rows = work.inputs(work.packed), [0, 1, 15, 16, 17, 39]
    whole = ReferenceBackend().attend(inputs)[:, :, rows]
    torch.testing.assert_close(attend_rows(rows)(inputs), whole)


def test_the_sample_has_the_ends_of_windows() -> None:
    rows = sample(1000, [Band(high=256), Band(low=256, first_keys=10)]).tolist()
    assert {0, 1, 9, 10, 11, 255, 256, 257, 999} <= set(rows) and len(rows) <= 30
    assert sample(1, [CAUSAL]).tolist() == [0]


@pytest.mark.parametrize("queries", [1, 3, 20])
@pytest.mark.parametrize(
    "bands",
    [
        (CAUSAL,),
        (Band(high=7),),
        (Band(high=7), Band(low=7)),
        (Band(high=7), Band(low=7, first_keys=4)),
        (Band(high=50), Band(low=50, first_keys=4)),
        (Band(low=3, high=9, first_keys=6),),
    ],
)
def test_pairs_are_counted_exactly(bands: tuple[Band, ...], queries: int) -> None:
    keys = 20
    seen = 0
    for m in range(keys - queries, keys):
        for n in range(m + 1):
            held = (
                band.low <= m - n
                and (band.high is None or m - n < band.high)
                and (band.first_keys is None or n < band.first_keys)
                for band in bands
            )
            seen += any(held)
    assert visible_pairs(bands, queries, keys) == seen


MEMORY_OF_A_CALL = """
import torch
from tools.bench_timing import peak_mib

held = torch.ones(20 * 2**20 // 4)

def call():
    for _ in range(2):
        held.clone().add_(held.clone())

print(peak_mib(call, "cpu"), peak_mib(lambda: None, "cpu"))
"""


def test_memory_is_that_of_the_call() -> None:
    """40 MiB held at once, of 80 in all, whatever the process held before; in a process of its own, as the benchmark
    is, because the allocator's arenas of a long test run hold blocks back.
    """
    command = [sys.executable, "-c", MEMORY_OF_A_CALL]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    used, nothing = map(float, answer.stdout.split())
    assert used == pytest.approx(40, abs=4) and nothing < 4


def test_what_does_not_fit_is_left_out(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--methods", "rotary", "--backends", "sdpa", "--modes", "forward", "--budget-seconds", "0")
    status, records = run(*options, "--lengths", "32", "64")
    assert status == 0 and {record["length"] for record in records} == {32}
    assert "skipped rotary sdpa forward 64: about" in capsys.readouterr().out


def test_cases_are_what_backends_support(capsys: pytest.CaptureFixture[str]) -> None:
    cases = choose(["rotary", "rotary+rerope", "contraction"], ["sdpa", "reference"], SHAPE)
    assert [(case.method, case.backend) for case in cases if case.operands == "torch"] == [
        ("rotary", "sdpa"),
        ("rotary", "reference"),
        ("rotary+rerope", "reference"),
        ("contraction", EINSUM),
    ]
    assert "not rotary+rerope sdpa: " in capsys.readouterr().out


@pytest.mark.parametrize(("device", "longest", "heads"), [("cpu", 8192, 4), ("cuda", 131072, 16)])
def test_defaults_follow_the_device(device: str, longest: int, heads: int) -> None:
    options = parse(["--device", device])
    assert (options.lengths[0], options.lengths[-1], options.heads) == (512, longest, heads)
    assert set(options.backends) == set(BACKENDS) and set(options.methods) == set(METHODS)
