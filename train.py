"""Train a model: python train.py CONFIG.yml [MORE.yml ...] [key=value ...] [--num_gpus N | --hostfile FILE]."""

# ruff: noqa: E402
import argparse
import os
import sys
from functools import partial

from megatron_coca.training import watchdog

watchdog.install()  # before other imports: a file of the user's may shadow a module that they import

from megatron_coca.config import Config, ConfigError, load_config
from megatron_coca.training import launch
from megatron_coca.training.exit_status import INTERRUPTED, UNUSABLE, Stopped

# PyTorch and DeepSpeed take seconds to import: only `latest_step` and `train` do, after the configuration is accepted.


def main(arguments: list[str]) -> int:
    """Return the exit status: 0 after training, else one of those in docs/faults.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("inputs", nargs="+", metavar="CONFIG.yml | key=value", help="merged in order, then the keys")
    parser.add_argument(
        "--num_gpus", type=int, metavar="N", help="processes on this machine (on the CPU without a GPU)"
    )
    parser.add_argument("--hostfile", metavar="FILE", help="hosts and slots, as DeepSpeed reads them")
    parser.add_argument(
        "--auto-resume", action="store_true", help="resume from the latest valid checkpoint in `save`, if there is one"
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        metavar="N",
        help="restarts after a crash or a hang, each from the latest checkpoint",
    )
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # from launchers, besides LOCAL_RANK
    options = parser.parse_intermixed_args(arguments)
    try:
        return run(read_config(options), arguments)
    except ConfigError as error:
        watchdog.tell(error)
        return UNUSABLE
    except Stopped as error:
        watchdog.tell(error)
        return error.status
    except KeyboardInterrupt:
        watchdog.tell("interrupted; --auto-resume resumes from the latest complete checkpoint")
        return INTERRUPTED


def read_config(options: argparse.Namespace) -> Config:
    """Load the configuration of the command line; launch options win over the files."""
    files = [text for text in options.inputs if "=" not in text]
    keys = [text for text in options.inputs if "=" in text]
    names = ("num_gpus", "hostfile", "max_restarts")
    keys += [f"{name}={getattr(options, name)}" for name in names if getattr(options, name) is not None]
    config = load_config(files, [*keys, "auto_resume=true"] if options.auto_resume else keys)
    if config.schedule.train_iters is None:
        raise ConfigError(["train_iters: not set; training needs it, for example `train_iters=1000`"])
    if config.optimizer.lr is None:
        raise ConfigError(["optimizer.params.lr: not set; training needs it, for example `optimizer.params.lr=1e-4`"])
    return config


def run(config: Config, arguments: list[str]) -> int:
    """Start the processes that the configuration asks for, or train in this one."""
    latest = partial(latest_step, config) if config.checkpoint.save is not None else None
    status = launch.start(config.launch, os.environ, os.path.abspath(__file__), arguments, latest)
    return train(config) if status is None else status


def latest_step(config: Config) -> int:
    """Return the step of the latest checkpoint in `save`, 0 if there is none."""
    from megatron_coca.checkpoints import CheckpointError, native
    from megatron_coca.checkpoints.object_store import save_folder

    try:
        folder = save_folder(config.checkpoint)
        return max(native.steps(folder), default=0) if folder is not None else 0
    except CheckpointError as error:
        raise ConfigError([str(error)]) from error


def train(config: Config) -> int:
    """Train in this process."""
    from megatron_coca.attention.inputs import BackendError
    from megatron_coca.checkpoints import CheckpointError
    from megatron_coca.data import DataError
    from megatron_coca.training.trainer import fit

    try:
        fit(config)
    except (DataError, CheckpointError, BackendError) as error:
        watchdog.tell(error)
        return UNUSABLE
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
