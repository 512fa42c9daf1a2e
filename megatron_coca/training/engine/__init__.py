"""The only package that imports DeepSpeed: the process group of a run, and the engine that trains a model in it."""

import os

import torch

# DeepSpeed looks for an accelerator when it is imported, and warns if it finds none.
os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")

from megatron_coca.training.engine.engine import Engine, StepResult, build_engine, deepspeed_config
from megatron_coca.training.engine.label_weights import HeldOutLoss, label_weights
