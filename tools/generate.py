"""Continue prompts with a checkpoint: python tools/generate.py --checkpoint runs/coca --prompt "The sea was calm"."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, without installing

from megatron_coca.commands.generate import main

if __name__ == "__main__":
    sys.exit(main())
