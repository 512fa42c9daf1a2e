"""Speed and memory of whole training steps: of position methods, and of Hugging Face transformers' GPT-NeoX.

    python tools/bench_train.py CONFIG.yml [MORE.yml] [key=value ...] --methods rotary coca --peer transformers

Ours is the step that `train.py` runs, DeepSpeed included; the peer is PyTorch alone, in a process of its own, as its users
run it. On a CPU it is measured a second time with our setting of the C library, which keeps freed memory. All take
turns, step by step, on the same random tokens, so that a machine that slows down for a while slows all of them; a ratio
is the median over the rounds. One JSON line for each is appended to --output. On a GPU, with 350M parameters and bfloat16:

    python tools/bench_train.py configs/350M/roformer.yml precision=bfloat16 train_micro_batch_size_per_gpu=32 \\
        --methods rotary coca --peer transformers --compile --rounds 50
"""

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_coca.attention.inputs import BackendError  # noqa: E402
from megatron_coca.config import Config, ConfigError, load_config  # noqa: E402
from megatron_coca.data import Batch  # noqa: E402
from megatron_coca.model import LanguageModelLoss, build_model, keep_freed_memory  # noqa: E402
from megatron_coca.model.cost import flops_per_token, parameter_count, peak_flops  # noqa: E402
from megatron_coca.training import launch  # noqa: E402
from megatron_coca.training.engine import Engine, group  # noqa: E402
from megatron_coca.training.optimizer import build_optimizer  # noqa: E402
from tools.records import append_records, environment  # noqa: E402

SHAPE = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "vocab_size", "no_weight_tying")
RATE = 1e-4
MEMORY_EVENT = "[memory]"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Contestant:
    """Something that trains.

    Attributes:
        name: the position method, or the peer's name.
        config: its configuration.
        step: takes a step's micro batches and gives its loss.
        seconds: of every counted step.
        peak: the most bytes that a step held beyond what lies there between steps (weights, optimizer states).
    """

    name: str
    config: Config
    step: "Ours | Peer"
    seconds: list[float]
    peak: int = 0


def main(arguments: list[str] | None = None) -> int:
    """Parse, measure, print, append; the exit status."""
    options = parse(arguments)
    if not torch.cuda.is_available():
        keep_freed_memory()
    launch.complete_environment(os.environ)
    group.init_distributed()
    try:
        field = contestants(options)
        race(field, options)
        records = [record(each, field[0], options) for each in field]
    except (ConfigError, BackendError) as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        group.shut_down()
    append_records(options.output, records)
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", metavar="CONFIG.yml | key=value")
    parser.add_argument("--methods", nargs="+", default=["rotary", "coca"], help="values of pos_emb")
    parser.add_argument("--peer", choices=["transformers"], help="measure this too, and give ratios to it")
    parser.add_argument(
        "--compile", action="store_true", help="torch_compile=true for ours, torch.compile for the peer"
    )
    parser.add_argument("--rounds", type=int, default=20, help="counted steps of each")
    parser.add_argument("--warmup", type=int, default=5, help="steps of each before, which are not counted")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="write a trace of one step of the first method")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/train.jsonl"))
    return parser.parse_intermixed_args(arguments)


def contestants(options: argparse.Namespace) -> list[Contestant]:
    """The peer, where there is one, and the methods."""
    files = [text for text in options.inputs if "=" not in text]
    keys = [text for text in options.inputs if "=" in text]
    keys += ["torch_compile=true"] if options.compile else []
    configs = {name: load_config(files, [*keys, f"pos_emb={name}"]) for name in options.methods}
    field = [Contestant(name, config, Ours(config), []) for name, config in configs.items()]
    if options.peer:
        config = load_config(files, [*keys, "pos_emb=rotary"])
        peers = {options.peer: False} | ({} if torch.cuda.is_available() else {f"{options.peer}, memory kept": True})
        steps = {name: Peer(config, _device(), options.compile, kept) for name, kept in peers.items()}
        field = [Contestant(name, config, step, []) for name, step in steps.items()] + field
    return field


class Ours:
    """A step of the engine, as `train.py` makes it."""

    def __init__(self, config: Config) -> None:
        model = build_model(config, _device()).train()
        optimizer = build_optimizer(model, config.optimizer)
        self._engine = Engine(LanguageModelLoss(model), optimizer, config, config.batch.resolve(1))

    def __call__(self, micro_batches: list[Tensor]) -> float:
        return self._engine.train_step([Batch(samples.numpy()) for samples in micro_batches], RATE).loss

    def peak(self, micro_batches: list[Tensor]) -> int:
        return peak_bytes(lambda: self(micro_batches))


class Peer:
    """The step of `transformers_step` in a process of its own, which nothing of this project has been set up in.

    `keeps_memory` gives it our setting of the C library's allocator.
    """

    def __init__(self, config: Config, device: str, compiled: bool, keeps_memory: bool) -> None:
        peer_keys(config)  # an error is told here
        context = get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = (theirs, config, device, compiled, keeps_memory, torch.get_num_threads())
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()

    def __call__(self, micro_batches: list[Tensor]) -> float:
        return self._ask("step", micro_batches)

    def peak(self, micro_batches: list[Tensor]) -> int:
        return int(self._ask("peak", micro_batches))

    def _ask(self, what: str, micro_batches: list[Tensor]) -> float:
        self._connection.send((what, [each.numpy() for each in micro_batches]))
        return self._connection.recv()


def _serve(
    connection: Connection, config: Config, device: str, compiled: bool, keeps_memory: bool, threads: int
) -> None:
    torch.set_num_threads(threads)
    if keeps_memory:
        keep_freed_memory()
    step = transformers_step(config, device, compiled)
    answers: dict[str, Callable[[list[Tensor]], float]] = {
        "step": step,
        "peak": lambda batches: peak_bytes(lambda: step(batches)),
    }
    while True:
        try:
            what, arrays = connection.recv()
        except EOFError:
            return
        answer = answers[what]([torch.from_numpy(each) for each in arrays])
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        connection.send(answer)


def peak_bytes(call: Callable[[], object]) -> int:
    """The most bytes of tensors that were held at once during a call, beyond those before it."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        call()
    events = [each for each in run.profiler.kineto_results.events() if each.name() == MEMORY_EVENT]
    held = most = 0
    for event in sorted(events, key=lambda each: each.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def transformers_step(config: Config, device: str, compiled: bool = False) -> Callable[[list[Tensor]], float]:
    """A training step of the model of this shape: micro batches int64 [batch, length + 1] -> the mean loss.

    SDPA, fused AdamW with our numbers, clipping, no DeepSpeed. In half precision the weights and the optimizer's
    moments are half precision too, which is less work than our float32 copies are: the comparison favours the peer.

    Raises:
        ConfigError: transformers' GPT-NeoX has no such model.
    """
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM  # a development requirement

    model = GPTNeoXForCausalLM(GPTNeoXConfig(**peer_keys(config))).to(device, DTYPES[config.precision.dtype]).train()
    keys = config.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=keys.betas, eps=keys.eps, weight_decay=keys.weight_decay, fused=True
    )
    forward = torch.compile(model) if compiled else model

    def step(micro_batches: list[Tensor]) -> float:
        total = torch.zeros((), device=device)
        for samples in micro_batches:
            samples = samples.to(device, non_blocking=True)
            inputs, targets = samples[:, :-1], samples[:, 1:].contiguous()
            loss = forward(inputs, labels=inputs, shift_labels=targets, use_cache=False).loss
            (loss / len(micro_batches)).backward()
            total += loss.detach() / len(micro_batches)
        if keys.gradient_clipping > 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), keys.gradient_clipping)
        optimizer.step()
        optimizer.zero_grad()
        return float(total)

    return step


def peer_keys(config: Config) -> dict[str, Any]:
    """The arguments of GPTNeoXConfig for a model of this shape, with rotary positions.

    Raises:
        ConfigError: it has no such model.
    """
    model, position = config.model, config.position
    plain = {"norm": "layernorm", "num_kv_heads": model.num_attention_heads, "gpt_j_tied": False, "rope_scaling": None}
    flat = config.flat()
    other = [f"{key}={flat[key]}" for key, value in plain.items() if flat[key] != value]
    if other:
        raise ConfigError([f"{', '.join(other)}: transformers' GPT-NeoX has no such model; leave out --peer"])
    return {
        "vocab_size": model.padded_vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "intermediate_size": model.ffn_hidden_size,
        "hidden_act": "gelu_fast" if model.bias_gelu_fusion else model.activation,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "max_position_embeddings": model.seq_length,
        "layer_norm_eps": model.layernorm_epsilon,
        "use_parallel_residual": model.gpt_j_residual,
        "attention_bias": model.use_bias_in_attn_linear,
        "tie_word_embeddings": not model.no_weight_tying,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": float(position.rotary_emb_base),
            "partial_rotary_factor": float(position.rotary_pct),
        },
        "use_cache": False,
        "attn_implementation": "sdpa",
    }


def race(field: list[Contestant], options: argparse.Namespace) -> None:
    """Fill in the seconds and the peaks."""
    generator = torch.Generator().manual_seed(0)
    for turn in range(options.warmup + options.rounds):
        micro_batches = draw(field[0].config, generator)
        for each in field:
            seconds = timed(partial(each.step, micro_batches))
            if turn >= options.warmup:
                each.seconds.append(seconds)
    for each in field:
        each.peak = each.step.peak(micro_batches)
    if options.profile:
        first = next(each for each in field if each.name in options.methods)
        options.profile.parent.mkdir(parents=True, exist_ok=True)
        with profile(record_shapes=True) as trace:
            first.step(micro_batches)
        trace.export_chrome_trace(str(options.profile))


def draw(config: Config, generator: torch.Generator) -> list[Tensor]:
    """Random micro batches of the configured sizes, int64 [micro batch, length + 1]."""
    sizes, words = config.batch.resolve(1), config.model.padded_vocab_size
    shape = (sizes.micro, config.model.seq_length + 1)
    return [torch.randint(words, shape, generator=generator) for _ in range(sizes.accumulation)]


def timed(call: Callable[[], object]) -> float:
    """Seconds of a call, up to the end of what it started on a GPU."""
    _wait()
    begun = time.perf_counter()
    call()
    _wait()
    return time.perf_counter() - begun


def record(own: Contestant, base: Contestant, options: argparse.Namespace) -> dict[str, Any]:
    """One line of the result, with the ratio to the first contestant round by round."""
    ratios = [mine / theirs for mine, theirs in zip(own.seconds, base.seconds, strict=True)]
    seconds, config = statistics.median(own.seconds), own.config
    tokens = config.batch.resolve(1).total * config.model.seq_length
    achieved = flops_per_token(config).model * tokens / seconds
    peak = peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    utilisation = achieved / peak if peak and config.precision.dtype != "fp32" else None
    print(
        f"{own.name:14} {seconds:.4f} s a step  {tokens / seconds:10,.0f} tokens/s  {achieved / 1e9:10,.1f} GFLOP/s"
        + (f"  MFU {utilisation:.1%}" if utilisation else "")
        + f"  {own.peak / 2**20:8,.0f} MiB  {statistics.median(ratios):.3f} x {base.name}"
    )
    return {
        "benchmark": "training step",
        "method": own.name,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "flops_per_second": achieved,
        "mfu": utilisation,
        "peak_bytes": own.peak,
        "ratio": statistics.median(ratios),
        "ratio_to": base.name,
        "ratio_quartiles": statistics.quantiles(ratios, n=4) if len(ratios) > 1 else None,
        "rounds": len(ratios),
        "compiled": options.compile,
        "shape": {key: config.flat()[key] for key in SHAPE},
        "parameters": parameter_count(config).total,
        "tokens_per_step": tokens,
        "dtype": config.precision.dtype,
        **environment(ROOT),
    }


def _device() -> str:
    return group.local_device()


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
