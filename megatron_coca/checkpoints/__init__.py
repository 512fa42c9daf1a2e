"""Checkpoints: our native layout, the Hugging Face and GPT-NeoX layouts, and loading any of them for evaluation."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_coca.checkpoints.files import CheckpointError
    from megatron_coca.checkpoints.load import load_checkpoint, load_model, open_checkpoint
    from megatron_coca.checkpoints.opened import LoadedModel, OpenedCheckpoint

_NAMES = {
    "files": ("CheckpointError",),
    "load": ("load_checkpoint", "load_model", "open_checkpoint"),
    "opened": ("LoadedModel", "OpenedCheckpoint"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = [*_MODULES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    # Lazy imports (PEP 562): the GPT-NeoX plugin imports a submodule, and must not load the readers of all layouts.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
