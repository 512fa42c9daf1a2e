"""Slurm: a job array with one task for each cell that is not done, and the job that collects the report."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from megatron_coca.ablation.cells import State, state_of
from megatron_coca.ablation.grid import Cell
from megatron_coca.evaluation.results import EvaluationError, check_writable, write_atomically

ARRAY, COLLECT, SUBMIT = "cells.sbatch", "collect.sbatch", "submit.sh"

PYTHON = """\
if [ -z "$PYTHON" ]; then
    PYTHON=python
    [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
fi
"""

ARRAY_TEXT = """\
#!/bin/bash
# One task of the array for each cell, written by `megatron-coca ablate`. Options of sbatch win over those below.
# PYTHON names the interpreter (default: .venv/bin/python if it exists, else python); RUN is put before it.
#
# Two minutes before the time limit, and when Slurm preempts the job, training saves; the task is then requeued.
#SBATCH --job-name=ablation
#SBATCH --array=0-{last}
#SBATCH --ntasks=1
{gpus}#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%A_%a.out

{python}
CELLS=(
{cells}
)

# shellcheck disable=SC2086
srun --kill-on-bad-exit=0 --cpus-per-task="${{SLURM_CPUS_PER_TASK:-1}}" $SRUN_OPTIONS \\
    $RUN "$PYTHON" -u {command} --only "${{CELLS[$SLURM_ARRAY_TASK_ID]}}"
status=$?

if [ "$status" -eq 75 ]; then
    echo "preempted: requeued as task $SLURM_ARRAY_TASK_ID of job $SLURM_ARRAY_JOB_ID"
    scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID"
fi
exit "$status"
"""

COLLECT_TEXT = """\
#!/bin/bash
# The report of all cells that are done, written by `megatron-coca ablate`.
#SBATCH --job-name=ablation-report
#SBATCH --ntasks=1
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.out

{python}
# shellcheck disable=SC2086
$RUN "$PYTHON" -u {command} --report
"""

SUBMIT_TEXT = """\
#!/bin/bash
# Submit the cells, and the report after them. Run it from the repository's root; options go to the array's sbatch.
set -e
job=$(sbatch --parsable "$@" {array})
sbatch --dependency="afterany:${{job%%;*}}" {collect}
echo "submitted the cells as job ${{job%%;*}}"
"""


def write_jobs(cells: Sequence[Cell], folder: Path, command: Sequence[str], gpus: bool) -> list[Path]:
    """Write the three scripts into `folder`; `command` is what follows `python` to run `ablate`, without `--only`.

    With `gpus` each task gets as many as a cell trains on. Raises EvaluationError where all cells are done, or nothing
    can be written.
    """
    missing = [cell for cell in cells if state_of(cell) is not State.DONE]
    if not missing:
        raise EvaluationError("--slurm: all cells are done; there is nothing to submit")
    values = {
        "last": len(missing) - 1,
        "gpus": f"#SBATCH --gpus-per-task={max(cell.ranks for cell in missing)}\n" if gpus else "",
        "python": PYTHON,
        "cells": "\n".join(f"    {shlex.quote(cell.name)}" for cell in missing),
        "command": shlex.join(command),
        "array": shlex.quote(str(folder / ARRAY)),
        "collect": shlex.quote(str(folder / COLLECT)),
    }
    texts = {ARRAY: ARRAY_TEXT, COLLECT: COLLECT_TEXT, SUBMIT: SUBMIT_TEXT}
    for name, text in texts.items():
        check_writable(folder / name)
        write_atomically(folder / name, text.format(**values).encode())
    (folder / SUBMIT).chmod(0o755)
    return [folder / name for name in texts]
