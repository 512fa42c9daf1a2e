"""Runs a script of GPT-NeoX with the plugin: python -m megatron_coca.neox_plugin deepy.py train.py -d configs 350M.yml

It takes the place of `python` in front of any of upstream's scripts. Processes that deepy.py starts are run by this file
too.
"""

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_coca.neox_plugin.activation import activate
from megatron_coca.neox_plugin.compatibility import IncompatibleError

USAGE = "usage: python -m megatron_coca.neox_plugin SCRIPT.py [ARGUMENTS of the script]"


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status: 2 where there is something to put right before the script runs."""
    options = [text for text in arguments[:1] if text.startswith("--local_rank")]  # DeepSpeed puts it first
    script, *rest = [*arguments[len(options) :], ""]
    if not Path(script).is_file():
        print(f"{USAGE}\n{script or 'SCRIPT.py'}: no such file", file=sys.stderr)
        return 2
    own = Path(__file__).parent
    others = [place for place in sys.path if Path(place) != own]  # Python puts the folder of a script there
    sys.path[:] = [str(Path(script).resolve().parent), *others]
    try:
        activate()
    except IncompatibleError as error:
        print(error, file=sys.stderr)
        return 2
    sys.argv = [script, *options, *rest[:-1]]
    runpy.run_path(script, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
