"""Whole workflow on a laptop: train two position methods from one seed, kill and resume one, evaluate both far beyond
the training length.

    python tools/quickstart.py

Everything is done by the project's own commands, which are printed as they run. Existing results are reused.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_coca.checkpoints import native  # noqa: E402
from megatron_coca.config import load_config  # noqa: E402
from megatron_coca.evaluation import EvaluationError, PerplexityResult, build_report  # noqa: E402
from megatron_coca.evaluation.results import read_record  # noqa: E402

RUNS = Path("runs/quickstart")
METHODS = {"roformer": "RoFormer", "roformer_coca": "RoFormer + CoCA"}
EXTENSIONS = {"plain": (), "dynamic_ntk": ("rope_scaling.rope_type=dynamic", "rope_scaling.factor=4")}
EXTENSION_LABELS = {"plain": "", "dynamic_ntk": " + dynamic NTK"}
WINDOWS, STRIDE = "64,128,256,512,1024", "64"
KILLED, KILL_AFTER = "roformer_coca", 150
"""The run that is killed, and the step after which it is: halfway between two checkpoints."""


def main() -> int:
    """Return 0, or the exit status of the command that failed."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    start = time.perf_counter()
    os.chdir(ROOT)
    try:
        for name in METHODS:
            train(name)
        results = [evaluate(name, extension) for name in METHODS for extension in EXTENSIONS]
        table = build_report(results, RUNS, "Quickstart: perplexity beyond the training length of 64")
    except subprocess.CalledProcessError as error:
        return error.returncode
    except EvaluationError as error:
        print(error, file=sys.stderr)
        return 2
    seconds = time.perf_counter() - start
    print(f"\n{table}\n\nWrote {RUNS}/report.html, report.png, report.md and report.json; {seconds:.0f} s in total.")
    return 0


def train(name: str) -> None:
    """Train one method to its last step; KILLED is killed midway and resumed from its latest checkpoint."""
    file = f"configs/quickstart/{name}.yml"
    config = load_config([file])
    save, last = Path(str(config.checkpoint.save)), config.schedule.train_iters
    if last in native.steps(save):
        print(f"# {save}: step {last} is already saved")
        return
    command = [sys.executable, "train.py", file, f"load={save}"]
    if name == KILLED and not native.steps(save):
        kill_after_step(command, save, KILL_AFTER)
    run(command)


def kill_after_step(command: Sequence[str], save: Path, step: int) -> None:
    """Start a training run, and send it SIGKILL once it has reported `step`."""
    show(command)
    process = subprocess.Popen(command)
    while process.poll() is None and reported_step(save) < step:
        time.sleep(0.1)
    if process.poll() not in (None, 0):
        raise subprocess.CalledProcessError(process.returncode, command)
    process.send_signal(signal.SIGKILL)
    process.wait()
    latest = native.steps(save)[-1]
    print(
        f"\n# killed after step {reported_step(save)}; resuming from the latest checkpoint, step {latest}", flush=True
    )


def reported_step(save: Path) -> int:
    """Return the last step in the run's metrics, 0 before the first report."""
    metrics = save / "metrics.jsonl"
    if not metrics.is_file():
        return 0
    lines = [line for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return int(json.loads(lines[-1])["step"]) if lines else 0


def evaluate(name: str, extension: str) -> Path:
    """Return the result file of one method with one extension; measure unless it is complete and of these weights."""
    output, checkpoint = RUNS / f"{name}_{extension}.json", RUNS / name
    weights = native.read_json(native.locate(checkpoint) / native.MANIFEST)["files"][native.WEIGHTS]["sha256"]
    if output.is_file() and measured_weights(output) == weights:
        print(f"# {output}: already measured")
        return output
    command = [sys.executable, "evaluate.py", "perplexity", "--checkpoint", str(checkpoint)]
    command += ["--windows", WINDOWS, "--stride", STRIDE, "--overwrite"]
    command += ["--label", METHODS[name] + EXTENSION_LABELS[extension], "--output", str(output)]
    for key in EXTENSIONS[extension]:
        command += ["--set", key]
    run(command)
    return output


def measured_weights(output: Path) -> str:
    """Return the checksum of the weights that a result file is of; empty if it is unusable or lacks a window."""
    try:
        result = read_record(output, PerplexityResult, "a result of `evaluate.py perplexity`")
    except EvaluationError as error:
        print(f"# {error}: measured again")
        return ""
    complete = {cell.window for cell in result.results if cell.documents == result.documents.count}
    return result.checkpoint.identity if complete == set(map(int, WINDOWS.split(","))) else ""


def run(command: Sequence[str]) -> None:
    """Print and run one command of the project."""
    show(command)
    subprocess.run(command, check=True)


def show(command: Sequence[str]) -> None:
    """Print a command as a user would type it."""
    print(f"\n$ {shlex.join(['python', *command[1:]])}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
