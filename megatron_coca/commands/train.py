"""Train a model. YAML files are merged in order, and then `key=value` overrides apply."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_coca.commands import command_parser
from megatron_coca.support.arguments import add_configurations, add_source_options, expanded, model_of, source_keys
from megatron_coca.support.errors import InputError
from megatron_coca.support.remote_files import hub_hint
from megatron_coca.work import error_report
from megatron_coca.work.processes import MAIN

if TYPE_CHECKING:
    from megatron_coca.config import Config

# PyTorch and DeepSpeed take seconds to import, so `run` imports them after the configuration is validated.

EPILOG = """for example:
    megatron-coca train configs/350M/roformer_coca.yml
    megatron-coca train configs/350M/alibi.yml configs/cluster/cpu.yml train_iters=20 save=runs/try --num_gpus 2
    megatron-coca train models/qwen3 finetune.yml   (a folder with the network and the initial weights)

All keys are in docs/config.md, exit statuses in docs/faults.md."""


INPUTS = "files, merged in order, and overrides; a model folder as the first input sets network and initial weights"


def parser() -> argparse.ArgumentParser:
    parser = command_parser("train", __doc__, EPILOG)
    add_configurations(parser, INPUTS)
    parser.add_argument(
        "--num_gpus",
        type=int,
        metavar="N",
        help="number of processes on this host, one per GPU, or on the CPU with distributed_backend=gloo",
    )
    parser.add_argument("-H", "--hostfile", type=expanded, metavar="FILE", help="hostfile in DeepSpeed's format")
    parser.add_argument(
        "--auto-resume", action="store_true", help="resume from the latest valid checkpoint in `save`, if there is one"
    )
    add_source_options(parser)
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # set by launchers, in addition to LOCAL_RANK
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 after training, otherwise a status from docs/faults.md."""
    error_report.install()  # before other imports, because a user's file may have the name of a module that they import
    from megatron_coca.work.statuses import INTERRUPTED, Stopped

    given = sys.argv[1:] if arguments is None else arguments
    options, unknown = parser().parse_known_intermixed_args(given)
    if unknown:
        parser().error(f"unrecognized arguments: {' '.join(unknown)}; write keys without dashes: `train_iters=1000`")
    try:
        return run(*read_config(options), given)
    except (InputError, Stopped) as error:
        error_report.tell(error)
        return error.status
    except KeyboardInterrupt:
        error_report.tell("interrupted; --auto-resume resumes from the latest complete checkpoint, if there is one")
        return INTERRUPTED


def read_config(options: argparse.Namespace) -> tuple["Config", list[str]]:
    """Return the configuration that the options describe, and its keys without effect. Launch options override keys."""
    from megatron_coca.config import ConfigError, keys_without_effect, load_config, split_inputs
    from megatron_coca.config.source import given_values

    model, rest = model_of(options.inputs, options.conf_dir)
    files, keys = split_inputs(rest, options.conf_dir)
    first = options.inputs[0]
    if files[:1] == [f"{first}.yml"] and (hint := hub_hint(first)):
        raise ConfigError(f"{first}: no such file or folder{hint}")
    if options.hostfile is not None and not os.path.isfile(options.hostfile):
        raise ConfigError(f"--hostfile: {options.hostfile}: no such file; write a line `name slots=8` for each host")
    keys += source_keys(options)
    names = ("num_gpus", "hostfile")
    keys += [f"{name}={getattr(options, name)}" for name in names if getattr(options, name) is not None]
    given = [*keys, "auto_resume=true"] if options.auto_resume else keys
    if model is None:
        config = load_config(files, given)
    else:
        from megatron_coca.checkpoints.importing import starting_config

        config = starting_config(model, given, files)
    chosen = given_values(keys, files)
    if selecting := [name for name in ("include", "exclude") if chosen.get(name)]:
        raise ConfigError(
            f"{selecting[0]}: not supported; list the hosts to use in the hostfile, or set CUDA_VISIBLE_DEVICES and "
            "num_gpus to use some devices of this host"
        )
    if absent := _missing(config):
        raise ConfigError(*absent)
    return config, keys_without_effect(files, keys)


def _missing(config: "Config") -> list[str]:
    """Return a line for each key that training needs and that is not set."""
    from megatron_coca.config.optimization import NO_BATCH
    from megatron_coca.config.schedule import NO_STEPS
    from megatron_coca.training.starting_rate import NO_RATE, has_starting_rate

    schedule, batch = config.schedule, config.batch
    lines = [NO_STEPS] if schedule.train_iters is None and schedule.train_epochs is None else []
    if config.optimizer.lr is None and not has_starting_rate(config):
        lines.append(NO_RATE)
    if schedule.stages is None and batch.train_micro_batch_size_per_gpu is None and batch.train_batch_size is None:
        lines.append(NO_BATCH)
    if schedule.stages is not None and config.checkpoint.save is None:
        lines.append("stages: need save, because a stage starts from the checkpoint of the previous one; set save")
    return lines


def run(config: "Config", without_effect: Sequence[str], arguments: Sequence[str]) -> int:
    """Start the processes of the configuration, or train in this process."""
    from megatron_coca.training import launch

    status = launch.start(config.launch, os.environ, [MAIN, "train", *arguments])
    if status is not None:
        return status
    if config.parallel.distributed_backend == "gloo":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before PyTorch looks for GPUs
    from megatron_coca.training.run import fit

    fit(config, without_effect)
    return 0
