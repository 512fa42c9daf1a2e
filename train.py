"""`megatron-coca train` of this checkout."""

import sys

from megatron_coca.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
