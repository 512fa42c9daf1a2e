"""Keys of the run: checkpoints, faults, logging, the seed."""

from typing import Annotated, Literal

from pydantic import Field

from megatron_coca.config.base import MAX_COUNT, ConfigGroup, Count, PathName, Positive, Seconds, WholeNumber, key
from megatron_coca.config.data import TrainingPositions


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


class GeneralConfig(ConfigGroup):
    """Keys of the whole run."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = key(1234, "Seed of initialization, dropout and data order.")
    deterministic: bool = key(
        False, "Compute the same bits in every run on the same GPUs; slower, and refused where nothing can."
    )
    training_positions: TrainingPositions | None = key(
        None, "Positions of training samples, drawn anew for each sample; null: 0, 1, ... (docs/recall.md)."
    )
