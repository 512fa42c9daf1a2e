"""flash-attn as a backend, against stand-ins that compute in float32 what the libraries document: no GPU needed."""

import importlib.machinery
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_coca.attention.backends import flash
from megatron_coca.attention.backends.flash import FlashBackend
from megatron_coca.attention.backends.reference import ReferenceBackend
from megatron_coca.attention.inputs import (
    CAUSAL,
    AttentionInputs,
    Band,
    Needs,
    PackedDocuments,
    Segment,
    documents_from_ids,
)
from megatron_coca.attention.positions.bias import AlibiBias, LearnedKerpleLog, alibi_slopes

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
WINDOW = Band(0, 7)
ALIBI = AlibiBias(alibi_slopes(HEADS))
IDS = torch.tensor([[0] * 20 + [1] * 1 + [2] * 42, [0] * 50 + [1] * 13])

calls: list[str] = []
"""Which functions of the stand-ins were called, with the keywords that only some calls give."""


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: tuple[int, int], slopes: Tensor | None) -> Tensor:
    """[n, heads, d] of q [n, heads, d], k and v [m, kv_heads, d]: causal to the bottom right, as the libraries are."""
    query_length, key_length = len(q), len(k)
    k, v = (x.float().repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("mhd,nhd->hmn", q.float(), k) * scale
    distance = torch.arange(key_length - query_length, key_length)[:, None] - torch.arange(key_length)
    if slopes is not None:
        assert slopes.dtype == torch.float32 and slopes.shape == (q.shape[1],)
        scores = scores - slopes[:, None, None] * distance.abs()
    left = window[0] if window[0] >= 0 else key_length
    scores = scores.masked_fill((distance < 0) | (distance > left), -torch.inf)
    return torch.einsum("hmn,nhd->mhd", scores.softmax(-1), v).to(q.dtype)


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float, window: tuple[int, int], slopes: Tensor | None) -> Tensor:
    return torch.stack([attention(*row, scale, window, slopes) for row in zip(q, k, v, strict=True)])


def packed(
    q: Tensor, k: Tensor, v: Tensor, ends: tuple[Tensor, Tensor], longest: tuple[int, int], *rest: Any
) -> Tensor:
    lengths = [each.diff().tolist() for each in ends]
    assert all(each.dtype == torch.int32 and each[0] == 0 for each in ends)
    assert [sum(each) for each in lengths] == [len(q), len(k)]
    assert longest == tuple(map(max, lengths))
    documents = zip(q.split(lengths[0]), k.split(lengths[1]), v.split(lengths[1]), strict=True)
    return torch.cat([attention(*document, *rest) for document in documents])


def two(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None):
    """FlashAttention-2's flash_attn_func; dropout drops whole heads at random, to be seen in the result."""
    assert causal and softcap == 0.0 and softmax_scale is not None
    calls.append("two")
    out = dense(q, k, v, softmax_scale, window_size, alibi_slopes)
    return torch.nn.functional.dropout2d(out.transpose(1, 2), dropout_p).transpose(1, 2)


def two_packed(  # type: ignore[no-untyped-def]
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
):  # fmt: skip
    """FlashAttention-2's flash_attn_varlen_func."""
    assert causal and dropout_p == 0.0
    calls.append("two packed")
    ends, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    return packed(q, k, v, ends, longest, softmax_scale, window_size, alibi_slopes)


def three(q, k, v, softmax_scale=None, causal=False, qv=None, window_size=(-1, -1)):  # type: ignore[no-untyped-def]
    """FlashAttention-3's flash_attn_func as its first releases had it: it returns the log-sum-exp too."""
    assert causal
    calls.append("three")
    return dense(q, k, v, softmax_scale, window_size, None), torch.empty(0)


def three_packed(  # type: ignore[no-untyped-def]
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
    softmax_scale=None, causal=False, window_size=(-1, -1),
):  # fmt: skip
    """FlashAttention-3's flash_attn_varlen_func as later releases have it: it returns the output."""
    assert causal
    calls.append("three packed")
    ends, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    return packed(q, k, v, ends, longest, softmax_scale, window_size, None)


def module(name: str, **contents: Any) -> ModuleType:
    made = ModuleType(name)
    made.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(made).update(contents)
    return made


Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Stand-ins for the libraries named, on a machine of the given compute capability; the CPU poses as CUDA."""

    def into(*names: str, version: str = "2.8.3", capability: tuple[int, int] = (9, 0)) -> None:
        libraries = {
            "flash_attn": {"__version__": version, "flash_attn_func": two, "flash_attn_varlen_func": two_packed},
            "flash_attn_interface": {"flash_attn_func": three, "flash_attn_varlen_func": three_packed},
        }
        for name, contents in libraries.items():
            monkeypatch.setitem(sys.modules, name, module(name, **contents) if name in names else None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(flash, "DEVICE", "cpu")
        flash._library_for.cache_clear()
        calls.clear()

    yield into
    flash._library_for.cache_clear()


def operands(length: int, queries: int | None = None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = [(2, HEADS, queries or length, HEAD_DIM), *[(2, KV_HEADS, length, HEAD_DIM)] * 2]
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


def results(attend: Callable[[AttentionInputs], Tensor], tensors: list[Tensor], **rest: Any) -> list[Tensor]:
    """Output and gradients of q, k, v in float64."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    band = rest.pop("band", CAUSAL)
    out = attend(AttentionInputs((Segment(leaves[0], leaves[1], band),), leaves[2], 0.3, **rest))
    assert out.shape == leaves[0].shape and out.dtype == leaves[0].dtype
    cotangent = torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(out.dtype)
    return [x.double() for x in (out.detach(), *torch.autograd.grad(out, leaves, cotangent))]


@pytest.mark.parametrize("band", [CAUSAL, WINDOW, Band(0, 1)], ids=str)
@pytest.mark.parametrize("bias", [None, ALIBI], ids=["plain", "alibi"])
@pytest.mark.parametrize(
    ("length", "queries", "ids"), [(1, None, None), (63, None, None), (63, 5, None), (63, None, IDS), (63, 30, IDS)]
)
def test_it_computes_attention(
    length: int, queries: int | None, ids: Tensor | None, bias: AlibiBias | None, band: Band, install: Install
) -> None:
    """Values and gradients, as near to float64 as dense attention in bfloat16 is, twice over."""
    install("flash_attn", "flash_attn_interface")
    tensors = operands(length, queries)
    rest = {"band": band, "bias": bias, "documents": None if ids is None else documents_from_ids(ids)}
    ours = results(FlashBackend().attend, tensors, **rest)
    plain = results(ReferenceBackend().attend, tensors, **rest)
    exact = results(ReferenceBackend().attend, [x.double() for x in tensors], **rest)
    for a, b, c in zip(ours, plain, exact, strict=True):
        assert (a - c).norm() <= 2 * (b - c).norm() + 1e-6
    assert calls == [("two" if bias else "three") + (" packed" if ids is not None else "")]


def test_dropout_goes_to_the_library_that_has_it(install: Install) -> None:
    """In training; the same model is evaluated by the other."""
    install("flash_attn", "flash_attn_interface")
    torch.manual_seed(0)  # of 8 heads all are kept in one of 256 draws
    tensors = operands(16)
    dropped, whole = (results(FlashBackend().attend, tensors, dropout=p)[0] for p in (0.5, 0.0))
    assert calls == ["two", "three"]
    kept = dropped.abs().sum((2, 3)) > 0
    assert 0 < kept.sum() < kept.numel()
    torch.testing.assert_close(dropped[kept], 2 * whole[kept], rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("needs", "reason"),
    [
        (Needs("cpu", bias="linear", dropout=0.1, bands=(WINDOW,)), None),
        (Needs("cpu", bias="log"), "FlashAttention-3 has no log bias; FlashAttention-2 has no log bias"),
        (Needs("cpu", head_dim=36), "multiple of 8"),
        (Needs("cpu", head_dim=264), "at most 256"),
        (Needs("cpu", bands=(Band(0, 7), Band(7))), "one query and one key operand"),
        (Needs("cpu", bands=(Band(0, None, 4),)), "one query and one key operand"),
        (Needs("xpu"), "not xpu"),
    ],
)
def test_what_it_supports(needs: Needs, reason: str | None, install: Install) -> None:
    install("flash_attn", "flash_attn_interface")
    said = FlashBackend().supports(needs)
    assert said is None if reason is None else said is not None and reason in said


@pytest.mark.parametrize(
    ("installed", "capability", "version", "needs", "reason"),
    [
        (["flash_attn"], (8, 0), "2.4.0.post1", Needs("cpu", dropout=0.1), None),
        (["flash_attn"], (8, 0), "2.3.6", Needs("cpu"), "version 2.3.6; install flash-attn 2.4 or newer"),
        (["flash_attn"], (7, 5), "2.8.3", Needs("cpu"), "no kernels for compute capability 7.5"),
        (["flash_attn_interface"], (9, 0), "2.8.3", Needs("cpu"), None),
        (["flash_attn_interface"], (10, 0), "2.8.3", Needs("cpu"), "FlashAttention-3 has no kernels"),
        (["flash_attn_interface"], (9, 0), "2.8.3", Needs("cpu", bias="linear"), "install flash-attn"),
        ([], (9, 0), "2.8.3", Needs("cpu"), "FlashAttention-2 cannot be imported"),
    ],
)
def test_what_this_machine_lacks(
    installed: list[str],
    capability: tuple[int, int],
    version: str,
    needs: Needs,
    reason: str | None,
    install: Install,
) -> None:
    install(*installed, version=version, capability=capability)
    said = FlashBackend().supports(needs)
    assert said is None if reason is None else said is not None and reason in said


def test_what_attend_refuses(install: Install) -> None:
    """With an error that says what to do; nothing is computed in another precision or without its gradient."""
    install("flash_attn")
    q, k, v = operands(8)
    inputs = AttentionInputs((Segment(q, k),), v, 0.3)
    with pytest.raises(TypeError, match="float16 or bfloat16, not torch.float32; set precision"):
        FlashBackend().attend(AttentionInputs((Segment(q.float(), k.float()),), v.float(), 0.3))
    with pytest.raises(ValueError, match="no log bias"):
        FlashBackend().attend(inputs.replace(bias=LearnedKerpleLog(HEADS).distance_bias()))
    slopes = torch.ones(HEADS, 1, requires_grad=True)
    with pytest.raises(ValueError, match="no gradient"):
        FlashBackend().attend(inputs.replace(bias=SimpleNamespace(formula="linear", coefficients=slopes)))
    short = PackedDocuments(torch.zeros(2, 8, dtype=torch.long), (((0, 8),), ((0, 7),)))
    with pytest.raises(ValueError, match="do not cover"):
        FlashBackend().attend(inputs.replace(documents=short))
