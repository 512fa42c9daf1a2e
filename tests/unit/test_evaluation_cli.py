"""The evaluation command line answers at once: PyTorch and the other slow libraries are imported when a task runs."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_coca.checkpoints.weights import DTYPES
from megatron_coca.evaluation import options
from megatron_coca.evaluation.cli import TASKS
from megatron_coca.model import DYNAMIC_LENGTH, DYNAMIC_LENGTHS

ROOT = Path(__file__).parents[2]
HELP_OF_ALL = """
import contextlib, io, sys
from megatron_coca.evaluation.cli import TASKS, main
for arguments in [["--help"], ["perplexty"], *([task, "--help"] for task in TASKS)]:
    shown = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        main(arguments)
    assert shown.getvalue().startswith("usage: evaluate.py"), arguments
    slow = {"torch", "deepspeed", "transformers", "matplotlib", "lm_eval", "datasets"} & sys.modules.keys()
    assert not slow, (arguments, slow)
"""


def test_help_and_typing_errors_import_no_slow_library() -> None:
    subprocess.run([sys.executable, "-c", HELP_OF_ALL], cwd=ROOT, check=True)


@pytest.mark.parametrize("arguments", [["--help"], ["perplexity", "--help"], ["perplexty"]], ids=" ".join)
def test_help_takes_less_than_a_second(arguments: list[str]) -> None:
    """Processor time, which other processes do not change; one of three runs."""
    code = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], capture_output=True); "
        "used = resource.getrusage(resource.RUSAGE_CHILDREN); print(used.ru_utime + used.ru_stime)"
    )
    command = [sys.executable, "-c", code, sys.executable, "evaluate.py", *arguments]
    runs = (subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True) for _ in range(3))
    assert any(float(run.stdout) < 1.0 for run in runs)


def test_choices_are_those_of_the_libraries() -> None:
    assert tuple(DTYPES) == options.DTYPES
    assert options.DYNAMIC_LENGTHS.keys() == DYNAMIC_LENGTHS.keys() and options.DYNAMIC_LENGTH == DYNAMIC_LENGTH
    assert len(TASKS) == 9
