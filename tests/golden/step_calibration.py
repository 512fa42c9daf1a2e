"""Published training speeds against the predicted step, and the shares that fit them best.

    PYTHONPATH=. .venv/bin/python tests/golden/step_calibration.py --fit

The runs and their sources are in benchmarks/published_steps.json. Those of one program and GPU differ by size and
length; other programs show how far from it another one is. A share of the peak in matrix products and one in attention
for each GPU are fitted to the logarithms of MFU; the rest of the model stays as counted.
"""

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from megatron_coca.config import Config, load_config
from megatron_coca.training import step_time as model

ROOT = Path(__file__).parents[2]
FILE = ROOT / "benchmarks/published_steps.json"
ALIKE = {
    "train_batch_size": None,
    "operand_kernel": "torch",  # those programs fuse neither rotation nor loss
    "loss_kernel": "torch",
    "vocab_size": 50368,
}


class Run(NamedTuple):
    """A published run: its program, our keys for it, GPUs, and MFU in percent."""

    name: str
    program: str
    gpu: str
    gpus: int
    mfu: float
    fitted: bool
    config: Config


def runs() -> Iterator[Run]:
    """All published runs."""
    for program in json.loads(FILE.read_text())["programs"]:
        for name, gpu, gpus, mfu, keys in program["runs"]:
            files = [ROOT / "configs/350M/roformer_coca.yml", ROOT / "configs/cluster/a100x8.yml"]
            config = load_config(files, ALIKE | program["keys"] | keys)
            yield Run(name, program["name"], gpu, gpus, mfu, program["fitted"], config)


def predicted(run: Run) -> float:
    """The predicted MFU in percent, with slow attention, as MPT's Triton kernel is, and a fast host."""
    device = model.DEVICES[run.gpu]
    model.DEVICES[run.gpu] = device._replace(attention=device.slow_attention)
    try:
        return 100 * model.step_time(run.config, run.gpus, run.gpu).mfu
    finally:
        model.DEVICES[run.gpu] = device


def error(run: Run) -> float:
    """The logarithm of predicted over published."""
    return math.log(predicted(run) / run.mfu)


def row_error(run: Run) -> str:
    """The relative error as a table shows it."""
    return f"{math.expm1(error(run)):+.0%}"


def spread(chosen: list[Run]) -> tuple[float, float]:
    """Root of the mean squared relative error, and the largest one."""
    errors = [abs(math.expm1(error(run))) for run in chosen]
    return math.sqrt(sum(value**2 for value in errors) / len(errors)), max(errors)


def fit(gpu: str, chosen: list[Run]) -> tuple[float, float, float]:
    """(error, share in products, share in attention) of the best pair of hundredths."""
    device, found = model.DEVICES[gpu], []
    for products in range(45, 85):
        for attention in range(10, 61, 2):
            model.DEVICES[gpu] = device._replace(products=products / 100, slow_attention=attention / 100)
            found.append((sum(error(run) ** 2 for run in chosen), products / 100, attention / 100))
    model.DEVICES[gpu] = device
    return min(found)


def main() -> None:
    """Print every run and the errors; with --fit the best shares too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true")
    options = parser.parse_args()
    known: list[Run] = list(runs())
    for run in known:
        print(f"| {run.program} {run.name}, {run.gpu} | {run.mfu:.1f} | {predicted(run):.1f} | {row_error(run)} |")
    for gpu in sorted({run.gpu for run in known}):
        chosen = [run for run in known if run.gpu == gpu and run.fitted]
        typical, largest = spread(chosen)
        print(f"{gpu}: {len(chosen)} fitted runs, error {typical:.1%}, largest {largest:.1%}")
        if options.fit:
            print("best", fit(gpu, chosen))


if __name__ == "__main__":
    main()
