"""Training and evaluating position methods for long context: CoCA, RoFormer, ALiBi and others, on PyTorch and
DeepSpeed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_coca.checkpoints import load_model
    from megatron_coca.config import load_config
    from megatron_coca.model import Sampling, build_model
    from megatron_coca.text_generation import load_generator

__all__ = ["Sampling", "build_model", "load_config", "load_generator", "load_model"]
__version__ = "0.2.0"

_MODULES = {
    "Sampling": "megatron_coca.model",
    "build_model": "megatron_coca.model",
    "load_config": "megatron_coca.config",
    "load_generator": "megatron_coca.text_generation",
    "load_model": "megatron_coca.checkpoints",
}


def __getattr__(name: str) -> Any:
    # PEP 562: data and configuration need no PyTorch, whose import takes seconds.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
