"""Describe a checkpoint and verify its files."""

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from megatron_coca.checkpoints import native
from megatron_coca.checkpoints.files import CheckpointError
from megatron_coca.checkpoints.huggingface.read import gguf_formats, is_huggingface_folder
from megatron_coca.checkpoints.load import open_checkpoint
from megatron_coca.checkpoints.native.object_store import fetch
from megatron_coca.checkpoints.opened import check_fit
from megatron_coca.checkpoints.weights import open_safetensors_file
from megatron_coca.config import ConfigError, load_saved_config, named_imports
from megatron_coca.config.source import Overrides, given_values
from megatron_coca.support.markdown_tables import format_table
from megatron_coca.support.regular_files import open_regular
from megatron_coca.support.remote_files import is_url

SHOWN_KEYS = (
    *("num_layers", "hidden_size", "num_attention_heads", "num_kv_heads", "seq_length", "vocab_size", "pos_emb"),
    *("pos_emb_options", "rotary_pct", "rotary_frequencies", "rope_scaling", "relative_positions", "logit_scaling"),
    *("qk_norm", "attention_output_gate", "seed"),
)
"""Configuration keys that a description shows."""


@dataclass
class Description:
    """A summary of one checkpoint.

    Attributes:
        folder: folder of the checkpoint's step.
        holds: "run" if a run can resume from the checkpoint, "weights" if it has weights only, None without a manifest.
        meta: content of meta.json: step, topology, versions, progress, samples read.
        keys: values of `SHOWN_KEYS` in the configuration.
        imports: method files that the configuration imports. They are not run. If there are any, `keys` are not
            validated.
        parameters: number of parameters; None if the weights are missing or unreadable.
        sizes: size in bytes of each top-level entry of the folder.
        unlisted: files in the folder that its manifest does not list.
        verified: whether checksums were compared.
        damage: the first error that was found, or None.
        layout: the name of a layout that is not ours, or None.
        stored: number of tensors in each format on disk, only for a layout that is not ours.
        tokenizer: a description of the tokenizer, or why there is none, only for a layout that is not ours.
    """

    folder: Path
    holds: str | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)
    imports: list[str] = field(default_factory=list)
    parameters: int | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    unlisted: list[str] = field(default_factory=list)
    verified: bool = True
    damage: str | None = None
    layout: str | None = None
    stored: dict[str, int] = field(default_factory=dict)
    tokenizer: str | None = None

    def facts(self) -> dict[str, Any]:
        """Return all attributes, for JSON output."""
        return vars(self) | {"folder": str(self.folder)}


def checkpoints_in(path: str | Path) -> list[Path]:
    """Return the step folders at `path`: the path itself, or all non-empty step folders in a save folder.

    Folders without a manifest are included. If `path` is a URL, its checkpoint is downloaded. Raises CheckpointError if
    there are no step folders.
    """
    if is_url(path):
        return [fetch(str(path))]
    path = Path(path)
    if native.is_step_folder(path):
        return [path]
    folders = [native.step_folder(path, step) for step in native.begun_steps(path)]
    return [folder for folder in folders if _has_files(folder)] or [native.locate(path)]


def _has_files(folder: Path) -> bool:
    """Return whether a folder contains files. Some file systems leave the empty folders of a pruned step behind."""
    try:
        return bool(native.files(folder))
    except OSError:  # `describe` reports the reason
        return True


def describe(folder: Path, verify: bool = True) -> Description:
    """Describe one step folder. With `verify`, compare all checksums; otherwise, compare only file names and sizes."""
    found = Description(folder, verified=verify)
    try:
        native.verify(folder, verify)
    except CheckpointError as error:
        found.damage = str(error)
    try:
        found.unlisted = native.unlisted(folder)
        found.holds = native.read_json(folder / native.MANIFEST).get("holds")
        found.meta = native.read_meta(folder)
        open_regular(folder / native.CONFIG).close()
        saved = given_values((), [folder / native.CONFIG])
        found.imports = named_imports(saved)
        flat = saved if found.imports else load_saved_config(folder / native.CONFIG).config.flat()
        found.keys = {name: flat.get(name) for name in SHOWN_KEYS}
        entries = open_safetensors_file(folder / native.WEIGHTS, folder).entries
        found.parameters = sum(prod(entry.shape) for entry in entries.values())
    except (CheckpointError, ConfigError) as error:
        found.damage = found.damage or str(error)
    except OSError as error:
        found.damage = found.damage or f"{folder}: cannot be read ({error}); check the disk and the permissions"
    with suppress(OSError):
        sizes: Counter[str] = Counter()
        for name in native.files(folder):
            sizes[Path(name).parts[0]] += (folder / name).lstat().st_size
        found.sizes = dict(sizes)
    return found


def describe_other(folder: Path, layout: str, overrides: Overrides = ()) -> Description:
    """Describe a checkpoint of another layout. `overrides` are those of `open_checkpoint`.

    Such a checkpoint has no checksums. Instead, the names and shapes of its weights are compared with its
    configuration. Raises CheckpointError or ConfigError if its configuration cannot be read.
    """
    opened = open_checkpoint(folder, overrides=overrides)
    found = Description(folder, layout=layout, verified=False)
    flat = opened.trained.flat()
    found.keys = {name: flat.get(name) for name in SHOWN_KEYS if name != "seed"}
    found.meta = {} if opened.step is None else {"step": opened.step}
    try:
        weights = opened.weights()
        found.parameters = sum(prod(entry.shape) for entry in weights.entries.values())
        formats = gguf_formats(folder) if is_huggingface_folder(folder) else None
        found.stored = formats or Counter(str(entry.dtype).removeprefix("torch.") for entry in weights.entries.values())
        check_fit(opened.trained, weights)
    except CheckpointError as error:
        found.damage = str(error)
    tokenizer, note = opened.tokenizer()
    if tokenizer is not None:
        note = f"{tokenizer.tokenizer_type} with {tokenizer.vocab_size:,} ids" + (f"; {note}" if note else "")
    found.tokenizer = note
    files = [folder] if folder.is_file() else [path for path in folder.iterdir() if path.is_file()]
    found.sizes = {path.name: path.stat().st_size for path in files}
    return found


def describe_text(found: Description) -> str:
    """Format a description as text."""
    meta = found.meta
    status = found.damage or ("valid" if found.verified else "not verified (only file names and sizes were compared)")
    heading = f"step {meta.get('step', '?')}, {status}"
    if found.layout is not None:
        step = f", step {meta['step']}" if "step" in meta else ""
        heading = f"{found.layout}{step}, {found.damage or 'weights fit the configuration'}"
    lines = [f"{found.folder}: {heading}"]
    lines += [f"  not listed in {native.MANIFEST}: {name}" for name in found.unlisted]
    lines += [f"  {name}: {value}" for name, value in found.keys.items() if value is not None]
    lines += [f"  imports: {name} (Python file, was not run)" for name in found.imports]
    lines += [f"  imported, {name}: {value}" for name, value in (meta.get("imported") or {}).items()]
    if found.parameters is not None:
        lines.append(f"  parameters: {found.parameters:,}")
    if found.stored:
        lines.append(f"  stored as: {', '.join(f'{name} ({count})' for name, count in found.stored.items())}")
    if found.tokenizer is not None:
        lines.append(f"  tokenizer: {found.tokenizer}")
    if found.holds == native.WEIGHTS_ONLY:
        lines.append("  weights only: set finetune=true to start a run from them")
    shown = ("dtype", "batch", "topology", "zero_stage", "versions")
    lines += [f"  {name}: {meta[name]}" for name in shown if name in meta]
    lines += [f"  {name}: {value}" for name, value in (meta.get("progress") or {}).items() if name != "guard" and value]
    columns = ("source", "samples", "tokens", "epochs")
    read = [tuple(share[column] for column in columns) for share in meta.get("mixture") or ()]
    lines += ["", format_table(("file", "bytes"), sorted(found.sizes.items()))]
    lines += [format_table(("read", *columns[1:]), read) if read else ""]
    return "\n".join(lines)
