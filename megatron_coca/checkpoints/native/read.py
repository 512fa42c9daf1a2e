"""The folder layout of native checkpoints, and functions that find and verify them.

    <save>/.lock                        locked by the run that saves into the folder
    <save>/latest                       name of the latest step folder
    <save>/quarantine/                  checkpoints that were damaged, replaced or on an abandoned branch
    <save>/global_step100/manifest.json size and sha256 of all other files of the step, written last
                          meta.json     step, code and library versions, parallel layout
                          config.yml    the resolved configuration
                          model.safetensors  all weights, in the training dtype
                          tokenizer/    the tokenizer's files
                          state/        float32 weights and optimizer states, one file per rank (state.py)
                          rng/          random states, one file per rank

An imported checkpoint has weights only, without state/ and rng/, and its manifest records this. A checkpoint is written
under a hidden name, hashed, flushed to disk and renamed. `latest` is updated last.
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
EVERYTHING, WEIGHTS_ONLY = "run", "weights"
"""Values of `holds` in a manifest: all files that a resumed run needs, or weights only."""
REQUIRED = {
    EVERYTHING: (CONFIG, META, WEIGHTS, f"{STATE}/", f"{RNG}/rank_0.pt"),
    WEIGHTS_ONLY: (CONFIG, META, WEIGHTS),
}
"""Value of `holds` in a manifest -> the files that it must list. A folder stands for at least one file in it."""
_STEP = re.compile(r"global_step(0|[1-9][0-9]{0,17})")
_LONGEST_NAME = 255  # in bytes, the limit of common file systems
QUICK_SECONDS = 1.0  # a verification that takes longer shows its progress


def step_folder(save: Path, step: int) -> Path:
    """Return the folder in `save` for the checkpoint after `step` optimizer steps."""
    return save / f"global_step{step}"


def parse_step(name: str) -> int | None:
    """Return the step in the name of a step folder, or None for any other name. Leading zeros are not valid."""
    match = _STEP.fullmatch(name)
    return int(match.group(1)) if match else None


def step_of(folder: Path) -> int:
    """Return the step of a step folder, which must have a valid name."""
    return int(folder.name.removeprefix("global_step"))


def steps(save: Path) -> list[int]:
    """Return the steps of all complete checkpoints in `save`, ascending. Inaccessible checkpoints are left out."""
    complete = []
    for step in begun_steps(save):
        with suppress(UnreadableError):
            complete += [step] if _has_manifest(step_folder(save, step)) else []
    return complete


def begun_steps(save: Path) -> list[int]:
    """Return the steps of all step folders in `save`, complete or not, ascending. Raises UnreadableError."""
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
    """Return whether a folder has the name of a step folder or contains a manifest."""
    return folder.is_dir() and (parse_step(folder.resolve().name) is not None or _has_manifest(folder))


def read_latest(save: Path) -> str | None:
    """Return the folder name in the file `latest`; None if the file is missing or does not contain a plain name."""
    try:
        text = read_regular(save / LATEST, limit=2 * _LONGEST_NAME).decode(errors="replace").strip()
    except OSError:
        return None
    plain = text not in ("", ".", "..") and "/" not in text and "\0" not in text
    return text if plain and len(text.encode()) <= _LONGEST_NAME else None


def locate(path: str | Path, step: int | None = None) -> Path:
    """Return the step folder at `path`. In a save folder, this is the folder of `step`, by default of the latest step.

    Raises CheckpointError if there is no such checkpoint.
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
                f"{path}: no checkpoint of step {step}; available steps: {available or 'none'}, choose another"
            )
        return step_folder(path, step)
    if not available:
        if (path / "config.json").exists():
            raise CheckpointError(f"{path}: is a Hugging Face folder; run `megatron-coca import` first")
        raise CheckpointError(
            f"{path}: no complete checkpoint (neither global_step<N>/{MANIFEST} nor a Hugging Face config.json); "
            "correct the path"
        )
    latest = read_latest(path)
    if latest is not None and parse_step(latest) is not None and _has_manifest(path / latest):
        return path / latest
    return step_folder(path, available[-1])


def verify(folder: Path, contents: bool = True, links: bool = False) -> dict[str, Any]:
    """Compare every file of a checkpoint with the manifest and return the manifest.

    Without `contents`, compare only names and sizes. `links` allows symbolic links, which download caches use.

    Raises:
        UnreadableError: a file cannot be read; the checkpoint may be valid.
        CheckpointError: a file is missing, truncated, changed or a symbolic link, the folder is named after another
            step, or the manifest is damaged or has an unknown format.
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
            f"{folder}: named after another step ({META} has {step}); rename it to {step_folder(Path(), step)}"
        )
    return manifest


def expected_digests(folder: Path, manifest: Mapping[str, Any]) -> dict[Path, str]:
    """Map each file in a checkpoint's manifest to its sha256, with the largest file first."""
    by_size = sorted(manifest["files"].items(), key=lambda item: (-item[1]["size"], item[0]))
    return {folder / name: str(entry.get("sha256")) for name, entry in by_size}


def _check_file(folder: Path, name: str, size: Any, links: bool) -> None:
    path = folder / name
    try:
        within = (path, *path.parents[: len(path.parts) - len(folder.parts) - 1])
        linked = [parent for parent in within if parent.is_symlink()]
        if linked and not links:
            raise CheckpointError(
                f"{linked[0]}: a symbolic link, which no run writes; replace it with a copy of its target"
            )
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{path}: not found; copy the checkpoint again, or use another step") from None
    except OSError as error:
        raise UnreadableError.of(path, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise UnreadableError(
            f"{path}: cannot be read, because it is not a regular file; replace it with a copy (nothing was changed)"
        )
    if status.st_size != size:
        raise CheckpointError(
            f"{path}: has {status.st_size} bytes, but was written with {size}; copy the file again, or use another "
            "step of the run (`megatron-coca inspect checkpoint` verifies all steps)"
        )


def _read_manifest(folder: Path) -> dict[str, Any]:
    return checked_manifest(read_json(folder / MANIFEST), folder / MANIFEST)


def checked_manifest(manifest: dict[str, Any], source: str | Path) -> dict[str, Any]:
    """Validate the format and the file list of `manifest`, and return it.

    Raises CheckpointError, which names `source`, for an unknown format, missing entries, or paths outside the folder.
    """
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{source}: checkpoint format {manifest.get('format')!r} is not supported, only format {FORMAT}; use the "
            "version of megatron_coca that wrote the checkpoint"
        )
    listed = manifest.get("files")
    if not isinstance(listed, dict) or not all(isinstance(entry, dict) for entry in listed.values()):
        raise CheckpointError(f"{source}: damaged (lists no files); copy it again, or use another step")
    outside = [name for name in listed if not _is_inside(name)]
    if outside:
        raise CheckpointError(
            f"{source}: damaged ({outside[0][:_LONGEST_NAME]!r} is not a path inside the checkpoint); copy it again, "
            "or use another step"
        )
    holds = manifest.get("holds")
    if holds not in tuple(REQUIRED):
        raise CheckpointError(
            f"{source}: holds: {holds!r} is not one of {', '.join(REQUIRED)}; copy it again, or use another step"
        )
    _require(REQUIRED[holds], listed, source)
    return manifest


def _is_inside(name: str) -> bool:
    """Return whether a path in a manifest is a plain relative path without `..`."""
    path = PurePosixPath(name)
    plain = not path.is_absolute() and ".." not in path.parts and str(path) == name != "." and "\0" not in name
    try:
        return plain and all(len(part.encode()) <= _LONGEST_NAME for part in path.parts)
    except UnicodeEncodeError:
        return False


def _require(names: Iterable[str], listed: Collection[str], source: str | Path) -> None:
    """Raise CheckpointError if one of `names` is not in `listed`. A name with a final slash stands for at
    least one file below it.
    """
    for name in names:
        if name not in listed and not (name.endswith("/") and any(file.startswith(name) for file in listed)):
            raise CheckpointError(f"{source}: damaged (does not list {name}); copy it again, or use another step")


def require_run_state(folder: Path) -> None:
    """Raise CheckpointError if a checkpoint has weights only, according to its manifest."""
    if read_json(folder / MANIFEST).get("holds") == WEIGHTS_ONLY:
        raise CheckpointError(
            f"{folder}: has weights only, without optimizer state; set finetune=true to start a run from the weights"
        )


def state_files(folder: Path) -> list[str]:
    """Return the optimizer state files that the manifest lists, relative to `state/`."""
    prefix = f"{STATE}/"
    return [name.removeprefix(prefix) for name in _read_manifest(folder)["files"] if name.startswith(prefix)]


def unlisted(folder: Path) -> list[str]:
    """Return the files in a checkpoint's folder that its manifest does not list. These files are never read."""
    listed = read_json(folder / MANIFEST).get("files") or {}
    return [name for name in files(folder) if name != MANIFEST and name not in listed]
