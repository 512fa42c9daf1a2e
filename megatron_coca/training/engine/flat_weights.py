"""A model's weights in flat buckets, of which each data-parallel rank updates a part, as in ZeRO 1.

The arithmetic is ZeRO's (Rajbhandari et al. 2020, arXiv:1910.02054), so that both engines train the same weights: ranks
average their gradients in the training dtype, and each rank clips and applies its part in float32.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from megatron_coca.training.optimizer import Muon, orthogonalized

# PyTorch 2.13 renames these collectives.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
ALIGNMENT = 2
"""The size of each rank's part is a multiple of this number, as in ZeRO, so that parts in 16 bits begin at multiples of
4 bytes.
"""


class FlatRange(NamedTuple):
    """A range of a parameter in `flat`, the tensor that the optimizer updates. The range starts at element `begin` of
    `flat`, which is element `start` of the flattened parameter.
    """

    parameter: nn.Parameter
    flat: Tensor
    begin: int
    numel: int
    start: int

    def of(self, values: Tensor) -> Tensor:
        """Return this range of `values`, a tensor with the layout of `flat`."""
        return values.view(-1).narrow(0, self.begin, self.numel)


class Bucket:
    """Consecutive parameters in one flat tensor. The parameters become views of it.

    Attributes:
        weights: all weights in the training dtype, [size], padded with zeros.
        begin: the first element of this rank's part of `weights`.
        own: this rank's part, [size / ranks].
        master: the float32 values of `own`, which the optimizer updates; in float32 training `own` itself.
            `master.grad` is this rank's part of the gradient, in float32, between a backward pass and the end of the
            step.
        ranges: the parameters in `master`.
        missing: number of parameters without a gradient in the current backward pass.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], rank: int, ranks: int) -> None:
        first, numel = parameters[0], sum(parameter.numel() for parameter in parameters)
        self.parameters, self.missing = list(parameters), 0
        self._padding = -numel % (ALIGNMENT * ranks)
        self.weights = first.detach().new_zeros(numel + self._padding)
        for parameter, view in zip(parameters, _unflatten_dense_tensors(self.weights, parameters), strict=True):
            parameter.data = view.copy_(parameter.detach())
        part = len(self.weights) // ranks
        self.begin = rank * part
        self.own = self.weights.narrow(0, self.begin, part)
        self.master = self.own if first.dtype == torch.float32 else self.own.float()
        self.ranges = list(self._ranges(self.begin, part))

    def _ranges(self, begin: int, size: int) -> Iterable[FlatRange]:
        offset = 0
        for parameter in self.parameters:
            first, last = max(offset, begin), min(offset + parameter.numel(), begin + size)
            if first < last:
                yield FlatRange(parameter, self.master, first - begin, last - first, first - offset)
            offset += parameter.numel()

    def take(self) -> Tensor:
        """Return the gradients of the parameters as one tensor [size] in the training dtype, and remove them."""
        gradients = [self._gradient(parameter) for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        return _flatten_dense_tensors([*gradients, self.weights.new_zeros(self._padding)])

    def move(self) -> None:
        """On a single rank, move the gradients of the parameters to `master.grad`, without the copy of `take`."""
        total = self.master.grad = torch.empty_like(self.master)
        parts = _unflatten_dense_tensors(total, self.parameters)
        torch._foreach_copy_(list(parts), [self._gradient(parameter) for parameter in self.parameters])
        total.narrow(0, len(total) - self._padding, self._padding).zero_()
        for parameter in self.parameters:
            parameter.grad = None

    @staticmethod
    def _gradient(parameter: nn.Parameter) -> Tensor:
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

    def add(self, part: Tensor) -> None:
        """Add this rank's part of a gradient, in the training dtype, to `master.grad`."""
        if self.master.grad is None:
            self.master.grad = part.to(self.master.dtype)
        else:
            self.master.grad.add_(part)


class _Reduction(NamedTuple):
    """A running reduction: `work` writes this rank's part of `gradients` to `part`."""

    bucket: Bucket
    gradients: Tensor
    part: Tensor
    work: Any


class FlatWeights:
    """The weights that are trained, in buckets, and the optimizer that updates this rank's part of each bucket.

    Gradients of a bucket are reduced as soon as the backward pass has computed the last of them. All ranks reduce the
    buckets in the same order, from the last layers to the first.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, rank: int, ranks: int, bucket_size: int, sums_in_float32: bool
    ) -> None:
        """Move the parameters of `optimizer` to flat tensors. The optimizer must update each element by itself, or be
        Muon.

        Args:
            rank, ranks: this rank and the number of ranks of the default process group, which must exist if there are
                several ranks.
            bucket_size: maximum number of weights in a bucket of several parameters.
            sums_in_float32: whether to sum the gradients of micro-batches in float32, after each gradient is reduced.
        """
        self.optimizer, self._sums_in_float32 = optimizer, sums_in_float32
        self._ranks = ranks
        self._groups: list[list[Bucket]] = []
        for group in optimizer.param_groups:
            limit = bucket_size if ranks > 1 else sum(parameter.numel() for parameter in group["params"])
            buckets = [Bucket(each, rank, ranks) for each in _divided(group["params"], limit)]
            group["params"] = [bucket.master for bucket in buckets]
            self._groups.append(buckets)
        self._order = [bucket for buckets in self._groups for bucket in reversed(buckets)]
        self._reduces, self._overlaps, self._next = False, False, 0
        self._running: deque[_Reduction] = deque()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, bucket))
            for bucket in self._order
            for parameter in bucket.parameters
            if ranks > 1
        ]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups, with the masters of their buckets."""
        return self.optimizer.param_groups

    def ranges(self) -> Iterable[FlatRange]:
        """Return this rank's ranges of all parameters."""
        return (each for bucket in self._buckets() for each in bucket.ranges)

    def masters(self) -> list[Tensor]:
        """Return the tensors that the optimizer updates."""
        return [bucket.master for bucket in self._buckets()]

    def _buckets(self) -> Iterable[Bucket]:
        return (bucket for buckets in self._groups for bucket in buckets)

    def begin_pass(self, last: bool, overlaps: bool = True) -> None:
        """Call this before each backward pass of a step. `last` is true before the last pass. Unless `overlaps` is set,
        gradients are reduced after the pass.
        """
        self._reduces, self._next = last or self._sums_in_float32, 0
        self._overlaps = self._reduces and overlaps
        for bucket in self._order:
            bucket.missing = len(bucket.parameters)

    def _arrived(self, bucket: Bucket, parameter: nn.Parameter) -> None:
        """Reduce the buckets that are complete. Autograd calls this when the gradient of `parameter` is complete."""
        bucket.missing -= 1
        while self._overlaps and self._next < len(self._order) and not self._order[self._next].missing:
            self._reduce()

    def _reduce(self) -> None:
        """Begin the reduction of the next bucket."""
        bucket = self._order[self._next]
        self._next += 1
        gradients, part = bucket.take().div_(self._ranks), torch.empty_like(bucket.own)
        work = _reduce_scatter(part, gradients, async_op=True)
        self._running.append(_Reduction(bucket, gradients, part, work))

    @torch.no_grad()
    def end_pass(self) -> None:
        """Call this after each backward pass: complete the reductions, if the pass reduces its gradients."""
        if not self._reduces:
            return
        if self._ranks == 1:
            for bucket in self._order:
                bucket.move() if bucket.master.grad is None else bucket.add(bucket.take())
            return
        while self._next < len(self._order):  # buckets with parameters that were not used
            self._reduce()
        while self._running:
            running = self._running.popleft()
            running.work.wait()
            running.bucket.add(running.part)

    def norm(self) -> Tensor:
        """Return the global norm of the gradient, a scalar on the device; infinity if the norm is not finite."""
        totals = []
        for buckets in self._groups:
            own = [each.of(bucket.master.grad) for bucket in buckets for each in bucket.ranges]  # type: ignore[arg-type]
            squares = torch.stack(torch._foreach_norm(own, 2, dtype=torch.float64)).square() if own else None
            totals.append(buckets[0].master.new_zeros(()) if squares is None else squares.sum().float())
        total = torch.stack(totals)
        if self._ranks > 1:
            dist.all_reduce(total)
        norm = torch.linalg.vector_norm(total.sqrt())
        return norm.where(norm.isfinite(), torch.inf)

    def clip(self, norm: Tensor, limit: float) -> None:
        """Multiply the gradient by limit / norm if `norm` is above `limit`."""
        factor = 1.0 / torch.clamp((norm + 1e-6) / limit, min=1.0)
        gradients = [master.grad for master in self.masters() if master.grad is not None]
        torch._foreach_mul_(gradients, factor)

    @torch.no_grad()
    def step(self) -> None:
        """Update the weights with the gradient."""
        if isinstance(self.optimizer, Muon):
            self._move_matrices(self.optimizer)
        self.optimizer.step()
        self.refresh()

    def _move_matrices(self, optimizer: Muon) -> None:
        """Update this rank's parts of Muon's matrices. Each matrix is orthogonalized as a whole."""
        for group, buckets in zip(optimizer.param_groups, self._groups, strict=True):
            for bucket in buckets if group["orthogonal"] else ():
                own = optimizer.averaged(group, bucket.master)
                whole = own if self._ranks == 1 else own.new_empty(len(bucket.weights))
                if self._ranks > 1:
                    _all_gather(whole, own)
                for each in bucket.ranges:
                    shape, first = each.parameter.shape, bucket.begin + each.begin - each.start
                    matrix = whole.narrow(0, first, shape.numel()).view(shape)
                    direction = orthogonalized(matrix, group["stacked"]).flatten().narrow(0, each.start, each.numel)
                    optimizer.move(group, each.of(bucket.master), direction)
                bucket.master.grad = None

    def refresh(self) -> None:
        """Copy the masters to this rank's parts of the weights, and send the parts to all other ranks."""
        parts = [bucket.own for bucket in self._buckets() if bucket.own is not bucket.master]
        if parts:
            torch._foreach_copy_(parts, self.masters())
        if self._ranks > 1:
            works = [_all_gather(bucket.weights, bucket.own, async_op=True) for bucket in self._buckets()]
            for work in works:
                work.wait()

    def clear(self) -> None:
        """Remove the gradients."""
        for master in self.masters():
            master.grad = None

    def close(self) -> None:
        """Free the memory."""
        for hook in self._hooks:
            hook.remove()
        for bucket in self._buckets():
            for parameter in bucket.parameters:
                parameter.data, parameter.grad = parameter.detach().new_empty(0), None
        self.optimizer.state.clear()
        for group in self.optimizer.param_groups:
            group["params"] = []
        self._groups, self._order, self._hooks = [], [], []


def _divided(parameters: Sequence[nn.Parameter], limit: int) -> Iterable[list[nn.Parameter]]:
    """Divide the parameters into lists of at most `limit` weights each, or of a single larger parameter."""
    run: list[nn.Parameter] = []
    for parameter in parameters:
        if run and sum(each.numel() for each in run) + parameter.numel() > limit:
            yield run
            run = []
        run.append(parameter)
    yield run
