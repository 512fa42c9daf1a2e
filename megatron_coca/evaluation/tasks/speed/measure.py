"""`megatron-coca evaluate speed`: time and memory of position methods, side by side in one run.

Each method has a model of its own, and all models share their weights. Times vary between runs, so no two result files
are equal.
"""

import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.nn as nn
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from megatron_coca.attention.inputs import BackendError
from megatron_coca.attention.layer import SelfAttention, cache_bytes
from megatron_coca.checkpoints import open_checkpoint
from megatron_coca.checkpoints.identity import network_digest
from megatron_coca.checkpoints.native import code_versions
from megatron_coca.checkpoints.weights import DTYPES
from megatron_coca.config import Config, ConfigError, load_config, split_inputs
from megatron_coca.config.model import ASSUMED_VOCABULARY, GAU
from megatron_coca.evaluation import results
from megatron_coca.evaluation.options import Variant, read_variants, resolve_device
from megatron_coca.evaluation.results import EvaluationError, Missing, Show, Store
from megatron_coca.evaluation.subject import backend_record, environment_record, print_missing
from megatron_coca.evaluation.tasks.speed.task import (
    KINDS_OF_WORK,
    KindOfWork,
    MachineRecord,
    Ratio,
    ShapeRecord,
    SpeedEntry,
    SpeedProtocol,
    SpeedResult,
)
from megatron_coca.model import GPT, build_model
from megatron_coca.support.arguments import source_keys
from megatron_coca.support.console import track
from megatron_coca.support.host import keep_freed_memory, processor_name
from megatron_coca.support.plain_text import masked

PROTOCOL = (
    "random weights, the same for all methods; in every round each method makes one call, after a round that does not "
    "count; seconds and ratios are medians over rounds, ratios round by round; layer: projections and attention of one "
    "layer, without the tables that layers share; model forward: all tokens and the logits of the last; "
    "forward+backward: all gradients, no optimizer; decode: a token after `length` cached ones, its keys' rotation "
    "included; memory: the most that one call holds beside weights and inputs"
)
PLAIN: dict[str, str | None] = {"rotary_frequencies": None, "rope_scaling": None, "relative_positions": None}
PLAIN |= {"logit_scaling": "none", "forgetting_gate": None}
DECODED = 8
"""Number of tokens decoded in one call. The time of a single token is too short to be measured well."""

# Models


@dataclass(frozen=True)
class TimedMethod:
    """A position method and its model."""

    label: str
    config: Config
    model: GPT

    @property
    def is_plain_rope(self) -> bool:
        position = self.config.position
        return position.pos_emb == "rotary" and all(getattr(position, key) == value for key, value in PLAIN.items())


def build_methods(
    base: Config, methods: Sequence[str], variants: Sequence[Variant], device: str, dtype: torch.dtype
) -> tuple[list[TimedMethod], list[Missing]]:
    """Build a model for each value of `pos_emb` in `methods`, for each variant of the base config, and for plain RoPE.

    Return the built methods, and an entry with the reason for each method that cannot be built. Weights are drawn with
    the configuration's seed. Models share parameters of the same name and shape.

    Raises EvaluationError if two methods have the same label.
    """
    labels = [*methods, *(variant.label for variant in variants)]
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise EvaluationError(f"--methods {twice[0]}: duplicate name; name each method once")
    built: list[TimedMethod] = []
    unsupported: list[Missing] = []

    def add(label: str, *overrides: Any) -> None:
        try:
            config = base.override(*overrides)
            if GAU in config.layer_types:
                raise BackendError("attention_config: gated attention units (gau) are not supported here; remove them")
            model = build_model(config, device).to(dtype)
        except (BackendError, ConfigError) as error:
            unsupported.append(Missing(at=label, kind="refused", reason=str(error)))
            return
        if built:
            share_weights(model, built[0].model)
        built.append(TimedMethod(label, config, model))

    for name in methods:
        own = {} if name == base.position.pos_emb else {"pos_emb_options": None}  # options belong to one method
        add(name, {"pos_emb": name, **own})
    for variant in variants:
        add(variant.label, variant.overrides, variant.files)
    if built and not any(method.is_plain_rope for method in built):
        add("plain rotary" if "rotary" in labels else "rotary", {"pos_emb": "rotary", "pos_emb_options": None, **PLAIN})
    return built, unsupported


@torch.no_grad()
def share_weights(model: nn.Module, other: nn.Module) -> None:
    theirs = dict(other.named_modules())
    for name, module in model.named_modules():
        for key, own in list(module._parameters.items()):
            shared = theirs[name]._parameters.get(key) if name in theirs else None
            if own is not None and shared is not None and shared.shape == own.shape:
                module._parameters[key] = shared


# Calls


class Workload(NamedTuple):
    """A repeatable call, with the number of tokens in one pass and the number of passes in one call."""

    call: Callable[[], object]
    tokens: int
    passes: int = 1


def first_layer(model: GPT) -> SelfAttention:
    return next(module for module in model.modules() if isinstance(module, SelfAttention))


def token_ids(model: GPT, length: int, batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(model.vocab_size, (batch, length), generator=generator)
    return ids.to(first_layer(model).dense.weight.device)


def layer_work(model: GPT, length: int, batch: int, backward: bool) -> Workload:
    """Return the work of one layer: its projections and attention, without the position tables that all layers share.

    The backward pass computes the gradients of the hidden states and of the layer's weights.
    """
    model.train(backward)
    layer = first_layer(model)
    weight = layer.dense.weight
    generator = torch.Generator().manual_seed(length)
    hidden = torch.randn(batch, length, weight.shape[0], generator=generator).to(weight).requires_grad_(backward)
    with torch.no_grad():
        tokens = torch.arange(length, device=weight.device)
        contexts = model.contexts(tokens, length, weight.dtype, reached=length, batch=batch)
        frame = contexts[model.layer_types[0]]
    gradient = torch.ones_like(hidden) if backward else None

    def call() -> object:
        with torch.set_grad_enabled(backward):
            output = layer(hidden, frame)
            if not backward:
                return output
            return torch.autograd.grad(output, [hidden, *layer.parameters()], gradient, allow_unused=True)

    return Workload(call, length * batch)


def model_work(model: GPT, length: int, batch: int, backward: bool) -> Workload:
    """Return the work of a forward pass that computes the logits of a prompt's last token.

    With `backward`, the work is instead that of a training step without the optimizer step: the loss of all tokens and
    the gradients of all weights.
    """
    model.train(backward)
    ids = token_ids(model, length + backward, batch)

    def call() -> None:
        if not backward:
            with torch.no_grad():
                model.logits(model.hidden_states(ids, last=1))
            return
        model.loss(model.hidden_states(ids[:, :-1]), ids[:, 1:]).backward()
        for parameter in model.parameters():
            parameter.grad = None

    return Workload(call, length * batch)


def decode(model: GPT, length: int, batch: int) -> Workload:
    """Return the work of decoding tokens one by one after `length` cached tokens.

    After each call, the cache is truncated to `length` tokens.
    """
    model.eval()
    cache, ids = model.new_cache(length=length + DECODED), token_ids(model, length + DECODED, batch)
    with torch.no_grad():
        model.hidden_states(ids[:, :length], cache=cache, last=1)
    positions = cache.positions

    def call() -> None:
        cache.positions = positions
        with torch.no_grad():
            for step in range(length, length + DECODED):
                model(ids[:, step : step + 1], cache=cache)
        for layer, name in zip(cache.layers, model.layer_types, strict=True):
            if length < (model.methods[name].window or length + 1):  # a full window does not grow
                layer.cut(length)

    return Workload(call, batch, DECODED)


WORKLOADS: dict[KindOfWork, Callable[[GPT, int, int], Workload]] = {
    "layer forward": partial(layer_work, backward=False),
    "layer forward+backward": partial(layer_work, backward=True),
    "model forward": partial(model_work, backward=False),
    "model forward+backward": partial(model_work, backward=True),
    "decode": decode,
}
"""For each kind of work, the function that creates its `Workload` for a model, a length and a batch size."""


def measured_peak(call: Callable[[], object], device: torch.device) -> int:
    """Return the peak number of tensor bytes that a call allocates in addition to those already allocated."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        call()
    assert run.profiler is not None and run.profiler.kineto_results is not None
    events = [event for event in run.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def backend_of(model: GPT, config: Config, device: str, kind: str) -> str:
    """Return the attention backend of a kind of work and, for `sdpa` on a GPU, its kernel."""
    return backend_record(model, config, device, trains="backward" in kind, decodes=kind == "decode")


def try_once(method: TimedMethod, kind: KindOfWork, length: int, batch: int) -> tuple[Workload, int] | Missing:
    """Run one kind of work once. Return the workload and its peak memory in bytes, or the reason why it failed."""
    device = first_layer(method.model).dense.weight.device
    cause: Literal["refused", "out of memory"] = "refused"
    try:
        work = WORKLOADS[kind](method.model, length, batch)
        return work, measured_peak(work.call, device)
    except ValueError as error:
        reason = str(error)
    except (RuntimeError, MemoryError) as error:
        if not results.out_of_memory(error):
            raise
        cause, reason = "out of memory", f"{device} ran out of memory; use shorter lengths or a smaller batch"
    return Missing(at=f"{kind}, length {length}, {method.label}", kind=cause, reason=reason)


# Measurement

Key = TypeVar("Key")


def interleaved(
    calls: Mapping[Key, Callable[[], object]],
    rounds: int,
    device: torch.device,
    uncounted: int = 1,
    seconds: float | None = None,
) -> dict[Key, list[float]]:
    """Return the seconds that each call takes in each of `rounds` rounds. `uncounted` rounds before them are a warm-up.

    If `seconds` is set, no round begins after that time, but there are at least three counted rounds.
    """

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    times: dict[Key, list[float]] = {key: [] for key in calls}
    begin = time.perf_counter()
    for index in range(uncounted + rounds):
        if seconds is not None and index >= uncounted + 3 and time.perf_counter() - begin > seconds:
            break
        for key, call in calls.items():
            synchronize()
            start = time.perf_counter()
            call()
            synchronize()
            if index >= uncounted:
                times[key].append(time.perf_counter() - start)
    return times


def quartiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def ratio(own: list[float], other: list[float], against: str) -> Ratio:
    low, middle, high = quartiles([mine / theirs for mine, theirs in zip(own, other, strict=True)])
    return Ratio(against=against, median=middle, low=low, high=high)


def measure(
    methods: Sequence[TimedMethod], kind: KindOfWork, length: int, batch: int, rounds: int, store: Store[SpeedResult]
) -> None:
    """Try one kind of work with every method, and time the methods that succeed. Their entries go into `store`. For a
    method that fails, the reason goes there.
    """
    works: dict[str, Workload] = {}
    peaks: dict[str, int] = {}
    for method in methods:
        tried = try_once(method, kind, length, batch)
        if isinstance(tried, Missing):
            store.miss(tried)
        else:
            works[method.label], peaks[method.label] = tried
    device = first_layer(methods[0].model).dense.weight.device
    times = interleaved({label: work.call for label, work in works.items()}, rounds, device)
    fitting = [method for method in methods if method.label in works]
    rope = next((method.label for method in fitting if method.is_plain_rope), None)
    for method in fitting:
        work, own = works[method.label], times[method.label]
        low, middle, high = (value / work.passes for value in quartiles(own))
        kept = [method.model.methods[name] for name in method.model.layer_types]
        dtype = first_layer(method.model).dense.weight.dtype
        cache = cache_bytes(kept, length, dtype) // length
        entry = SpeedEntry(
            what=kind,
            length=length,
            method=method.label,
            backend=backend_of(method.model, method.config, str(device), kind),
            seconds=middle,
            quartiles=(low, high),
            rounds=rounds,
            tokens_per_second=work.tokens / middle,
            to_rope=ratio(own, times[rope], rope) if rope is not None else None,
            peak_memory_bytes=peaks[method.label],
            cache_bytes_per_token=cache if kind == "decode" else None,
        )
        store.put(entry)


def run(args: Namespace, show: Show) -> int:
    if args.output is not None:
        results.check_writable(args.output)
        if args.output.exists() and not args.overwrite:
            raise EvaluationError(
                f"--output {args.output}: exists, and times from two runs cannot be combined; name another file, or "
                "add --overwrite"
            )
    device = resolve_device(args.device)
    if device == "cpu":
        keep_freed_memory()
    if args.config is not None:
        files, keys = split_inputs(args.config, args.conf_dir)
        config = load_config(files, [*keys, *args.overrides])
        if config.model.vocab_size is None:
            note = f"vocab_size: not set; {ASSUMED_VOCABULARY:,} is assumed; set vocab_size to change it"
            print(f"megatron-coca evaluate: {note}", file=sys.stderr)
            config = config.override({"vocab_size": ASSUMED_VOCABULARY})
    else:
        given = [*args.overrides, *source_keys(args)]
        config = open_checkpoint(args.checkpoint, overrides=given).trained.override(given)
    variants = read_variants(args) if args.variant else ()
    methods, unsupported = build_methods(config, args.methods, variants, device, DTYPES[args.dtype])
    if not methods:
        raise EvaluationError(f"--methods: no method can be measured: {'; '.join(each.reason for each in unsupported)}")
    store = Store(args.output, empty_result(args, config, methods[0], device), args.overwrite)
    for missing in unsupported:
        store.miss(missing)
    for kind in KINDS_OF_WORK if args.what is None else args.what:
        for length in track(sorted(args.lengths), kind, len(args.lengths), "lengths"):
            measure(methods, kind, length, args.batch_size, args.rounds, store)
    show(store.result)
    for missing in store.result.missing:
        print_missing(store.result.label, missing)
    return 2 if store.result.missing else 0


def empty_result(args: Namespace, config: Config, first: TimedMethod, device: str) -> SpeedResult:
    model = config.model
    shape = ShapeRecord(
        layers=model.num_layers,
        hidden_size=model.hidden_size,
        heads=model.num_attention_heads,
        kv_heads=model.num_kv_heads,
        parameters=sum(parameter.numel() for parameter in first.model.parameters()),
    )
    return SpeedResult(
        label=args.label
        or (
            Path(args.checkpoint).resolve().name if args.checkpoint else Path(args.config[-1]).name.removesuffix(".yml")
        ),
        checkpoint=results.CheckpointRecord(
            path=masked(args.checkpoint or "") or " ".join(map(str, args.config)),
            identity=f"random weights, seed {config.seed}",
            step=None,
            seq_length=model.seq_length,
            pos_emb=config.position.pos_emb,
            network=network_digest(config),
        ),
        overrides={"set": list(args.overrides)} if args.overrides else {},
        tokenizer=None,
        environment=environment_record(args.dtype, config.position.attention_backend, device),
        protocol=SpeedProtocol(text=PROTOCOL, rounds=args.rounds, batch=args.batch_size, shape=shape),
        machine=MachineRecord(processor=processor_name(), threads=torch.get_num_threads(), versions=code_versions()),
        results=[],
        missing=[],
    )
