"""Checkpoints on object stores through fsspec: S3, Google Cloud Storage and every other file system that it supports.

    <url>/global_step100/manifest.json  uploaded last and removed first; a folder without it is not a checkpoint
                         ...            the other files of the checkpoint (read.py)
    <url>/quarantine/                   checkpoints of an abandoned branch

An object store cannot rename a folder. Therefore, a checkpoint is written to a local folder and then uploaded, and it
is downloaded before it is read.
"""

import logging
import shutil
from pathlib import Path
from typing import Any
from uuid import uuid4

from megatron_coca.checkpoints import native
from megatron_coca.checkpoints.files import CheckpointError, ServiceError, describe, parse_json, read_json
from megatron_coca.checkpoints.native.meta import checked_meta
from megatron_coca.config import CheckpointConfig
from megatron_coca.support.remote_files import RemoteFiles, is_url, local_folder
from megatron_coca.work.locks import exclusive_lock

logger = logging.getLogger(__name__)

DEFAULT_CACHE: str = CheckpointConfig.model_fields["checkpoint_cache"].default


def save_folder(keys: CheckpointConfig) -> Path | None:
    """Return the local folder for a run's checkpoints, even if `save` is a URL, or None if the run saves nothing."""
    if keys.save is None:
        return None
    return local_folder(keys.save, keys.checkpoint_cache, CheckpointError) if is_url(keys.save) else Path(keys.save)


def fetch(url: str, step: int | None = None, cache: str | Path = DEFAULT_CACHE) -> Path:
    """Download a checkpoint for reading, unless the local cache has an unchanged copy.

    Args:
        url: URL of a step folder, or of a run's folder.
        step: the step to download from a run's folder; by default the latest.
        cache: local folder. The checkpoint is stored below `cache`/read.

    Returns the local step folder. Raises CheckpointError.
    """
    run, _, name = url.rstrip("/").rpartition("/")
    named = native.parse_step(name)
    run, wanted = (url, step) if named is None else (run, named)
    save, remote = local_folder(run, Path(cache, "read"), CheckpointError), RemoteFolder(run)
    try:
        save.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(save / native.LOCK, CheckpointError, busy=None):
            available = remote.steps()
            if not available or wanted not in (None, *available):
                which = "" if wanted is None else f" of step {wanted}"
                raise CheckpointError(
                    f"{url}: no complete checkpoint{which}; available steps: {available or 'none'}, choose another"
                )
            folder = native.step_folder(save, available[-1] if wanted is None else wanted)
            remote.download_base(native.step_of(folder), save)
            return folder if remote.has(folder) else remote.download(native.step_of(folder), save)
    except OSError as error:
        raise CheckpointError(
            f"{url}: cannot be downloaded to {save} ({error}); set checkpoint_cache to another folder"
        ) from error


class RemoteFolder(RemoteFiles):
    """The `save` folder of one run on an object store. Methods raise CheckpointError, or its subclass ServiceError."""

    permanent, unavailable = CheckpointError, ServiceError

    def steps(self) -> list[int]:
        """Return the ascending steps of all complete checkpoints."""
        return [step for step, names in self._listing().items() if native.MANIFEST in names]

    def read_json(self, step: int, name: str) -> dict[str, Any]:
        """Read a JSON file of a checkpoint."""
        name = f"{_folder(step)}/{name}"
        return parse_json(self.read(name), f"{self.url}/{name}")

    def has(self, folder: Path) -> bool:
        """Compare manifests and return whether the store and the local `folder` have the same checkpoint."""
        step, manifest = native.step_of(folder), folder / native.MANIFEST
        if not manifest.is_file() or step not in self.steps():
            return False
        return self.read_json(step, native.MANIFEST) == read_json(manifest)

    def require_writable(self) -> None:
        """Check that the store is writable by writing and removing a small object. Raises CheckpointError."""
        self._attempt("cannot be written", lambda: self._fs.pipe_file(self._path(".probe"), b"x"))
        self.remove_object(".probe")

    def upload(self, folder: Path) -> None:
        """Upload a complete local checkpoint. A remote checkpoint of the same step is removed first."""
        name = folder.name
        self.remove(native.step_of(folder))
        self.each(read_json(folder / native.MANIFEST)["files"], lambda file: self.put(folder / file, f"{name}/{file}"))
        self.put(folder / native.MANIFEST, f"{name}/{native.MANIFEST}")

    def download(self, step: int, save: Path) -> Path:
        """Download the checkpoint of `step` into the local folder `save` atomically. Return the step folder.

        Raises CheckpointError if a file is missing or differs from the manifest, or if the manifest is invalid.
        """
        url = f"{self.url}/{_folder(step)}"
        manifest = native.checked_manifest(self.read_json(step, native.MANIFEST), f"{url}/{native.MANIFEST}")
        listed, partial = manifest["files"], native.begin(save, step)
        try:
            self.each(listed, lambda name: self.get(f"{_folder(step)}/{name}", partial / name))
            for name, entry in listed.items():
                if describe(partial / name) != entry:
                    raise CheckpointError(
                        f"{url}/{name}: damaged (size or sha256 differs from the manifest); remove {url} to use the "
                        "previous step"
                    )
            folder = native.commit(save, step, listed, manifest["holds"])
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        logger.info("downloaded %s to %s", url, folder)
        return folder

    def download_base(self, step: int, save: Path) -> None:
        """Download the checkpoint that the adapters of `step` change, unless it is already in the local folder `save`.

        Nothing is downloaded if the adapters change a model outside this run. Raises CheckpointError.
        """
        base = base_step(checked_meta(self.read_json(step, native.META), f"{self.url}/{_folder(step)}/{native.META}"))
        if base is not None and not self.has(native.step_folder(save, base)):
            self.download(base, save)

    def remove(self, step: int) -> None:
        """Remove a checkpoint, complete or not. Its manifest is removed first."""
        self.remove_object(f"{_folder(step)}/{native.MANIFEST}")
        self.each((f"{_folder(step)}/{name}" for name in self._listing().get(step, [])), self.remove_object)
        self.remove_folders(_folder(step))

    def set_aside(self, step: int) -> str:
        """Move a checkpoint to quarantine/ under an unused name. Return its new URL."""
        source, target = _folder(step), f"{native.QUARANTINE}/{_folder(step)}.{uuid4().hex[:8]}"
        if "file" in self._fs.protocol and Path(self._path(native.QUARANTINE)).is_symlink():
            raise CheckpointError(
                f"{self.url}/{native.QUARANTINE}: a symbolic link, which may lead out of the store; remove it"
            )

        def copy(name: str) -> None:
            paths = self._path(f"{source}/{name}"), self._path(f"{target}/{name}")
            self._attempt(f"{source}/{name} cannot be copied", lambda: self._fs.cp_file(*paths))

        self.each(self._listing().get(step, []), copy)
        self.remove(step)
        return f"{self.url}/{target}"

    def _listing(self) -> dict[int, list[str]]:
        """Map the step of every checkpoint, complete or not, to its file names, in ascending order of steps."""
        listing: dict[int, list[str]] = {}
        for path in self.names():
            folder, _, name = path.partition("/")
            if name and (step := native.parse_step(folder)) is not None:
                listing.setdefault(step, []).append(name)
        return dict(sorted(listing.items()))


def base_step(meta: dict[str, Any]) -> int | None:
    """Return the step of the checkpoint that adapters change. `meta` is the valid meta.json beside the adapters.

    Return None if the adapters change a model outside the run, or if there are no adapters.
    """
    adapts = native.adapted_model(meta)
    return native.step_of(Path(adapts.place)) if adapts is not None and adapts.is_beside else None


def _folder(step: int) -> str:
    return native.step_folder(Path(), step).name
