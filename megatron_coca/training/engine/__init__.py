"""The only package that imports DeepSpeed: the process group of a run, and the engines that train a model in it.

`build_engine` imports DeepSpeed for a run that uses it.
"""

import os

import torch

# DeepSpeed looks for an accelerator when it is imported, and warns if it finds none.
os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")

from megatron_coca.training.engine.build import build_engine
from megatron_coca.training.engine.label_weights import HeldOutLoss, label_weights
from megatron_coca.training.engine.native_engine import NativeEngine
from megatron_coca.training.engine.protocol import Engine, StepResult
