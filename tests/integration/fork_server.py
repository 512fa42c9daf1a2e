"""A process that has imported everything and forks training processes: what costs seconds is done once.

Reads one request a line from standard input, {"arguments": [...], "environments": [{...}, ...], "output": "FILE"}, forks
a process of train.py's main for each environment into a process group of their own, answers with the group's number,
and once all have ended with their exit statuses (minus the signal for one that was killed). Like a launcher it kills
the rest when one fails.
"""

import json
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND


def become_training(request: dict[str, Any], environment: dict[str, str], group: int, main: Any) -> None:
    """The forked process: train, and end without what the parent would do at its end."""
    os.setpgid(0, group)
    null, output = os.open(os.devnull, os.O_RDONLY), os.open(request["output"], APPEND)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.environ.update(environment)
    status = 1
    try:
        status = main(request["arguments"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def serve(main: Any) -> None:
    """Answer requests until standard input ends."""
    for line in sys.stdin:
        request = json.loads(line)
        ranks: list[int] = []
        for environment in request["environments"]:
            child = os.fork()
            if child == 0:
                become_training(request, environment, ranks[0] if ranks else 0, main)
            ranks.append(child)
            os.setpgid(child, ranks[0])  # here and there: whoever comes first
        print(ranks[0], flush=True)
        print(json.dumps(ended(ranks)), flush=True)


def ended(ranks: list[int]) -> list[int]:
    """Wait for all; their statuses in order."""
    statuses: dict[int, int] = {}
    while len(statuses) < len(ranks):
        child, status = os.wait()
        statuses[child] = os.waitstatus_to_exitcode(status)
        if statuses[child] and len(statuses) < len(ranks):
            os.killpg(ranks[0], signal.SIGKILL)
    return [statuses[child] for child in ranks]


if __name__ == "__main__":
    train_main = runpy.run_path(str(ROOT / "train.py"))["main"]
    import megatron_coca.training.loop  # noqa: F401

    print("ready", flush=True)
    serve(train_main)
