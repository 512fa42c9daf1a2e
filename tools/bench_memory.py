"""Peak memory of one attention forward pass by length: CoCA through flash attention against the papers' opt_einsum
contraction.

    python tools/bench_memory.py

Every case runs in a process of its own; its memory is the peak resident size less that of the same process before
the pass.
"""

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_coca.attention import oracle  # noqa: E402
from megatron_coca.attention.backends.select import select_backend  # noqa: E402
from megatron_coca.attention.inputs import Needs  # noqa: E402
from megatron_coca.attention.method import build_method  # noqa: E402
from megatron_coca.config import load_config  # noqa: E402
from tools.records import append_records, environment  # noqa: E402

HEADS, HEAD_DIM = 4, 64
CASES = [
    ("coca", 4096),
    ("coca", 8192),
    ("coca", 16384),
    ("coca", 32768),
    ("contraction", 1024),
    ("contraction", 2048),
    ("contraction", 4096),
]
CASES += [("rotary", 16384), ("alibi", 4096), ("alibi", 16384)]


def production(name: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The method as models run it on this device."""
    keys = {
        "num_layers": 1,
        "hidden_size": HEADS * HEAD_DIM,
        "num_attention_heads": HEADS,
        "seq_length": 512,
        "pos_emb": name,
    }
    config = load_config([], keys)
    method = build_method(config.position, config.model)
    _, backend = select_backend("auto", Needs("cpu", method.bias is not None, 0.0))

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.shape[2]
        return backend.attend(method.prepare(q, k, v, method.tables(torch.arange(length), length, q.dtype)))

    return forward


def contraction(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The papers' three-operand contraction in float32."""
    return oracle.attention("coca", q, k, v, oracle.frequencies(HEAD_DIM), dtype=torch.float32)


def run_case(name: str, length: int) -> dict[str, float]:
    """Peak MiB and seconds of one forward pass, in this process."""
    forward = contraction if name == "contraction" else production(name)
    q, k, v = (torch.randn(1, HEADS, length, HEAD_DIM) for _ in range(3))
    with torch.inference_mode():
        forward(q[:, :, :64], k[:, :, :64], v[:, :, :64])  # load libraries and thread pools before the base line
        before, begun = peak_mib(), time.perf_counter()
        forward(q, k, v)
    return {"mib": peak_mib() - before, "seconds": time.perf_counter() - begun}


def peak_mib() -> float:
    """Peak resident size of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def growth(records: list[dict], name: str) -> float:
    """The exponent p of memory ~ length^p between the shortest and the longest measured length."""
    own = sorted((record["length"], record["mib"]) for record in records if record["method"] == name)
    (short, low), (long, high) = own[0], own[-1]
    return math.log(high / low) / math.log(long / short)


def main() -> None:
    """One process per case, then a table and the growth exponents."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/memory.jsonl"))
    options = parser.parse_args()
    if options.case:
        print(json.dumps(run_case(options.case[0], int(options.case[1]))))
        return
    records = []
    for name, length in CASES:
        answer = subprocess.run(
            [sys.executable, __file__, "--case", name, str(length)], capture_output=True, text=True, check=True
        )
        measured = json.loads(answer.stdout.splitlines()[-1])
        records.append(
            {
                "benchmark": "attention forward memory",
                "method": name,
                "length": length,
                "heads": HEADS,
                "head_dim": HEAD_DIM,
            }
            | measured
        )
        print(f"{name:12} {length:6} tokens {measured['mib']:8.0f} MiB {measured['seconds']:7.2f} s")
    for name in ("coca", "contraction", "alibi"):
        print(f"{name}: memory grows as length^{growth(records, name):.2f}")
    append_records(options.output, [record | environment(ROOT) for record in records])


if __name__ == "__main__":
    main()
