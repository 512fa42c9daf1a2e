"""Cases for the tests of the Triton kernels: those of the contract, and the rule for their errors."""

from dataclasses import dataclass, fields, replace
from itertools import pairwise

import torch
from torch import Tensor

from megatron_coca.attention.backends.reference import ReferenceBackend
from megatron_coca.attention.backends.triton import TritonBackend
from megatron_coca.attention.inputs import AttentionInputs, Backend, Band, PackedDocuments, Segment, Turns
from megatron_coca.attention.positions.forms import RotaryTables

EPSILONS = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
"""What an error may be where a plain run has none, for operands of unit variance: gradients that cancel to 0."""

DRAWS = 5
TRITON = TritonBackend()


@dataclass(frozen=True)
class FormulaBias:
    """A `DistanceBias` written out once more, with any coefficients."""

    formula: str
    coefficients: Tensor

    def at(self, distance: Tensor) -> Tensor:
        """[heads, ...] for `distance` [...]."""
        table = self.coefficients.to(distance.dtype)
        c0, c1 = (table[:, i].reshape(-1, *[1] * distance.dim()) for i in (0, -1))
        match self.formula:
            case "linear":
                return -c0 * distance
            case "log":
                return -c0 * torch.log1p(c1 * distance)
            case _:
                return -c0 * torch.where(distance > 0, distance.clamp(min=1) ** c1, 0.0)


@dataclass(frozen=True)
class Case:
    """Shapes and bands of one call. `far`: a second segment serves what lies beyond the window. `rotated`: operands are
    magnitudes, of which the first are rotated. `angles`: heads have constant angles. `own_tables`: each row has its
    own positions.
    """

    length: int
    queries: int | None = None
    window: int | None = None
    far: bool = False
    first_keys: int | None = None
    formula: str | None = None
    documents: int = 1
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 16
    batch: int = 2
    value_dim: int | None = None
    rotated: int | None = None
    angles: bool = False
    own_tables: bool = False

    def __str__(self) -> str:
        told = [(x.name, getattr(self, x.name)) for x in fields(self) if getattr(self, x.name) != x.default]
        return "-".join(f"{name}{value}" for name, value in told)

    @property
    def bands(self) -> tuple[Band, ...]:
        """Of the segments."""
        near = Band(0, self.window)
        return (near, Band(self.window or 0, None, self.first_keys)) if self.far else (near,)

    def leaves(self, draw: int = 0) -> list[Tensor]:
        """Value, query and key of each segment, and the coefficients, float64, other numbers for each `draw`."""
        generator = torch.Generator().manual_seed(self.length + 1000 * draw)
        queries = self.length if self.queries is None else self.queries

        def normal(heads: int, length: int, width: int = self.head_dim) -> Tensor:
            # Packed as a projection packs them: a head's rows do not follow each other in memory.
            shape = (self.batch, length, heads, 2 * width)
            return torch.randn(shape, generator=generator, dtype=torch.float64)[..., :width].transpose(1, 2)

        operands = [normal(self.kv_heads, self.length, self.value_dim or self.head_dim)]
        for _ in self.bands:
            operands += [normal(self.heads, queries), normal(self.kv_heads, self.length)]
        if self.angles and self.rotated:
            operands.append(torch.randn(self.heads, self.rotated, generator=generator, dtype=torch.float64))
        if self.formula is not None:
            columns = 1 if self.formula == "linear" else 2
            operands.append(0.2 + torch.rand(self.heads, columns, generator=generator, dtype=torch.float64))
        return operands

    def tables(self, count: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines for the last `count` tokens, float64, with an amplitude."""
        assert self.rotated is not None
        places = torch.arange(self.length, dtype=torch.float64)[-count:]
        if self.own_tables:
            places = (places + torch.arange(self.batch)[:, None] * 3)[:, None]
        phases = places[..., None] * 50.0 ** -torch.linspace(0, 1, self.rotated, dtype=torch.float64)
        return 1.2 * phases.cos(), 1.2 * phases.sin()

    def turns(self, dtype: torch.dtype, device: str, offset: Tensor | None) -> Turns:
        """As the contract has them."""
        queries = self.length if self.queries is None else self.queries
        of = [
            RotaryTables(*(x.to(device, torch.promote_types(dtype, torch.float32)) for x in self.tables(count)))
            for count in (queries, self.length)
        ]
        return Turns(*of, offset)

    def by_hand(self, x: Tensor, offset: Tensor | None) -> Tensor:
        """Q' or K' from magnitudes."""
        m, rest = x[..., : self.rotated], x[..., self.rotated :]
        cos, sin = (
            table.to(x.device, torch.promote_types(x.dtype, torch.float32)) for table in self.tables(x.shape[2])
        )
        if offset is not None:
            by_cos, by_sin = offset.cos()[:, None], offset.sin()[:, None]
            cos, sin = cos * by_cos + sin * by_sin, sin * by_cos - cos * by_sin
        return torch.cat([(m * cos).to(x.dtype), (m * sin).to(x.dtype), rest], -1)

    def packed(self) -> PackedDocuments | None:
        """Documents cut at random, differently in each row."""
        if self.documents == 1:
            return None
        generator = torch.Generator().manual_seed(1)
        spans = []
        for _ in range(self.batch):
            cuts = 1 + torch.randperm(self.length - 1, generator=generator)[: self.documents - 1]
            spans.append(tuple(pairwise([0, *sorted(cuts.tolist()), self.length])))
        starts = [[start for start, stop in row for _ in range(stop - start)] for row in spans]
        return PackedDocuments(torch.tensor(starts), tuple(spans))


def run(case: Case, backend: Backend, dtype: torch.dtype, device: str = "cpu", draw: int = 0) -> list[Tensor]:
    """The output and gradients of all leaves, float64 on the CPU, from a run in `dtype`; coefficients are float32."""
    leaves = [
        x.to(device, dtype if x.dim() == 4 else torch.promote_types(dtype, torch.float32)) for x in case.leaves(draw)
    ]
    leaves = [x.detach().requires_grad_() for x in leaves]
    value, *rest = leaves
    segments = tuple(Segment(rest[2 * i], rest[2 * i + 1], band) for i, band in enumerate(case.bands))
    if case.rotated is not None:
        (segment,), offset = segments, rest[2] if case.angles else None
        if getattr(backend, "expands", False):
            segment = replace(segment, turns=case.turns(dtype, device, offset))
        else:
            query, key = case.by_hand(segment.query, offset), case.by_hand(segment.key, None)
            segment = replace(segment, query=query, key=key)
        segments = (segment,)
    packed = case.packed()
    if packed is not None:
        packed = PackedDocuments(packed.starts.to(device), packed.spans)
    bias = None if case.formula is None else FormulaBias(case.formula, leaves[-1])
    out = backend.attend(AttentionInputs(segments, value, case.head_dim**-0.5, bias, documents=packed))
    generator = torch.Generator().manual_seed(2)
    cotangent = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(device, dtype)
    return [x.detach().double().cpu() for x in (out, *torch.autograd.grad(out, leaves, cotangent))]


def check(case: Case, dtype: torch.dtype, device: str = "cpu", backend: Backend = TRITON) -> None:
    """Output and gradients are at most twice as far from float64 as a plain PyTorch run in `dtype`.

    The gradient of a coefficient or of a constant angle is one sum over all pairs, too few numbers to measure an error
    by: the plain run's is the largest of several draws there.
    """
    draws = range(DRAWS if case.formula or case.angles else 1)
    exact = [run(case, ReferenceBackend(), torch.float64, device, draw) for draw in draws]
    plain = [run(case, ReferenceBackend(), dtype, device, draw) for draw in draws]
    got = run(case, backend, dtype, device)
    for place, (mine, true) in enumerate(zip(got, exact[0], strict=True)):
        compared = draws if true.dim() == 2 else draws[:1]
        allowed = 2 * max((plain[i][place] - exact[i][place]).abs().max() for i in compared) + EPSILONS[dtype]
        error = (mine - true).abs().max()
        assert error <= allowed, f"{case}, tensor {place}: error {error:.2e}, allowed {allowed:.2e}"
