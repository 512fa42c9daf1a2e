"""Bytes that PyTorch's operations on the device read and write, from the shapes and strides of their tensors.

Each operation counts as one kernel that reads its inputs and writes its outputs once. Savings by caches and repeated
reads of a kernel are not included. Triton kernels that are launched outside of an operation count every tensor once.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MATRIX_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "linear", "_grouped_mm", "_scaled_mm"})
NOTHING_READ = frozenset({"copy_", "fill_", "zero_", "normal_", "uniform_", "_foreach_zero_", "_foreach_copy_"})
"""Operations that overwrite their first argument without reading it."""
ALLOCATES = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_"})
READS_WHAT_IT_RETURNS = frozenset({"embedding", "index", "index_select", "gather", "nll_loss_forward"})
"""Operations that read as much of their first input as they return; the rest of it is not touched."""

SCATTERS = frozenset({"scatter_", "scatter_add_"})
"""Operations that read their indices and values and write as many elements."""


def touched(tensor: Tensor) -> int:
    """Bytes of the elements that a tensor shows; expanded dimensions count once."""
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= 1 if stride == 0 else size
    return count


class Traffic(TorchDispatchMode):
    """Sums bytes by operation while it is active.

    Attributes:
        bytes: by name of the operation.
    """

    supports_higher_order_operators = True  # FlexAttention is one

    def __init__(self) -> None:
        super().__init__()
        self.bytes: defaultdict[str, int] = defaultdict(int)
        self._inside = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._inside += 1
        try:
            result = func(*args, **kwargs)
        finally:
            self._inside -= 1
        self._count(func, args, kwargs, result)
        return result

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        if not hasattr(func, "_schema"):  # a higher-order operator: inputs and outputs once
            self.bytes[str(func)] += sum(map(touched, _tensors((args, kwargs, result))))
            return
        name = func._schema.name.removeprefix("aten::")
        if name in ALLOCATES:
            return
        if name in SCATTERS:
            self.bytes[name] += 3 * touched(args[2])
            return
        given = dict(zip([argument.name for argument in func._schema.arguments], args, strict=False)) | dict(kwargs)
        written = [
            tensor
            for argument in func._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors(given.get(argument.name))
        ]
        inputs = [tensor for value in given.values() for tensor in _tensors(value)]
        storages = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        fresh = [tensor for tensor in _tensors(result) if tensor.untyped_storage().data_ptr() not in storages]
        if not written and not fresh:
            return  # a view
        if not any(tensor.is_cuda for tensor in [*inputs, *fresh]):
            return
        if name in NOTHING_READ or "out" in given:
            overwritten = {id(tensor) for tensor in written}
            inputs = [tensor for tensor in inputs if id(tensor) not in overwritten]
        if name in READS_WHAT_IT_RETURNS:
            inputs = [*fresh, *inputs[1:]]
        self.bytes[name] += sum(map(touched, inputs)) + sum(map(touched, written)) + sum(map(touched, fresh))

    @contextmanager
    def with_triton(self) -> Iterator[None]:
        """Be active, and also count the Triton kernels that no operation contains."""
        from triton.runtime.jit import JITFunction

        launch = JITFunction.run

        def run(kernel: Any, *args: Any, **options: Any) -> Any:
            if not self._inside:
                tensors = {tensor.data_ptr(): tensor for tensor in _tensors((args, options))}
                self.bytes[f"triton {kernel.__name__}"] += sum(map(touched, tensors.values()))
            return launch(kernel, *args, **options)

        JITFunction.run = run  # type: ignore[method-assign]
        try:
            with self:
                yield
        finally:
            JITFunction.run = launch  # type: ignore[method-assign]


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def measured_bytes(call: Callable[[], object]) -> dict[str, int]:
    """Return the bytes of a call by operation."""
    traffic = Traffic()
    with traffic.with_triton():
        call()
    return dict(traffic.bytes)
