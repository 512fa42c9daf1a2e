"""Backends on inputs made by hand: pieces of bands, merging by log-sum-exp, packed documents, the dense reference."""

import math
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_coca.attention.backends import gated as gates
from megatron_coca.attention.backends import reference, sdpa
from megatron_coca.attention.backends.merge import MergeBackend
from megatron_coca.attention.backends.reference import ReferenceBackend
from megatron_coca.attention.backends.sdpa import CudaFlash, SdpaBackend, flash_op
from megatron_coca.attention.inputs import (
    CAUSAL,
    AttentionInputs,
    BackendError,
    Band,
    Needs,
    PackedDocuments,
    Segment,
    attend_by_document,
)

NEAR_AND_FAR = (Band(0, 4), Band(4))
THREE = (Band(0, 5), Band(5, 11), Band(11, None, first_keys=2))
CHUNKS = (Band(0, 1, chunk=5), Band(1, 2, chunk=5), Band(2, chunk=5))
HEAD_DIM, SCALE = 8, 0.3


class Slope:
    """-c r with one c per head."""

    formula = "linear"

    def __init__(self, coefficients: Tensor) -> None:
        self.coefficients = coefficients

    def at(self, distance: Tensor) -> Tensor:
        return -self.coefficients.to(distance.dtype).view(-1, *[1] * distance.dim()) * distance


def make_inputs(
    bands: tuple[Band, ...],
    length: int,
    past: int = 0,
    batch: int = 2,
    heads: tuple[int, int] = (4, 2),
    dtype: torch.dtype = torch.float64,
) -> AttentionInputs:
    """Standard normal operands, leaves of the graph, stored as a layer stores them: [batch, length, heads, d]."""
    generator = torch.Generator().manual_seed(length)

    def operand(count: int, rows: int) -> Tensor:
        x = torch.randn(batch, rows, count, HEAD_DIM, generator=generator, dtype=torch.float64).to(dtype)
        return x.transpose(1, 2).requires_grad_()

    segments = tuple(Segment(operand(heads[0], length - past), operand(heads[1], length), band) for band in bands)
    return AttentionInputs(segments, operand(heads[1], length), SCALE)


@pytest.mark.parametrize(
    "bands", [NEAR_AND_FAR, THREE, (Band(0, 4),), (Band(first_keys=2),), (Band(0, 1, chunk=4),)], ids=str
)
@pytest.mark.parametrize("documents", [False, True])
def test_sdpa_rejects_bands_that_it_would_leave_out(bands: tuple[Band, ...], documents: bool) -> None:
    inputs = make_inputs(bands, 12)
    inputs = inputs.replace(documents=packed(((5, 7), (12,)))) if documents else inputs
    with pytest.raises(ValueError, match="sdpa .*a single query and key.* to reference"):
        SdpaBackend().attend(inputs)


def test_dense_scores_beyond_a_length_are_an_error() -> None:
    """In training when the model is built, in evaluation when it is called; one query may follow more keys."""
    assert "limited to 8,192 tokens, not 8,193" in (ReferenceBackend().supports(Needs("cpu", length=8193)) or "")
    assert ReferenceBackend().supports(Needs("cpu", length=8192)) is None
    inputs = make_inputs((CAUSAL,), 8193)
    with pytest.raises(BackendError, match="attention_backend: reference .*; set attention_backend: auto"):
        ReferenceBackend().attend(inputs)
    assert ReferenceBackend().attend(make_inputs((CAUSAL,), 8193, 8192)).shape[2] == 1


def packed(rows: tuple[tuple[int, ...], ...]) -> PackedDocuments:
    """Documents by their lengths."""
    stops = [[sum(lengths[: i + 1]) for i in range(len(lengths))] for lengths in rows]
    spans = tuple(tuple(zip([0, *each], each, strict=False)) for each in stops)
    starts = [[start for start, stop in each for _ in range(start, stop)] for each in spans]
    return PackedDocuments(torch.tensor(starts), spans)


def leaves(inputs: AttentionInputs) -> list[Tensor]:
    return [inputs.value, *(x for segment in inputs.segments for x in (segment.query, segment.key))]


def results(backend: ReferenceBackend | MergeBackend, inputs: AttentionInputs, cotangent: Tensor) -> list[Tensor]:
    """Output and the gradients of all operands; one that reaches no output has a gradient of zeros."""
    out = backend.attend(inputs)
    found = torch.autograd.grad(out, leaves(inputs), cotangent.to(out.dtype), allow_unused=True)
    grads = [torch.zeros_like(x) if grad is None else grad for x, grad in zip(leaves(inputs), found, strict=True)]
    return [out.detach(), *grads]


def in_dtype(inputs: AttentionInputs, dtype: torch.dtype) -> AttentionInputs:
    """The same numbers as new leaves of `dtype`."""
    new = [x.detach().to(dtype).requires_grad_() for x in leaves(inputs)]
    segments = tuple(Segment(q, k, s.band) for q, k, s in zip(new[1::2], new[2::2], inputs.segments, strict=True))
    return inputs.replace(segments=segments, value=new[0])


def assert_merge_is_exact(inputs: AttentionInputs) -> None:
    cotangent = torch.randn(inputs.query.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = results(ReferenceBackend(), inputs, cotangent)
    for got, exact in zip(results(MergeBackend(), inputs, cotangent), expected, strict=True):
        scale = torch.stack((exact.abs().max(), cotangent.abs().max())).max()  # one key has no gradient: exactly 0
        torch.testing.assert_close(got, exact, rtol=0, atol=1e-11 * float(scale))


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize(("length", "past"), [(1, 0), (2, 0), (3, 1), (33, 0), (33, 5), (33, 32), (64, 0), (70, 13)])
@pytest.mark.parametrize(
    "bands",
    [(CAUSAL,), NEAR_AND_FAR, THREE, (Band(0, 6),), (Band(0, 1), Band(1)), (Band(0, 100), Band(100)), CHUNKS],
    ids=["causal", "near and far", "three", "window", "window of 1", "window beyond the length", "chunks"],
)
def test_merge_values_and_gradients(bands: tuple[Band, ...], length: int, past: int, heads: tuple[int, int]) -> None:
    assert_merge_is_exact(make_inputs(bands, length, past, heads=heads))


@pytest.mark.parametrize("bands", [(CAUSAL,), NEAR_AND_FAR])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_decoding_folds_the_queries_of_a_key_head_in_half_precision(
    bands: tuple[Band, ...], dtype: torch.dtype
) -> None:
    """The folded rows go to the kernel, with twice the error of half precision at most; float32 is unchanged."""
    inputs = make_inputs(bands, 40, past=39, heads=(6, 2), dtype=dtype)
    assert sdpa.folded_query(inputs.query, inputs.key).shape[1] == 6, "gradients need the query as it is"
    with torch.no_grad():
        folded = sdpa.folded_query(inputs.query, inputs.key)
        assert folded.shape[1] == (6 if dtype == torch.float32 else 2)
        found = (SdpaBackend() if len(bands) == 1 else MergeBackend()).attend(inputs)
        wide = make_inputs(bands, 40, past=39, heads=(6, 2), dtype=dtype)
        segments = tuple(Segment(each.query.double(), each.key.double(), each.band) for each in wide.segments)
        expected = ReferenceBackend().attend(wide.replace(segments=segments, value=wide.value.double()))
    assert found.shape == inputs.query.shape and found.dtype == dtype
    assert (found.double() - expected).abs().max() <= 4 * torch.finfo(dtype).eps * expected.abs().max()


@pytest.mark.parametrize("past", [0, 9])
@pytest.mark.parametrize("rows", [((30,), (30,)), ((4, 1, 25), (4, 1, 25)), ((10, 20), (29, 1))])
def test_merge_of_packed_documents(rows: tuple[tuple[int, ...], ...], past: int) -> None:
    """The same boundaries in all rows, and different ones."""
    assert_merge_is_exact(make_inputs(THREE, 30, past).replace(documents=packed(rows)))


def test_merge_takes_contiguous_operands_and_an_expanded_gradient() -> None:
    inputs = make_inputs(NEAR_AND_FAR, 30)
    contiguous = in_dtype(inputs, torch.float64)
    contiguous = contiguous.replace(
        segments=tuple(Segment(s.query.contiguous(), s.key.contiguous(), s.band) for s in contiguous.segments)
    )
    one = torch.autograd.grad(MergeBackend().attend(inputs).sum(), inputs.value)[0]
    other = torch.autograd.grad(MergeBackend().attend(contiguous).sum(), contiguous.value)[0]
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("factor", [1e3, 1e-6])
def test_merge_of_very_unequal_parts_is_finite(factor: float) -> None:
    """One segment's scores may exceed the other's by thousands: the other's weight is then exactly 0."""
    inputs = make_inputs(NEAR_AND_FAR, 20)
    with torch.no_grad():
        inputs.segments[1].query.mul_(factor)
    assert_merge_is_exact(inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_merge_rounds_no_more_than_plain_attention(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Error at most twice that of dense attention in the same dtype, both against float64."""
    low = make_inputs((Band(0, 32), Band(32, 80), Band(80)), 300, dtype=dtype)
    cotangent = torch.randn(low.query.shape, generator=torch.Generator().manual_seed(1)).to(dtype).double()
    exact = results(ReferenceBackend(), in_dtype(low, torch.float64), cotangent)
    merged = results(MergeBackend(), low, cotangent)
    monkeypatch.setattr(reference, "widened", lambda inputs: inputs)
    plain = results(ReferenceBackend(), low, cotangent)
    for expected, allowed, got in zip(exact, plain, merged, strict=True):
        assert got.dtype == dtype
        assert (got.double() - expected).norm() <= 2 * (allowed.double() - expected).norm()


def test_merge_says_what_it_cannot_do() -> None:
    merge = MergeBackend()
    assert merge.supports(Needs("cpu", 7, bands=THREE)) is None
    assert merge.supports(Needs("cuda", 64, bands=THREE)) is None
    for needs, word in (
        (Needs("cpu", bias="linear"), "bias"),
        (Needs("cpu", dropout=0.1), "share a dropout mask"),
        (Needs("cuda", 60), "multiple of 8"),
        (Needs("cuda", 264), "at most 256"),
        (Needs("mps"), "mps"),
    ):
        assert word in (merge.supports(needs) or "")


@pytest.mark.parametrize(
    ("queries", "keys", "evaluated"), [(1, 40, False), (9, 40, False), (1, 1, False), (40, 40, True)]
)
def test_cudnn_is_disabled_only_in_decoding(
    queries: int, keys: int, evaluated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuDNN plans every shape, and every decoded token has a new one. Training and whole windows use cuDNN."""
    seen: list[bool] = []
    called = F.scaled_dot_product_attention

    def recorded(*operands: Tensor, **options: Any) -> Tensor:
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return called(*operands, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    q, k = torch.randn(1, 4, queries, 8), torch.randn(1, 2, keys, 8)
    given = AttentionInputs((Segment(q, k, CAUSAL),), k, 0.3)
    results = []
    for trains in (True, False):
        with torch.set_grad_enabled(trains):
            results.append(sdpa._sdpa(given))
    assert torch.equal(*results)
    assert seen == [True, evaluated] and torch.backends.cuda.cudnn_sdp_enabled()


def test_no_kernel_for_the_dtype_is_named() -> None:
    with pytest.raises(TypeError, match="torch.int64 on cpu; .*triton .*reference"):
        flash_op(torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize(
    ("rows", "columns", "causal", "window"),
    [(63, 63, True, 0), (63, 33, False, 0), (63, 63, True, 20), (63, 99, True, 20), (63, 99, True, 99)],
)
def test_cuda_kernels_are_called_as_their_schemas_say(rows: int, columns: int, causal: bool, window: int) -> None:
    """On the meta device, which checks the arguments and gives the shapes without computing."""
    op = CudaFlash()
    q, k = (
        torch.empty(2, n, h, 64, dtype=torch.bfloat16, device="meta").transpose(1, 2)
        for n, h in ((rows, 4), (columns, 2))
    )
    out, lse = op.forward(q, k, k, causal, SCALE, window)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (2, 4, rows), torch.float32)
    grads = op.backward(out, q, k, k, out, lse, causal, SCALE, window)
    assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]
    assert not window or [x.stride() for x in (out, *grads)] == [x.stride() for x in (q, q, k, k)]


def test_rows_with_the_same_documents_are_served_together() -> None:
    inputs = make_inputs((CAUSAL,), 10, past=3, batch=3).replace(documents=packed(((4, 6), (2, 8), (4, 6))))
    seen: list[tuple[int, int, int]] = []

    def attend(document: AttentionInputs) -> Tensor:
        batch, _, queries, _ = document.query.shape
        seen.append((batch, queries, document.key.shape[2]))
        return ReferenceBackend().attend(document)

    out = attend_by_document(attend, inputs)
    assert seen == [(2, 1, 4), (2, 6, 6), (1, 7, 8)], "the document before the queries is left out"
    torch.testing.assert_close(out, ReferenceBackend().attend(inputs), rtol=1e-12, atol=1e-12)


def by_loops(inputs: AttentionInputs, documents: PackedDocuments, slopes: Tensor) -> Tensor:
    """The contract spelled out pair by pair."""
    batch, heads, queries, _ = inputs.query.shape
    groups = heads // inputs.value.shape[1]
    out = torch.zeros_like(inputs.query)
    for row, head, index in product(range(batch), range(heads), range(queries)):
        query = inputs.past + index
        begin = int(documents.starts[row, query])
        scores = {}
        for key, part in product(range(begin, query + 1), inputs.segments):
            r, band = query - key, part.band
            if band.chunk is not None:
                r = (query - begin) // band.chunk - (key - begin) // band.chunk
            if band.low <= r < (band.high or math.inf) and key - begin < (band.first_keys or math.inf):
                dot = part.query[row, head, index] @ part.key[row, head // groups, key]
                scores[key] = math.exp(inputs.scale * float(dot) - float(slopes[head, 0]) * (query - key))
        for key, weight in scores.items():
            out[row, head, index] += weight / sum(scores.values()) * inputs.value[row, head // groups, key]
    return out


@pytest.mark.parametrize(
    "bands", [(Band(0, 3), Band(3, 6), Band(6, None, first_keys=2)), CHUNKS], ids=["three", "chunks"]
)
@pytest.mark.parametrize("past", [0, 6])
def test_the_reference_is_the_contract_pair_by_pair(past: int, bands: tuple[Band, ...]) -> None:
    """Bands, first keys of a document, bias, fewer key heads, late queries, all at once."""
    documents, slopes = packed(((9, 4), (2, 11))), torch.rand(4, 1, generator=torch.Generator().manual_seed(0))
    inputs = make_inputs(bands, 13, past)
    with torch.no_grad():
        expected = by_loops(inputs, documents, slopes)
        found = ReferenceBackend().attend(inputs.replace(documents=documents, bias=Slope(slopes)))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_dropout_of_the_reference_scales_what_is_kept() -> None:
    """Weights are 0 or divided by the share kept: over many draws the output is that without dropout."""
    inputs = make_inputs((CAUSAL,), 6)
    with torch.no_grad():
        plain = ReferenceBackend().attend(inputs)
        torch.manual_seed(0)
        draws = torch.stack([ReferenceBackend().attend(inputs.replace(dropout=0.25)) for _ in range(2000)])
    assert not torch.equal(draws[0], draws[1])
    spread = draws.std(0) / math.sqrt(len(draws))
    assert ((draws.mean(0) - plain).abs() <= 5 * spread).all()


@pytest.mark.parametrize("gated", [False, True])
def test_recomputed_attention_restores_the_random_state_of_its_device(
    gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch looks for the device in the arguments of `checkpoint`; tests/gpu compares the random states."""
    devices = []

    def spy(run: Any, *arguments: Any, **options: Any) -> Tensor:
        assert options["preserve_rng_state"]
        devices.append([each.device for each in arguments if isinstance(each, Tensor)])
        return run(*arguments)

    monkeypatch.setattr(reference, "checkpoint", spy)
    monkeypatch.setattr(gates, "QUERY_ROWS", 8)
    inputs = make_inputs((CAUSAL,), 20, heads=(4, 4)).replace(dropout=0.2)
    if gated:
        backend = SdpaBackend()
        backend.attend(inputs.replace(gates=torch.zeros(2, 4, 20, dtype=torch.float64, requires_grad=True)))
    else:
        reference.attend_in_blocks(inputs)
    assert devices == [[torch.device("cpu")]] * (3 if gated else 1)


def test_with_dropout_sdpa_adds_the_bias_of_every_pair() -> None:
    """So small a probability drops nothing, but takes the dense path."""
    bias = Slope(torch.rand(4, 1, generator=torch.Generator().manual_seed(0)))
    inputs = make_inputs((CAUSAL,), 9).replace(bias=bias)
    with torch.no_grad():
        expected = ReferenceBackend().attend(inputs)
        found = SdpaBackend().attend(inputs.replace(dropout=1e-12))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("version", "shown"),
    [(91002, "cuDNN 9.10.2"), (None, "no cuDNN"), (RuntimeError("too  old. And\nmore"), "cuDNN unusable (too old)")],
)
def test_the_version_of_cudnn_is_shown(version: Any, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cuDNN that shadows PyTorch's own makes PyTorch fall back silently."""

    def answer() -> Any:
        if isinstance(version, RuntimeError):
            raise version
        return version

    monkeypatch.setattr(torch.backends.cudnn, "version", answer)
    assert sdpa.cudnn_version() == shown


@pytest.mark.parametrize(("number", "shown"), [(3, "cuDNN 9.10.2"), (1, "FlashAttention-2, with cuDNN 9.10.2")])
def test_the_kernel_is_named(number: int, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, dtype, device: empty(*shape, dtype=dtype))
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *operands, **options: number)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    assert sdpa.cuda_kernel(4, 2, 16, 8, torch.bfloat16, trains=True) == shown


def test_the_kernel_of_decoding_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding runs without cuDNN, so the kernel of a whole window is another one."""
    empty, asked = torch.empty, []

    def choose(query: Tensor, key: Tensor, *operands: object, **options: object) -> int:
        asked.append((query.shape[2], key.shape[2], operands[-1], torch.backends.cuda.cudnn_sdp_enabled()))
        return 3 if torch.backends.cuda.cudnn_sdp_enabled() else 1

    monkeypatch.setattr(torch, "empty", lambda *shape, dtype, device: empty(*shape, dtype=dtype))
    monkeypatch.setattr(torch, "_fused_sdp_choice", choose)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    kernels = [sdpa.cuda_kernel(4, 2, 16, 8, torch.bfloat16, trains=False, decodes=each) for each in (False, True)]
    assert kernels == ["cuDNN 9.10.2", "FlashAttention-2, with cuDNN 9.10.2"]
    assert asked == [(16, 16, True, True), (1, 16, False, False)]
