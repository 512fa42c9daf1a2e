"""Run the first measurements on a GPU, and write one page about them.

    python tools/gpu_report.py --output results/gpu            # or: make gpu-report
    python tools/gpu_report.py --dry-run                       # print parts and commands; needs no GPU

The report measures the gpu tests, the default training step of megatron-coca train (beside transformers and GPT-NeoX's
published speed), attention by method and length, decoding, and a pass over 32,768 tokens. Every part has a time limit,
and a failed part does not stop the others. After an interruption, the same command resumes: parts that were finished
on the same GPU model with the same code are not repeated. The exit status is 1 if a part failed, and 2 without a usable
GPU.
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
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_coca.support.atomic_write import write_file

MODEL = "configs/350M/roformer_coca.yml"
SPEED = f"-m megatron_coca evaluate speed --config {MODEL} --device cuda --dtype bfloat16 --overwrite --output FILE"
ONE = "train_batch_size=null gradient_accumulation_steps=1 data_types=null"
STEP = f"tools/bench_train.py {MODEL} configs/cluster/gpu1.yml {ONE}"
NEOX = "seq_length=2048 max_position_embeddings=2048 rotary_pct=0.25 gpt_j_residual=true"
SHOWN = 40
"""Number of lines that the page shows from the end of a part's output."""


class Part(NamedTuple):
    """A measurement.

    Attributes:
        command: the arguments for Python; FILE stands for the results file.
        minutes: the time limit of the part.
    """

    title: str
    command: str
    minutes: float


PARTS: dict[str, Part] = {
    "tests": Part("The gpu tests", "-m pytest -m gpu tests/gpu", 20),
    "step": Part(
        "A training step of megatron-coca train, 350M, 16 x 512 tokens, beside compiled transformers",
        f"{STEP} --compile --methods rotary coca alibi none --peer transformers --rounds 30 --output FILE",
        15,
    ),
    "neox": Part(
        "A training step with the shape of Pythia 410M, beside GPT-NeoX's published speed",
        f"{STEP} {NEOX} train_micro_batch_size_per_gpu=16 --compile --methods rotary --rounds 20 --output FILE",
        10,
    ),
    "attention": Part(
        "Attention by method and length, one layer, 8 rows, forward and backward",
        f"{SPEED} --what 'layer forward+backward' --lengths 512,2048,8192 --methods rotary,coca,alibi --batch-size 8",
        10,
    ),
    "decode": Part("Decoding one token", f"{SPEED} --what decode --lengths 512,4096 --methods rotary,coca,alibi", 10),
    "memory": Part(
        "One row of 32,768 tokens, the whole model, forward and backward",
        f"{SPEED} --what 'model forward+backward' --lengths 32768 --methods rotary,coca --rounds 1",
        10,
    ),
}
"""The parts, in the order in which they run."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the missing parts and write the page; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    output = "folder for records and the page (default: %(default)s)"
    parser.add_argument("--output", type=Path, default=Path("results/gpu"), metavar="DIR", help=output)
    parser.add_argument("--dry-run", action="store_true", help="print parts and commands")
    options = parser.parse_args(arguments)
    if options.dry_run:
        for name, part in PARTS.items():
            print(f"{name}: {part.title} ({part.minutes:g} minutes at most)")
            print(f"  {shlex.join(command_of(part, options.output / f'{name}_result.json'))}")
        return 0
    if problem := unusable():
        print(f"gpu_report: {problem}", file=sys.stderr)
        return 2
    from tools.records import machine

    here = machine()
    records: dict[str, dict[str, Any]] = {}
    options.output.mkdir(parents=True, exist_ok=True)
    for name, part in PARTS.items():
        file = options.output / f"{name}.json"
        records[name] = read_record(file)
        if not reusable(records[name], here):
            print(f"{name}: {part.title}, {part.minutes:g} minutes at most", file=sys.stderr)
            records[name] = measure(part, options.output / f"{name}_result.json") | {"machine": here}
            write_file(file, json.dumps(records[name], indent=1))
            print(f"{name}: {records[name]['status']} after {records[name]['seconds']:.0f} s", file=sys.stderr)
        write_file(options.output / "gpu_report.md", page(here, records))
    print(options.output / "gpu_report.md")
    return int(any(record["status"] != "done" for record in records.values()))


KERNEL = """
import torch
from megatron_coca.kernels.cross_entropy import cross_entropy_in_place
logits, labels = torch.randn(4, 100, device="cuda"), torch.tensor([1, 2, 3, 4], device="cuda")
expected = torch.nn.functional.cross_entropy(logits.double(), labels, reduction="none")
torch.testing.assert_close(cross_entropy_in_place(logits, labels, -1).double(), expected, rtol=1e-5, atol=1e-5)
"""
"""A program that compiles and runs one Triton kernel and checks its result."""


def unusable() -> str | None:
    """Return a message if the machine cannot run the parts, with the remedy; None if it can."""
    import torch

    if not torch.cuda.is_available():
        return (
            f"PyTorch {torch.__version__} finds no usable GPU; use a machine with one. If nvidia-smi lists one, its "
            f"driver is too old for CUDA {torch.version.cuda}, or PyTorch is not a CUDA build (None)"
        )
    status, output = run_limited([sys.executable, "-c", KERNEL], 300)
    if status == 0:
        return None
    return f"a Triton kernel does not run here; install a C compiler and Python.h (gcc, python3-dev):\n{output[-2000:]}"


def reusable(record: dict[str, Any], here: dict[str, Any]) -> bool:
    """Return True if a part was finished on this GPU model with the same code and library versions."""
    there = record.get("machine", {})
    return record.get("status") == "done" and all(there.get(key) == here[key] for key in ("gpu", "versions"))


def run_limited(command: Sequence[str], seconds: float) -> tuple[int | None, str]:
    """Return the exit status and the output of a command. At the time limit its processes are killed; status None."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return None, process.communicate()[0]
    return process.returncode, output


def command_of(part: Part, file: Path) -> list[str]:
    """Return the command of a part."""
    return [sys.executable, *(str(file) if word == "FILE" else word for word in shlex.split(part.command))]


def measure(part: Part, file: Path) -> dict[str, Any]:
    """Run a part, and return its record: status, seconds, and the end of its output."""
    file.unlink(missing_ok=True)
    start = time.monotonic()
    status, output = run_limited(command_of(part, file.resolve()), 60 * part.minutes)
    file.with_suffix(".log").write_text(output)
    ends = {0: "done", None: f"ended at its limit of {part.minutes:g} minutes"}
    return {
        "status": ends.get(status, f"failed with exit status {status}"),
        "seconds": time.monotonic() - start,
        "output": output.splitlines()[-SHOWN:],
    }


def read_record(file: Path) -> dict[str, Any]:
    """Return the record of a part, which is empty if there is no valid file."""
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, ValueError):
        return {}


def page(machine: dict[str, Any], records: dict[str, dict[str, Any]]) -> str:
    """Return the page in Markdown: the machine, and the status and output of every part."""
    boards = [", ".join(f"{key} {value}" for key, value in board.items()) for board in machine.get("nvidia-smi", [])]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = [f"# Measured on {machine['gpu']}", "", *boards, "", versions, "", "| part | status | seconds |"]
    lines += ["|---|---|---|", *(f"| {name} | {r['status']} | {r['seconds']:.0f} |" for name, r in records.items())]
    for name, record in records.items():
        lines += ["", f"## {PARTS[name].title}", "", f"`python {PARTS[name].command}`", ""]
        lines += ["```text", *record["output"], "```"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
