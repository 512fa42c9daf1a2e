"""Checkpoints on object stores through fsspec: S3, Google Cloud Storage and every other file system that it supports.

    <url>/latest                        name of the newest step's folder
    <url>/global_step100/manifest.json  uploaded last and removed first: a checkpoint without it does not exist
                         ...            the other files of the checkpoint (native.py)
    <url>/quarantine/                   checkpoints of an abandoned branch

An object store cannot rename a folder: checkpoints are written to a local folder and uploaded, and downloaded before
they are read.
"""

import logging
import shutil
from pathlib import Path
from typing import Any

from megatron_coca import remote_files
from megatron_coca.atomic_write import exclusive_lock
from megatron_coca.checkpoints import native
from megatron_coca.checkpoints.files import CheckpointError, ServiceError, describe, parse_json, read_json
from megatron_coca.config import CheckpointConfig
from megatron_coca.remote_files import RemoteFiles, is_url

logger = logging.getLogger(__name__)

DEFAULT_CACHE: str = CheckpointConfig.model_fields["checkpoint_cache"].default


def local_folder(url: str, cache: str | Path) -> Path:
    """The folder below `cache` for checkpoints of `url`: s3://a/b -> CACHE/s3/a/b."""
    return remote_files.local_folder(url, cache, CheckpointError)


def read_folder(url: str, cache: str | Path) -> Path:
    """The folder below `cache` for checkpoints of `url` that are only read."""
    return local_folder(url, Path(cache, "read"))


def save_folder(keys: CheckpointConfig) -> Path | None:
    """The local folder of a run's checkpoints, also where `save` is a URL; None if none are written."""
    if keys.save is None:
        return None
    return local_folder(keys.save, keys.checkpoint_cache) if is_url(keys.save) else Path(keys.save)


def split_step(url: str) -> tuple[str, int | None]:
    """The URL of the run's folder, and the step if `url` names one checkpoint."""
    run, _, name = url.rstrip("/").rpartition("/")
    step = native.parse_step(name)
    return (url, None) if step is None else (run, step)


def fetch(
    url: str, step: int | None = None, cache: str | Path = DEFAULT_CACHE, remote: "RemoteFolder | None" = None
) -> Path:
    """Download a checkpoint to read it, unless it was downloaded before and has not changed.

    Args:
        url: of one step's folder, or of a run's folder: its newest checkpoint or that of `step`.
        cache: local folder; the checkpoint is stored below `cache`/read.
        remote: the run's folder, if it is opened already.

    Returns the step's local folder. Raises CheckpointError.
    """
    run, named = split_step(url)
    save, remote = read_folder(run, cache), remote or RemoteFolder(run)
    wanted = step if named is None else named
    try:
        save.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(save / native.LOCK, CheckpointError, busy=None):
            available = remote.steps()
            if not available or wanted not in (None, *available):
                which = "" if wanted is None else f" of step {wanted}"
                raise CheckpointError(f"{url}: holds no complete checkpoint{which}; there are {available or 'none'}")
            newest = available[-1] if wanted is None else wanted
            folder = native.step_folder(save, newest)
            manifest = folder / native.MANIFEST
            if manifest.is_file() and read_json(manifest) == remote.read_json(newest, native.MANIFEST):
                return folder
            return remote.download_newest(save) if wanted is None else remote.download(wanted, save)
    except OSError as error:
        raise CheckpointError(
            f"{save}: {url} cannot be downloaded to it ({error.strerror or error}); free some space, check the "
            "permissions, or name another folder with checkpoint_cache"
        ) from error


class RemoteFolder(RemoteFiles):
    """The `save` folder of one run on an object store. Raises CheckpointError, of which ServiceError is one."""

    refused, away = CheckpointError, ServiceError

    def steps(self) -> list[int]:
        """Ascending steps of all complete checkpoints."""
        return [step for step, names in self._listing().items() if native.MANIFEST in names]

    def read_json(self, step: int, name: str) -> dict[str, Any]:
        """A JSON file of a checkpoint."""
        name = f"{_folder(step)}/{name}"
        return parse_json(self.read(name), f"{self.url}/{name}")

    def require_writable(self) -> None:
        """Write, read and remove a small object. Raises CheckpointError."""
        probe = f"{self._root}/.probe"
        self._attempt("cannot be written", lambda: self._fs.pipe_file(probe, b"x"))
        self._attempt("cannot be read", lambda: self._fs.cat_file(probe))
        self._attempt("objects cannot be removed", lambda: self._fs.rm_file(probe))

    def upload(self, folder: Path) -> None:
        """Upload a complete local checkpoint; one of the same step is removed first."""
        step = native.step_of(folder)
        self.remove(step)
        listed = read_json(folder / native.MANIFEST)["files"]
        self.each(listed, lambda name: self.put(folder / name, f"{_folder(step)}/{name}"))
        self.put(folder / native.MANIFEST, f"{_folder(step)}/{native.MANIFEST}")
        latest = f"{self._root}/{native.LATEST}"
        self._attempt("latest cannot be written", lambda: self._fs.pipe_file(latest, _folder(step).encode()))

    def download(self, step: int, save: Path, resumable: bool = False) -> Path:
        """Download the checkpoint of `step` into the local folder `save` atomically. Returns the step's folder.

        Raises CheckpointError if a file is missing or differs from the manifest, if the manifest is invalid or that of
        another step, or with `resumable`, if a run cannot be resumed from it.
        """
        url = f"{self.url}/{_folder(step)}"
        manifest = native.checked_manifest(self.read_json(step, native.MANIFEST), f"{url}/{native.MANIFEST}")
        if resumable:
            native.refuse_weights_only(url, manifest)
        meta = native.checked_meta(self.read_json(step, native.META), f"{url}/{native.META}")
        if (saved := meta["step"]) != step:
            raise CheckpointError(f"{url}: is named after another step ({native.META} says {saved})")
        listed = manifest["files"]
        partial = native.begin(save, step)
        try:
            self.each(listed, lambda name: self.get(f"{_folder(step)}/{name}", partial / name))
            for name, entry in listed.items():
                if describe(partial / name) != entry:
                    raise CheckpointError(f"{url}/{name}: is damaged (size or sha256 differs from its manifest)")
            folder = native.commit(save, step, listed, manifest["holds"], manifest["format"])
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        logger.info("downloaded %s to %s", url, folder)
        return folder

    def download_newest(self, save: Path, resumable: bool = False, above: int = -1) -> Path:
        """Download the newest valid checkpoint of a step > `above`, see `download`. Raises CheckpointError if there is
        none.
        """
        steps = [step for step in self.steps() if step > above]
        for step in reversed(steps):
            try:
                return self.download(step, save, resumable)
            except ServiceError:
                raise
            except CheckpointError as error:
                if step == steps[0]:
                    raise
                logger.warning("%s; falling back to the previous checkpoint", error)
        raise CheckpointError(f"{self.url}: holds no complete checkpoint (no global_step<N>/{native.MANIFEST})")

    def remove(self, step: int) -> None:
        """Remove a checkpoint, complete or not, its manifest first."""
        names = self._listing().get(step, [])
        for manifest in (True, False):
            group = [f"{_folder(step)}/{name}" for name in names if (name == native.MANIFEST) == manifest]
            self.each(group, self.remove_object)

    def set_aside(self, step: int) -> str:
        """Move a checkpoint to quarantine/ under an unused name; returns its new URL."""
        taken = {name.split("/")[0] for name in self.names(native.QUARANTINE)}
        folder, number = _folder(step), 0
        while folder in taken:
            number += 1
            folder = f"{_folder(step)}.{number}"
        source, target = f"{self._root}/{_folder(step)}", f"{self._root}/{native.QUARANTINE}/{folder}"

        def copy(name: str) -> None:
            self._attempt(
                f"{source}/{name} cannot be copied", lambda: self._fs.cp_file(f"{source}/{name}", f"{target}/{name}")
            )

        self.each(self._listing().get(step, []), copy)
        self.remove(step)
        return f"{self.url}/{native.QUARANTINE}/{folder}"

    def prune(self, keep_last: int | None, keep_every: int | None = None) -> None:
        """Remove superseded checkpoints, as `native.prune`."""
        for step in native.superseded(self.steps(), keep_last, keep_every):
            self.remove(step)

    def _listing(self) -> dict[int, list[str]]:
        """File names of every checkpoint, complete or not, by ascending step."""
        listing: dict[int, list[str]] = {}
        for path in self.names():
            folder, _, name = path.partition("/")
            if name and (step := native.parse_step(folder)) is not None:
                listing.setdefault(step, []).append(name)
        return dict(sorted(listing.items()))


def _folder(step: int) -> str:
    return native.step_folder(Path(), step).name
