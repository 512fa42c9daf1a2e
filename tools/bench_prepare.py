"""Speed and memory of the preparation, side by side with Hugging Face datasets + tokenizers doing the same work.

    python tools/bench_prepare.py --megabytes 50 500
    python tools/bench_prepare.py --megabytes 100 --input wiki.jsonl.zst books.jsonl.zst

Makes a JSONL file of each size, from the text of --input or from the Python sources of this installation. Both read it,
tokenize every document with the same byte-level BPE (32,000 tokens) in as many processes, append the end-of-document
token and store the ids. Whole commands are timed, imports included, in turns. Ours also removes exact duplicates,
splits and verifies its output. Memory is the largest sum of the resident memory of all processes (proportional where it
is shared), sampled ten times a second; files in the page cache do not count.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_coca.data import read_documents
from megatron_coca.data.tokenizers.training import train_bpe
from tools.records import append_records, benchmark_parser

VOCAB_SIZE = 32_000
TOKENIZER_BYTES = 10_000_000

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


def main() -> None:
    """Measure every size, print and append the results."""
    parser = benchmark_parser(__doc__, "data.jsonl", rounds=3)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[50, 500])
    parser.add_argument("--input", type=Path, nargs="+", help="text to use instead of Python sources")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        train_bpe(limited(options.input, TOKENIZER_BYTES), VOCAB_SIZE, folder / "tokenizer.json")
        for megabytes in options.megabytes:
            append_records(options.output, measure(folder, megabytes, options))


def measure(folder: Path, megabytes: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the records of both implementations on one corpus, alternating."""
    corpus, model = folder / f"{megabytes}.jsonl", folder / "tokenizer.json"
    with corpus.open("w") as stream:
        for text in limited(options.input, megabytes * 10**6):
            stream.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    runs: dict[str, list[tuple[float, int]]] = {"ours": [], "datasets": []}
    for number in range(options.rounds):
        name, processes = f"{corpus.stem}-{number}", str(options.processes)
        ours = [ROOT / "tools/prepare_data.py", "--input", f"c={corpus}", "--output", folder / f"ours-{name}"]
        ours += ["--tokenizer-type", "HFTokenizer", "--vocab-file", model, "--workers", processes]
        runs["ours"].append(timed([sys.executable, *map(str, ours)]))
        theirs = [sys.executable, "-c", DATASETS, corpus, model, folder / f"theirs-{name}", processes]
        runs["datasets"].append(timed([*map(str, theirs)]))
    return [record(name, megabytes, runs, options) for name in runs]


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


def timed(command: list[str]) -> tuple[float, int]:
    """Return the seconds of a command, and the peak memory of its process tree in bytes."""
    start, peak = time.perf_counter(), 0
    environ = os.environ | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
        while process.poll() is None:
            peak = max(peak, tree_memory(process.pid))
            time.sleep(0.1)
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
    ratios = [other / own for own, (other, _) in zip(times, runs["datasets"], strict=True)]
    seconds = statistics.median(times)
    speed, peak, ratio = megabytes / seconds, max(memory for _, memory in runs[name]) / 2**20, statistics.median(ratios)
    print(f"{name:9} {megabytes:5} MB: {seconds:7.1f} s, {speed:6.2f} MB/s, {ratio:.2f} x datasets, {peak:,.0f} MiB")
    return {
        "benchmark": "preparation",
        "method": name,
        "megabytes": megabytes,
        "seconds": times,
        "megabytes_per_second": speed,
        "ratio": ratio,
        "ratio_to": "datasets",
        "peak_mebibytes": peak,
        "processes": options.processes,
        "input": [path.name for path in options.input] if options.input else "Python sources",
    }


if __name__ == "__main__":
    main()
