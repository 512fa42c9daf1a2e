"""The operands of the rotary forms written out in PyTorch, and the results of the fused kernels on any device."""

import torch
from torch import Tensor

BATCH, HEADS, KV_HEADS = 2, 4, 2


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
