"""Download models from the Hugging Face Hub, with huggingface_hub."""

from pathlib import Path
from typing import Any

from megatron_coca.checkpoints.files import CheckpointError
from megatron_coca.support.remote_files import HUB

FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt"]
COPIES = ["*/*", "consolidated*"]
"""`FILES` are patterns of files to download. `COPIES` are patterns of copies for other programs, which are skipped."""
PICKLES = ["pytorch_model*", "adapter_model.bin"]
"""Patterns of the files that are also downloaded if the model has no safetensors files."""


def from_hub(name: str, folder: Path | None = None) -> Path:
    """Download the model `name` (OWNER/NAME) and return its folder: `folder`, or one in the cache of huggingface_hub.

    Files that the folder already has are not downloaded again. Raises CheckpointError.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CheckpointError(
            f"{HUB}{name}: huggingface_hub is not installed; run `pip install huggingface_hub`"
        ) from error
    place: dict[str, Any] = {} if folder is None else {"local_dir": folder}
    try:
        found = Path(snapshot_download(name, allow_patterns=FILES, ignore_patterns=COPIES, **place))
        if any(found.glob("*.safetensors")):
            return found
        return Path(snapshot_download(name, allow_patterns=[*FILES, *PICKLES], ignore_patterns=COPIES, **place))
    except Exception as error:  # each version of the HTTP client has its own exception classes
        raise CheckpointError(f"{HUB}{name}: cannot be downloaded ({error}); check the name and the network") from error
