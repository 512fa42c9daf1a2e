"""Train a model: YAML files are merged in order, then `key=value` overrides apply."""

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from megatron_coca.program import MAIN
from megatron_coca.training import watchdog

if TYPE_CHECKING:
    from megatron_coca.config import Config

# PyTorch and DeepSpeed take seconds to import: only `latest_step` and `train` do, after the configuration is accepted.

EPILOG = """for example:
    megatron-coca train configs/350M/roformer_coca.yml
    megatron-coca train configs/350M/alibi.yml configs/cluster/cpu.yml train_iters=20 save=runs/try --num_gpus 2

All keys are in docs/config.md, exit statuses in docs/faults.md."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="megatron-coca train",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 after training, else one of those in docs/faults.md."""
    watchdog.install()  # before other imports: a file of the user's may shadow a module that they import
    from megatron_coca.config import ConfigError
    from megatron_coca.training.exit_status import INTERRUPTED, UNUSABLE, Stopped

    options = parser().parse_intermixed_args(arguments)
    try:
        return run(read_config(options), sys.argv[1:] if arguments is None else arguments)
    except ConfigError as error:
        watchdog.tell(error)
        return UNUSABLE
    except Stopped as error:
        watchdog.tell(error)
        return error.status
    except KeyboardInterrupt:
        watchdog.tell("interrupted; --auto-resume resumes from the latest complete checkpoint")
        return INTERRUPTED


def read_config(options: argparse.Namespace) -> "Config":
    """Load the configuration of the command line; launch options win over the files."""
    from megatron_coca.config import ConfigError, load_config

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


def run(config: "Config", arguments: Sequence[str]) -> int:
    """Start the processes that the configuration asks for, or train in this one."""
    from megatron_coca.training import launch

    latest = partial(latest_step, config) if config.checkpoint.save is not None else None
    status = launch.start(config.launch, os.environ, MAIN, ["train", *arguments], latest)
    return train(config) if status is None else status


def latest_step(config: "Config") -> int:
    """Return the step of the latest checkpoint in `save`, 0 if there is none."""
    from megatron_coca.checkpoints import CheckpointError, native
    from megatron_coca.checkpoints.object_store import save_folder
    from megatron_coca.config import ConfigError

    try:
        folder = save_folder(config.checkpoint)
        return max(native.steps(folder), default=0) if folder is not None else 0
    except CheckpointError as error:
        raise ConfigError([str(error)]) from error


def train(config: "Config") -> int:
    """Train in this process."""
    from megatron_coca.attention.inputs import BackendError
    from megatron_coca.checkpoints import CheckpointError
    from megatron_coca.data import DataError
    from megatron_coca.training.exit_status import UNUSABLE
    from megatron_coca.training.trainer import fit

    try:
        fit(config)
    except (DataError, CheckpointError, BackendError) as error:
        watchdog.tell(error)
        return UNUSABLE
    return 0
