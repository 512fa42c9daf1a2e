"""The operand kernels against float64, the errors of the kernels, and the sizes of their launches."""

import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from megatron_coca.attention.backends.triton import TritonBackend
from megatron_coca.attention.inputs import CAUSAL, AttentionInputs, Band, Needs, Segment

pytest.importorskip("triton")

from megatron_coca.kernels import attention, attention_backward
from megatron_coca.kernels import operands as operand_kernels
from megatron_coca.kernels import polar_operands as polar_kernels
from megatron_coca.kernels.attention import flash_attention
from megatron_coca.kernels.launch_constants import (
    CONFIGS,
    SMALL,
    WIDEST_MAGNITUDES,
    AttentionCall,
    Operands,
    architecture,
    blocks_for,
    launches,
    row_class,
)
from megatron_coca.kernels.operands import FORMS, fused_operands, unsupported
from megatron_coca.kernels.polar_operands import Terms, polar_operands
from tests.parity import operand_cases
from tests.parity.operand_cases import POLAR, check, check_polar, operands

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


SIZES = [(8, 8), (6, 16), (64, 64), (20, 80)]
GRID = [(form, *size, own) for form in FORMS for size in SIZES for own in (False, True)]
"""Score form, rotated dimensions, head_dim, and whether every batch row has its own tables."""
PAIRWISE = [(form, *SIZES[(i + j) % 4], bool((i + j // 2) % 2)) for i, form in enumerate(FORMS) for j in range(4)]
"""Every form with every size and with both kinds of tables."""
REST = [pytest.param(*case, marks=pytest.mark.slow) for case in GRID if case not in PAIRWISE]


FAST_POLAR = ((1, 2), (2, 1), (7, 3), (9, 1), (15, 3))
"""Places in POLAR and SIZES: each magnitude, power and number of frequencies, with and without angles."""


@pytest.fixture
def dirty_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory is full of NaN."""
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(torch.nan))
    monkeypatch.setattr(torch, "empty_like", lambda x: empty_like(x).fill_(torch.nan))


@pytest.mark.fewest
@pytest.mark.usefixtures("dirty_memory")
@pytest.mark.parametrize(("form", "rotated", "head_dim", "own_tables"), [*PAIRWISE, *REST])
def test_operands_and_their_gradients(form: str, rotated: int, head_dim: int, own_tables: bool) -> None:
    """In float32 as near to float64 as PyTorch is, from strided views, with partial rotation and a table per row."""
    check(form, rotated, head_dim, own_tables, torch.float32, DEVICE, 19)


@pytest.mark.fewest
@pytest.mark.usefixtures("dirty_memory")
@pytest.mark.parametrize(
    ("case", "rotated", "head_dim", "own_tables"),
    [
        pytest.param(*each, marks=[] if (i, j) in FAST_POLAR else pytest.mark.slow)
        for i, case in enumerate(POLAR)
        for j, each in enumerate((case, *SIZES[j], bool((i + j) % 2)) for j in range(4))
    ],
    ids=str,
)
def test_polar_operands_and_their_gradients(
    case: tuple[str, int, int, bool], rotated: int, head_dim: int, own_tables: bool
) -> None:
    """As above, for two segments, with every magnitude, power and number of frequencies, and gradients of angles."""
    check_polar(case, rotated, head_dim, own_tables, torch.float32, DEVICE, 19)


@pytest.mark.fewest
@pytest.mark.usefixtures("dirty_memory")
@pytest.mark.parametrize("form", FORMS)
def test_segments_share_one_launch(form: str) -> None:
    """The operands of each segment separately; gradients are the sum over segments."""
    generator = torch.Generator().manual_seed(4)
    q, k = (torch.randn(2, heads, 19, 12, generator=generator).to(DEVICE).requires_grad_() for heads in (4, 2))
    tables = [torch.randn(19, 4, generator=generator).to(DEVICE) for _ in range(8)]
    together = fused_operands(q, k, tables, form)
    alone = [*fused_operands(q, k, tables[:4], form), *fused_operands(q, k, tables[4:], form)]
    assert all(torch.equal(one, other) for one, other in zip(together, alone, strict=True))
    cotangents = [torch.randn(x.shape, generator=generator).to(DEVICE) for x in alone]
    sums = (torch.autograd.grad(made, (q, k), cotangents) for made in (together, alone))
    for one, other in zip(*sums, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_operands_round_once(form: str) -> None:
    """Each number is the float64 one rounded: off by at most half a unit in the last place, and a trace. In float16,
    because Triton's interpreter cuts bfloat16 off where a GPU rounds it.
    """
    exact = operands(form, 12, 16, False, torch.float64, fused=False)
    for mine, true in zip(operands(form, 12, 16, False, torch.float16, fused=True), exact, strict=True):
        assert ((mine - true).abs() <= true.abs() * 2**-11 * 1.01 + 2e-6).all()


def test_operands_keep_a_nan() -> None:
    """A relu would otherwise hide that training went wrong."""
    q = torch.full((1, 1, 3, 8), torch.nan, device=DEVICE)
    table = torch.ones(3, 2, device=DEVICE)
    for form in FORMS:
        for out in fused_operands(q, q, [table] * 4, form):
            assert out.isnan().all(), form
    for magnitude, power, features, _ in (each for each in POLAR if not each[3]):
        table = torch.ones(3, 4 // features, device=DEVICE)
        for out in polar_operands(q, q, [table] * 4, Terms(magnitude, power, features)):  # type: ignore[arg-type]
            assert out.isnan().all(), (magnitude, power, features)


@pytest.mark.parametrize("case", [("softplus", 1, 1, True), ("relu_mean", 1, 2, True)], ids=str)
def test_polar_operands_round_once(case: tuple[str, int, int, bool]) -> None:
    """As above, in float16, relative to the magnitude: cos and sin of the turned angles are differences."""
    exact = operand_cases.polar_operands(case, 12, 16, False, torch.float64, fused=False)
    fused = operand_cases.polar_operands(case, 12, 16, False, torch.float16, fused=True)
    for mine, true in zip(fused[:4], exact[:4], strict=True):
        assert ((mine - true).abs() <= true.abs() * 2**-11 * 1.01 + 1e-5).all()


def test_polar_operands_reject_other_shapes() -> None:
    """Tables that rotate an odd number of features or too many, and offsets that PyTorch would broadcast."""
    q, table = torch.zeros(1, 2, 5, 8), torch.zeros(5, 8)
    terms = Terms("softplus", 1, 1)
    with pytest.raises(ValueError, match="7 features cannot rotate in heads of 8"):
        polar_operands(q, q, [table[:, :7]] * 4, terms)
    with pytest.raises(ValueError, match="16 features cannot rotate in heads of 8"):
        polar_operands(q, q, [table] * 4, terms._replace(features=2))
    with pytest.raises(ValueError, match=r"offset must have the shape \(2, 8\), not \(1, 8\)"):
        polar_operands(q, q, [table] * 4, terms, torch.zeros(1, 8))


def test_no_tokens_are_no_operands() -> None:
    q = torch.zeros(2, 3, 0, 8, device=DEVICE, requires_grad=True)
    tables = [torch.zeros(0, 4, device=DEVICE)] * 4
    for out in (fused_operands(q, q, tables, "coca"), polar_operands(q, q, tables, Terms("softplus", 1, 2))):
        assert [x.shape[2] for x in out] == [0, 0]
        assert torch.autograd.grad(out[0].sum(), q)[0].shape == q.shape


def test_fixed_angles_have_no_gradient() -> None:
    q = torch.ones(1, 2, 5, 8, device=DEVICE, requires_grad=True)
    tables, angles = [torch.ones(5, 4, device=DEVICE)] * 4, torch.ones(2, 8, device=DEVICE)
    out = polar_operands(q, q, tables, Terms("softplus", 1, 2), angles)
    learned = polar_operands(q, q, tables, Terms("softplus", 1, 2), angles.requires_grad_())
    assert torch.equal(*(torch.autograd.grad(sum(x.sum() for x in each), q)[0] for each in (out, learned)))  # type: ignore[union-attr]


def test_softplus_keeps_its_relative_error_far_below_zero() -> None:
    """1 + e^x rounds to 1 in float32 from x = -17 on."""
    x = torch.linspace(-80, 80, 1601, device=DEVICE)[None, None, :, None].expand(1, 1, -1, 2)
    ones = torch.ones(1601, 2, device=DEVICE)
    (out, _) = polar_operands(x.contiguous(), x.contiguous(), [ones, 0 * ones] * 2, Terms("softplus", 1, 1))
    exact = torch.nn.functional.softplus(x.double(), threshold=40.0)
    assert ((out[..., :2].double() - exact).abs() <= 4e-7 * exact).all()


def test_operands_reject_with_the_reason() -> None:
    """Cases for PyTorch's operations: learned tables, float64, tables of another length."""
    q, table = torch.zeros(1, 2, 5, 8), torch.zeros(5, 4)
    tables = (table, table, table, table)
    assert unsupported(q, q, tables) is None
    assert "learned" in (unsupported(q, q, (table.clone().requires_grad_(), *tables[1:])) or "")
    assert "float64" in (unsupported(q.double(), q.double(), tables) or "")
    assert "row per token" in (unsupported(q, q, (torch.zeros(4, 4), *tables[1:])) or "")
    assert "contiguous" in (unsupported(q.mT.contiguous().mT, q, tables) or "")
    with pytest.raises(ValueError, match="form must be .*coca_strict, not 'alibi'"):
        fused_operands(q, q, tables, "alibi")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("needs", "reason"),
    [
        (Needs("cuda"), None),
        (Needs("cuda", bias="power", bands=(Band(0, 7), Band(7, None, 3))), None),
        (Needs("cuda", dropout=0.1), "no attention dropout"),
        (Needs("cuda", bias="buckets"), "not buckets"),
        (Needs("cuda", head_dim=512), "head_dim up to 256"),
        (Needs("cuda", bands=(Band(0, 7), Band(9))), "from 7 on"),
        (Needs("cuda", bands=(Band(0, 7), Band(7, 20))), "from 7 on"),
        (Needs("cuda", bands=(Band(0, 7), Band(7, 9), Band(9))), "two segments, not 3"),
        (Needs("cuda", bands=(Band(0, None, 4),)), "first band"),
        (Needs("cuda", bands=(Band(0, 1, chunk=8), Band(1, chunk=8))), "in tokens, not in chunks"),
        (Needs("xpu"), "no compiler for xpu"),
    ],
)
def test_the_backend_says_what_it_cannot(needs: Needs, reason: str | None) -> None:
    """With the reason, when the model is built."""
    said = TritonBackend().supports(needs)
    assert said is None if reason is None else said is not None and reason in said


def test_the_backend_serves_a_cpu_only_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that nothing chooses it for a model on the CPU."""
    for interpreted in (True, False):
        import triton

        monkeypatch.setattr(triton.knobs, "runtime", SimpleNamespace(interpret=interpreted))
        said = TritonBackend().supports(Needs("cpu"))
        assert said is None if interpreted else said is not None and "interpreter" in said


def test_the_backend_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the package that is missing, and how to get it."""
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "pip install triton" in (TritonBackend().supports(Needs("cuda")) or "")


def test_the_backend_rejects_inputs_that_it_did_not_promise() -> None:
    """Dropout or bands beyond `supports` are an error, never left out of the result."""
    x = torch.zeros(1, 1, 4, 16)
    inputs = AttentionInputs((Segment(x, x, CAUSAL),), x, 1.0, dropout=0.5)
    with pytest.raises(ValueError, match="dropout"):
        TritonBackend().attend(inputs)
    with pytest.raises(ValueError, match="first band"):
        TritonBackend().attend(AttentionInputs((Segment(x, x, Band(2)),), x, 1.0))
    assert Band() == CAUSAL, "the default band is one that it serves"


def test_attention_rejects_arguments_that_contradict_each_other() -> None:
    """Each message names the argument and its valid values."""
    x, wide = torch.zeros(1, 2, 4, 16), torch.zeros(1, 2, 4, 512)
    with pytest.raises(ValueError, match="head_dim 512 is not supported"):
        flash_attention(wide, wide, wide, 1.0)
    x, tables = torch.zeros(1, 2, 4, 144), [torch.zeros(4, 144)] * 4
    with pytest.raises(ValueError, match="head_dim 144 is not supported; use up to 128"):
        flash_attention(x, x, x, 1.0, tables=tables)
    x = torch.zeros(1, 2, 4, 16)
    with pytest.raises(ValueError, match="all be the same of"):
        flash_attention(x, x, x.double(), 1.0)
    with pytest.raises(ValueError, match="than keys .3."):
        flash_attention(x, x[:, :, :3], x[:, :, :3], 1.0)
    with pytest.raises(ValueError, match="formula must be one of"):
        flash_attention(x, x, x, 1.0, formula="buckets", coefficients=torch.zeros(2, 1))


def test_there_are_block_sizes_for_every_operand() -> None:
    """Of every head_dim and dtype, for one segment and for two; the CPU gets those of the interpreter."""
    for head_dim in range(1, 257):
        for dtype in (torch.float32, torch.bfloat16):
            query = torch.zeros(1, 1, 1, head_dim, dtype=dtype, device="meta")
            for table in CONFIGS.values():
                assert {(1, row_class(query)), (2, row_class(query))} <= table.keys()
            for number in CONFIGS:
                assert head_dim > WIDEST_MAGNITUDES or launches(number, query, 1, magnitudes=True)
    assert blocks_for(torch.zeros(1, 1, 1, 16), 1) is SMALL


class Recorder:
    """A kernel that notes the grid of its launch."""

    def __init__(self, name: str, grids: dict[str, tuple[int, ...]]) -> None:
        self.name, self.grids = name, grids

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.grids[self.name] = grid
        return lambda *args, **kwargs: None


def test_grids_beyond_what_the_second_dimension_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """70,000 heads in all: batch, heads and blocks are in the first dimension, which has the limit 2^31 - 1."""
    grids: dict[str, tuple[int, ...]] = {}
    for module, name in (
        (attention, "_attend"),
        (attention_backward, "_delta"),
        (attention_backward, "_key_gradients"),
        (attention_backward, "_query_gradients"),
    ):
        monkeypatch.setattr(module, name, Recorder(name, grids))
    x = torch.zeros(35000, 2, 40, 16, device="meta")
    operands, plan = Operands(x, x, None, None, x, None, None), AttentionCall(1.0, None, None, "none", SMALL)
    attention_backward.backward(operands, plan, *attention.forward(operands, plan), x, False)
    blocks = {"_attend": 2, "_delta": 1, "_key_gradients": 2, "_query_gradients": 2}
    assert grids == {name: (70000 * count,) for name, count in blocks.items()}


@pytest.mark.parametrize(("head_dim", "rotated", "rows", "polar_rows"), [(128, 32, 16, 8), (256, 256, 16, 8)])
def test_operands_of_a_million_tokens(
    monkeypatch: pytest.MonkeyPatch, head_dim: int, rotated: int, rows: int, polar_rows: int
) -> None:
    """Their row blocks exceed 65,535, the limit of the other dimensions of a grid."""
    grids: dict[str, tuple[int, ...]] = {}
    for module, name in (
        (operand_kernels, "forward_kernel"),
        (operand_kernels, "backward_kernel"),
        (polar_kernels, "polar_forward_kernel"),
        (polar_kernels, "polar_backward_kernel"),
    ):
        monkeypatch.setattr(module, name, Recorder(name, grids))
    length, terms = 1 << 20, Terms("softplus", 1, 2)
    q, k = (torch.zeros(3, heads, length, head_dim, device="meta") for heads in (4, 2))
    tables = [torch.zeros(length, rotated // 2, device="meta")] * 4
    made = operand_kernels._make_operands(q, k, tables, "rotary")
    operand_kernels._make_gradients(made, q, k, tables, "rotary")
    wide = polar_kernels._make(q, k, None, tables, *terms)
    polar_kernels._make_gradients(wide, q, k, None, tables, *terms, False)
    blocks = {"forward_kernel": rows, "backward_kernel": rows} | dict.fromkeys(
        ("polar_forward_kernel", "polar_backward_kernel"), polar_rows
    )
    assert grids == {name: (6 * 3 * length // each,) for name, each in blocks.items()}


def test_launches_by_compute_capability() -> None:
    """Hopper and the Blackwell of data centers have their own; the launches of the A100 fit every other GPU."""
    assert [architecture(x) for x in ((8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0))] == [80, 80, 90, 100, 100, 80]


@pytest.mark.parametrize(
    ("dtype", "head_dim", "expected"),
    [
        (torch.bfloat16, 16, 32),
        (torch.bfloat16, 80, 256),
        (torch.bfloat16, 256, 512),
        (torch.float32, 64, 512),
        (torch.float32, 128, 512),
        (torch.float32, 256, 2048),
    ],
)
def test_every_operand_has_a_row_of_block_sizes(dtype: torch.dtype, head_dim: int, expected: int) -> None:
    """float32 with 256 features has small ones of its own, on every GPU."""
    row = row_class(torch.empty(1, 1, 1, head_dim, dtype=dtype))
    assert row == expected
    for capability in ((7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
        for segments in (1, 2):
            for launch in CONFIGS[architecture(capability)][segments, row]:
                assert row < 2048 or launch.rows * launch.keys <= 512


def test_the_ends_of_documents_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers, and both segments of each, have one tensor of starts; another micro-batch has its own."""
    found: list[int] = []
    search = torch.searchsorted
    monkeypatch.setattr(torch, "searchsorted", lambda *args, **kwargs: found.append(1) or search(*args, **kwargs))
    for batch in (1, 2):
        starts = torch.tensor([[0, 0, 2, 2, 2]], device=DEVICE)
        x = torch.randn(1, 2, 5, 16, device=DEVICE, requires_grad=True)
        y = x
        for _ in range(2):
            y = flash_attention(y, y, y, 0.5, far_query=y, far_key=y, window=2, starts=starts)
        y.sum().backward()
        assert len(found) == batch and attention_backward._stops(starts).tolist() == [[2, 2, 5, 5, 5]]
