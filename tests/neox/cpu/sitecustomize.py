"""Lets an unmodified GPT-NeoX run without a GPU: on PYTHONPATH, Python imports this first in every process.

GPT-NeoX asks `torch.cuda` for devices, copies and random states by name. Each name gets a counterpart on the CPU when
torch is imported, and its start is allowed to find no GPU. Nothing is printed: some children's output is parsed.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any


def _torch_on_the_cpu(torch: Any) -> None:
    size = int(os.environ.get("WORLD_SIZE", os.environ.get("NEOX_CPU_RANKS", "1")))
    for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "reset_max_memory_allocated"):
        setattr(torch.cuda, name, _giving(None))
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(torch.cuda, name, _giving(0))
    torch.cuda.device_count = lambda: size
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.LongTensor, torch.cuda.ByteTensor = torch.LongTensor, torch.ByteTensor
    torch.cuda.get_rng_state, torch.cuda.set_rng_state = (
        lambda *given: torch.get_rng_state(),
        lambda state, *given: torch.set_rng_state(state),
    )
    torch.Tensor.cuda = lambda self, *given, **named: self
    torch.nn.Module.cuda = lambda self, *given, **named: self


def _giving(value: Any) -> Callable[..., Any]:
    """A function of its own for each name: PyTorch's compiler keeps a table of them."""
    return lambda *given, **named: value


def _start_without_cuda(module: Any) -> None:
    module.initialize_megatron = partial(module.initialize_megatron, allow_no_cuda=True)


def _adam_without_a_compiler(module: Any) -> None:
    from torch.optim import AdamW

    module.DeepSpeedCPUAdam = module.FusedAdam = AdamW  # which both compute too


AFTER: dict[str, Callable[[Any], None]] = {
    "torch": _torch_on_the_cpu,
    "megatron.initialize": _start_without_cuda,
    "deepspeed.ops.adam": _adam_without_a_compiler,
}
"""What is done to a module right after its first import."""


class _Loader(importlib.abc.Loader):
    def __init__(self, wrapped: Any, after: Callable[[Any], None]) -> None:
        self._wrapped, self._after = wrapped, after

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._wrapped.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._wrapped.exec_module(module)
        self._after(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in AFTER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None:
            spec.loader = _Loader(spec.loader, AFTER[name])
        return spec


os.environ.setdefault("DS_ACCELERATOR", "cpu")
sys.meta_path.insert(0, _Finder())
