"""Saving and restoring checkpoints. A background thread writes a snapshot that was taken between two steps."""

import hashlib
import io
import logging
import math
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import torch
from safetensors import SafetensorError
from torch import Tensor

from megatron_coca.checkpoints import CheckpointError, native
from megatron_coca.checkpoints.native.state import (
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
from megatron_coca.checkpoints.weights import write_safetensors
from megatron_coca.config import CheckpointConfig
from megatron_coca.support.errors import why_not_written
from megatron_coca.training.checkpointing.remote_checkpoints import LAST_SECONDS
from megatron_coca.training.checkpointing.resume import StageStart, home_of_copy
from megatron_coca.training.collectives import attempt, from_main
from megatron_coca.training.engine import Engine
from megatron_coca.training.engine import group as dist
from megatron_coca.training.numerics import changes, numerics
from megatron_coca.training.opened_stages import OpenedStage
from megatron_coca.training.optimizer import QK_NORMS
from megatron_coca.training.randomness import load_rng_states, rng_states, seed_everything
from megatron_coca.training.run_context import RunContext
from megatron_coca.training.sinks import adopt_metrics

logger = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def is_due(step: int, config: CheckpointConfig) -> bool:
    """Return whether a checkpoint is due after `step` completed steps, according to the checkpoint keys.

    With `checkpoint_scale: log`, checkpoints are due after the powers of the factor, rounded down, as in GPT-NeoX.
    """
    factor = config.checkpoint_factor
    if step in (config.extra_save_iters or ()):
        return True
    if factor is None or step == 0:
        return False
    if config.checkpoint_scale == "linear":
        return step % factor == 0
    exponent = math.ceil(math.log(step) / math.log(factor))
    return any(int(factor**near) == step for near in (exponent - 1, exponent, exponent + 1))


class Snapshot(NamedTuple):
    """The state of one rank between two steps, in CPU memory that training does not modify."""

    step: int
    pieces: list[StatePiece]
    slices: dict[str, ParameterSlice]
    rng: dict[str, Any]
    meta: dict[str, Any]


class Checkpoints:
    """Saves and restores the checkpoints of one run.

    Every `meta.json` contains the run's id, which is drawn when a new run starts and kept when it is resumed.
    """

    def __init__(
        self,
        opened: OpenedStage,
        engine: Engine,
        context: RunContext,
        origin: str | None = None,
        adapts: native.AdaptedModel | None = None,
    ) -> None:
        """Every rank must call this. `origin` is the identity of the checkpoint with the run's initial weights, and
        `adapts` the model that the run's adapters change.
        """
        self._corpus, self._engine, self._shared = opened.corpus, engine, opened.shared
        self._topology, self._coordinates = context.topology, context.topology.coordinates(dist.rank())
        self._remotes, self._watchdog = context.remotes, context.watchdog
        self._keys, self._dtype = self._corpus.config.checkpoint, DTYPES[self._corpus.config.precision.dtype]
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._group = dist.background_group()
        self._buffers: dict[tuple[str, str, int], Tensor] = {}
        self._run, self._origin, self._adapts = uuid4().hex, origin, adapts
        self._versions = numerics(engine.device)  # only once, because this runs git

    @property
    def run(self) -> str:
        """The id of the run. Checkpoints contain the id of rank 0."""
        return self._run

    @property
    def failed(self) -> bool:
        """Whether the last save or an upload failed; `wait` raises the error."""
        return self._error is not None or self._remotes.failure is not None

    def restore(self, how: StageStart) -> dict[str, Any]:
        """Restore the engine and the random state from a checkpoint, and return its `meta.json`. Every rank must call
        this. Norms of queries and keys that are not in the checkpoint keep their initial weights and states. If the
        stage adds adapters, neither weights nor states are read, because the engine was built with the checkpoint's
        weights and the new adapters.

        Raises:
            CheckpointError: state that this rank needs is missing from the checkpoint or does not match.
        """
        folder, meta = how.folder, native.read_meta(how.folder, resumable=True)
        self._run, self._origin = str(from_main(lambda: self._own_id(folder, meta))), meta.get("origin")
        if dist.is_main():
            for line in changes(meta.get("versions") or {}, self._versions):
                logger.warning("resuming with a different %s: the run may differ in its last bits", line)
        slices = self._engine.parameter_slices()
        try:
            with StateReader(folder / native.STATE, native.state_files(folder)) as reader:
                for piece in self._engine.pieces():
                    added = how.adds_adapters or (how.adds_norms and QK_NORMS.search(piece.name))
                    if piece.kind != WEIGHT and (how.new_optimizer or added):
                        piece.tensor.zero_()
                    elif not added:
                        reader.fill(piece, slices[piece.name])
                        self._watchdog.beat(f"restoring {piece.name}")
            self._engine.restored(how.counters)
            if meta["topology"] == self._topology.layout():
                load_rng_states(folder / native.RNG / f"rank_{dist.rank()}.pt")
                return meta
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{folder}: cannot be read, although it was just verified ({error}); check the disk, and resume again"
            ) from error
        logger.warning(
            "saved with a different parallel layout (%s): new dropout masks are drawn", meta["topology"] or "GPT-NeoX"
        )
        seed_everything(self._corpus.config.seed + int(meta["step"]), self._topology.random_stream(dist.rank()))
        return meta

    def _own_id(self, folder: Path, meta: Mapping[str, Any]) -> str:
        """Return the id of the run that continues from the checkpoint in `folder`. A copy of a run gets a new id,
        because the metrics of both runs would otherwise be mixed. A local copy of a checkpoint in the object store of
        `save` keeps its id.
        """
        known, save = str(meta.get("run", self._run)), self._keys.save
        if save is None or self._remotes.holds(folder) or (home := home_of_copy(meta, save)) is None:
            return known
        logger.warning(
            "%s: continues a copy of the run in %s, which still has its checkpoints; the copy gets its own id, also at "
            "Weights & Biases",
            save,
            home,
        )
        own = uuid4().hex
        adopt_metrics(Path(save), known, own)
        return own

    def save(self, step: int, progress: Mapping[str, Any]) -> None:
        """Take a snapshot after `step` and start writing it. The result is a complete checkpoint or none. Every rank
        must call this.

        `progress` is the state of the training loop, as JSON values.

        Raises:
            CheckpointError: this checkpoint could not be written, or the previous one could not be written and its
                error has not been raised yet. Earlier checkpoints are unchanged.
        """
        if self._keys.save is None:
            return
        self._wait_for_save()  # the new snapshot reuses the buffers
        # A daemon thread, because it must not keep a failed process alive.
        job = Path(self._keys.save), self._snapshot(step, progress)
        self._thread = threading.Thread(target=self._write, args=job, name="background", daemon=True)
        self._thread.start()
        if not self._keys.async_save:
            self.wait()

    def catch_up(self, step: int) -> None:
        """Start to upload the checkpoint of `step`, from which the run resumes, and earlier checkpoints that the last
        launch did not upload.
        """
        self._remotes.deliver(step, catch_up=True)

    def wait(self, hurry: bool = False) -> None:
        """Wait until the save in progress is complete and uploaded. With `hurry`, failed uploads are not retried. Every
        rank must call this.

        Raises:
            ServiceError: the object store does not answer.
            CheckpointError: the checkpoint could not be written or uploaded. This is raised only once.
        """
        self._wait_for_save()
        self._remotes.wait(hurry)

    def _wait_for_save(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def leave(self) -> None:
        """After a failure of the training loop, wait a few seconds for the save in progress. The process would abort if
        it exited while the thread of the save is in a collective.
        """
        if self._thread is not None:
            self._thread.join(LAST_SECONDS)
        self._remotes.leave()

    def _snapshot(self, step: int, progress: Mapping[str, Any]) -> Snapshot:
        slices = self._engine.parameter_slices()
        pieces = [piece for piece in self._engine.pieces() if self._writes(piece.name, slices[piece.name])]
        if self._keys.async_save or torch.cuda.is_available():
            pieces = [piece._replace(tensor=self._copy(piece)) for piece in pieces]
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        mixture = self._corpus.mixture(step, self._shared["batch"])
        meta = {
            "step": step,
            "run": self._run,
            "save": None if self._keys.save is None else os.path.realpath(self._keys.save),
            "origin": self._origin,
            "data": self._corpus.identity,
            **self._shared,
            "topology": self._topology.layout(),
            "zero_stage": self._corpus.config.parallel.stage,
            "counters": self._engine.counters(),
            "progress": dict(progress),
            "mixture": [asdict(share) for share in mixture],
            "versions": self._versions,
        }
        if self._adapts is not None:
            meta["adapts"] = self._adapts.model_dump()
        return Snapshot(step, pieces, slices, rng_states(), meta)

    def _writes(self, name: str, parameter: ParameterSlice) -> bool:
        """Return whether this rank writes its slice of a parameter; only one replica is written."""
        first_tensor = parameter.shard is not None or self._coordinates.tensor == 0
        replica = not self._engine.partitioned and (self._coordinates.data or self._coordinates.sequence)
        return first_tensor and not replica and name not in self._engine.copies

    def _copy(self, piece: StatePiece) -> Tensor:
        key = (piece.kind, piece.name, piece.start)
        if key not in self._buffers:
            self._buffers[key] = torch.empty_like(piece.tensor, device="cpu", pin_memory=piece.tensor.is_cuda)
        return self._buffers[key].copy_(piece.tensor, non_blocking=True)

    def _write(self, root: Path, snapshot: Snapshot) -> None:
        """Write a snapshot in the background thread; `wait` raises an error that occurs here."""
        step, folder = snapshot.step, native.partial_folder(root, snapshot.step)
        own_files: dict[str, Any] = {}

        def beat(name: str) -> None:
            self._enter(f"step {step}: writing {name}")

        try:
            self._enter(f"step {step}: creating the folder")
            self._on_all_ranks(lambda: native.begin(root, step), root, step, main_only=True)
            self._enter(f"step {step}: writing the state")
            self._on_all_ranks(lambda: own_files.update(_write_own(folder, snapshot)), root, step)
            described = dist.merge_dicts(own_files, self._group)
            by_rank = dist.merge_dicts({str(dist.rank()): local_weights(snapshot.pieces, snapshot.slices)}, self._group)
            held = [[LocalWeight(*weight) for weight in by_rank[str(rank)]] for rank in range(len(by_rank))]
            transfer = WeightTransfer(folder, held, snapshot.pieces, self._dtype, self._group, beat)
            if dist.is_main():
                self._on_all_ranks(lambda: self._complete(root, snapshot, described, transfer), root, step)
                logger.info("saved %s", native.step_folder(root, step))
                self._remotes.deliver(step)
                self._prune(root)
            else:
                self._on_all_ranks(transfer.send, root, step)
        except BaseException as error:  # raised in the training thread
            self._error = error
        finally:
            self._watchdog.follow(None)

    def _enter(self, part: str) -> None:
        """Report the next part of a save to the watchdog, which ends the run if the part hangs."""
        self._watchdog.follow(f"saving {part}")

    def _on_all_ranks(self, action: Callable[[], Any], root: Path, step: int, main_only: bool = False) -> None:
        """Run `action` on every rank (or on rank 0), and raise an error on all ranks if it fails on any."""
        errors = (OSError, RuntimeError, SafetensorError, CheckpointError)
        failure = attempt(action, errors, main_only, self._group)
        if failure is not None:
            if dist.is_main():
                native.abandon(root, step)
            newest = native.steps(root)[-1:] or "none"
            raise CheckpointError(
                f"{root}: the checkpoint of step {step} {why_not_written(failure, 'choose another save folder')}; "
                f"earlier checkpoints are intact (newest: {newest}), and auto_resume=true resumes from the newest one"
            ) from failure

    def _complete(
        self, root: Path, snapshot: Snapshot, described: Mapping[str, Any], transfer: "WeightTransfer"
    ) -> None:
        """On rank 0, after all ranks have written their state, add the other files and commit the checkpoint."""
        folder = native.partial_folder(root, snapshot.step)
        weights_path, digest = folder / native.WEIGHTS, hashlib.sha256()
        try:
            write_safetensors(weights_path, weights(transfer.reader, self._dtype, folder), digest=digest)
        finally:
            transfer.drain()
        self._enter(f"step {snapshot.step}: completing the checkpoint")
        native.flush(weights_path)
        weights_entry = {"size": weights_path.stat().st_size, "sha256": digest.hexdigest()}
        config = self._remotes.given_in(self._corpus.config)
        (folder / native.CONFIG).write_text(config.record(), encoding="utf-8")
        # safetensors creates files that only their owner can read
        for name in (native.WEIGHTS, *(name for name in described if name.endswith(".safetensors"))):
            shutil.copymode(folder / native.CONFIG, folder / name)
        native.write_json(folder / native.META, snapshot.meta)
        if self._corpus.tokenizer is not None:
            self._corpus.tokenizer.save(folder / native.TOKENIZER)
        native.commit(root, snapshot.step, {**described, native.WEIGHTS: weights_entry})

    def _prune(self, root: Path) -> None:
        """Remove old checkpoints, except those that are not uploaded yet."""
        keys = self._keys
        try:
            kept = self._remotes.owed()
            if self._adapts is not None and self._adapts.is_beside:
                kept.add(native.step_of(Path(self._adapts.place)))
            native.prune(root, keys.keep_last_n_checkpoints, keys.keep_every_n_steps, kept)
        except OSError as error:
            logger.warning("%s: an old checkpoint could not be removed (%s)", root, error)


class WeightTransfer:
    """Sends all weights from the ranks' memory to the file that rank 0 writes. No weights are read back from disk.

    On rank 0, `reader` reads each weight once, in the order in which the other ranks send them.
    """

    def __init__(
        self,
        folder: Path,
        held: Sequence[Sequence[LocalWeight]],
        pieces: Sequence[StatePiece],
        dtype: torch.dtype,
        group: Any,
        beat: Callable[[str], None],
    ) -> None:
        """`held` lists the weights of each rank, `pieces` are this rank's weights, and `dtype` is the file's dtype."""
        self._own = {(piece.name, piece.start): piece.tensor for piece in pieces if piece.kind == WEIGHT}
        self._dtype, self._group, self._beat = dtype, group, beat
        self.reader = LocalWeightReader(folder, held, self._fetch)
        self._fetched = 0

    def send(self) -> None:
        """Send this rank's weights to rank 0."""
        for rank, weight in self.reader.order:
            if rank == dist.rank():
                self._beat(weight.name)
                dist.send_to_main(self._own[weight.name, weight.start].to(self._dtype), self._group)

    def drain(self) -> None:
        """On rank 0, receive the weights that were not read because writing failed, so that the senders do not hang."""
        while self._fetched < len(self.reader.order):
            self._fetch(*self.reader.order[self._fetched])

    def _fetch(self, rank: int, weight: LocalWeight) -> Tensor:
        self._fetched += 1
        self._beat(weight.name)
        if rank == dist.rank():
            return self._own[weight.name, weight.start].to(self._dtype)
        return dist.receive(rank, weight.numel, self._dtype, self._group)


def _write_own(folder: Path, snapshot: Snapshot) -> dict[str, Any]:
    """Write and flush the files of this rank, and return their manifest entries."""
    rng = folder / native.RNG / f"rank_{dist.rank()}.pt"
    state = folder / native.STATE / file_name(dist.rank())
    for path in (rng, state):
        path.parent.mkdir(exist_ok=True)
    buffer = io.BytesIO()
    torch.save(snapshot.rng, buffer)  # if torch.save wrote the file, its error would not name a full disk
    rng.write_bytes(buffer.getvalue())
    if snapshot.pieces:
        write_pieces(state, snapshot.pieces, snapshot.slices)
    files = [rng, state] if snapshot.pieces else [rng]
    for path in files:
        native.flush(path)
    return {str(path.relative_to(folder)): native.describe(path) for path in files}
