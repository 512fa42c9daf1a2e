"""Hugging Face's `evaluate` and our script of that name."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = """
import sys
from megatron_coca.evaluation.harness.loading import import_evaluate_library
import_evaluate_library()
import evaluate
print(evaluate.__file__, sys.path[0] == "")
"""


def test_the_package_is_found_beside_our_script() -> None:
    found = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, check=True)
    file, path_as_before = found.stdout.split()
    assert Path(file).parent.name == "evaluate" and Path(file).parent.parent != ROOT
    assert path_as_before == "True"
