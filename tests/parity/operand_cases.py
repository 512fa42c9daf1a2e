"""The operands of the rotary forms written out in PyTorch, and the results of the fused kernels on any device."""

from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

BATCH, HEADS, KV_HEADS = 2, 4, 2
POLAR = [*product(("softplus", "relu_mean"), (1, 2), (1, 2), (False, True))]
"""Magnitude, power of the query's magnitude, features per frequency, and whether there are constant angles."""


def plain(x: Tensor, cos: Tensor, sin: Tensor, form: str, is_query: bool) -> Tensor:
    """One operand by PyTorch, in the dtype of x."""
    half = cos.shape[-1]
    x1, x2, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    rotated = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    u = torch.relu((x1 + x2) / 2)
    square = x1**2 + x2**2
    rows = {
        ("rotary", True): (*rotated, rest),
        ("rotary", False): (*rotated, rest),
        ("coca", True): (x1 * rotated[0], x2 * rotated[1], rest**2),
        ("coca", False): (u * (cos - sin), u * (cos + sin), torch.relu(rest)),
        ("coca_strict", True): (square * cos, square * sin, rest**2),
        ("coca_strict", False): (u * cos, u * sin, torch.relu(rest)),
    }
    return torch.cat(rows[form, is_query], dim=-1)


def operands(
    form: str,
    rotated: int,
    head_dim: int,
    own_tables: bool,
    dtype: torch.dtype,
    fused: bool,
    device: str = "cpu",
    length: int = 19,
) -> list[Tensor]:
    """Q', K' and the gradient of the packed projection that q and k are views into, float64 on the CPU.

    The numbers that go in are the same in every dtype: they are rounded to bfloat16 first.
    """
    generator = torch.Generator().manual_seed(3)
    packed = torch.randn(BATCH, length, HEADS, 3 * head_dim, generator=generator).bfloat16().to(device, dtype)
    packed.requires_grad_()
    shape = (BATCH, 1, length, rotated // 2) if own_tables else (length, rotated // 2)
    tables = [torch.randn(shape, generator=generator).to(device) for _ in range(4)]
    q, k, _ = packed.transpose(1, 2).chunk(3, dim=-1)
    k = k[:, :KV_HEADS]
    if fused:
        from megatron_coca.kernels.operands import fused_operands  # triton exists only on some platforms

        out = fused_operands(q, k, tables, form)  # type: ignore[arg-type]
    else:
        exact = [x.to(dtype) for x in tables]
        out = [plain(q, *exact[:2], form, True), plain(k, *exact[2:], form, False)]
    cotangents = [torch.randn(x.shape, generator=generator).bfloat16().to(device, dtype) for x in out]
    return [x.detach().double().cpu() for x in (*out, *torch.autograd.grad(out, packed, cotangents))]


def check(
    form: str, rotated: int, head_dim: int, own_tables: bool, dtype: torch.dtype, device: str, length: int
) -> None:
    """The fused kernels' errors are at most twice those of PyTorch's operations in the same dtype, both against
    float64.
    """
    arguments = form, rotated, head_dim, own_tables
    exact = operands(*arguments, torch.float64, fused=False, length=length)
    theirs = operands(*arguments, dtype, fused=False, device=device, length=length)
    got = operands(*arguments, dtype, fused=True, device=device, length=length)
    for name, mine, other, true in zip(("query", "key", "gradient"), got, theirs, exact, strict=True):
        error, allowed = (mine - true).abs().max(), 2 * (other - true).abs().max() + torch.finfo(dtype).tiny
        assert error <= allowed, f"{form}, {rotated} of {head_dim}, {name}: error {error:.2e}, allowed {allowed:.2e}"


def polar_plain(
    x: Tensor, cos: Tensor, sin: Tensor, terms: tuple[str, int, int], is_query: bool, offset: Tensor | None
) -> Tensor:
    """One polar operand by PyTorch, in the dtype of x."""
    magnitude, power, features = terms
    power = power if is_query else 1
    rotated = features * cos.shape[-1]
    block, rest = x[..., :rotated], x[..., rotated:]
    x1, x2 = block.chunk(2, dim=-1)
    if magnitude == "softplus":
        m = F.softplus(block, threshold=40.0) ** power
    else:
        m = (x1**2 + x2**2) ** (power / 2) if is_query else torch.relu((x1 + x2) / 2)
        rest = rest.abs() ** power if is_query else torch.relu(rest)
    if m.shape[-1] != cos.shape[-1]:  # two magnitudes have one angle, or the other way round
        m, cos, sin = (torch.cat((y, y), dim=-1) if y.shape[-1] == rotated // 2 else y for y in (m, cos, sin))
    if offset is not None and is_query:
        by_cos, by_sin = offset.cos()[:, None], offset.sin()[:, None]
        cos, sin = cos * by_cos + sin * by_sin, sin * by_cos - cos * by_sin
    return torch.cat((m * cos, m * sin, rest), dim=-1)


def polar_operands(
    case: tuple[str, int, int, bool],
    rotated: int,
    head_dim: int,
    own_tables: bool,
    dtype: torch.dtype,
    fused: bool,
    device: str = "cpu",
    length: int = 19,
) -> list[Tensor]:
    """Q', K', and the gradients of the packed projection and of the constant angles, like `operands`. Two segments."""
    *terms, turned = case
    generator = torch.Generator().manual_seed(4)
    packed = (3 * torch.randn(BATCH, length, HEADS, 3 * head_dim, generator=generator)).bfloat16().to(device, dtype)
    count = rotated // (2 if (terms[0], terms[2]) == ("relu_mean", 2) else 1)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    angles = (6 * torch.randn(HEADS, count, generator=generator)).to(device, wide) if turned else None
    inputs = [x.requires_grad_() for x in (packed, angles) if x is not None]
    shape = (BATCH, 1, length, rotated // terms[2]) if own_tables else (length, rotated // terms[2])
    tables = [torch.randn(shape, generator=generator).to(device) for _ in range(8)]
    q, k, _ = packed.transpose(1, 2).chunk(3, dim=-1)
    k = k[:, :KV_HEADS]
    if fused:
        from megatron_coca.kernels import polar_operands as kernels

        out = kernels.polar_operands(q, k, tables, kernels.Terms(*terms), angles)  # type: ignore[arg-type]
    else:
        exact, own = [x.to(wide) for x in tables], (q.to(wide), k.to(wide))
        out = [
            polar_plain(own[j], *exact[first + 2 * j : first + 2 * j + 2], tuple(terms), j == 0, angles).to(dtype)  # type: ignore[arg-type]
            for first in (0, 4)
            for j in (0, 1)
        ]
    cotangents = [torch.randn(x.shape, generator=generator).bfloat16().to(device, dtype) for x in out]
    return [x.detach().double().cpu() for x in (*out, *torch.autograd.grad(out, inputs, cotangents))]


def check_polar(
    case: tuple[str, int, int, bool],
    rotated: int,
    head_dim: int,
    own: bool,
    dtype: torch.dtype,
    device: str,
    length: int,
) -> None:
    """As `check`, with the norms of the errors: gradients are sums over segments, and single errors are chance."""
    arguments = case, rotated, head_dim, own
    exact = polar_operands(*arguments, torch.float64, fused=False, length=length)
    theirs = polar_operands(*arguments, dtype, fused=False, device=device, length=length)
    got = polar_operands(*arguments, dtype, fused=True, device=device, length=length)
    assert len(got) == len(exact) == 5 + case[3]
    for number, (mine, other, true) in enumerate(zip(got, theirs, exact, strict=True)):
        error, allowed = (mine - true).norm(), 2 * (other - true).norm() + torch.finfo(dtype).tiny
        assert error <= allowed, f"{case}, {rotated} of {head_dim}, {number}: error {error:.2e}, allowed {allowed:.2e}"
