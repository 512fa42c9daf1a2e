"""train.py with the hooks of the variable HOOKS in every process that trains, whoever starts it."""

import importlib
import json
import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from tests.integration.hooks import Hook, install

    main = runpy.run_path(str(ROOT / "train.py"))["main"]
    main.__globals__["__file__"] = __file__  # what a launcher starts
    if "RANK" in os.environ:
        importlib.import_module("megatron_coca.training.loop")
        install([Hook(*hook) for hook in json.loads(os.environ["HOOKS"])], int(os.environ["RANK"]))
    sys.exit(main(sys.argv[1:]))
