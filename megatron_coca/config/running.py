"""Keys of the run: checkpoints, faults, logging, the seed, and training positions."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from megatron_coca.config.base import MAX_COUNT, ConfigGroup, Count, PathName, Positive, Seconds, WholeNumber, key
from megatron_coca.config.data import TrainingPositions
from megatron_coca.config.metric_sinks import read_sinks


class CheckpointConfig(ConfigGroup):
    """Saving and loading checkpoints."""

    save: PathName | None = key(None, "Folder or URL (s3://, gs://) for checkpoints; null disables checkpoints.")
    load: PathName | None = key(None, "Folder or URL to resume from.")
    checkpoint_factor: Count | Annotated[float, Field(gt=0.0, le=MAX_COUNT)] | None = key(
        None,
        "With checkpoint_scale linear: steps between checkpoints, a whole number. With log: checkpoints are saved at"
        " the powers of this number, rounded down; for 1.5, these are 1, 2, 3, 5, 7, 11, ...",
    )
    checkpoint_scale: Literal["linear", "log"] = key("linear", "Spacing of the checkpoints.")
    extra_save_iters: list[WholeNumber] | None = key(
        None, "Additional steps at which a checkpoint is saved; 0 saves the initial weights."
    )
    keep_last_n_checkpoints: Count | None = key(
        None, "Keep this many checkpoints and delete older ones; null keeps all."
    )
    keep_every_n_steps: Count | None = key(
        None, "Never delete a checkpoint at a multiple of this many steps, regardless of keep_last_n_checkpoints."
    )
    async_save: bool = key(True, "Write checkpoints in the background during training.")
    checkpoint_cache: PathName = key(
        "runs/object_store",
        "Local folder for checkpoints before upload to a URL and after download. With several hosts it must be on a"
        " shared file system.",
    )
    object_store_timeout: Annotated[float, Field(ge=0, le=7 * 86400)] = key(
        1800.0,
        "Time in seconds to retry a transfer if the object store does not answer. After this time, the run exits with"
        " status 69.",
    )
    auto_resume: bool = key(
        False, "Resume from the latest valid checkpoint in `save`; start at step 0 if there is none."
    )
    finetune: bool = key(False, "Load only the weights and start at step 0.")
    ignore_keys: list[str] | None = key(
        None,
        "Keys in the config.json of the Hugging Face folder in `load` to ignore. Use it for keys that this package does"
        " not support and that do not change the model.",
    )
    base_model: str | None = key(
        None, "Folder, or hf://NAME, of the model that the PEFT adapters in `load` change; null: it is in `load` too."
    )
    no_load_optim: bool = key(
        False,
        "Continue from `load` with a new optimizer state; the optimizer may be of another type. `save` must not be the"
        " same folder as `load`.",
    )
    iteration: WholeNumber | None = key(None, "Step to load; null: the latest.")


class FaultConfig(ConfigGroup):
    """Reactions to hanging processes and bad steps. A skipped step does not change the weights."""

    watchdog_timeout: Seconds | None = key(
        1200.0, "Seconds without progress after which the run logs stack traces and exits; null disables the watchdog."
    )
    nonfinite_policy: Literal["stop", "skip"] = key(
        "skip",
        "Reaction to a NaN or infinite loss or gradient norm: stop the run, or continue. In both cases, the step does"
        " not change the weights.",
    )
    loss_spike_policy: Literal["off", "warn", "skip"] = key(
        "off", "Reaction to a spike of the loss or the gradient norm: nothing, a warning, or a skipped step."
    )
    loss_spike_factor: Positive = key(
        6.0, "Threshold of a spike, in standard deviations above the median of the window."
    )
    loss_spike_window: Annotated[int, Field(ge=4, le=2**20)] = key(
        128, "Number of recent steps in the window. No spikes are detected before the window is half full."
    )
    max_consecutive_skips: WholeNumber = key(10, "Maximum number of consecutive skipped steps. One more stops the run.")

    @property
    def collective_timeout(self) -> float | None:
        """Timeout of collectives in seconds, or None for the library's default.

        It is longer than the watchdog's timeout, so that a rank that waits for a hanging rank can still log its stacks.
        """
        return None if self.watchdog_timeout is None else 2.0 * self.watchdog_timeout


class LoggingConfig(ConfigGroup):
    """Logging and validation. Intervals are in steps."""

    log_interval: Count = key(100, "Steps between log lines. Each line contains the mean loss since the previous line.")
    eval_interval: Count = key(1000, "Steps between validations.")
    eval_iters: WholeNumber = key(100, "Batches per validation.")
    eval_per_source: bool = key(True, "Also validate each validation source separately, if there are several.")
    eval_windows: Annotated[list[int | str], Field(min_length=1)] | None = key(
        None,
        "Window lengths for perplexity on the validation data: numbers of tokens, or multiples of seq_length such as"
        " 4L. All windows score the same tokens. Measuring the longest window takes about as long as the validation"
        " loss.",
    )
    exit_interval: Count | None = key(
        None,
        "Save a checkpoint and exit at every multiple of this many steps. The next launch continues to the next"
        " multiple.",
    )
    log_dir: PathName | None = key(
        None,
        "Folder for log files; null: `save`, or runs/unsaved if `save` is not set. Concurrent runs need different"
        " folders.",
    )
    tensorboard_dir: PathName | None = key(None, "Folder for TensorBoard files.")
    use_wandb: bool = key(False, "Log to Weights & Biases.")
    wandb_project: str = key("neox", "Weights & Biases project.")
    wandb_group: str | None = key(None, "Weights & Biases group.")
    wandb_run_name: str | None = key(None, "Weights & Biases run name.")
    wandb_team: str | None = key(None, "Weights & Biases team.")
    wandb_host: str | None = key(None, "Weights & Biases server; null: the library's default.")
    metric_sinks: Annotated[dict[str, dict[str, Any]], BeforeValidator(read_sinks)] = key(
        {},
        "Further sinks of metrics, each with its options below: `{mlflow: {experiment: coca}}`. A file in `imports` can"
        " declare more sinks (docs/observability.md).",
    )
    peak_theoretical_tflops: Positive | None = key(
        None, "Peak TFLOP/s of one device, for MFU; null: the data sheet's value (bfloat16, dense) if known."
    )
    profile: bool = key(False, "Record a PyTorch profiler trace in the folder `profile` inside the log folder.")
    profile_step_start: WholeNumber = key(10, "The trace starts after this many optimizer steps of the launch.")
    profile_step_stop: Count = key(12, "The trace ends after this many optimizer steps of the launch.")
    profile_ranks: list[WholeNumber] = key([0], "Ranks to profile.")

    def last_step(self, start: int, end: int) -> int:
        """Return the last step of a launch that begins after `start` steps: `end`, or an earlier multiple of
        exit_interval.
        """
        interval = self.exit_interval
        return end if interval is None else min(end, start - start % interval + interval)


class GeneralConfig(ConfigGroup):
    """Keys of the whole run."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = key(1234, "Seed of initialization, dropout and data order.")
    deterministic: bool = key(
        False,
        "Produce bitwise identical results in every run on the same GPUs. This is slower, and the run stops with"
        " an error at an operation that has no deterministic version.",
    )
    training_positions: TrainingPositions | None = key(
        None, "Positions of training samples, drawn for each sample (docs/recall.md); null: 0, 1, ..."
    )
