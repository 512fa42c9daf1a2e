"""Budgets in benchmarks/pretend/budgets.json: allowed and measured values of the counters of every scenario.

`allowed` is written by hand; `measured`, `versions` and `commit` are written by `make test-cuda UPDATE=1`. A counter
without an allowed value is only information, such as times of the host, which depend on the machine.
"""

import importlib.metadata
import json
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from tests.pretend.build import BUILT, ROOT

FILE = ROOT / "benchmarks" / "pretend" / "budgets.json"
PACKAGES = ("torch", "triton", "deepspeed")
COMMAND = "make test-cuda UPDATE=1"
FAILED = "failed"
"""The counter of a scenario that ended with an error."""


class Budget(BaseModel):
    """Limits and last measured values of the counters of a scenario."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    allowed: dict[str, float]
    measured: dict[str, float]


class Budgets(BaseModel):
    """The file: how it was made, for which device, and a budget for every scenario."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    command: str
    commit: str
    capability: int
    versions: dict[str, str]
    scenarios: dict[str, Budget]


def read(path: Path = FILE) -> Budgets:
    """Read the budgets.

    Raises:
        pydantic.ValidationError: the file has another form.
    """
    return Budgets.model_validate_json(path.read_text())


def violations(budgets: Budgets, measured: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return for each counter above its limit: the scenario, the counter, the measured and the allowed value.

    A limit for a share ("share of ...") is the least allowed value.
    """
    found = []
    for name, counters in measured.items():
        allowed = budgets.scenarios[name].allowed if name in budgets.scenarios else {}
        if FAILED in counters:
            found.append(f"{name}: ended with an error; see {log_file(name).relative_to(ROOT)}")
            continue
        if name not in budgets.scenarios:
            found.append(f"{name}: has no budget; add it to {FILE.relative_to(ROOT)}")
        for counter, limit in allowed.items():
            value = counters.get(counter)
            share = counter.startswith("share")
            if value is None:
                found.append(f"{name}: {counter}: not measured, {'at least' if share else 'at most'} {limit:g} allowed")
            elif value < limit if share else value > limit:
                found.append(f"{name}: {counter}: {value:g}, {'at least' if share else 'at most'} {limit:g} allowed")
    return found


def updated(budgets: Budgets, measured: Mapping[str, Mapping[str, float]], capability: int) -> Budgets:
    """Return the budgets with new measured values; scenarios that failed or were not run keep theirs."""
    scenarios = dict(budgets.scenarios)
    for name, counters in measured.items():
        if FAILED not in counters:
            allowed = scenarios[name].allowed if name in scenarios else {}
            scenarios[name] = Budget(allowed=allowed, measured=dict(counters))
    return Budgets(command=COMMAND, commit=_commit(), capability=capability, versions=versions(), scenarios=scenarios)


def write(budgets: Budgets, path: Path = FILE) -> None:
    """Write the budgets, one counter in a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(budgets.model_dump(), indent=1) + "\n")
    unfinished.rename(path)


def versions() -> dict[str, str]:
    """Versions of the packages on which the counters depend."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}


@cache
def _commit() -> str:
    """The commit of the checkout before the first figures of this run were written into it."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return described.stdout.strip() or "unknown"


def log_file(scenario: str) -> Path:
    """Where the output of a scenario goes."""
    return BUILT / "logs" / ("".join(c if c.isalnum() else "_" for c in scenario) + ".log")


def report(budgets: Budgets, measured: Mapping[str, Mapping[str, float]], capability: int) -> str:
    """Return one table in Markdown: measured now, measured when the budgets were written, and allowed."""
    made = ", ".join(f"{name} {version}" for name, version in versions().items())
    lines = [
        f"Stand-in device of compute capability {capability / 10:g}; {made}; commit {_commit()}. Counted is what the "
        "host asks a device to do; there are no times of a device.",
        "",
        "| scenario | counter | measured | before | allowed |",
        "|---|---|---|---|---|",
    ]
    for name, counters in measured.items():
        budget = budgets.scenarios.get(name, Budget(allowed={}, measured={}))
        for counter, value in counters.items():
            texts = [
                "" if other is None else f"{other:g}"
                for other in (value, budget.measured.get(counter), budget.allowed.get(counter))
            ]
            lines.append(f"| {name} | {counter} | {' | '.join(texts)} |")
    return "\n".join(lines) + "\n"
