"""Parts of a command: `--part I/N`, or `--part auto/N` for a task of a scheduler's array."""

import os
from argparse import ArgumentTypeError
from collections.abc import Mapping

INDEXES = ("JOB_COMPLETION_INDEX", "SLURM_ARRAY_TASK_ID")
"""The environment variables in which Kubernetes and Slurm give the index of a job's task. Both count from 0."""
PART_HELP = (
    "do only part I of N; with auto/N, the part is the index, counted from 0, of the Kubernetes pod or of the Slurm "
    "array's task; when all parts are finished, run the command once without this option"
)


def part_of(text: str, environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Convert a text such as "2/8" to (1, 8): the part, counted from 0, and the number of parts.

    The number of parts is always given, because no scheduler gives a task the size of the whole array. If one task of a
    Slurm array is submitted again, `SLURM_ARRAY_TASK_COUNT` and `SLURM_ARRAY_TASK_MAX` describe only the new array.
    """
    part, _, parts = text.partition("/")
    if part == "auto":
        found = [name for name in INDEXES if environment.get(name, "").isdecimal()]
        if not found:
            raise ArgumentTypeError(f"{text:.20}: {' and '.join(INDEXES)} are not set; give I/N, such as 1/{parts:.9}")
        part = str(int(environment[found[0]]) + 1)
        if parts.isdecimal() and int(part) > int(parts):
            raise ArgumentTypeError(
                f"{text:.20}: {found[0]} is {environment[found[0]]}, but indexes must be from 0 to {int(parts) - 1}; "
                "number the array from 0, and give its whole size"
            )
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise ArgumentTypeError(f"{text:.20}: not a part; write I/N with I from 1 to N, such as 1/8, or auto/N")
    return int(part) - 1, int(parts)
