"""Time position methods and attention backends of the 350M model, and write each result as a JSON line at once.

    python tools/gpu/speed.py --output FILE.jsonl --kind "layer forward+backward" --lengths 512 2048
    python tools/gpu/speed.py --output FILE.jsonl --backends --lengths 2048
    python tools/gpu/speed.py --output FILE.jsonl --packed --lengths 2048
    python tools/gpu/speed.py --output FILE.jsonl --graphs --lengths 2048 --methods rotary coca rerope

`--kind` compares methods with rotary, `--backends` compares the backends that `auto` could choose for a method,
`--packed` compares the kernels for packed documents, and `--graphs` compares two ways of decoding: with fixed shapes in
a CUDA graph, and with a growing cache. In every round, each side makes one call. If a case runs out of memory, this is
recorded, and the other cases continue.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron_coca import methods
from megatron_coca.attention.build import BACKENDS
from megatron_coca.attention.inputs import CAUSAL, AttentionInputs, Segment, documents_from_ids
from megatron_coca.config import load_config
from megatron_coca.evaluation.tasks.speed.measure import (
    DECODED,
    WORKLOADS,
    Workload,
    backend_of,
    interleaved,
    measured_peak,
    share_weights,
    token_ids,
)
from megatron_coca.model import GPT, GREEDY, build_model
from megatron_coca.model.generate import TokenChoice
from megatron_coca.model.static_decoding import StaticDecoder
from tools.gpu.cases import run_cases
from tools.records import compared

MODEL = ROOT / "configs/350M/roformer_coca.yml"
REROPE = {"relative_positions": {"type": "rerope", "window": 256}}
LM_INFINITE = {"type": "lm_infinite", "window": 256}
METHODS: dict[str, dict[str, Any]] = {
    "rotary": {"pos_emb": "rotary"},
    "coca": {"pos_emb": "coca"},
    "rerope": {"pos_emb": "rotary", **REROPE},
    "coca_rerope": {"pos_emb": "coca", **REROPE},
    "alibi": {"pos_emb": "alibi"},
    "pope": {"pos_emb": "pope"},
}
"""Methods that are timed, by name; the first is the base of all ratios. Methods that this version does not declare are
left out, so a new method needs one row here.
"""
CANDIDATES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "alibi": ({"pos_emb": "alibi"}, ("flex", "triton")),
    "kerple_log": ({"pos_emb": "kerple_log"}, ("flex", "triton")),
    "rerope": ({"pos_emb": "rotary", **REROPE}, ("triton", "merge")),
    "lm_infinite": ({"pos_emb": "rotary", "relative_positions": LM_INFINITE}, ("triton", "merge")),
    "sliding_window": ({"pos_emb": "rotary", "sliding_window_width": 256}, ("triton", "merge")),
    "coca": ({"pos_emb": "coca"}, ("sdpa", "triton", "flex")),
    "pope": ({"pos_emb": "pope"}, ("sdpa", "triton")),
}
"""For each method, its keys and its backends. The first backend is the base of all ratios."""
TOKENS = 65536
ROWS = 8
"""Maximum number of tokens and of rows in one call."""
DOCUMENT = 300
"""Mean number of tokens of a packed document."""
ERROR = 0.02
"""Largest allowed relative difference between two kernels for packed documents in half precision."""


def available(keys: dict[str, Any]) -> bool:
    """Return whether this version declares the method."""
    return keys["pos_emb"] in methods.names("pos_emb")


class Setting:
    """The models of one kind of work, on one device. All models share the weights of the first one."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device, self.dtype = options.device, getattr(torch, options.dtype)
        self.keys = options.keys
        self.first: GPT | None = None
        self.built = lru_cache(3)(self._built)  # the model of 24 layers takes a gigabyte

    def _built(self, name: str, kind: str, backend: str) -> tuple[GPT, str]:
        keys = {**METHODS, **{each: given for each, (given, _) in CANDIDATES.items()}}[name]
        layers: dict[str, Any] = {"num_layers": 1} if kind.startswith("layer") else {}
        config = load_config([MODEL], self.keys).override(layers | keys | {"attention_backend": backend})
        model = build_model(config, self.device, training="backward" in kind).to(self.dtype)
        if self.first is None:
            self.first = model
        share_weights(model, self.first)
        return model, backend_of(model, config, self.device, kind)


def pair(
    setting: Setting, kind: str, length: int, rounds: int, base: tuple[str, str], own: tuple[str, str]
) -> dict[str, Any]:
    """Time one method and backend beside the base."""
    rows = max(1, min(ROWS, TOKENS // length)) if kind.startswith("layer") else 1
    works, kernels = {}, {}
    for name, backend in dict.fromkeys((base, own)):
        model, kernels[name, backend] = setting.built(name, kind, backend)
        works[name, backend] = WORKLOADS[kind](model, length, rows)  # type: ignore[index]
    device = torch.device(setting.device)
    peak = measured_peak(works[own].call, device)
    times = interleaved({key: work.call for key, work in works.items()}, rounds, device, uncounted=2)
    seconds = statistics.median(times[own]) / works[own].passes
    return {
        "kind": kind,
        "length": length,
        "rows": rows,
        "method": own[0],
        "backend": kernels[own],
        "milliseconds": round(1e3 * seconds, 4),
        "tokens_per_second": round(works[own].tokens / seconds),
        "peak_mib": round(peak / 2**20),
        "base": " ".join(base).removesuffix(" auto"),
    } | compared(times[own], times[base])


def static_decode(model: GPT, length: int) -> Workload:
    """Return the work of decoding with fixed shapes after `length` cached tokens. Its first call captures the graph."""
    model.eval()
    total = length + DECODED
    cache, ids = model.new_cache(length=total, capacity=total), token_ids(model, length + 1, 1)
    with torch.inference_mode():
        model.hidden_states(ids[:, :length], cache=cache, last=1)
    decoder = StaticDecoder(model, cache, 1, total, TokenChoice(GREEDY, None, None), past=length)

    def call() -> None:
        with torch.inference_mode():
            for _ in decoder.tokens(cache, ids[:, -1:], 0, DECODED):
                pass
            cache.cut(length)

    return Workload(call, 1, DECODED)


def graphs(setting: Setting, length: int, rounds: int, name: str) -> dict[str, Any]:
    """Time decoding with fixed shapes beside decoding with a growing cache."""
    model, kernel = setting.built(name, "decode", "auto")
    growing, static = WORKLOADS["decode"](model, length, 1), static_decode(model, length)
    device = torch.device(setting.device)
    peak = measured_peak(static.call, device)
    times = interleaved({"growing": growing.call, "static": static.call}, rounds, device, uncounted=2)
    seconds = statistics.median(times["static"]) / DECODED
    return {
        "kind": "decode with fixed shapes",
        "length": length,
        "method": name,
        "backend": f"token attention; growing: {kernel}",
        "milliseconds": round(1e3 * seconds, 4),
        "tokens_per_second": round(1 / seconds),
        "peak_mib": round(peak / 2**20),
        "base": "growing",
    } | compared(times["static"], times["growing"])


def varlen(inputs: AttentionInputs) -> Tensor:
    """Compute attention in consecutive documents of any lengths, with one call of PyTorch's FlashAttention."""
    from torch.nn.attention.varlen import varlen_attn

    assert inputs.documents is not None
    batch, _, length, _ = inputs.query.shape
    edges = [row * length + start for row, spans in enumerate(inputs.documents.spans) for start, _ in spans]
    cumulative = torch.tensor([*edges, batch * length], dtype=torch.int32, device=inputs.query.device)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (inputs.query, inputs.key, inputs.value))
    out = varlen_attn(q, k, v, cumulative, cumulative, length, length, scale=inputs.scale, window_size=(-1, 0))
    assert isinstance(out, Tensor)  # without return_aux
    return out.view(batch, length, *out.shape[1:]).transpose(1, 2)


PACKED: dict[str, Callable[[AttentionInputs], Tensor]] = {
    **{name: BACKENDS[name].attend for name in ("sdpa", "flex", "triton")},
    "varlen": varlen,
}
"""Kernels for packed documents. The first is the base of the ratios. Its output and gradients are the expected ones."""


def packed(setting: Setting, length: int, rounds: int, name: str, values: bool) -> dict[str, Any]:
    """Time attention over packed documents beside one call per document, forward and backward.

    Raises:
        AssertionError: the output or a gradient differs too much from the base.
    """
    rows, device = max(1, min(ROWS, TOKENS // length)), setting.device
    ids = (torch.rand(rows, length, generator=torch.Generator().manual_seed(length)) < 1 / DOCUMENT).cumsum(1)
    documents = documents_from_ids(ids, torch.device(device))
    generator = torch.Generator(device).manual_seed(length)  # drawing on a CPU would take seconds
    shape, dtype = (rows, length, 16, 64), setting.dtype
    drawn = [torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in range(4)]
    leaves = [x.transpose(1, 2).detach().requires_grad_() for x in drawn[:3]]
    cotangent = drawn[3].transpose(1, 2)

    def call(attend: Callable[[AttentionInputs], Tensor]) -> list[Tensor]:
        q, k, v = leaves
        out = attend(AttentionInputs((Segment(q, k, CAUSAL),), v, 0.125, documents=documents))
        return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]

    base, *_ = PACKED
    for part, own, other in zip(("output", "dq", "dk", "dv"), call(PACKED[name]), call(PACKED[base]), strict=True):
        error = float((own.double() - other.double()).norm() / other.double().norm())
        assert not values or error <= ERROR, f"{part}: differs from {base} by {error:.2e}"
    peak = measured_peak(lambda: call(PACKED[name]), torch.device(device))
    calls = {each: partial(call, PACKED[each]) for each in dict.fromkeys((base, name))}
    times = interleaved(calls, rounds, torch.device(device), uncounted=2)
    return {
        "kind": "attention over packed documents, forward+backward",
        "length": length,
        "rows": rows,
        "documents": sum(map(len, documents.spans)),
        "backend": name,
        "milliseconds": round(1e3 * statistics.median(times[name]), 4),
        "peak_mib": round(peak / 2**20),
        "base": base,
    } | compared(times[name], times[base])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all cases; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.jsonl", help="file of results")
    parser.add_argument("--kind", choices=WORKLOADS, default="layer forward+backward", help="default: %(default)s")
    parser.add_argument("--backends", action="store_true", help="compare backends")
    parser.add_argument("--packed", action="store_true", help="compare kernels for packed documents")
    parser.add_argument("--graphs", action="store_true", help="compare decoding with fixed shapes and a growing cache")
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 2048], help="tokens (default: %(default)s)")
    parser.add_argument("--methods", nargs="+", choices=[*{**METHODS, **CANDIDATES}], help="default: all")
    parser.add_argument("--rounds", type=int, default=10, help="counted measurements (default: %(default)s)")
    parser.add_argument("--device", default="cuda", help="default: %(default)s")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--keys", nargs="+", default=[], metavar="key=value", help="keys of the model")
    parser.add_argument("--without-values", action="store_true", help="compare no values")
    options = parser.parse_args(arguments)
    known = CANDIDATES if options.backends else METHODS
    if other := [name for name in options.methods or () if name not in known]:
        parser.error(f"--methods: {', '.join(other)}: not measured here; choose from {', '.join(known)}")
    setting, rounds, cases = Setting(options), options.rounds, {}
    base, *_ = METHODS
    for length in options.lengths:
        if options.packed:
            for name in PACKED:
                cases[f"packed, {length}, {name}"] = partial(
                    packed, setting, length, rounds, name, not options.without_values
                )
        elif options.graphs:
            for name in options.methods or METHODS:
                cases[f"graphs, {length}, {name}"] = partial(graphs, setting, length, rounds, name)
        elif options.backends:
            for name in options.methods or CANDIDATES:
                for backend in (backends := CANDIDATES[name][1]):
                    cases[f"{name}, {length}, {backend}"] = partial(
                        pair, setting, options.kind, length, rounds, (name, backends[0]), (name, backend)
                    )
        else:
            for name in options.methods or METHODS:
                if available(METHODS[name]):
                    cases[f"{options.kind}, {length}, {name}"] = partial(
                        pair, setting, options.kind, length, rounds, (base, "auto"), (name, "auto")
                    )
    return run_cases(cases, options.output)


if __name__ == "__main__":
    sys.exit(main())
