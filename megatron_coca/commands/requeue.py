"""Decide whether a Slurm job is requeued after its training has ended, and record this in the run's folder.

    megatron-coca requeue --status 137 --errors srun.log configs/350M/roformer_coca.yml configs/cluster/slurm.yml

configs/cluster/slurm.sbatch calls this command with the exit status of srun and the arguments of the training. The
exit status is 0 if the job is to be requeued, with the nodes to exclude on standard output, and 3 if not.
"""

import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from megatron_coca.checkpoints.native.object_store import save_folder
from megatron_coca.checkpoints.native.read import steps
from megatron_coca.commands import command_parser, train
from megatron_coca.training.launches import GAVE_UP, REQUEUED, append, decide, first_failure, read_launches

STOP = 3
"""The exit status if the job is not to be requeued. Statuses 1 and 2 mean that this command failed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status. Raises ConfigError."""
    options, given = parser().parse_known_args(arguments)
    config, _ = train.read_config(train.parser().parse_known_intermixed_args(given)[0])
    save = save_folder(config.checkpoint)
    folder = Path(config.logging.log_dir or save or "")
    if save is None:
        print("requeue: the run has no `save` folder and would start again from step 0; not requeued", file=sys.stderr)
        return STOP
    job = os.environ.get("SLURM_JOB_ID", "")
    failure = first_failure(
        options.errors.read_text(errors="replace", encoding="utf-8") if options.errors.is_file() else ""
    )
    step = max(steps(save), default=0)
    decision = decide(read_launches(folder), options.status, step, job, failure, options.limit)
    node = failure.node if failure is not None else None
    event = REQUEUED if decision.requeue else GAVE_UP
    append(
        folder, {"event": event, "status": options.status, "why": decision.why, "step": step, "job": job, "node": node}
    )
    excluded = f", without {', '.join(decision.excluded)}" if decision.excluded else ""
    verb = "is requeued" if decision.requeue else "is not requeued"
    print(f"requeue: job {job} {verb}{excluded}: {decision.why}; newest checkpoint: step {step}", file=sys.stderr)
    print(",".join(decision.excluded))
    return 0 if decision.requeue else STOP


def parser() -> ArgumentParser:
    parser = command_parser("requeue", __doc__)
    parser.add_argument("--status", type=int, required=True, metavar="N", help="exit status of srun")
    parser.add_argument("--errors", type=Path, required=True, metavar="FILE", help="messages of srun")
    parser.add_argument(
        "--limit",
        type=int,
        default=5,
        metavar="N",
        help="maximum number of restarts without a newer checkpoint (default: %(default)s)",
    )
    return parser
