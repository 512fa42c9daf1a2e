"""Train a model: python train.py CONFIG.yml [MORE.yml ...] [key=value ...] [--num_gpus N | --hostfile FILE]."""

# ruff: noqa: E402
import argparse
import os
import sys

from megatron_coca.training import watchdog

watchdog.install()  # before the imports below: what they import may be a file of the user's, by mistake

from megatron_coca.attention.inputs import BackendError
from megatron_coca.checkpoints import CheckpointError, native
from megatron_coca.checkpoints.object_store import save_folder
from megatron_coca.config import Config, ConfigError, load_config
from megatron_coca.data import DataError
from megatron_coca.training.exit_status import INTERRUPTED, UNUSABLE, Stopped


def main(arguments: list[str]) -> int:
    """The exit status: 0 after training, else one of those in docs/faults.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("inputs", nargs="+", metavar="CONFIG.yml | key=value", help="merged in order, then the keys")
    parser.add_argument(
        "--num_gpus", type=int, metavar="N", help="processes on this machine (on the CPU without a GPU)"
    )
    parser.add_argument("--hostfile", metavar="FILE", help="hosts and slots, as DeepSpeed reads them")
    parser.add_argument(
        "--auto-resume", action="store_true", help="go on from the newest intact checkpoint in `save`, if there is one"
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        metavar="N",
        help="restarts after a crash or a hang, each from the newest checkpoint",
    )
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # from launchers, beside LOCAL_RANK
    options = parser.parse_intermixed_args(arguments)
    try:
        return run(read_config(options), arguments)
    except (ConfigError, DataError, CheckpointError, BackendError) as error:
        watchdog.tell(error)
        return UNUSABLE
    except Stopped as end:
        watchdog.tell(end)
        return end.status
    except KeyboardInterrupt:
        watchdog.tell("interrupted; --auto-resume goes on from the newest complete checkpoint")
        return INTERRUPTED


def read_config(options: argparse.Namespace) -> Config:
    """The configuration of the command line; launch options win over the files."""
    files = [text for text in options.inputs if "=" not in text]
    keys = [text for text in options.inputs if "=" in text]
    names = ("num_gpus", "hostfile", "max_restarts")
    launch = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if options.auto_resume:
        keys.append("auto_resume=true")
    return load_config(files, [*keys, *(f"{name}={value}" for name, value in launch.items())])


def run(config: Config, arguments: list[str]) -> int:
    """Train in this process, or start the processes that the configuration asks for."""
    from megatron_coca.training import launch

    save = save_folder(config.checkpoint)
    newest = (lambda: max(native.steps(save), default=0)) if save is not None else None
    status = launch.start(config.launch, os.environ, os.path.abspath(__file__), arguments, newest)
    if status is not None:
        return status
    from megatron_coca.training.loop import fit  # imports DeepSpeed, which the launching process does not need

    fit(config)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
