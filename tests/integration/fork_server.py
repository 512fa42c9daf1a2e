"""A process that imports everything once and forks training processes, because imports take seconds.

It reads one request per line from standard input: {"program": "MODULE", "arguments": [...], "environments": [{...},
...], "hooks": [...], "output": "FILE"}. For each environment it forks a process that calls the module's function `main`
with the arguments; all of them share a new process group. The answers are the group's number and, when all processes
have ended, their exit statuses (minus the signal for a killed process). Like a launcher, it kills the others some time
after one has failed. Hooks are installed before main (hooks.py).
"""

import gc
import json
import os
import signal
import sys
import time
import traceback
from importlib import import_module
from typing import Any

from tests.integration.hooks import Hook, install

IMPORTED = (
    "megatron_coca.commands.train",
    "megatron_coca.training.run",
    "megatron_coca.training.engine.deepspeed_engine",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "numpy.ma",
    "torch._inductor",
    "torch.utils.tensorboard",
)
"""What every run imports on its way, which costs more than its steps. Our modules name the device to DeepSpeed, which
otherwise looks for one and prints a warning.
"""
APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND
SETTLE = 20.0
"""Seconds that the other ranks have to end by themselves."""
INTERVAL = 0.01


def become_program(request: dict[str, Any], environment: dict[str, str], group: int) -> None:
    """The forked process: run the program, and end without what the parent would do at its end."""
    os.setpgid(0, group)
    null, output = os.open(os.devnull, os.O_RDONLY), os.open(request["output"], APPEND)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the server may ignore it
    status = 1
    try:
        install([Hook(*hook) for hook in request["hooks"]], int(environment.get("RANK", "0")))
        status = import_module(request["program"]).main(request["arguments"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def serve() -> None:
    """Answer requests until standard input ends."""
    for line in sys.stdin:
        request = json.loads(line)
        ranks: list[int] = []
        for environment in request["environments"]:
            child = os.fork()
            if child == 0:
                become_program(request, environment, ranks[0] if ranks else 0)
            ranks.append(child)
            os.setpgid(child, ranks[0])  # here and there: whoever comes first
        print(ranks[0], flush=True)
        print(json.dumps(ended(ranks)), flush=True)


def ended(ranks: list[int]) -> list[int]:
    """Wait for all; their statuses in order."""
    statuses: dict[int, int] = {}
    deadline = float("inf")
    while len(statuses) < len(ranks):
        child, status = os.waitpid(-1, 0 if len(ranks) == 1 else os.WNOHANG)
        if child:
            statuses[child] = os.waitstatus_to_exitcode(status)
            deadline = min(deadline, time.monotonic() + SETTLE) if statuses[child] else deadline
        elif time.monotonic() > deadline:
            os.killpg(ranks[0], signal.SIGKILL)
        else:
            time.sleep(INTERVAL)
    return [statuses[child] for child in ranks]


if __name__ == "__main__":
    for name in IMPORTED:
        import_module(name)
    gc.collect()
    gc.freeze()  # otherwise each process would look for garbage among all these modules, and copy their memory
    print("ready", flush=True)
    serve()
