"""Speed and memory of the preparation, side by side with other pipelines doing the same work.

    python tools/bench_prepare.py --megabytes 50 500
    python tools/bench_prepare.py --megabytes 100 --input wiki.jsonl.zst books.jsonl.zst --processes 1 \\
        --methods ours datatrove gpt-neox --gpt-neox CHECKOUT --python datatrove=A/bin/python gpt-neox=B/bin/python

Makes JSONL files of each size, one for each process, from the text of --input or from the Python sources of this
installation. All methods read them, tokenize every document with the same byte-level BPE (32,000 tokens) in as many
processes, append the end-of-document token and store the ids:

    ours       prepare_data.py, which also removes exact duplicates, splits and verifies its output
    ray        the same with --engine ray
    s3         the same from an object store (--s3 URL of a bucket) and into it
    datasets   Hugging Face datasets + tokenizers
    datatrove  its JsonlReader and DocumentTokenizer, without shuffling
    gpt-neox   tools/datasets/preprocess_data.py of a checkout, which follows Megatron-LM's

Whole commands are timed, imports included, in turns; ratios are to the last method. Memory is the largest sum of the
resident memory of all processes (proportional where it is shared), sampled once a second; files in the page cache do
not count.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import count, cycle
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_coca.data import read_documents
from megatron_coca.data.readers.remote import DataFiles
from megatron_coca.data.tokenizers.training import train_bpe
from tools.records import append_records, benchmark_parser

VOCAB_SIZE = 32_000
TOKENIZER_BYTES = 10_000_000
MEMORY_SECONDS = 1.0
"""Between two samples of the memory: the kernel walks all pages for each, also those of Ray's many processes."""

DATASETS = """
import sys
from datasets import load_dataset
from tokenizers import Tokenizer

corpus, model, output, processes = sys.argv[1:]
tokenizer = Tokenizer.from_file(model)
tokenizer.encode_special_tokens = True
eod = tokenizer.token_to_id("<|endoftext|>")

def tokenize(batch):
    encodings = tokenizer.encode_batch_fast(batch["text"], add_special_tokens=False)
    return {"input_ids": [[*encoding.ids, eod] for encoding in encodings]}

data = load_dataset("json", data_files=corpus, split="train", cache_dir=output)
data = data.map(tokenize, batched=True, num_proc=int(processes), remove_columns=data.column_names)
print(sum(len(ids) for ids in data.with_format("numpy")[:1000]["input_ids"]))
"""


DATATROVE = """
import sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer

corpus, model, output, processes = sys.argv[1:]
if __name__ == "__main__":
    options = {"eos_token": "<|endoftext|>", "shuffle_documents": False}
    pipeline = [JsonlReader(corpus), DocumentTokenizer(output, model, local_working_dir=output, **options)]
    LocalPipelineExecutor(pipeline, tasks=int(processes), workers=int(processes), logging_dir=f"{output}/log").run()
"""
METHODS = ("ours", "ray", "s3", "datasets", "datatrove", "gpt-neox")


def main() -> None:
    """Measure every size, print and append the results."""
    parser = benchmark_parser(__doc__, "data.jsonl", rounds=3)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[50, 500])
    parser.add_argument("--input", type=Path, nargs="+", help="text to use instead of Python sources")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=["ours", "datasets"], help="ratios: to the last"
    )
    parser.add_argument(
        "--python", nargs="+", default=[], metavar="METHOD=PYTHON", help="interpreters of other methods"
    )
    parser.add_argument("--gpt-neox", type=Path, metavar="CHECKOUT")
    parser.add_argument("--s3", metavar="URL", help="folder of an object store")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        train_bpe(limited(options.input, TOKENIZER_BYTES), VOCAB_SIZE, folder / "tokenizer.json")
        for megabytes in options.megabytes:
            append_records(options.output, measure(folder, megabytes, options))


def measure(folder: Path, megabytes: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the records of all methods on one corpus, alternating."""
    corpus = folder / f"{megabytes}"
    corpus.mkdir()
    files = [corpus / f"{number}.jsonl" for number in range(options.processes)]
    with ExitStack() as stack:
        streams = [stack.enter_context(path.open("w")) for path in files]
        for text, stream in zip(limited(options.input, megabytes * 10**6), cycle(streams), strict=False):
            stream.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    if options.s3:
        for path in files:
            DataFiles(options.s3).put(path, f"{megabytes}/{path.name}")
    runs: dict[str, list[tuple[float, int]]] = {name: [] for name in options.methods}
    for number in range(options.rounds):
        for name in options.methods:
            output = folder / f"{name}-{megabytes}-{number}"
            output.mkdir()
            runs[name].append(timed(command(name, files, folder / "tokenizer.json", output, options), output))
            shutil.rmtree(output)
    return [record(name, megabytes, runs, options) for name in runs]


def command(name: str, files: list[Path], model: Path, output: Path, options: argparse.Namespace) -> list[str]:
    """The command line of a method."""
    pythons, corpus, processes = dict(text.split("=", 1) for text in options.python), files[0].parent, options.processes
    python = pythons.get(name, sys.executable)
    if name in ("ours", "ray", "s3"):
        inputs, result = [f"c={path}" for path in files], f"{output}/shards"
        if name == "s3":
            inputs, result = [f"c={options.s3}/{corpus.name}"], f"{options.s3}/{output.name}"
        line = [ROOT / "tools/prepare_data.py", "--input", *inputs, "--output", result, "--tokenizer-type"]
        line += ["HFTokenizer", "--vocab-file", model, *(["--engine", "ray"] if name == "ray" else [])]
        line += [] if name == "ray" else ["--workers", processes]
    elif name == "gpt-neox":
        line = [
            options.gpt_neox.resolve() / "tools/datasets/preprocess_data.py",
            "--append-eod",
            "--workers",
            processes,
        ]
        line += ["--input", ",".join(map(str, files)), "--output-prefix", output / "shard"]
        line += ["--tokenizer-type", "HFTokenizer", "--vocab-file", model]
    elif name == "datatrove":
        (output / "command.py").write_text(DATATROVE)  # its processes import the program
        line = [output / "command.py", corpus, model, output, processes]
    else:
        line = ["-c", DATASETS, f"{corpus}/*.jsonl", model, output, processes]
    return [python, *map(str, line)]


def texts(files: list[Path] | None) -> Iterator[str]:
    """Yield documents repeatedly, those of later rounds with the round's number in front, so none is a duplicate."""
    for number in count():
        for text in _once(files):
            yield f"{number}\n{text}" if number else text


def _once(files: list[Path] | None) -> Iterator[str]:
    if files:
        yield from _interleaved([(document.text for document in read_documents(path)) for path in files])
        return
    for path in sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py")):
        text = path.read_text(errors="ignore")
        if len(text) > 200:
            yield text


def _interleaved(streams: list[Iterator[str]]) -> Iterator[str]:
    """Yield as many characters of each stream, so that a small corpus has the same mixture as a large one."""
    taken = dict.fromkeys(range(len(streams)), 0)
    while taken:
        number = min(taken, key=taken.__getitem__)
        text = next(streams[number], None)
        if text is None:
            del taken[number]
        else:
            taken[number] += len(text)
            yield text


def limited(files: list[Path] | None, size: int) -> Iterator[str]:
    """Yield documents up to a total of `size` UTF-8 bytes."""
    for text in texts(files):
        yield text
        size -= len(text.encode())
        if size <= 0:
            return


def timed(command: list[str], folder: Path) -> tuple[float, int]:
    """Return the seconds of a command run in `folder`, and the peak memory of its process tree in bytes."""
    start, peak = time.perf_counter(), 0
    environ = os.environ | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, env=environ, cwd=folder, stdout=log, stderr=log)
        while process.poll() is None:
            peak = max(peak, tree_memory(process.pid))
            with suppress(subprocess.TimeoutExpired):
                process.wait(MEMORY_SECONDS)
        seconds = time.perf_counter() - start
        if process.returncode:
            log.seek(0)
            sys.exit(f"{command[:2]} failed:\n{log.read().decode()[-3000:]}")
    return seconds, peak


def tree_memory(root: int) -> int:
    """Return the proportional resident bytes of a process and its descendants, without mapped files."""
    total, waiting = 0, [root]
    while waiting:
        pid = waiting.pop()
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            tasks = Path(f"/proc/{pid}/task").iterdir()
            waiting += [int(child) for task in tasks for child in (task / "children").read_text().split()]
        except OSError:
            continue  # has ended
        fields = dict(line.split(":") for line in rollup.splitlines()[1:])
        total += sum(int(fields[name].split()[0]) for name in ("Pss_Anon", "Pss_Shmem")) * 1024
    return total


def record(
    name: str, megabytes: int, runs: dict[str, list[tuple[float, int]]], options: argparse.Namespace
) -> dict[str, Any]:
    """Print and return one line of the result, with the ratio of the speeds round by round."""
    times = [seconds for seconds, _ in runs[name]]
    last = options.methods[-1]
    ratios = [other / own for own, (other, _) in zip(times, runs[last], strict=True)]
    seconds = statistics.median(times)
    speed, peak, ratio = megabytes / seconds, max(memory for _, memory in runs[name]) / 2**20, statistics.median(ratios)
    print(f"{name:9} {megabytes:5} MB: {seconds:7.1f} s, {speed:6.2f} MB/s, {ratio:.2f} x {last}, {peak:,.0f} MiB")
    return {
        "benchmark": "preparation",
        "method": name,
        "megabytes": megabytes,
        "seconds": times,
        "megabytes_per_second": speed,
        "ratio": ratio,
        "ratio_to": last,
        "peak_mebibytes": peak,
        "processes": options.processes,
        "input": [path.name for path in options.input] if options.input else "Python sources",
    }


if __name__ == "__main__":
    main()
