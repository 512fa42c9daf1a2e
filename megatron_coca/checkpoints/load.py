"""Open and load checkpoints of any supported layout."""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron_coca.checkpoints import native
from megatron_coca.checkpoints.adapters import find_adapters, has_adapters
from megatron_coca.checkpoints.files import CheckpointError
from megatron_coca.checkpoints.hub import from_hub
from megatron_coca.checkpoints.huggingface import read as huggingface
from megatron_coca.checkpoints.huggingface.adapted import open_adapted
from megatron_coca.checkpoints.low_rank import AdaptedWeights, adapted_identity
from megatron_coca.checkpoints.native.object_store import fetch
from megatron_coca.checkpoints.neox import read as neox
from megatron_coca.checkpoints.opened import LoadedModel, OpenedCheckpoint
from megatron_coca.checkpoints.weights import Weights, open_safetensors_file
from megatron_coca.config import Config, load_saved_config
from megatron_coca.config.source import Overrides, given_values
from megatron_coca.data.tokenizers.kinds import DESCRIPTION
from megatron_coca.model import GPT
from megatron_coca.support.arguments import local_path
from megatron_coca.support.remote_files import HUB, hub_hint, is_url

IGNORED, BASE = "ignore_keys", "base_model"


def load_model(path: str | Path, overrides: Overrides = (), device: str = "cpu") -> GPT:
    """Load a native checkpoint, a Hugging Face folder or a GPT-NeoX checkpoint as a model in evaluation mode.

    `overrides` is a mapping, for example {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, or a sequence of
    "key=value" strings. It may change the frequency extension, the rotary base or the attention backend.

    Raises CheckpointError if there is no valid checkpoint at `path` or an override does not fit the weights. Raises
    ConfigError if an override is invalid.
    """
    return load_checkpoint(path, overrides, device).model


def load_checkpoint(path: str | Path, overrides: Overrides = (), device: str = "cpu") -> LoadedModel:
    """Load a model as `load_model` does, and return it with its configuration, tokenizer folder and identity."""
    return open_checkpoint(path, overrides=overrides).load(overrides, device=device)


def open_checkpoint(
    path: str | Path,
    verify: bool = True,
    step: int | None = None,
    overrides: Overrides = (),
    files: Sequence[str | Path] = (),
) -> OpenedCheckpoint:
    """Open a native checkpoint, a Hugging Face folder, PEFT adapters or a GPT-NeoX checkpoint.

    Args:
        path: a folder, `hf://NAME` for a model on the Hugging Face Hub, or the URL of a native checkpoint on an object
            store. Remote checkpoints are downloaded.
        verify: compare the checksums of a native checkpoint's files; otherwise, compare only their sizes.
        step: step in the save folder; by default the latest.
        overrides, files: config overrides and YAML files of the user. Only their keys `imports`, `ignore_keys` and
            `base_model` are read. Files that a checkpoint imports are never run unless the user names them.

    Raises CheckpointError. Raises ConfigError if `imports` is needed but not given, or if a file in it cannot be run.
    """
    return _open(local_folder(path, step), verify, overrides, files)


def _open(
    folder: Path, verify: bool, overrides: Overrides, files: Sequence[str | Path], within: tuple[Path, ...] = ()
) -> OpenedCheckpoint:
    """Open the checkpoint in a local folder. The adapters of the checkpoints in `within` change this checkpoint."""
    ignored = ignored_names(overrides, files)
    if has_adapters(folder):
        named = given_values(overrides, files).get(BASE)
        base = None if named is None else local_folder(str(named), None)
        return open_adapted(*find_adapters(folder, base), ignored)
    if huggingface.is_huggingface_folder(folder):
        return huggingface.open_folder(folder, ignored)
    neox_folder = neox.find_step(folder)
    if neox_folder is not None:
        return neox.open_step(neox_folder, overrides, files)
    return _open_native(folder, verify, overrides, files, within)


def ignored_names(overrides: Overrides = (), files: Sequence[str | Path] = ()) -> tuple[str, ...]:
    """Return the keys of config.json that a user's overrides and YAML files name in `ignore_keys`."""
    given = given_values(overrides, files).get(IGNORED) or []
    return tuple(map(str, given)) if isinstance(given, list) else (str(given),)


def source_overrides(config: Config) -> dict[str, Any]:
    """Return the overrides for `open_checkpoint` to open the model that a run's key `load` names."""
    keys = config.checkpoint
    return {"imports": config.position.imports, IGNORED: keys.ignore_keys, BASE: keys.base_model}


def find_native(path: str | Path, step: int | None = None) -> Path | None:
    """Return the native step folder that `open_checkpoint` would open, or None if the checkpoint has another layout.

    Raises CheckpointError.
    """
    folder = local_folder(path, step)
    theirs = has_adapters(folder) or huggingface.is_huggingface_folder(folder) or neox.find_step(folder) is not None
    return None if theirs else native.locate(folder)


def find_other_layout(path: str | Path) -> tuple[Path, str] | None:
    """Return the folder or file at `path` and the name of its layout, or None if it is native or not a checkpoint.

    A model of the Hugging Face Hub is downloaded. Raises CheckpointError.
    """
    if is_url(path) and not str(path).startswith(HUB):
        return None
    folder = local_folder(path, None) if str(path).startswith(HUB) else local_path(str(path))
    if has_adapters(folder):
        return folder, "PEFT adapters and their model"
    if huggingface.is_huggingface_folder(folder):
        return folder, "Hugging Face folder" if (folder / huggingface.CONFIG).is_file() else "GGUF file"
    found = neox.find_step(folder)
    return None if found is None else (found, "GPT-NeoX checkpoint")


def local_folder(path: str | Path, step: int | None = None) -> Path:
    """Return the local folder of a checkpoint or of a run. A remote checkpoint is downloaded."""
    if str(path).startswith(HUB):
        return from_hub(str(path).removeprefix(HUB))
    if is_url(path):
        return fetch(str(path), step)
    path = local_path(str(path))
    if not path.exists() and (hint := hub_hint(path, bare=True)):
        raise CheckpointError(f"{path}: no such checkpoint folder{hint}")
    if step is None:
        return path
    folder = native.step_folder(path, step)
    return folder if neox.is_step(folder) else native.locate(path, step)


def open_adapted_model(
    adapts: native.AdaptedModel,
    checkpoint: Path,
    verify: bool = True,
    overrides: Overrides = (),
    files: Sequence[str | Path] = (),
    place: str | Path | None = None,
    within: tuple[Path, ...] = (),
) -> OpenedCheckpoint:
    """Open the model that the adapters in the native checkpoint `checkpoint` change.

    The folder of that model is `place` if it is given, else the user's key `base_model`, else the recorded folder. The
    user's key is ignored if the checkpoint records a `base_model` itself, because then the adapters change a model that
    consists of other adapters and this base. Nothing is downloaded unless the user names it. The adapters of the
    checkpoints in `within` change `checkpoint`. Raises CheckpointError, also if the folder contains another model.
    """
    given, keys = given_values(overrides, files), {IGNORED: adapts.ignore_keys, BASE: adapts.base_model}
    named = place or (given.get(BASE) if adapts.base_model is None else None)
    recorded = checkpoint.parent / adapts.place if adapts.is_beside else Path(adapts.place)
    if named is None and (is_url(adapts.place) or is_url(adapts.base_model or "") or not os.path.exists(recorded)):
        raise CheckpointError(
            f"{checkpoint}: has adapters of the model in {adapts.place}, which no longer exists there; name its folder "
            "with --base FOLDER, or in a file with base_model: FOLDER"
        )
    folder = recorded if named is None else local_folder(named)
    own = {name: value for name, value in ({"imports": given.get("imports")} | keys).items() if value}
    opened = _open(folder, verify, own, (), (*within, checkpoint.resolve()))
    if opened.identity != adapts.identity:
        raise CheckpointError(
            f"{folder}: is not the model that the adapters in {checkpoint} change, because its content differs; that "
            f"model was at {adapts.place}; name its folder with --base FOLDER, or in a file with base_model: FOLDER"
        )
    return opened


def _open_native(
    path: Path, verify: bool, overrides: Overrides, files: Sequence[str | Path], within: tuple[Path, ...]
) -> OpenedCheckpoint:
    folder = native.locate(path)
    if folder.resolve() in within:
        raise CheckpointError(f"{folder}: its adapters change a model that contains these adapters; use another step")
    manifest = native.verify(folder, contents=verify, links=True)
    tokenizer, meta = folder / native.TOKENIZER, native.read_meta(folder)
    saved = load_saved_config(folder / native.CONFIG, overrides, files)
    weights, digest = partial(open_safetensors_file, folder / native.WEIGHTS, folder), _digest_of_weights(manifest)
    base, own = None, None
    if (adapts := native.adapted_model(meta)) is not None:
        if (lora := saved.config.optimizer.lora) is None:
            raise CheckpointError(
                f"{folder}: {native.META} names a model for adapters, but {native.CONFIG} has no lora; use another step"
            )
        base, own = open_adapted_model(adapts, folder, verify, overrides, files, within=within), weights
        weights = partial(_merged_weights, base, own, saved.config)
        digest = adapted_identity(adapts.identity, digest, lora)
    return OpenedCheckpoint(
        folder=folder,
        trained=saved.config,
        tokenizer_folder=tokenizer if f"{native.TOKENIZER}/{DESCRIPTION}" in manifest["files"] else None,
        step=meta["step"],
        identify=lambda: digest,
        weights=weights,
        imported=meta.get("imported", {}),
        changed_imports=saved.changed,
        base=base,
        own_weights=own,
    )


def _digest_of_weights(manifest: Mapping[str, Any]) -> str:
    return str(manifest["files"][native.WEIGHTS]["sha256"])


def _merged_weights(base: OpenedCheckpoint, own: Callable[[], Weights], config: Config) -> Weights:
    return AdaptedWeights(base.weights(), own(), config).weights()
