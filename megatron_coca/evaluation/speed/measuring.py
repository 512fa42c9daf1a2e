"""All methods at all lengths: probed first, then timed side by side, a length at a time."""

import platform
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import torch
from tqdm import tqdm

from megatron_coca.attention.layer import bytes_per_token
from megatron_coca.checkpoints import open_checkpoint
from megatron_coca.checkpoints.native import code_versions
from megatron_coca.config import Config, load_config
from megatron_coca.config.model import PositionMethod
from megatron_coca.evaluation.options import DTYPES, int_list, positive_int, read_variants, resolve_device
from megatron_coca.evaluation.results import (
    CheckpointRecord,
    EnvironmentRecord,
    EvaluationError,
    Missing,
    Store,
    check_writable,
)
from megatron_coca.evaluation.speed.cases import CONTRACTION, EINSUM, Built, build_all, choose
from megatron_coca.evaluation.speed.probing import (
    WHOLE_SEQUENCES,
    WORKLOADS,
    Plan,
    Probe,
    Workload,
    first_layer,
    probe,
    probe_apart,
)
from megatron_coca.evaluation.speed.records import (
    WHATS,
    MachineRecord,
    Ratio,
    ShapeRecord,
    SpeedCell,
    SpeedProtocol,
    SpeedResult,
    What,
    interleaved,
    quartiles,
    ratio,
    tables,
)
from megatron_coca.evaluation.subject import Task
from megatron_coca.model import keep_freed_memory

Probes = dict[str, list[Probe]]
"""By method."""
Times = dict[str, list[float]]
"""Seconds of single rounds by method."""


@dataclass(frozen=True)
class Bench:
    """Everything that one run measures."""

    built: Sequence[Built]
    plan: Plan
    device: torch.device

    def run(self, store: Store[SpeedResult], probe_one: Callable[[Built], Sequence[Probe]]) -> None:
        """Measures what `store` does not have; `probe_one` gives a method's probes."""
        probes = {each.label: list(probe_one(each)) for each in tqdm(self.built, desc="probed", unit="method")}
        for label, found in probes.items():
            for each in found:
                if each.kind is not None:
                    at = f"{each.what}, length {each.length}, {label}"
                    store.miss(Missing(at=at, kind=each.kind, reason=each.reason))
        for what in self.plan.whats:
            for length in tqdm(sorted(self.plan.lengths), desc=what, unit="length"):
                self._measure(store, probes, what, length)

    def _measure(self, store: Store[SpeedResult], probes: Probes, what: What, length: int) -> None:
        """One kind of work at one length: all methods that fit take turns."""
        peaks = {
            label: probe.peak
            for label, found in probes.items()
            for probe in found
            if (probe.what, probe.length) == (what, length) and probe.kind is None
        }
        taking = {each.label: each for each in self.built if each.label in peaks}
        works = {label: WORKLOADS[what](each.model, length, self.plan.batch) for label, each in taking.items()}
        times = interleaved({label: work.call for label, work in works.items()}, self.plan.rounds, self.device)
        for label, each in taking.items():
            store.put(self._cell(each, works[label], times, what, length, peaks[label]))

    def _cell(self, built: Built, work: Workload, times: Times, what: What, length: int, peak: int | None) -> SpeedCell:
        low, middle, high = (value / work.passes for value in quartiles(times[built.label]))
        return SpeedCell(
            what=what,
            length=length,
            method=built.label,
            backend=built.backend,
            seconds=middle,
            quartiles=(low, high),
            rounds=self.plan.rounds,
            tokens_per_second=work.tokens / middle,
            to_rope=self._ratio(built, times, self._rope_for(built, times)),
            to_contraction=self._ratio(built, times, self._contraction(times)),
            peak_memory_bytes=peak,
            cache_bytes_per_token=_cached(built) if what == "decode" else None,
        )

    def _rope_for(self, built: Built, times: Times) -> str | None:
        """Plain RoPE by the same backend; the contraction has a backend of its own, and is held against the first."""
        ropes = [each for each in self.built if each.case.is_plain_rope and each.label in times]
        same = [each for each in ropes if built.backend in (each.backend, EINSUM)]
        return next((each.label for each in same), None)

    def _contraction(self, times: Times) -> str | None:
        return next((each.label for each in self.built if each.backend == EINSUM and each.label in times), None)

    def _ratio(self, built: Built, times: Times, against: str | None) -> Ratio | None:
        return None if against is None else ratio(times[built.label], times[against], against)


def _cached(built: Built) -> int:
    model = built.case.config.model
    dtype = first_layer(built.model).dense.weight.dtype
    return bytes_per_token(built.model.method, model.num_kv_heads, model.num_layers, dtype)


PROTOCOL = (
    "random weights, the same for all methods; in every round each method makes one call, after a round that does not "
    "count; seconds and ratios are medians over rounds, ratios round by round; layer: projections and attention of one "
    "layer, without the tables that layers share; model forward: all tokens and the logits of the last; "
    "forward+backward: all gradients, no optimizer; decode: a token after `length` cached ones, its keys' rotation "
    "included; memory: the most that one call holds beside weights and inputs"
)
METHODS = (*get_args(PositionMethod), CONTRACTION)


def add_arguments(parser: ArgumentParser) -> None:
    """The options of the subcommand."""
    add = parser.add_argument
    shape = parser.add_mutually_exclusive_group(required=True)
    shape.add_argument("--config", nargs="+", type=Path, metavar="FILE", help="the model's shape: a run's YAML files")
    shape.add_argument(
        "--checkpoint", metavar="DIR", help="the model's shape: a checkpoint, whose weights are not read"
    )
    add("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", dest="overrides", help="for all methods")
    add("--lengths", required=True, type=int_list, metavar="N,N,...", help="tokens of a row")
    add("--methods", type=_names(METHODS), default=["rotary", "coca", CONTRACTION], help=", ".join(METHODS))
    variants = "one more method: its name, then YAML overlays and KEY=VALUE; give it once for each"
    add("--variant", nargs="+", action="append", default=[], metavar=("LABEL", "CHANGE"), help=variants)
    add("--what", type=_names(WHATS), help="parts of " + ", ".join(WHATS) + "; default: all")
    add("--batch-size", type=positive_int, default=1, metavar="N", help="rows; default 1")
    add("--rounds", type=positive_int, default=9, metavar="N", help="counted rounds; default 9")
    budget = "leave out a method's longer lengths that would take more than so long; default 600"
    add("--budget-seconds", type=_seconds, default=600.0, metavar="S", help=budget)
    add("--no-memory", action="store_true", help="on the CPU, measure no memory: it takes a process for each method")
    add("--label", help="the name of the shape in reports; default: the configuration's or checkpoint's name")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--dtype", default="float32", choices=DTYPES, help="of weights and computation")
    add("--output", type=Path, metavar="FILE.json", help="where the result goes")
    add("--overwrite", action="store_true", help="replace a file that is there")


def _names(known: Sequence[str]) -> Callable[[str], list[str]]:
    """An argparse type: names out of `known`, with commas between."""

    def names(text: str) -> list[str]:
        given = [part.strip() for part in text.split(",")]
        if unknown := [name for name in given if name not in known]:
            raise ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return given

    return names


def _seconds(text: str) -> float:
    """An argparse type: more than none."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


def run(args: Namespace) -> int:
    """Measures and prints; returns the exit status. Raises EvaluationError, ConfigError, CheckpointError."""
    check_output(args.output, args.overwrite)
    device = resolve_device(args.device)
    if device == "cpu":
        keep_freed_memory()
    config = shape_config(args)
    variants = read_variants(args) if args.variant else ()
    cases, refused = choose(config, args.methods, variants)
    built, refused_later = build_all(cases, device, DTYPES[args.dtype])
    if not built:
        raise EvaluationError(
            f"no method can be measured: {'; '.join(each.reason for each in refused + refused_later)}"
        )
    whats: tuple[What, ...] = WHATS if args.what is None else tuple(args.what)
    plan = Plan(whats, tuple(args.lengths), args.batch_size, args.rounds, args.budget_seconds)
    store = Store(args.output, empty_result(args, config, built, device), args.overwrite)
    for refusal in refused + refused_later:
        store.miss(refusal.missing())
    Bench(built, plan, torch.device(device)).run(store, prober(args, plan, device))
    print(tables(store.result))
    for missing in store.result.missing:
        print(f"evaluate.py: {store.result.label}: {missing.at}: {missing.kind}: {missing.reason}", file=sys.stderr)
    return 2 if any(_was_asked_for(args, missing) for missing in store.result.missing) else 0


def _was_asked_for(args: Namespace, missing: Missing) -> bool:
    """Decoding by the contraction is, where `--what` names decoding; all work together does not mean it."""
    return args.what is not None or missing.reason != WHOLE_SEQUENCES


def check_output(path: Path | None, overwrite: bool) -> None:
    """Raises EvaluationError for a place that cannot be written, or that has a result: times are not continued."""
    if path is None:
        return
    check_writable(path)
    if path.exists() and not overwrite:
        raise EvaluationError(
            f"{path}: is there; times of two runs do not mix, name another --output or --overwrite it"
        )


def shape_config(args: Namespace) -> Config:
    """The configuration that all methods start from."""
    if args.config is not None:
        return load_config(args.config, args.overrides)
    return open_checkpoint(args.checkpoint).trained.override(args.overrides)


def prober(args: Namespace, plan: Plan, device: str) -> Callable[[Built], Sequence[Probe]]:
    """Probes here, or on the CPU in a process of its own; only there the growth of memory is that of a call."""
    if device != "cpu":
        return lambda built: list(probe(built, plan))
    if args.no_memory:
        return lambda built: [replace(found, peak=None) for found in probe(built, plan)]
    return lambda built: probe_apart(built.case, plan, args.dtype)


def empty_result(args: Namespace, config: Config, built: Sequence[Built], device: str) -> SpeedResult:
    """The result file before anything is measured."""
    place, model = torch.device(device), config.model
    source = args.checkpoint or " ".join(map(str, args.config))
    name = Path(args.checkpoint).resolve().name if args.checkpoint else args.config[-1].stem
    shape = ShapeRecord(
        layers=model.num_layers,
        hidden_size=model.hidden_size,
        heads=model.num_attention_heads,
        kv_heads=model.num_kv_heads,
        parameters=sum(parameter.numel() for parameter in built[0].model.parameters()),
    )
    checkpoint = CheckpointRecord(
        path=source,
        identity=f"random weights, seed {config.seed}",
        step=None,
        seq_length=model.seq_length,
        pos_emb=config.position.pos_emb,
    )
    environment = EnvironmentRecord(
        dtype=args.dtype,
        backend=config.position.attention_backend,
        device=torch.cuda.get_device_name(place) if place.type == "cuda" else str(place),
        torch=torch.__version__,
    )
    return SpeedResult(
        label=args.label or name,
        checkpoint=checkpoint,
        overrides={"set": list(args.overrides)} if args.overrides else {},
        tokenizer=None,
        environment=environment,
        protocol=SpeedProtocol(text=PROTOCOL, rounds=args.rounds, batch=args.batch_size, shape=shape),
        machine=MachineRecord(processor=processor(), threads=torch.get_num_threads(), versions=code_versions()),
        results=[],
        missing=[],
    )


def processor() -> str:
    """The CPU's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


SPEED = Task("time and memory of position methods, side by side", add_arguments, run, of_checkpoint=False)
