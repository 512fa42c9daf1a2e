"""Turn blocks into shards. Any number of processes can share this work.

The work consists of three stages, and a stage consists of items. The result of an item is a folder that appears when it
is complete. A process holds a lock on an item while it works on the item, so processes on many hosts can share the
items, even if they start at different times. If a process is killed, its locks are released, and other processes do its
items.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron_coca.data.errors import DataError
from megatron_coca.data.preparation.duplicates import (
    DROPPED,
    SORTED,
    compare_range,
    count_groups,
    count_ranges,
    sort_group,
)
from megatron_coca.data.preparation.preparation_plan import Execution
from megatron_coca.data.preparation.shard_files import SHARDS, write_shards
from megatron_coca.data.preparation.shard_plan import ShardPlan
from megatron_coca.data.preparation.workers import lost_worker
from megatron_coca.support.console import Progress, write
from megatron_coca.work.folders import make_once
from megatron_coca.work.workers import end_pool, process_pool

POLL = 0.5
"""Seconds between two checks for the results of other processes."""
WAITING = 15.0
"""Seconds after which a waiting process prints a message."""


@dataclass(frozen=True)
class Stage:
    """A stage of the work. Its items can be done at the same time and in any order, but only after all items of the
    previous stage are done.

    Attributes:
        title: the name of the stage in progress lines.
        kind: the prefix of the names of the stage's results.
        count: a function that returns the number of items.
        make: a function (plan, item, folder, advance) that writes the result of an item into a new folder.
        bytes_of: a function (plan, item) that returns the size on disk of the part of the corpus that an item covers.
            None if progress is counted in items.
    """

    title: str
    kind: str
    count: Callable[[ShardPlan], int]
    make: Callable[[ShardPlan, int, Path, Callable[[float], None]], None]
    bytes_of: Callable[[ShardPlan, int], int] | None = None

    def missing(self, plan: ShardPlan) -> list[int]:
        """Return the numbers of the items without a result."""
        return [number for number in range(self.count(plan)) if not plan.result(self.kind, number).is_dir()]


def _bytes_of_task(plan: ShardPlan, task: int) -> int:
    return sum(piece.bytes for piece in plan.tasks[task])


STAGES = (
    Stage("sorting digests", SORTED, count_groups, sort_group),
    Stage("comparing digests", DROPPED, count_ranges, compare_range),
    Stage("writing shards", SHARDS, lambda plan: len(plan.tasks), write_shards, _bytes_of_task),
)


def attempt(plan: ShardPlan, number: int, item: int, advance: Callable[[float], None]) -> bool:
    """Do an item of stage `number` unless its result exists. Return False if another process is doing it."""
    stage = STAGES[number]
    final = plan.result(stage.kind, item)
    return make_once(final, lambda folder: stage.make(plan, item, folder, advance), DataError)


# Each worker process receives the plan only once, because the plan of a large corpus has many blocks.
_plan: ShardPlan | None = None


def _start_worker(plan: ShardPlan) -> None:
    global _plan  # noqa: PLW0603 - a process pool has no other place for the arguments of its initializer
    _plan = plan


def _attempt_in_worker(number: int, item: int) -> bool:
    assert _plan is not None
    return attempt(_plan, number, item, lambda size: None)


class _Team:
    """The worker processes of one command. They start at the first stage with more than one missing item."""

    def __init__(self, plan: ShardPlan, execution: Execution, stack: ExitStack) -> None:
        self._plan, self._execution, self._stack = plan, execution, stack
        self._executor: ProcessPoolExecutor | None = None

    def work(self, number: int, items: Sequence[int]) -> int:
        """Attempt `items` of stage `number`. Return how many of these items have a result now."""
        stage = STAGES[number]
        bytes_of = stage.bytes_of
        sizes = {item: 1 if bytes_of is None else bytes_of(self._plan, item) for item in items}
        unit = "items" if bytes_of is None else "B"
        show = self._execution.progress and (bytes_of is not None or len(items) > 1)
        with Progress(stage.title, sum(sizes.values()) or None, unit, show=show) as progress:
            if self._execution.workers < 2 or len(items) < 2:
                return sum([attempt(self._plan, number, item, progress.advance) for item in items])
            return self._in_workers(number, sizes, progress)

    def _in_workers(self, number: int, sizes: dict[int, int], progress: Progress) -> int:
        if self._executor is None:
            self._executor = process_pool(self._execution.workers, partial(_start_worker, self._plan))
            self._stack.callback(end_pool, self._executor)
        made = 0
        try:
            futures = [self._executor.submit(_attempt_in_worker, number, item) for item in sizes]
            for size, future in zip(sizes.values(), futures, strict=True):
                if future.result():
                    made += 1
                    progress.advance(size)
        except BrokenProcessPool as error:
            raise lost_worker() from error
        return made


def run_stages(plan: ShardPlan, execution: Execution, begin: float = 0.0, wait: bool = True) -> None:
    """Do all items that have no result, except the items that other processes are doing. Raises `DataError` for a
    damaged block.

    Args:
        begin: this share of the missing items, from the start of their list, is done last. If processes have different
            values, they rarely attempt the same item.
        wait: whether to wait for shards that other processes write. The function always waits for the results of
            earlier stages.
    """
    plan.folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        team = _Team(plan, execution, stack)
        for number, stage in enumerate(STAGES):
            since, told = time.monotonic(), False
            while missing := stage.missing(plan):
                first = int(begin * len(missing))
                if team.work(number, [*missing[first:], *missing[:first]]):
                    continue
                if stage is STAGES[-1] and not wait:
                    break
                if not told and time.monotonic() - since > WAITING:
                    write(f"{stage.title}: waiting for {len(missing)} results of other processes in {plan.folder}")
                    told = True
                time.sleep(POLL)
