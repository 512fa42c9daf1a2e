"""Run on the stand-in CUDA device: python -m tests.pretend COMMAND ... (docs/pretend.md).

With the Python of an environment whose PyTorch is a CUDA build. The first call builds the library.
"""

import argparse
import os
import sys

from tests.pretend.build import build
from tests.pretend.device import FOLDER, environment


def main() -> int:
    """Run a command, in a process that has the library loaded."""
    options = parse()
    if FOLDER not in os.environ:
        command = [sys.executable, "-m", "tests.pretend", *sys.argv[1:]]
        os.execve(sys.executable, command, environment(build(), options.cap))
    return options.function(options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.pretend", description=__doc__)
    capability = int(os.environ.get("PRETEND_CAP", "90"))
    parser.add_argument("--cap", type=int, default=capability, choices=[80, 90, 100], help="80: A100, 90: H100")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    step = commands.add_parser("step", help="launches, waits with their stacks, and copies of one training step")
    step.add_argument("inputs", nargs="+", metavar="CONFIG.yml | key=value")
    step.add_argument("--kernels", type=int, default=0, metavar="N", help="also list the N kernels launched most")
    step.set_defaults(function=show_step)
    return parser.parse_args()


def show_step(options: argparse.Namespace) -> int:
    """Print what one training step does."""
    from tests.pretend import measure

    measure.join_group()
    step = measure.record_step(measure.engine_step(measure.load(options.inputs)))
    record = step.record
    print(f"launches {record.total('launch')}, in CUDA graphs {record.total('captured')}; {step.milliseconds:.0f} ms")
    for kind in ("wait", "pageable", "copy", "collective", "allocation", "order", "refused", "other"):
        for name, count in record.names(kind).items():
            print(f"{kind}: {count} {name}")
    for (kind, name, stack), count in record.stacks.most_common():
        print(f"{count} {kind} {name}: {stack}")
    for name, count in list(record.names("launch").items())[: options.kernels]:
        print(f"{count:6d} {name[:200]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
