"""The forward and backward pass of a micro-batch. The host launches it operation by operation, or as a whole after its
capture in a CUDA graph.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from megatron_coca.config import ConfigError

WARMUP = 3
"""Number of micro-batches before the capture, as in PyTorch's notes on CUDA graphs. They compile kernels and fill
caches, which a capture cannot do.
"""


def run_pass(module: nn.Module, inputs: Mapping[str, Any], parts: int) -> Tensor:
    """Add the gradient of a micro-batch's loss, divided by `parts`, to the parameters of `module`, and return the loss,
    a scalar on the device.
    """
    loss = module(**inputs)
    (loss / parts).backward()
    return loss.detach()


class CapturedPass:
    """Calls `run_pass` and, after `WARMUP` micro-batches of the same shapes, launches it as a CUDA graph instead.
    Micro-batches of other shapes than those of the graph run operation by operation.

    The graph writes the gradients of a micro-batch to its own memory. If a parameter has no gradient yet, this memory
    becomes its gradient. Otherwise, the new gradient is added, so that the sums have the same bits as without a graph.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        """The parameters of `module` are on `device`, a GPU, and must keep their memory."""
        self._module, self._stream = module, torch.cuda.Stream(device)
        self._shapes: dict[str, torch.Size] = {}
        self._runs = 0
        self._inputs: dict[str, Tensor] = {}
        self._loss: Tensor | None = None
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._replay: Callable[[], None] | None = None

    def __call__(self, inputs: Mapping[str, Any], parts: int) -> Tensor:
        """Run a micro-batch, as `run_pass` does; `parts` must be the same in all calls. The next call may overwrite the
        returned loss.

        Raises:
            ConfigError: the model does something that a CUDA graph cannot contain.
        """
        shapes = {name: value.shape for name, value in inputs.items() if isinstance(value, Tensor)}
        if self._replay is None:
            self._runs = self._runs + 1 if shapes == self._shapes else 1
            self._shapes = shapes
            if self._runs > WARMUP:
                self._capture(inputs, parts)
        if self._replay is None or shapes != self._shapes:
            return self._run_on_stream(inputs, parts)
        for name, place in self._inputs.items():
            value = inputs[name]
            place.copy_(value) if isinstance(value, Tensor) else place.fill_(value)
        self._add_gradients(self._replay)
        assert self._loss is not None
        return self._loss

    def close(self) -> None:
        """Free the memory of the graph."""
        self._replay, self._loss = None, None
        self._inputs, self._gradients, self._sums = {}, {}, {}

    def _run_on_stream(self, inputs: Mapping[str, Any], parts: int) -> Tensor:
        """Run a micro-batch on the stream on which a later one will be captured. Autograd runs a parameter's node on
        the stream of its first use, and the node may still exist during the capture.
        """
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            loss = run_pass(self._module, inputs, parts)
        current.wait_stream(self._stream)
        return loss

    def _capture(self, inputs: Mapping[str, Any], parts: int) -> None:
        """Capture a micro-batch without running it."""
        parameters = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        held = [parameter.grad for parameter in parameters]
        self._inputs = {name: value.clone() for name, value in inputs.items() if isinstance(value, Tensor)}
        if "loss_mask" in inputs:  # otherwise all weights are 1
            self._inputs["loss_weight"] = torch.ones((), device=self._stream.device)
        arguments = {**inputs, **self._inputs}
        for parameter in parameters:
            parameter.grad = None  # so that the gradients are in the memory of the graph

        def run() -> None:
            self._loss = run_pass(self._module, arguments, parts)

        try:
            self._replay = self._captured(run)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ConfigError(
                f"cuda_graphs: the passes of this model cannot be captured ({str(error).splitlines()[0]}); set "
                "cuda_graphs=false"
            ) from error
        for parameter, gradient in zip(parameters, held, strict=True):
            if parameter.grad is not None:
                self._gradients[parameter] = parameter.grad
            parameter.grad = gradient

    def _captured(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record the operations of `run` in a graph, and return the function that launches it."""
        graph = torch.cuda.CUDAGraph()
        # Other threads use the GPU meanwhile: the loader, the saving of checkpoints, NCCL's watchdog.
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            run()
        return graph.replay

    def _add_gradients(self, replay: Callable[[], None]) -> None:
        """Compute the gradients with `replay`, and add them to those that the parameters have."""
        sums = {parameter: parameter.grad for parameter in self._gradients if parameter.grad is not None}
        last = [parameter for parameter, total in sums.items() if total is self._gradients[parameter]]
        for parameter in last:  # `replay` overwrites these
            sums[parameter] = self._room(parameter)
            parameter.grad = sums[parameter]
        if last:
            torch._foreach_copy_([sums[each] for each in last], [self._gradients[each] for each in last])
        replay()
        if sums:
            torch._foreach_add_(list(sums.values()), [self._gradients[each] for each in sums])
        for parameter, gradient in self._gradients.items():
            if parameter not in sums:
                parameter.grad = gradient

    def _room(self, parameter: nn.Parameter) -> Tensor:
        """Return memory for the sum of a parameter's gradients."""
        if parameter not in self._sums:
            self._sums[parameter] = torch.empty_like(self._gradients[parameter])
        return self._sums[parameter]
