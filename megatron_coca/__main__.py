"""`python -m megatron_coca` does the same as `megatron-coca`. To start another command, a command runs this file by its
path (work/processes.py).
"""

import sys
from pathlib import Path

if not __package__:  # run by its path: modules of this folder must not replace others of the same name
    sys.path[: 0 if sys.flags.safe_path else 1] = [str(Path(__file__).resolve().parents[1])]

from megatron_coca.cli import main

if __name__ == "__main__":
    sys.exit(main())
