"""The first measurements on a GPU, in one page: expected against measured.

    python tools/gpu_report.py --output results/gpu            # or: make gpu-report
    python tools/gpu_report.py --dry-run                       # parts, commands and expectations; needs no GPU

Runs the gpu tests, the training step beside transformers and GPT-NeoX's published speed, attention by method and
length, decoding, the tuner of the Triton kernels, and a pass over 32,768 tokens. The same command continues after an
interruption: finished parts are not repeated, failed ones are, and none stops the others. Expectations are
predictions, written before anyone ran it (benchmarks/gpu_expected.json). Exit status 1 if a part failed, 2 without a
GPU.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_coca.atomic_write import write_file

EXPECTED = ROOT / "benchmarks/gpu_expected.json"
TEMPLATE = Path(__file__).with_suffix(".md.j2")
TOLERANCE = 0.25
"""Relative distance from a prediction within which a measurement is called as expected."""
SENSES: dict[str, Callable[[float, float], bool]] = {
    "about": lambda measured, expected: abs(measured - expected) <= TOLERANCE * expected,
    "at least": lambda measured, expected: measured >= expected,
    "at most": lambda measured, expected: measured <= expected,
    "exactly": lambda measured, expected: measured == expected,
}

Figures = dict[str, float]
MODEL = "configs/350M/roformer_coca.yml"
SPEED = f"evaluate.py speed --config {MODEL} --device cuda --dtype bfloat16 --overwrite --output"
STEP = f"tools/bench_train.py {MODEL} configs/cluster/gpu1.yml train_batch_size=null gradient_accumulation_steps=1"
NEOX = "seq_length=2048 max_position_embeddings=2048 rotary_pct=0.25 gpt_j_residual=true"


class Part(NamedTuple):
    """A measurement: arguments of Python, in which FILE is the file of results, and the reader of its figures, which
    gets that file and the output.
    """

    title: str
    command: str
    read: Callable[[Path, str], Figures]


def read_tests(file: Path, output: str) -> Figures:
    """The numbers of passed and failed tests on pytest's last line."""
    words = output.strip().splitlines()[-1].replace(",", " ").split()
    counts = {word: float(words[at - 1]) for at, word in enumerate(words) if at and words[at - 1].isdigit()}
    return {"passed": counts.get("passed", 0.0), "failed": counts.get("failed", 0.0) + counts.get("errors", 0.0)}


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
    """The number of rows for `CONFIGS` in megatron_coca/kernels/plan.py."""
    return {"rows": float(sum(line.startswith("(") for line in output.splitlines()))}


PARTS: dict[str, Part] = {
    "tests": Part("The gpu tests", "-m pytest -q -m gpu tests/gpu", read_tests),
    "step": Part(
        "A training step, 350M, 16 x 512 tokens, beside transformers",
        f"{STEP} --methods rotary coca alibi --peer transformers --rounds 30 --output FILE",
        read_step,
    ),
    "neox": Part(
        "A training step of the shape of Pythia 410M, beside GPT-NeoX's published speed",
        f"{STEP} {NEOX} train_micro_batch_size_per_gpu=16 --methods rotary --rounds 20 --output FILE",
        read_step,
    ),
    "attention": Part(
        "Attention by method and length, one layer, 8 rows, forward and backward",
        f"{SPEED} FILE --what 'layer forward+backward' --lengths 512,2048,8192 --methods rotary,coca,alibi"
        " --batch-size 8",
        read_speed,
    ),
    "decode": Part(
        "Decoding one token", f"{SPEED} FILE --what decode --lengths 512,4096 --methods rotary,coca,alibi", read_speed
    ),
    "tuner": Part("Block sizes of the Triton kernels", "-m megatron_coca.kernels.tune --head-dim 64", read_tuner),
    "memory": Part(
        "One row of 32,768 tokens, the whole model, forward and backward",
        f"{SPEED} FILE --what 'model forward+backward' --lengths 32768 --methods rotary,coca --rounds 1",
        read_speed,
    ),
}
"""In the order in which they run."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the missing parts and write the page; return the exit status."""
    options = parser().parse_args(arguments)
    expected = json.loads(EXPECTED.read_text())
    if options.dry_run:
        print("\n".join(plan(expected, options.output)))
        return 0
    gpu = gpu_name()
    if gpu is None:
        print(
            "gpu_report: PyTorch finds no GPU; run it where nvidia-smi lists one, with a CUDA build of PyTorch"
            " (torch.version.cuda is not None); --dry-run prints what would run",
            file=sys.stderr,
        )
        return 2
    options.output.mkdir(parents=True, exist_ok=True)
    for name, part in PARTS.items():
        if read_record(options.output, name).get("status") != "done":
            print(f"{name}: {part.title}", file=sys.stderr)
            record = measure(part, result_file(options.output, name))
            write_file(options.output / f"{name}.json", json.dumps(record, indent=1))
            print(f"{name}: {record['status']} after {record['seconds']:.0f} s", file=sys.stderr)
    records = {name: read_record(options.output, name) for name in PARTS}
    page = options.output / "gpu_report.md"
    write_file(page, render(gpu, records, expected))
    print(page)
    return int(any(record["status"] != "done" for record in records.values()))


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
    parser.add_argument("--dry-run", action="store_true", help="print parts, commands and expectations")
    return parser


def gpu_name() -> str | None:
    """PyTorch's name of the GPU; None if it finds none."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def result_file(folder: Path, name: str) -> Path:
    """The file that a part's command writes."""
    return folder / f"{name}_result.json"


def command_of(part: Part, file: Path) -> list[str]:
    """The command of a part."""
    return [sys.executable, *(str(file) if word == "FILE" else word for word in shlex.split(part.command))]


def measure(part: Part, file: Path) -> dict[str, Any]:
    """Run a part; returns its record: status, figures, seconds, and the end of its output."""
    file.unlink(missing_ok=True)
    log, start = file.with_suffix(".log"), time.monotonic()
    with log.open("w") as stream:
        status = subprocess.run(
            command_of(part, file.resolve()), cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT, check=False
        ).returncode
    output, figures = log.read_text(errors="replace"), {}
    reason = f"exit status {status}" if status else ""
    try:
        figures = part.read(file, output)
    except (OSError, ValueError, LookupError, TypeError) as error:
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


def plan(expected: dict[str, Any], folder: Path) -> list[str]:
    """Lines with the command and the expectations of every part."""
    lines = []
    for name, part in PARTS.items():
        lines += [f"{name}: {part.title}", f"  {shlex.join(command_of(part, result_file(folder, name)))}"]
        for row in expected[name]:
            values = ", ".join(f"{gpu} {value:,g}" for gpu, value in row["values"].items())
            lines.append(f"  {row['figure']}: {row['sense']} {values} ({row['from']})")
    return lines


def rows(name: str, kind: str, figures: Figures, expected: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of a part's table: expectations on this kind of GPU with their measurements, then other figures."""
    lines, left = [], dict(figures)
    for row in expected[name]:
        value, measured = row["values"].get(kind, row["values"].get("any")), figures.get(row["figure"])
        left.pop(row["figure"], None)
        verdict = "-"
        if value is not None and measured is not None:
            verdict = "yes" if SENSES[row["sense"]](measured, value) else "NO"
        lines.append(row | {"expected": value, "measured": measured, "verdict": verdict})
    return lines + [{"figure": figure, "measured": measured} for figure, measured in left.items()]


def render(gpu: str, records: dict[str, dict[str, Any]], expected: dict[str, Any]) -> str:
    """The page, in Markdown."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    from megatron_coca.training.step_time import DEVICES

    kind = next((kind for kind, device in DEVICES.items() if device.name == gpu), "other")
    loader = FileSystemLoader(TEMPLATE.parent)
    environment = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["number"] = lambda value: "-" if value is None else f"{value:,.4g}"
    parts = [
        {"name": name, "title": part.title, "command": part.command, "record": records[name]}
        | {"rows": rows(name, kind, records[name]["figures"], expected)}
        for name, part in PARTS.items()
    ]
    return environment.get_template(TEMPLATE.name).render(gpu=gpu, kind=kind, parts=parts, tolerance=TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
