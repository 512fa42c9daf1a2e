"""How fast a start verifies the checkpoint that it resumes from, by processes and threads; and how fast digests are.

    python tools/bench_verify.py --gigabytes 4 --files 8 --folder runs

A checkpoint of random bytes is written into a temporary folder below --folder, and verified as `train.py` does it, by
one process and by several that divide the files among them. Once the files come from the page cache, once they are
dropped from it first (the disk decides then). The median of --rounds is taken. Digests are computed of a block in
memory, by one thread. One JSON line per measurement is appended to --output.
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_coca.checkpoints import native  # noqa: E402
from megatron_coca.checkpoints.state import file_name  # noqa: E402
from megatron_coca.training import engine as dist  # noqa: E402
from megatron_coca.training import launch  # noqa: E402
from megatron_coca.training.launch.environment import free_port  # noqa: E402
from megatron_coca.training.resume import verify_distributed  # noqa: E402
from tools.records import append_records, environment  # noqa: E402

DIGESTS: dict[str, Callable[[bytes], object]] = {
    "sha256": lambda data: hashlib.sha256(data).digest(),
    "sha1": lambda data: hashlib.sha1(data).digest(),
    "sha512": lambda data: hashlib.sha512(data).digest(),
    "blake2b": lambda data: hashlib.blake2b(data).digest(),
    "crc32": zlib.crc32,
}
"""What the standard library has; crc32 is no digest that tells contents apart, and shows what the rest costs."""
BLOCK = 1 << 28


def main() -> None:
    """Parse, measure, print, append."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--files", type=int, default=8, help="of state; model.safetensors is one more of the same size")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of each process")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; by default that of temporary files")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/checkpoint.jsonl"))
    parser.add_argument(
        "--measure", nargs=4, metavar=("CHECKPOINT", "THREADS", "ROUNDS", "COLD"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.measure is not None:
        folder, threads, rounds, cold = options.measure
        measure_here(Path(folder), int(threads), int(rounds), cold == "True")
        return
    records = list(digest_records(options.rounds))
    with tempfile.TemporaryDirectory(prefix="verify", dir=options.folder) as place:
        folder = write_checkpoint(Path(place), round(options.gigabytes * 1e9), options.files)
        for cold in (False, True):
            for processes in options.processes:
                for threads in options.threads:
                    records.append(measure(folder, processes, threads, options.rounds, cold))
    append_records(options.output, ({**record, **environment(ROOT)} for record in records))


def digest_records(rounds: int) -> Iterator[dict[str, Any]]:
    """The speed of each digest on one core."""
    data = os.urandom(BLOCK)
    for name, digest in DIGESTS.items():
        seconds = []
        for _ in range(rounds):
            begun = time.perf_counter()
            digest(data)
            seconds.append(time.perf_counter() - begun)
        speed = BLOCK / 1e9 / statistics.median(seconds)
        print(f"{name:10} {speed:6.2f} GB/s")
        yield {"benchmark": "digest", "digest": name, "gigabytes_per_second": speed, "seconds_rounds": seconds}


def write_checkpoint(save: Path, size: int, files: int) -> Path:
    """A checkpoint of random bytes, all large files of the same size."""
    folder = native.begin(save, 1)
    (folder / native.STATE).mkdir()
    (folder / native.RNG).mkdir()
    for path in (folder / native.WEIGHTS, *(folder / native.STATE / file_name(rank) for rank in range(files))):
        with path.open("wb") as file:
            for _ in range(size // (files + 1) >> 20):
                file.write(os.urandom(1 << 20))
    (folder / native.RNG / "rank_0.pt").write_text("")
    (folder / native.CONFIG).write_text("")
    native.write_json(folder / native.META, {"step": 1})
    return native.commit(save, 1)


def measure(folder: Path, processes: int, threads: int, rounds: int, cold: bool) -> dict[str, Any]:
    """Start processes that verify together, and read what the first one says."""
    port = str(free_port())
    started = []
    for rank in range(processes):
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} | {
            name: str(value) for name, value in variables.items()
        }
        command = [sys.executable, __file__, "--measure", str(folder), str(threads), str(rounds), str(cold)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **given}))
    outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit(f"a process ended with {[process.returncode for process in started]}")
    size, seconds = json.loads(outputs[0].splitlines()[-1])
    speed = size / 1e9 / statistics.median(seconds)
    source = "disk" if cold else "page cache"
    print(f"{source:10} {processes} process(es) of {threads} thread(s): {speed:.2f} GB/s")
    return {
        "benchmark": "verify",
        "source": source,
        "processes": processes,
        "threads_per_process": threads,
        "bytes": size,
        "files": len(native.files(folder)),
        "gigabytes_per_second": speed,
        "seconds_rounds": seconds,
    }


def measure_here(folder: Path, threads: int, rounds: int, cold: bool) -> None:
    """In one of the processes: verify again and again, and print bytes and seconds. The first round is not counted."""
    launch.complete_environment(os.environ)  # type: ignore[arg-type]
    dist.init_distributed()
    size, seconds = 0, []
    for turn in range(rounds + 1):
        if cold and dist.is_main():
            drop_from_cache(folder)
        dist.barrier()
        size, taken = verify_distributed(folder, threads=threads)
        seconds += [taken] if turn else []
    if dist.is_main():
        print(json.dumps([size, seconds]))
    dist.shut_down()


def drop_from_cache(folder: Path) -> None:
    """Let the next reads come from the disk."""
    for name in native.files(folder):
        with (folder / name).open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
