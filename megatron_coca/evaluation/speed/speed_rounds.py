"""Times all methods side by side: one call of each first, to see what fits, then round by round at each length.

Times vary between runs, so no two result files are equal.
"""

import platform
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import torch

from megatron_coca.attention.layer import cache_bytes
from megatron_coca.checkpoints import open_checkpoint
from megatron_coca.checkpoints.native import code_versions
from megatron_coca.checkpoints.weights import DTYPES
from megatron_coca.config import Config, load_config
from megatron_coca.console import track
from megatron_coca.evaluation import results
from megatron_coca.evaluation.options import read_variants, resolve_device
from megatron_coca.evaluation.results import Cell, Missing, Record, Result, Store
from megatron_coca.evaluation.speed import WHATS, WHOLE_SEQUENCES, What
from megatron_coca.evaluation.speed.cases import EINSUM, Built, build_all, choose
from megatron_coca.evaluation.speed.probing import WORKLOADS, Plan, first_layer, probe
from megatron_coca.evaluation.subject import environment_record
from megatron_coca.markdown_tables import format_table
from megatron_coca.model import keep_freed_memory


class Ratio(Record):
    """Time relative to another method in the same rounds: median and quartiles over rounds."""

    against: str  # the other method's label
    median: float
    low: float
    high: float


class SpeedCell(Cell):
    what: What
    length: int  # tokens of a row; in `decode` the tokens in the cache
    method: str
    backend: str
    seconds: float  # median over rounds, of one pass; in `decode` of one token
    quartiles: tuple[float, float]
    rounds: int
    tokens_per_second: float
    to_rope: Ratio | None  # to RoPE by the same backend, of the contraction to the first; None: not measured
    to_contraction: Ratio | None
    peak_memory_bytes: int | None  # besides weights and inputs; includes gradients
    cache_bytes_per_token: int | None  # of a row, all layers; in `decode`

    @property
    def key(self) -> tuple[int, int, str]:
        return (WHATS.index(self.what), self.length, self.method)


class MachineRecord(Record):
    processor: str
    threads: int
    versions: dict[str, str]


class ShapeRecord(Record):
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    parameters: int  # of the first method's model


class SpeedProtocol(Record):
    text: str
    rounds: int
    batch: int  # rows
    shape: ShapeRecord


class SpeedResult(Result):
    task: Literal["speed"] = "speed"
    protocol: SpeedProtocol
    machine: MachineRecord
    results: list[SpeedCell]


def ratio_text(ratio: Ratio | None) -> str:
    return "-" if ratio is None else f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"


ROWS: dict[str, Callable[[SpeedCell], str]] = {
    "ms": lambda cell: f"{1000 * cell.seconds:.2f}",
    "to RoPE": lambda cell: ratio_text(cell.to_rope),
    "to contraction": lambda cell: ratio_text(cell.to_contraction),
    "tokens/s": lambda cell: f"{cell.tokens_per_second:.0f}",
    "MiB": lambda cell: "-" if cell.peak_memory_bytes is None else f"{cell.peak_memory_bytes / 2**20:.0f}",
    "cache bytes/token": lambda cell: "-" if cell.cache_bytes_per_token is None else str(cell.cache_bytes_per_token),
}
"""The rows of a method in a table."""


def tables(result: SpeedResult) -> str:
    shown = []
    for what in WHATS:
        cells = {(cell.method, cell.length): cell for cell in result.results if cell.what == what}
        if not cells:
            continue
        lengths = sorted({length for _, length in cells})
        rows = []
        for method in dict.fromkeys(method for method, _ in sorted(cells, key=lambda key: key[1])):
            for name, text in ROWS.items():
                values = [text(cells[method, length]) if (method, length) in cells else "-" for length in lengths]
                if any(value != "-" for value in values):
                    rows.append([f"{method}: {name}", *values])
        title = f"{result.label}, {what}, {result.environment.device}, {result.environment.dtype}"
        shown.append(f"{title}\n\n{format_table(['method', *map(str, lengths)], rows)}\n")
        if alone := dict.fromkeys(method for (method, _), cell in sorted(cells.items()) if cell.to_rope is None):
            remark = "No ratio to RoPE, as at some length RoPE by the same backend was not measured"
            shown[-1] += f"\n{remark}: {', '.join(alone)}\n"
    return "\n".join(shown)


PROTOCOL = (
    "random weights, the same for all methods; in every round each method makes one call, after a round that does not "
    "count; seconds and ratios are medians over rounds, ratios round by round; layer: projections and attention of one "
    "layer, without the tables that layers share; model forward: all tokens and the logits of the last; "
    "forward+backward: all gradients, no optimizer; decode: a token after `length` cached ones, its keys' rotation "
    "included; memory: the most that one call holds beside weights and inputs"
)
Key = TypeVar("Key")


def interleaved(calls: Mapping[Key, Callable[[], object]], rounds: int, device: torch.device) -> dict[Key, list[float]]:
    """Seconds of one call of each in each of `rounds` rounds, after a round that does not count."""

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    times: dict[Key, list[float]] = {key: [] for key in calls}
    for index in range(rounds + 1):
        for key, call in calls.items():
            synchronize()
            start = time.perf_counter()
            call()
            synchronize()
            if index > 0:
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


def measure(built: Sequence[Built], plan: Plan, device: torch.device, store: Store[SpeedResult]) -> None:
    """Probes every method, then times all that fit, and puts cells and reasons into `store`."""
    probes = {
        (item.label, found.what, found.length): found
        for item in track(built, "trying", len(built), "methods")
        for found in probe(item, plan)
    }
    for (label, what, length), found in probes.items():
        if found.kind is not None:
            at = f"{what}, length {length}, {label}"
            store.miss(Missing(at=at, kind=found.kind, reason=found.reason))
    for what in plan.whats:
        for length in track(sorted(plan.lengths), f"timing {what}", len(plan.lengths), "lengths"):
            peaks = {
                item.label: made.peak
                for item in built
                if (made := probes.get((item.label, what, length))) is not None and made.kind is None
            }
            fitting = [item for item in built if item.label in peaks]
            works = {item.label: WORKLOADS[what](item.model, length, plan.batch) for item in fitting}
            times = interleaved({label: work.call for label, work in works.items()}, plan.rounds, device)
            for item in fitting:
                work = works[item.label]
                low, middle, high = (value / work.passes for value in quartiles(times[item.label]))
                # The contraction has a backend of its own; it is compared with the first RoPE.
                ropes = [rope.label for rope in fitting if rope.case.is_plain_rope]
                same = [rope.label for rope in fitting if rope.case.is_plain_rope and rope.backend == item.backend]
                contractions = [other.label for other in fitting if other.backend == EINSUM]
                to_rope, to_contraction = (
                    ratio(times[item.label], times[others[0]], others[0]) if others else None
                    for others in (ropes if item.backend == EINSUM else same, contractions)
                )
                shape, dtype = item.case.config.model, first_layer(item.model).dense.weight.dtype
                kept = [item.model.methods[name] for name in item.model.layer_types]
                cache = cache_bytes(kept, shape.num_kv_heads, length, dtype) // length
                cell = SpeedCell(
                    what=what,
                    length=length,
                    method=item.label,
                    backend=item.backend,
                    seconds=middle,
                    quartiles=(low, high),
                    rounds=plan.rounds,
                    tokens_per_second=work.tokens / middle,
                    to_rope=to_rope,
                    to_contraction=to_contraction,
                    peak_memory_bytes=peaks[item.label],
                    cache_bytes_per_token=cache if what == "decode" else None,
                )
                store.put(cell)


def run(args: Namespace) -> int:
    if args.output is not None:
        results.check_writable(args.output)
        if args.output.exists() and not args.overwrite:
            raise results.EvaluationError(
                f"{args.output}: exists; times of two runs cannot be combined; name another --output or --overwrite it"
            )
    device = resolve_device(args.device)
    if device == "cpu":
        keep_freed_memory()
    if args.config is not None:
        config = load_config(args.config, args.overrides)
    else:
        config = open_checkpoint(args.checkpoint).trained.override(args.overrides)
    cases, refused = choose(config, args.methods, read_variants(args) if args.variant else ())
    built, refused_later = build_all(cases, device, DTYPES[args.dtype])
    refused += refused_later
    if not built:
        raise results.EvaluationError(f"no method can be measured: {'; '.join(missing.reason for missing in refused)}")
    whats = WHATS if args.what is None else tuple(args.what)
    plan = Plan(whats, tuple(args.lengths), args.batch_size, args.rounds)
    store = Store(args.output, empty_result(args, config, built, device), args.overwrite)
    for missing in refused:
        store.miss(missing)
    measure(built, plan, torch.device(device), store)
    print(tables(store.result))
    for missing in store.result.missing:
        print(
            f"megatron-coca evaluate: {store.result.label}: {missing.at}: {missing.kind}: {missing.reason}",
            file=sys.stderr,
        )
    # Without --what, all work that a method can do is meant: decoding by the contraction is selected only by name.
    asked_for = [item for item in store.result.missing if args.what is not None or item.reason != WHOLE_SEQUENCES]
    return 2 if asked_for else 0


def empty_result(args: Namespace, config: Config, built: Sequence[Built], device: str) -> SpeedResult:
    model = config.model
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        cpuinfo = []
    processors = (line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name"))
    processor = next(processors, platform.machine())
    shape = ShapeRecord(
        layers=model.num_layers,
        hidden_size=model.hidden_size,
        heads=model.num_attention_heads,
        kv_heads=model.num_kv_heads,
        parameters=sum(parameter.numel() for parameter in built[0].model.parameters()),
    )
    return SpeedResult(
        label=args.label or (Path(args.checkpoint).resolve().name if args.checkpoint else args.config[-1].stem),
        checkpoint=results.CheckpointRecord(
            path=args.checkpoint or " ".join(map(str, args.config)),
            identity=f"random weights, seed {config.seed}",
            step=None,
            seq_length=model.seq_length,
            pos_emb=config.position.pos_emb,
        ),
        overrides={"set": list(args.overrides)} if args.overrides else {},
        tokenizer=None,
        environment=environment_record(args.dtype, config.position.attention_backend, device),
        protocol=SpeedProtocol(text=PROTOCOL, rounds=args.rounds, batch=args.batch_size, shape=shape),
        machine=MachineRecord(processor=processor, threads=torch.get_num_threads(), versions=code_versions()),
        results=[],
        missing=[],
    )
