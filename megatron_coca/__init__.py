"""Train and evaluate position methods for long context: CoCA, RoFormer, ALiBi and others, on PyTorch and
DeepSpeed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_coca.attention.positions.bias import fixed_bias
    from megatron_coca.checkpoints import load_checkpoint, load_model
    from megatron_coca.config import load_config
    from megatron_coca.data import load_tokenizer
    from megatron_coca.evaluation import build_report, sliding_window_perplexity
    from megatron_coca.evaluation.attention_maps import attention_maps
    from megatron_coca.methods import (
        DistanceMap,
        ForgettingGate,
        FrequencyExtension,
        LogitScaling,
        Option,
        PositionEmbedding,
        TrainingFrequencies,
        register,
    )
    from megatron_coca.model import Attention, Sampling, build_model
    from megatron_coca.model.generate import generate
    from megatron_coca.sinks import MetricSink, RunFacts, SinkOption, register_sink
    from megatron_coca.support.errors import InputError
    from megatron_coca.text_generation import load_generator
    from megatron_coca.training.corpus import open_corpus, open_loader

__version__ = "0.2.0"

_NAMES = {
    "attention.positions.bias": ("fixed_bias",),
    "checkpoints": ("load_checkpoint", "load_model"),
    "config": ("load_config",),
    "data": ("load_tokenizer",),
    "evaluation": ("build_report", "sliding_window_perplexity"),
    "evaluation.attention_maps": ("attention_maps",),
    "methods": (
        *("DistanceMap", "ForgettingGate", "FrequencyExtension", "LogitScaling", "Option", "PositionEmbedding"),
        *("TrainingFrequencies", "register"),
    ),
    "model": ("Attention", "Sampling", "build_model", "generate"),
    "sinks": ("MetricSink", "RunFacts", "SinkOption", "register_sink"),
    "support.errors": ("InputError",),
    "text_generation": ("load_generator",),
    "training.corpus": ("open_corpus", "open_loader"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = [*_MODULES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    # PEP 562: names are imported on first use. Data and configuration need no PyTorch, which takes seconds to import.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
