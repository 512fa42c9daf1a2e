"""Measurements on the stand-in device: a training step, and the model alone. Runs where `device.recording` does."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_coca.config import Config, load_config
from megatron_coca.data import Batch
from megatron_coca.model import LanguageModelLoss, build_model
from megatron_coca.training import launch
from megatron_coca.training.engine import Engine, group, state
from megatron_coca.training.optimizer import build_optimizer
from tests.pretend.device import Record, recording

WARMUP = 2
"""Uncounted steps: the first ones allocate memory and build tables."""
RATE = 1e-4


def join_group() -> None:
    """Join a process group of this process alone, and replace what the stand-in device cannot compute.

    `in_known_order` compares values that kernels would have computed: the only check of the training path that fails
    here, because the copies of the weights in other dtypes were never filled.
    """
    os.environ.setdefault("MASTER_PORT", "0")
    launch.complete_environment(os.environ)
    group.init_distributed()
    state.in_known_order = lambda optimizer: True


def load(inputs: Sequence[str], *keys: str) -> Config:
    """Load YAML files and `key=value` pairs, in any order, then `keys`."""
    pairs = [text for text in inputs if "=" in text]
    return load_config([text for text in inputs if "=" not in text], [*pairs, *keys])


def engine_step(config: Config) -> Callable[[], None]:
    """Return one optimizer step of the engine that `train.py` uses, on random tokens."""
    model = build_model(config, group.local_device()).train()
    optimizer = build_optimizer(model, config.optimizer)
    sizes = config.batch.resolve(1)
    engine = Engine(LanguageModelLoss(model), optimizer, config, sizes)
    shape = (sizes.micro, config.model.seq_length + 1)
    tokens = np.random.default_rng(0).integers(config.model.vocab_size, size=shape)

    def step() -> None:
        engine.train_step([Batch(tokens) for _ in range(sizes.accumulation)], RATE)

    return step


@dataclass
class Step:
    """A recorded step, and the time that the host took for it."""

    record: Record
    milliseconds: float


def record_step(step: Callable[[], None], log: bool = False) -> Step:
    """Record one call of a step after warm-up."""
    for _ in range(WARMUP):
        step()
    torch.cuda.synchronize()
    with recording(log) as record:
        start = time.process_time()
        step()
        seconds = time.process_time() - start
    return Step(record, 1e3 * seconds)
