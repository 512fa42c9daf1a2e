"""Compare our speed with plain loops over transformers models: scoring windows, and decoding with a full cache.

    python tools/bench_evaluation.py models/smollm2 --lengths 1L
    python tools/bench_evaluation.py models/smollm2 --lengths 4L --layers 10 --rounds 1

The model is a GGUF file, a folder with a GGUF file, or a Hugging Face folder. A GGUF file is exported first, because
transformers would keep its weights quantized. Every implementation and dtype reads the folder in a process of its own,
and these processes take turns in every round:

- window: seconds to score the last --scored tokens of one input. The plain loop is from transformers'
  documentation. It ignores the labels of tokens that are not scored, and computes logits at every position. "last
  logits" computes only the logits of the scored positions, as our code does. The losses of all implementations must
  agree.
- decode: seconds for each of --tokens greedy tokens, after a cache with as many tokens as the input of "window". The
  cache is filled with random keys and values, because a prefill would take minutes.

With float32 on both sides, the arithmetic is the same. Our evaluation in bfloat16 is compared with transformers in both
dtypes, because `megatron-coca evaluate --dtype auto` selects bfloat16 if it is faster. --layers keeps only the first
layers of both models, for lengths that would take too long. The output head then has a larger share of the time.

The script appends one JSON line for each length, kind, implementation and dtype to --output.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_coca.checkpoints import open_checkpoint
from megatron_coca.checkpoints.exporting import export
from megatron_coca.checkpoints.weights import DTYPES
from megatron_coca.evaluation.multiples import in_tokens, is_multiple
from megatron_coca.evaluation.tasks.margin.measure import last_loss
from megatron_coca.support.host import keep_freed_memory
from tools.records import ChildProcess, append_records, benchmark_parser, compared

AGREEMENT = {"float32": 1e-3, "bfloat16": 0.05}
"""Dtype -> largest allowed difference from the first implementation's loss, in nats per token."""
USUAL = 10.0
"""Typical loss of a model with all layers on random tokens, in nats per token. If the loss is greater, the allowed
difference grows in proportion.
"""
OURS, THEIRS, LAST = "ours", "transformers", "transformers, last logits"

Calls = tuple[Callable[[np.ndarray, int], float], Callable[[int, int], float]]
"""Functions (tokens, number of scored tokens) -> nll, and (cached tokens, decoded tokens) -> seconds."""


def ours(path: str, dtype: str, layers: int | None) -> Calls:
    keep_freed_memory()
    model = open_checkpoint(path).load((), (), "cpu", DTYPES[dtype]).model
    del model.blocks[len(model.blocks) if layers is None else layers :]
    method = next(iter(model.methods.values()))

    def window(tokens: np.ndarray, scored: int) -> float:
        return last_loss(model, tokens, len(tokens) - 1, scored)

    @torch.inference_mode()
    def decode(cached: int, count: int) -> float:
        cache = model.new_cache(capacity=cached + count)
        del cache.layers[len(model.blocks) :]
        heads = model._config.num_kv_heads
        for layer in cache.layers:
            layer.append(*(torch.randn(1, heads, cached, method.head_dim, dtype=DTYPES[dtype]) for _ in range(2)))
        cache.positions, cache.reached = torch.arange(cached), cached
        new, start = torch.ones(1, 1, dtype=torch.int64), time.perf_counter()
        for _ in range(count):
            new = model.logits(model.hidden_states(new, cache=cache, last=1)[:, -1]).argmax(-1, keepdim=True)
        return time.perf_counter() - start

    return window, decode


def theirs(path: str, dtype: str, layers: int | None, last: bool = False) -> Calls:
    from transformers import AutoModelForCausalLM, DynamicCache  # a development requirement

    model = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype]).eval()
    del model.model.layers[len(model.model.layers) if layers is None else layers :]
    config = model.config
    heads, width = config.num_key_value_heads, getattr(config, "head_dim", None)
    width = width or config.hidden_size // config.num_attention_heads

    @torch.inference_mode()
    def window(tokens: np.ndarray, scored: int) -> float:
        if last:
            ids = torch.from_numpy(tokens[None, :-1])
            logits = model(input_ids=ids, use_cache=False, logits_to_keep=scored).logits[0].float()
            return float(torch.nn.functional.cross_entropy(logits, torch.from_numpy(tokens[-scored:]), reduction="sum"))
        ids = torch.from_numpy(tokens[None])  # the model shifts the labels itself
        labels = ids.clone()
        labels[:, :-scored] = -100
        return float(model(input_ids=ids, labels=labels, use_cache=False).loss) * scored

    @torch.inference_mode()
    def decode(cached: int, count: int) -> float:
        cache = DynamicCache(config=config)
        for number in range(len(model.model.layers)):
            keys, values = (torch.randn(1, heads, cached, width, dtype=DTYPES[dtype]) for _ in range(2))
            cache.update(keys, values, number)
        new, start = torch.ones(1, 1, dtype=torch.int64), time.perf_counter()
        for _ in range(count):
            new = model(input_ids=new, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1, keepdim=True)
        return time.perf_counter() - start

    return window, decode


WAYS: dict[str, Callable[[str, str, int | None], Calls]] = {
    OURS: ours,
    THEIRS: theirs,
    LAST: partial(theirs, last=True),
}


def serve(way: str, path: str, dtype: str, layers: int | None) -> Callable[..., tuple[float, float]]:
    """Return a function (kind, tokens, length, count) -> nll of a window (0 for decoding), and seconds."""
    window, decode = WAYS[way](path, dtype, layers)

    def call(kind: str, tokens: np.ndarray, length: int, count: int) -> tuple[float, float]:
        if kind == "decode":
            return 0.0, decode(length, count)
        start = time.perf_counter()
        nll = window(tokens[: length + 1], count)
        return nll, time.perf_counter() - start

    return call


def in_hugging_face_form(model: str, folder: Path) -> str:
    """Return `model` if it is a Hugging Face folder. Otherwise export it to `folder`, and return that folder."""
    if (Path(model) / "config.json").is_file():
        return model
    export(model, folder)
    return str(folder)


def records(options: Any, folder: str, lengths: list[int], tokens: np.ndarray) -> Iterator[dict[str, Any]]:
    """Measure and yield the records. Raises RuntimeError if losses disagree."""
    pairs = [(way, dtype) for dtype in options.dtypes for way in options.ways]
    children = {pair: ChildProcess(serve, pair[0], folder, pair[1], options.layers) for pair in pairs}
    for length in lengths:
        for kind, count in (("window", options.scored), ("decode", options.tokens)):
            used = {pair: child for pair, child in children.items() if kind == "window" or pair[0] != LAST}
            short = {pair: child(kind, tokens, min(length, 512), min(count, 256)) for pair, child in used.items()}
            # The short call also loads the kernels.
            check({pair: nll / min(count, 256) for pair, (nll, _) in short.items()})
            seconds: dict[tuple[str, str], list[float]] = {pair: [] for pair in used}
            for pair in list(used) * options.rounds:
                seconds[pair].append(used[pair](kind, tokens, length, min(count, length))[1])
            for (way, dtype), own in seconds.items():
                against = {each: seconds[THEIRS, each] for each in options.dtypes if (THEIRS, each) in seconds}
                yield {
                    "benchmark": "evaluation",
                    **{"kind": kind, "length": length, "implementation": way, "dtype": dtype},
                    **{"model": Path(options.model).name, "layers": options.layers, "count": count},
                    "tokens_per_second": (length if kind == "window" else count) / statistics.median(own),
                    **{f"against_{each}": compared(theirs, own) for each, theirs in against.items()},
                }


def check(losses: dict[tuple[str, str], float]) -> None:
    """Raise RuntimeError if losses, in nats per token, disagree."""
    expected = next(iter(losses.values()))
    for (way, dtype), loss in losses.items():
        # A model without its last layers has large losses, and its rounding errors grow in proportion.
        if abs(loss - expected) > AGREEMENT[dtype] * max(1.0, expected / USUAL):
            raise RuntimeError(f"{way}, {dtype}: the loss is {loss:.4f} nats per token, not {expected:.4f}")


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and append the records; return the exit status."""
    parser = benchmark_parser(__doc__, "evaluation.jsonl", rounds=3)
    parser.add_argument("model", help="a GGUF file, a folder with a GGUF file, or a Hugging Face folder")
    parser.add_argument(
        "--lengths", nargs="+", default=["1L", "2L"], help="tokens, or multiples such as 2L; default: %(default)s"
    )
    parser.add_argument("--dtypes", nargs="+", choices=AGREEMENT, default=list(AGREEMENT), help="default: both")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="implementations; default: all")
    parser.add_argument("--layers", type=int, help="keep only this many layers of both models")
    parser.add_argument("--scored", type=int, default=1024, help="scored tokens of a window (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=8, help="decoded tokens in one call (default: %(default)s)")
    options = parser.parse_args(arguments)
    opened = open_checkpoint(options.model, verify=False)
    trained = opened.trained.model.seq_length
    lengths = [int(in_tokens(each, trained)) if is_multiple(each) else int(each) for each in options.lengths]
    vocabulary = opened.trained.model.vocab_size or opened.trained.model.padded_vocab_size
    tokens = np.random.default_rng(0).integers(0, vocabulary, max(*lengths, 512) + 1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = in_hugging_face_form(options.model, Path(scratch, "model"))
        for record in records(options, folder, lengths, tokens):
            append_records(options.output, [record])
            known = [name for name in record if name.startswith("against_")]
            ratios = ", ".join(f"{record[name]['ratio']:.2f}x transformers in {name[8:]}" for name in known)
            named = f"{record['kind']} {record['length']}, {record['implementation']}, {record['dtype']}"
            print(f"{named}: {record['tokens_per_second']:.1f} tokens/s, {ratios}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
