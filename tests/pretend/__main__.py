"""Run on the stand-in CUDA device: python -m tests.pretend COMMAND ... (tests/pretend).

With the Python of an environment whose PyTorch is a CUDA build. The first call builds the library.
"""

import argparse
import json
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from tests.pretend import budgets
from tests.pretend.build import BUILT, build
from tests.pretend.device import FOLDER, environment
from tests.pretend.scenarios import SCENARIOS, Scenario

POLL_SECONDS = 0.2


def main() -> int:
    """Run a command in a process that has the library loaded; return the exit status."""
    options = parse()
    if options.function in (list_scenarios, run_plan):  # which need no device in this process
        return int(options.function(options))
    if FOLDER not in os.environ:
        command = [sys.executable, "-m", "tests.pretend", *sys.argv[1:]]
        os.execve(sys.executable, command, environment(build(), options.cap))
    return options.function(options)


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.pretend", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    capability = int(os.environ.get("PRETEND_CAP", "90"))
    parser.add_argument("--cap", type=int, default=capability, choices=[80, 90, 100], help="80: A100, 90: H100")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    check = commands.add_parser("check", help="run the scenarios and compare their counters with the budgets")
    check.add_argument("--only", nargs="+", default=[""], metavar="BEGINNING", help="scenarios with these beginnings")
    check.add_argument("--update", action="store_true", help="write the measured values into the budgets")
    check.set_defaults(function=run_scenarios)
    commands.add_parser("list", help="names of the scenarios").set_defaults(function=list_scenarios)
    step = commands.add_parser("step", help="launches, waits with their stacks, and copies of one training step")
    step.add_argument("inputs", nargs="+", metavar="CONFIG.yml | key=value")
    step.add_argument("--kernels", type=int, default=0, metavar="N", help="also list the N kernels launched most")
    step.set_defaults(function=show_step)
    engines = commands.add_parser("engines", help="launches and host time of a step with each engine")
    engines.add_argument("inputs", nargs="+", metavar="CONFIG.yml | key=value")
    engines.set_defaults(function=show_engines)
    layers = commands.add_parser("layer", help="launches and bytes of a layer, forward and backward, by operation")
    layers.add_argument("inputs", nargs="+", metavar="CONFIG.yml | key=value")
    layers.set_defaults(function=show_layer)
    kernels = commands.add_parser("kernels", help="bytes of every kernel of a compiled block, forward and backward")
    kernels.add_argument("inputs", nargs="+", metavar="CONFIG.yml | key=value")
    kernels.set_defaults(function=show_kernels)
    plan = commands.add_parser("plan", help="run the plan of the GPU report, and kill each part once")
    plan.add_argument("--output", type=Path, default=BUILT / "plan", metavar="DIR", help="default: %(default)s")
    plan.add_argument("--limits", type=float, default=4.0, metavar="FACTOR", help="as of tools/gpu_report.py")
    plan.add_argument("--page", type=Path, metavar="FILE.md", help="write a page about it")
    plan.set_defaults(function=run_plan)
    script = commands.add_parser("run", help="run a script of this project, for example train.py")
    script.add_argument("script", metavar="SCRIPT.py")
    script.add_argument("arguments", nargs=argparse.REMAINDER)
    script.set_defaults(function=run_script)
    return parser.parse_args()


def list_scenarios(options: argparse.Namespace) -> int:
    """Print the names of the scenarios."""
    print("\n".join(SCENARIOS))
    return 0


def run_plan(options: argparse.Namespace) -> int:
    """Run the plan of the GPU report."""
    from tests.pretend import plan

    return plan.main(options.output, options.limits, options.page)


def run_scenarios(options: argparse.Namespace) -> int:
    """Run scenarios one after the other, write the report, and return 1 if a budget is exceeded."""
    import torch

    torch._C._cuda_getDeviceCount = lambda: 1  # PyTorch's own would forbid CUDA in the processes that are forked below
    from tests.pretend import measure  # imports all once, for every process

    known, measured = budgets.read(), {}
    chosen = {name: row for name, row in SCENARIOS.items() if name.startswith(tuple(options.only))}
    for name, scenario in chosen.items():
        start = time.monotonic()
        measured[name] = isolated(name, scenario, getattr(measure, scenario.function))
        counters = ", ".join(f"{counter} {value:g}" for counter, value in measured[name].items())
        print(f"{name}: {counters} ({time.monotonic() - start:.0f} s)", flush=True)
        BUILT.joinpath("report.json").write_text(json.dumps(measured, indent=1) + "\n")
        BUILT.joinpath("report.md").write_text(budgets.report(known, measured, options.cap))
        if options.update:  # at once: a run that is interrupted keeps what it measured
            budgets.write(budgets.updated(budgets.read(), {name: measured[name]}, options.cap))
    problems = budgets.violations(known, measured)
    print("\n".join(problems) or f"all {len(measured)} scenarios are within their budgets")
    return 1 if problems else 0


def isolated(name: str, scenario: Scenario, measure: Callable[..., dict[str, float]]) -> dict[str, float]:
    """Measure in a process of its own, whose output goes to a file; an error or a timeout is the counter `failed`."""
    log = budgets.log_file(name)
    log.parent.mkdir(parents=True, exist_ok=True)
    result = log.with_suffix(".json")
    result.unlink(missing_ok=True)
    child = os.fork()  # nothing of CUDA has been called yet
    if child == 0:
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            try:
                result.write_text(json.dumps(measure(scenario.inputs)))
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)
    deadline, running = time.monotonic() + scenario.seconds, True
    try:
        while running and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            running = os.waitpid(child, os.WNOHANG) == (0, 0)
    finally:
        if running:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            log.open("a").write(f"killed; the limit is {scenario.seconds} s\n")
    return json.loads(result.read_text()) if result.exists() else {budgets.FAILED: 1}


def show_step(options: argparse.Namespace) -> int:
    """Print what one training step of a configuration does."""
    from tests.pretend import measure

    measure.prepare()
    measure.group.init_distributed()
    config = measure.load(options.inputs)
    record, milliseconds = measure.recorded(measure.engine_step(config), warmup=measure.warmup_of(config))
    print(f"host {milliseconds:.0f} ms")
    print(record.text(options.kernels))
    return 0


def show_engines(options: argparse.Namespace) -> int:
    """Print what a step takes with each engine."""
    from tests.pretend import measure

    for name, (launches, milliseconds) in measure.engines(options.inputs).items():
        print(f"{name}: {launches:,} launches, {milliseconds:.1f} ms")
    return 0


def show_layer(options: argparse.Namespace) -> int:
    """Print launches and bytes of a layer, forward and backward of a micro-batch."""
    from tests.pretend import measure

    for name, value in measure.layers(options.inputs).items():
        print(f"{name}: {value:g}")
    return 0


def show_kernels(options: argparse.Namespace) -> int:
    """Print what the kernels of a compiled block read and write."""
    from tests.pretend import measure

    for size, operations in measure.compiled_kernels(options.inputs):
        print(f"{size:.3f} GB  {operations}")
    return 0


def run_script(options: argparse.Namespace) -> int:
    """Run a script as `python SCRIPT.py ...` would."""
    from tests.pretend import measure

    measure.prepare()
    sys.argv = [options.script, *options.arguments]
    runpy.run_path(options.script, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
