"""Speed and memory of sliding-window perplexity, against the plain loop over Hugging Face transformers.

    python tools/bench_evaluation.py configs/350M/roformer.yml num_layers=4 vocab_size=50304 --windows 512 1024 2048 4096

A random model of the configured shape is written as a Hugging Face folder; ours and transformers' GPT-NeoX read it and
score the same windows of the same random document, each in a process of its own, in turns. The plain loop is what the
transformers documentation shows: one window at a time, labels that are ignored outside the scored tokens, logits of
every position. On a CPU it is measured a second time with our setting of the C library, which keeps freed memory. The
sums of the negative log-likelihoods must agree to 1e-4 a token. One JSON line for each is appended to --output.
"""

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.bench_peer import peer_keys  # noqa: E402

from megatron_coca import load_config, load_model  # noqa: E402
from megatron_coca.config import Config, ConfigError  # noqa: E402
from megatron_coca.evaluation.perplexity import plan_windows, score_document  # noqa: E402
from megatron_coca.evaluation.results import measured, resident_memory  # noqa: E402
from megatron_coca.model import keep_freed_memory  # noqa: E402
from tools.records import append_records, environment  # noqa: E402

AGREEMENT = 1e-4
"""The most by which two implementations may differ, in nats a token."""

SHAPE = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "vocab_size")

Scorer = Callable[[np.ndarray, int, int], float]


class Scored(NamedTuple):
    """One pass over the document with one window size."""

    nll: float
    seconds: float
    peak_memory_bytes: int


def ours(folder: Path, device: str) -> Scorer:
    """What `evaluate.py perplexity` does to a document."""
    if device == "cpu":
        keep_freed_memory()
    model = load_model(folder, device=device)
    return lambda tokens, window, stride: score_document(model, tokens, window, stride).nll


def plain_loop(folder: Path, device: str) -> Scorer:
    """Transformers' model, window by window, with all logits."""
    from transformers import GPTNeoXForCausalLM  # a development requirement

    model = GPTNeoXForCausalLM.from_pretrained(folder).to(device).eval()

    @torch.no_grad()
    def score(tokens: np.ndarray, window: int, stride: int) -> float:
        total = 0.0
        for each in plan_windows(len(tokens), window, stride):
            # The model shifts labels by one itself, and so reads the token that the last position predicts too.
            read = torch.from_numpy(tokens[None, each.start : max(each.end, each.start + window)]).to(device)
            labels = read.clone()
            labels[:, : each.first_scored - each.start] = -100
            scored = int((labels[:, 1:] != -100).sum())
            total += float(model(input_ids=read, labels=labels, use_cache=False).loss) * scored
        return total

    return score


def kept_memory_loop(folder: Path, device: str) -> Scorer:
    """As `plain_loop`, with our setting of the allocator."""
    keep_freed_memory()
    return plain_loop(folder, device)


CONTESTANTS: dict[str, Callable[[Path, str], Scorer]] = {
    "ours": ours,
    "transformers": plain_loop,
    "transformers, memory kept": kept_memory_loop,
}


class Contestant:
    """One implementation in a process of its own."""

    def __init__(self, name: str, folder: Path, device: str) -> None:
        context = get_context("spawn")
        self.name = name
        self._connection, theirs = context.Pipe()
        arguments = (theirs, name, folder, device, torch.get_num_threads())
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()

    def score(self, tokens: np.ndarray, window: int, stride: int) -> Scored:
        """One pass, measured where it is made."""
        self._connection.send((tokens, window, stride))
        return self._connection.recv()


def _serve(connection: Connection, name: str, folder: Path, device: str, threads: int) -> None:
    torch.set_num_threads(threads)
    scorer = CONTESTANTS[name](folder, device)
    loaded = resident_memory() or 0
    while True:
        try:
            tokens, window, stride = connection.recv()
        except EOFError:
            return
        # What an earlier pass freed may still be the process's: on the CPU, memory is counted from the loaded model on.
        kept = (resident_memory() or 0) - loaded if device == "cpu" else 0
        with measured(torch.device(device)) as meter:
            nll = scorer(tokens, window, stride)
        connection.send(Scored(nll, meter.seconds, kept + (meter.peak_memory_bytes or 0)))


def write_model(config: Config, folder: Path) -> None:
    """A random GPT-NeoX of the configured shape as a Hugging Face folder. Raises ConfigError for other shapes."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(0)
    GPTNeoXForCausalLM(GPTNeoXConfig(**peer_keys(config))).save_pretrained(folder)


def measure_window(
    field: list[Contestant], tokens: np.ndarray, window: int, options: argparse.Namespace
) -> dict[str, list[Scored]]:
    """Every contestant's passes, taken in turns; a first one of each is not counted.

    Raises RuntimeError where two implementations disagree.
    """
    passes: dict[str, list[Scored]] = {each.name: [] for each in field}
    for turn in range(1 + options.rounds):
        for each in field:
            scored = each.score(tokens, window, options.stride)
            passes[each.name] += [scored] if turn else []
    nlls = {name: found[0].nll / (len(tokens) - 1) for name, found in passes.items()}
    if max(nlls.values()) - min(nlls.values()) > AGREEMENT:
        raise RuntimeError(f"window {window}: the implementations disagree: {nlls}")
    return passes


def record(
    name: str, passes: dict[str, list[Scored]], base: str, window: int, tokens: int, options: argparse.Namespace
) -> dict[str, Any]:
    """One line of the result; the ratio of speeds is taken round by round."""
    own = passes[name]
    ratios = [theirs.seconds / mine.seconds for mine, theirs in zip(own, passes[base], strict=True)]
    seconds = statistics.median(each.seconds for each in own)
    peak = max(each.peak_memory_bytes for each in own)
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
        "speed_ratio_quartiles": statistics.quantiles(ratios, n=4) if len(ratios) > 1 else None,
        "ratio_to": base,
        "rounds": len(own),
        "peak_memory_bytes": peak,
        "nll": own[0].nll / tokens,
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", metavar="CONFIG.yml | key=value")
    parser.add_argument("--windows", nargs="+", type=int, default=[512, 1024, 2048, 4096])
    parser.add_argument("--stride", type=int, default=512)
    parser.add_argument("--length", type=int, default=8192, help="tokens of the document")
    parser.add_argument("--rounds", type=int, default=5, help="counted passes of each")
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, help="default: all that make sense")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/evaluation.jsonl"))
    return parser.parse_intermixed_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Parse, measure, print, append; the exit status."""
    options = parse(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = options.contestants or [name for name in CONTESTANTS if device == "cpu" or "kept" not in name]
    try:
        files = [text for text in options.inputs if "=" not in text]
        config = load_config(files, [text for text in options.inputs if "=" in text])
        with tempfile.TemporaryDirectory() as folder:
            write_model(config, Path(folder))
            field = [Contestant(name, Path(folder), device) for name in names]
            tokens = np.random.default_rng(0).integers(0, config.model.padded_vocab_size, options.length)
            for window in options.windows:
                passes = measure_window(field, tokens, window, options)
                base = names[1] if len(names) > 1 else names[0]
                lines = [record(name, passes, base, window, len(tokens) - 1, options) for name in names]
                shared = {"shape": {key: config.flat()[key] for key in SHAPE}, "dtype": "float32"} | environment(ROOT)
                append_records(options.output, [line | shared for line in lines])
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
