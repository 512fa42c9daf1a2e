"""The predicted step: its counts against counters, what binds it, and published runs."""

import json
import math
from typing import Any

import pytest

from megatron_coca.commands.estimate import GPUS
from megatron_coca.config import Config, load_config
from megatron_coca.model.cost import pass_counts, peak_flops
from megatron_coca.training.estimate import stage_parameters
from megatron_coca.training.step_time import (
    DEVICES,
    Network,
    assumption,
    communication,
    mfu_range,
    step_time,
)
from megatron_coca.training.topology import Topology
from tests.documents import ROOT
from tests.golden import step_calibration

MODEL = ROOT / "configs/350M/roformer_coca.yml"
HOST = ROOT / "configs/cluster/a100x8.yml"


ONCE = {"gradient_accumulation_steps": 1}


def configured(**changes: Any) -> Config:
    return load_config([MODEL, HOST], changes)


@pytest.mark.parametrize(
    ("method", "kernel", "gigabytes", "launches"),
    [
        ("none", "torch", 1.159, 35),
        ("rotary", "torch", 2.267, 60),
        ("coca", "torch", 2.679, 72),
        ("coca", "triton", 1.327, 37),
        ("rotary", "triton", 1.327, 37),
    ],
)
def test_bytes_and_launches_are_those_counted(method: str, kernel: str, gigabytes: float, launches: float) -> None:
    """Per block, forward and backward, 16 x 512 tokens, as the stand-in device counted them outside matrix products."""
    counts = pass_counts(configured(pos_emb=method, operand_kernel=kernel, loss_kernel=kernel), 16)
    assert counts.block_bytes == pytest.approx(gigabytes * 1e9, rel=0.02)
    assert counts.loss_bytes == pytest.approx({"torch": 20.53e9, "triton": 2.816e9}[kernel], rel=0.02)
    assert (counts.block_launches, counts.other_launches) == (launches, {"torch": 194, "triton": 51}[kernel])


BUDGETS = ROOT / "benchmarks/pretend/budgets.json"


@pytest.mark.parametrize("method", ["none", "rotary", "coca"])
def test_bytes_and_launches_are_those_of_the_budgets(method: str) -> None:
    """If they differ, change the rows of OPERAND_WIDTHS, OPERAND_LAUNCHES and BLOCK_LAUNCHES to what was counted."""
    measured = {}
    if BUDGETS.is_file():
        measured = json.loads(BUDGETS.read_text())["scenarios"].get(f"layer: {method}", {}).get("measured", {})
    if not measured:
        pytest.skip("benchmarks/pretend/budgets.json has no figures of this method")
    counts = pass_counts(configured(pos_emb=method), 16)
    launches, gigabytes = measured["launches per layer"], measured.get("GB per layer outside matrix products")
    assert counts.block_launches == pytest.approx(launches, rel=0.1)
    assert gigabytes is None or counts.block_bytes == pytest.approx(1e9 * gigabytes, rel=0.1)


@pytest.mark.parametrize(("stage", "reductions", "gathers"), [(1, 1, 1), (2, 2, 1)])
def test_bytes_are_those_of_eight_simulated_ranks(stage: int, reductions: int, gathers: int) -> None:
    """NCCL was called for 810,668,032 bytes of gradients, and parts of 101,333,504 bytes of weights."""
    config = configured(zero_optimization={"stage": stage})
    topology = Topology.of(config.parallel, 8)
    ((numbers, blocks),) = stage_parameters(config, topology)
    moved = communication(config, topology, config.batch.resolve(8), numbers, blocks)
    assert moved.reduced == reductions * 810_668_032
    assert moved.gathered == pytest.approx(gathers * 8 * 101_333_504, rel=1e-3)
    assert moved.summed == moved.exchanged == moved.sent == 0


def test_launches_are_those_of_eight_simulated_ranks() -> None:
    """3,916 kernels in two micro-batches and the optimizer's step, ZeRO 1."""
    step = step_time(configured(operand_kernel="torch", loss_kernel="torch"), 8, "H100")
    assert step.launches == pytest.approx(3916 * assumption("launch"), rel=0.01)


@pytest.mark.parametrize(
    ("changes", "gpus", "gpu", "links", "bound"),
    [
        ({}, 8, "A100-80", 8, "compute"),
        (
            {"hidden_size": 256, "num_attention_heads": 4, "train_micro_batch_size_per_gpu": 32, **ONCE},
            8,
            "H100",
            8,
            "memory",
        ),
        ({"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 32}, 8, "H100", 8, "launches"),
        ({"train_batch_size": None, "gradient_accumulation_steps": 1}, 4096, "B200", 1, "network"),
    ],
)
def test_each_of_four_may_bind(changes: dict[str, Any], gpus: int, gpu: str, links: int, bound: str) -> None:
    assert step_time(configured(**changes), gpus, gpu, links).bound == bound


def test_parts_of_a_step_add_up() -> None:
    step = step_time(configured(), 8, "A100-80")
    assert step.total == pytest.approx(step.compute + step.memory + step.network)
    flops = 2.272e9 * 256 * 512
    assert step.mfu == pytest.approx(flops / step.total / 8 / 312e12, rel=1e-3)


def test_reductions_overlap_unless_they_are_told_not_to() -> None:
    beside = step_time(configured(), 8, "A100-80")
    after = step_time(configured(zero_optimization={"stage": 1, "overlap_comm": False}), 8, "A100-80")
    assert after.hidden == pytest.approx(0, abs=1e-12) and beside.hidden > 1e-3
    assert after.network == pytest.approx(beside.network + beside.hidden)


def test_collectives_take_the_slower_of_both_networks() -> None:
    inside, across = Network(DEVICES["H100"], 8), Network(DEVICES["H100"], 1)
    assert inside.seconds(1e9, 8, 1, 2) == across.seconds(1e9, 8, 1, 2), "one host"
    assert across.seconds(1e9, 64, 1, 1) > 7 * inside.seconds(1e9, 64, 1, 1)
    assert inside.seconds(1e9, 64, 1, 2) == pytest.approx(2 * inside.seconds(1e9, 64, 1, 1))
    assert inside.seconds(1e9, 1, 1, 2) == 0


def test_recomputing_and_other_parallelism_cost_time() -> None:
    plain = step_time(configured(), 8, "H100")
    again = step_time(configured(checkpoint_activations=True), 8, "H100")
    assert again.total > plain.total and again.mfu < plain.mfu
    keys = {"train_batch_size": None, "gradient_accumulation_steps": 4}
    for split in ("model_parallel_size", "sequence_parallel_size", "pipe_parallel_size"):
        parts = step_time(configured(**keys, **{split: 2}), 8, "H100")
        assert parts.mfu < step_time(configured(**keys), 8, "H100").mfu, split


def test_devices_are_known() -> None:
    assert DEVICES.keys() <= GPUS.keys() and all(peak_flops(device.name) for device in DEVICES.values())


RUNS = list(step_calibration.runs())


@pytest.mark.parametrize("gpu", ["A100-80", "H100"])
def test_published_runs_are_within_the_error_that_is_printed(gpu: str) -> None:
    """`error` of a device is the largest error, rounded up, of eight runs or more."""
    chosen = [run for run in RUNS if run.gpu == gpu and run.fitted]
    typical, largest = step_calibration.spread(chosen)
    assert len(chosen) >= 8 and typical < 0.05
    assert DEVICES[gpu].error == pytest.approx(math.ceil(100 * largest) / 100)


@pytest.mark.parametrize("gpu", ["A100-80", "H100"])
def test_the_shares_are_the_best_ones(gpu: str) -> None:
    """No step of a hundredth in products or two in attention brings the predictions nearer; else: --fit."""
    chosen = [run for run in RUNS if run.gpu == gpu and run.fitted]
    device = DEVICES[gpu]

    def squares(products: float, attention: float) -> float:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(DEVICES, gpu, device._replace(products=products, slow_attention=attention))
            return sum(step_calibration.error(run) ** 2 for run in chosen)

    best = squares(device.products, device.slow_attention)
    for products, attention in ((0.01, 0), (-0.01, 0), (0, 0.02), (0, -0.02)):
        assert squares(device.products + products, device.slow_attention + attention) > best


def test_an_older_program_is_slower_than_predicted() -> None:
    """Pythia's hours are those of GPT-NeoX in 2022 and may contain more than steps."""
    for run in RUNS:
        assert run.fitted or 0 < step_calibration.error(run) < math.log(2)


def test_the_page_shows_the_calibration() -> None:
    page = (ROOT / "docs/launch.md").read_text()
    for run in RUNS:
        published, predicted = f"{run.mfu:.1f}", f"{step_calibration.predicted(run):.1f}"
        row = f"| {run.program} {run.name}, {run.gpu} | {published} | {predicted} | {step_calibration.row_error(run)} |"
        assert row in page, row


def test_a_range_is_expected() -> None:
    """From slow attention on a slow host to fast ones, widened by the error of the calibration."""
    few = configured(train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=32)
    low, high = mfu_range(few, 8, "H100")
    slow, fast = (step_time(few, 8, "H100", slow=slow) for slow in (True, False))
    assert slow.launches == pytest.approx(fast.launches * 26 / 8) and slow.bound == "launches"
    error = DEVICES["H100"].error
    assert error is not None
    assert (low, high) == pytest.approx((slow.mfu * (1 - error), fast.mfu * (1 + error)))
    low, high = mfu_range(configured(), 8, "B200")
    assert low < step_time(configured(), 8, "B200").mfu * 0.85 < high


def test_a_captured_micro_batch_is_two_launches() -> None:
    config = configured(cuda_graphs=True)
    assert step_time(config, 8, "H100").launches == pytest.approx((2 * 2 + 72) * assumption("launch"))
