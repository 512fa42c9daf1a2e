"""Measurements on the stand-in device, each a function from a configuration to counters.

Every measurement joins a process group and changes global state, so each has a process of its own (`isolated`).
"""

import contextlib
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics

from megatron_coca.attention.inputs import BackendError
from megatron_coca.config import Config, ConfigError, load_config
from megatron_coca.data import Batch
from megatron_coca.model import LanguageModelLoss, Sampling, build_model, static_decoding
from megatron_coca.model.generate import TokenChoice
from megatron_coca.training import launch, run
from megatron_coca.training.engine import NativeEngine, build_engine, group, passes, state
from megatron_coca.training.engine.deepspeed_engine import DeepSpeedEngine
from tests.pretend import order
from tests.pretend.build import BUILT
from tests.pretend.device import Record, recording
from tests.pretend.scenarios import COMPILED_BACKENDS
from tests.pretend.traffic import MATRIX_PRODUCTS, measured_bytes
from tools.bench_train import ENGINES

Counters = dict[str, float]

MICRO, LENGTH = 16, 512
"""The micro-batch of the scenarios: 8,192 tokens."""
WARMUP = 2
"""Uncounted steps: the first ones allocate memory and build tables."""
REPORTED = 10
"""Steps of the training loop that are counted together: one of them reports, as `log_interval` is 10."""
RATE = 1e-4
GB = 1e9
BYTES = "bytes of "
VIEWS = frozenset({"permute", "reshape", "split", "convert_element_type"})
"""Operations of a compiled kernel that say nothing about its work."""


def prepare(ranks: int = 1) -> None:
    """Join a process group as rank 0 of `ranks`, the others being imitated, and leave out what cannot work here.

    `in_known_order` compares values that kernels would have computed: the only check of the training path that fails on
    the stand-in device, because the copies of the weights in other dtypes were never filled.
    """
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    state.in_known_order = lambda optimizer: True
    if ranks > 1:  # no other process answers: nothing to join, no barrier over the store, nothing said to the others
        group.anyone = lambda flags, *_: tuple(flags)
        group.join = lambda *arguments: torch.distributed.HashStore()  # type: ignore[assignment]
        torch.distributed.distributed_c10d._store_based_barrier = lambda *arguments, **options: None
    launch.complete_environment(os.environ)


def load(inputs: Sequence[str], *keys: str) -> Config:
    """Load YAML files and `key=value` pairs, in any order, then `keys`."""
    pairs = [text for text in inputs if "=" in text]
    return load_config([text for text in inputs if "=" not in text], [*pairs, *keys])


def engine_step(config: Config, ranks: int = 1) -> Callable[[], object]:
    """Return one optimizer step of the engine that `train.py` uses, on random tokens."""
    model = build_model(config, group.local_device()).train()
    sizes = config.batch.resolve(ranks)
    engine = build_engine(model, config, sizes)
    tokens = np.random.default_rng(0).integers(config.model.vocab_size, size=(sizes.micro, config.model.seq_length + 1))
    return lambda: engine.train_step([Batch(tokens) for _ in range(sizes.accumulation)], RATE)


def warmup_of(config: Config) -> int:
    """Steps before a recorded one: a captured pass is a graph only after some micro-batches."""
    return passes.WARMUP + 1 if config.parallel.cuda_graphs else WARMUP


def recorded(call: Callable[[], object], log: bool = False, warmup: int = WARMUP) -> tuple[Record, float]:
    """Record a call after `warmup` calls; also returns the milliseconds that the host worked.

    What the warm-up captures into CUDA graphs, and what it is refused, is recorded too.
    """
    with recording() as before:
        for _ in range(warmup):
            call()
    torch.cuda.synchronize()
    with recording(log) as record:
        start = time.process_time()
        call()
        seconds = time.process_time() - start
    for (kind, name), count in before.counts.items():
        if kind in ("captured", "refused"):
            record.counts[kind, name] += count
    return record, 1e3 * seconds


def waits(record: Record) -> Counters:
    """Waits of the host by what it waits for; one for an event that was recorded a step ago is short."""
    return {
        "device waits": record.total("wait", "cudaDeviceSynchronize"),
        "stream waits": record.total("wait", "cudaStreamSynchronize", "cudaMemcpy"),
        "event waits": record.total("wait", "cudaEventSynchronize"),
        "pageable copies": record.total("pageable"),
    }


def step(inputs: Sequence[str]) -> Counters:
    """One step of the engine: counts per micro-batch, and of the rest of the step, which is the optimizer phase.

    A micro-batch is the difference between steps of two and of one. The first one launches less, because it adds to no
    gradients: it is counted as the model alone.
    """
    prepare()
    group.init_distributed()
    config = load(inputs, f"train_batch_size={MICRO}")
    one, _ = recorded(engine_step(config))
    two, milliseconds = recorded(engine_step(load(inputs, f"train_batch_size={2 * MICRO}")))
    print(two.text())
    counts: Counters = {}
    step, both = ({"launches": record.total("launch"), **waits(record)} for record in (one, two))
    each = {name: both[name] - step[name] for name in step}
    alone, _ = recorded(model_pass(config))
    first = {"launches": alone.total("launch"), **waits(alone)}
    for name in step:
        counts |= {f"{name} per micro-batch": each[name], f"{name} per step": step[name] - first[name]}
    return counts | {
        "allocations": two.total("allocation"),
        "refused": two.total("refused"),
        "host ms of two micro-batches and a step": round(milliseconds, 1),
    }


def engines(inputs: Sequence[str], rounds: int = 25) -> dict[str, tuple[int, float]]:
    """Return the launches of a step and its least milliseconds of CPU time for each engine. They take turns."""
    prepare()
    group.init_distributed()
    steps = {name: engine_step(load(inputs, *keys)) for name, keys in ENGINES.items()}
    launches = {name: recorded(step, warmup=passes.WARMUP + 1)[0].total("launch") for name, step in steps.items()}
    least = dict.fromkeys(ENGINES, math.inf)
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.process_time()
            step()
            least[name] = min(least[name], 1e3 * (time.process_time() - start))
    return {name: (launches[name], least[name]) for name in ENGINES}


def step_graph(inputs: Sequence[str]) -> Counters:
    """One step of the native engine with captured passes: counts per micro-batch, and of a step of one micro-batch."""
    prepare()
    group.init_distributed()
    graphs = (*inputs, "engine=native", "cuda_graphs=true")
    micro = load(graphs).batch.train_micro_batch_size_per_gpu
    (one, _), (two, milliseconds) = (
        recorded(engine_step(config), warmup=warmup_of(config))
        for config in (load(graphs, f"train_batch_size={count * micro}") for count in (1, 2))
    )
    print(two.text())
    return {
        "launches in the graph": one.total("captured"),
        "launches per micro-batch": two.total("launch") - one.total("launch"),
        "launches in a step of one micro-batch": one.total("launch"),
        "graphs in a step of two micro-batches": two.total("launch", "CUDA graph"),
        "device and stream waits": waits(two)["device waits"] + waits(two)["stream waits"],
        "refused": one.total("refused") + two.total("refused"),
        "host ms of two micro-batches and a step": round(milliseconds, 1),
    }


def layers(inputs: Sequence[str]) -> Counters:
    """The model alone, forward and backward of a micro-batch: counts per layer."""
    prepare()
    few, many = _model_counts(inputs, 1), _model_counts(inputs, 3)
    per_layer = {name: (many[name] - few[name]) / 2 for name in many if name in few}
    traffic = {name.removeprefix(BYTES): value for name, value in per_layer.items() if name.startswith(BYTES)}
    _print_traffic(traffic)
    outside = sum(value for name, value in traffic.items() if name not in MATRIX_PRODUCTS)
    counted = {"GB per layer outside matrix products": round(outside / GB, 3)} if traffic else {}
    return counted | {
        "launches per layer": per_layer["launches"],
        "launches outside layers": few["launches"] - per_layer["launches"],
        "host ms per layer": round(per_layer["milliseconds"], 2),
    }


def decode(inputs: Sequence[str]) -> Counters:
    """One generated token of a row after 64 cached ones."""
    prepare()
    config = load(inputs)
    model = build_model(config, "cuda", training=False).to(torch.bfloat16).eval()
    ids = torch.zeros(1, 64, dtype=torch.int64, device="cuda")
    cache = model.new_cache(capacity=128)
    with torch.no_grad():
        model(ids, cache=cache)
        record, milliseconds = recorded(lambda: model(ids[:, :1], cache=cache))
    print(record.text())
    planned = sum(count for (_, name), count in record.counts.items() if "cudnn" in name.lower())
    return {"launches per token": record.total("launch"), "cuDNN calls": planned, "host ms": round(milliseconds, 2)} | {
        f"{name} per token": value for name, value in waits(record).items()
    }


def decode_graph(inputs: Sequence[str]) -> Counters:
    """One generated token of a row after 64 cached ones, with fixed shapes: the token before the capture of its graph,
    and a token that the graph computes.
    """
    prepare()
    config = load(inputs)
    model = build_model(config, "cuda", training=False).to(torch.bfloat16).eval()
    ids = torch.zeros(1, 64, dtype=torch.int64, device="cuda")
    total, cache = 96, model.new_cache(capacity=96)
    with torch.inference_mode():
        model.hidden_states(ids, cache=cache, last=1)
        if (reason := static_decoding.unsupported(model, cache, total, 64)) is not None:
            raise RuntimeError(reason)
        choose = TokenChoice(Sampling(), config.model.vocab_size, None)
        decoder = static_decoding.StaticDecoder(model, cache, 1, total, choose, past=64)
        tokens = decoder.tokens(cache, ids[:, :1], 1, total - 64)
        with recording() as first:
            next(tokens)
        replayed, milliseconds = recorded(lambda: next(tokens))
    print(first.text())
    print(replayed.text())
    return {
        "launches in the graph": first.total("captured"),
        "launches per token": replayed.total("launch"),
        "refused": first.total("refused") + replayed.total("refused"),
        "host ms": round(milliseconds, 2),
    } | {f"{name} per token": value for name, value in waits(replayed).items()}


def second_gpu(inputs: Sequence[str]) -> Counters:
    """Training and evaluation of a model on the second of two GPUs while the first one is current."""
    os.environ["PRETEND_GPUS"] = "2"
    torch._C._cuda_getDeviceCount = lambda: 2
    prepare()
    config = load(inputs)
    model = LanguageModelLoss(build_model(config, "cuda:1")).to(torch.bfloat16).train()
    samples = torch.zeros(2, config.model.seq_length + 1, dtype=torch.int64, device="cuda:1")
    torch.cuda.set_device(0)
    with recording() as record:
        model(samples).backward()
        model.eval()
        with torch.no_grad():
            model(samples)
    print(record.text())
    return {"launches on another GPU": record.total("place", "0"), "missing": float(not record.total("place", "1"))}


def _print_traffic(traffic: Mapping[str, float]) -> None:
    for name, value in sorted(traffic.items(), key=lambda item: -item[1]):
        print(f"{value / GB:8.3f} GB {name}")


def model_pass(config: Config) -> Callable[[], None]:
    """Return forward and backward of the model alone for a micro-batch; the gradients are dropped. Packed samples have
    three or four documents each.
    """
    model = LanguageModelLoss(build_model(config, "cuda")).to(torch.bfloat16).train()
    samples = torch.randint(config.model.vocab_size, (MICRO, LENGTH + 1)).cuda()
    places = torch.arange(LENGTH) + 7 * torch.arange(MICRO)[:, None]  # of tokens, each row's boundaries elsewhere
    packed = places // (LENGTH // 3 + 1) if config.data.reset_attention_mask else None

    def call() -> None:
        model(samples, documents=packed).backward()
        for parameter in model.parameters():
            parameter.grad = None

    return call


def _model_counts(inputs: Sequence[str], count: int) -> Counters:
    call = model_pass(load(inputs, f"num_layers={count}"))
    record, milliseconds = recorded(call)
    try:
        traffic = {f"{BYTES}{name}": float(count) for name, count in measured_bytes(call).items()}
    except RuntimeError as error:  # of torch.compile: FlexAttention compiles itself, which no mode can watch
        print(f"bytes are not counted: {error}")
        traffic = {}
    return {"launches": record.total("launch"), "milliseconds": milliseconds} | traffic


def compiled_kernels(inputs: Sequence[str]) -> list[tuple[float, str]]:
    """Gigabytes of each kernel of a compiled block, and the operations in it: forward, then backward.

    They are those of the scheduler of PyTorch's compiler: every buffer of a kernel is read or written once.
    """
    from torch._inductor import config as inductor
    from torch._inductor.scheduler import Scheduler

    prepare()
    kernels: list[tuple[float, str]] = []
    generate = Scheduler.codegen

    def noted(scheduler: Any) -> Any:
        for node in scheduler.nodes:
            sources = [part.node for part in node.get_nodes() if part.node is not None]
            names = {str(origin.target).split(".")[-2] for source in sources for origin in source.get_origins()}
            kernels.append((node.get_read_write_buffers_sizes() / GB, " ".join(sorted(names - VIEWS))))
        return generate(scheduler)

    Scheduler.codegen = noted  # type: ignore[method-assign]
    inductor.force_disable_caches = True
    model_pass(load(inputs, "num_layers=1", "torch_compile=true"))()
    return [kernel for kernel in kernels if round(kernel[0], 2)]


def loss_head(inputs: Sequence[str]) -> Counters:
    """The output layer and the loss, forward and backward, of 8,192 tokens, matrix products included."""
    prepare()
    config = load(inputs, "num_layers=1")
    model = build_model(config, "cuda").to(torch.bfloat16).train()
    hidden = torch.zeros(MICRO, LENGTH, config.model.hidden_size, device="cuda", dtype=torch.bfloat16)
    labels = torch.zeros(MICRO, LENGTH, dtype=torch.int64, device="cuda")

    def call() -> None:
        model.loss(hidden.requires_grad_(), labels).backward()
        hidden.grad = None
        for parameter in model.parameters():
            parameter.grad = None

    record, milliseconds = recorded(call)
    traffic = measured_bytes(call)
    if (fused := "triton _cross_entropy") in traffic:  # it reads the logits twice and writes them, in bfloat16
        traffic[fused] = 3 * 2 * MICRO * LENGTH * config.model.padded_vocab_size
    _print_traffic(traffic)
    return {
        "launches": record.total("launch"),
        "GB per 8,192 tokens": round(sum(traffic.values()) / GB, 2),
        "host ms": round(milliseconds, 1),
    }


class _Measured(Exception):
    """Ends a training run that has been counted."""


def loop(inputs: Sequence[str]) -> Counters:
    """The training loop of `train.py` with loading, guard and reports, counted over ten steps."""
    prepare()
    native = load(inputs).parallel.engine == "native"
    kind: type[Any] = NativeEngine if native else DeepSpeedEngine
    taken, before = kind.train_step, 0
    contexts: list[Any] = []
    records: list[Record] = []

    def train_step(engine: Any, *arguments: Any) -> Any:
        nonlocal before
        before += 1
        if before == WARMUP + 1:
            contexts.append(recording())
            records.append(contexts[0].__enter__())
        if before == WARMUP + 1 + REPORTED:
            contexts[0].__exit__(None, None, None)
            raise _Measured
        return taken(engine, *arguments)

    kind.train_step = train_step
    with contextlib.suppress(_Measured), tempfile.TemporaryDirectory(dir=BUILT) as save:
        keys = (f"train_iters={2 * REPORTED}", f"log_interval={REPORTED}", f"save={save}/run")
        run.fit(load(inputs, *keys))
    print(records[0].text())
    return {f"{name} in {REPORTED} steps": value for name, value in waits(records[0]).items()}


def overlap(inputs: Sequence[str], ranks: int = 8) -> Counters:
    """Shares of the bytes of gradients and weights that may be communicated beside matrix products, on 8 ranks."""
    prepare(ranks)
    group.init_distributed()
    taken = engine_step(load(inputs, f"train_batch_size={2 * ranks * MICRO}"), ranks)
    record, _ = recorded(lambda: (taken(), taken()), log=True)
    found = order.collectives(record.events)
    return {
        "share of gradient bytes reduced beside products": round(order.overlapped(found, order.REDUCTIONS), 3),
        "share of weight bytes gathered beside products": round(order.overlapped(found, order.GATHERS), 3),
        "collectives per step": record.total("collective") / 2,
        "GB of collectives per step": round(sum(collective.amount for collective in found) / 2 / GB, 3),
    }


def train(inputs: Sequence[str]) -> Counters:
    """Train two steps of a small model and save it, as `train.py` does."""
    prepare()
    with tempfile.TemporaryDirectory(dir=BUILT) as folder:
        with recording() as record:
            run.fit(load(inputs, f"save={folder}/run"))
        saved = len(list(Path(folder, "run").glob("global_step*")))
    print(record.text())
    return {"missing checkpoints": 1 - saved, "refused": record.total("refused")}


def compiled(inputs: Sequence[str]) -> Counters:
    """Graph breaks and recompilations of the compiled blocks with every backend; the code generator is left out."""
    prepare()
    original = torch.compile

    def traced(model: Any = None, **options: Any) -> Any:
        kept = {name: value for name, value in options.items() if name not in ("mode", "options", "backend")}
        return original(model, backend="aot_eager", **kept)

    torch.compile = traced  # type: ignore[assignment]
    return {
        f"{counter}, {backend}": value
        for backend in COMPILED_BACKENDS
        for counter, value in _compiled_steps(load(inputs, f"attention_backend={backend}")).items()
    }


def _compiled_steps(config: Config) -> Counters:
    """Compile two layers and train them for two steps."""
    torch._dynamo.reset()
    counters.clear()
    clear_compilation_metrics()
    try:
        model = LanguageModelLoss(build_model(config, "cuda")).to(torch.bfloat16).train()
    except (BackendError, ConfigError) as error:
        print(error)
        return {"graph breaks": 0, "recompilations": 0, "refused with the reason": 1}
    samples = torch.randint(config.model.vocab_size, (2, config.model.seq_length + 1)).cuda()
    for _ in range(2):
        model(samples).backward()
    for reason, count in counters["graph_break"].items():
        print(f"{config.position.attention_backend}: {count} graph breaks: {reason}")
    frames = {str(metrics.compile_id).split("_")[0] for metrics in get_compilation_metrics()}  # FRAME/COMPILATION
    again = [frame for frame in frames if frame.rsplit("/", 1)[-1].isdigit() and not frame.endswith("/0")]
    return {
        "graph breaks": sum(counters["graph_break"].values()),
        "recompilations": len(again),
        "refused with the reason": 0,
    }
