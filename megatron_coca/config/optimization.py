"""Keys of the optimizer, the batch and the precision."""

from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import BeforeValidator, ConfigDict, Field, Strict, model_validator
from typing_extensions import TypedDict

from megatron_coca.config.base import (
    ConfigError,
    ConfigGroup,
    Count,
    NotNegative,
    Positive,
    Probability,
    Size,
    key,
)

OPTIMIZER_TYPES = {
    "adam": "Adam",
    "adamw": "AdamW",
    "cpu_adam": "cpu_adam",
    "sgd": "sgd",
    "lion": "lion",
    "muon": "Muon",
}
Dtype = Literal["fp32", "bf16", "fp16"]
TrainablePart = Literal[
    "query", "key", "value", "attention_output", "mlp", "router", "norms", "embedding", "output_head", "positions"
]
QUERY_KEY_VALUE: tuple[TrainablePart, TrainablePart, TrainablePart] = ("query", "key", "value")
"""Parts of the packed attention projection, in the order of its rows."""
AdapterTarget = Literal["query", "key", "value", "dense", "mlp"]
TARGET_PARTS: dict[AdapterTarget, TrainablePart] = {
    "query": "query",
    "key": "key",
    "value": "value",
    "dense": "attention_output",
    "mlp": "mlp",
}
"""The part of the model that contains the matrices of each adapter target."""
NO_BATCH = "train_micro_batch_size_per_gpu: not set; set it, or train_batch_size"
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


def _normalise_optimizer(name: Any) -> Any:
    return OPTIMIZER_TYPES.get(name.lower(), name) if isinstance(name, str) else name


def _sort_parts(parts: Any, known: tuple[str, ...] = get_args(TrainablePart)) -> Any:
    """Sort a valid list and drop repetitions, so that lists with the same parts are equal."""
    return (
        sorted(set(parts), key=known.index)
        if isinstance(parts, list) and all(part in known for part in parts)
        else parts
    )


def _sort_targets(targets: Any) -> Any:
    return _sort_parts(targets, get_args(AdapterTarget))


class LoraConfig(ConfigGroup):
    """Low-rank adapters (Hu et al. 2022, arXiv:2106.09685), which PEFT adds to the matrices of every block.

    All weights of the model are frozen, except those of the parts in `also`.
    """

    rank: Size = Field(default=16, description="Rank of the adapters.")
    alpha: Positive = Field(default=32.0, description="The adapters' product is multiplied by alpha / rank.")
    targets: Annotated[list[AdapterTarget], Field(min_length=1), BeforeValidator(_sort_targets)] = Field(
        default=["query", "key", "value", "dense"],
        description="Matrices that get adapters: the projections of queries, keys (CoCA's T) and values, `dense` (the"
        " output projection of attention), and `mlp` (both matrices of the MLP).",
    )
    also: Annotated[list[TrainablePart], BeforeValidator(_sort_parts)] = Field(
        default=[],
        description="Parts that are trained as a whole, by their names in `trainable`; LongLoRA trains `[norms,"
        " embedding]`.",
    )
    dropout: Probability = Field(default=0.0, description="Dropout of the adapters' inputs.")
    rslora: bool = Field(default=False, description="Multiply the product by alpha / sqrt(rank) instead (rsLoRA).")
    dora: bool = Field(default=False, description="Also train the norm of every row of the adapted matrices (DoRA).")

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that, besides the weights, determine what the adapters compute, by their names in PEFT."""
        alpha = int(self.alpha) if self.alpha.is_integer() else self.alpha
        return {"r": self.rank, "lora_alpha": alpha, "use_rslora": self.rslora, "use_dora": self.dora}


class OptimizerConfig(ConfigGroup):
    """The optimizer. Adam and AdamW both use decoupled weight decay, as in GPT-NeoX."""

    type: Annotated[
        Literal["Adam", "AdamW", "cpu_adam", "sgd", "lion", "Muon"], BeforeValidator(_normalise_optimizer)
    ] = key("Adam", "Optimizer; case-insensitive.", "optimizer.type")
    lr: Positive | None = key(
        None,
        "Peak learning rate; null: with `finetune`, a default for the size of the model (docs/finetuning.md).",
        "optimizer.params.lr",
    )
    betas: Annotated[tuple[Beta, Beta], Strict(False)] = key(
        (0.9, 0.999),
        "beta1 and beta2 of Adam and Lion. The default for Lion is `[0.9, 0.99]`.",
        "optimizer.params.betas",
    )
    eps: Positive = key(1.0e-8, "Adam's epsilon.", "optimizer.params.eps")
    momentum: Beta = key(0.95, "Muon's momentum.", "optimizer.params.momentum")
    weight_decay: NotNegative = key(0.1, "Weight decay of matrices and embeddings. It is decoupled, except with sgd.")
    gradient_clipping: NotNegative = key(1.0, "Maximum global gradient norm; 0 disables clipping.")
    moe_loss_coeff: NotNegative = key(
        0.01,
        "Factor on the balancing loss of mixtures of experts (Switch): the mean over layers of E sum_i f_i p_i, where E"
        " is the number of experts, f_i the share of expert i in the choices, and p_i its mean score. The loss is 1 if"
        " all experts get the same share. This loss adds to the gradient, but not to the loss that a run reports.",
    )
    moe_z_loss_coeff: NotNegative = key(
        0.0, "Factor on the mean of the squared log-sum-exp of the router's logits, as in ST-MoE."
    )
    moe_bias_update_rate: NotNegative = key(
        0.0,
        "With moe_correction_bias: after each step, raise the number of an expert by this rate if the expert got less"
        " than the mean share of the step's tokens, and lower it if the expert got more, as in DeepSeek 3. Routers that"
        " are not trained keep these numbers.",
    )
    trainable: Annotated[list[TrainablePart], Field(min_length=1), BeforeValidator(_sort_parts)] | None = key(
        None,
        "Parts of the model to train, as a list; null trains everything. All other weights are frozen. `key` is also"
        " CoCA's T projection, `attention_output` is the output projection with its gate, `mlp` includes experts, and"
        " `positions` are the weights of the position method. `embedding` includes the output head if they are tied.",
    )
    lora: LoraConfig | None = key(
        None, "Train low-rank adapters instead of the weights (docs/finetuning.md); null: train the weights."
    )

    @model_validator(mode="before")
    @classmethod
    def _betas_of_lion(cls, values: Any) -> Any:
        if isinstance(values, dict) and _normalise_optimizer(values.get("optimizer.type")) == "lion":
            return {"optimizer.params.betas": (0.9, 0.99)} | values
        return values

    def trains(self, *parts: TrainablePart) -> bool:
        """Return whether the weights of all of these parts are trained."""
        selected = self.trainable if self.lora is None else self.lora.also
        return selected is None or set(parts) <= set(selected)


class BatchSizes(NamedTuple):
    """Samples per micro-batch on each rank, micro-batches per optimizer step, and samples per step over all ranks."""

    micro: int
    accumulation: int
    total: int


class BatchConfig(ConfigGroup):
    """Batch sizes in samples. Set the micro-batch, the total, or both."""

    train_micro_batch_size_per_gpu: Size | None = key(None, "Samples per micro-batch on each rank.")
    train_batch_size: Size | None = key(None, "Samples per optimizer step over all ranks.")
    gradient_accumulation_steps: Size | None = key(
        None, "Micro-batches per optimizer step; null: derived from the two batch sizes if both are set, else 1."
    )

    def resolve(self, data_parallel_size: int) -> BatchSizes:
        """Return the sizes for `data_parallel_size` ranks.

        Raises:
            ConfigError: neither batch size is set, or train_batch_size is not the product of the other factors.
        """
        micro, total = self.train_micro_batch_size_per_gpu, self.train_batch_size
        steps = self.gradient_accumulation_steps
        if micro is None and total is None:
            raise ConfigError(NO_BATCH)
        if steps is None:
            derived = micro is not None and total is not None
            steps = max(1, total // (micro * data_parallel_size)) if derived else 1  # type: ignore[operator]
        if micro is None:
            micro = max(1, total // (steps * data_parallel_size))  # type: ignore[operator]
        product = micro * steps * data_parallel_size
        if total is not None and total != product:
            raise ConfigError(
                f"train_batch_size: {total} is not micro {micro} x accumulation {steps} x {data_parallel_size} ranks"
                f" (= {product}); change train_batch_size, train_micro_batch_size_per_gpu,"
                " gradient_accumulation_steps or the number of ranks"
            )
        return BatchSizes(micro, steps, product)


class Fp16(TypedDict, total=False):
    """DeepSpeed's fp16 section."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)  # type: ignore[misc]
    enabled: bool
    auto_cast: bool
    loss_scale: NotNegative
    initial_scale_power: Annotated[int, Field(ge=0, le=127)]
    loss_scale_window: Positive
    hysteresis: Count
    min_loss_scale: NotNegative


class Bf16(TypedDict, total=False):
    """DeepSpeed's bf16 section."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")  # type: ignore[misc]
    enabled: bool
    immediate_grad_update: bool


class PrecisionConfig(ConfigGroup):
    """dtype of the forward and backward passes; the optimizer state is fp32."""

    precision: Literal["fp16", "fp32", "bfloat16"] | None = key(
        None, "dtype of the run; null: the dtype that the fp16 or bf16 section enables, else fp32."
    )
    fp16: Fp16 | None = key(None, "DeepSpeed's fp16 section (loss scaling).")
    bf16: Bf16 | None = key(None, "DeepSpeed's bf16 section.")

    @property
    def requested(self) -> frozenset[Dtype]:
        """The dtypes that the three keys select. A valid configuration selects at most one."""
        named: dict[str | None, Dtype] = {"fp16": "fp16", "fp32": "fp32", "bfloat16": "bf16"}
        dtypes: set[Dtype] = {named[self.precision]} if self.precision in named else set()
        dtypes |= {"fp16"} if (self.fp16 or {}).get("enabled") else set()
        dtypes |= {"bf16"} if (self.bf16 or {}).get("enabled") else set()
        return frozenset(dtypes)

    @property
    def dtype(self) -> Dtype:
        """dtype of the run."""
        return next(iter(self.requested), "fp32")
