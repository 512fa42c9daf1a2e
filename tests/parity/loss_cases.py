"""Cases of the output layer with its loss, and the rule for their errors, on any device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_coca.model import next_token_loss
from megatron_coca.model.loss import IGNORED, linear_cross_entropy


@dataclass(frozen=True)
class HeadCase:
    """Shapes of one call. `chunk` is the number of tokens that are scored at a time; `factor` multiplies the loss."""

    tokens: int
    width: int
    words: int
    chunk: int
    factor: float = 1.0
    ignored: bool = True

    def __str__(self) -> str:
        kept = "" if self.ignored else "-all"
        return f"{self.tokens}x{self.width}x{self.words}-by{self.chunk}-times{self.factor:g}{kept}"

    def operands(self, draw: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states, weights and labels, float64 on the CPU and exact in bfloat16. Every seventh label is ignored,
        and the labels include the first and the last word.
        """
        generator = torch.Generator().manual_seed(self.tokens + draw)
        hidden = torch.randn(self.tokens, self.width, generator=generator).bfloat16().double()
        weight = (torch.randn(self.words, self.width, generator=generator) / self.width**0.5).bfloat16().double()
        labels = torch.randint(self.words, (self.tokens,), generator=generator)
        labels[:2] = torch.tensor([0, self.words - 1])[: self.tokens]
        if self.ignored:
            labels[2::7] = IGNORED
        return hidden, weight, labels


DRAWS = 5
"""Random operands by which the plain loss is judged."""


def results(case: HeadCase, dtype: torch.dtype, device: str, kernel: str | None, draw: int = 0) -> list[Tensor]:
    """The loss and the gradients of hidden states and weight, float64 on the CPU. Without a kernel, PyTorch computes
    them from all logits at once.
    """
    hidden, weight, labels = case.operands(draw)
    hidden, weight = (x.to(device, dtype).requires_grad_() for x in (hidden, weight))
    labels = labels.to(device)
    if kernel is None:
        loss = next_token_loss(hidden @ weight.T, labels.clamp(min=0), labels != IGNORED)
    else:
        loss = linear_cross_entropy(hidden, weight, labels, case.chunk, kernel)
    found = torch.autograd.grad(case.factor * loss, (hidden, weight))
    assert [x.dtype for x in found] == [dtype, dtype]
    return [x.detach().double().cpu() for x in (loss, *found)]


def check(case: HeadCase, dtype: torch.dtype, device: str, kernel: str = "triton") -> None:
    """Errors are at most twice those of the plain loss in the same dtype, both against float64.

    The loss is one number, which may be right by chance: the plain run's error is the largest of several draws there.
    """
    exact = [results(case, torch.float64, "cpu", None, draw) for draw in range(DRAWS)]
    plain = [results(case, dtype, device, None, draw) for draw in range(DRAWS)]
    got = results(case, dtype, device, kernel)
    floor = 8 * torch.finfo(torch.float32).eps
    for place, (name, mine, true) in enumerate(zip(("loss", "hidden", "weight"), got, exact[0], strict=True)):
        draws = range(DRAWS if name == "loss" else 1)
        other = max((plain[draw][place] - exact[draw][place]).norm() for draw in draws)
        error, allowed = (mine - true).norm(), 2 * other + floor * true.norm()
        assert error <= allowed, f"{case}, {name}: error {error:.2e}, allowed {allowed:.2e}"


def check_sum(dtype: torch.dtype, device: str, kernel: str, chunk: int = 1) -> None:
    """A sum of 4,096 equal terms: in half precision it would stop growing at 256 or 2,048 terms."""
    tokens, width, words = 4096, 16, 8
    hidden = torch.ones(tokens, width, device=device, dtype=dtype)
    weight = torch.zeros(words, width, device=device, dtype=dtype, requires_grad=True)
    labels = torch.zeros(tokens, dtype=torch.int64, device=device)
    (found,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels, chunk, kernel), weight)
    expected = torch.full((words, width), 1 / words, dtype=torch.float64)
    expected[0] -= 1
    torch.testing.assert_close(found.double().cpu(), expected, rtol=2e-2, atol=0)
