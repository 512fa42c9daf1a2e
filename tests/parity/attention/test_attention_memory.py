"""Memory of the forward pass and of the tensors that autograd keeps: linear in the length for every method."""

import pytest
import torch
from torch import Tensor

from tests.parity.attention_cases import BACKENDS, CASES, HEADS, SERVED, Layout, inputs_of

pytestmark = pytest.mark.serial

LINEAR = [(name, backend) for name, backend in SERVED if backend in ("sdpa", "merge")]


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """The most bytes behind one tensor that an operation returned."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for each in torch.utils._pytree.tree_leaves(out):
            if isinstance(each, Tensor):
                self.bytes = max(self.bytes, each.untyped_storage().nbytes())
        return out


def used(name: str, backend: str, length: int, gated: bool = False) -> tuple[int, int]:
    """(bytes that autograd keeps, bytes of the largest tensor made forward or backward)."""
    sizes: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        sizes[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        return x

    layout = Layout(length, batch=1, kv_heads=2)
    operands = [x.float().requires_grad_() for x in layout.operands(torch.float32)]
    with Largest() as largest:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            inputs = inputs_of(CASES[name], layout, operands, {})
            gates = -torch.rand(1, HEADS, length, requires_grad=True) if gated else None
            out = BACKENDS[backend].attend(inputs.replace(gates=gates))
        kept = sum(sizes.values())
        out.sum().backward()
    return kept, largest.bytes


@pytest.mark.parametrize(("name", "backend"), LINEAR)
def test_memory_is_linear(name: str, backend: str) -> None:
    """Twice the length, about twice the bytes; from N x N scores it would be four times."""
    (kept, largest), (kept_twice, largest_twice) = (used(name, backend, length) for length in (2048, 4096))
    assert kept_twice <= 2.05 * kept
    assert largest_twice < 2.05 * largest


@pytest.mark.parametrize(("name", "backend"), [("coca", "sdpa"), ("alibi", "sdpa"), ("rerope-coca", "merge")])
def test_memory_is_linear_with_forgetting_gates(name: str, backend: str) -> None:
    (kept, largest), (kept_twice, largest_twice) = (used(name, backend, length, True) for length in (1024, 2048))
    assert kept_twice <= 2.05 * kept
    assert largest_twice < 2.05 * largest


def test_the_measure_finds_scores() -> None:
    (kept, largest), (kept_twice, largest_twice) = (used("rotary", "reference", length) for length in (512, 1024))
    assert kept_twice > 3 * kept and largest_twice == 4 * largest
