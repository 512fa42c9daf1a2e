"""Support for runs with `save` or `load` on an object store.

A run saves to a local folder. From there, a thread of rank 0 uploads every complete checkpoint while training
continues. When a run starts, it downloads the checkpoint that it will resume from into that folder, and uploads any
checkpoints that the previous launch did not upload. All other training code uses only local folders.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from megatron_coca.checkpoints import CheckpointError, native
from megatron_coca.checkpoints.native.object_store import RemoteFolder, base_step, fetch, save_folder
from megatron_coca.config import CheckpointConfig, Config
from megatron_coca.support.remote_files import is_url
from megatron_coca.training.checkpointing.resume import runs_of
from megatron_coca.training.collectives import from_main
from megatron_coca.training.engine import group as dist

logger = logging.getLogger(__name__)

KEPT_LOCALLY = 2
"""Number of uploaded checkpoints to keep in the local folder if `save` is on an object store. Checkpoints that are not
uploaded yet are kept, too.
"""
AGREE_SECONDS = 1.0
"""Seconds between the exchanges in which the ranks agree on the progress of rank 0's transfers."""
LAST_SECONDS = 5.0
"""Seconds for which a failed run waits for transfers in progress."""


def use_local_folders(config: Config) -> "tuple[Config, RemoteCheckpoints]":
    """Replace the URLs in `config` with local folders; return the new configuration and the object store of `save`.

    This creates the local folder for `save`, so that it can be locked. If `load` is a different URL, the checkpoint
    there is downloaded. Every rank must call this.

    Raises:
        CheckpointError: no installed library can open a URL, or `load` contains no checkpoint.
        OSError: the folder for `save` in `checkpoint_cache` cannot be created.
    """
    given, changed = config.checkpoint, dict[str, Any]()
    if given.save is not None and is_url(given.save):
        save, keep = save_folder(given), min(given.keep_last_n_checkpoints or KEPT_LOCALLY, KEPT_LOCALLY)
        changed = {"save": str(save), "keep_last_n_checkpoints": keep, "keep_every_n_steps": None}
        Path(changed["save"]).mkdir(parents=True, exist_ok=True)
    if given.load is not None and is_url(given.load):
        load, step, cache = given.load.rstrip("/"), given.iteration, given.checkpoint_cache
        same = load == (given.save or "").rstrip("/")
        changed["load"] = changed["save"] if same else from_main(lambda: str(fetch(load, step, cache)))
    localized = config.override(changed)
    return localized, RemoteCheckpoints(given, localized.checkpoint)


class RemoteCheckpoints:
    """The object store of `save`, if `save` is a URL.

    Attributes:
        failure: on rank 0, the error of a failed upload. `wait` raises it, and nothing more is uploaded.
    """

    def __init__(self, given: CheckpointConfig, local: CheckpointConfig) -> None:
        """`given` are the checkpoint keys as the user wrote them; in `local`, URLs are replaced with local folders."""
        self._given, self._local, self._folder = given, local, Path(local.save or "")
        self._beat: Callable[[str], None] = lambda reached: None
        self._stopping: Callable[[], bool] = lambda: False
        self._owed = set[int]()
        self.failure: BaseException | None = None
        self._last: Future[None] | None = None
        self._store = None
        if given.save != local.save:
            self._store = RemoteFolder(str(given.save), given.object_store_timeout)
            self._pool = ThreadPoolExecutor(1, "transfers")  # one transfer at a time; the thread uses no collectives

    def attend(self, beat: Callable[[str], None], stopping: Callable[[], bool]) -> None:
        """Set the functions to call while waiting for transfers: `beat` receives their progress, and `stopping` returns
        whether this rank was asked to stop. Once any rank was asked to stop, failed transfers are not retried.
        """
        self._beat, self._stopping = beat, stopping

    def given_in(self, config: Config) -> Config:
        """Return `config` with the checkpoint keys as the user wrote them."""
        given, local = self._given.model_dump(), self._local.model_dump()
        return config.override({key: value for key, value in given.items() if value != local[key]})

    def holds(self, folder: Path) -> bool:
        """Whether `folder` is the local copy of a checkpoint that is in the object store or will be uploaded to it."""
        return self._store is not None and folder.parent == self._folder

    def prepare(self) -> None:
        """If the checkpoint to resume from is not in the local folder, download it.

        Every rank must call this, with the local folder locked and before checkpoints are listed. Raises
        CheckpointError, for example if the store contains another run.
        """
        if self._store is not None:
            self._finish(self._store, self._pool.submit(self._download, self._store) if dist.is_main() else None)

    def deliver(self, step: int, catch_up: bool = False) -> None:
        """On rank 0, start to upload the complete local checkpoint of `step`. At the start of a launch, `catch_up` adds
        the older checkpoints that the last launch did not upload.

        Some checkpoints in the store have a higher step, or the same step but different files. The run did not or could
        not continue from these, so they are moved to the quarantine of the store.
        """
        if self._store is None or not dist.is_main() or step not in (local := native.steps(self._folder)):
            return
        steps = [older for older in local if older <= step] if catch_up else [step]
        self._owed.update(steps)
        self._last = self._pool.submit(self._upload, self._store, steps)

    def owed(self) -> set[int]:
        """Return the steps that are not in the store yet. Their local checkpoints must not be removed."""
        return set(self._owed)

    def wait(self, hurry: bool = False) -> None:
        """Wait until all checkpoints are uploaded. With `hurry`, failed uploads are not retried. Every rank must call
        this.

        Raises:
            ServiceError: the store does not answer.
            CheckpointError: a checkpoint could not be uploaded. This is raised only once.
        """
        if self._store is None:
            return
        if hurry:
            self._store.hurry.set()
        last, self._last = self._last, None
        try:
            self._finish(self._store, last)
        finally:
            self.failure = None

    def leave(self) -> None:
        """Wait a few seconds for transfers to complete, after the training loop has failed."""
        if self._store is not None and self._last is not None:
            self._store.hurry.set()
            wait([self._last], LAST_SECONDS)
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _finish(self, store: RemoteFolder, transfer: "Future[None] | None") -> None:
        """Wait on all ranks for a transfer of rank 0, and raise its error on all of them. As long as bytes are
        transferred, the ranks report progress to the watchdog.
        """
        busy, before = True, -1
        try:
            while busy:
                busy = transfer is not None and bool(wait([transfer], AGREE_SECONDS).not_done)
                busy, moved, stop = dist.anyone((busy, store.activity != before, self._stopping()))
                before = store.activity
                if moved:
                    self._beat("transferring checkpoints")
                if stop:
                    store.hurry.set()
        except BaseException:  # when Python exits, it waits for the transfer thread
            store.hurry.set()
            raise
        from_main(lambda: transfer.result() if transfer is not None else None)

    def _download(self, store: RemoteFolder) -> None:
        given, save, local = self._given, self._folder, native.steps(self._folder)
        store.require_writable()
        stored, begun = store.steps(), native.begun_steps(save)
        if not stored:
            return
        resumes = given.auto_resume or (not given.finetune and self._local.load == self._local.save)
        runs = runs_of(native.step_folder(save, step) for step in begun)
        if not (begun or resumes) or (runs and store.read_json(stored[-1], native.META).get("run") not in runs):
            raise CheckpointError(
                f"{store.url}: already contains a run (up to step {stored[-1]}) that is not in {save}; choose another "
                "URL, or move other runs' checkpoints out of that folder and resume the run with auto_resume=true"
            )
        named = None if given.auto_resume else given.iteration
        lacking = stored[-1] > max(local, default=-1) if named is None else named not in local
        if resumes and lacking:
            step = stored[-1] if named is None else named
            store.download_base(step, save)
            store.download(step, save)

    def _upload(self, store: RemoteFolder, steps: list[int]) -> None:
        """Upload the last of the ascending `steps`, and earlier steps that are newer than all steps in the store."""
        if self.failure is not None:
            raise self.failure
        given = self._given
        try:
            reached = max(store.steps(), default=-1)
            for step in steps:
                if step > reached or step == steps[-1]:
                    _upload_step(store, native.step_folder(self._folder, step))
            self._owed.difference_update(steps)
            base = base_step(native.read_meta(native.step_folder(self._folder, steps[-1])))
            for old in native.superseded(store.steps(), given.keep_last_n_checkpoints, given.keep_every_n_steps):
                if old != base:
                    store.remove(old)
        except CheckpointError as error:
            self.failure = type(error)(
                f"{native.step_folder(self._folder, steps[-1])}: could not be uploaded, but is complete ({error}); run "
                "the same command with auto_resume=true to upload it and continue"
            )
            raise self.failure from error


def _upload_step(store: RemoteFolder, folder: Path) -> None:
    step, uploaded = native.step_of(folder), store.has(folder)
    for other in store.steps():
        if other > step or (other == step and not uploaded):
            logger.warning("%s: step %d moved to %s", store.url, other, store.set_aside(other))
    if not uploaded:
        store.upload(folder)
        logger.info("uploaded %s/%s", store.url, folder.name)
