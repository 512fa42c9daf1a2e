"""Create, commit, move and remove the step folders of native checkpoints. `read.py` describes the layout."""

import errno
import logging
import os
import shutil
import subprocess
from collections.abc import Container, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain, count
from pathlib import Path
from typing import Any

from megatron_coca.checkpoints.files import describe, files, write_json
from megatron_coca.checkpoints.native.read import (
    EVERYTHING,
    FORMAT,
    LATEST,
    MANIFEST,
    QUARANTINE,
    read_latest,
    step_folder,
    steps,
)
from megatron_coca.support.atomic_write import flush, remove, write_file
from megatron_coca.work.folders import partial_folder as partial_folder_of

logger = logging.getLogger(__name__)


def code_versions() -> dict[str, str]:
    """Return the versions of libraries that affect results, and this code's commit if it runs from a git checkout."""
    versions = {name: version(name) for name in ("torch", "deepspeed") if find_spec(name) is not None}
    source = Path(__file__).resolve().parents[3]
    git = shutil.which("git")
    if git and (source / ".git").exists():
        command = [git, "-C", str(source), "rev-parse", "HEAD"]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode == 0:
            versions["commit"] = answer.stdout.strip()
    return versions


def partial_folder(save: Path, step: int) -> Path:
    """Return the hidden folder in which the checkpoint of `step` is written."""
    return partial_folder_of(step_folder(save, step))


def begin(save: Path, step: int) -> Path:
    """Create the empty hidden folder for a checkpoint, after removing the remains of interrupted saves."""
    sweep(save)
    partial = partial_folder(save, step)
    partial.mkdir(parents=True)
    return partial


def sweep(save: Path) -> None:
    """Remove the partial files and folders of interrupted saves and removals."""
    for leftover in (*save.glob(".global_step*.partial"), *save.glob(f".{LATEST}*.partial")):
        remove(leftover)


def commit(
    save: Path,
    step: int,
    described: Mapping[str, Mapping[str, Any]] | None = None,
    holds: str = EVERYTHING,
) -> Path:
    """Hash, flush and rename the filled hidden folder of `step`, then update `latest`. Return the final folder.

    An existing folder of this step is moved to `quarantine/`. If `latest` cannot be updated, only a warning is logged,
    because the checkpoint is complete.

    Args:
        described: manifest entries (see `describe`) of files that are already flushed; these are not read again.
        holds: content of the checkpoint, a key of `REQUIRED`.
    """
    partial, final = partial_folder(save, step), step_folder(save, step)
    listed = dict(described or {})
    others = [name for name in files(partial) if name not in listed]
    listed |= {name: describe(partial / name) for name in others}
    write_json(partial / MANIFEST, {"format": FORMAT, "holds": holds, "files": listed})
    folders = (path for path in partial.rglob("*") if path.is_dir())
    for path in (*(partial / name for name in (*others, MANIFEST)), partial, *folders):
        flush(path)
    if os.path.lexists(final):
        logger.warning("%s: already exists; the existing folder was moved to %s", final, set_aside(final))
    partial.rename(final)
    flush(save)
    try:
        write_file(save / LATEST, final.name)
    except OSError as error:
        logger.warning("%s: complete, but the file `%s` could not be updated: %s", final, LATEST, error)
    return final


def abandon(save: Path, step: int) -> None:
    """Remove the hidden folder of a checkpoint after a failed write."""
    shutil.rmtree(partial_folder(save, step), ignore_errors=True)


def prune(save: Path, keep_last: int | None, keep_every: int | None = None, keep: Container[int] = ()) -> None:
    """Remove superseded checkpoints, except those of steps in `keep` and the checkpoint that `latest` names."""
    for step in superseded(steps(save), keep_last, keep_every):
        folder, to_delete = step_folder(save, step), partial_folder(save, step)
        if step not in keep and folder.name != read_latest(save):
            folder.rename(to_delete)
            remove(to_delete)


def superseded(steps: Sequence[int], keep_last: int | None, keep_every: int | None) -> list[int]:
    """Return the `steps` that are neither among the last `keep_last` nor multiples of `keep_every`.

    `steps` must be ascending. The result is empty if `keep_last` is None.
    """
    older = steps[:-keep_last] if keep_last else []
    return [step for step in older if not (keep_every and step % keep_every == 0)]


def set_aside(folder: Path) -> Path:
    """Move a checkpoint to `quarantine/` under an unused name. Return the new path.

    A folder that is not writable cannot be moved, so it is only renamed within `save`. The same happens if `quarantine`
    is a symbolic link, which may lead out of `save`.
    """
    quarantine = folder.parent / QUARANTINE
    try:
        if quarantine.is_symlink():
            raise PermissionError(errno.EPERM, "is a link", str(quarantine))
        quarantine.mkdir(exist_ok=True)
        target = folder.rename(_unused_name(quarantine / folder.name))
    except PermissionError:
        target = folder.rename(_unused_name(folder.with_name(f"{folder.name}.{QUARANTINE}")))
    flush(folder.parent)
    return target


def _unused_name(path: Path) -> Path:
    numbered = (path.with_name(f"{path.name}.{number}") for number in count(1))
    return next(name for name in chain([path], numbered) if not os.path.lexists(name))
