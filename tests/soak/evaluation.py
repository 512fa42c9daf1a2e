"""An evaluation in two processes that are killed by SIGKILL. Started again, it must write the files of an undisturbed
one.
"""

import json
import os
import random
import shutil
import signal
from contextlib import suppress
from pathlib import Path

from megatron_coca.checkpoints import native
from tests.integration.killing import TIME_LIMIT, left_alive
from tests.soak.events import Plan
from tests.soak.runs import CommandLaunch, DeviationError, Launcher, wait_until_ended

POLL = 0.1
IMPORTS = 2.0
"""Seconds after the start before which there is little to disturb."""
TEXT = "the sea was calm and a small boat lay near its shore until morning came over hills. "


def disturbed_evaluation(launcher: Launcher, plan: Plan, checkpoint: Path, folder: Path) -> tuple[list[int], bool]:
    """Evaluate the newest checkpoint in `checkpoint`, kill one process or the command at the plan's moment, and finish.

    Returns the statuses of the disturbed command, and whether it was disturbed. Raises DeviationError.
    """
    if not native.steps(checkpoint):
        return [], False
    folder.mkdir()
    text = folder / "text.jsonl"
    text.write_text("".join(json.dumps({"text": TEXT * (4 + number)}) + "\n" for number in range(3)))
    disturbed = launcher.evaluate(checkpoint, text, folder / "disturbed", jobs=2)
    statuses = disturbed.wait(plan.moment + IMPORTS)
    while statuses is None and plan.stale and not disturbed.ranks():
        statuses = disturbed.wait(POLL)
    hit = statuses is None and _kill(disturbed, plan)
    statuses = statuses or _ended(disturbed, plan)
    if statuses != [0]:
        _finish(launcher.evaluate(checkpoint, text, folder / "disturbed", jobs=2), plan)
    _finish(launcher.evaluate(checkpoint, text, folder / "whole", jobs=1), plan)
    one, other = (_files(folder / name) for name in ("disturbed", "whole"))
    if one != other or not one:
        names = sorted({*one, *other})
        raise DeviationError(f"launch {plan.number}: of {names} some differ from those of an undisturbed evaluation")
    if left := wait_until_ended(folder, left_alive):
        raise DeviationError(f"launch {plan.number}: processes of an evaluation are left: {left}")
    shutil.rmtree(folder)
    return statuses, hit


def _kill(launch: CommandLaunch, plan: Plan) -> bool:
    workers = launch.ranks()
    if not plan.stale:
        launch.kill()
        return True
    if workers:
        with suppress(ProcessLookupError):
            os.kill(random.Random(plan.number).choice(workers), signal.SIGKILL)
    return bool(workers)


def _ended(launch: CommandLaunch, plan: Plan) -> list[int]:
    """The statuses of a disturbed command. Raises DeviationError for others than its own end or SIGKILL."""
    statuses = launch.wait(TIME_LIMIT)
    if statuses is None or statuses[0] not in (0, -signal.SIGKILL):
        launch.kill()
        raise DeviationError(f"launch {plan.number}: an evaluation ended with {statuses}\n{launch.output()[-3000:]}")
    return statuses


def _finish(launch: CommandLaunch, plan: Plan) -> None:
    if _ended(launch, plan) != [0]:
        raise DeviationError(f"launch {plan.number}: an undisturbed evaluation was killed\n{launch.output()[-3000:]}")


def _files(folder: Path) -> dict[str, bytes]:
    """The results, without the times that they took."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.endswith(".cost.json")}
