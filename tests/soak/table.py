"""The result of a soak as Markdown, for studies/log.md."""

from collections import Counter
from collections.abc import Sequence
from statistics import median

from tests.soak.events import CHANGE, EVALUATE, KINDS
from tests.soak.soak import Outcome, Result

HEAD = """| event | count | status of the launch (times) | steps repeated: median, most | seconds to resume |
|---|---:|---|---:|---:|"""


def markdown(result: Result, seed: int) -> str:
    """The table, and a sentence on what was compared."""
    after = _following(result.outcomes)
    rows = []
    for name, kind in KINDS.items():
        chosen = [o for o in result.outcomes if (o.changed if name == CHANGE else o.plan.kind == name and o.hit)]
        # A change of the layout costs what the launch itself needs, every other event what the next one does.
        follow = chosen if name == CHANGE else [after[o.plan.number] for o in chosen if o.plan.number in after]
        follow = [] if name == EVALUATE else follow  # no step is repeated
        if chosen:
            rows.append(
                f"| {kind.title} | {len(chosen)} | {_statuses(chosen)} | "
                f"{_pair([o.lost for o in follow], '{:.0f}')} | {_pair([o.seconds for o in follow], '{:.1f}')} |"
            )
    jumps = sum(len(outcome.plan.jumps) for outcome in result.outcomes)
    last = " and ".join(f"{step} ({name})" for name, step in result.last.items())
    differences = "; ".join(f"{name} {value:.1e}" for name, value in sorted(result.differences.items()))
    text = (
        f"Seed {seed}: {len(result.outcomes)} launches in {result.seconds / 60:.0f} minutes, {jumps} jumps of the "
        f"clock, {last} steps. Losses of all steps, weights, optimizer and random states equal those of undisturbed "
        "runs bit for bit."
    )
    if differences:
        text += f" Largest relative difference of the losses in the four steps after a change: {differences}."
    return f"{text}\n\n{HEAD}\n" + "\n".join(rows) + "\n"


def _following(outcomes: Sequence[Outcome]) -> dict[int, Outcome]:
    """By the number of a launch, the next one of its run that has resumed."""
    after: dict[int, Outcome] = {}
    waiting: dict[str, list[int]] = {}
    for outcome in outcomes:
        if outcome.resumed is not None:
            after |= dict.fromkeys(waiting.pop(outcome.plan.run, []), outcome)
        waiting.setdefault(outcome.plan.run, []).append(outcome.plan.number)
    return after


def _statuses(outcomes: Sequence[Outcome]) -> str:
    counts = Counter(status for outcome in outcomes for status in sorted(set(outcome.statuses)))
    return ", ".join(f"{status} ({count})" for status, count in sorted(counts.items(), key=lambda item: -item[1]))


def _pair(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    return f"{form.format(median(known))}, {form.format(max(known))}" if known else ""
