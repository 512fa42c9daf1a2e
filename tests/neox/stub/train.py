"""A script that the plugin runs: it says what it was given, and ends with 7."""

import sys

import megatron.neox_arguments

if __name__ == "__main__":
    folders = [place for place in sys.path if place.endswith(("neox_plugin", "stub"))]
    print(sys.argv, folders, "coca" in megatron.neox_arguments.NeoXArgs.__dataclass_fields__["pos_emb"].type.__args__)
    sys.exit(7)
