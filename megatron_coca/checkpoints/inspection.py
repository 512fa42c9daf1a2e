"""What a checkpoint is, and whether its files are as they were written."""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from megatron_coca.checkpoints import native
from megatron_coca.checkpoints.errors import CheckpointError
from megatron_coca.checkpoints.object_store import fetch, is_url
from megatron_coca.checkpoints.state import StateReader
from megatron_coca.checkpoints.weights import names_in, open_safetensors
from megatron_coca.config import ConfigError, load_config
from megatron_coca.tables import format_table

SHOWN_KEYS = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_kv_heads",
    "seq_length",
    "vocab_size",
    "pos_emb",
    "rope_scaling",
    "relative_positions",
    "logit_scaling",
    "seed",
)
"""The keys that a description names; all of them stand in config.yml."""


@dataclass(frozen=True)
class Description:
    """A checkpoint in figures.

    Attributes:
        folder: one step's folder.
        holds: "run" for all that a run needs to go on, "weights" for a model alone; None without a manifest.
        meta: what meta.json says: step, topology, versions, progress, what was read.
        keys: the configuration's keys that say what model it is.
        parameters: numbers of the model; None for a checkpoint without readable state, where it should have one.
        stored: elements of each kind in the state, all ranks together; a copy counts again.
        sizes: bytes of the files below each top entry of the folder.
        unlisted: files in the folder that its manifest does not know.
        verified: whether the contents of the files were read and compared with their checksums.
        damage: what is wrong with it; None where every file is as it was written, as far as it was looked at.
    """

    folder: Path
    holds: str | None
    meta: dict[str, Any]
    keys: dict[str, Any]
    parameters: int | None
    stored: dict[str, int]
    sizes: dict[str, int]
    unlisted: list[str]
    verified: bool
    damage: str | None

    def facts(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        return vars(self) | {"folder": str(self.folder)}


def checkpoints_in(path: str | Path) -> list[Path]:
    """The step folders that `path` means: itself, or all of a save folder, by step; also those without a manifest.

    Of a URL, its newest checkpoint, or the one that it names, is downloaded.

    Raises:
        CheckpointError: there are none.
    """
    if is_url(path):
        return [fetch(str(path))]
    path = Path(path)
    if native.is_step_folder(path):
        return [path]
    found = [native.step_folder(path, step) for step in native.begun_steps(path)]
    return found or [native.locate(path)]


def describe(folder: Path, verify: bool = True) -> Description:
    """Look at one step's folder; with `verify` every byte of it is read, without it names and sizes are compared."""
    holds, parameters = None, None
    meta: dict[str, Any] = {}
    keys: dict[str, Any] = {}
    stored: dict[str, int] = {}
    unlisted: list[str] = []
    sizes: dict[str, int] = {}
    damage = _damage(folder, verify)
    try:
        unlisted = native.unlisted(folder)
        holds = native.read_json(folder / native.MANIFEST).get("holds", native.EVERYTHING)
        meta = native.read_json(folder / native.META)
        flat = load_config([folder / native.CONFIG]).flat()
        keys = {name: flat[name] for name in SHOWN_KEYS}
        parameters, stored = (_weights if holds == native.WEIGHTS_ONLY else _state)(folder)
    except (CheckpointError, ConfigError) as error:
        damage = damage or str(error)
    except OSError as error:
        damage = damage or f"{folder}: cannot be read: {error}"
    with suppress(OSError):
        sizes = _sizes(folder)
    return Description(folder, holds, meta, keys, parameters, stored, sizes, unlisted, verify, damage)


def _damage(folder: Path, contents: bool) -> str | None:
    try:
        native.verify(folder, contents)
    except CheckpointError as error:
        return str(error)
    return None


def _state(folder: Path) -> tuple[int | None, dict[str, int]]:
    if not native.state_files(folder):
        return None, {}
    with StateReader(folder / native.STATE, native.state_files(folder)) as reader:
        reader.require_complete()
        return sum(prod(shape) for shape in reader.shapes.values()), reader.stored


def _weights(folder: Path) -> tuple[int | None, dict[str, int]]:
    path = folder / native.WEIGHTS
    entries = open_safetensors(dict.fromkeys(names_in(path), path), folder).entries
    return sum(prod(entry.shape) for entry in entries.values()), {}


def _sizes(folder: Path) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for name in native.files(folder):
        sizes[Path(name).parts[0]] += (folder / name).lstat().st_size
    return dict(sizes)


def _contents(found: Description) -> Iterator[str]:
    yield from (f"  imported, {name}: {value}" for name, value in found.meta.get("imported", {}).items())
    if found.parameters is not None:
        yield f"  parameters: {found.parameters:,}"
    if found.holds == native.WEIGHTS_ONLY:
        yield "  holds weights only: a run starts from them with finetune=true"
    elif found.parameters is None:
        yield "  no state of the optimizer"


def describe_text(found: Description) -> str:
    """A description for people to read."""
    meta, sound = found.meta, "intact" if found.verified else "not verified: files and sizes are as written"
    read = [(each["source"], each["samples"], each["tokens"], each["epochs"]) for each in meta.get("mixture", ())]
    lines = [
        f"{found.folder}: step {meta.get('step', '?')}, {found.damage or sound}",
        *(f"  not listed in {native.MANIFEST}: {name}" for name in found.unlisted),
        *(f"  {name}: {value}" for name, value in found.keys.items() if value is not None),
        *_contents(found),
        *(
            f"  {name}: {meta[name]}"
            for name in ("dtype", "batch", "topology", "zero_stage", "versions")
            if name in meta
        ),
        *(f"  {name}: {value}" for name, value in meta.get("progress", {}).items() if name != "guard" and value),
        "",
        format_table(("state", "elements"), sorted(found.stored.items())) if found.stored else "",
        format_table(("file", "bytes"), sorted(found.sizes.items())),
        format_table(("read", "samples", "tokens", "epochs"), read) if read else "",
    ]
    return "\n".join(lines)
