"""How one command of the project starts another."""

import sys
from pathlib import Path

MAIN = str(Path(__file__).with_name("__main__.py"))
"""`python MAIN train ...` is `megatron-coca train ...`, installed or in a checkout, from any working folder."""
PROGRAM = (sys.executable, "-u", MAIN)
