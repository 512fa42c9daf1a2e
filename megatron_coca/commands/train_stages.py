"""Trains several runs one after the other, each from the weights of an earlier one.

    megatron-coca train-stages configs/finetune/llama7b_coca_stage{1,2,3}.yml --with configs/cluster/a100x32.yml
    megatron-coca train-stages configs/finetune/coca_stage{1,2,3}.yml --from models/qwen3 --with data.yml

Rerunning the same command continues where it was interrupted. The exit status is that of `megatron-coca train`
(docs/faults.md).
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_coca.commands import command_parser
from megatron_coca.config import Config, ConfigError, load_config, split_inputs
from megatron_coca.program import PROGRAM
from megatron_coca.training.exit_status import CaughtSignals
from megatron_coca.training.launch.processes import FORWARDED, LocalProcess, supervise

# PyTorch takes seconds to import: that is done after the configurations are accepted.


class Stage(NamedTuple):
    """One run: its name, the arguments of `megatron-coca train`, and the config that they resolve to."""

    name: str
    arguments: tuple[str, ...]
    config: Config

    @property
    def save(self) -> Path:
        """The local folder of its checkpoints."""
        from megatron_coca.checkpoints.object_store import save_folder

        folder = save_folder(self.config.checkpoint)
        assert folder is not None, "plan has checked it"
        return folder

    @property
    def reached(self) -> int:
        """The step of its newest checkpoint, 0 if there is none."""
        from megatron_coca.checkpoints import native

        return max(native.steps(self.save), default=0)


def plan(files: Sequence[str], shared: Sequence[str] = (), model: str | None = None) -> list[Stage]:
    """The stages in the order of their YAML `files`; `shared` files and `key=value` overrides apply to all, and the
    folder `model` has the network, and the weights of a stage that loads none.

    Raises:
        ConfigError: all problems at once: a config is not valid, or does not start from the weights of an earlier
        stage.
    """
    stages: list[Stage] = []
    problems: list[str] = []
    more_files, keys = split_inputs(shared)
    base = None
    if model is not None:
        from megatron_coca.checkpoints.importing import starting_config

        base = starting_config(model)
    for file in files:
        try:
            inputs = [file, *more_files]
            config = load_config(inputs, keys) if base is None else base.override(keys, inputs)
            first = () if model is None else (model,)
            stages.append(Stage(Path(file).stem, (*first, file, *shared, "auto_resume=true"), config))
        except ConfigError as error:
            problems += [line if line.startswith(file) else f"{file}: {line}" for line in error.problems]

    def same(one: str | None, other: str | None) -> bool:
        return one is not None and other is not None and Path(one).resolve() == Path(other).resolve()

    for number, stage in enumerate(stages):
        own, schedule = stage.config.checkpoint, stage.config.schedule
        saves = [earlier.config.checkpoint.save for earlier in stages[:number]]
        lines = [f"{name}: not set" for name in ("save", "load") if getattr(own, name) is None]
        lines += ["train_iters: not set"] if schedule.train_iters is None else []
        lines += [] if own.finetune else ["finetune: a stage starts from weights; set finetune=true"]
        if any(same(own.save, save) for save in saves):
            lines.append(f"save: {own.save} is the folder of an earlier stage; each needs its own")
        if saves and own.load is not None and not any(same(own.load, save) for save in saves):
            lines.append(f"load: {own.load} is not the save folder of an earlier stage ({', '.join(map(str, saves))})")
        problems += [f"{stage.name}: {line}" for line in lines]
    if problems:
        raise ConfigError(*problems)
    return stages


def refuse_other_run(stage: Stage) -> None:
    """Raise a CheckpointError if the folder of a stage holds a run with other keys, more steps, or other initial
    weights than those that `load` holds now.
    """
    from megatron_coca.checkpoints import CheckpointError, native, open_checkpoint
    from megatron_coca.training.resume import differing_run

    keys, last = stage.config.checkpoint, stage.config.schedule.train_iters or 0
    if not stage.reached:
        return
    folder = native.step_folder(stage.save, stage.reached)
    problems = differing_run(load_config([folder / native.CONFIG]), stage.config)
    if stage.reached > last:
        problems.append(f"train_iters (step {stage.reached} is done, now {last})")
    if problems:
        raise CheckpointError(
            f"{folder}: belongs to a different run from {stage.name}: {', '.join(problems)}; restore these, or move "
            f"{stage.save} away"
        )
    origin = native.read_meta(folder).get("origin")
    if origin is None or keys.load is None or not Path(keys.load).exists():
        return
    if origin != open_checkpoint(keys.load, verify=False, step=keys.iteration).identity:
        raise CheckpointError(
            f"{folder}: started from other weights than {keys.load} holds now; move {stage.save} away to train it again"
        )


def run_stages(stages: Sequence[Stage], train: Callable[[Sequence[str]], int]) -> int:
    """Train every unfinished stage; returns 0, or the exit status of the stage that failed.

    `train` runs `megatron-coca train` with a command line and returns its exit status.

    Raises:
        CheckpointError: as `refuse_other_run`.
    """
    for number, stage in enumerate(stages, 1):
        refuse_other_run(stage)
        header, last = f"# {number} of {len(stages)}: {stage.name}", stage.config.schedule.train_iters
        if stage.reached == last:
            print(f"{header}: step {last} is already saved", flush=True)
            continue
        print(f"{header}: {stage.config.checkpoint.load} -> {stage.save}", flush=True)
        status = train(stage.arguments)
        if status:
            return status
        if stage.reached != last:
            print(f"{stage.name}: ended before step {last}; rerun the same command to continue", flush=True)
            return 0
    return 0


def run_train(arguments: Sequence[str]) -> int:
    """Run `megatron-coca train` in a process, forward signals to it, and return its exit status."""
    with CaughtSignals(FORWARDED) as signals:
        return supervise([LocalProcess("train", [*PROGRAM, "train", *arguments], os.environ)], signals)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status of the runs. Raises ConfigError, CheckpointError."""
    parser = command_parser("train-stages", __doc__)
    parser.add_argument("stages", nargs="+", metavar="STAGE.yml", help="one file per run, in order")
    parser.add_argument(
        "--with",
        nargs="+",
        default=[],
        dest="shared",
        metavar="MORE.yml | key=value",
        help="given to every run after its own file, for example num_gpus=8",
    )
    parser.add_argument("--from", dest="model", metavar="FOLDER", help="the model that the first run starts from")
    args = parser.parse_args(arguments)
    return run_stages(plan(args.stages, args.shared, args.model), run_train)
