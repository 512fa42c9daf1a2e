"""Keys around the training step: data, checkpoints, logging, launch, seed."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from megatron_coca.config.base import ConfigGroup, Count, NotNegative, Positive, WholeNumber, key

POLICIES = ("nonfinite_policy", "loss_spike_policy", "skip_limit_policy")
"""The keys that may ask for a rollback."""


class FaultConfig(ConfigGroup):
    """What a run does when a process hangs or a step goes wrong. A step that is skipped leaves the weights alone."""

    watchdog_timeout: Positive | None = key(
        1200.0, "Seconds without progress after which a run reports its stacks and ends; null waits for ever."
    )
    nonfinite_policy: Literal["stop", "skip", "rollback"] = key(
        "skip", "What a loss or gradient norm that is not finite leads to; its step is skipped in any case."
    )
    loss_spike_policy: Literal["off", "warn", "skip", "rollback"] = key(
        "off", "What a loss or gradient norm far above those before leads to."
    )
    loss_spike_factor: Positive = key(
        6.0, "Standard deviations above the middle of the window from which a value is a spike."
    )
    loss_spike_window: Annotated[int, Field(ge=4)] = key(
        128, "Steps whose values are the measure; nothing is a spike before half of them are there."
    )
    max_consecutive_skips: WholeNumber = key(10, "Skipped steps in a row that are borne.")
    skip_limit_policy: Literal["stop", "rollback"] = key("stop", "What one skipped step more than that leads to.")
    rollback_margin: WholeNumber = key(
        100, "Steps before the first bad one whose data are left out after a rollback, beside those of the bad ones."
    )
    max_rollbacks: WholeNumber = key(10, "Rollbacks in the whole run; where one more is due, the run stops.")
    health_check: bool = key(
        True, "Measure disk, clocks and network at the start, log the figures, and warn of what will cost time later."
    )
    health_min_disk_speed: NotNegative = key(
        50.0, "Speed of the `save` folder, in MB/s, below which there is a warning."
    )
    health_min_bandwidth: NotNegative = key(0.1, "Bandwidth of an all-reduce, in GB/s, below which there is a warning.")
    health_max_clock_skew: Positive = key(
        5.0, "Difference between the clocks of two hosts, in seconds, above which there is a warning."
    )

    @property
    def collective_timeout(self) -> float | None:
        """Seconds after which a collective gives up, or None for the library's own.

        Longer than the watchdog's, so that a rank which waits for a hanging one is still there to report its stacks.
        """
        return None if self.watchdog_timeout is None else 2.0 * self.watchdog_timeout


Paths = Annotated[list[str], Field(min_length=1)]
Weights = Annotated[list[Positive], Field(min_length=1)]
TokenizerType = Literal[
    "GPT2BPETokenizer", "HFTokenizer", "HFGPT2Tokenizer", "SPMTokenizer", "CharLevelTokenizer", "TiktokenTokenizer"
]


def _join(split: Any) -> Any:
    return ", ".join(str(part) for part in split) if isinstance(split, list | tuple) else split


class DataConfig(ConfigGroup):
    """The corpus and the tokenizer."""

    data_path: str | None = key(None, "Prefix of one indexed shard, divided by `split`.")
    train_data_paths: Paths | None = key(None, "Prefixes of the training shards.")
    valid_data_paths: list[str] | None = key(None, "Prefixes of the validation shards; `[]` where there are none.")
    test_data_paths: list[str] | None = key(None, "Prefixes of the test shards; `[]` where there are none.")
    train_data_weights: Weights | None = key(None, "Weights of the training shards; null means equal.")
    valid_data_weights: Weights | None = key(None, "Weights of the validation shards; null means equal.")
    test_data_weights: Weights | None = key(None, "Weights of the test shards; null means equal.")
    split: Annotated[str, BeforeValidator(_join)] = key(
        "969, 30, 1", "Shares of train, validation and test documents of data_path; text or a list."
    )
    data_impl: Literal["infer", "mmap"] = key("infer", "Format of the shards; both mean memory-mapped.")
    num_workers: WholeNumber = key(
        2, "Threads per process, each of which reads one step ahead; 0 reads a step when it is due."
    )
    reset_attention_mask: bool = key(False, "Keep attention within documents, where a sample holds several.")
    reset_position_ids: bool = key(False, "Let positions begin at 0 in every document of a sample.")
    eod_mask_loss: bool = key(False, "Take no loss where the input is the token that ends a document.")
    tokenizer_type: TokenizerType = key("GPT2BPETokenizer", "Kind of tokenizer.")
    vocab_file: str | None = key(None, "Vocabulary or model file of the tokenizer.")
    merge_file: str | None = key(None, "Merges of the tokenizer, where it has any.")
    data_root: str = key("data", "Folder of the built-in corpus, which is used when no data path is given.")


class CheckpointConfig(ConfigGroup):
    """When and where the state of a run is kept."""

    save: str | None = key(None, "Folder or URL (s3://, gs://) for checkpoints; null means none are written.")
    load: str | None = key(None, "Folder or URL to resume from.")
    checkpoint_factor: Count | None = key(None, "Steps between checkpoints (linear), or the ratio of steps (log).")
    checkpoint_scale: Literal["linear", "log"] = key("linear", "Spacing of the checkpoints.")
    extra_save_iters: list[WholeNumber] | None = key(None, "Further steps at which to write a checkpoint.")
    keep_last_n_checkpoints: Count | None = key(None, "Delete older checkpoints; null keeps all.")
    keep_every_n_steps: Count | None = key(
        None, "Keep checkpoints of steps that are multiples of this, whatever keep_last_n_checkpoints says."
    )
    async_save: bool = key(True, "Write checkpoints in the background, while training goes on.")
    save_copy: str | None = key(
        None, "Folder or URL that every complete checkpoint is copied to, for example on other disks."
    )
    checkpoint_cache: str = key(
        "runs/object_store",
        "Folder in which checkpoints are written before they are uploaded to a URL, and to which they are downloaded; "
        "with several hosts it must be on a shared file system.",
    )
    auto_resume: bool = key(
        False, "Go on from the newest intact checkpoint in `save`; start afresh where there is none."
    )
    finetune: bool = key(False, "Load the weights only and start at step 0.")
    iteration: WholeNumber | None = key(None, "Step to load; null means the latest.")


class LoggingConfig(ConfigGroup):
    """What is reported, how often and where to. Intervals are in steps."""

    log_interval: Count = key(100, "Steps between reports of the loss.")
    eval_interval: Count = key(1000, "Steps between validations.")
    eval_iters: WholeNumber = key(100, "Batches in one validation.")
    eval_per_source: bool = key(True, "Validate every validation source by itself too, where there are several.")
    exit_interval: Count | None = key(None, "Stop, after saving, once this step is reached.")
    log_dir: str | None = key(None, "Folder for log files; null means that of `save`, or runs/unsaved without one.")
    tensorboard_dir: str | None = key(None, "Folder for TensorBoard files.")
    use_wandb: bool = key(False, "Report to Weights & Biases.")
    wandb_project: str = key("neox", "Project at Weights & Biases.")
    wandb_group: str | None = key(None, "Group at Weights & Biases.")
    wandb_run_name: str | None = key(None, "Name of the run at Weights & Biases.")
    wandb_team: str | None = key(None, "Team at Weights & Biases.")
    wandb_host: str | None = key(None, "Server of Weights & Biases; null means its default.")
    peak_theoretical_tflops: Positive | None = key(
        None, "Peak TFLOP/s of one device, for MFU; null means that of its data sheet (bfloat16, dense), where known."
    )
    profile: bool = key(False, "Record a trace with PyTorch's profiler, into `profile` in the folder of the log files.")
    profile_step_start: WholeNumber = key(10, "Optimizer steps of a launch before the trace begins.")
    profile_step_stop: Count = key(12, "Optimizer steps of a launch after which the trace ends.")
    profile_ranks: list[WholeNumber] = key([0], "Ranks that record.")
    memory_profiling: bool = key(False, "Record allocations of GPU memory over the same steps.")
    memory_profiling_path: str | None = key(None, "Folder for the recorded allocations; null means that of the trace.")


class LaunchConfig(ConfigGroup):
    """How processes are started (docs/launch.md)."""

    hostfile: str | None = key(None, "File of host names and slots.")
    include: str | None = key(None, "Hosts and devices to use, in DeepSpeed's notation.")
    exclude: str | None = key(None, "Hosts and devices to leave out, in DeepSpeed's notation.")
    num_nodes: int = Field(default=-1, ge=-1, description="Hosts to use; -1 means all of the hostfile.")
    num_gpus: Count | None = key(None, "Processes per host; null means one, or with a hostfile one per slot.")
    master_addr: str | None = key(None, "Address of the first process.")
    master_port: int = Field(default=29500, ge=1, le=65535, description="Port of the first process.")
    join_timeout: Positive = key(600.0, "Seconds to wait at start until all processes are there.")
    max_restarts: WholeNumber = key(
        0,
        "Restarts by the launching process after a crash, a hang or the loss of a process, without a new checkpoint in"
        " between; each resumes as with auto_resume.",
    )
    restart_delay: NotNegative = key(5.0, "Seconds before the first restart; doubled for each further one, up to 300.")
    launcher: Literal["pdsh", "openmpi", "mvapich", "slurm"] = key(
        "pdsh", "How several hosts are started; docs/launch.md compares the ways."
    )
    force_multi: bool = key(False, "Use the multi-host launcher for one host too.")
    no_ssh_check: bool = key(False, "pdsh, openmpi, mvapich: do not test whether the hosts are reachable.")
    comment: str | None = key(None, "Comment of the Slurm job.")
    account: str | None = key(None, "Account of the Slurm job.")
    deepspeed_slurm: bool = key(False, "The same as `launcher: slurm`.")


class GeneralConfig(ConfigGroup):
    """Keys that concern the whole run."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = key(1234, "Seed of initialisation, dropout and data order.")


def split_shares(split: str) -> tuple[float, float, float] | None:
    """Shares of train, validation and test as written in `split`, or None where it is not up to three numbers."""
    parts = [part.strip() for part in split.replace("/", ",").split(",")]
    if len(parts) > 3 or not all(_is_share(part) for part in parts):
        return None
    train, valid, test = ([float(part) for part in parts] + [0.0, 0.0])[:3]
    return (train, valid, test) if train + valid + test > 0 else None


def _is_share(part: str) -> bool:
    return part.replace(".", "", 1).isdecimal()
