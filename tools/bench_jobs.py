"""Time one evaluation of one variant at one long window with one process and with several (`--jobs`).

    python tools/bench_jobs.py                         # about four minutes on two quiet cores
    python tools/bench_jobs.py --seconds 60 --jobs 4

A random model with about 40 million parameters scores documents of random tokens with `megatron-coca evaluate
perplexity`, once with one process and once with --jobs processes. Every process has one thread. The result files must
be equal, byte by byte. The processes divide the documents among them, and each process scores the same number.

`ratio` compares the whole commands. These include the start: imports, reading the model, and printing the result.
`seconds_start` is the time of the same command when all results exist already, and `ratio_scoring` compares the times
without this start. The script appends one JSON line to --output.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_coca import load_model
from megatron_coca.data.shards import ShardWriter
from megatron_coca.evaluation.tasks.perplexity.measure import score_document, window_count
from megatron_coca.work.processes import PROGRAM
from tools.bench_families import BLOCK, write_model
from tools.records import append_records, benchmark_parser

FAMILY = "llama"


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and append the record; return the exit status."""
    parser = benchmark_parser(__doc__, "jobs.jsonl", rounds=1)
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="number of processes (default: %(default)s)")
    parser.add_argument("--window", type=int, default=4096, metavar="W", help="tokens (default: %(default)s)")
    seconds = "desired time of the scoring with one process; it sets the length of the documents"
    parser.add_argument("--seconds", type=float, default=125, help=f"{seconds} (default: %(default)s)")
    documents = "number of documents per process (default: %(default)s)"
    parser.add_argument("--documents", type=int, default=2, metavar="N", help=documents)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        found = measure(Path(scratch), options.jobs, options.window, options.seconds, options.documents, options.rounds)
    append_records(options.output, [found])
    print(
        f"one process {found['seconds_one']:.1f} s, {options.jobs} processes {found['seconds_jobs']:.1f} s: "
        f"{found['ratio']:.2f} times faster, {found['ratio_scoring']:.2f} times without the start "
        f"({found['seconds_start']:.1f} s)"
    )
    return 0


def measure(scratch: Path, jobs: int, window: int, seconds: float, documents: int, rounds: int) -> dict[str, Any]:
    """Return the record. Raises RuntimeError if the results differ."""
    model, count = scratch / "model", documents * jobs
    parameters = write_model(FAMILY, model)
    stride = window // 2
    windows = max(2, round(seconds / count / seconds_of_window(model, window, stride)))
    length = window + (windows - 1) * stride
    writer = ShardWriter(scratch / "tokens", BLOCK["vocab_size"])
    for number in range(count):
        writer.add(np.random.default_rng(number).integers(0, BLOCK["vocab_size"], length))
    writer.finish()
    line = ["--checkpoint", model, "--label", "model", "--data", scratch / "tokens", "--windows", window]
    line += ["--stride", stride, "--max-length", length, "--device", "cpu", "--dtype", "float32"]
    times: dict[str, list[float]] = {"one": [], "jobs": [], "start": []}
    for number in range(rounds):
        outputs = {"one": scratch / f"one_{number}.json", "jobs": scratch / f"jobs_{number}.json"}
        times["one"].append(timed(*line, "--output", outputs["one"]))
        times["start"].append(timed(*line, "--output", outputs["one"]))
        times["jobs"].append(timed(*line, "--output", outputs["jobs"], "--jobs", jobs))
        if outputs["one"].read_bytes() != outputs["jobs"].read_bytes():
            raise RuntimeError(f"the results of one process and of {jobs} processes differ")
    one, several, start = (min(times[name]) for name in ("one", "jobs", "start"))
    assert windows == window_count(length, window, stride)
    return {
        "benchmark": "evaluation with several processes",
        "jobs": jobs,
        "parameters": parameters,
        "window": window,
        "stride": stride,
        "documents": count,
        "document_tokens": length,
        "seconds_one": one,
        "seconds_jobs": several,
        "seconds_start": start,
        "ratio": one / several,
        "ratio_scoring": (one - start) / (several - start),
        "rounds": rounds,
    }


def seconds_of_window(model: Path, window: int, stride: int) -> float:
    """Return the time of one forward pass over a window, after a first pass that does not count."""
    loaded = load_model(model)
    tokens = np.zeros(window + stride, dtype=np.int64)
    score_document(loaded, tokens[:window], window, stride)
    begin = time.perf_counter()
    score_document(loaded, tokens, window, stride)
    return (time.perf_counter() - begin) / 2


def timed(*arguments: object) -> float:
    """Run `megatron-coca evaluate perplexity` with these arguments, and return the elapsed seconds."""
    command = [*PROGRAM, "evaluate", "perplexity", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    begin = time.perf_counter()
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - begin


if __name__ == "__main__":
    sys.exit(main())
