"""FlexAttention as a backend: its dense definition here, and its compiled kernel on the CPU, which has no backward."""

import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from megatron_coca.attention.backends import flex
from megatron_coca.attention.backends.flex import BLOCK, FlexBackend
from megatron_coca.attention.backends.reference import ReferenceBackend
from megatron_coca.attention.inputs import (
    CAUSAL,
    AttentionInputs,
    Band,
    DistanceBias,
    Needs,
    Segment,
    documents_from_ids,
)
from megatron_coca.attention.positions.bias import (
    AlibiBias,
    LearnedBuckets,
    LearnedKerpleLog,
    LearnedKerplePower,
    alibi_slopes,
)

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
CPU = torch.device("cpu")
BANDS = (CAUSAL, Band(0, 1), Band(0, 7), Band(0, 200), Band(0, None, 3), Band(0, 150, 10), Band(3, 300))
LAYOUTS = ((1, 1), (63, 63), (256, 256), (300, 300), (300, 1), (300, 140), (515, 515))


def biases() -> dict[str, DistanceBias | None]:
    torch.manual_seed(1)
    learned = LearnedKerpleLog(HEADS), LearnedKerplePower(HEADS), LearnedBuckets(HEADS, HEAD_DIM)
    linear = AlibiBias(alibi_slopes(HEADS))
    return {"none": None, "linear": linear} | {
        bias.formula: bias for bias in (module.distance_bias() for module in learned)
    }


def ids(length: int) -> Tensor:
    """Two rows of documents of several lengths."""
    return torch.stack([torch.arange(length) // 37, (torch.arange(length) > length // 2).long()])


def inputs(length: int, queries: int, band: Band, bias: DistanceBias | None, packed: bool) -> AttentionInputs:
    generator = torch.Generator().manual_seed(length)
    shapes = [(2, HEADS, queries, HEAD_DIM), *[(2, KV_HEADS, length, HEAD_DIM)] * 2]
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    documents = documents_from_ids(ids(length)) if packed else None
    return AttentionInputs((Segment(q, k, band),), v, 0.3, bias, documents=documents)


def assert_attention(backend: FlexBackend, given: AttentionInputs) -> None:
    """As near to dense attention in float64 as dense attention in float32 is, twice over."""
    (segment,) = given.segments
    wide = Segment(segment.query.double(), segment.key.double(), segment.band)
    exact = ReferenceBackend().attend(given.replace(segments=(wide,), value=given.value.double()))
    with torch.no_grad():
        ours, plain = ((each.attend(given) - exact).abs().max() for each in (backend, ReferenceBackend()))
    assert ours <= 2 * plain + 2e-6


@pytest.mark.fewest
@pytest.mark.parametrize(
    ("band", "bias", "packed", "length", "queries"),
    [
        (CAUSAL, "none", False, 1, 1),
        (CAUSAL, "linear", True, 63, 63),
        (CAUSAL, "log", False, 140, 5),
        (Band(0, 1), "power", True, 63, 63),
        (Band(0, 7), "buckets", False, 63, 63),
        (Band(0, 7), "none", True, 140, 5),
        (Band(0, 200), "log", True, 63, 63),
        (Band(0, None, 3), "linear", False, 63, 63),
        (Band(0, None, 3), "buckets", True, 140, 5),
        (Band(0, 150, 10), "power", False, 140, 5),
        (Band(0, 30, 10), "none", True, 63, 63),
    ],
)
def test_its_definition_is_attention(band: Band, bias: str, packed: bool, length: int, queries: int) -> None:
    assert_attention(FlexBackend(compiled=False), inputs(length, queries, band, biases()[bias], packed))


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize(("length", "queries"), LAYOUTS)
def test_blocks_hold_what_is_visible(length: int, queries: int, band: Band, packed: bool) -> None:
    """Against the pairs one by one: none is left out, none is let in unasked, and no block is visited for nothing."""
    starts = documents_from_ids(ids(length)).starts if packed else torch.zeros(1, length, dtype=torch.long)
    rule = flex._visible(band, length - queries, starts)
    batch, query, key = torch.meshgrid(*map(torch.arange, (len(starts), queries, length)), indexing="ij")
    visible = rule(batch, torch.tensor(0), query, key)
    rows, columns = math.ceil(queries / BLOCK), math.ceil(length / BLOCK)
    padded = torch.nn.functional.pad(visible, (0, columns * BLOCK - length, 0, rows * BLOCK - queries))
    tiles = padded.unflatten(2, (columns, BLOCK)).unflatten(1, (rows, BLOCK))
    some, every = tiles.any(dim=(2, 4))[:, None], tiles.all(dim=4).all(dim=2)[:, None]
    seen, whole = flex._blocks(queries, length, band, starts)
    assert not (some & ~seen).any() and not (whole & ~every).any()
    if not packed:
        assert torch.equal(seen, some) and torch.equal(whole, every)


def test_the_mask_lists_its_blocks() -> None:
    """Partial blocks with the rule, whole blocks without it, each by its row's count and columns."""
    mask = flex._mask(300, 300, Band(0, 200), None, CPU)
    assert mask.shape == (1, 1, 300, 300)
    assert mask.kv_num_blocks.tolist() == [[[1, 2, 3]]]
    assert mask.full_kv_num_blocks.tolist() == [[[0, 0, 0]]]
    assert mask.kv_indices[0, 0, 2].tolist() == [0, 1, 2]
    whole = flex._mask(512, 512, CAUSAL, None, CPU)
    assert whole.full_kv_num_blocks.tolist() == [[[0, 1, 2, 3]]]
    assert whole.kv_indices[0, 0, :, 0].tolist() == [0, 1, 2, 3]


def test_masks_are_kept() -> None:
    """From layer to layer; those of documents for one batch."""
    given = inputs(63, 63, CAUSAL, None, packed=False)
    assert flex._block_mask(given, CAUSAL) is flex._block_mask(given, CAUSAL)
    packed, other = (inputs(63, 63, CAUSAL, None, packed=True) for _ in range(2))
    assert flex._block_mask(packed, CAUSAL) is flex._block_mask(packed.replace(bias=biases()["linear"]), CAUSAL)
    assert flex._block_mask(packed, CAUSAL) is not flex._block_mask(packed, Band(0, 7))
    assert flex._block_mask(packed, CAUSAL) is not flex._block_mask(other, CAUSAL)


@pytest.mark.parametrize(
    ("needs", "reason"),
    [
        (Needs("cuda", bias="buckets", bands=(Band(0, 7, 3),)), None),
        (Needs("cpu"), "a backward pass only on CUDA"),
        (Needs("cuda", bands=(Band(0, 7), Band(7))), "not one pair per band"),
        (Needs("cuda", bands=(Band(0, 1, chunk=8),)), "in tokens, not in chunks"),
        (Needs("cuda", dropout=0.1), "no dropout"),
    ],
)
def test_what_it_supports(needs: Needs, reason: str | None) -> None:
    said = FlexBackend().supports(needs)
    assert said is None if reason is None else said is not None and reason in said


def test_one_query_needs_no_kernel() -> None:
    """Decoding a token needs no compilation, and has the kernel's precision."""
    for bias in biases().values():
        assert_attention(FlexBackend(), inputs(63, 1, Band(0, 30, 3), bias, packed=True))
    given = inputs(63, 1, CAUSAL, None, packed=False)
    (segment,) = given.segments
    narrow = Segment(segment.query.half(), segment.key.half(), CAUSAL)
    half = given.replace(segments=(narrow,), value=given.value.half())
    assert FlexBackend().attend(half).dtype == torch.float16


@torch.no_grad()
def test_two_hundred_lengths_of_evaluation_compile_few_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = set()

    def counted(query: Tensor, key: Tensor, value: Tensor, **options: object) -> Tensor:
        shapes.add((query.shape, key.shape))
        return query

    monkeypatch.setattr(flex, "_compiled", counted)
    for number in range(200):
        length, batch = 33 + 41 * number, 1 + number % 3
        q, k = (torch.zeros(batch, heads, length, 8) for heads in (HEADS, KV_HEADS))
        for queries in (length, length // 2):
            given = AttentionInputs((Segment(q[:, :, :queries], k, CAUSAL),), k, 0.3, biases()["buckets"])
            assert FlexBackend().attend(given).shape == (batch, HEADS, queries, 8)
    assert len(shapes) == 3 * 20, "three batch sizes, of which 3 is padded to 4, and 20 lengths"


@pytest.mark.parametrize(
    ("size", "padded"), [(1, 128), (128, 128), (129, 256), (1025, 1280), (5000, 5120), (8192, 8192)]
)
def test_padding_is_at_most_a_quarter_from_512_on(size: int, padded: int) -> None:
    assert flex.padded_size(size, BLOCK) == padded


@dataclass(frozen=True)
class Tabled(AlibiBias):
    """ALiBi under another name, so that its values are looked up in a table."""

    formula: ClassVar[str] = "tabled"


def assert_slopes_equal_the_table(backend: FlexBackend, dtype: torch.dtype) -> None:
    for length, queries, band, packed in ((200, 200, CAUSAL, False), (300, 140, Band(0, 150, 10), True)):
        given = inputs(length, queries, band, AlibiBias(alibi_slopes(HEADS)), packed)
        (segment,) = given.segments
        narrow = Segment(segment.query.to(dtype), segment.key.to(dtype), band)
        given = given.replace(segments=(narrow,), value=given.value.to(dtype))
        with torch.no_grad():
            slopes = backend.attend(given)
            table = backend.attend(given.replace(bias=Tabled(alibi_slopes(HEADS))))
            assert torch.equal(slopes, table) and not torch.equal(slopes, backend.attend(given.replace(bias=None)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_slopes_in_the_kernel_are_the_table(dtype: torch.dtype) -> None:
    assert_slopes_equal_the_table(FlexBackend(compiled=False), dtype)


@pytest.mark.slow
def test_compiled_slopes_are_the_table() -> None:
    torch.compiler.reset()
    assert_slopes_equal_the_table(FlexBackend(), torch.float32)


def test_a_fixed_slope_makes_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of as many numbers as there are keys. A learned slope keeps it, because its gradients would need atomic
    additions.
    """
    seen: list[int] = []
    at = AlibiBias.at
    monkeypatch.setattr(AlibiBias, "at", lambda self, x: seen.append(x.numel()) or at(self, x))
    learned = torch.ones(HEADS, 1, requires_grad=True)
    for fixed in (True, False):
        if not fixed:
            monkeypatch.setattr(AlibiBias, "coefficients", learned)
        FlexBackend(compiled=False).attend(inputs(63, 63, CAUSAL, AlibiBias(alibi_slopes(HEADS)), packed=True))
    assert seen == [1, 63]


@pytest.mark.slow
@pytest.mark.parametrize("bias", biases())
def test_its_kernel_is_attention(bias: str) -> None:
    """Compiled, which decides whether the compiler understands each bias and each mask."""
    torch.compiler.reset()
    for length, queries, band, packed in ((200, 200, CAUSAL, False), (300, 140, Band(0, 150, 10), True)):
        assert_attention(FlexBackend(), inputs(length, queries, band, biases()[bias], packed))


@pytest.mark.slow
def test_more_lengths_than_the_compiler_would_take() -> None:
    torch.compiler.reset()
    for length in range(130, 141):
        assert_attention(FlexBackend(), inputs(length, length, CAUSAL, None, packed=False))
