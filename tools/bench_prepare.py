"""Speed and memory of the preparation, side by side with Hugging Face datasets + tokenizers doing the same work.

    python tools/bench_prepare.py --megabytes 50 500
    python tools/bench_prepare.py --megabytes 100 --input wiki.jsonl.zst books.jsonl.zst

For each size a JSONL file is made, from the text of --input or from the Python sources of this installation, and both
read it, tokenize every document with the same byte-level BPE (32,000 tokens) in as many processes, append the token
that ends a document and store the ids. Whole commands are timed, imports and all; they take turns. Ours also removes
exact duplicates, divides by split and checks what it wrote. Memory is the largest sum of the resident memory of all
processes (proportional where it is shared), sampled ten times a second; files in the page cache do not count.
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

from megatron_coca.data import read_documents  # noqa: E402
from megatron_coca.data.tokenizers.training import train_bpe  # noqa: E402
from tools.records import append_records, environment  # noqa: E402

VOCAB_SIZE = 32_000
TOKENIZER_CHARACTERS = 10_000_000

DATASETS = """
import sys
from datasets import load_dataset
from tokenizers import Tokenizer

corpus, model, output, processes = sys.argv[1:]
tokenizer = Tokenizer.from_file(model)
tokenizer.encode_special_tokens = True
eod = tokenizer.token_to_id("<|endoftext|>")

def tokenize(batch):
    return {"input_ids": [[*each.ids, eod] for each in tokenizer.encode_batch_fast(batch["text"], add_special_tokens=False)]}

data = load_dataset("json", data_files=corpus, split="train", cache_dir=output)
data = data.map(tokenize, batched=True, num_proc=int(processes), remove_columns=data.column_names)
print(sum(len(ids) for ids in data.with_format("numpy")[:1000]["input_ids"]))
"""


def main() -> None:
    """Parse, measure, print, append."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[50, 500])
    parser.add_argument("--input", type=Path, nargs="+", help="text to use instead of Python sources")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/data.jsonl"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        train_bpe(limited(options.input, TOKENIZER_CHARACTERS), VOCAB_SIZE, folder / "tokenizer.json")
        for megabytes in options.megabytes:
            measured = measure(folder, megabytes, options)
            append_records(options.output, measured)


def measure(folder: Path, megabytes: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds and memory of both on one corpus, in turns."""
    corpus = write_corpus(folder / f"{megabytes}.jsonl", megabytes, options.input)
    times: dict[str, list[float]] = {"ours": [], "datasets": []}
    memory: dict[str, list[int]] = {"ours": [], "datasets": []}
    for turn in range(options.rounds):
        for name, command in commands(folder, corpus, turn, options.processes).items():
            seconds, peak = timed(command)
            times[name].append(seconds)
            memory[name].append(peak)
    return [record(name, megabytes, times, memory, options) for name in times]


def commands(folder: Path, corpus: Path, turn: int, processes: int) -> dict[str, list[str]]:
    """The two commands; each writes into a folder of its own."""
    model, name = folder / "tokenizer.json", f"{corpus.stem}-{turn}"
    ours = [str(ROOT / "tools" / "prepare_data.py"), "--input", f"c={corpus}", "--output", str(folder / f"ours-{name}")]
    ours += ["--tokenizer-type", "HFTokenizer", "--vocab-file", str(model), "--workers", str(processes)]
    theirs = ["-c", DATASETS, str(corpus), str(model), str(folder / f"theirs-{name}"), str(processes)]
    return {"ours": [sys.executable, *ours], "datasets": [sys.executable, *theirs]}


def texts(files: list[Path] | None) -> Iterator[str]:
    """Documents over and over, those of each later round with its number in front, so that none is a duplicate."""
    for turn in count():
        for text in _once(files):
            yield f"{turn}\n{text}" if turn else text


def _once(files: list[Path] | None) -> Iterator[str]:
    if files:
        yield from _interleaved([(document.text for document in read_documents(path)) for path in files])
        return
    for path in sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py")):
        text = path.read_text(errors="ignore")
        if len(text) > 200:
            yield text


def _interleaved(streams: list[Iterator[str]]) -> Iterator[str]:
    """From each stream as many characters as from the others, so that a small corpus is of the same kind as a large."""
    taken = {number: 0 for number in range(len(streams))}
    while taken:
        number = min(taken, key=taken.__getitem__)
        text = next(streams[number], None)
        if text is None:
            del taken[number]
        else:
            taken[number] += len(text)
            yield text


def limited(files: list[Path] | None, characters: int) -> Iterator[str]:
    """Documents up to a number of characters in all."""
    for text in texts(files):
        yield text
        characters -= len(text)
        if characters < 0:
            return


def write_corpus(path: Path, megabytes: int, files: list[Path] | None) -> Path:
    """A JSONL file with so many megabytes (10**6 bytes) of text."""
    with path.open("w") as stream:
        left = megabytes * 10**6
        for text in texts(files):
            stream.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            left -= len(text.encode())
            if left <= 0:
                return path
    raise AssertionError("texts never end")


def timed(command: list[str]) -> tuple[float, int]:
    """Seconds of a command, and the largest memory of its process tree in bytes."""
    begun, peak = time.perf_counter(), 0
    environ = os.environ | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
        while process.poll() is None:
            peak = max(peak, tree_memory(process.pid))
            time.sleep(0.1)
        seconds = time.perf_counter() - begun
        if process.returncode:
            log.seek(0)
            sys.exit(f"{command[:2]} failed:\n{log.read().decode()[-3000:]}")
    return seconds, peak


def tree_memory(root: int) -> int:
    """Proportional resident memory, without that of mapped files, of a process and its descendants, in bytes."""
    total, waiting = 0, [root]
    while waiting:
        pid = waiting.pop()
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            tasks = Path(f"/proc/{pid}/task").iterdir()
            waiting += [int(child) for task in tasks for child in (task / "children").read_text().split()]
        except OSError:
            continue  # ended meanwhile
        fields = dict(line.split(":") for line in rollup.splitlines()[1:])
        total += sum(int(fields[name].split()[0]) for name in ("Pss_Anon", "Pss_Shmem")) * 1024
    return total


def record(
    name: str, megabytes: int, times: dict[str, list[float]], memory: dict[str, list[int]], options: argparse.Namespace
) -> dict[str, Any]:
    """One line of the result, with the ratio of the speeds round by round."""
    ratios = [other / own for own, other in zip(times[name], times["datasets"], strict=True)]
    seconds = statistics.median(times[name])
    speed, peak, ratio = megabytes / seconds, max(memory[name]) / 2**20, statistics.median(ratios)
    print(f"{name:9} {megabytes:5} MB: {seconds:7.1f} s, {speed:6.2f} MB/s, {ratio:.2f} x datasets, {peak:,.0f} MiB")
    return {
        "benchmark": "preparation",
        "method": name,
        "megabytes": megabytes,
        "seconds": times[name],
        "megabytes_per_second": speed,
        "ratio": ratio,
        "ratio_to": "datasets",
        "peak_mebibytes": peak,
        "processes": options.processes,
        "input": [path.name for path in options.input] if options.input else "Python sources",
        **environment(ROOT),
    }


if __name__ == "__main__":
    main()
