"""Run a GPT-NeoX script with the plugin: python -m megatron_coca.neox_plugin deepy.py train.py -d configs 350M.yml

Write `python -m megatron_coca.neox_plugin` instead of `python` before any GPT-NeoX script. Processes that deepy.py
starts use this file too.
"""

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_coca.attention.inputs import BackendError
from megatron_coca.config import ConfigError
from megatron_coca.neox_plugin.activation import activate
from megatron_coca.neox_plugin.upstream import IncompatibleError

USAGE = "usage: python -m megatron_coca.neox_plugin SCRIPT.py [SCRIPT ARGUMENTS]"


def main(arguments: Sequence[str]) -> int:
    """Run the script and return the exit status. After a configuration error, the status is 2 and no traceback is
    printed.
    """
    options = [
        argument for argument in arguments[:1] if argument.startswith("--local_rank")
    ]  # DeepSpeed passes this option first
    script, *rest = [*arguments[len(options) :], ""]
    if not Path(script).is_file():
        print(f"{USAGE}\n{script or 'SCRIPT.py'}: no such file; correct the path", file=sys.stderr)
        return 2
    own = Path(__file__).parent
    others = [path for path in sys.path if Path(path) != own]  # without the plugin's folder, which Python added
    sys.path[:] = [str(Path(script).resolve().parent), *others]
    sys.argv = [script, *options, *rest[:-1]]
    try:
        activate()
        runpy.run_path(script, run_name="__main__")
    except (IncompatibleError, ConfigError, BackendError) as error:
        print(f"megatron_coca.neox_plugin: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
