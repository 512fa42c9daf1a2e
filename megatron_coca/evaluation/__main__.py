"""`python -m megatron_coca.evaluation` runs `evaluate.py` of an installed package."""

import sys

from megatron_coca.evaluation.cli import main

if __name__ == "__main__":
    sys.exit(main())
