"""Train a model: python train.py CONFIG.yml [MORE.yml ...] [key=value ...] [--num_gpus N | --hostfile FILE]."""

import argparse
import os
import sys

from megatron_coca.attention.inputs import BackendError
from megatron_coca.checkpoints import CheckpointError
from megatron_coca.config import Config, ConfigError, load_config
from megatron_coca.data import DataError


def main(arguments: list[str]) -> int:
    """Exit status 0 after training, 2 for input that cannot be used or files that cannot be written, 130 for Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("inputs", nargs="+", metavar="CONFIG.yml | key=value", help="merged in order, then the keys")
    parser.add_argument(
        "--num_gpus", type=int, metavar="N", help="processes on this machine (on the CPU without a GPU)"
    )
    parser.add_argument("--hostfile", metavar="FILE", help="hosts and slots, as DeepSpeed reads them")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # from launchers, beside LOCAL_RANK
    options = parser.parse_intermixed_args(arguments)
    try:
        return run(read_config(options), arguments)
    except (ConfigError, DataError, CheckpointError, BackendError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the newest complete checkpoint can be resumed with load=<save folder>", file=sys.stderr)
        return 130


def read_config(options: argparse.Namespace) -> Config:
    """The configuration of the command line; launch options win over the files."""
    files = [text for text in options.inputs if "=" not in text]
    keys = [text for text in options.inputs if "=" in text]
    launch = {name: getattr(options, name) for name in ("num_gpus", "hostfile") if getattr(options, name) is not None}
    return load_config(files, [*keys, *(f"{name}={value}" for name, value in launch.items())])


def run(config: Config, arguments: list[str]) -> int:
    """Train in this process, or start the processes that the configuration asks for."""
    from megatron_coca.training import launch

    if not launch.under_launcher(os.environ):
        command = launch.launcher_command(config.launch, os.path.abspath(__file__), arguments)
        if command is not None:
            return launch.relaunch(command)
    from megatron_coca.training.loop import fit  # imports DeepSpeed, which the launching process does not need

    fit(config)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
