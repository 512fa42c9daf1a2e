"""Runs whose `save`, `save_copy` or `load` is the URL of an object store.

A run saves to a local folder, and rank 0 uploads from there. A start downloads a checkpoint to that folder if it holds
none yet, so all other training code sees local folders only.
"""

import logging
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_coca.checkpoints import CheckpointError, native
from megatron_coca.checkpoints.object_store import RemoteFolder, fetch, is_url, local_folder, read_folder, split_step
from megatron_coca.config import CheckpointConfig, Config
from megatron_coca.training.collectives import attempt, from_main
from megatron_coca.training.engine import group as dist
from megatron_coca.training.resume import runs_of

logger = logging.getLogger(__name__)

URL_KEYS = ("save", "save_copy", "load")
CHANGED_KEYS = (*URL_KEYS, "keep_last_n_checkpoints", "keep_every_n_steps")
KEPT_LOCALLY = 2
"""Checkpoints kept in the local folder of a `save` on an object store: the newest, and one to roll back to."""


def use_local_folders(config: Config) -> "tuple[Config, RemoteCheckpoints]":
    """Replace URLs in `config` by local folders; returns the new config and the object stores.

    Raises:
        CheckpointError: no installed library can open a URL.
    """
    given = config.checkpoint
    urls = {key: url for key in URL_KEYS if (url := getattr(given, key)) is not None and is_url(url)}
    if not urls:
        return config, RemoteCheckpoints(given, given)
    changed: dict[str, Any] = {key: str(local_folder(url, given.checkpoint_cache)) for key, url in urls.items()}
    if "load" in urls and not _same_url(given.load, given.save):
        run, step = split_step(urls["load"])
        folder = read_folder(run, given.checkpoint_cache)
        changed["load"] = str(folder if step is None else native.step_folder(folder, step))
    if "save_copy" in urls:
        changed["save_copy"] = None
    if "save" in urls:
        keep = given.keep_last_n_checkpoints or KEPT_LOCALLY
        changed |= {"keep_last_n_checkpoints": min(keep, KEPT_LOCALLY), "keep_every_n_steps": None}
    localized = config.override(changed)
    save, copy = (RemoteFolder(urls[key]) if key in urls else None for key in ("save", "save_copy"))
    return localized, RemoteCheckpoints(given, localized.checkpoint, save, copy)


@dataclass(frozen=True)
class RemoteCheckpoints:
    """The object stores of a run; false if it has none.

    Attributes:
        given: the checkpoint keys as the user wrote them.
        local: the same with local folders; `save_copy` is None if it was a URL.
        save: the store of `save`, or None.
        copy: the store of `save_copy`, or None.
    """

    given: CheckpointConfig
    local: CheckpointConfig
    save: RemoteFolder | None = None
    copy: RemoteFolder | None = None

    def __bool__(self) -> bool:
        return self.save is not None or self.copy is not None

    def given_in(self, config: Config) -> Config:
        """`config` with the checkpoint keys as the user wrote them."""
        given = {key: getattr(self.given, key) for key in CHANGED_KEYS}
        return config.override({key: value for key, value in given.items() if value != getattr(self.local, key)})

    def make_local_folder(self) -> None:
        """Make the local `save` folder, so that it can be locked. Every rank must call it. Raises CheckpointError."""
        if self and self.local.save is not None:
            folder = Path(self.local.save)
            self._on_rank_0(lambda: folder.mkdir(parents=True, exist_ok=True))

    def prepare(self) -> None:
        """Download what the run resumes from or starts with. Every rank must call it, under the local folder's lock and
        before checkpoints are listed. Raises CheckpointError.
        """
        if self.given == self.local:
            return
        self._on_rank_0(self._download)
        if self.local.save is None or dist.world_size() == 1:
            return
        mark = Path(self.local.save) / ".seen-by-all-ranks"
        self.make_local_folder()
        self._on_rank_0(lambda: mark.write_text(""))
        unseen = attempt(mark.stat, OSError)
        attempt(lambda: mark.unlink(missing_ok=True), OSError, main_only=True)
        if unseen is not None:
            raise CheckpointError(
                f"checkpoint_cache: {self.local.checkpoint_cache} is not the same folder on all hosts, but checkpoints "
                "are assembled there before they are uploaded; name a folder on a shared file system"
            )

    def upload(self, step: int) -> None:
        """Upload the local checkpoint of `step` from rank 0, and remove old ones.

        Checkpoints in the store of the same or a higher step are moved to its quarantine: the run has left their
        branch, or could not be resumed from them. Raises CheckpointError if `save` could not be written, not for
        `save_copy`.
        """
        assert self.local.save is not None
        folder = native.step_folder(Path(self.local.save), step)
        if self.save is not None:
            self._upload(self.save, folder)
        if self.copy is not None:
            try:
                self._upload(self.copy, folder)
            except CheckpointError as error:
                logger.warning("step %d could not be copied: %s", step, error)

    def _upload(self, remote: RemoteFolder, folder: Path) -> None:
        _refuse_other_runs(remote, {native.read_json(folder / native.META).get("run")})
        for step in remote.steps():
            if step >= native.step_of(folder):
                logger.warning("%s: step %d moved to %s", remote.url, step, remote.set_aside(step))
        remote.upload(folder)
        logger.info("uploaded %s/%s", remote.url, folder.name)
        try:
            remote.prune(self.given.keep_last_n_checkpoints, self.given.keep_every_n_steps)
        except CheckpointError as error:
            logger.warning("an old checkpoint could not be removed: %s", error)

    def _download(self) -> None:
        given = self.given
        if given.load is not None and is_url(given.load) and not _same_url(given.load, given.save):
            folder = fetch(given.load, given.iteration, given.checkpoint_cache)
            for step in native.begun_steps(folder.parent):
                if step > native.step_of(folder):  # downloaded earlier, and not in the store any more
                    shutil.rmtree(native.step_folder(folder.parent, step))
        for remote in (self.save, self.copy):
            if remote is not None:
                remote.require_writable()
                self._download_save(remote)

    def _download_save(self, remote: RemoteFolder) -> None:
        """Download the checkpoint to resume from if there is none locally; refuse a store that holds another run."""
        assert self.local.save is not None
        save, steps, given = Path(self.local.save), remote.steps(), self.given
        if not steps:
            return
        local_steps = native.begun_steps(save)
        loads = not given.finetune and _same_url(given.load, remote.url)
        if local_steps:
            _refuse_other_runs(remote, runs_of(native.step_folder(save, step) for step in local_steps))
        elif given.auto_resume or (loads and given.iteration is None):
            remote.download_newest(save, resumable=True)
        elif loads and given.iteration is not None:
            remote.download(given.iteration, save, resumable=True)
        else:
            raise CheckpointError(
                f"{remote.url}: already holds a run, up to step {steps[-1]}; resume it with auto_resume=true, or "
                "choose another URL"
            )

    def _on_rank_0(self, action: Callable[[], Any]) -> None:
        def run() -> None:
            try:
                action()
            except OSError as error:
                raise CheckpointError(
                    f"checkpoint_cache: {self.local.checkpoint_cache} cannot be used ({error}); name another folder"
                ) from error

        from_main(run)


def _refuse_other_runs(remote: RemoteFolder, own: Iterable[str | None]) -> None:
    for step in remote.steps():
        if remote.read_json(step, native.META).get("run") not in own:
            raise CheckpointError(
                f"{remote.url}: step {step} was written by a different run; choose another URL, or remove the "
                "local folder of this run to resume the one in the store"
            )


def _same_url(one: str | None, other: str | None) -> bool:
    return one is not None and other is not None and one.rstrip("/") == other.rstrip("/")
