"""Speed and memory of sliding-window perplexity, against the plain loop over Hugging Face transformers.

    python tools/bench_evaluation.py configs/350M/roformer.yml num_layers=4 vocab_size=50304 --windows 512 1024 2048
    4096

A random model of the configured shape is written as a Hugging Face folder; ours and transformers' GPT-NeoX read it and
score the same windows of the same random document, each in its own process, alternating. The plain loop is that of the
transformers documentation: one window at a time, labels ignored outside the scored tokens, logits of every position. On
a CPU it is measured a second time with our setting of the C library, which keeps freed memory. The negative
log-likelihoods must agree to 1e-4 per token. Appends one JSON line per window and implementation to --output.
"""

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_coca import load_model
from megatron_coca.config import Config, ConfigError
from megatron_coca.evaluation.perplexity import plan_windows, score_document
from megatron_coca.evaluation.results import measured, resident_memory
from megatron_coca.model import keep_freed_memory
from tools.bench_train import peer_keys
from tools.records import ChildProcess, append_records, benchmark_parser, load_inputs, quartiles

AGREEMENT = 1e-4
"""Largest difference between two implementations, in nats per token."""

SHAPE = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "vocab_size")

Scorer = Callable[[np.ndarray, int, int], float]
"""(tokens, window, stride) -> sum of the negative log-likelihoods."""


class Pass(NamedTuple):
    """One pass over the document with one window size."""

    nll: float
    seconds: float
    peak_memory_bytes: int


def ours(folder: Path, device: str) -> Scorer:
    """Return the scorer of `evaluate.py perplexity`."""
    if device == "cpu":
        keep_freed_memory()
    model = load_model(folder, device=device)
    return lambda tokens, window, stride: score_document(model, tokens, window, stride).nll


def plain_loop(folder: Path, device: str) -> Scorer:
    """Return a scorer that runs transformers' model window by window, with all logits."""
    from transformers import AutoModelForCausalLM  # a development requirement

    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = model.to(device).eval()

    @torch.no_grad()
    def score(tokens: np.ndarray, window: int, stride: int) -> float:
        total = 0.0
        for span in plan_windows(len(tokens), window, stride):
            # The model shifts the labels itself, so its inputs include the token that the last position predicts.
            inputs = torch.from_numpy(tokens[None, span.start : max(span.end, span.start + window)]).to(device)
            labels = inputs.clone()
            labels[:, : span.first_scored - span.start] = -100
            scored = int((labels[:, 1:] != -100).sum())
            total += float(model(input_ids=inputs, labels=labels, use_cache=False).loss) * scored
        return total

    return score


def kept_memory_loop(folder: Path, device: str) -> Scorer:
    """Return `plain_loop` with our setting of the allocator."""
    keep_freed_memory()
    return plain_loop(folder, device)


IMPLEMENTATIONS: dict[str, Callable[[Path, str], Scorer]] = {
    "ours": ours,
    "transformers": plain_loop,
    "transformers, memory kept": kept_memory_loop,
}


def measured_scorer(name: str, folder: Path, device: str) -> Callable[[np.ndarray, int, int], Pass]:
    """Return the named implementation with time and memory of every pass, to be called in a process of its own."""
    scorer = IMPLEMENTATIONS[name](folder, device)
    loaded = resident_memory() or 0

    def score(tokens: np.ndarray, window: int, stride: int) -> Pass:
        # The process may still hold memory that an earlier pass freed: on the CPU, count from the loaded model.
        kept = (resident_memory() or 0) - loaded if device == "cpu" else 0
        with measured(torch.device(device)) as meter:
            nll = scorer(tokens, window, stride)
        return Pass(nll, meter.seconds, kept + (meter.peak_memory_bytes or 0))

    return score


def write_model(config: Config, folder: Path) -> None:
    """Write a random GPT-NeoX of the configured shape as a Hugging Face folder. Raises ConfigError for other shapes."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(0)
    GPTNeoXForCausalLM(GPTNeoXConfig(**peer_keys(config))).save_pretrained(folder)


def measure_window(
    scorers: dict[str, ChildProcess], tokens: np.ndarray, window: int, options: argparse.Namespace
) -> dict[str, list[Pass]]:
    """Return the passes of every implementation, alternating; a first one of each is not counted.

    Raises:
        RuntimeError: two implementations disagree.
    """
    passes: dict[str, list[Pass]] = {name: [] for name in scorers}
    for number in range(1 + options.rounds):
        for name, scorer in scorers.items():
            scored = scorer(tokens, window, options.stride)
            passes[name] += [scored] if number else []
    nlls = {name: scored[0].nll / (len(tokens) - 1) for name, scored in passes.items()}
    if max(nlls.values()) - min(nlls.values()) > AGREEMENT:
        raise RuntimeError(f"window {window}: the implementations disagree: {nlls}")
    return passes


def record(
    name: str, passes: dict[str, list[Pass]], base: str, window: int, tokens: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Print and return one line of the result; the ratio of speeds is taken round by round."""
    own = passes[name]
    ratios = [theirs.seconds / mine.seconds for mine, theirs in zip(own, passes[base], strict=True)]
    seconds = statistics.median(scored.seconds for scored in own)
    peak = max(scored.peak_memory_bytes for scored in own)
    print(
        f"window {window:6}  {name:26} {tokens / seconds:9,.0f} scored tokens/s  {peak / 2**20:8,.0f} MiB  "
        f"{statistics.median(ratios):.2f} x {base}",
        flush=True,
    )
    return {
        "benchmark": "sliding-window perplexity",
        "method": name,
        "window": window,
        "stride": options.stride,
        "tokens_scored": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "speed_ratio": statistics.median(ratios),
        "speed_ratio_quartiles": quartiles(ratios),
        "ratio_to": base,
        "rounds": len(own),
        "peak_memory_bytes": peak,
        "nll": own[0].nll / tokens,
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure every window and implementation, print and append the results; return the exit status."""
    parser = benchmark_parser(__doc__, "evaluation.jsonl", rounds=5, inputs=True)
    parser.add_argument("--windows", nargs="+", type=int, default=[512, 1024, 2048, 4096])
    parser.add_argument("--stride", type=int, default=512)
    parser.add_argument("--length", type=int, default=8192, help="tokens of the document")
    parser.add_argument("--contestants", nargs="+", choices=IMPLEMENTATIONS, help="default: all for this device")
    options = parser.parse_intermixed_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = options.contestants or [name for name in IMPLEMENTATIONS if device == "cpu" or "kept" not in name]
    base = names[1] if len(names) > 1 else names[0]
    try:
        config = load_inputs(options.inputs)
        with tempfile.TemporaryDirectory() as folder:
            write_model(config, Path(folder))
            scorers = {name: ChildProcess(measured_scorer, name, Path(folder), device) for name in names}
            tokens = np.random.default_rng(0).integers(0, config.model.padded_vocab_size, options.length)
            shared = {"shape": {key: config.flat()[key] for key in SHAPE}, "dtype": "float32"}
            for window in options.windows:
                passes = measure_window(scorers, tokens, window, options)
                records = [record(name, passes, base, window, len(tokens) - 1, options) | shared for name in names]
                append_records(options.output, records)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
