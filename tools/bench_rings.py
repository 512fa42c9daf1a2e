"""Compare the CPU time of a training step in one process, with Ulysses and with ring attention.

    python tools/bench_rings.py
    python tools/bench_rings.py --length 16384 --set pos_emb=coca sliding_window_width=256

The model has 4 layers of width 256 with 8 heads. It is trained on one sequence of random tokens in float32 on the CPU,
with one thread per process. The CPU time of all processes is summed: unlike the elapsed time, it does not depend on how
many processors are free. The script appends one JSON line for each division of the sequence to --output.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_coca.config import load_config
from megatron_coca.data import Batch
from megatron_coca.model import build_model
from megatron_coca.training.engine import build_engine
from megatron_coca.training.engine import group as dist
from tools.records import append_records, benchmark_parser

KEYS: dict[str, Any] = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 8, "vocab_size": 512}
KEYS |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "train_micro_batch_size_per_gpu": 1, "train_batch_size": 1}
KEYS |= {"optimizer.params.lr": 1e-3}
DIVISIONS = ((1, 1), (2, 1), (1, 2), (4, 1), (1, 4), (2, 2))
"""Pairs of sequence_parallel_size and context_parallel_size."""


def measure(overrides: list[str], rounds: int) -> None:
    """Train as one process of a launch. Rank 0 prints the CPU seconds of every step, summed over all ranks."""
    torch.set_num_threads(1)
    dist.init_distributed()
    config = load_config([], overrides)
    model = build_model(config).train()
    sizes = config.batch.resolve(1)
    engine = build_engine(model, config, sizes)
    tokens = np.random.default_rng(0).integers(0, 512, (1, config.model.seq_length + 1))
    seconds, losses = [], []
    for _ in range(rounds + 1):
        begun = time.process_time()
        losses.append(engine.train_step([Batch(tokens, None, None, None)], 1e-3).loss)
        seconds.append(sum(used for (used,) in dist.gather_floats([time.process_time() - begun])))
    if dist.is_main():
        print(json.dumps({"seconds": seconds[1:], "loss": losses[-1]}))
    dist.shut_down()


def launched(overrides: list[str], processes: int, rounds: int) -> dict[str, Any]:
    """Launch `processes` processes with `--measure`, and return the figures that rank 0 prints."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes))
    command = [sys.executable, *launcher, __file__, "--measure", "--rounds", str(rounds), "--set", *overrides]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(overrides)}: failed; see the message below\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and append the records; return the exit status."""
    parser = benchmark_parser(__doc__, "rings.jsonl", rounds=3)
    parser.add_argument("--length", type=int, default=4096, help="tokens of the sequence (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=4, help="maximum number of processes (default: %(default)s)")
    parser.add_argument("--set", nargs="+", default=["pos_emb=coca"], metavar="KEY=VALUE", help="keys of the model")
    parser.add_argument("--measure", action="store_true", help="train as one process of a launch")
    options = parser.parse_args(arguments)
    if options.measure:
        measure(options.set, options.rounds)
        return 0
    base = 0.0
    for heads, ranks in DIVISIONS:
        if heads * ranks > options.processes:
            continue
        division = {"sequence_parallel_size": heads, "context_parallel_size": ranks}
        given = [f"{name}={value}" for name, value in (KEYS | {"seq_length": options.length} | division).items()]
        found = launched([*given, *options.set], heads * ranks, options.rounds)
        middle = statistics.median(found["seconds"])
        base = base or middle
        record = {"benchmark": "rings", "set": options.set, "length": options.length, **division, **found}
        append_records(options.output, [record | {"against_one_process": middle / base}])
        print(
            f"Ulysses {heads} x ring {ranks}: {middle:.2f} s of CPU time per step, {middle / base:.2f} of one process"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
