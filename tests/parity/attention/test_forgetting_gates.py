"""Forgetting gates against the float64 oracle: values and gradients of every backend that supports them, in every
precision, and the precision after 32,768 tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_coca.attention.backends import gated
from megatron_coca.attention.backends.triton import TritonBackend
from megatron_coca.attention.inputs import AttentionInputs
from megatron_coca.attention.positions.gates import GATES
from megatron_coca.config import load_config
from megatron_coca.model import build_model
from tests.parity.attention_cases import (
    BACKENDS,
    HEADS,
    Case,
    Layout,
    Result,
    differentiated,
    error,
    inputs_of,
    with_gradients,
)
from tests.reference.dense import attention

CASES = {name: Case(name) for name in ("none", "rotary", "coca", "coca_strict", "alibi", "kerple_log")} | {
    "rerope-coca": Case("coca", relative={"type": "rerope", "window": 20}),
    "streaming": Case("coca_strict", relative={"type": "streaming", "window": 20, "sinks": 4}),
    "log_n": Case("coca", logit_scaling="log_n"),
}
UNBIASED = ("none", "rotary", "coca", "coca_strict", "log_n")
SERVED = [(name, backend) for backend in ("sdpa", "merge", "reference") for name in UNBIASED]
SERVED += [(name, backend) for backend in ("sdpa", "reference") for name in ("alibi", "kerple_log")]
SERVED += [(name, backend) for backend in ("merge", "reference") for name in ("rerope-coca", "streaming")]
FAST = [(name, backend) for name, backend in SERVED if backend != "reference"]
DOCUMENTS = ((0,) * 30 + (1,) * 1 + (2,) * 50, (4,) * 64 + (3,) * 17)


def opened(layout: Layout, average: float = 0.0) -> Tensor:
    """w x + b of every token, [batch, heads, length] float64 of values that bfloat16 holds. With an average, that of
    FoX's log gates: one half of the tokens forgets next to nothing, the other twice as much.
    """
    generator = torch.Generator().manual_seed(17)
    drawn = 2 * torch.randn(layout.batch, HEADS, layout.length, generator=generator, dtype=torch.float64) + 1
    if average < 0:
        drawn = torch.where(drawn > 1, drawn + 4, 2 * average * torch.rand(drawn.shape, generator=generator) * 2)
    return drawn.bfloat16().double()


def exact(
    case: Case, gate: str, layout: Layout, dtype: torch.dtype, computed_in: torch.dtype, average: float = 0.0
) -> Result:
    def compute(operands: Sequence[Tensor], learned: Mapping[str, Tensor]) -> Tensor:
        weights = {name: value for name, value in learned.items() if name != "opened"}
        setting = replace(case.setting(layout.scored, weights, layout.documents), gate=gate, opened=learned["opened"])
        theta = case.theta(layout.scored, weights)
        return attention(case.pos_emb, *operands, theta, layout.place, computed_in, setting)

    operands = [x.to(computed_in) for x in layout.operands(dtype)]
    return with_gradients(compute, operands, case.learned() | {"opened": opened(layout, average).to(computed_in)})


def production(case: Case, gate: str, layout: Layout, dtype: torch.dtype, backend: str, average: float = 0.0) -> Result:
    leaves = [x.to(dtype).requires_grad_() for x in layout.operands(dtype)]
    of_gate = opened(layout, average).to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    weights: dict[str, Tensor] = {}
    inputs = inputs_of(case, layout, leaves, weights).replace(gates=GATES[gate](of_gate))
    return differentiated(BACKENDS[backend].attend(inputs), leaves, weights | {"opened": of_gate})


def check(
    name: str,
    backend: str,
    layout: Layout,
    dtype: torch.dtype = torch.float32,
    gate: str = "fox",
    average: float = 0.0,
    roundings: int = 1,
) -> None:
    """At most twice the error of the oracle's formulas in the same precision, with gates in float32 as everywhere; in
    float64, in which these are exact, 1e-10. Half precision is computed in float32 on the CPU, and rounded once; with
    more `roundings` kernels round the gradients of keys, of which that of the gates is a running sum.
    """
    case, wide = CASES[name], torch.promote_types(dtype, torch.float32)
    true = exact(case, gate, layout, dtype, torch.float64, average).all
    plain = exact(case, gate, layout, dtype, wide, average).all
    for what, got in production(case, gate, layout, dtype, backend, average).all.items():
        off, allowed = error(got, true[what]), error(plain[what], true[what])
        rounding = (roundings * (4 if what == "opened" else 1) if dtype.itemsize == 2 else 16) * torch.finfo(dtype).eps
        limit = 1e-10 if dtype == torch.float64 else max(2 * allowed, rounding)
        assert off <= limit, f"{what}: {off:.2e} against {allowed:.2e} of a plain run"


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(("name", "backend"), SERVED)
def test_float32(name: str, backend: str, gate: str) -> None:
    check(name, backend, Layout(111, kv_heads=2), gate=gate)


@pytest.mark.parametrize(("name", "backend"), FAST)
def test_several_blocks(name: str, backend: str) -> None:
    check(name, backend, Layout(2 * gated.QUERY_ROWS + 77, batch=1, kv_heads=1))


@pytest.mark.parametrize(("name", "backend"), SERVED)
def test_float64(name: str, backend: str) -> None:
    layout = Layout(gated.QUERY_ROWS + 9, batch=1, kv_heads=4)
    ours = production(CASES[name], "cable", layout, torch.float64, backend).all
    for what, expected in exact(CASES[name], "cable", layout, torch.float64, torch.float64).all.items():
        allowed = 1e-10 if what in ("out", "q", "k", "v", "opened") else 1e-6  # learned biases are float32
        assert error(ours[what], expected) < allowed, what


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "backend"), [(name, backend) for name, backend in FAST if name != "kerple_log"])
def test_half_precision(name: str, backend: str, dtype: torch.dtype) -> None:
    check(name, backend, Layout(gated.QUERY_ROWS + 77, batch=1, kv_heads=2), dtype)


@pytest.mark.parametrize("average", [0.0, -128.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "backend"), [("coca", "sdpa"), ("rerope-coca", "merge")])
def test_half_precision_of_kernels(
    name: str, backend: str, dtype: torch.dtype, average: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operands of a GPU, where kernels take half precision: a bias is a sum of three numbers."""
    monkeypatch.setattr(gated, "widened", lambda inputs: inputs)
    check(name, backend, Layout(gated.QUERY_ROWS + 77, batch=1, kv_heads=2), dtype, average=average, roundings=16)


@pytest.mark.parametrize("average", [0.0, -400.0])
@pytest.mark.parametrize("name", ["coca", "alibi", "rerope-coca"])
def test_triton(name: str, average: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernels, on a CPU in Triton's interpreter, with heads of 24 features in two blocks of queries."""
    pytest.importorskip("triton")
    monkeypatch.setitem(BACKENDS, "triton", TritonBackend())
    monkeypatch.setattr(gated, "QUERY_ROWS", 40)
    check(name, "triton", Layout(70, batch=1, kv_heads=2), average=average)


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize(("name", "backend"), FAST)
def test_one_and_two_tokens(name: str, backend: str, length: int) -> None:
    check(name, backend, Layout(length))


@pytest.mark.parametrize("queries", [1, 5, 40])
@pytest.mark.parametrize(("name", "backend"), SERVED)
def test_packed_documents_and_late_queries(name: str, backend: str, queries: int) -> None:
    """The gates of other documents cancel, that of a document's first token counts for none of its pairs."""
    if CASES[name].relative.get("type") == "streaming":
        check(name, backend, Layout(63, queries=queries, kv_heads=2))
        return
    places = tuple(tuple(index - ids.index(each) for index, each in enumerate(ids)) for ids in DOCUMENTS)
    check(name, backend, Layout(81, queries=queries, kv_heads=2, positions=places, ids=DOCUMENTS))


@pytest.mark.parametrize("backend", ["sdpa", "merge"])
def test_documents_in_several_blocks(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated, "QUERY_ROWS", 16)
    check("coca_strict", backend, Layout(81, kv_heads=2, ids=DOCUMENTS))


STRONG = [("none", "sdpa"), ("coca", "merge"), ("alibi", "sdpa"), ("rerope-coca", "merge")]


@pytest.mark.parametrize("average", [-1.0, -128.0, -1000.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "backend"), STRONG)
def test_strong_gates(name: str, backend: str, dtype: torch.dtype, average: float) -> None:
    """The sum over a block of queries is up to -256,000, and no row loses its own gates."""
    layout = Layout(gated.QUERY_ROWS + 77, batch=1, kv_heads=2)
    check(name, backend, layout, dtype, average=average)


@pytest.mark.parametrize("queries", [1, 5, 40])
@pytest.mark.parametrize(("name", "backend"), STRONG)
def test_strong_gates_of_documents_and_late_queries(name: str, backend: str, queries: int) -> None:
    places = tuple(tuple(index - ids.index(each) for index, each in enumerate(ids)) for ids in DOCUMENTS)
    layout = Layout(81, queries=queries, kv_heads=1, positions=places, ids=DOCUMENTS)
    check(name, backend, layout, torch.float64, average=-400.0)


@torch.no_grad()
@pytest.mark.parametrize("gate", GATES)
def test_models_with_strong_gates_decode_as_they_read(gate: str) -> None:
    """One pass has two blocks of queries; with a cache each step is a block of its own."""
    keys = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_kv_heads": 2, "seq_length": 64}
    model = (
        build_model(load_config([], keys | {"vocab_size": 50, "pos_emb": "coca", "forgetting_gate": gate}))
        .double()
        .eval()
    )
    for block in model.blocks:
        block.attention.position_gates.projection.weight.mul_(3000)
        block.attention.position_gates.projection.bias.fill_(-300.0 if gate == "fox" else 300.0)
    ids, cache = torch.randint(50, (1, 290)), model.new_cache()
    steps = torch.cat([model(part, cache=cache) for part in ids.split([100, 170, *[1] * 20], dim=1)], dim=1)
    torch.testing.assert_close(steps, model(ids), rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_32768_tokens_are_as_exact_as_512(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """F is near -20,000 at the last token; in float32 its neighbours are 0.002 apart, and in bfloat16 128."""
    monkeypatch.setattr(gated, "widened", lambda inputs: inputs)  # as on a GPU
    errors = {}
    for length in (512, 32768):
        layout = Layout(length, queries=100, batch=1)
        assert length < 32768 or float(torch.sigmoid(opened(layout)).log().sum(-1).max()) < -15000
        true = exact(CASES["coca"], "fox", layout, dtype, torch.float64).all
        ours = production(CASES["coca"], "fox", layout, dtype, "sdpa").all
        errors[length] = {what: error(ours[what], true[what]) for what in true}
    for what, short in errors[512].items():
        assert errors[32768][what] < 1.5 * short, what


@pytest.mark.slow
def test_a_common_origin_loses_the_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an origin for every block of queries the first rows would have biases of thousands."""
    layout = Layout(4096, batch=1)
    true = exact(CASES["none"], "fox", layout, torch.float32, torch.float64).out
    near = error(production(CASES["none"], "fox", layout, torch.float32, "sdpa").out, true)
    monkeypatch.setattr(gated, "QUERY_ROWS", 1 << 20)
    assert error(production(CASES["none"], "fox", layout, torch.float32, "sdpa").out, true) > 8 * near


def test_gates_that_close_hide_what_was_before() -> None:
    """A gate of e^-1e4 in float16: the row is that of the tokens from there on, and nothing overflows."""
    layout = Layout(40, batch=1)
    q, k, v = (x.half() for x in layout.operands(torch.float16))
    inputs = inputs_of(CASES["none"], layout, (q, k, v), {})
    gates = torch.zeros(1, HEADS, 40)
    gates[:, :, 25] = -1e4
    cut = AttentionInputs(
        (replace(inputs.segments[0], query=q[:, :, 25:], key=k[:, :, 25:]),), v[:, :, 25:], inputs.scale
    )
    for backend in ("sdpa", "merge", "reference"):
        out = BACKENDS[backend].attend(inputs.replace(gates=gates))[:, :, 25:]
        torch.testing.assert_close(out, BACKENDS[backend].attend(cut), rtol=1e-2, atol=2e-3)
