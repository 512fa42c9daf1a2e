"""Keys that fix a training step: optimizer, schedule, batch, precision, parallelism."""

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import BeforeValidator, ConfigDict, Field, Strict
from typing_extensions import TypedDict

from megatron_coca.config.base import ConfigError, ConfigGroup, Count, Fraction, NotNegative, Positive, WholeNumber, key

OPTIMIZER_TYPES = {"adam": "Adam", "adamw": "AdamW", "cpu_adam": "cpu_adam", "sgd": "sgd"}
Dtype = Literal["fp32", "bf16", "fp16"]
Part = Literal["query", "key", "value", "attention_output", "mlp", "norms", "embedding", "output_head", "positions"]
QUERY_KEY_VALUE: tuple[Part, Part, Part] = ("query", "key", "value")
"""The parts of attention's packed projection, in the order of its rows."""
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


def _normalise_optimizer(name: Any) -> Any:
    return OPTIMIZER_TYPES.get(name.lower(), name) if isinstance(name, str) else name


def _in_order(parts: Any) -> Any:
    """Known parts in one order, so that two ways of writing the same are the same."""
    known = get_args(Part)
    return sorted(parts, key=known.index) if isinstance(parts, list) and all(part in known for part in parts) else parts


class OptimizerConfig(ConfigGroup):
    """The optimizer; Adam and AdamW both mean decoupled weight decay, as in GPT-NeoX."""

    type: Annotated[Literal["Adam", "AdamW", "cpu_adam", "sgd"], BeforeValidator(_normalise_optimizer)] = key(
        "Adam", "Optimizer; upper and lower case alike.", "optimizer.type"
    )
    lr: Positive | None = key(None, "Peak learning rate.", "optimizer.params.lr")
    betas: Annotated[tuple[Beta, Beta], Strict(False)] = key(
        (0.9, 0.999), "Decay rates of Adam's two moments.", "optimizer.params.betas"
    )
    eps: Positive = key(1.0e-8, "Epsilon of Adam.", "optimizer.params.eps")
    weight_decay: NotNegative = key(0.1, "Weight decay of matrices and embeddings; decoupled, but for sgd.")
    gradient_clipping: NotNegative = key(1.0, "Largest global gradient norm; 0 means no clipping.")
    trainable: Annotated[list[Part], Field(min_length=1), BeforeValidator(_in_order)] | None = key(
        None,
        "List of the parts of the weights that are trained; the others stay as they are, bit by bit. null means all. `key` is CoCA's T"
        " projection, `attention_output` the layer behind attention, `positions` what the position method learns;"
        " `embedding` is the output head too where the two are tied.",
    )

    def trains(self, *parts: Part) -> bool:
        """Whether all of these parts are trained."""
        return self.trainable is None or set(parts) <= set(self.trainable)


class ScheduleConfig(ConfigGroup):
    """Learning rate by step."""

    train_iters: Count | None = key(None, "Optimizer steps to train for.")
    min_lr: NotNegative = key(0.0, "Lowest learning rate after the warm-up.")
    lr_decay_style: Literal["constant", "linear", "cosine", "exponential", "linear_to_min_lr"] = key(
        "linear",
        "linear: towards 0, floored at min_lr; linear_to_min_lr: a straight line that reaches min_lr at the"
        " horizon; exponential: halved at the horizon.",
    )
    lr_decay_iters: Count | None = key(None, "Horizon of the decay in steps; null means train_iters.")
    lr_decay_fraction: Annotated[float, Field(gt=0.0, le=1.0)] | None = key(
        None, "Horizon as a share of train_iters, where lr_decay_iters is null."
    )
    warmup: Fraction = key(0.01, "Share of the horizon spent in linear warm-up.")
    lr_warmup_init: NotNegative = key(0.0, "Learning rate at step 0 of the warm-up.")

    @property
    def decay_iters(self) -> int:
        """Horizon of the decay in steps.

        Raises:
            ConfigError: neither lr_decay_iters nor train_iters is set.
        """
        if self.lr_decay_iters is not None:
            return self.lr_decay_iters
        if self.train_iters is None:
            raise ConfigError(["train_iters: not set; training needs it, for example `train_iters=1000`"])
        share = 1.0 if self.lr_decay_fraction is None else self.lr_decay_fraction
        return int(self.train_iters * share)


class BatchSizes(NamedTuple):
    """Samples in one forward pass of one rank, forward passes in a step, and samples in a step over all ranks."""

    micro: int
    accumulation: int
    total: int


class BatchConfig(ConfigGroup):
    """Sizes of a batch in samples. Give the micro batch, the total, or both."""

    train_micro_batch_size_per_gpu: Count | None = key(None, "Samples in one forward pass of one rank.")
    train_batch_size: Count | None = key(None, "Samples in one optimizer step over all ranks.")
    gradient_accumulation_steps: Count | None = key(
        None, "Forward passes in one optimizer step; null means what the other two leave, else 1."
    )

    def resolve(self, data_parallel_size: int) -> BatchSizes:
        """The sizes for `data_parallel_size` ranks.

        Raises:
            ConfigError: neither size is given, or they do not multiply out.
        """
        micro, total = self.train_micro_batch_size_per_gpu, self.train_batch_size
        steps = self.gradient_accumulation_steps
        if micro is None and total is None:
            raise ConfigError(["train_micro_batch_size_per_gpu: not set; set it, or train_batch_size"])
        if steps is None:
            derived = micro is not None and total is not None
            steps = max(1, total // (micro * data_parallel_size)) if derived else 1  # type: ignore[operator]
        if micro is None:
            micro = max(1, total // (steps * data_parallel_size))  # type: ignore[operator]
        total = micro * steps * data_parallel_size if total is None else total
        if total != micro * steps * data_parallel_size:
            raise ConfigError([_arithmetic(total, micro, steps, data_parallel_size)])
        return BatchSizes(micro, steps, total)


def _arithmetic(total: int, micro: int, steps: int, ranks: int) -> str:
    return (
        f"train_batch_size {total} is not micro {micro} x accumulation {steps} x {ranks} ranks"
        f" (= {micro * steps * ranks}); change train_batch_size, train_micro_batch_size_per_gpu,"
        " gradient_accumulation_steps or the number of ranks"
    )


class Fp16(TypedDict, total=False):
    """DeepSpeed's fp16 section."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)  # type: ignore[misc]
    enabled: bool
    auto_cast: bool
    loss_scale: NotNegative
    initial_scale_power: WholeNumber
    loss_scale_window: Positive
    hysteresis: Count
    min_loss_scale: NotNegative


class Bf16(TypedDict, total=False):
    """DeepSpeed's bf16 section."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")  # type: ignore[misc]
    enabled: bool
    immediate_grad_update: bool


class PrecisionConfig(ConfigGroup):
    """Number format of forward and backward; optimizer state is fp32."""

    precision: Literal["fp16", "fp32", "bfloat16"] | None = key(
        None, "Number format; null means what fp16 and bf16 say, else fp32."
    )
    fp16: Fp16 | None = key(None, "DeepSpeed's fp16 section (loss scaling).")
    bf16: Bf16 | None = key(None, "DeepSpeed's bf16 section.")

    @property
    def requested(self) -> frozenset[Dtype]:
        """Every format asked for by one of the three keys; more than one is a contradiction."""
        named: dict[str | None, Dtype] = {"fp16": "fp16", "fp32": "fp32", "bfloat16": "bf16"}
        asked: set[Dtype] = {named[self.precision]} if self.precision in named else set()
        asked |= {"fp16"} if (self.fp16 or {}).get("enabled") else set()
        asked |= {"bf16"} if (self.bf16 or {}).get("enabled") else set()
        return frozenset(asked)

    @property
    def dtype(self) -> Dtype:
        """Number format of the run."""
        return next(iter(self.requested), "fp32")


class ParallelConfig(ConfigGroup):
    """How the work is divided among processes."""

    zero_optimization: dict[str, Any] | None = key(None, "DeepSpeed's section, passed through; stage is 0 to 3.")
    pipe_parallel_size: WholeNumber = key(0, "Pipeline stages; 0 and 1 both mean none.")
    pipe_partition_method: Literal["type:transformer|mlp", "parameters", "uniform"] = key(
        "type:transformer|mlp",
        "What pipeline stages share equally: blocks, parameters, or layers with embedding and head as one each.",
    )
    model_parallel_size: Count = key(
        1,
        "Ranks that share every matrix of a block (DeepSpeed's AutoTP); they must divide the heads and the inner width.",
    )
    sequence_parallel_size: Count = key(
        1, "Ranks that share each sequence (DeepSpeed-Ulysses); they must divide the heads and seq_length."
    )
    sequence_parallel: bool = key(
        False, "Megatron's division of norms and dropouts among tensor ranks; absent, see sequence_parallel_size."
    )
    deepspeed_extra_args: dict[str, Any] | None = key(None, "Further DeepSpeed keys, passed through.")
    distributed_backend: str = key(
        "nccl", "Communication library where there is a GPU; gloo is used where there is none."
    )

    @property
    def model_copies(self) -> int:
        """Ranks that hold the weights of one model between them."""
        return max(1, self.pipe_parallel_size) * self.model_parallel_size

    @property
    def stage(self) -> int:
        """ZeRO stage, 0 to 3."""
        return int((self.zero_optimization or {}).get("stage", 0))


DECAYS: dict[str, Callable[[float, float, float], float]] = {
    "constant": lambda progress, peak, low: peak,
    "linear": lambda progress, peak, low: peak * (1.0 - progress),
    "linear_to_min_lr": lambda progress, peak, low: peak + (low - peak) * progress,
    "cosine": lambda progress, peak, low: low + (peak - low) / 2.0 * (math.cos(math.pi * progress) + 1.0),
    "exponential": lambda progress, peak, low: peak * 0.5**progress,
}
"""(progress 0..1 from the end of the warm-up to the horizon, peak, minimum) -> learning rate before the floor at the
minimum.
"""


def learning_rate(step: int, peak: float, schedule: ScheduleConfig) -> float:
    """The learning rate of the optimizer step after `step` completed ones.

    A straight line from `lr_warmup_init` reaches `peak` after warmup * horizon steps; then the decay, which is held
    at its end past the horizon (GPT-NeoX's cosine rises again there).
    """
    count, horizon = step + 1, schedule.decay_iters
    warmup = schedule.warmup * horizon
    if count < warmup:
        return schedule.lr_warmup_init + (peak - schedule.lr_warmup_init) * count / warmup
    progress = min(1.0, (count - warmup) / max(horizon - warmup, 1.0))
    return max(DECAYS[schedule.lr_decay_style](progress, peak, schedule.min_lr), schedule.min_lr)
