"""Runs whose `save`, `save_copy` or `load` is the URL of an object store.

A run writes its checkpoints to a local folder and the first rank uploads them from there. A start downloads a checkpoint
to that folder where it holds none yet, so that everything else in training sees local folders alone.
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
from megatron_coca.training import engine as dist
from megatron_coca.training.collectives import attempt, from_main
from megatron_coca.training.resume import runs_of

logger = logging.getLogger(__name__)

URL_KEYS = ("save", "save_copy", "load")
KEPT_LOCALLY = 2
"""Checkpoints that stay in the local folder of a `save` on an object store: the newest, and one to roll back to."""


@dataclass(frozen=True)
class RemoteCheckpoints:
    """The object stores of a run.

    Attributes:
        given: the checkpoint keys as the user wrote them.
        local: the same with local folders; `save_copy` is None where it was a URL.
        save: what `save` names on an object store, or None.
        copy: what `save_copy` names on an object store, or None.
    """

    given: CheckpointConfig
    local: CheckpointConfig
    save: RemoteFolder | None = None
    copy: RemoteFolder | None = None

    @property
    def _targets(self) -> tuple[RemoteFolder, ...]:
        return tuple(remote for remote in (self.save, self.copy) if remote is not None)

    def __bool__(self) -> bool:
        return bool(self._targets)

    def given_in(self, config: Config) -> Config:
        """`config` with the checkpoint keys as the user wrote them."""
        changed = {key: getattr(self.given, key) for key in CHANGED_KEYS}
        return config.override({key: value for key, value in changed.items() if value != getattr(self.local, key)})

    def make_local_folder(self) -> None:
        """Make the folder that checkpoints may be downloaded to, so that it can be locked. Every rank must call it.

        Raises CheckpointError where it cannot be made.
        """
        if self and self.local.save is not None:
            folder = Path(self.local.save)
            self._on_first_rank(lambda: folder.mkdir(parents=True, exist_ok=True))

    def prepare(self) -> None:
        """Download what the run resumes from or starts with. Every rank must call it, under the lock of the local folder
        and before it looks for checkpoints.

        Raises:
            CheckpointError: a store cannot be read or written, holds another run, or `load` names no checkpoint there;
                or the local folder is not the same for all ranks.
        """
        if self.given == self.local:
            return
        self._on_first_rank(self._prepare)
        self._require_shared_folder()

    def upload(self, step: int) -> None:
        """Upload the local checkpoint of `step`, and remove what is not kept any more. Call it on the first rank.

        Checkpoints of higher steps in a store are of a branch that the run has left, or could not be resumed from, as one
        of the same step; they are moved to quarantine/.

        Raises:
            CheckpointError: `save` could not be written. For `save_copy` that is a warning.
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
        run, step = native.read_json(folder / native.META).get("run"), native.step_of(folder)
        _refuse_other_runs(remote, {run})
        for beyond in remote.steps():
            if beyond >= step:  # of the same step: it could not be resumed from when the run started
                logger.warning("%s: step %d moved to %s", remote.url, beyond, remote.set_aside(beyond))
        remote.upload(folder)
        logger.info("uploaded %s/%s", remote.url, folder.name)
        try:
            remote.prune(self.given.keep_last_n_checkpoints, self.given.keep_every_n_steps)
        except CheckpointError as error:
            logger.warning("an old checkpoint could not be removed: %s", error)

    def _prepare(self) -> None:
        self._fetch_load()
        for remote in self._targets:
            remote.require_writable()
            self._resume_from(remote)

    def _fetch_load(self) -> None:
        """Download what `load` names, where it is not the run's own `save`."""
        load = self.given.load
        if load is None or not is_url(load) or _is_save(self.given):
            return
        folder = fetch(load, self.given.iteration, self.given.checkpoint_cache)
        for step in native.begun_steps(folder.parent):
            if step > native.step_of(folder):  # was downloaded earlier, and is not in the store any more
                shutil.rmtree(native.step_folder(folder.parent, step))

    def _resume_from(self, remote: RemoteFolder) -> None:
        """Download the newest checkpoint where the run has none locally; refuse a store that holds another run."""
        assert self.local.save is not None
        save, steps = Path(self.local.save), remote.steps()
        if not steps:
            return
        local_steps = native.begun_steps(save)
        if local_steps:
            _refuse_other_runs(remote, runs_of(native.step_folder(save, step) for step in local_steps))
        elif self.given.auto_resume or (_loads(self.given, remote.url) and self.given.iteration is None):
            remote.download_newest(save, resumable=True)
        elif _loads(self.given, remote.url):
            assert self.given.iteration is not None
            remote.download(self.given.iteration, save, resumable=True)
        else:
            raise CheckpointError(
                f"{remote.url}: already holds a run, up to step {steps[-1]}; resume it with auto_resume=true, or choose "
                "another URL"
            )

    def _require_shared_folder(self) -> None:
        """Every rank writes to the local folder, and the first one uploads from it."""
        if self.local.save is None or dist.world_size() == 1:
            return
        mark = Path(self.local.save) / ".seen-by-all-ranks"
        self._on_first_rank(lambda: (mark.parent.mkdir(parents=True, exist_ok=True), mark.write_text("")))
        seen, _ = attempt(mark.stat, OSError)
        attempt(lambda: mark.unlink(missing_ok=True), OSError, main_only=True)
        if not seen:
            raise CheckpointError(
                f"checkpoint_cache: {self.local.checkpoint_cache} is not the same folder on all hosts, and checkpoints "
                "are put together there before they are uploaded; name a folder on a shared file system"
            )

    def _on_first_rank(self, action: Callable[[], Any]) -> None:
        def report() -> None:
            try:
                action()
            except OSError as error:
                raise CheckpointError(
                    f"checkpoint_cache: {self.local.checkpoint_cache} cannot be used ({error}); name another folder"
                ) from error

        from_main(report)


CHANGED_KEYS = (*URL_KEYS, "keep_last_n_checkpoints", "keep_every_n_steps")


def use_local_folders(config: Config) -> tuple[Config, RemoteCheckpoints]:
    """`config` with local folders in place of URLs, and the object stores that these stand for.

    Raises CheckpointError for a URL that no installed library can open.
    """
    given = config.checkpoint
    urls = {key: url for key in URL_KEYS if (url := getattr(given, key)) is not None and is_url(url)}
    if not urls:
        return config, RemoteCheckpoints(given, given)
    changed: dict[str, Any] = {key: str(local_folder(url, given.checkpoint_cache)) for key, url in urls.items()}
    if "load" in urls and not _is_save(given):
        run, step = split_step(urls["load"])
        read = read_folder(run, given.checkpoint_cache)
        changed["load"] = str(read if step is None else native.step_folder(read, step))
    if "save_copy" in urls:
        changed["save_copy"] = None
    if "save" in urls:
        kept = given.keep_last_n_checkpoints
        changed |= {"keep_last_n_checkpoints": min(kept or KEPT_LOCALLY, KEPT_LOCALLY), "keep_every_n_steps": None}
    localized = config.override(changed)
    remotes = {key: RemoteFolder(urls[key]) for key in ("save", "save_copy") if key in urls}
    return localized, RemoteCheckpoints(
        given, localized.checkpoint, save=remotes.get("save"), copy=remotes.get("save_copy")
    )


def _refuse_other_runs(remote: RemoteFolder, own: Iterable[str | None]) -> None:
    """Raise a CheckpointError where a store holds checkpoints of runs that are not among `own`."""
    for step in remote.steps():
        run = remote.read_json(step, native.META).get("run")
        if run not in own:
            raise CheckpointError(
                f"{remote.url}: step {step} was written by another run than this one; choose another URL, or remove the "
                "local folder of this run to resume the one in the store"
            )


def _is_save(given: CheckpointConfig) -> bool:
    """Whether `load` names the folder of `save`."""
    return given.load is not None and given.save is not None and given.load.rstrip("/") == given.save.rstrip("/")


def _loads(given: CheckpointConfig, url: str) -> bool:
    """Whether `load` resumes the run whose checkpoints are at `url`."""
    return not given.finetune and given.load is not None and given.load.rstrip("/") == url
