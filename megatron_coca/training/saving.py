"""When a run is saved, and how: a copy of the state is taken between two steps and written while training goes on."""

import hashlib
import json
import logging
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from megatron_coca.checkpoints import CheckpointError, native
from megatron_coca.checkpoints.errors import UnreadableError
from megatron_coca.checkpoints.native import code_versions
from megatron_coca.checkpoints.state import (
    WEIGHT,
    LocalWeight,
    LocalWeightReader,
    ParameterSlice,
    StatePiece,
    StateReader,
    file_name,
    local_weights,
    weights,
    write_pieces,
)
from megatron_coca.checkpoints.weights import Weights, write_safetensors
from megatron_coca.config import CheckpointConfig
from megatron_coca.training import engine as dist
from megatron_coca.training.collectives import attempt
from megatron_coca.training.corpus import Corpus
from megatron_coca.training.engine import Engine
from megatron_coca.training.loss_guard import DataSkips
from megatron_coca.training.remote_checkpoints import RemoteCheckpoints
from megatron_coca.training.topology import Topology
from megatron_coca.training.watchdog import Watchdog


class Background:
    """Runs jobs in a thread, one after the other. The thread does not keep a process alive that fails."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def failed(self) -> bool:
        """Whether the last job has ended in an error that `wait` will raise."""
        return self._failure is not None

    @property
    def busy(self) -> bool:
        """Whether a job is in progress."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, job: Callable[[], None]) -> None:
        """Begin `job`; waits for the one before it, and raises its error."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(job,), name="background", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the job in progress, if any; raises its error, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def leave(self, seconds: float) -> None:
        """Give a job in progress some seconds to end, before a process that failed ends under it."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - handed to the training thread, whatever it is
            self._failure = error


def seed_everything(seed: int, stream: int) -> None:
    """Seed this process's generators; ranks of different streams differ, so that their dropout masks do."""
    random.seed(seed + stream)
    np.random.seed((seed + stream) % 2**32)
    torch.manual_seed(seed + stream)


def states() -> dict[str, Any]:
    """The states of Python, NumPy, PyTorch and, where there is one, this process's GPU."""
    kind, keys, *rest = np.random.get_state()
    return {
        "python": json.dumps(random.getstate()),
        "numpy": json.dumps([kind, keys.tolist(), *rest]),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def load_states(path: Path) -> None:
    """Restore what `states` gave, from the file that `torch.save` wrote."""
    states = torch.load(path, weights_only=True, map_location="cpu")
    version, internal, gauss = json.loads(states["python"])
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = json.loads(states["numpy"])
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


logger = logging.getLogger(__name__)

LAST_SECONDS = 5.0
"""What a run that failed waits for its last checkpoint. A thread within a collective when the process ends aborts it."""
SLOW_SECONDS = 60.0
"""In which a save should reach its next stage; after that there is a warning, and again after twice the time."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def is_due(step: int, config: CheckpointConfig) -> bool:
    """Whether the checkpoint keys ask for one after `step` completed iterations."""
    if step in (config.extra_save_iters or ()):
        return True
    factor = config.checkpoint_factor
    if factor is None:
        return False
    return step % factor == 0 if config.checkpoint_scale == "linear" else _is_power(step, factor)


def due_steps(config: CheckpointConfig, start: int, last: int) -> set[int]:
    """The steps beyond `start` at which a run that ends with step `last` writes a checkpoint: those of `is_due`, and
    `last`.
    """
    found = {step for step in (*(config.extra_save_iters or ()), last) if start < step <= last}
    factor = config.checkpoint_factor
    if factor is not None and config.checkpoint_scale == "linear":
        found |= set(range(start - start % factor + factor, last + 1, factor))
    elif factor is not None:
        power = 1
        while power <= last:
            found |= {power} if power > start else set()
            power = power * factor if factor > 1 else last + 1
    return found


def _is_power(step: int, factor: int) -> bool:
    power = 1
    while power < step and factor > 1:
        power *= factor
    return power == step


@dataclass(frozen=True)
class Snapshot:
    """The state of one rank between two steps, in CPU memory that training does not touch."""

    step: int
    pieces: list[StatePiece]
    places: dict[str, ParameterSlice]
    random: dict[str, Any]
    meta: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run.

    Every `meta.json` names the run by an identity of its own, which is drawn at a fresh start and carried on by resumes.
    """

    def __init__(
        self,
        corpus: Corpus,
        engine: Engine,
        topology: Topology,
        layout: Mapping[str, Any],
        origin: str | None = None,
        watchdog: Watchdog | None = None,
        remotes: RemoteCheckpoints | None = None,
    ) -> None:
        """`layout` is what a resumed run must share: samples of a step, number format; `origin` the identity of the
        checkpoint whose weights the run began with. `watchdog` is told of the progress of saving and restoring;
        `remotes` are the object stores to upload to. Every rank must call it.
        """
        self._corpus, self._engine, self._layout = corpus, engine, dict(layout)
        self._topology, self._place = topology, topology.coordinates(dist.rank())
        self._keys = corpus.config.checkpoint
        self._remotes = remotes or RemoteCheckpoints(self._keys, self._keys)
        self._background = Background()
        self._group = dist.background_group()
        self._buffers: dict[tuple[str, str, int], Tensor] = {}
        self._run, self._origin = uuid4().hex, origin
        self._versions = code_versions()  # asks git, and those of a running process do not change
        self._watchdog = watchdog or Watchdog(None, None, dist.rank())
        self._stage, self._stage_began, self._warn_after = "", 0.0, SLOW_SECONDS
        self._folder = _identity(self._keys.save)

    @property
    def failed(self) -> bool:
        """Whether a checkpoint could not be written; `wait` says why."""
        return self._background.failed

    def restore(self, folder: Path) -> dict[str, Any]:
        """Bring engine and random state to where the checkpoint was taken; returns its `meta.json`. Every rank must
        call it.

        Raises:
            CheckpointError: the state does not hold all that this rank needs.
        """
        meta = native.read_json(folder / native.META)
        self._run, self._origin = meta.get("run", self._run), meta.get("origin")
        places = self._engine.places()
        try:
            with StateReader(folder / native.STATE, native.state_files(folder)) as reader:
                for piece in self._engine.pieces():
                    reader.fill(piece, places[piece.name])
                    self._watchdog.beat(f"restoring {piece.name}")
            self._engine.restored(meta["counters"])
            if meta["topology"] == self._topology.layout():
                load_states(folder / native.RNG / f"rank_{dist.rank()}.pt")
                return meta
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{folder}: cannot be read any more, though it was valid just now ({error})"
            ) from error
        logger.warning("another division among processes than %s: dropout draws anew", meta["topology"])
        seed_everything(self._corpus.config.seed + int(meta["step"]), self._topology.random_stream(dist.rank()))
        return meta

    def save(self, step: int, progress: Mapping[str, Any]) -> None:
        """Take the state after `step` and begin to write it; complete or absent. Every rank must call it.

        `progress` is what the loop keeps beside the engine, as JSON can hold it.

        Raises:
            CheckpointError: this one, or the one before it where this is the first call since, could not be written;
                earlier checkpoints are untouched.
        """
        if self._keys.save is None:
            return
        root = Path(self._keys.save)
        self.wait()  # its buffers are used again
        snapshot = self._snapshot(step, progress)
        self._background.start(lambda: self._write(root, snapshot))
        if not self._keys.async_save:
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint in progress is complete.

        Raises:
            CheckpointError: it could not be written.
        """
        self._background.wait()

    def warn_if_slow(self) -> None:
        """Name the stage of a save in progress that takes very long: it may hang."""
        taken = time.monotonic() - self._stage_began
        if self._background.busy and taken >= self._warn_after:
            self._warn_after *= 2
            logger.warning(
                "%s: %s has taken %.0f s and is not done; the file system may hang", self._keys.save, self._stage, taken
            )

    def folder_lost(self) -> tuple[bool, bool]:
        """Whether the folder of `save` is not the one that the run began with, and whether another one with checkpoints
        lies in its place.
        """
        if self._folder is None or self._keys.save is None:
            return False, False
        try:
            now = _identity(self._keys.save)
            lost = now != self._folder
            return lost, lost and bool(native.begun_steps(Path(self._keys.save)))
        except (OSError, UnreadableError) as error:
            logger.warning("%s: cannot be looked at (%s)", self._keys.save, error)
            return False, False

    def leave(self) -> None:
        """Let a checkpoint in progress be completed, if that is soon: the training loop has failed."""
        self._background.leave(LAST_SECONDS)

    def _snapshot(self, step: int, progress: Mapping[str, Any]) -> Snapshot:
        places = self._engine.places()
        own = [piece for piece in self._engine.pieces() if self._writes(piece.name, places[piece.name])]
        if self._keys.async_save or torch.cuda.is_available():
            own = [piece._replace(tensor=self._copied(piece)) for piece in own]
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return Snapshot(step, own, places, states(), self._meta(step, progress))

    def _writes(self, name: str, place: ParameterSlice) -> bool:
        """Whether this rank writes what it holds of a parameter: copies of the same are written once."""
        first_tensor = place.shard is not None or self._place.tensor == 0
        replica = not self._engine.partitioned and (self._place.data or self._place.sequence)
        return first_tensor and not replica and name not in self._engine.copies

    def _copied(self, piece: StatePiece) -> Tensor:
        key = (piece.kind, piece.name, piece.start)
        if key not in self._buffers:
            self._buffers[key] = torch.empty_like(piece.tensor, device="cpu", pin_memory=piece.tensor.is_cuda)
        return self._buffers[key].copy_(piece.tensor, non_blocking=True)

    def _write(self, root: Path, snapshot: Snapshot) -> None:
        try:
            self._write_watched(root, snapshot)
        finally:
            self._watchdog.follow(None)

    def _write_watched(self, root: Path, snapshot: Snapshot) -> None:
        step, written = snapshot.step, {}
        folder = native.partial_folder(root, step)
        self._reach(f"step {step}: making its folder")
        self._together(lambda: native.begin(root, step), root, step, main_only=True)
        self._reach(f"step {step}: writing the state")
        self._together(lambda: written.update(_write_own(folder, snapshot)), root, step)
        described = dist.merge_dicts(written, self._group)
        transfer = self._transfer(folder, snapshot)
        if dist.is_main():
            self._together(lambda: self._complete(root, snapshot, described, transfer), root, step)
            self._after(root, step)
        else:
            self._together(transfer.send, root, step)
        if self._remotes:
            self._reach(f"step {step}: uploading", watched=False)
            self._upload(root, step)

    def _reach(self, what: str, watched: bool = True) -> None:
        """The background thread begins the stage `what` of a save. The watchdog ends the run where one that is `watched`
        makes no progress.
        """
        self._stage, self._stage_began, self._warn_after = what, time.monotonic(), SLOW_SECONDS
        self._watchdog.follow(f"saving {what}" if watched else None)

    def _transfer(self, folder: Path, snapshot: Snapshot) -> "WeightTransfer":
        own = local_weights(snapshot.pieces, snapshot.places)
        everyones = dist.merge_dicts({str(dist.rank()): own}, self._group)
        held = [[LocalWeight(*each) for each in everyones[str(rank)]] for rank in range(len(everyones))]
        dtype = DTYPES[self._corpus.config.precision.dtype]

        def reached(name: str) -> None:
            self._reach(f"step {snapshot.step}: writing {name}")

        return WeightTransfer(folder, held, snapshot.pieces, dtype, self._group, reached)

    def _together(self, action: Callable[[], Any], root: Path, step: int, main_only: bool = False) -> None:
        """Run `action` on every rank (or the first), and fail on all where it fails on one."""
        errors = (OSError, RuntimeError, SafetensorError, CheckpointError)
        succeeded, failure = attempt(action, errors, main_only, self._group)
        if not succeeded:
            if dist.is_main():
                native.abandon(root, step)
            newest = native.steps(root)[-1:] or "none"
            raise CheckpointError(
                f"{root}: the checkpoint of step {step} could not be written ({failure or 'on another rank'}); "
                f"earlier ones are intact (newest: {newest})"
            ) from failure

    def _upload(self, root: Path, step: int) -> None:
        """Upload what is complete locally, and fail on all ranks where it fails."""
        uploaded, failure = attempt(
            lambda: self._remotes.upload(step), CheckpointError, main_only=True, group=self._group
        )
        if not uploaded:
            raise CheckpointError(
                f"{native.step_folder(root, step)}: is complete, but could not be uploaded "
                f"({failure or 'see the log of rank 0'}); the same command with auto_resume=true goes on from it"
            ) from failure

    def _complete(
        self, root: Path, snapshot: Snapshot, described: Mapping[str, Any], transfer: "WeightTransfer"
    ) -> None:
        """What the first rank adds once all others have written."""
        folder = native.partial_folder(root, snapshot.step)
        digest = hashlib.sha256()
        try:
            write_safetensors(folder / native.WEIGHTS, transfer.weights(), digest=digest)
        finally:
            transfer.drain()
        self._reach(f"step {snapshot.step}: completing the checkpoint")
        native.flush(folder / native.WEIGHTS)
        size = (folder / native.WEIGHTS).stat().st_size
        (folder / native.CONFIG).write_text(self._remotes.given_in(self._corpus.config).to_yaml())
        # safetensors leaves its files to the owner alone
        for name in (native.WEIGHTS, *(name for name in described if name.endswith(".safetensors"))):
            shutil.copymode(folder / native.CONFIG, folder / name)
        native.write_json(folder / native.META, snapshot.meta)
        if self._corpus.tokenizer is not None:
            self._corpus.tokenizer.save(folder / native.TOKENIZER)
        weights_file = {native.WEIGHTS: {"size": size, "sha256": digest.hexdigest()}}
        native.commit(root, snapshot.step, {**described, **weights_file})

    def _after(self, root: Path, step: int) -> None:
        """Make room, and copy. What fails of this is told and tried again with the next checkpoint."""
        logger.info("saved %s", native.step_folder(root, step))
        self._prune(root)
        if self._keys.save_copy is None:
            return
        copies = Path(self._keys.save_copy)
        self._reach(f"step {step}: copying to {copies}", watched=False)  # a run does not need its copies
        try:
            native.copy(native.step_folder(root, step), copies)
        except (OSError, CheckpointError) as error:
            native.abandon(copies, step)
            logger.warning("%s: step %d could not be copied (%s)", copies, step, error)
        else:
            self._prune(copies)

    def _prune(self, folder: Path) -> None:
        try:
            native.prune(folder, self._keys.keep_last_n_checkpoints, self._keys.keep_every_n_steps)
        except OSError as error:
            logger.warning("%s: an old checkpoint could not be removed (%s)", folder, error)

    def _meta(self, step: int, progress: Mapping[str, Any]) -> dict[str, Any]:
        reached = DataSkips.restore(progress.get("skips", ())).position(step)
        taken = self._corpus.train.mixture(reached * self._layout["batch"])
        return {
            "step": step,
            "run": self._run,
            "origin": self._origin,
            "data": self._corpus.identity,
            **self._layout,
            "topology": self._topology.layout(),
            "zero_stage": self._corpus.config.parallel.stage,
            "counters": self._engine.counters(),
            "progress": dict(progress),
            "mixture": [asdict(share) for share in taken],
            "versions": self._versions,
        }


class WeightTransfer:
    """The way of all weights from the memory of the ranks into the first one's file, in the file's dtype. Nothing is read
    again from disk.
    """

    def __init__(
        self,
        folder: Path,
        held: Sequence[Sequence[LocalWeight]],
        pieces: Sequence[StatePiece],
        dtype: torch.dtype,
        group: Any,
        reached: Callable[[str], None],
    ) -> None:
        """`held` by rank; `pieces` are this rank's own, `group` is a background group. `reached` is told of each weight."""
        self._own = {(piece.name, piece.start): piece.tensor for piece in pieces if piece.kind == WEIGHT}
        self._dtype, self._group, self._folder, self._reached = dtype, group, folder, reached
        self._reader = LocalWeightReader(folder, held, self._fetch)
        self._fetched = 0

    def weights(self) -> Weights:
        """On the first rank: all weights in the order in which the others send them, to be read once."""
        return weights(self._reader, self._dtype, self._folder)

    def send(self) -> None:
        """On the other ranks: give what this one has."""
        for rank, stretch in self._reader.order:
            if rank == dist.rank():
                self._reached(stretch.name)
                dist.send_to_main(self._local(stretch), self._group)

    def drain(self) -> None:
        """On the first rank: take what is not read, so that no other rank waits for ever where writing has failed."""
        while self._fetched < len(self._reader.order):
            self._fetch(*self._reader.order[self._fetched])

    def _fetch(self, rank: int, stretch: LocalWeight) -> Tensor:
        self._fetched += 1
        self._reached(stretch.name)
        if rank == dist.rank():
            return self._local(stretch)
        return dist.receive(rank, stretch.numel, self._dtype, self._group)

    def _local(self, stretch: LocalWeight) -> Tensor:
        return self._own[stretch.name, stretch.start].to(self._dtype)


def _identity(folder: str | None) -> tuple[int, int] | None:
    """Device and inode of a folder; None where there is none."""
    try:
        status = os.stat(folder) if folder is not None else None
    except (FileNotFoundError, NotADirectoryError):
        return None
    return None if status is None else (status.st_dev, status.st_ino)


def _write_own(folder: Path, snapshot: Snapshot) -> dict[str, Any]:
    """Write a rank's own files to disk; returns what a manifest says of them."""
    random = folder / native.RNG / f"rank_{dist.rank()}.pt"
    state = folder / native.STATE / file_name(dist.rank())
    for path in (random, state):
        path.parent.mkdir(exist_ok=True)
    torch.save(snapshot.random, random)
    files = [random]
    if snapshot.pieces:
        write_pieces(state, snapshot.pieces, snapshot.places)
        files.append(state)
    for path in files:
        native.flush(path)
    return {str(path.relative_to(folder)): native.describe(path) for path in files}
