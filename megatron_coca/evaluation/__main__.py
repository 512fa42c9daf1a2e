"""`python -m megatron_coca.evaluation` is `evaluate.py`, wherever the package is installed."""

import sys

from megatron_coca.evaluation.cli import main

if __name__ == "__main__":
    sys.exit(main())
