"""Training and evaluating position methods for long context: CoCA, RoFormer, ALiBi and others, on PyTorch and
DeepSpeed.
"""

from megatron_coca.checkpoints import load_model
from megatron_coca.config import load_config
from megatron_coca.model import build_model

__all__ = ["build_model", "load_config", "load_model"]
__version__ = "0.1.0"
