"""Measure the speed of data preparation, of only its last steps, and of datatrove, with one and two processes.

    python tools/bench_prepare.py --datatrove ENVIRONMENT/bin/python
    python tools/bench_prepare.py --tables

The text is Python source code of this installation in JSONL files. All methods use the same byte-level BPE. The methods
are:

    prepare 1, 2     megatron-coca prepare in 1 process, and with 2 workers
    nodes 2          two simulated nodes with one process each: --part 1/2 and 2/2 for the blocks, both again for the
                     shards, and the command that finishes the folder
    shards 1, 2      only the steps from the blocks to the shards, with 1 and 2 processes, on 20 times the text
    datatrove 1, 2   JsonlReader and DocumentTokenizer with 1 and 2 tasks, without removal of duplicates or checks

The methods take turns. Whole commands are timed, imports included; for `shards` only the steps are timed. Each record
has the seconds of all rounds, and the speed as a share of the ideal, which is the speed of one process times the number
of processes. `pip install 'megatron-coca[cluster]'` installs datatrove; --datatrove names a Python in which it is
installed. Without this option, datatrove is left out. --tables computes the tables of benchmarks/data.md from the
newest records. On two cores the defaults take about five minutes.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, cycle
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_coca.data.preparation import blocks as blocks_module
from megatron_coca.data.preparation.block_files import read_block, write_block
from megatron_coca.data.preparation.blocks import Blocks, settings_of
from megatron_coca.data.preparation.preparation_plan import CorpusSource, Execution, Rules, find_inputs
from megatron_coca.data.preparation.shard_plan import divide
from megatron_coca.data.preparation.stages import run_stages
from megatron_coca.data.preparation.workers import TokenizedChunk
from megatron_coca.data.readers.source import SourceSpec
from megatron_coca.data.tokenizers import load_tokenizer
from tools.records import append_records, benchmark_parser

VOCAB_SIZE = 32_000
TOKENIZER_BYTES = 5_000_000
FILES = 4
SHARDS = 8
"""Number of shards of the training split."""
BLOCKS = 64
"""Approximate number of blocks of the corpus. With 13 blocks, one of two nodes had seven, and the other node waited."""
LIBRARIES = ("tokenizers", "numpy", "datatrove")
DATATROVE = """
import sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer

corpus, model, output, tasks = sys.argv[1:]
if __name__ == "__main__":
    options = {"eos_token": "<|endoftext|>", "shuffle_documents": False}
    pipeline = [JsonlReader(corpus), DocumentTokenizer(output, model, local_working_dir=output + "/local", **options)]
    LocalPipelineExecutor(pipeline, tasks=int(tasks), workers=int(tasks), logging_dir=output + "/log").run()
"""
OURS = """
import sys
sys.path.insert(0, sys.argv.pop(1))
if __name__ == "__main__":
    from tools.bench_prepare import own_command
    own_command()
"""
"""A program that calls `own_command`. Its blocks are smaller than usual, because the corpus is small."""


def own_command() -> None:
    """Run `megatron-coca prepare` with blocks of argv[1] bytes, or only its last steps with `--shards`."""
    size = int(sys.argv.pop(1))
    blocks_module.BLOCK_BYTES = size, size
    if sys.argv[1] == "--shards":
        write_shards(*sys.argv[2:])
        return
    from megatron_coca.cli import main

    sys.exit(main(["prepare", *sys.argv[1:]]))


def write_shards(corpus: str, model: str, output: str, copies: str, workers: str) -> None:
    """Build all blocks and copies of them, if they are missing. Otherwise write their shards and print the seconds.

    Each copy has other digests, so that its documents do not count as duplicates.
    """
    sources, rules = [CorpusSource(SourceSpec("c", sorted(Path(corpus).glob("*.jsonl"))))], Rules(0.01, 0.01)
    tokenizer, inputs, number = load_tokenizer("HFTokenizer", model), find_inputs(sources), int(copies)
    blocks = Blocks(sources, inputs, Path(output), tokenizer, rules, settings_of(sources, tokenizer, rules, None))
    plan = blocks.plan(None)
    paths = [path.with_name(f"{copy}-{path.name}") for copy in range(number) for path, _ in plan.blocks]
    sizes = [blocks.size(block) for block in range(len(blocks))] * number
    if missing := blocks.missing():
        blocks.make(missing, Execution(int(workers), progress=False))
        for place, path in enumerate(paths):
            chunks = read_block(plan.blocks[place % len(blocks)][0])
            write_block(
                path, (_changed(unit, chunk, place // len(blocks)) for unit, chunk in chunks), lambda size: None
            )
        return
    units = len(plan.owners)
    many = replace(
        plan,
        owners=np.tile(plan.owners, number),
        blocks=[(path, plan.blocks[n % len(blocks)][1] + n // len(blocks) * units) for n, path in enumerate(paths)],
        tasks=divide(((0, block, size) for block, size in enumerate(sizes)), sum(sizes) // SHARDS),
    )
    shutil.rmtree(plan.folder, ignore_errors=True)
    start = time.perf_counter()
    run_stages(many, Execution(int(workers), progress=False))
    print(f"seconds {time.perf_counter() - start}")


def _changed(unit: int, chunk: TokenizedChunk, copy: int) -> tuple[int, TokenizedChunk]:
    return unit, replace(chunk, digests=chunk.digests ^ np.uint8(copy))


def main() -> None:
    """Measure and append the records, or print the tables."""
    parser = benchmark_parser(__doc__, "prepare.jsonl", rounds=1)
    parser.add_argument("--megabytes", type=float, default=120, help="size of the text (default: %(default)s)")
    parser.add_argument("--copies", type=int, default=20, help="copies of the text for `shards` (default: %(default)s)")
    parser.add_argument("--datatrove", metavar="PYTHON", help="a Python with datatrove")
    parser.add_argument("--tables", action="store_true", help="compute the tables from the newest records")
    options = parser.parse_args()
    if options.tables:
        print(tables([json.loads(line) for line in options.output.read_text().splitlines()]))
        return
    with tempfile.TemporaryDirectory() as scratch:
        append_records(options.output, Race(Path(scratch), options).run())


class Race:
    """Measures all methods on one corpus in a scratch folder."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self._folder, self._options = folder, options
        self._corpus, self._model = folder / "corpus", folder / "tokenizer.json"
        train_bpe(limited(TOKENIZER_BYTES), self._model)
        self._documents, self._bytes = write_corpus(self._corpus, int(options.megabytes * 10**6))
        self._blocks = folder / "blocks"  # shared by all rounds of `shards`
        on_disk = sum(path.stat().st_size for path in self._corpus.iterdir())
        self._block, self._shard_gib = on_disk // BLOCKS, on_disk / SHARDS / 2**30
        self._libraries = [libraries(sys.executable), libraries(options.datatrove) if options.datatrove else {}]
        self._python = {"PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}

    def run(self) -> list[dict[str, Any]]:
        """Return the records of all methods, measured in turns."""
        self._wait([self._shards(2)])
        methods = [(name, workers) for name in ("prepare", "shards") for workers in (1, 2)] + [("nodes", 2)]
        if self._options.datatrove:
            methods += [("datatrove", 1), ("datatrove", 2)]
        seconds: dict[tuple[str, int], list[float]] = {method: [] for method in methods}
        for number in range(self._options.rounds):
            for name, workers in methods:
                output = self._folder / f"{name}-{workers}-{number}"
                seconds[name, workers].append(getattr(self, f"_time_{name}")(output, workers))
                print(f"{name} {workers}: {seconds[name, workers][-1]:.1f} s", flush=True)
        return [self._record(name, workers, seconds) for name, workers in methods]

    def _record(self, name: str, workers: int, seconds: Mapping[tuple[str, int], list[float]]) -> dict[str, Any]:
        """Return a record. The ideal is the speed of one process times `workers`, round by round."""
        own, middle = seconds[name, workers], statistics.median(seconds[name, workers])
        copies = self._options.copies if name == "shards" else 1
        megabytes, documents = copies * self._bytes / 1e6, copies * self._documents
        one = seconds["prepare" if name == "nodes" else name, 1]
        efficiency = statistics.median(single / workers / each for single, each in zip(one, own, strict=True))
        speed = megabytes / middle
        print(
            f"{name:9} {workers}: {speed:8.2f} MB/s, {documents / middle:8.0f} documents/s, {efficiency:.2f} of ideal"
        )
        return {
            "benchmark": "prepare",
            "method": name,
            "processes": workers,
            "megabytes": megabytes,
            "documents": documents,
            "seconds": own,
            "megabytes_per_second": speed,
            "documents_per_second": documents / middle,
            "of_ideal": efficiency,
            "shards": SHARDS,
            "libraries": self._libraries[name == "datatrove"],
            "affinity": len(os.sched_getaffinity(0)),
        }

    def _time_prepare(self, output: Path, workers: int) -> float:
        return self._wait([self._prepare(output, "--workers", 0 if workers == 1 else workers)])[0]

    def _time_nodes(self, output: Path, workers: int) -> float:
        parts = [self._prepare(output, "--workers", 0, "--part", f"{part + 1}/{workers}") for part in range(workers)]
        steps = parts, parts, [self._prepare(output, "--workers", 0)]
        return sum(self._wait(commands)[0] for commands in steps)

    def _time_shards(self, output: Path, workers: int) -> float:
        return float(self._wait([self._shards(workers)])[1].split("seconds ")[1].split()[0])

    def _time_datatrove(self, output: Path, workers: int) -> float:
        output.mkdir()
        program = self._folder / "datatrove_command.py"  # a file, because the worker processes import it
        program.write_text(DATATROVE)
        line = [self._options.datatrove, program, self._corpus, self._model, output, workers]
        return self._wait([[str(word) for word in line]])[0]

    def _own(self, *arguments: object) -> list[str]:
        program = self._folder / "own_command.py"
        program.write_text(OURS)
        return [sys.executable, str(program), str(ROOT), str(self._block), *map(str, arguments)]

    def _prepare(self, output: Path, *arguments: object) -> list[str]:
        tokenizer = ("--tokenizer-type", "HFTokenizer", "--vocab-file", self._model, "--shard-gib", self._shard_gib)
        return self._own("--input", f"c={self._corpus}", "--output", output, *tokenizer, *arguments)

    def _shards(self, workers: int) -> list[str]:
        return self._own("--shards", self._corpus, self._model, self._blocks, self._options.copies, workers)

    def _wait(self, commands: Sequence[Sequence[str]]) -> tuple[float, str]:
        """Run commands at the same time. Return the seconds until all have ended, and their output."""
        start = time.perf_counter()
        with tempfile.TemporaryFile() as log:
            environment = os.environ | self._python
            running = [subprocess.Popen(line, env=environment, stdout=log, stderr=log) for line in commands]
            statuses = [process.wait() for process in running]
            seconds = time.perf_counter() - start
            log.seek(0)
            output = log.read().decode()
        if any(statuses):
            sys.exit(f"{commands[0][:3]} failed:\n{output[-3000:]}")
        return seconds, output


def libraries(python: str) -> dict[str, str]:
    """Return the versions of the libraries that a Python has."""
    found = f"{{d.name: d.version for d in m.distributions() if d.name in {LIBRARIES}}}"
    program = f"import importlib.metadata as m, json; print(json.dumps({found}))"
    return json.loads(subprocess.run([python, "-c", program], check=True, capture_output=True, text=True).stdout)


def train_bpe(texts: Iterator[str], path: Path) -> None:
    """Train a byte-level BPE like GPT-2's."""
    model = tokenizers.ByteLevelBPETokenizer()
    model.train_from_iterator(texts, VOCAB_SIZE, special_tokens=["<|endoftext|>"], show_progress=False)
    model.save(str(path))


def write_corpus(folder: Path, size: int) -> tuple[int, int]:
    """Write JSONL files with `size` bytes of text. Return (documents, bytes of text)."""
    folder.mkdir()
    streams = [(folder / f"{number}.jsonl").open("w") for number in range(FILES)]
    documents = written = 0
    for text, stream in zip(limited(size), cycle(streams), strict=False):
        stream.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
        documents, written = documents + 1, written + len(text.encode())
    for stream in streams:
        stream.close()
    return documents, written


def limited(size: int) -> Iterator[str]:
    """Yield Python sources up to `size` bytes. A repeated source begins with the number of the repetition."""
    paths = [Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib")]
    for number in count():
        for path in (path for folder in paths for path in sorted(folder.rglob("*.py"))):
            text = path.read_text(errors="ignore")[:100_000]
            if len(text) > 200:
                yield f"{number}\n{text}" if number else text
                size -= len(text.encode())
                if size <= 0:
                    return


@dataclass(frozen=True)
class Planned:
    """A corpus and the cluster that prepares it, for one row of a table.

    Attributes:
        name: the first cell of the row.
        text: bytes of text.
        disk: bytes of the compressed files.
        document: bytes of text per document.
        token: bytes per token in a shard.
        hosts: number of hosts.
    """

    name: str
    text: float
    disk: float
    document: float
    token: int
    hosts: int


PLANNED = (
    Planned("the Pile on 4 hosts", 1.3e12, 450e9, 6_000, 2, 4),
    Planned("15T tokens on 64 hosts", 60e12, 20e12, 3_000, 4, 64),
)
CORES, SHARD_GIB = 32, 8
"""Cores of a host, and `shard_gib`."""
STORAGE = 1e9
"""Bytes per second that a host can read and write on the shared storage, in total."""
BYTES_PER_TOKEN = 4
RECORD_BYTES = 24
"""Bytes of a document's record in the files of digests."""


def tables(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the Markdown table of hours, computed from the newest measured rates.

    Tokenizing takes text / (hosts x cores x rate of one process x share of the ideal with two processes). Divided
    writing takes as long as one process needs for its shards or, if that is longer, as long as the storage needs:
    blocks are read, shards are written and read again for their SHA-256, and digests are written and read.
    """
    newest = {(record["method"], record["processes"]): record for record in records}
    rate = {name: newest[name, 1]["megabytes_per_second"] * 1e6 for name in ("prepare", "shards")}
    tokenizing = 1 / (1 / rate["prepare"] - 1 / rate["shards"])  # `prepare` tokenizes and writes
    share = {name: min(1.0, newest[name, 2]["of_ideal"]) for name in ("prepare", "shards")}
    lines = [
        f"Rates of one process: tokenizing {tokenizing / 1e6:.3g} MB/s, writing {rate['shards'] / 1e6:.3g} MB/s; two "
        f"processes reach {share['prepare']:.2f} and {share['shards']:.2f} of the ideal.",
        "",
        "| corpus, hosts of 32 cores | tokenizing | writing by one process | divided writing | total |",
        "|---|---|---|---|---|",
    ]
    for each in PLANNED:
        processes, shards = each.hosts * CORES, math.ceil(each.disk / (SHARD_GIB << 30))
        moved = 3 * each.text / BYTES_PER_TOKEN * each.token + 2 * RECORD_BYTES * each.text / each.document
        tokenize = each.text / (processes * tokenizing * share["prepare"])
        shards_of_one = math.ceil(shards / processes)
        divided = shards_of_one * each.text / shards / (rate["shards"] * share["shards"])
        divided = max(divided, moved / (each.hosts * STORAGE))
        hours = [tokenize, each.text / rate["shards"], divided, tokenize + divided]
        lines.append(f"| {each.name} | " + " | ".join(_hours(seconds / 3600) for seconds in hours) + " |")
    return "\n".join(lines)


def _hours(value: float) -> str:
    return f"{value:.2g} h" if value < 99.5 else f"{value:,.0f} h"


if __name__ == "__main__":
    main()
