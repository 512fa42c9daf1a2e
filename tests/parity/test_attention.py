"""Every method and backend against the float64 oracle: values and gradients, by the error of a plain run in the same
precision.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megatron_coca.attention import oracle
from megatron_coca.attention.backends.flex import FlexBackend
from megatron_coca.attention.backends.reference import ReferenceBackend
from megatron_coca.attention.backends.sdpa import SdpaBackend
from megatron_coca.attention.inputs import AttentionInputs, Backend
from megatron_coca.attention.method import PositionMethod, build_method
from megatron_coca.attention.positions.forms import SCORE_FORMS
from megatron_coca.config import load_config

METHODS = ["rotary", "coca", "coca_strict", "alibi", "none"]
BACKENDS: dict[str, Backend] = {"sdpa": SdpaBackend(), "reference": ReferenceBackend()}
HEAD_DIM = 16
SCALINGS = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "ntk": {"rope_type": "ntk", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
}


def make_method(
    name: str, heads: int = 4, rotary_pct: float = 1.0, scaling: dict | None = None, length: int = 32
) -> PositionMethod:
    keys = {
        "num_layers": 1,
        "hidden_size": heads * HEAD_DIM,
        "num_attention_heads": heads,
        "seq_length": length,
        "pos_emb": name,
    }
    config = load_config([], keys | {"rotary_pct": rotary_pct, "rope_scaling": scaling or None})
    return build_method(config.position, config.model)


def tensors(
    length: int, heads: int = 4, kv_heads: int | None = None, batch: int = 2, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads, length, HEAD_DIM)] + 2 * [(batch, kv_heads or heads, length, HEAD_DIM)]
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)  # type: ignore[return-value]


def theta(method: PositionMethod, length: int) -> Tensor:
    rotary = method.rotary
    if rotary is None:
        return torch.zeros(0, dtype=torch.float64)
    return oracle.frequencies(rotary.dim, rotary.base, rotary.rope_type, rotary.factor, rotary.training_length, length)


def production(
    method: PositionMethod, backend: Backend, q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None = None
) -> Tensor:
    positions = torch.arange(q.shape[2]) if positions is None else positions
    tables = method.tables(positions, int(positions.max()) + 1, q.dtype)
    return backend.attend(method.prepare(q, k, v, tables))


def with_gradients(function, operands: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Output and the gradients of (q, k, v) for a fixed random cotangent, all in float64."""
    leaves = [operand.to(dtype).requires_grad_() for operand in operands]
    out = function(*leaves)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(out.dtype)
    grads = torch.autograd.grad(out, leaves, cotangent, allow_unused=True)
    return [
        out.detach().double(),
        *(torch.zeros_like(leaf).double() if g is None else g.double() for g, leaf in zip(grads, leaves, strict=True)),
    ]


def relative_errors(got: list[Tensor], exact: list[Tensor]) -> list[float]:
    """Norm of the difference against the norm; absolute below 1, because the gradient of a lone token's query is
    exactly zero.
    """
    return [float((a - b).norm() / b.norm().clamp(min=1.0)) for a, b in zip(got, exact, strict=True)]


def check(
    name: str, backend: Backend, length: int, dtype: torch.dtype, kv_heads: int | None = None, rotary_pct: float = 1.0
) -> None:
    """Error at most twice that of the oracle's formulas run in the same precision, both against float64."""
    method, operands = make_method(name, rotary_pct=rotary_pct), tensors(length, kv_heads=kv_heads)
    rounded = tuple(x.to(dtype).double() for x in operands)
    angles = theta(method, length)
    exact = with_gradients(lambda q, k, v: oracle.attention(name, q, k, v, angles), rounded, torch.float64)
    plain = with_gradients(lambda q, k, v: oracle.attention(name, q, k, v, angles, dtype=dtype), rounded, dtype)
    ours = with_gradients(lambda q, k, v: production(method, backend, q, k, v), rounded, dtype)
    floor = 16 * torch.finfo(dtype).eps
    for what, error, allowed in zip(
        ("out", "dq", "dk", "dv"), relative_errors(ours, exact), relative_errors(plain, exact), strict=True
    ):
        assert error <= max(2 * allowed, floor), f"{what}: {error:.2e} against {allowed:.2e} of a plain run"


@pytest.mark.parametrize("length", [1, 2, 63, 111, 1000])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", METHODS)
def test_float32(name: str, backend: str, length: int) -> None:
    check(name, BACKENDS[backend], length, torch.float32)


@pytest.mark.parametrize("length", [2, 111])
@pytest.mark.parametrize("name", METHODS)
def test_float64(name: str, length: int) -> None:
    check(name, BACKENDS["sdpa"], length, torch.float64)


@pytest.mark.parametrize("length", [63, 600])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["rotary", "coca", "coca_strict", "alibi", "none"])
def test_bfloat16(name: str, backend: str, length: int) -> None:
    """The plain run has no complex bfloat16 rotation: it rounds operands, scores and weights as eager attention in
    bfloat16 does.
    """
    method, operands = make_method(name), tensors(length)
    rounded = tuple(x.bfloat16().double() for x in operands)
    angles = theta(method, length)
    exact = with_gradients(lambda q, k, v: oracle.attention(name, q, k, v, angles), rounded, torch.float64)
    plain = with_gradients(lambda q, k, v: eager(method, q, k, v), rounded, torch.bfloat16)
    ours = with_gradients(lambda q, k, v: production(method, BACKENDS[backend], q, k, v), rounded, torch.bfloat16)
    for what, error, allowed in zip(
        ("out", "dq", "dk", "dv"), relative_errors(ours, exact), relative_errors(plain, exact), strict=True
    ):
        assert error <= 2 * allowed, f"{what}: {error:.2e} against {allowed:.2e} of a plain run"


def eager(method: PositionMethod, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Textbook attention with every intermediate rounded to the operands' dtype (the bias apart)."""
    length = q.shape[2]
    tables = method.tables(torch.arange(length), length, q.dtype)
    inputs = method.prepare(q, k, v, tables)
    scores = (inputs.query @ inputs.key.transpose(-1, -2)) * inputs.scale
    distance = torch.arange(length)[:, None] - torch.arange(length)[None]
    if inputs.bias is not None:
        scores = scores + inputs.bias.at(distance.float()).to(scores.dtype)
    return torch.softmax(scores.masked_fill(distance < 0, -math.inf), dim=-1) @ v


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", METHODS)
def test_grouped_query_attention(name: str, backend: str, kv_heads: int) -> None:
    check(name, BACKENDS[backend], 65, torch.float32, kv_heads=kv_heads)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["rotary", "coca", "coca_strict"])
def test_partial_rotary(name: str, backend: str) -> None:
    check(name, BACKENDS[backend], 65, torch.float32, rotary_pct=0.25)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("length", [20, 100])
@pytest.mark.parametrize("name", ["rotary", "coca", "coca_strict"])
def test_extensions(name: str, length: int, scaling: str) -> None:
    """Up to and beyond the training length of 32."""
    method, (q, k, v) = make_method(name, scaling=SCALINGS[scaling]), tensors(length)
    expected = oracle.attention(name, q, k, v, theta(method, length))
    torch.testing.assert_close(production(method, BACKENDS["sdpa"], q, k, v), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_positions_that_do_not_start_at_zero(name: str) -> None:
    """A shift changes the scores of CoCA-Slack and of nothing else, as the table of forms declares."""
    method, (q, k, v) = make_method(name), tensors(40)
    shifted = torch.arange(40) + 1000
    moved = production(method, BACKENDS["sdpa"], q, k, v, shifted)
    expected = oracle.attention(name, q, k, v, theta(method, 40), shifted)
    torch.testing.assert_close(moved, expected, rtol=1e-9, atol=1e-11)
    unmoved = production(method, BACKENDS["sdpa"], q, k, v)
    assert torch.allclose(moved, unmoved, rtol=1e-9, atol=1e-9) == SCORE_FORMS[name].shift_invariant


def test_positions_per_row() -> None:
    method, (q, k, v) = make_method("coca"), tensors(30)
    positions = torch.stack((torch.arange(30), torch.arange(30) + 7))
    together = production(method, BACKENDS["sdpa"], q, k, v, positions)
    for row in range(2):
        alone = production(
            method, BACKENDS["sdpa"], q[row : row + 1], k[row : row + 1], v[row : row + 1], positions[row]
        )
        torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "backend", [SdpaBackend(), ReferenceBackend(), FlexBackend(compiled=False)], ids=["sdpa", "reference", "flex"]
)
@pytest.mark.parametrize("name", ["rotary", "alibi"])
def test_queries_that_are_the_last_of_the_keys(name: str, backend: Backend) -> None:
    """The rows of a full pass, from the last queries alone."""
    method, (q, k, v) = make_method(name), tensors(700, batch=1)
    q, k, v = q.float(), k.float(), v.float()
    inputs = method.prepare(q, k, v, method.tables(torch.arange(700), 700, q.dtype))
    full = BACKENDS["reference"].attend(inputs)
    last = AttentionInputs(inputs.query[:, :, -5:], inputs.key, inputs.value, inputs.scale, inputs.bias)
    torch.testing.assert_close(backend.attend(last), full[:, :, -5:], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("name", METHODS)
def test_flex_definition(name: str) -> None:
    """FlexAttention's own dense definition on the CPU; its compiled kernel is tested where there is a GPU."""
    method, (q, k, v) = make_method(name), tensors(150, kv_heads=2)
    q, k, v = q.float(), k.float(), v.float()
    expected = oracle.attention(name, q, k, v, theta(method, 150))
    torch.testing.assert_close(
        production(method, FlexBackend(compiled=False), q, k, v).double(), expected, rtol=1e-4, atol=1e-5
    )


def test_a_bias_costs_no_quadratic_memory_in_autograd() -> None:
    """What autograd keeps for ALiBi is linear in the length: twice the length, about twice the bytes."""
    kept = []
    for length in (4096, 8192):
        sizes: dict[int, int] = {}

        def pack(x: Tensor, sizes: dict[int, int] = sizes) -> Tensor:
            sizes[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
            return x

        q, k, v = (x.float().requires_grad_() for x in tensors(length, batch=1))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            production(make_method("alibi"), SdpaBackend(), q, k, v)
        kept.append(sum(sizes.values()))
    assert kept[1] < 2.05 * kept[0]


def test_dropout_is_in_the_contract() -> None:
    torch.manual_seed(0)
    q, k, v = (x.float() for x in tensors(50))
    method = make_method("none")
    inputs = method.prepare(q, k, v, None, dropout=0.5)
    for backend in BACKENDS.values():
        assert not torch.allclose(backend.attend(inputs), backend.attend(inputs))


def test_sdpa_refuses_a_biased_model_that_was_built_for_another_device() -> None:
    inputs = SimpleNamespace(bias=object(), query=SimpleNamespace(device=torch.device("cuda")))
    with pytest.raises(RuntimeError, match="build it with the device"):
        SdpaBackend().attend(inputs)  # type: ignore[arg-type]
