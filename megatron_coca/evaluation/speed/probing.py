"""One call of everything that is to be timed: whether it fits, how much memory it takes, and about how long."""

import ctypes
import json
import math
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch
from torch import Tensor

from megatron_coca.attention.context import PositionContext
from megatron_coca.attention.layer import SelfAttention
from megatron_coca.checkpoints.weights import DTYPES
from megatron_coca.config import load_config
from megatron_coca.evaluation.results import measured, out_of_memory
from megatron_coca.evaluation.speed.cases import DENSE, Built, Case, build
from megatron_coca.evaluation.speed.records import What
from megatron_coca.model import GPT
from megatron_coca.model.build import M_MMAP_THRESHOLD

DECODED = 8
"""Tokens decoded one after another in one call, because one takes too little time to be measured well."""


@dataclass(frozen=True)
class Workload:
    """A call that can be repeated, and how many tokens (of one row; per call) its time is divided by."""

    call: Callable[[], object]
    tokens: int
    passes: int = 1


def first_layer(model: GPT) -> SelfAttention:
    """The attention of the first block."""
    return next(module for module in model.modules() if isinstance(module, SelfAttention))


def _ids(model: GPT, length: int, batch: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(model.vocab_size, (batch, length), generator=generator).to(device)


def _layer(model: GPT, length: int, batch: int) -> tuple[SelfAttention, Tensor, PositionContext]:
    """The first attention layer, hidden states for it, and the frame, which all layers of a pass share."""
    layer = first_layer(model)
    weight = layer.dense.weight
    generator = torch.Generator().manual_seed(length)
    hidden = torch.randn(batch, length, weight.shape[0], generator=generator).to(weight)
    with torch.no_grad():
        frame = model.positions(torch.arange(length, device=weight.device), length, weight.dtype)
    return layer, hidden, frame


def layer_forward(model: GPT, length: int, batch: int) -> Workload:
    """Projections and attention, hidden states to hidden states; without the tables that all layers share."""
    model.eval()
    layer, hidden, frame = _layer(model, length, batch)

    def call() -> Tensor:
        with torch.no_grad():
            return layer(hidden, frame)

    return Workload(call, length * batch)


def layer_forward_backward(model: GPT, length: int, batch: int) -> Workload:
    """The same, and the gradients of the hidden states and of the layer's weights."""
    model.train()
    layer, hidden, frame = _layer(model, length, batch)
    hidden.requires_grad_()
    wanted = [hidden, *layer.parameters()]
    gradient = torch.ones_like(hidden)

    def call() -> object:
        return torch.autograd.grad(layer(hidden, frame), wanted, gradient, allow_unused=True)

    return Workload(call, length * batch)


def model_forward(model: GPT, length: int, batch: int) -> Workload:
    """All tokens through the model, and the logits of the last: what a prompt costs."""
    model.eval()
    ids = _ids(model, length, batch, first_layer(model).dense.weight.device)

    def call() -> Tensor:
        with torch.no_grad():
            return model.logits(model.hidden_states(ids, last=1))

    return Workload(call, length * batch)


def model_forward_backward(model: GPT, length: int, batch: int) -> Workload:
    """The loss of all tokens and the gradients of all weights: a training step without the optimizer."""
    model.train()
    ids = _ids(model, length + 1, batch, first_layer(model).dense.weight.device)

    def call() -> None:
        model.loss(model.hidden_states(ids[:, :-1]), ids[:, 1:]).backward()
        for parameter in model.parameters():
            parameter.grad = None

    return Workload(call, length * batch)


def decode(model: GPT, length: int, batch: int) -> Workload:
    """Tokens one by one after `length` cached ones, which are drawn instead of computed; the cache forgets them again."""
    model.eval()
    cache, method = model.new_cache(length=length + DECODED), model.method
    weight = first_layer(model).dense.weight
    kv_heads = _kv_heads(first_layer(model))
    generator = torch.Generator().manual_seed(length)
    for layer in cache.layers:
        widths = method.cached_width, method.head_dim
        layer.append(*(torch.randn(batch, kv_heads, length, width, generator=generator).to(weight) for width in widths))
    positions = torch.arange(length, device=weight.device)
    ids = _ids(model, DECODED, batch, weight.device)

    def call() -> None:
        cache.positions = positions
        with torch.no_grad():
            for step in range(DECODED):
                model(ids[:, step : step + 1], cache=cache)
        for layer in cache.layers:
            layer.cut(length)

    return Workload(call, batch, DECODED)


def _kv_heads(layer: SelfAttention) -> int:
    rows = layer.query_key_value.out_features // layer.head_dim
    return rows // (layer.queries_per_key + 2)


WORKLOADS: dict[What, Callable[[GPT, int, int], Workload]] = {
    "layer forward": layer_forward,
    "layer forward+backward": layer_forward_backward,
    "model forward": model_forward,
    "model forward+backward": model_forward_backward,
    "decode": decode,
}

SHARE_OF_FREE = 0.8
SCORES: dict[What, tuple[int, int]] = {
    "layer forward": (5, 0),
    "layer forward+backward": (8, 0),
    "model forward": (5, 0),
    "model forward+backward": (6, 2),
    "decode": (0, 0),
}
"""N x N tensors that a dense backend holds at once at most: while one layer is computed, and for each layer until the
backward pass. Only what is far beyond the memory is left out by this estimate."""
SHORT, STEP = 256, 4
"""Tokens of a call that nothing guards, and by how much the next length at most exceeds the last one called."""
WHOLE_SEQUENCES = "the contraction computes whole sequences only"
"""Why it has no cells of decoding."""


@dataclass(frozen=True)
class Plan:
    """What is measured of every method; `budget` in seconds is for all rounds of one method at one length."""

    whats: tuple[What, ...]
    lengths: tuple[int, ...]
    batch: int
    rounds: int
    budget: float


@dataclass(frozen=True)
class Probe:
    """One of a method's cells: memory of a call, or why it is not measured."""

    what: What
    length: int
    peak: int | None = None
    kind: Literal["refused", "out of memory", "not run", "failed"] | None = None
    reason: str = ""


def free_bytes(device: torch.device) -> int:
    """What may still be allocated."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) * 1024


def _nothing() -> None:
    pass


@dataclass
class _Climb:
    """One kind of work of a method, at longer and longer lengths; `called` has length and seconds of each call."""

    built: Built
    what: What
    plan: Plan
    settle: Callable[[], object]
    called: list[tuple[int, float]] = field(default_factory=list)

    def at(self, length: int) -> Probe:
        """A call of `length` tokens, unless something stands against it."""
        calls = self.plan.rounds + 1 if length in self.plan.lengths else 1
        obstacle = _too_large(self.built, self.what, length, self.plan.batch) or self._too_slow(length, calls)
        return obstacle or self._tried(length)

    def _too_slow(self, length: int, calls: int) -> Probe | None:
        expected = calls * expected_seconds(self.called, length)
        if expected <= self.plan.budget:
            return None
        reason = f"would take about {_digits(expected)} s, --budget-seconds allows {self.plan.budget:.12g}"
        return Probe(self.what, length, kind="not run", reason=reason)

    def _tried(self, length: int) -> Probe:
        device = first_layer(self.built.model).dense.weight.device
        try:
            work = WORKLOADS[self.what](self.built.model, length, self.plan.batch)
            held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
            self.settle()
            with measured(device) as meter:
                work.call()
        except ValueError as error:
            return Probe(self.what, length, kind="refused", reason=str(error))
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            reason = f"the memory of {device} does not suffice ({_gib(free_bytes(device))} were free)"
            return Probe(self.what, length, kind="out of memory", reason=reason)
        self.called.append((length, meter.seconds))
        return Probe(self.what, length, None if meter.peak_memory_bytes is None else meter.peak_memory_bytes - held)


def probe(built: Built, plan: Plan, settle: Callable[[], object] = _nothing) -> Iterator[Probe]:
    """Every cell of a method, here. `settle` is called before each measurement."""
    for what in plan.whats:
        if what == "decode" and built.case.contracted:
            yield from (Probe(what, length, kind="refused", reason=WHOLE_SEQUENCES) for length in sorted(plan.lengths))
            continue
        climb = _Climb(built, what, plan, settle)
        for length in stepping_stones(plan.lengths):
            found = climb.at(length)
            if length in plan.lengths:
                yield found


def stepping_stones(lengths: Sequence[int]) -> list[int]:
    """The lengths to call, ascending: those asked for, and others before them so that time is known from two calls
    before it can matter, and is never foretold for more than `STEP` times the length.
    """
    first = min(SHORT, *lengths)
    stones = [each for each in (first // 2, first) if each > 0]
    for length in sorted(lengths):
        while stones[-1] * STEP < length:
            stones.append(stones[-1] * STEP)
        if length > stones[-1]:
            stones.append(length)
    return stones


def expected_seconds(called: Sequence[tuple[int, float]], length: int) -> float:
    """Of a call of `length` tokens after calls of (length, seconds): as between the last two, but neither less than
    linear nor more than quadratic, which it is taken for after one. 0 where nothing is known.
    """
    if not called:
        return 0.0
    last, seconds = called[-1]
    exponent = 2.0
    if len(called) > 1:
        before, faster = called[-2]
        exponent = math.log(seconds / faster) / math.log(last / before)
    return seconds * (length / last) ** min(2.0, max(1.0, exponent))


def _too_large(built: Built, what: What, length: int, batch: int) -> Probe | None:
    """Scores that are far beyond the memory are not even tried."""
    if built.backend not in DENSE:
        return None
    model, weight = built.case.config.model, first_layer(built.model).dense.weight
    working, kept = SCORES[what]
    tensors = (working + kept * model.num_layers) * batch * model.num_attention_heads
    needed, free = tensors * length**2 * weight.element_size(), SHARE_OF_FREE * free_bytes(weight.device)
    if needed <= free:
        return None
    reason = f"its {length} x {length} scores take about {_gib(needed)}, free are {_gib(free)}"
    return Probe(what, length, kind="out of memory", reason=reason)


def _digits(seconds: float) -> str:
    """Two that count, without an exponent."""
    return f"{float(f'{seconds:.2g}'):.12g}"


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


SMALLEST_BLOCK = 64 << 10
"""Bytes from which on a freed block is given back at once, so that resident memory is memory in use."""
MODULE = "megatron_coca.evaluation.speed.probing"
ROOT = Path(__file__).parents[3]
KILLED = -9


def probe_apart(case: Case, plan: Plan, dtype: str) -> list[Probe]:
    """Every cell of a method."""
    with TemporaryDirectory() as folder:
        config = Path(folder) / "config.yml"
        config.write_text(case.config.to_yaml())
        asked = {"label": case.label, "config": str(config), "contracted": case.contracted, "dtype": dtype}
        asked |= {"plan": asdict(plan), "threads": torch.get_num_threads()}
        command = [sys.executable, "-m", MODULE]
        answer = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, cwd=ROOT)
    found = [Probe(**json.loads(line)) for line in answer.stdout.splitlines() if line.startswith("{")]
    return found if answer.returncode == 0 else [*found, *lost(plan, found, answer.returncode, answer.stderr)]


def lost(plan: Plan, found: Sequence[Probe], status: int, errors: str) -> Iterator[Probe]:
    """What a process that ended early, with exit status `status`, did not come to."""
    known = {(each.what, each.length) for each in found}
    last = (errors.strip().splitlines() or ["no message"])[-1]
    for what, length in ((what, length) for what in plan.whats for length in sorted(plan.lengths)):
        if (what, length) in known:
            continue
        if status == KILLED:
            yield Probe(what, length, kind="out of memory", reason="the system ended its process, as it does then")
        else:
            yield Probe(what, length, kind="failed", reason=f"its process ended with {status}: {last}")


def main() -> None:
    """Reads what is asked from the standard input, and writes a line of JSON for each cell."""
    asked = json.load(sys.stdin)
    torch.set_num_threads(asked["threads"])
    given = asked["plan"]
    plan = Plan(tuple(given["whats"]), tuple(given["lengths"]), given["batch"], given["rounds"], given["budget"])
    case = Case(asked["label"], load_config([asked["config"]]), asked["contracted"])
    built = build(case, "cpu", DTYPES[asked["dtype"]])
    _warm(built)
    _limit_memory()
    for found in probe(built, plan, _give_back):
        print(json.dumps(asdict(found)), flush=True)


def _warm(built: Built) -> None:
    """Libraries make buffers of their own at the first call."""
    WORKLOADS["model forward+backward"](built.model, 8, 1).call()


def _give_back() -> None:
    """Return what is free to the system: blocks that are used again would not make resident memory grow."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):  # glibc
        library.malloc_trim(0)


def _limit_memory() -> None:
    """Let allocations beyond the free memory fail, instead of letting the system end some process."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, SMALLEST_BLOCK)
    lines = Path("/proc/self/status").read_text().splitlines()
    held = next(int(line.split()[1]) for line in lines if line.startswith("VmData:")) * 1024
    limit = held + int(SHARE_OF_FREE * free_bytes(torch.device("cpu")))
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))


if __name__ == "__main__":
    main()
