"""Compare three ways of decoding a token on the CPU: a growing cache, fixed shapes, and fixed shapes compiled.

    python tools/bench_decoding.py --methods coca
    python tools/bench_decoding.py --layers 4 --lengths 8192 --dtypes bfloat16

The model is that of configs/350M with random weights. In every round, each way decodes --tokens greedy tokens. For each
of --lengths, the cache already holds random keys and values of that many tokens. The script measures CPU time with one
thread, because other programs change it less than the elapsed time. "compile" is the CPU time by which the first call
of the compiled step exceeds a later call, including the compiler's processes. PyTorch's cache of compiled code is off.

The script appends one JSON line for each method, dtype, length and way to --output.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_coca.attention.layer import Cache
from megatron_coca.config import load_config
from megatron_coca.model import GPT, GREEDY, build_model
from megatron_coca.model.generate import TokenChoice
from megatron_coca.model.static_decoding import StaticDecoder
from megatron_coca.support.host import keep_freed_memory
from tools.gpu.speed import METHODS, MODEL
from tools.records import append_records, benchmark_parser, compared

GROWING, STATIC, COMPILED = "growing", "static", "compiled"
WAYS = (GROWING, STATIC, COMPILED)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its children that have ended."""
    return sum(os.times()[:4])


@torch.inference_mode()
def filled(model: GPT, cached: int, total: int, segments: int) -> Cache:
    """Return a cache with room for `total` tokens. It holds random keys and values of `cached` tokens."""
    cache, generator = model.new_cache(length=total, capacity=total), torch.Generator().manual_seed(0)
    config = model._config
    shape, dtype = (1, config.num_kv_heads, cached), model.embedding.word_embeddings.weight.dtype
    for layer, name in zip(cache.layers, model.layer_types, strict=True):
        width = model.methods[name].head_dim
        rows = [torch.randn(*shape, width, generator=generator).to(dtype) for _ in range(segments + 1)]
        layer.append(*rows)
    cache.positions, cache.reached = torch.arange(cached), cached
    return cache


def decoding(model: GPT, way: str, cached: int, count: int, segments: int) -> Callable[[], list[int]]:
    """Return a function that decodes `count` tokens after `cached` tokens."""
    cache, new = filled(model, cached, cached + count, segments), torch.ones(1, 1, dtype=torch.int64)

    @torch.inference_mode()
    def grow() -> list[int]:
        token, found = new, list[Tensor]()
        for _ in range(count):
            token = model.logits(model.hidden_states(token, cache=cache, last=1)[:, -1]).argmax(-1, keepdim=True)
            found.append(token)
        cache.cut(cached)
        return [int(each) for each in found]

    if way == GROWING:
        return grow
    decoder = StaticDecoder(model, cache, 1, cached + count, TokenChoice(GREEDY, None, None), past=cached)
    if way == COMPILED:
        decoder._step = torch.compile(decoder._step, dynamic=False)  # type: ignore[method-assign]

    @torch.inference_mode()
    def step() -> list[int]:
        found = [int(each[0, 0]) for each in decoder.tokens(cache, new, 0, count)]
        cache.cut(cached)
        return found

    return step


def measured(model: GPT, options: Any, cached: int, segments: int) -> Iterator[dict[str, Any]]:
    """Yield the record of each way."""
    calls, first, tokens = {}, {}, {}
    for way in options.ways:
        calls[way] = decoding(model, way, cached, options.tokens, segments)
        begun = cpu_seconds()
        tokens[way] = calls[way]()
        first[way] = cpu_seconds() - begun
    seconds: dict[str, list[float]] = {way: [] for way in calls}
    for index in range(options.rounds):
        for way in list(calls)[:: 1 if index % 2 else -1]:
            begun = time.process_time()
            calls[way]()
            seconds[way].append((time.process_time() - begun) / options.tokens)
    for way, own in seconds.items():
        record: dict[str, Any] = {"way": way, "milliseconds": 1e3 * statistics.median(own)}
        record["equal_tokens"] = sum(a == b for a, b in zip(tokens[way], tokens[options.ways[0]], strict=True))
        if way == COMPILED:
            record["compile_seconds"] = first[way] - options.tokens * statistics.median(own)
        against = {other: compared(own, seconds[other]) for other in (GROWING, STATIC) if other in seconds}
        yield record | {f"against_{other}": ratios for other, ratios in against.items() if other != way}


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and append the records; return the exit status."""
    parser = benchmark_parser(__doc__, "decoding.jsonl", rounds=6)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["coca"], help="default: %(default)s")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="default: both")
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 4096, 8192], help="default: %(default)s")
    parser.add_argument("--layers", type=int, default=24, help="layers of the model (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=4, help="tokens in one call (default: %(default)s)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="default: all")
    parser.add_argument("--keys", nargs="+", default=[], metavar="key=value", help="keys of the model")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    keep_freed_memory()
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    for name in options.methods:
        config = load_config([MODEL], options.keys).override({"num_layers": options.layers} | METHODS[name])
        for dtype in options.dtypes:
            model = build_model(config).eval().to(DTYPES[dtype])
            segments = 2 if "relative_positions" in METHODS[name] else 1
            for length in options.lengths:
                torch.compiler.reset()
                case = {"method": name, "dtype": dtype, "length": length, "layers": options.layers}
                for record in measured(model, options, length, segments):
                    append_records(options.output, [{"benchmark": "decoding", **case, **record}])
                    known = [each for each in record if each.startswith("against_")]
                    ratios = ", ".join(f"{record[each]['ratio']:.2f} of {each[8:]}" for each in known)
                    extra = f", compile {record['compile_seconds']:.0f} s" if record["way"] == COMPILED else ""
                    said = f"{name}, {dtype}, {length} cached, {record['way']}: {record['milliseconds']:.1f} ms a token"
                    print(f"{said}{', ' * bool(ratios)}{ratios}{extra}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
