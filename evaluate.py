"""`megatron-coca evaluate` of this checkout."""

import sys

from megatron_coca.cli import main

if __name__ == "__main__":
    sys.exit(main(["evaluate", *sys.argv[1:]]))
