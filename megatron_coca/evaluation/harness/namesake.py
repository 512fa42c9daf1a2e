"""Hugging Face's package `evaluate`, which our script of that name would stand before.

The harness imports it when a task asks for one of its metrics. Python looks first in the folder of the script, and there
lies `evaluate.py`.
"""

import importlib
import sys
from pathlib import Path

NAME = "evaluate"


def import_namesake() -> None:
    """Import the package, if it is installed, so that the harness finds it among the loaded modules."""
    if NAME in sys.modules:
        return
    found = sys.path
    sys.path = [entry for entry in found if not (Path(entry or ".") / f"{NAME}.py").is_file()]
    try:
        importlib.import_module(NAME)
    except ImportError:
        pass  # a task that needs it says so
    finally:
        sys.path = found
