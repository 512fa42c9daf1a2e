"""When a run is saved, what goes into its checkpoints, and how it starts: fresh, resumed or from given weights."""

import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.nn as nn
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import save_file

from megatron_coca.checkpoints import CheckpointError, huggingface, native
from megatron_coca.checkpoints.compare import differing_keys
from megatron_coca.checkpoints.load import load_checkpoint, load_weights
from megatron_coca.checkpoints.versions import code_versions
from megatron_coca.config import CheckpointConfig, Config, load_config
from megatron_coca.training import engine as dist
from megatron_coca.training import rng
from megatron_coca.training.corpus import Corpus
from megatron_coca.training.engine import Engine
from megatron_coca.training.identity import differing_data

logger = logging.getLogger(__name__)

MODEL_PREFIX = "model."
"""The language model's name inside the trained module (LanguageModelLoss)."""

FREE_GROUPS = frozenset({"schedule", "data", "batch", "parallel", "checkpoint", "logging", "launch"})
FREE_KEYS = frozenset({"attention_backend", "operand_kernel", "checkpoint_activations", "optimizer.params.lr"})
"""What may change when a run is resumed. Of these, data, batch and parallel layout are checked by what they amount
to (meta.json).
"""


def is_due(step: int, config: CheckpointConfig) -> bool:
    """Whether the checkpoint keys ask for one after `step` completed iterations."""
    if step in (config.extra_save_iters or ()):
        return True
    factor = config.checkpoint_factor
    if factor is None:
        return False
    return step % factor == 0 if config.checkpoint_scale == "linear" else _is_power(step, factor)


def _is_power(step: int, factor: int) -> bool:
    power = 1
    while power < step and factor > 1:
        power *= factor
    return power == step


def starting_point(config: CheckpointConfig) -> Path | None:
    """The checkpoint to resume from, or None for a fresh start.

    `load` naming the folder of `save` while that holds nothing yet is a first start, so that one command serves
    first and later launches.

    Raises:
        CheckpointError: `load` holds no checkpoint, or `save` holds some that a fresh run would mix with its own.
    """
    folder, save = _folder_to_resume(config), Path(config.save) if config.save is not None else None
    if save is not None and native.steps(save) and (folder is None or folder.resolve().parent != save.resolve()):
        raise CheckpointError(
            f"{save}: already holds a run, up to step {native.steps(save)[-1]}; resume it with load={save}, or choose another save folder"
        )
    return folder


def _folder_to_resume(config: CheckpointConfig) -> Path | None:
    if config.load is None or config.finetune:
        return None
    if huggingface.is_huggingface_folder(Path(config.load)):
        raise CheckpointError(
            f"{config.load}: a Hugging Face folder has no optimizer state; set finetune=true to start from its weights"
        )
    same = config.save is not None and Path(config.load).resolve() == Path(config.save).resolve()
    if same and not native.steps(Path(config.load)):
        return None
    return native.locate(config.load, config.iteration)


def load_initial_weights(model: nn.Module, config: CheckpointConfig) -> None:
    """With `finetune`, copy the weights that `load` names into a fresh model."""
    if config.finetune and config.load is not None:
        source = load_checkpoint(native.locate(config.load, config.iteration) if config.iteration else config.load)
        load_weights(model, source.model.state_dict(), Path(config.load))


def refuse_other_run(folder: Path, corpus: Corpus, layout: dict[str, Any]) -> None:
    """Raise a CheckpointError naming all that makes the checkpoint in `folder` another run than the one configured."""
    saved = load_config([folder / native.CONFIG])
    meta = native.read_json(folder / native.META)
    problems = differing_keys(saved, corpus.config, FREE_KEYS, FREE_GROUPS)
    problems += differing_data(meta.get("data") or {}, corpus.identity, [str(s.prefix) for s in corpus.train.shards])
    problems += [
        f"{key} (saved {meta.get(key)!r}, now {value!r})" for key, value in layout.items() if meta.get(key) != value
    ]
    if problems:
        raise CheckpointError(
            f"{folder}: cannot be resumed with another {', '.join(problems)}; "
            "restore these, or start a new run from its weights with finetune=true"
        )
    for line in differing_keys(saved, corpus.config, frozenset(), FREE_GROUPS - {"schedule"}):
        logger.warning("resuming with another %s", line)


def _attempt(
    action: Callable[[], Any], errors: type[Exception] | tuple[type[Exception], ...], main_only: bool
) -> tuple[bool, Exception | None]:
    """Run `action` on every rank, or on the first: whether it succeeded on all, and the error of this one."""
    failure = None
    try:
        if dist.is_main() or not main_only:
            action()
    except errors as error:
        failure = error
    return dist.everyone_succeeded(failure is None), failure


def verify(folder: Path) -> None:
    """Check the checkpoint's files against its manifest, once for all ranks; a CheckpointError on every rank if one is bad."""
    succeeded, failure = _attempt(lambda: native.verify(folder), CheckpointError, main_only=True)
    if not succeeded:
        raise failure or CheckpointError(f"{folder}: is damaged (the first process says how)")


def require_writable(config: Config) -> None:
    """Make the folders of `save` and `log_dir` and write to them, so that a run that could not fails before it trains.

    Every rank must call it.

    Raises:
        CheckpointError: one of them cannot be written.
    """
    folders = [folder for folder in (config.checkpoint.save, config.logging.log_dir) if folder is not None]

    def probe_folders() -> None:
        for folder in folders:
            Path(folder).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as probe:
                probe.write(b"x")

    succeeded, failure = _attempt(probe_folders, OSError, main_only=True)
    if not succeeded:
        raise CheckpointError(
            f"{' or '.join(folders)}: cannot be written ({failure or 'the first process says why'}); choose another folder"
        ) from failure


@contextmanager
def exclusive(save: str | None) -> Iterator[None]:
    """Hold the `save` folder for this run; the lock goes with the process, however it ends. Every rank must call it.

    Raises:
        CheckpointError: another run is training into the folder.
    """
    lock = FileLock(Path(save) / native.LOCK, timeout=0) if save is not None and dist.is_main() else None
    held, _ = _attempt(lambda: lock and lock.acquire(), Timeout, main_only=True)
    if not held:
        raise CheckpointError(f"{save}: another run is training into this folder; wait for it, or choose another")
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, corpus: Corpus, engine: Engine, layout: dict[str, Any]) -> None:
        """`layout` is what the engine's state depends on and a resumed run must share: world size, ZeRO stage,
        batch, dtype.
        """
        self._corpus, self._engine, self._layout = corpus, engine, layout
        self._config: Config = corpus.config

    def restore(self, folder: Path) -> int:
        """Bring engine and random state to where the checkpoint was taken; returns its step. Every rank must call
        it.
        """
        meta = native.read_json(folder / native.META)
        self._engine.load(folder / native.ENGINE)
        rng.load_states(folder / native.RNG / f"rank_{dist.rank()}.pt")
        return int(meta["step"])

    def save(self, step: int) -> None:
        """Write the checkpoint of `step`; complete or absent. Every rank must call it.

        Raises:
            CheckpointError: a rank could not write; earlier checkpoints are untouched.
        """
        if self._config.checkpoint.save is None:
            return
        root = Path(self._config.checkpoint.save)
        self._together(lambda: native.begin(root, step), root, step, main_only=True)
        self._together(lambda: self._fill(root, step), root, step)
        self._together(lambda: native.commit(root, step), root, step, main_only=True)
        if dist.is_main():
            native.prune(root, self._config.checkpoint.keep_last_n_checkpoints)
            logger.info("saved %s", native.step_folder(root, step))

    def _together(self, action: Callable[[], Any], root: Path, step: int, main_only: bool = False) -> None:
        """Run `action` on every rank (or the first), and fail on all where it fails on one."""
        succeeded, failure = _attempt(action, (OSError, RuntimeError, SafetensorError), main_only)
        if not succeeded:
            if dist.is_main():
                native.abandon(root, step)
            newest = native.steps(root)[-1:] or "none"
            raise CheckpointError(
                f"{root}: the checkpoint of step {step} could not be written ({failure or 'on another rank'}); "
                f"earlier ones are intact (newest: {newest})"
            ) from failure

    def _fill(self, root: Path, step: int) -> None:
        folder = native.partial_folder(root, step)
        self._engine.save(folder / native.ENGINE)
        weights = self._engine.weights()
        (folder / native.RNG).mkdir(exist_ok=True)
        rng.save_states(folder / native.RNG / f"rank_{dist.rank()}.pt")
        if not dist.is_main():
            return
        save_file(
            {name.removeprefix(MODEL_PREFIX): tensor for name, tensor in weights.items()}, folder / native.WEIGHTS
        )
        (folder / native.CONFIG).write_text(self._config.to_yaml())
        shutil.copymode(
            folder / native.CONFIG, folder / native.WEIGHTS
        )  # safetensors leaves its file to the owner alone
        native.write_json(folder / native.META, self._meta(step))
        if self._corpus.tokenizer is not None:
            self._corpus.tokenizer.save(folder / native.TOKENIZER)

    def _meta(self, step: int) -> dict[str, Any]:
        taken = self._corpus.train.mixture(step * self._layout["batch"])
        mixture = [asdict(share) for share in taken]
        return {
            "step": step,
            "data": self._corpus.identity,
            **self._layout,
            "mixture": mixture,
            "versions": code_versions(),
        }
