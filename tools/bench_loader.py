"""Speed of the loader, and time and memory of opening a large shard.

    python tools/bench_loader.py loader --megabytes 600
    python tools/bench_loader.py open --documents 10000000 100000000

`loader` writes two shards of random tokens, reads them once into the page cache, and prints tokens per second, the
median of several runs, with and without document boundaries. `open` writes an index of so many documents next to a
sparse `.bin` and opens it in its own process: seconds and peak memory beyond those of the imports. The shards are
written to a temporary folder (--folder for another disk) and removed. Appends one JSON line per row to --output.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_coca.data import Blend, Loader, Packing, Shard
from megatron_coca.data.shards import HEADER, MAGIC, dtype_code, shard_paths
from tools.records import append_records, benchmark_parser, last_json

_CHUNK = 1 << 20
_TOKEN = np.dtype("<u2")
PACKINGS = {
    "plain": Packing(),
    "documents": Packing(reset_attention_mask=True, reset_position_ids=True),
    "documents, loss mask": Packing(reset_attention_mask=True, reset_position_ids=True, masked_token=0),
    "attention mask alone": Packing(reset_attention_mask=True),
}
OPENING = """
import json, pathlib, sys, time
start = time.perf_counter()
from megatron_coca.data import Shard

def peak():
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))

Shard(sys.argv[1])
imported, before, start = time.perf_counter() - start, peak(), time.perf_counter()
shard = Shard(sys.argv[2])
print(json.dumps({"seconds": time.perf_counter() - start, "peak_bytes": peak() - before,
                  "import_seconds": imported, "import_peak_bytes": before}))
"""
"""Opens a shard of one document, which imports everything needed, then a large one, and prints the cost of each. Not
ru_maxrss: a process inherits that of its parent.
"""


def main() -> None:
    """Run the measurement, print and append the results."""
    parser = benchmark_parser(__doc__, "loader.jsonl")
    parser.add_argument("what", choices=MEASUREMENTS)
    parser.add_argument("--megabytes", type=int, default=600, help="size of each of the two shards (loader)")
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=256, help="samples per step")
    parser.add_argument("--steps", type=int, default=300, help="steps of each of the five runs")
    parser.add_argument("--num-workers", type=int, default=1, help="reading threads")
    parser.add_argument("--documents", type=int, nargs="+", default=[10**7, 10**8], help="sizes of the index (open)")
    parser.add_argument("--processes", type=int, default=1, help="processes that open the shard concurrently")
    parser.add_argument("--folder", type=Path, help="folder for the shards")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        append_records(options.output, list(MEASUREMENTS[options.what](Path(folder), options)))


def bench_loader(folder: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure tokens per second with every packing."""
    mean = 1000
    for name in ("text", "code"):
        make_shard(folder / name, options.megabytes * 10**6 // (mean * _TOKEN.itemsize), mean, sparse=False)
    shards = [Shard(folder / name) for name in ("text", "code")]
    blend = Blend(shards, [0.75, 0.25], options.seq_length, seed=1234)
    for path in folder.iterdir():
        path.read_bytes()
    print(f"{'packing':22} {'tokens/s':>14} {'samples/s':>12}")
    for name, packing in PACKINGS.items():
        rates = [loader_rate(blend, packing, options) for _ in range(5)]
        rate = statistics.median(rates)
        print(f"{name:22} {rate:14,.0f} {rate / options.seq_length:12,.0f}", flush=True)
        yield {
            "benchmark": "loader",
            "packing": name,
            "tokens_per_second": rate,
            "tokens_per_second_range": [min(rates), max(rates)],
            "seq_length": options.seq_length,
            "batch": options.batch,
            "steps": options.steps,
            "num_workers": options.num_workers,
            "tokens": sum(shard.len_tokens for shard in shards),
            "documents": sum(shard.documents for shard in shards),
        }


def loader_rate(blend: Blend, packing: Packing, options: argparse.Namespace) -> float:
    """Return input tokens per second of one run; its first step is not counted."""
    layout = (options.batch, options.batch, 0, 1)
    with Loader(blend, *layout, 1 << 16, packing, options.num_workers) as loader:
        loader.micro_batches(0)
        start = time.perf_counter()
        for step in range(1, options.steps + 1):
            loader.micro_batches(step)
        return options.steps * options.batch * blend.seq_length / (time.perf_counter() - start)


def bench_open(folder: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure time and memory of opening an index, each the worst of the processes."""
    print(f"{'documents':>12} {'processes':>9} {'seconds':>8} {'peak MB':>8} {'import s':>9} {'import MB':>9}")
    make_shard(folder / "one", 1, 500, sparse=True)
    for documents in options.documents:
        make_shard(folder / "many", documents, 500, sparse=True)
        command = [sys.executable, "-c", OPENING, str(folder / "one"), str(folder / "many")]
        processes = range(options.processes)
        running = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in processes]
        opened = [last_json(process.communicate()[0]) for process in running]
        worst = {name: max(costs[name] for costs in opened) for name in opened[0]}
        print(
            f"{documents:12,} {options.processes:9} {worst['seconds']:8.2f} {worst['peak_bytes'] / 1e6:8.0f} "
            f"{worst['import_seconds']:9.2f} {worst['import_peak_bytes'] / 1e6:9.0f}",
            flush=True,
        )
        yield {"benchmark": "open a shard", "documents": documents, "processes": options.processes, **worst}
        for path in shard_paths(folder / "many"):
            path.unlink()


def make_shard(prefix: Path, documents: int, mean: int, sparse: bool) -> None:
    """Write a shard of documents of 1 to 2 `mean` tokens: random ones, or zeros in a sparse file."""
    generator = np.random.default_rng(0)
    bin_path, idx_path = shard_paths(prefix)
    sizes = [min(_CHUNK, documents - begin) for begin in range(0, documents, _CHUNK)]
    lengths = [generator.integers(1, 2 * mean, size, dtype="<i4") for size in sizes]
    with idx_path.open("wb") as index:
        index.write(HEADER.pack(MAGIC, 1, dtype_code(_TOKEN), documents, documents + 1))
        index.writelines(chunk.data for chunk in lengths)
        end = 0
        for chunk in lengths:
            ends = end + np.cumsum(chunk, dtype="<i8") * _TOKEN.itemsize
            index.write((ends - chunk * _TOKEN.itemsize).data)
            end = int(ends[-1])
        for begin in range(0, documents + 1, _CHUNK):
            index.write(np.arange(begin, min(begin + _CHUNK, documents + 1), dtype="<i8").data)
    with bin_path.open("wb") as stream:
        for begin in () if sparse else range(0, end // _TOKEN.itemsize, _CHUNK):
            count = min(_CHUNK, end // _TOKEN.itemsize - begin)
            stream.write(generator.integers(0, 50000, count, dtype=_TOKEN).data)
        stream.truncate(end)


MEASUREMENTS: dict[str, Callable[[Path, argparse.Namespace], Iterator[dict[str, Any]]]] = {
    "loader": bench_loader,
    "open": bench_open,
}

if __name__ == "__main__":
    main()
