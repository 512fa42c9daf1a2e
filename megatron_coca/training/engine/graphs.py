"""Micro-batches as CUDA graphs: forward and backward are captured once, and replayed by one launch each time."""

from collections.abc import Callable, Mapping

import torch
import torch.nn as nn
from torch import Tensor
from torch.func import functional_call

WARMUP = 3
"""Passes before the capture. The first ones compile, choose algorithms and fill caches, which a capture must not."""


class CapturedMicroBatch:
    """Forward and backward of a module that maps inputs of fixed shapes to a loss.

    They work on leaves of their own, which share the memory of the weights: gradients are summed over replays in memory
    that stays, and the hooks of the weights, by which DeepSpeed reduces gradients, are not in the graph.
    """

    def __init__(self, module: nn.Module, inputs: Mapping[str, Tensor]) -> None:
        """Capture `module` with `inputs`, which are on its device. Weights and random states stay as they are."""
        self._module, self._inputs = _Unhooked(module), {name: tensor.clone() for name, tensor in inputs.items()}
        self._weights = {name: weight for name, weight in self._module.named_parameters() if weight.requires_grad}
        self._leaves: dict[str, Tensor] = {
            name: nn.Parameter(weight.detach()) for name, weight in self._weights.items()
        }
        self._sums = {name: torch.zeros_like(leaf) for name, leaf in self._leaves.items()}
        for name, leaf in self._leaves.items():
            leaf.grad = self._sums[name]
        self._factor = torch.ones((), device=leaf.device)
        self._loss = torch.zeros_like(self._factor)
        self._replay = capture(self._run)

    def begin(self, factor: float) -> None:
        """Clear the summed gradients; those of the next micro-batches are multiplied by `factor`.

        Raises:
            RuntimeError: a weight has other memory than in the capture.
        """
        for name, leaf in self._leaves.items():
            if leaf.data_ptr() != self._weights[name].data_ptr():
                raise RuntimeError(f"cuda_graphs: {name} has moved since the capture; set cuda_graphs=false")
        torch._foreach_zero_(list(self._sums.values()))
        self._factor.fill_(factor)

    def __call__(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Run one micro-batch; returns its loss, a float32 scalar that the next call overwrites.

        Raises:
            ValueError: the inputs have other names or shapes than those of the capture.
        """
        shapes, captured = ({name: tensor.shape for name, tensor in each.items()} for each in (inputs, self._inputs))
        if shapes != captured:
            raise ValueError(f"cuda_graphs: a micro-batch has shapes {shapes}, the captured one {captured}")
        for name, tensor in inputs.items():
            self._inputs[name].copy_(tensor)
        self._replay()
        return self._loss

    def set_gradients(self) -> None:
        """Give every weight its summed gradient, as a view that may be given other memory."""
        for name, total in self._sums.items():
            self._weights[name].grad = total.detach()

    def _run(self) -> None:
        loss = functional_call(self._module, self._leaves, kwargs=self._inputs)
        loss.backward(self._factor)
        self._loss.copy_(loss.detach())


class _Unhooked(nn.Module):
    """A module without the hooks of its call, which are DeepSpeed's and for timing: a replay would not run them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.module.forward(**inputs)


def capture(run: Callable[[], None]) -> Callable[[], None]:
    """Capture the kernels of `run` after a few calls; returns a function that replays them. Keeps the random states."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.random.fork_rng([torch.cuda.current_device()]):
        with torch.cuda.stream(stream):
            for _ in range(WARMUP):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads read ahead and save meanwhile, and NCCL's watches its events.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            run()
    return graph.replay
