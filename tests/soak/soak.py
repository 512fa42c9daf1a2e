"""A soak: disturbed launches of two runs until the time is over, with a check of each, and a comparison of both."""

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple, TextIO

from megatron_coca.checkpoints import native
from megatron_coca.work.signals import PREEMPTION
from megatron_coca.work.statuses import FAILED
from tests.conftest import clean_environment, make_corpus, make_labels, small_keys
from tests.integration.killing import fork_server, left_alive
from tests.soak.evaluation import disturbed_evaluation
from tests.soak.events import (
    CACHE,
    ELASTIC,
    EVALUATE,
    FIXED,
    KINDS,
    OUTAGE,
    STOPPED,
    STORE_KINDS,
    SUSPEND,
    Plan,
    draw,
)
from tests.soak.runs import (
    SAVE_EVERY,
    Change,
    DeviationError,
    Launcher,
    SoakRun,
    Store,
    compare,
    finish,
    resumed_at,
    wait_until_ended,
)
from tests.soak.shim import READS, Shim

BEFORE, STORE, PLANNED = "before", "store", "planned"
"""What a launch found, for `Soak.replay`, and the event that has its plan."""
POLL = 0.02
BROKEN = ("Connection closed by peer", "Connection reset by peer", "Connection refused", "Broken pipe")
"""What Gloo says in a rank whose peer has ended."""
HANGS = 120.0
"""Seconds after its last event within which a launch must end; the watchdog of the runs ends them after 70."""
SETTLED = 5.0
"""Seconds after which no process of a killed launch may be left."""
SAMPLED = 20
"""Changes of the layout after which losses are compared with those of the layout before."""
SPARE = 30.0
"""Seconds of the time limit that are kept for the last launches."""


class Outcome(NamedTuple):
    """What became of a launch.

    Attributes:
        plan: what happened to it.
        statuses: exit statuses of the ranks, or that of the launching process.
        hit: whether its event took place.
        changed: whether the layout was another than that of the checkpoint.
        resumed: the step it resumed at; None if it did not come so far.
        seconds: from its start to its first step; None if it did not come so far.
        reached: the last step that it reported.
        lost: steps of the launch before that it had to repeat.
    """

    plan: Plan
    statuses: list[int]
    hit: bool
    changed: bool
    resumed: int | None
    seconds: float | None
    reached: int
    lost: int | None

    def line(self) -> str:
        """One line for the log."""
        plan = self.plan
        ended = ", ".join(map(str, self.statuses))
        steps = "trained nothing" if self.resumed is None else f"steps {self.resumed} to {self.reached}"
        first = "" if self.seconds is None else f", first step after {self.seconds:.1f} s"
        lost = f", {self.lost} steps repeated" if self.lost else ""
        layout = f"{plan.ranks} x ZeRO {plan.stage}"
        event = plan.kind if self.hit else f"{plan.kind} (came too late)"
        return f"{plan.number} {plan.run} ({layout}): {event}, status {ended}, {steps}{first}{lost}"


class Result(NamedTuple):
    """What a soak has found: outcomes, seconds of the disturbed part, last steps, and differences between layouts."""

    outcomes: list[Outcome]
    seconds: float
    last: dict[str, int]
    differences: dict[str, float]


class Soak:
    """The state of one soak in `folder`."""

    def __init__(
        self,
        folder: Path,
        seed: int,
        kinds: Sequence[str],
        launcher: Launcher,
        shim: Shim,
        runs: dict[str, SoakRun],
        store: Store | None,
    ) -> None:
        self._folder, self._seed, self._kinds = folder, seed, list(kinds)
        self._launcher, self._shim, self._runs, self._store = launcher, shim, runs, store
        self._events: TextIO = (folder / "events.jsonl").open("w")
        self._begin = time.monotonic()
        self._trained: dict[str, list[float]] = {name: [0.0, 0.0] for name in runs}  # steps, seconds
        self.outcomes: list[Outcome] = []

    def disturb(self, seconds: float, launches: int | None, scale: float) -> None:
        """Launch until the rest of `seconds` is needed for the comparison, or `launches` times."""
        number = 0
        while (launches is None and self._elapsed() + self._comparison() < seconds) or number < (launches or 0):
            number += 1
            plan = draw(self._seed, number, self._kinds, scale)
            outcome = self._launch(plan)
            self.outcomes.append(outcome)
            print(f"{self._elapsed():7.1f} s: {outcome.line()}", flush=True)

    def replay(self, failed: Path) -> None:
        """Repeat the last launch of another soak, whose folder is `failed`, from what it found."""
        lines = [json.loads(line) for line in (failed / "events.jsonl").read_text().splitlines()]
        facts = next(line for line in reversed(lines) if line["what"] == PLANNED)
        plan = Plan(**facts["plan"])
        run = self._runs[plan.run]
        shutil.rmtree(run.folder)
        shutil.copytree(failed / BEFORE / run.name, run.folder)
        if run.store is not None and (failed / BEFORE / STORE).exists():
            run.store.copy_from(failed / BEFORE / STORE)
        run.reached, run.changes = facts["reached"], [Change(start, tuple(of)) for start, of in facts["changes"]]
        self._shim.shift_clock(facts["clock"])
        print(self._launch(plan).line())

    def complete(self) -> Result:
        """Finish both runs and compare them with undisturbed ones."""
        seconds, last, differences = self._elapsed(), dict[str, int](), dict[str, float]()
        self._shim.shift_clock(0.0)
        for name, run in self._runs.items():
            if not run.changes:
                continue
            last[name] = run.reached + SAVE_EVERY
            print(f"{self._elapsed():7.1f} s: {name}: comparing {last[name]} steps", flush=True)
            finish(run, self._launcher, run.changes[-1].layout, last[name])
            differences |= compare(run, self._launcher, last[name], SAMPLED)
        return Result(self.outcomes, seconds, last, differences)

    def _elapsed(self) -> float:
        return time.monotonic() - self._begin

    def _comparison(self) -> float:
        """Seconds that the comparison will take."""
        starts = [outcome.seconds for outcome in self.outcomes if outcome.seconds and not outcome.plan.command]
        start, total = 1.0 + (mean(starts) if starts else 0.0), SPARE
        for name, (steps, seconds) in self._trained.items():
            run = self._runs[name]
            total += run.reached * seconds / steps if steps else 0.0
            total += start * (2 + len(run.changes) + min(SAMPLED, len(run.changes)))
        return total

    def _launch(self, plan: Plan) -> Outcome:
        run, kind = self._runs[plan.run], KINDS[plan.kind]
        before = self._folder / BEFORE
        shutil.rmtree(before, ignore_errors=True)
        shutil.copytree(run.folder, before / run.name)
        if run.store is not None:
            run.store.copy_to(before / STORE)
        facts = {"reached": run.reached, "changes": run.changes, "clock": self._shim.clock()}
        self._note(plan, PLANNED, {"plan": plan._asdict(), **facts})
        if plan.kind == EVALUATE:
            saved = next((each.save for each in (run, *self._runs.values()) if native.steps(each.save)), run.save)
            statuses, hit = disturbed_evaluation(self._launcher, plan, saved, self._folder / f"evaluated_{plan.number}")
            outcome = Outcome(plan, statuses, hit, False, None, None, run.reached, None)
            self._note(plan, "ended", outcome._replace(plan=plan.number)._asdict())
            return outcome
        cached = plan.kind == CACHE and self._change_cache(run, plan)
        expected = run.complete()
        if run.reached - expected > 2 * SAVE_EVERY and plan.kind != CACHE:
            raise DeviationError(f"{run.name}: step {run.reached} was reached, but only {expected} is complete")
        if kind.classes:
            self._shim.arm(run.save, kind.classes, kind.error, plan.visit, 1 if not kind.error else plan.count)
        layout, metrics = (plan.ranks, plan.stage), _identity(run.log / "metrics.jsonl")
        start = time.monotonic()
        if plan.command:
            launch: Any = self._launcher.command(run.launch_keys, layout, plan.number)
        else:
            launch = self._launcher.fork(run.launch_keys, layout)
        try:
            statuses, hit, first = self._follow(launch, plan, run, start)
        except BaseException:  # also Ctrl-C: nothing is left running
            with suppress(ProcessLookupError):
                launch.kill()
            launch.wait(HANGS)
            raise
        visits, failed = self._shim.disarm()
        hit = cached or hit or bool(failed)
        resumed = resumed_at(launch.output())
        replaced = _identity(run.log / "metrics.jsonl") != metrics
        reached = run.last_step() if replaced or resumed is None else resumed
        changed = resumed is not None and run.began(resumed, layout)
        lost = None if resumed is None else max(0, run.reached - resumed)
        outcome = Outcome(plan, statuses, hit, changed, resumed, first, reached, lost)
        self._note(plan, "ended", outcome._replace(plan=plan.number)._asdict() | {"visits": visits, "failed": failed})
        (self._folder / "last_output.txt").write_text(launch.output())
        self._check(outcome, run, launch.output(), expected)
        if first is not None and reached > (resumed or 0):
            trained = self._trained[run.name]
            trained[0] += reached - (resumed or 0)
            trained[1] += time.monotonic() - start - first
        if resumed is not None:
            run.reached = max(reached, resumed)
        return outcome

    def _follow(self, launch: Any, plan: Plan, run: SoakRun, start: float) -> tuple[list[int], bool, float | None]:
        """Do what the plan says until the launch has ended; returns statuses, whether the event took place, and the
        seconds to the first step.
        """
        actions = self._actions(launch, plan)
        actions += [(moment, lambda seconds=seconds: self._jump(plan, seconds)) for moment, seconds in plan.jumps]
        actions.sort(key=lambda action: action[0])
        hit, first, metrics, statuses = False, None, run.log / "metrics.jsonl", None
        known = _identity(metrics)
        latest, origin = max(moment for moment, _ in actions), None if plan.training else start
        while statuses is None:
            statuses = launch.wait(POLL)
            now = time.monotonic()
            if first is None and _has_grown(metrics, known):
                first = now - start
                origin = now if origin is None else origin
            while statuses is None and actions and origin is not None and now - origin >= actions[0][0]:
                hit = bool(actions.pop(0)[1]()) or hit
            if statuses is None and now > (start if origin is None else origin + latest) + HANGS:
                raise DeviationError(f"launch {plan.number} hangs: {plan}\n{launch.output()[-3000:]}")
        if self._store is not None:
            self._store.start()
        return statuses, hit, first

    def _actions(self, launch: Any, plan: Plan) -> list[tuple[float, Callable[[], Any]]]:
        """What is done at which second after the start; an action returns true where the event took place."""
        kind, store = KINDS[plan.kind], self._store

        def send(number: int, whom: str = "ranks") -> bool:
            if whom == "rank":
                ranks = launch.ranks()
                if len(ranks) < plan.ranks:
                    return False
                os.kill(random.Random(plan.number).choice(ranks), number)
            else:
                with suppress(ProcessLookupError):
                    launch.send(number)
            self._note(plan, signal.Signals(number).name, {})
            return True

        actions: list[tuple[float, Callable[[], Any]]] = [(plan.stop, lambda: send(signal.SIGTERM) and False)]
        if kind.number:
            actions.append((plan.moment, lambda: send(kind.number, kind.to)))
        if plan.kind == SUSPEND:
            actions.append((plan.moment, lambda: send(signal.SIGSTOP)))
            actions.append((plan.moment + plan.length, lambda: send(signal.SIGCONT)))
        if plan.kind == OUTAGE and store is not None:
            actions.append((plan.moment, lambda: self._switch(plan, store, False)))
            actions.append((plan.moment + plan.length, lambda: self._switch(plan, store, True)))
            if plan.cut:
                actions.append((plan.moment + 0.8 * plan.length, lambda: send(signal.SIGKILL)))
        return actions

    def _switch(self, plan: Plan, store: Store, up: bool) -> bool:
        (store.start if up else store.stop)()
        self._note(plan, f"store {'started' if up else 'stopped'}", {})
        return True

    def _jump(self, plan: Plan, seconds: float) -> bool:
        self._shim.shift_clock(seconds)
        self._note(plan, "clock", {"seconds": seconds})
        return plan.kind == "clock"

    def _change_cache(self, run: SoakRun, plan: Plan) -> bool:
        """Delete the cache, or replace it by the copy taken at an earlier such event; keeps a copy for later ones."""
        old, kept = run.folder / "old_cache", run.folder / "kept_cache"
        if not run.cache.exists():
            return False
        shutil.rmtree(kept, ignore_errors=True)
        run.cache.rename(kept)
        if plan.stale and old.exists():
            old.rename(run.cache)
        shutil.rmtree(old, ignore_errors=True)
        kept.rename(old)
        self._note(plan, "cache", {"steps": native.steps(run.save)})
        return True

    def _check(self, outcome: Outcome, run: SoakRun, output: str, expected: int) -> None:
        """Raise DeviationError where a launch did what docs/faults.md does not allow."""
        plan, kind = outcome.plan, KINDS[outcome.plan.kind]
        problems = []
        allowed = STOPPED | (kind.statuses if outcome.hit else frozenset())
        if outcome.seconds is not None:  # it trains, so no signal but SIGKILL ends it unheard
            allowed -= {-number for number in PREEMPTION}
        # Where a rank ends, its peers report a broken connection and end with 1; a launching process tells that from
        # the reason (docs/launch.md), forked ranks have none.
        broken = any(text in output for text in BROKEN) and plan.ranks > 1 and outcome.hit
        allowed |= {FAILED} if broken and not plan.command and set(outcome.statuses) & allowed else set()
        wrong = [status for status in outcome.statuses if status not in allowed]
        problems += [f"exit status {wrong}, allowed are {sorted(allowed)}"] if wrong else []
        problems += ["a traceback"] if "Traceback (most recent call last)" in output and not broken else []
        unread = kind.classes == READS  # what cannot be read is passed over
        if outcome.resumed not in (None, expected) and not unread:
            problems.append(f"resumed at step {outcome.resumed}, though step {expected} is complete")
        if (": damaged" in output or "is damaged" in output) and not unread:
            problems.append("a damaged checkpoint")
        polite = {75} == set(outcome.statuses) and outcome.resumed is not None
        if polite and outcome.reached > max(native.steps(run.save), default=0):
            problems.append(f"status 75, but step {outcome.reached} is not saved")
        if polite and run.store is not None and plan.kind != OUTAGE and run.store.steps()[-1:] != [outcome.reached]:
            problems.append(f"status 75, but step {outcome.reached} is not in the store: {run.store.steps()}")
        left = wait_until_ended(run.folder, left_alive, SETTLED)
        problems += [f"processes are left: {left}"] if left else []
        if problems:
            raise DeviationError(f"launch {plan.number}, {'; '.join(problems)}\n{plan}\n{output[-6000:]}")

    def _note(self, plan: Plan, what: str, facts: dict[str, Any]) -> None:
        line = {"seconds": round(self._elapsed(), 3), "launch": plan.number, "what": what, **facts}
        self._events.write(json.dumps(line) + "\n")
        self._events.flush()


def _identity(path: Path) -> tuple[int, int]:
    """Inode and time of writing of a file (a new file may have the inode of a removed one); zeros if there is none."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_ino, status.st_mtime_ns


def _has_grown(path: Path, known: tuple[int, int]) -> bool:
    """Whether a launch has replaced the file of metrics and reported a step since."""
    if _identity(path) in ((0, 0), known):
        return False
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 2000))
        lines = file.read().splitlines()
    return any(b'"step_seconds"' in line or b'"loss"' in line for line in lines[-1:])


@contextmanager
def soak(folder: Path, seed: int, kinds: Sequence[str]) -> Iterator[Soak]:
    """A Soak in the new folder `folder`, with all that it needs."""
    folder.mkdir(parents=True)
    shards = make_corpus(folder)
    small = small_keys(shards)
    small |= {
        f"{split}_label_data_paths": [make_labels(shards / f"words_{name}", shards)]
        for split, name in (("train", "train"), ("valid", "test"))
    }
    shim, store = Shim(folder), Store() if set(kinds) & set(STORE_KINDS) else None
    environment = clean_environment(store.environment if store is not None else None) | {"PYTHONHASHSEED": "0"}
    environment |= shim.environment
    outputs = folder / "outputs"
    outputs.mkdir()
    (outputs / "empty.json").write_text("{}")
    runs = {
        FIXED: SoakRun(FIXED, folder / FIXED, small, store),
        ELASTIC: SoakRun(ELASTIC, folder / ELASTIC, small, None),
    }
    with fork_server(environment, outputs, outputs / "empty.json") as server:
        yield Soak(folder, seed, kinds, Launcher(server, environment, outputs), shim, runs, store)
    if store is not None:
        store.stop()


def report_failure(folder: Path, error: DeviationError) -> None:
    """Write why a soak failed, and say where the evidence is."""
    (folder / "failure.txt").write_text(f"{error}\n")
    print(f"{error}\nfailed; the evidence is in {folder}, failure.txt has this message", file=sys.stderr)
