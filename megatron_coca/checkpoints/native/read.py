"""The folder layout of our checkpoints; find and verify them.

    <save>/.lock                        held by the run that trains into the folder
    <save>/latest                       name of the latest step's folder
    <save>/quarantine/                  checkpoints that were damaged, of an abandoned branch, or replaced
    <save>/global_step100/manifest.json size and sha256 of every file below, written last
                          meta.json     step, code and library versions, parallel layout
                          config.yml    the resolved configuration
                          model.safetensors  all weights, in the training dtype
                          tokenizer/    the tokenizer's files
                          state/        float32 weights and optimizer states, a file per rank (state.py)
                          rng/          one random state per rank

An imported checkpoint has weights only, without state/ and rng/; its manifest records this. A checkpoint is written
under a hidden name, hashed, flushed to disk and then renamed. `latest` changes last.
"""

import os
import re
import stat
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

from megatron_coca.checkpoints.files import CheckpointError, Comparison, UnreadableError, files, read_json
from megatron_coca.checkpoints.native.meta import META, read_meta
from megatron_coca.support.console import Progress
from megatron_coca.support.regular_files import read_regular

CONFIG, MANIFEST, WEIGHTS = "config.yml", "manifest.json", "model.safetensors"
TOKENIZER, STATE, RNG = "tokenizer", "state", "rng"
LATEST, LOCK, QUARANTINE = "latest", ".lock", "quarantine"
FORMAT = 2
EVERYTHING, WEIGHTS_ONLY = "run", "weights"  # everything that resuming needs, or weights only
REQUIRED = {
    EVERYTHING: (CONFIG, META, WEIGHTS, f"{STATE}/", f"{RNG}/rank_0.pt"),
    WEIGHTS_ONLY: (CONFIG, META, WEIGHTS),
}
"""Files that a manifest must list, by content of the checkpoint. A folder stands for at least one file in it."""
_STEP = re.compile(r"global_step(0|[1-9][0-9]{0,17})")
_LONGEST_NAME = 255  # limit of file systems, in bytes
QUICK_SECONDS = 1.0  # of a verification that shows no progress


def step_folder(save: Path, step: int) -> Path:
    """Return the folder of the checkpoint after `step` optimizer steps, in `save`."""
    return save / f"global_step{step}"


def parse_step(name: str) -> int | None:
    """Return the step in a folder name; None for other names. A run writes no leading zeros."""
    match = _STEP.fullmatch(name)
    return int(match.group(1)) if match else None


def step_of(folder: Path) -> int:
    """Return the step of a checkpoint folder."""
    return int(folder.name.removeprefix("global_step"))


def steps(save: Path) -> list[int]:
    """Return the ascending steps of all complete checkpoints in `save`, without those with an inaccessible manifest."""
    complete = []
    for step in begun_steps(save):
        with suppress(UnreadableError):
            complete += [step] if _has_manifest(step_folder(save, step)) else []
    return complete


def begun_steps(save: Path) -> list[int]:
    """Return the ascending steps of all checkpoint folders in `save`, complete or not. Raises UnreadableError."""
    try:
        with os.scandir(save) as entries:
            named = [(parse_step(entry.name), entry) for entry in entries]
            return sorted(step for step, entry in named if step is not None and _is_folder(entry))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UnreadableError.of(save, error) from error


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # reading the checkpoint reports the reason
        return True


def _has_manifest(folder: Path) -> bool:
    try:
        return stat.S_ISREG((folder / MANIFEST).stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise UnreadableError.of(folder / MANIFEST, error) from error


def is_step_folder(folder: Path) -> bool:
    """Return whether a folder has the name or the manifest of a checkpoint."""
    return folder.is_dir() and (parse_step(folder.resolve().name) is not None or _has_manifest(folder))


def read_latest(save: Path) -> str | None:
    """Return the folder name in `latest`; None if the file is missing or has no plain name."""
    try:
        text = read_regular(save / LATEST, limit=2 * _LONGEST_NAME).decode(errors="replace").strip()
    except OSError:
        return None
    plain = text not in ("", ".", "..") and "/" not in text and "\0" not in text
    return text if plain and len(text.encode()) <= _LONGEST_NAME else None


def locate(path: str | Path, step: int | None = None) -> Path:
    """Return the checkpoint folder for `path`: a step's folder, or in a save folder the latest one or that of `step`.

    Raises CheckpointError if there is none.
    """
    path = Path(path)
    if _has_manifest(path):
        return path
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such checkpoint folder; correct the path")
    available = steps(path)
    if step is not None:
        if step not in available and not _has_manifest(step_folder(path, step)):
            raise CheckpointError(
                f"{path}: has no checkpoint of step {step}; there are {available or 'none'}, choose another step"
            )
        return step_folder(path, step)
    if not available:
        if (path / "config.json").exists():
            raise CheckpointError(f"{path}: is a folder of Hugging Face; run `megatron-coca import` first")
        raise CheckpointError(
            f"{path}: holds no complete checkpoint (no global_step<N>/{MANIFEST} and no config.json of Hugging Face); "
            "correct the path"
        )
    latest = read_latest(path)
    if latest is not None and parse_step(latest) is not None and _has_manifest(path / latest):
        return path / latest
    return step_folder(path, available[-1])


def verify(folder: Path, contents: bool = True, links: bool = False) -> dict[str, Any]:
    """Compare every file of a checkpoint with its manifest and return the manifest.

    Without `contents` only names and sizes are compared. `links` allows symbolic links, which download caches use.

    Raises:
        UnreadableError: a file cannot be read; the checkpoint may be valid.
        CheckpointError: a file is missing, truncated, changed or a symbolic link, the folder has the name of another
            step, or the manifest is damaged or of an unknown format.
    """
    manifest = _read_manifest(folder)
    for name, entry in manifest["files"].items():
        _check_file(folder, name, entry.get("size"), links)
    if contents:
        with Comparison(expected_digests(folder, manifest), len(os.sched_getaffinity(0))) as comparison:
            if not comparison.wait(QUICK_SECONDS):
                size = sum(entry["size"] for entry in manifest["files"].values())
                with Progress(f"verifying {folder}", size, "B") as progress:
                    while not comparison.wait(QUICK_SECONDS):
                        progress.advance(comparison.bytes_read - progress.done)
            if comparison.failure is not None:
                raise comparison.failure
    meta = read_meta(folder)
    if manifest["holds"] == EVERYTHING:
        ranks = range(prod((meta.get("topology") or {}).values()))
        _require((f"{RNG}/rank_{rank}.pt" for rank in ranks), manifest["files"], folder / MANIFEST)
    step, named = meta["step"], parse_step(folder.absolute().name)
    if named not in (None, step):
        raise CheckpointError(
            f"{folder}: has the name of another step ({META} has {step}); rename it to {step_folder(Path(), step)}"
        )
    return manifest


def expected_digests(folder: Path, manifest: Mapping[str, Any]) -> dict[Path, str]:
    """Return the sha256 of each file in a checkpoint's manifest, the largest file first."""
    by_size = sorted(manifest["files"].items(), key=lambda item: (-item[1]["size"], item[0]))
    return {folder / name: str(entry.get("sha256")) for name, entry in by_size}


def _check_file(folder: Path, name: str, size: Any, links: bool) -> None:
    path = folder / name
    try:
        within = (path, *path.parents[: len(path.parts) - len(folder.parts) - 1])
        linked = [parent for parent in within if parent.is_symlink()]
        if linked and not links:
            raise CheckpointError(
                f"{linked[0]}: is a symbolic link, which a run never writes; replace it with a copy of its target"
            )
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{path}: is missing from the checkpoint; copy it again, or use another step") from None
    except OSError as error:
        raise UnreadableError.of(path, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise UnreadableError(
            f"{path}: cannot be read, it is not a regular file; replace it by a copy (nothing was changed)"
        )
    if status.st_size != size:
        raise CheckpointError(
            f"{path}: has {status.st_size} bytes, the checkpoint was written with {size}; copy the file again, or use "
            "another step of the run (`megatron-coca inspect checkpoint` verifies all)"
        )


def _read_manifest(folder: Path) -> dict[str, Any]:
    return checked_manifest(read_json(folder / MANIFEST), folder / MANIFEST)


def checked_manifest(manifest: dict[str, Any], source: str | Path) -> dict[str, Any]:
    """Return `manifest` after checking its format and file list.

    Raises CheckpointError, which names `source`, for an unknown format, missing entries, or names outside the folder.
    """
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{source}: checkpoint format {manifest.get('format')!r} is not supported, only {FORMAT}; use the version "
            "of megatron_coca that wrote it"
        )
    listed = manifest.get("files")
    if not isinstance(listed, dict) or not all(isinstance(entry, dict) for entry in listed.values()):
        raise CheckpointError(f"{source}: is damaged (it lists no files); copy it again, or use another step")
    outside = [name for name in listed if not _is_inside(name)]
    if outside:
        raise CheckpointError(
            f"{source}: is damaged ({outside[0][:_LONGEST_NAME]!r} is not a file inside the checkpoint); copy it "
            "again, or use another step"
        )
    holds = manifest.get("holds")
    if holds not in tuple(REQUIRED):
        raise CheckpointError(f"{source}: holds: {holds!r} is not supported; it must be one of {', '.join(REQUIRED)}")
    _require(REQUIRED[holds], listed, source)
    return manifest


def _is_inside(name: str) -> bool:
    """Return whether a manifest's file name is a plain relative path without `..`."""
    path = PurePosixPath(name)
    plain = not path.is_absolute() and ".." not in path.parts and str(path) == name != "." and "\0" not in name
    try:
        return plain and all(len(part.encode()) <= _LONGEST_NAME for part in path.parts)
    except UnicodeEncodeError:
        return False


def _require(names: Iterable[str], listed: Collection[str], source: str | Path) -> None:
    """Raise CheckpointError if one of `names` is not in `listed`. A name with a final slash needs any file in it."""
    for name in names:
        if name not in listed and not (name.endswith("/") and any(file.startswith(name) for file in listed)):
            raise CheckpointError(f"{source}: is damaged (it does not list {name}); copy it again, or use another step")


def require_run_state(folder: Path) -> None:
    """Raise CheckpointError if the manifest of a checkpoint says that it has weights only."""
    if read_json(folder / MANIFEST).get("holds") == WEIGHTS_ONLY:
        raise CheckpointError(
            f"{folder}: has weights only and no optimizer state; set finetune=true to start a run from them"
        )


def state_files(folder: Path) -> list[str]:
    """Return the names of the files of optimizer state in the manifest, relative to `state/`."""
    prefix = f"{STATE}/"
    return [name.removeprefix(prefix) for name in _read_manifest(folder)["files"] if name.startswith(prefix)]


def unlisted(folder: Path) -> list[str]:
    """Return the files in a checkpoint's folder that its manifest does not list. Nothing reads them."""
    listed = read_json(folder / MANIFEST).get("files") or {}
    return [name for name in files(folder) if name != MANIFEST and name not in listed]
