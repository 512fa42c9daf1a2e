"""Activate the plugin on import. If the checkout is incompatible, print the reason and exit with status 2."""

import sys

from megatron_coca.neox_plugin.activation import activate
from megatron_coca.neox_plugin.upstream import IncompatibleError

try:
    activate()
except IncompatibleError as error:
    print(f"megatron_coca.neox_plugin: {error}", file=sys.stderr)
    sys.exit(2)
