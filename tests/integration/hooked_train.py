"""`megatron-coca train` with the hooks of the variable HOOKS in every training process, with any launcher."""

import importlib
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from megatron_coca.commands import train
    from tests.integration.hooks import Hook, install

    train.MAIN = __file__  # what a launcher starts
    if "RANK" in os.environ or "--num_gpus" not in sys.argv:
        importlib.import_module("megatron_coca.training.run")
        install([Hook(*hook) for hook in json.loads(os.environ["HOOKS"])], int(os.environ.get("RANK", "0")))
    sys.exit(train.main([each for each in sys.argv[1:] if Path(each).name not in ("train.py", "train")]))
