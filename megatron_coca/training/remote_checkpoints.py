"""A run whose `save` or `load` is on an object store.

A run saves to a local folder. From there a thread of rank 0 uploads every complete checkpoint, while training goes on.
A start downloads the checkpoint to resume from to that folder, so all other training code sees local folders only, and
uploads what the last launch left behind.
"""

import logging
import shutil
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from megatron_coca.checkpoints import CheckpointError, native
from megatron_coca.checkpoints.files import ServiceError
from megatron_coca.checkpoints.object_store import RemoteFolder, fetch, local_folder, read_folder, split_step
from megatron_coca.config import CheckpointConfig, Config
from megatron_coca.remote_files import is_url
from megatron_coca.training.collectives import attempt, from_main
from megatron_coca.training.engine import group as dist
from megatron_coca.training.resume import runs_of

logger = logging.getLogger(__name__)

URL_KEYS = ("save", "load")
CHANGED_KEYS = (*URL_KEYS, "keep_last_n_checkpoints", "keep_every_n_steps")
KEPT_LOCALLY = 2
"""Checkpoints kept in the local folder of a `save` on an object store: the newest, and one to roll back to. Those that
are not uploaded yet are kept too.
"""
AGREE_SECONDS = 1.0
"""Interval at which the ranks agree on the progress of rank 0's transfers."""
LAST_SECONDS = 5.0
"""Time that a failed run gives transfers that are under way."""


def use_local_folders(config: Config) -> "tuple[Config, RemoteCheckpoints]":
    """Replace URLs in `config` by local folders; returns the new config and its object stores.

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
    if "save" in urls:
        keep = given.keep_last_n_checkpoints or KEPT_LOCALLY
        changed |= {"keep_last_n_checkpoints": min(keep, KEPT_LOCALLY), "keep_every_n_steps": None}
    localized = config.override(changed)
    store = RemoteFolder(urls["save"], given.object_store_timeout) if "save" in urls else None
    return localized, RemoteCheckpoints(given, localized.checkpoint, store)


class Transfers:
    """Transfers of rank 0, one after the other in threads that take part in no collective.

    Attributes:
        failure: what a transfer raised; those after it are not begun.
    """

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self, transfer: Callable[[], object]) -> None:
        """Begin a transfer when the one before has ended."""
        before = self._thread

        def run() -> None:
            if before is not None:
                before.join()
            if self.failure is None:
                try:
                    transfer()
                except BaseException as error:  # raised in the training thread
                    self.failure = error

        # A daemon thread does not keep a failed process alive.
        self._thread = threading.Thread(target=run, name="transfers", daemon=True)
        self._thread.start()

    def running(self, seconds: float) -> bool:
        """Wait at most `seconds`; returns whether transfers are still under way."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is not None and self._thread.is_alive()


class RemoteCheckpoints:
    """The object store of `save`, if that is a URL, and the checkpoint that `load` names on another one."""

    def __init__(self, given: CheckpointConfig, local: CheckpointConfig, store: RemoteFolder | None = None) -> None:
        """
        Args:
            given: the checkpoint keys as the user wrote them.
            local: the same with local folders.
            store: that of `save`, or None.
        """
        self._given, self._local, self._folder, self._store = given, local, Path(local.save or ""), store
        self._sources = [] if store is None else [store]
        self._uploads, self._owed = Transfers(), set[int]()
        self._beat: Callable[[str], None] = lambda reached: None
        self._stopping: Callable[[], bool] = lambda: False

    def attend(self, beat: Callable[[str], None], stopping: Callable[[], bool]) -> None:
        """While all ranks wait for transfers, report progress to `beat`; once `stopping` is true on any rank, because
        the run was asked to stop, a transfer that fails is not tried again.
        """
        self._beat, self._stopping = beat, stopping

    def given_in(self, config: Config) -> Config:
        """`config` with the checkpoint keys as the user wrote them."""
        given = {key: getattr(self._given, key) for key in CHANGED_KEYS}
        return config.override({key: value for key, value in given.items() if value != getattr(self._local, key)})

    def make_local_folder(self) -> None:
        """Make the local `save` folder, so that it can be locked. Every rank must call it. Raises CheckpointError."""
        if self._store is not None:
            self._on_rank_0(lambda: self._folder.mkdir(parents=True, exist_ok=True))

    def prepare(self) -> None:
        """Download what `load` names, and refuse the store of another run. Every rank must call it, under the local
        folder's lock and before checkpoints are listed. Raises CheckpointError.
        """
        if self._given == self._local:
            return
        self._on_rank_0(self._download)
        if self._local.save is None or dist.world_size() == 1:
            return
        mark = self._folder / ".seen-by-all-ranks"
        self.make_local_folder()
        self._on_rank_0(lambda: mark.write_text(""))
        unseen = attempt(mark.stat, OSError)
        attempt(lambda: mark.unlink(missing_ok=True), OSError, main_only=True)
        if unseen is not None:
            raise CheckpointError(
                f"checkpoint_cache: {self._local.checkpoint_cache} is not the same folder on all hosts, but "
                "checkpoints are assembled there before they are uploaded; name a folder on a shared file system"
            )

    def download_newer(self, chosen: Path | None) -> Path | None:
        """Download the highest valid checkpoint of the store if its step is above that of `chosen`, the local one to
        resume from (None: there is none). Every rank must call it.

        Returns its folder, None if there is no higher one. Raises CheckpointError if the store holds damaged ones only
        and `chosen` is None, or another run.
        """
        store = self._store
        found = None if store is None else self._on_rank_0(lambda: self._download_newer(store, chosen))
        return None if found is None else Path(found)

    def deliver(self, step: int, catch_up: bool = False) -> None:
        """On rank 0, start to upload the complete local checkpoint of `step`. At the start of a launch `catch_up` adds
        older ones that are newer than all that are there: the last launch did not upload them.

        Checkpoints in the store of a higher step, or of the same step with other files, are moved to its quarantine:
        the run has left their branch, or could not be resumed from them.
        """
        store, local = self._store, native.steps(self._folder) if dist.is_main() else []
        if store is None or step not in local:
            return
        steps = [older for older in local if older <= step] if catch_up else [step]
        self._owed.update(steps)

        def upload() -> None:
            reached = max(store.steps(), default=-1) if catch_up else step
            for own in steps:
                if own > reached or own == step:
                    self._upload(store, native.step_folder(self._folder, own))
            self._owed.difference_update(steps)

        self._uploads.start(upload)

    def owed(self) -> set[int]:
        """The steps that the store does not hold yet; their local checkpoints must stay."""
        return set(self._owed)

    @property
    def failed(self) -> bool:
        """True on rank 0 if a checkpoint could not be uploaded; `wait` raises its error."""
        return self._uploads.failure is not None

    def wait(self, hurry: bool = False) -> None:
        """Wait until all checkpoints are uploaded; with `hurry`, what fails from now on is not tried again. Every rank
        must call it.

        Raises:
            ServiceError: the store does not answer.
            CheckpointError: a checkpoint could not be uploaded; raised once.
        """
        if self._store is None:
            return
        if hurry:
            self._hurry()
        self._join(self._uploads)
        failure, self._uploads.failure = self._uploads.failure, None

        def raise_failure() -> None:
            if failure is not None:
                raise failure

        from_main(raise_failure)

    def leave(self) -> None:
        """Give transfers a few seconds to complete: the training loop has failed."""
        self._hurry()
        self._uploads.running(LAST_SECONDS)

    def _hurry(self) -> None:
        for source in self._sources:
            source.hurry.set()

    def _join(self, transfers: Transfers) -> None:
        """Wait for transfers of rank 0 with all ranks, which beat as long as bytes are transferred."""
        busy, before = True, -1
        try:
            while busy:
                busy = transfers.running(AGREE_SECONDS)
                activity = sum(source.activity for source in self._sources)
                busy, moved, stop = dist.anyone((busy, activity != before, self._stopping()))
                before = activity
                if moved:
                    self._beat("transferring checkpoints")
                if stop:
                    self._hurry()
        except BaseException:  # Python ends when the threads of transfers have
            self._hurry()
            raise

    def _upload(self, remote: RemoteFolder, folder: Path) -> None:
        step, steps = native.step_of(folder), remote.steps()
        same = step in steps and _is_same(folder, lambda: remote.read_json(step, native.MANIFEST))
        try:
            if not same:
                _refuse_other_runs(remote, {native.read_meta(folder).get("run")})
            for other in steps:
                if other > step or (other == step and not same):
                    logger.warning("%s: step %d moved to %s", remote.url, other, remote.set_aside(other))
            if not same:
                remote.upload(folder)
                logger.info("uploaded %s/%s", remote.url, folder.name)
        except CheckpointError as error:
            raise type(error)(
                f"{folder}: is complete, but could not be uploaded ({error}); the same command with auto_resume=true "
                "uploads it and continues"
            ) from error
        try:
            remote.prune(self._given.keep_last_n_checkpoints, self._given.keep_every_n_steps)
        except CheckpointError as error:
            logger.warning("%s: an old checkpoint could not be removed (%s)", remote.url, error)

    def _download(self) -> None:
        given = self._given
        if given.load is not None and is_url(given.load) and not _same_url(given.load, given.save):
            self._sources.append(RemoteFolder(split_step(given.load)[0], given.object_store_timeout))
            folder = fetch(given.load, given.iteration, given.checkpoint_cache, self._sources[-1])
            for step in native.begun_steps(folder.parent):
                if step > native.step_of(folder):  # downloaded earlier, and not in the store any more
                    shutil.rmtree(native.step_folder(folder.parent, step))
        if self._store is not None:
            self._store.require_writable()
            self._refuse_or_fetch(self._store)

    def _refuse_or_fetch(self, remote: RemoteFolder) -> None:
        """Refuse a store that holds another run, or a run that this one does not resume; download `iteration`."""
        save, steps, given = self._folder, remote.steps(), self._given
        if not steps:
            return
        local_steps = native.begun_steps(save)
        if local_steps:
            _refuse_other_runs(remote, runs_of(native.step_folder(save, step) for step in local_steps))
        elif not given.auto_resume and not self._loads(remote):
            raise CheckpointError(
                f"{remote.url}: already holds a run, up to step {steps[-1]}; resume it with auto_resume=true, or "
                "choose another URL"
            )
        if self._loads(remote) and given.iteration is not None and given.iteration not in native.steps(save):
            remote.download(given.iteration, save, resumable=True)

    def _loads(self, remote: RemoteFolder) -> bool:
        given = self._given
        return not given.auto_resume and not given.finetune and _same_url(given.load, remote.url)

    def _download_newer(self, remote: RemoteFolder, chosen: Path | None) -> str | None:
        step = -1 if chosen is None else int(native.read_meta(chosen)["step"])
        resumes = self._given.auto_resume or (self._loads(remote) and self._given.iteration is None)
        if not resumes or max(remote.steps(), default=-1) <= step:
            return None
        if chosen is not None:
            _refuse_other_runs(remote, runs_of([chosen]))
        try:
            return str(remote.download_newest(self._folder, resumable=True, above=step))
        except ServiceError:
            raise
        except CheckpointError as error:
            if chosen is None:
                raise
            logger.warning("%s; resuming from step %d", error, step)
            return None

    def _on_rank_0(self, action: Callable[[], Any]) -> Any:
        """The JSON-serializable result of `action` of rank 0 on every rank."""
        job, results = Transfers(), list[Any]()
        if dist.is_main():
            job.start(lambda: results.append(action()))
        self._join(job)

        def result() -> Any:
            if isinstance(job.failure, OSError):
                raise CheckpointError(
                    f"checkpoint_cache: {self._local.checkpoint_cache} cannot be used ({job.failure}); name another "
                    "folder"
                ) from job.failure
            if job.failure is not None:
                raise job.failure
            return results[0]

        return from_main(result)


def _is_same(folder: Path, read_manifest: Callable[[], dict[str, Any]]) -> bool:
    """True if another place holds a checkpoint's files."""
    own = native.read_json(folder / native.MANIFEST)["files"]
    try:
        return bool(read_manifest().get("files") == own)
    except ServiceError:
        raise
    except CheckpointError:
        return False


def _refuse_other_runs(remote: RemoteFolder, own: Iterable[str | None]) -> None:
    for step in remote.steps():
        if remote.read_json(step, native.META).get("run") not in own:
            raise CheckpointError(
                f"{remote.url}: step {step} was written by a different run; choose another URL, or remove the "
                "local folder of this run to resume the one in the store"
            )


def _same_url(one: str | None, other: str | None) -> bool:
    return one is not None and other is not None and one.rstrip("/") == other.rstrip("/")
