"""The only package that imports DeepSpeed: the process group of a run, and the engine that trains a model in it."""

# ruff: noqa: E402
import os

import torch

# DeepSpeed searches for an accelerator at import, and warns if it finds none.
os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")

from megatron_coca.training.engine.engine import Engine, StepResult, build_engine, deepspeed_config
from megatron_coca.training.engine.group import (
    anyone,
    background_group,
    barrier,
    broadcast_text,
    everyone_succeeded,
    gather_floats,
    gather_texts,
    host_name,
    init_distributed,
    is_main,
    local_device,
    merge_dicts,
    rank,
    receive,
    send_to_main,
    shut_down,
    sum_over_ranks,
    timed_sum,
    world_size,
)

__all__ = [
    "Engine",
    "StepResult",
    "anyone",
    "background_group",
    "barrier",
    "broadcast_text",
    "build_engine",
    "deepspeed_config",
    "everyone_succeeded",
    "gather_floats",
    "gather_texts",
    "host_name",
    "init_distributed",
    "is_main",
    "local_device",
    "merge_dicts",
    "rank",
    "receive",
    "send_to_main",
    "shut_down",
    "sum_over_ranks",
    "timed_sum",
    "world_size",
]
