"""Evaluates checkpoints: `python evaluate.py --help` lists tasks, `python evaluate.py TASK --help` their options."""

import sys

from megatron_coca.evaluation.cli import main

if __name__ == "__main__":
    sys.exit(main())
