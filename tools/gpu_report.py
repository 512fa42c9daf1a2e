"""The first measurements on a GPU, in one page.

    python tools/gpu_report.py --output results/gpu            # or: make gpu-report
    python tools/gpu_report.py --dry-run                       # parts and commands; needs no GPU

Checks driver, compiler and one kernel first, then runs the gpu tests, the training step as train.py takes it by
default, beside transformers and GPT-NeoX's published speed, attention by method and length,
decoding, the tuner of the Triton kernels, and a pass over 32,768 tokens. Every part has a time limit. The same command
continues after an interruption: parts that were finished on this GPU with this code are not repeated, failed ones are,
and none stops the others. Exit status 1 if a part failed, 2 if the machine lacks something.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_coca.atomic_write import write_file

TEMPLATE = Path(__file__).with_suffix(".md.j2")

Figures = dict[str, float]
MODEL = "configs/350M/roformer_coca.yml"
SPEED = f"evaluate.py speed --config {MODEL} --device cuda --dtype bfloat16 --overwrite --output"
STEP = f"tools/bench_train.py {MODEL} configs/cluster/gpu1.yml train_batch_size=null gradient_accumulation_steps=1"
NEOX = "seq_length=2048 max_position_embeddings=2048 rotary_pct=0.25 gpt_j_residual=true"


class Part(NamedTuple):
    """A measurement.

    Attributes:
        command: arguments of Python, in which FILE is the file of results.
        read: the reader of its figures, which gets that file and the output.
        minutes: its time limit.
        gib: memory that it needs on the GPU.
    """

    title: str
    command: str
    read: Callable[[Path, str], Figures]
    minutes: float
    gib: float = 8.0


def read_tests(file: Path, output: str) -> Figures:
    """The numbers of passed and failed tests in pytest's report.

    Raises:
        ValueError: none passed.
    """
    root = ElementTree.parse(file).getroot()
    suites = root.iter("testsuite")
    total = failed = skipped = 0
    for suite in suites:
        total += int(suite.get("tests", 0))
        failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        skipped += int(suite.get("skipped", 0))
    if total - failed - skipped == 0:
        raise ValueError(f"no test passed ({failed} failed, {skipped} skipped)")
    return {"passed": float(total - failed - skipped), "failed": float(failed), "skipped": float(skipped)}


def read_step(file: Path, output: str) -> Figures:
    """MFU in percent, tokens per second and the ratio to transformers, by method."""
    figures = {}
    for line in file.read_text().splitlines():
        row = json.loads(line)
        figures[f"{row['method']}, tokens/s"] = row["tokens_per_second"]
        figures[f"{row['method']}, ratio to {row['ratio_to']}"] = row["ratio"]
        if row["mfu"] is not None:
            figures[f"{row['method']}, MFU %"] = 100 * row["mfu"]
    return figures


def read_speed(file: Path, output: str) -> Figures:
    """Milliseconds, and gigabytes where memory is the question, by method and length."""
    figures = {}
    for cell in json.loads(file.read_text())["results"]:
        figures[f"{cell['method']}, {cell['length']}, ms"] = 1e3 * cell["seconds"]
        if cell["peak_memory_bytes"] is not None:
            figures[f"{cell['method']}, {cell['length']}, GB"] = cell["peak_memory_bytes"] / 1e9
    return figures


def read_tuner(file: Path, output: str) -> Figures:
    """The number of rows for `CONFIGS` in megatron_coca/kernels/launch_constants.py."""
    return {"rows": float(sum(line.startswith("(") for line in output.splitlines()))}


PARTS: dict[str, Part] = {
    "tests": Part("The gpu tests", "-m pytest -m gpu tests/gpu --junitxml FILE", read_tests, 20),
    "step": Part(
        "A training step as train.py takes it, 350M, 16 x 512 tokens, beside transformers compiled",
        f"{STEP} --compile --methods rotary coca alibi none --peer transformers --rounds 30 --output FILE",
        read_step,
        15,
        70,
    ),
    "neox": Part(
        "A training step of the shape of Pythia 410M, beside GPT-NeoX's published speed",
        f"{STEP} {NEOX} train_micro_batch_size_per_gpu=16 --compile --methods rotary --rounds 20 --output FILE",
        read_step,
        10,
        40,
    ),
    "attention": Part(
        "Attention by method and length, one layer, 8 rows, forward and backward",
        f"{SPEED} FILE --what 'layer forward+backward' --lengths 512,2048,8192 --methods rotary,coca,alibi"
        " --batch-size 8",
        read_speed,
        10,
        20,
    ),
    "decode": Part(
        "Decoding one token",
        f"{SPEED} FILE --what decode --lengths 512,4096 --methods rotary,coca,alibi",
        read_speed,
        10,
    ),
    "tuner": Part("Block sizes of the Triton kernels", "-m megatron_coca.kernels.tune --head-dim 64", read_tuner, 40),
    "memory": Part(
        "One row of 32,768 tokens, the whole model, forward and backward",
        f"{SPEED} FILE --what 'model forward+backward' --lengths 32768 --methods rotary,coca --rounds 1",
        read_speed,
        10,
        45,
    ),
}
"""In the order in which they run."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the missing parts and write the page; return the exit status."""
    options = parser().parse_args(arguments)
    if options.dry_run:
        for name, part in PARTS.items():
            print(f"{name}: {part.title} ({part.minutes:g} minutes and {part.gib:g} GiB at most)")
            print(f"  {shlex.join(command_of(part, result_file(options.output, name)))}")
        return 0
    problems = preflight()
    if problems:
        print("\n".join(f"gpu_report: {problem}" for problem in problems), file=sys.stderr)
        return 2
    options.output.mkdir(parents=True, exist_ok=True)
    here, memory = gpu()
    missing = [name for name in PARTS if not reusable(read_record(options.output, name), here)]
    limit = sum(PARTS[name].minutes for name in missing)
    print(f"{here['gpu']}: {len(missing)} of {len(PARTS)} parts to run, {limit:.0f} minutes at most", file=sys.stderr)
    for name in missing:
        part = PARTS[name]
        print(f"{name}: {part.title}, {part.minutes:g} minutes at most", file=sys.stderr)
        record = measure(part, result_file(options.output, name), memory) | {"machine": here}
        write_file(options.output / f"{name}.json", json.dumps(record, indent=1))
        print(f"{name}: {record['status']} after {record['seconds']:.0f} s", file=sys.stderr)
    records = {name: read_record(options.output, name) for name in PARTS}
    page = options.output / "gpu_report.md"
    write_file(page, render(here, records))
    print(page)
    return int(any(record["status"] == "failed" for record in records.values()))


def reusable(record: dict[str, Any], here: dict[str, Any]) -> bool:
    """True if a part was finished on this GPU, with this driver, code and versions of libraries."""

    def identity(machine: dict[str, Any]) -> tuple[Any, ...]:
        boards = [(board.get("uuid"), board.get("driver_version")) for board in machine.get("nvidia-smi", [])]
        return machine.get("gpu"), machine.get("versions"), boards

    return record.get("status") == "done" and identity(record.get("machine", {})) == identity(here)


KERNEL = """
import torch
from megatron_coca.kernels.cross_entropy import cross_entropy_in_place
logits, labels = torch.randn(4, 100, device="cuda"), torch.tensor([1, 2, 3, 4], device="cuda")
expected = torch.nn.functional.cross_entropy(logits.double(), labels, reduction="none")
torch.testing.assert_close(cross_entropy_in_place(logits, labels, -1).double(), expected, rtol=1e-5, atol=1e-5)
"""
"""Compiles and runs one Triton kernel and compares its result."""


def preflight() -> list[str]:
    """What the machine lacks, each with its remedy; no part is started then."""
    import torch

    if torch.version.cuda is None:
        return [
            f"PyTorch {torch.__version__} is not a CUDA build; install one (pip install torch, without a CPU index)"
        ]
    if not torch.cuda.is_available():
        return [
            f"PyTorch {torch.__version__} for CUDA {torch.version.cuda} finds no usable GPU: run it where nvidia-smi "
            f"lists one; if it does here, its driver is older than CUDA {torch.version.cuda} needs (the header of "
            "nvidia-smi names the newest CUDA that it serves): update it, or install a PyTorch for an older CUDA"
        ]
    problems = []
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        problems.append(
            f"Triton needs {sysconfig.get_path('include')}/Python.h; install it (python3-dev, python3-devel)"
        )
    if not any(map(shutil.which, filter(None, (os.environ.get("CC"), "gcc", "clang", "cc")))):
        problems.append("Triton needs a C compiler; install gcc, or set CC")
    if problems:
        return problems
    status, output = run_limited([sys.executable, "-c", KERNEL], 300)
    return [f"a Triton kernel does not run here:\n{output[-2000:]}"] if status else []


def run_limited(command: Sequence[str], seconds: float) -> tuple[int | None, str]:
    """Exit status and output of a command, None if it was ended with all its processes at the time limit."""
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


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("results/gpu"),
        metavar="DIR",
        help="records and page (default: %(default)s)",
    )
    parser.add_argument("--dry-run", action="store_true", help="print parts and commands")
    return parser


def gpu() -> tuple[dict[str, Any], float]:
    """The machine as records describe it, and the memory of its GPU in GiB."""
    import torch

    from tools.records import machine

    return machine(), torch.cuda.get_device_properties(0).total_memory / 2**30


def result_file(folder: Path, name: str) -> Path:
    """The file that a part's command writes."""
    return folder / f"{name}_result.json"


def command_of(part: Part, file: Path) -> list[str]:
    """The command of a part."""
    return [sys.executable, *(str(file) if word == "FILE" else word for word in shlex.split(part.command))]


def measure(part: Part, file: Path, memory: float) -> dict[str, Any]:
    """Run a part on a GPU of `memory` GiB; returns its record: status, figures, seconds, and the end of its output."""
    if part.gib > memory:
        reason = f"needs {part.gib:g} GiB, the GPU has {memory:.0f}"
        return {"status": "skipped", "reason": reason, "seconds": 0.0, "figures": {}, "output": []}
    file.unlink(missing_ok=True)
    start, figures = time.monotonic(), {}
    status, output = run_limited(command_of(part, file.resolve()), 60 * part.minutes)
    file.with_suffix(".log").write_text(output)
    reason = f"exit status {status}" if status else ""
    if status is None:
        reason = f"ended at its limit of {part.minutes:g} minutes"
    try:
        figures = part.read(file, output)
    except (OSError, ValueError, LookupError, TypeError, ElementTree.ParseError) as error:
        reason = reason or f"its result cannot be read: {type(error).__name__}: {error}"
    return {
        "status": "failed" if reason else "done",
        "reason": reason,
        "seconds": time.monotonic() - start,
        "figures": figures,
        "output": output.splitlines()[-20:],
    }


def read_record(folder: Path, name: str) -> dict[str, Any]:
    """The record of a part; empty if there is none."""
    try:
        return dict(json.loads((folder / f"{name}.json").read_text()))
    except (OSError, ValueError):
        return {}


def render(machine: dict[str, Any], records: dict[str, dict[str, Any]]) -> str:
    """Return the page in Markdown."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(TEMPLATE.parent)
    environment = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    parts = [
        {"name": name, "title": part.title, "command": part.command, "record": records[name]}
        for name, part in PARTS.items()
    ]
    return environment.get_template(TEMPLATE.name).render(machine=machine, parts=parts)


if __name__ == "__main__":
    sys.exit(main())
