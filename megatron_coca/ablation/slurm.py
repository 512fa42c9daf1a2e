"""Slurm: a job array with one task for each cell that is not done, and the job that collects the report."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from megatron_coca.ablation.cells import State, state_of
from megatron_coca.ablation.grid import Cell
from megatron_coca.evaluation.results import EvaluationError, check_writable, write_atomically

SCRIPTS = ARRAY, COLLECT, SUBMIT = "cells.sbatch", "collect.sbatch", "submit.sh"
"""Their templates are in this folder."""


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
        "gpus": max(cell.ranks for cell in missing) if gpus else None,
        "cells": [shlex.quote(cell.name) for cell in missing],
        "command": shlex.join(command),
        "array": shlex.quote(str(folder / ARRAY)),
        "collect": shlex.quote(str(folder / COLLECT)),
    }
    loader = FileSystemLoader(Path(__file__).parent)
    templates = Environment(
        loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    for name in SCRIPTS:
        check_writable(folder / name)
        write_atomically(folder / name, templates.get_template(f"{name}.j2").render(values).encode())
    (folder / SUBMIT).chmod(0o755)
    return [folder / name for name in SCRIPTS]
