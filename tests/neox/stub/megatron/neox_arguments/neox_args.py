"""Groups of keys."""

from dataclasses import dataclass
from typing import Literal


@dataclass
class NeoXArgsParallelism:
    model_parallel_size: int = 1
    pipe_parallel_size: int = 0
    steps_per_print: int = 10
    deepspeed_extra_args: dict = None


@dataclass
class NeoXArgsModel:
    num_layers: int = None
    hidden_size: int = None
    num_attention_heads: int = None
    num_kv_heads: int = None
    seq_length: int = None
    max_position_embeddings: int = None
    make_vocab_size_divisible_by: int = 128
    pos_emb: Literal["learned", "rotary", "sinusoidal", "rpe", "alibi", "none"] = "learned"
    rotary_pct: float = 1.0
    rotary_emb_base: int = 10000
    attention_config: list = None
    sliding_window_width: int = None
    te_mha: bool = False
    te_fp8_mha: bool = False


@dataclass
class NeoXArgsLRScheduler:
    lr_decay_style: Literal["constant", "linear", "cosine", "exponential"] = "linear"
    lr_decay_iters: int = None
    min_lr: float = 0.0
    warmup: float = 0.01


@dataclass
class NeoXArgsOptimizer:
    optimizer_type: Literal["adam", "sgd"] = "adam"
    lr: float = None


@dataclass
class NeoXArgsTokenizer:
    padded_vocab_size: int = None


@dataclass
class NeoXArgsTraining:
    train_iters: int = None
    attention_dropout: float = 0.0
    train_batch_size: int = None
    train_micro_batch_size_per_gpu: int = None
    gradient_accumulation_steps: int = 1
    optimizer: dict = None
    use_mup: bool = False


@dataclass
class NeoXArgsOther:
    user_script: str = None
    config_files: dict = None
    save: str = None
    load: str = None
    finetune: bool = False
    no_load_optim: bool = False
    iteration: int = None
