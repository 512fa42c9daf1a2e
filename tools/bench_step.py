"""Time of a training step of several position methods, side by side in one run: the methods take turns, step by step.

    python tools/bench_step.py configs/quickstart/roformer.yml --methods rotary coca coca_strict alibi

Prints median seconds and the ratio to the first method, and appends one JSON line per method to --output. The median
of the per-round ratios is quoted, so that a machine that slows down for a while slows all methods alike.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_coca.config import Config, load_config  # noqa: E402
from megatron_coca.data import Batch  # noqa: E402
from megatron_coca.model import LanguageModelLoss, build_model, keep_freed_memory  # noqa: E402
from megatron_coca.training import engine, launch  # noqa: E402
from megatron_coca.training.engine import Engine  # noqa: E402
from megatron_coca.training.optimizer import build_optimizer  # noqa: E402
from tools.records import append_records, environment  # noqa: E402


def main() -> None:
    """Parse, measure, print, append."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", metavar="CONFIG.yml | key=value")
    parser.add_argument("--methods", nargs="+", default=["rotary", "coca"])
    parser.add_argument("--steps", type=int, default=30, help="counted steps per method, after 3 that are not")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/step.jsonl"))
    options = parser.parse_intermixed_args()
    files = [text for text in options.inputs if "=" not in text]
    keys = [text for text in options.inputs if "=" in text]
    if not torch.cuda.is_available():
        keep_freed_memory()
    launch.complete_environment(os.environ)  # type: ignore[arg-type]
    engine.init_distributed()
    configs = {name: load_config(files, [*keys, f"pos_emb={name}"]) for name in options.methods}
    times = measure(configs, options.steps)
    append_records(options.output, [record(name, configs[name], times) for name in times])
    engine.shut_down()


def measure(configs: dict[str, Config], steps: int) -> dict[str, list[float]]:
    """Seconds of every counted step by method."""
    engines = {name: build(config) for name, config in configs.items()}
    times: dict[str, list[float]] = {name: [] for name in configs}
    generator = torch.Generator().manual_seed(0)
    for turn in range(steps + 3):
        for name, trained in engines.items():
            begun = time.perf_counter()
            trained.train_step(batches(configs[name], generator), 1e-4)
            if turn >= 3:
                times[name].append(time.perf_counter() - begun)
    return times


def build(config: Config) -> Engine:
    """A training engine as `train.py` makes it."""
    model = build_model(config, engine.local_device()).train()
    return Engine(LanguageModelLoss(model), build_optimizer(model, config.optimizer), config, config.batch.resolve(1))


def batches(config: Config, generator: torch.Generator) -> list[Batch]:
    """Random samples of the configured size."""
    sizes = config.batch.resolve(1)
    shape = (sizes.micro, config.model.seq_length + 1)
    return [
        Batch(torch.randint(0, config.model.padded_vocab_size, shape, generator=generator).numpy())
        for _ in range(sizes.accumulation)
    ]


def record(name: str, config: Config, times: dict[str, list[float]]) -> dict[str, object]:
    """One line of the result, with the ratio to the first method round by round."""
    base = next(iter(times.values()))
    ratios = sorted(own / other for own, other in zip(times[name], base, strict=True))
    tokens = config.batch.resolve(1).total * config.model.seq_length
    seconds = statistics.median(times[name])
    print(
        f"{name:12} {seconds:.4f} s a step, {tokens / seconds:,.0f} tokens/s, {statistics.median(ratios):.3f} x {next(iter(times))}"
    )
    return {
        "benchmark": "training step",
        "method": name,
        "seconds": seconds,
        "ratio": statistics.median(ratios),
        "ratio_to": next(iter(times)),
        "ratio_quartiles": statistics.quantiles(ratios, n=4),
        "steps": len(ratios),
        "shape": {
            key: config.flat()[key]
            for key in ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "vocab_size")
        },
        "tokens_per_step": tokens,
        "dtype": config.precision.dtype,
        **environment(ROOT),
    }


if __name__ == "__main__":
    main()
