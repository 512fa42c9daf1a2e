"""Describe and verify checkpoints.

python tools/inspect_checkpoint.py runs/350M_roformer_coca                  # all steps of a run
python tools/inspect_checkpoint.py runs/350M_roformer_coca/global_step5000  # one
python tools/inspect_checkpoint.py runs/350M_roformer_coca --no-verify --json

Every file is compared with its checksum, with --no-verify only its size. The exit status is 1 if a checkpoint is
damaged, and 2 if there is none.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, without installing

from megatron_coca.checkpoints import CheckpointError
from megatron_coca.checkpoints.inspection import checkpoints_in, describe, describe_text


def main(arguments: list[str]) -> int:
    """Returns the exit status, see above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="a run's save folder or one step's, or its URL on an object store")
    parser.add_argument("--no-verify", action="store_true", help="compare names and sizes only")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    try:
        found = [describe(folder, not options.no_verify) for folder in checkpoints_in(options.path)]
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps([each.facts() for each in found], indent=1))
    else:
        print("\n\n".join(describe_text(each) for each in found))
    return int(any(each.damage for each in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
