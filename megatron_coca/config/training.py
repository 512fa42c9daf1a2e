"""Training keys: optimizer, schedule, batch, precision, parallelism, data, checkpoints, faults, logging, launch."""

import math
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, Strict, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from megatron_coca.config.base import (
    MAX_COUNT,
    ConfigError,
    ConfigGroup,
    Count,
    Fraction,
    NotNegative,
    PathName,
    Positive,
    Seconds,
    Size,
    WholeNumber,
    key,
    shown,
)

OPTIMIZER_TYPES = {"adam": "Adam", "adamw": "AdamW", "cpu_adam": "cpu_adam", "sgd": "sgd", "lion": "lion"}
Dtype = Literal["fp32", "bf16", "fp16"]
TrainablePart = Literal[
    "query", "key", "value", "attention_output", "mlp", "norms", "embedding", "output_head", "positions"
]
QUERY_KEY_VALUE: tuple[TrainablePart, TrainablePart, TrainablePart] = ("query", "key", "value")
"""Parts of the packed attention projection, in the order of its rows."""
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


def _normalise_optimizer(name: Any) -> Any:
    return OPTIMIZER_TYPES.get(name.lower(), name) if isinstance(name, str) else name


def _sort_parts(parts: Any) -> Any:
    """Sort valid lists, and drop repetitions, so that equal selections compare equal."""
    known = get_args(TrainablePart)
    return (
        sorted(set(parts), key=known.index)
        if isinstance(parts, list) and all(part in known for part in parts)
        else parts
    )


class OptimizerConfig(ConfigGroup):
    """The optimizer. Adam and AdamW both use decoupled weight decay, as in GPT-NeoX."""

    type: Annotated[Literal["Adam", "AdamW", "cpu_adam", "sgd", "lion"], BeforeValidator(_normalise_optimizer)] = key(
        "Adam", "Optimizer; case-insensitive.", "optimizer.type"
    )
    lr: Positive | None = key(None, "Peak learning rate.", "optimizer.params.lr")
    betas: Annotated[tuple[Beta, Beta], Strict(False)] = key(
        (0.9, 0.999), "beta1 and beta2 of Adam and Lion; by default Lion has 0.9 and 0.99.", "optimizer.params.betas"
    )
    eps: Positive = key(1.0e-8, "Adam's epsilon.", "optimizer.params.eps")
    weight_decay: NotNegative = key(0.1, "Weight decay of matrices and embeddings; decoupled, except with sgd.")
    gradient_clipping: NotNegative = key(1.0, "Maximum global gradient norm; 0 disables clipping.")
    trainable: Annotated[list[TrainablePart], Field(min_length=1), BeforeValidator(_sort_parts)] | None = key(
        None,
        "List of the parts of the model to train; all other weights are frozen. null trains everything. `key` is CoCA's"
        " T projection, `attention_output` the output projection, `positions` the weights of the position method;"
        " `embedding` includes the output head if they are tied.",
    )

    @model_validator(mode="before")
    @classmethod
    def _betas_of_lion(cls, values: Any) -> Any:
        if isinstance(values, dict) and _normalise_optimizer(values.get("optimizer.type")) == "lion":
            return {"optimizer.params.betas": (0.9, 0.99)} | values
        return values

    def trains(self, *parts: TrainablePart) -> bool:
        """Return whether all of these parts are trained."""
        return self.trainable is None or set(parts) <= set(self.trainable)


class ScheduleConfig(ConfigGroup):
    """Learning-rate schedule."""

    train_iters: Count | None = key(None, "Number of optimizer steps.")
    train_epochs: Count | None = key(
        None, "Passes over the training shards, from which train_iters follows when the run starts; instead of it."
    )
    min_lr: NotNegative = key(0.0, "Minimum learning rate after the warm-up.")
    lr_decay_style: Literal["constant", "linear", "cosine", "exponential", "linear_to_min_lr", "wsd"] = key(
        "linear",
        "linear: towards 0, but not below min_lr; linear_to_min_lr: linear to min_lr at the horizon; exponential:"
        " halved at the horizon; wsd: constant, then to min_lr over the last steps before the horizon.",
    )
    lr_decay_iters: Count | None = key(None, "Horizon of the decay in steps; null means train_iters.")
    lr_decay_fraction: Annotated[float, Field(gt=0.0, le=1.0)] | None = key(
        None, "Horizon as a fraction of train_iters; used if lr_decay_iters is null."
    )
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = key(
        "linear", "wsd: shape of the decay, as in Megatron-LM."
    )
    lr_wsd_decay_iters: Count | None = key(
        None, "wsd: steps of the decay, which ends at the horizon; null means a tenth of the horizon."
    )
    warmup: Fraction = key(0.01, "Linear warm-up as a fraction of the horizon.")
    lr_warmup_init: NotNegative = key(0.0, "Learning rate at step 0 of the warm-up.")
    stages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = key(
        None, "Consecutive stages of the run, each with the keys that differ in it (docs/stages.md)."
    )

    @property
    def decay_iters(self) -> int:
        """Horizon of the decay in steps.

        Raises:
            ConfigError: neither lr_decay_iters nor train_iters is set.
        """
        if self.lr_decay_iters is not None:
            return self.lr_decay_iters
        if self.train_iters is None:
            raise ConfigError("train_iters: not set; training needs it, for example `train_iters=1000`")
        return int(self.train_iters * (1.0 if self.lr_decay_fraction is None else self.lr_decay_fraction))


DECAYS: dict[str, Callable[[float, float, float], float]] = {
    "constant": lambda progress, peak, low: peak,
    "linear": lambda progress, peak, low: peak * (1.0 - progress),
    "linear_to_min_lr": lambda progress, peak, low: peak + (low - peak) * progress,
    "cosine": lambda progress, peak, low: low + (peak - low) / 2.0 * (math.cos(math.pi * progress) + 1.0),
    "exponential": lambda progress, peak, low: peak * 0.5**progress,
}
"""(progress from 0 at the end of the warm-up to 1 at the horizon, peak, minimum) -> learning rate, before it is limited
to the minimum.
"""
WSD_DECAYS: dict[str, Callable[[float, float, float], float]] = {
    "linear": DECAYS["linear_to_min_lr"],
    "cosine": DECAYS["cosine"],
    "exponential": lambda progress, peak, low: low + (peak - low) * (2.0 * 0.5**progress - 1.0),
    "minus_sqrt": lambda progress, peak, low: low + (peak - low) * (1.0 - math.sqrt(progress)),
}
"""As DECAYS, of the last steps of `wsd` (Megatron-LM's shapes)."""


def learning_rate(step: int, peak: float, schedule: ScheduleConfig) -> float:
    """Return the learning rate of the optimizer step after `step` completed ones.

    The warm-up is linear from `lr_warmup_init` to `peak` over warmup * horizon steps. Past the horizon the rate stays
    at the end of the decay (GPT-NeoX's cosine rises again there).
    """
    count, horizon = step + 1, schedule.decay_iters
    warmup = schedule.warmup * horizon
    if count < warmup:
        return schedule.lr_warmup_init + (peak - schedule.lr_warmup_init) * count / warmup
    if schedule.lr_decay_style == "wsd":
        decay = schedule.lr_wsd_decay_iters or max(1.0, horizon / 10)
        progress = min(1.0, max(0.0, 1.0 - (horizon - count) / decay))
        return max(WSD_DECAYS[schedule.lr_wsd_decay_style](progress, peak, schedule.min_lr), schedule.min_lr)
    progress = min(1.0, (count - warmup) / max(horizon - warmup, 1.0))
    return max(DECAYS[schedule.lr_decay_style](progress, peak, schedule.min_lr), schedule.min_lr)


class BatchSizes(NamedTuple):
    """Samples per micro-batch and rank, micro-batches per optimizer step, and samples per step over all ranks."""

    micro: int
    accumulation: int
    total: int


class BatchConfig(ConfigGroup):
    """Batch sizes in samples. Set the micro-batch, the total, or both."""

    train_micro_batch_size_per_gpu: Size | None = key(None, "Samples per micro-batch on each rank.")
    train_batch_size: Size | None = key(None, "Samples per optimizer step over all ranks.")
    gradient_accumulation_steps: Size | None = key(
        None, "Micro-batches per optimizer step; null derives it from the two batch sizes, else 1."
    )

    def resolve(self, data_parallel_size: int) -> BatchSizes:
        """Return the sizes for `data_parallel_size` ranks.

        Raises:
            ConfigError: neither size is set, or the product does not match.
        """
        micro, total = self.train_micro_batch_size_per_gpu, self.train_batch_size
        steps = self.gradient_accumulation_steps
        if micro is None and total is None:
            raise ConfigError("train_micro_batch_size_per_gpu: not set; set it, or train_batch_size")
        if steps is None:
            derived = micro is not None and total is not None
            steps = max(1, total // (micro * data_parallel_size)) if derived else 1  # type: ignore[operator]
        if micro is None:
            micro = max(1, total // (steps * data_parallel_size))  # type: ignore[operator]
        product = micro * steps * data_parallel_size
        if total is not None and total != product:
            raise ConfigError(
                f"train_batch_size {total} is not micro {micro} x accumulation {steps} x {data_parallel_size} ranks"
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
    """dtype of forward and backward pass; the optimizer state is fp32."""

    precision: Literal["fp16", "fp32", "bfloat16"] | None = key(
        None, "dtype; null means the one that the fp16 or bf16 section enables, else fp32."
    )
    fp16: Fp16 | None = key(None, "DeepSpeed's fp16 section (loss scaling).")
    bf16: Bf16 | None = key(None, "DeepSpeed's bf16 section.")

    @property
    def requested(self) -> frozenset[Dtype]:
        """Every dtype that one of the three keys selects; more than one is a contradiction."""
        named: dict[str | None, Dtype] = {"fp16": "fp16", "fp32": "fp32", "bfloat16": "bf16"}
        dtypes: set[Dtype] = {named[self.precision]} if self.precision in named else set()
        dtypes |= {"fp16"} if (self.fp16 or {}).get("enabled") else set()
        dtypes |= {"bf16"} if (self.bf16 or {}).get("enabled") else set()
        return frozenset(dtypes)

    @property
    def dtype(self) -> Dtype:
        """dtype of the run."""
        return next(iter(self.requested), "fp32")


def _with_valid_stage(section: dict[str, Any]) -> dict[str, Any]:
    stage = section.get("stage", 0)
    if type(stage) is not int or not 0 <= stage <= 3:
        message = f"stage {shown(stage)} is not one of 0 | 1 | 2 | 3"
        raise PydanticCustomError("option", "{message}", {"message": message})
    return section


class ParallelConfig(ConfigGroup):
    """Data, tensor, pipeline and sequence parallelism."""

    zero_optimization: Annotated[dict[str, Any], AfterValidator(_with_valid_stage)] | None = key(
        None, "DeepSpeed's section, passed through; stage is 0 to 3."
    )
    pipe_parallel_size: Annotated[int, Field(ge=0, le=2**20)] = key(
        0, "Pipeline stages; 0 and 1 both disable the pipeline."
    )
    pipe_partition_method: Literal["type:transformer|mlp", "parameters", "uniform"] = key(
        "type:transformer|mlp",
        "Balance pipeline stages by number of blocks, by parameters, or by layers "
        "(embedding and head count as one each).",
    )
    model_parallel_size: Size = key(
        1, "Tensor-parallel ranks (DeepSpeed's AutoTP); must divide the heads and the inner width of the MLP."
    )
    sequence_parallel_size: Size = key(
        1, "Sequence-parallel ranks (DeepSpeed-Ulysses); must divide the heads and seq_length."
    )
    sequence_parallel: bool = key(
        False,
        "Megatron's sequence parallelism of norms and dropouts: accepted, and each tensor rank keeps their activations"
        " whole; results are the same. For long sequences see sequence_parallel_size.",
    )
    deepspeed_extra_args: dict[str, Any] | None = key(None, "Further DeepSpeed keys, passed through.")
    distributed_backend: Literal["nccl", "gloo"] | None = key(
        None,
        "nccl: train on GPUs, an error without one; gloo: train on the CPU; null: on GPUs if the host has any, else on"
        " the CPU (with num_gpus, as nccl).",
    )

    @property
    def model_copies(self) -> int:
        """Ranks that together hold the weights of one model."""
        return max(1, self.pipe_parallel_size) * self.model_parallel_size

    @property
    def accumulates_in_fp32(self) -> bool:
        """True if `data_types: {grad_accum_dtype: fp32}` asks to sum the gradients of micro-batches in float32."""
        types = (self.deepspeed_extra_args or {}).get("data_types") or {}
        return isinstance(types, dict) and types.get("grad_accum_dtype") == "fp32"

    @property
    def stage(self) -> int:
        """ZeRO stage, 0 to 3."""
        return int((self.zero_optimization or {}).get("stage", 0))


Paths = Annotated[list[PathName], Field(min_length=1)]
Weights = Annotated[list[Positive], Field(min_length=1)]
Labels = list[PathName | None]
TokenizerType = Literal[
    "GPT2BPETokenizer", "HFTokenizer", "HFGPT2Tokenizer", "SPMTokenizer", "CharLevelTokenizer", "TiktokenTokenizer"
]


class SyntheticConfig(ConfigGroup):
    """A synthetic task as training data; docs/recall.md describes the tasks."""

    task: Literal["recall", "multi_query", "copy", "reverse", "ngram"] = key("recall", "Task.")
    facts: Count = key(8, "recall: facts in a sample; multi_query: at most.")
    keys: Count = key(16, "recall, multi_query: different keys, at least `facts`.")
    values: Count = key(16, "recall, multi_query: different values.")
    ngram: int = Field(default=3, ge=2, description="ngram: tokens of the repeated n-gram.")
    filler_tokens: Count = key(
        32, "Ids of filler tokens, from 0; with `text` at least the vocabulary of the text. Facts have the next ids."
    )
    text: bool = key(False, "Fill with the text of the data paths instead of independent random tokens.")
    loss: Literal["answers", "all"] = key("answers", "Tokens that count in the loss.")


class TrainingPositions(ConfigGroup):
    """Positions of training samples other than 0, 1, ...; evaluation always has those."""

    type: Literal["randomized", "shifted", "pose", "stretched"] = Field(
        description="randomized: a sorted random subset of 0 .. max-1; shifted: one random offset; pose: two chunks,"
        " the second at a random offset (PoSE); stretched: a sorted random subset with both ends of t times the length,"
        " for a random integer t in every step (CLEX)."
    )
    max: Count | str = Field(description="Positions are below it: a number, or a multiple of seq_length such as 16L.")


def _join(split: Any) -> Any:
    return ", ".join(str(share) for share in split) if isinstance(split, list | tuple) else split


class DataConfig(ConfigGroup):
    """Training data and tokenizer."""

    data_path: PathName | None = key(None, "Prefix of one shard, divided by `split`.")
    train_data_paths: Paths | None = key(None, "Prefixes of the training shards.")
    valid_data_paths: list[PathName] | None = key(None, "Prefixes of the validation shards; `[]` for none.")
    test_data_paths: list[PathName] | None = key(None, "Prefixes of the test shards; `[]` for none.")
    train_data_weights: Weights | None = key(None, "Weights of the training shards; null means equal.")
    valid_data_weights: Weights | None = key(None, "Weights of the validation shards; null means equal.")
    test_data_weights: Weights | None = key(None, "Weights of the test shards; null means equal.")
    train_label_data_paths: Labels | None = key(None, "Prefix of the labels of each training shard; null for none.")
    valid_label_data_paths: Labels | None = key(None, "The same for the validation shards.")
    test_label_data_paths: Labels | None = key(None, "The same for the test shards.")
    pack_impl: Literal["packed", "pack_until_overflow", "unpacked"] = key(
        "packed",
        "Samples: slices of the concatenated documents, as many whole documents as fit, or one document each.",
    )
    allow_chopped: bool = key(True, "Cut documents longer than a sample unless packed; false leaves them out.")
    weight_by_num_documents: bool | None = key(
        None, "Weight the shards of each set by GPT-NeoX's formula of their documents; replaces the weights."
    )
    weighted_sampler_alpha: NotNegative | None = key(
        None, "Exponent of a shard's share of the documents in that formula; below 1 favours small shards. null: 1."
    )
    split: Annotated[str, BeforeValidator(_join)] = key(
        "969, 30, 1", "Proportions of train, validation and test documents in data_path; a string or a list."
    )
    data_impl: Literal["infer", "mmap"] = key("infer", "Format of the shards; both mean memory-mapped.")
    num_workers: Annotated[int, Field(ge=0, le=1024)] = key(
        2, "Prefetch threads per process, one step each; 0 disables prefetching."
    )
    reset_attention_mask: bool = key(False, "Restrict attention to the document of each token in packed samples.")
    reset_position_ids: bool = key(False, "Restart positions at 0 in every document of a packed sample.")
    eod_mask_loss: bool = key(False, "Mask the loss where the input is the end-of-document token.")
    tokenizer_type: TokenizerType = key("GPT2BPETokenizer", "Tokenizer type.")
    vocab_file: PathName | None = key(None, "Vocabulary or model file of the tokenizer.")
    merge_file: PathName | None = key(None, "Merges file of the tokenizer, if it has one.")
    data_root: PathName = key("data", "Folder of the built-in corpus, used if no data path is set.")
    synthetic: SyntheticConfig | None = key(
        None, "Train on a synthetic task instead of the data paths; with `text`, on one mixed into their text."
    )


class CheckpointConfig(ConfigGroup):
    """Saving and loading checkpoints."""

    save: PathName | None = key(None, "Save folder or URL (s3://, gs://); null disables checkpoints.")
    load: PathName | None = key(None, "Folder or URL to resume from.")
    checkpoint_factor: Count | Annotated[float, Field(gt=0.0, le=MAX_COUNT)] | None = key(
        None,
        "linear: steps between checkpoints, a whole number; log: checkpoints at its powers, rounded down, with 1.5 at"
        " 1, 2, 3, 5, 7, 11, ...",
    )
    checkpoint_scale: Literal["linear", "log"] = key("linear", "Spacing of the checkpoints.")
    extra_save_iters: list[WholeNumber] | None = key(
        None, "Additional steps to save a checkpoint at; 0 saves the initial weights."
    )
    keep_last_n_checkpoints: Count | None = key(None, "Delete older checkpoints; null keeps all.")
    keep_every_n_steps: Count | None = key(
        None, "Never delete checkpoints whose step is a multiple of this, regardless of keep_last_n_checkpoints."
    )
    async_save: bool = key(True, "Write checkpoints in the background during training.")
    checkpoint_cache: PathName = key(
        "runs/object_store",
        "Local folder for checkpoints before upload to a URL and after download; with several hosts it must be on a"
        " shared file system.",
    )
    object_store_timeout: Annotated[float, Field(ge=0, le=7 * 86400)] = key(
        1800.0,
        "Seconds for which a transfer to or from an object store that does not answer is repeated; then the run exits"
        " with status 69.",
    )
    auto_resume: bool = key(
        False, "Resume from the latest valid checkpoint in `save`; start at step 0 if there is none."
    )
    finetune: bool = key(False, "Load only the weights and start at step 0.")
    no_load_optim: bool = key(
        False,
        "Go on from `load` with an optimizer that begins anew, which may be another one; its own `save` is needed.",
    )
    iteration: WholeNumber | None = key(None, "Step to load; null means the latest.")


class FaultConfig(ConfigGroup):
    """Hanging processes and bad steps. A skipped step leaves the weights unchanged."""

    watchdog_timeout: Seconds | None = key(
        1200.0, "Seconds without progress before the run logs its stacks and exits; null disables the watchdog."
    )
    nonfinite_policy: Literal["stop", "skip"] = key(
        "skip", "Reaction to a NaN or infinite loss or gradient norm; the step itself is always skipped."
    )
    loss_spike_policy: Literal["off", "warn", "skip"] = key(
        "off", "Reaction to a spike of the loss or the gradient norm."
    )
    loss_spike_factor: Positive = key(
        6.0, "Threshold of a spike, in standard deviations above the median of the window."
    )
    loss_spike_window: Annotated[int, Field(ge=4, le=2**20)] = key(
        128, "Number of recent steps in the window; no spikes are detected before it is half full."
    )
    max_consecutive_skips: WholeNumber = key(10, "Maximum consecutive skipped steps; one more stops the run.")

    @property
    def collective_timeout(self) -> float | None:
        """Timeout of collectives in seconds, or None for the library's default.

        Longer than the watchdog's, so that a rank that waits for a hanging one still exists to log its stacks.
        """
        return None if self.watchdog_timeout is None else 2.0 * self.watchdog_timeout


class LoggingConfig(ConfigGroup):
    """Logging and validation. Intervals are in steps."""

    log_interval: Count = key(100, "Steps between log lines, each with the mean loss of the steps since the last one.")
    eval_interval: Count = key(1000, "Steps between validations.")
    eval_iters: WholeNumber = key(100, "Batches per validation.")
    eval_per_source: bool = key(True, "Also validate each validation source separately, if there are several.")
    eval_windows: Annotated[list[int | str], Field(min_length=1)] | None = key(
        None,
        "Windows for perplexity on the validation data: numbers of tokens, or multiples of seq_length such as 4L. All"
        " score the same tokens; the longest takes about as long as the validation loss.",
    )
    exit_interval: Count | None = key(
        None, "Save and exit after every step that is a multiple of this; the next launch goes on to the next one."
    )
    log_dir: PathName | None = key(
        None,
        "Folder for log files; null means `save`, or runs/unsaved if `save` is not set. Of several runs at a time each"
        " needs its own.",
    )
    tensorboard_dir: PathName | None = key(None, "Folder for TensorBoard files.")
    use_wandb: bool = key(False, "Log to Weights & Biases.")
    wandb_project: str = key("neox", "Weights & Biases project.")
    wandb_group: str | None = key(None, "Weights & Biases group.")
    wandb_run_name: str | None = key(None, "Weights & Biases run name.")
    wandb_team: str | None = key(None, "Weights & Biases team.")
    wandb_host: str | None = key(None, "Weights & Biases server; null means its default.")
    peak_theoretical_tflops: Positive | None = key(
        None, "Peak TFLOP/s of one device, for MFU; null uses the data sheet's value (bfloat16, dense) if known."
    )
    profile: bool = key(False, "Record a PyTorch profiler trace in `profile` below the log folder.")
    profile_step_start: WholeNumber = key(10, "Optimizer steps after launch at which the trace starts.")
    profile_step_stop: Count = key(12, "Optimizer steps after launch at which the trace ends.")
    profile_ranks: list[WholeNumber] = key([0], "Ranks to profile.")

    def last_step(self, start: int, end: int) -> int:
        """Return the last step of a launch that begins after `start` steps: `end`, or a multiple of exit_interval."""
        interval = self.exit_interval
        return end if interval is None else min(end, start - start % interval + interval)


def window_tokens(window: int | str, seq_length: int) -> int | None:
    """Return the tokens of a number above 1 or of a multiple of seq_length such as `4L`; None for anything else."""
    multiple = re.fullmatch("([0-9]{1,10})L", window) if isinstance(window, str) else None
    tokens = int(multiple[1]) * seq_length if multiple else window
    return tokens if isinstance(tokens, int) and 2 <= tokens <= MAX_COUNT else None


MOST_SLOTS = 9999
"""Processes of one host."""


class LaunchConfig(ConfigGroup):
    """Starting the processes; see docs/launch.md."""

    hostfile: PathName | None = key(
        None, "File of host names and slots; if it does not exist, the run warns and uses this host, as in GPT-NeoX."
    )
    num_nodes: int = Field(
        default=-1, ge=-1, le=2**20, description="Number of hosts to use; -1 means all of the hostfile."
    )
    num_gpus: Annotated[int, Field(ge=1, le=MOST_SLOTS)] | None = key(
        None,
        "Processes per host, one on each GPU (on the CPU with distributed_backend gloo); null means one, or one per"
        " slot with a hostfile.",
    )
    master_addr: str | None = key(None, "Address of rank 0.")
    master_port: int = Field(default=29500, ge=1, le=65535, description="Port of rank 0.")
    join_timeout: Seconds = key(600.0, "Seconds to wait at start for all processes.")
    launcher: Literal["pdsh", "slurm"] = key("pdsh", "Multi-host launcher; docs/launch.md compares them.")
    no_ssh_check: bool = key(False, "pdsh: skip the check that the hosts are reachable.")
    comment: str | None = key(None, "Comment of the Slurm job.")
    account: str | None = key(None, "Account of the Slurm job.")
    deepspeed_slurm: bool = key(False, "Same as `launcher: slurm`.")


class GeneralConfig(ConfigGroup):
    """Keys of the whole run."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = key(1234, "Seed of initialization, dropout and data order.")
    deterministic: bool = key(
        False, "Compute the same bits in every run on the same GPUs; slower, and refused where nothing can."
    )
    training_positions: TrainingPositions | None = key(
        None, "Positions of training samples, drawn anew for each sample; null: 0, 1, ... (docs/recall.md)."
    )


def split_shares(split: str) -> tuple[float, float, float] | None:
    """Parse `split` into proportions of train, validation and test, or None unless it has one to three numbers."""
    numbers = [text.strip() for text in split.replace("/", ",").split(",")]
    if len(numbers) > 3 or not all(text.replace(".", "", 1).isdecimal() for text in numbers):
        return None
    train, valid, test = ([float(text) for text in numbers] + [0.0, 0.0])[:3]
    return (train, valid, test) if 0 < train + valid + test < math.inf else None
