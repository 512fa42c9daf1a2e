"""The places of a run's checkpoints besides its local folder: object stores, and the folder of `save_copy`.

A run saves to a local folder. From there threads of rank 0 bring every complete checkpoint to the other places, while
training goes on. A start downloads the checkpoint to resume from to that folder, so all other training code sees local
folders only, and brings along what the last launch left behind.
"""

import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
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

URL_KEYS = ("save", "save_copy", "load")
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
    stores = {key: RemoteFolder(urls[key], given.object_store_timeout) for key in ("save", "save_copy") if key in urls}
    return localized, RemoteCheckpoints(given, localized.checkpoint, stores.get("save"), stores.get("save_copy"))


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


class Destination:
    """A place to which rank 0 brings every complete checkpoint, in order.

    Attributes:
        owed: steps that are not there yet.
        missing: why the newest one is not there, if the place is not `required`: a warning until the run ends.
    """

    def __init__(self, send: Callable[[Path], None], steps: Callable[[], list[int]], required: bool) -> None:
        """`send` brings a checkpoint's folder there, unless it is there already; `steps` lists what is there. Both may
        raise a CheckpointError.
        """
        self.transfers, self.owed = Transfers(), set[int]()
        self.missing: CheckpointError | None = None
        self._send, self._steps, self._required = send, steps, required

    def add(self, folder: Path, catch_up: bool = False) -> None:
        """Begin to bring a checkpoint there; to `catch_up`, also older ones that are newer than all that are there."""
        newest = native.step_of(folder)
        steps = [step for step in native.steps(folder.parent) if step <= newest] if catch_up else [newest]
        self.owed.update(steps)
        self.transfers.start(lambda: self._bring(folder.parent, steps))

    def _bring(self, save: Path, steps: list[int]) -> None:
        newest = steps[-1]
        if self.missing is None or newest == max(self.owed):  # after a failure only the newest is worth another attempt
            try:
                # A new folder of copies is not filled with all older ones.
                reached = max(self._steps(), default=-1 if self._required else newest) if steps[1:] else newest
                for step in steps:
                    if step > reached or step == newest:
                        self._send(native.step_folder(save, step))
                self.missing = None
            except CheckpointError as error:
                if self._required:
                    raise
                logger.warning("%s", error)
                self.missing = error
        self.owed.difference_update(steps)


class RemoteCheckpoints:
    """The object stores of a run, and its other places of checkpoints."""

    def __init__(
        self,
        given: CheckpointConfig,
        local: CheckpointConfig,
        save: RemoteFolder | None = None,
        copy: RemoteFolder | None = None,
    ) -> None:
        """
        Args:
            given: the checkpoint keys as the user wrote them.
            local: the same with local folders; `save_copy` is None if it was a URL.
            save: the store of `save`, or None.
            copy: the store of `save_copy`, or None.
        """
        self._given, self._local, self._folder = given, local, Path(local.save or "")
        self._stores = [store for store in (save, copy) if store is not None]
        self._sources, self._files = list(self._stores), 0
        self._beat: Callable[[str], None] = lambda reached: None
        self._stopping: Callable[[], bool] = lambda: False
        self._destinations = [
            Destination(partial(self._upload, each), each.steps, each is save) for each in self._stores
        ]
        if local.save_copy is not None:
            target = Path(local.save_copy)
            self._destinations.append(Destination(partial(self._copy_to, target), partial(native.steps, target), False))

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
        if self._stores and self._local.save is not None:
            self._on_rank_0(lambda: self._folder.mkdir(parents=True, exist_ok=True))

    def prepare(self) -> None:
        """Download what `load` names, and refuse stores of other runs. Every rank must call it, under the local
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
        """Download the highest valid checkpoint of the stores if its step is above that of `chosen`, the local one to
        resume from (None: there is none). Every rank must call it.

        Returns its folder, None if there is no higher one. Raises CheckpointError if the stores hold damaged ones only
        and `chosen` is None, or another run.
        """
        found = self._on_rank_0(lambda: self._download_newer(chosen)) if self._stores else None
        return None if found is None else Path(found)

    def deliver(self, step: int, catch_up: bool = False) -> None:
        """On rank 0, start to upload or copy the complete local checkpoint of `step` to all other places. At the start
        of a launch `catch_up` adds the checkpoints that the last launch did not deliver.

        Checkpoints in a store of a higher step, or of the same step with other files, are moved to its quarantine: the
        run has left their branch, or could not be resumed from them.
        """
        if dist.is_main() and step in native.steps(self._folder):
            for destination in self._destinations:
                destination.add(native.step_folder(self._folder, step), catch_up)

    def owed(self) -> set[int]:
        """The steps that a place does not hold yet; their local checkpoints must stay."""
        return set().union(*(destination.owed for destination in self._destinations))

    @property
    def failed(self) -> bool:
        """True on rank 0 if a checkpoint could not be brought to the store of `save`; `wait` raises its error."""
        return any(destination.transfers.failure is not None for destination in self._destinations)

    def wait(self, last: bool = False, hurry: bool = False) -> None:
        """Wait until all checkpoints are where they belong. Every rank must call it.

        Args:
            last: `save_copy` must have the newest checkpoint too.
            hurry: what fails from now on is not tried again.

        Raises:
            ServiceError: a store does not answer.
            CheckpointError: a checkpoint could not be brought to a place that must have it; raised once.
        """
        if not self._destinations:
            return
        if hurry:
            self._hurry()
        self._join([destination.transfers for destination in self._destinations])

        def take_failure() -> None:
            failures = [destination.transfers.failure for destination in self._destinations]
            failures += [destination.missing for destination in self._destinations if last]
            for destination in self._destinations:
                destination.transfers.failure = None
            for failure in filter(None, failures):
                raise failure

        from_main(take_failure)

    def leave(self) -> None:
        """Give transfers a few seconds to complete: the training loop has failed."""
        self._hurry()
        end = time.monotonic() + LAST_SECONDS
        for destination in self._destinations:
            destination.transfers.running(max(0.0, end - time.monotonic()))

    def _hurry(self) -> None:
        for source in self._sources:
            source.hurry.set()

    def _join(self, running: Iterable[Transfers]) -> None:
        """Wait for transfers of rank 0 with all ranks, which beat as long as bytes are transferred."""
        busy, before = True, -1
        try:
            while busy:
                busy = any(transfers.running(AGREE_SECONDS) for transfers in running)
                activity = self._files + sum(source.activity for source in self._sources)
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
        self._prune(remote.url, remote.prune)

    def _copy_to(self, target: Path, folder: Path) -> None:
        step = native.step_of(folder)
        try:
            if not _is_same(folder, lambda: native.read_json(target / folder.name / native.MANIFEST)):
                native.copy(folder, target, self._copied)
        except (OSError, CheckpointError) as error:
            native.abandon(target, step)
            raise CheckpointError(f"{target}: step {step} could not be copied ({error})") from error
        self._prune(str(target), partial(native.prune, target))

    def _copied(self) -> None:
        self._files += 1

    def _prune(self, place: str, prune: Callable[[int | None, int | None], None]) -> None:
        try:
            prune(self._given.keep_last_n_checkpoints, self._given.keep_every_n_steps)
        except (OSError, CheckpointError) as error:
            logger.warning("%s: an old checkpoint could not be removed (%s)", place, error)

    def _download(self) -> None:
        given = self._given
        if given.load is not None and is_url(given.load) and not _same_url(given.load, given.save):
            self._sources.append(RemoteFolder(split_step(given.load)[0], given.object_store_timeout))
            folder = fetch(given.load, given.iteration, given.checkpoint_cache, self._sources[-1])
            for step in native.begun_steps(folder.parent):
                if step > native.step_of(folder):  # downloaded earlier, and not in the store any more
                    shutil.rmtree(native.step_folder(folder.parent, step))
        for remote in self._stores:
            remote.require_writable()
            self._refuse_or_fetch(remote)

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

    def _download_newer(self, chosen: Path | None) -> str | None:
        given, found = self._given, None
        step = -1 if chosen is None else int(native.read_meta(chosen)["step"])
        for remote in self._stores:
            resumes = given.auto_resume or (self._loads(remote) and given.iteration is None)
            if not resumes or max(remote.steps(), default=-1) <= step:
                continue
            if chosen is not None:
                _refuse_other_runs(remote, runs_of([chosen]))
            try:
                found = remote.download_newest(self._folder, resumable=True, above=step)
                step = native.step_of(found)
            except ServiceError:
                raise
            except CheckpointError as error:
                if step < 0:
                    raise
                logger.warning("%s; resuming from step %d", error, step)
        return None if found is None else str(found)

    def _on_rank_0(self, action: Callable[[], Any]) -> Any:
        """The JSON-serializable result of `action` of rank 0 on every rank."""
        job, results = Transfers(), list[Any]()
        if dist.is_main():
            job.start(lambda: results.append(action()))
        self._join([job])

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
