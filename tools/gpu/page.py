"""Write the page of the GPU report: the answers so far, the state of every run, and all figures."""

import contextlib
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from tools.gpu.cases import read_lines
from tools.gpu.plans import PlanPart
from tools.gpu.runner import DONE, MISSING, RUNNING, Item, ItemRecord, identity, read_record

SHOWN = 15
"""Number of lines that the page shows from the end of the output of a failed run."""
LEFT_OUT = {"case", "versions", "nvidia-smi", "python", "threads", "shape", "gpu", "device", "benchmark", "seconds"}
"""Keys of results that the tables leave out."""
ResultLine = dict[str, Any]
Results = Mapping[str, Sequence[ResultLine]]
"""Name of a run -> its finished lines, for all runs of a part."""


def results_of(item: Item) -> list[ResultLine]:
    """Return the finished lines of a run. If pytest ran, return one line with the number of tests by outcome."""
    if item.results.is_file() and item.results.read_bytes()[:1] == b"<":
        with contextlib.suppress(ElementTree.ParseError):  # incomplete, because pytest was killed
            if tests := list(ElementTree.fromstring(item.results.read_text(errors="replace")).iter("testcase")):
                return [_junit(tests)]
    lines = [line for line in read_lines(item.results) if line.get("status") != "started"]
    return lines or _tests_in_log(item)


def _junit(cases: Sequence[ElementTree.Element]) -> ResultLine:
    outcomes = Counter(next((child.tag for child in case if child.tag in _OUTCOMES), "passed") for case in cases)
    failed = [str(case.get("name")) for case in cases if any(child.tag in ("failure", "error") for child in case)]
    figures: ResultLine = {"case": "tests", "status": "failed" if failed else "ok"}
    return figures | dict(outcomes) | ({"error": ", ".join(failed)} if failed else {})


_OUTCOMES = ("failure", "error", "skipped")


def _tests_in_log(item: Item) -> list[ResultLine]:
    """Count the tests in pytest's output, which has a line for each test even if pytest was killed."""
    if "pytest" not in item.run.command or not item.log.is_file():
        return []
    log = item.log.read_text(errors="replace")
    if collected := re.search(r"(\d+)(?:/\d+)? tests collected", log):  # on the stand-in device
        return [{"case": "tests", "status": "ok", "collected": int(collected[1])}]
    found = re.findall(r"(PASSED|FAILED|ERROR|SKIPPED) (?:\[ *\d+%\] )?(\S+)", log)
    outcomes = Counter(outcome.lower() for outcome, _ in found)
    failed = [name for outcome, name in found if outcome in ("FAILED", "ERROR")]
    if not found:
        return []
    return [{"case": "tests", "status": "failed" if failed else "ok"} | dict(outcomes) | {"error": ", ".join(failed)}]


# Answers


def _passed(results: Results) -> str:
    lines = [line for each in results.values() for line in each]
    cases = {status: [str(line["case"]) for line in lines if line.get("status") == status] for status in _NOT_PASSED}
    others = (f"; {status}: {', '.join(names)}" for status, names in cases.items() if names)
    passed = len(lines) - sum(map(len, cases.values()))
    return f"{passed} of {len(lines)} cases passed" + "".join(others)


_NOT_PASSED = ("failed", "out of memory")


def _step(results: Results) -> str:
    answers = []
    for micro in ("16", "64"):
        runs = {name.removesuffix(f"_{micro}"): each for name, each in results.items() if name.endswith(f"_{micro}")}
        last = {name: each[-1] for name, each in runs.items() if name != "engines"}
        last |= {str(line.get("method", "engines")): line for line in runs.get("engines", ())}
        base = last.get("roformer", {}).get("tokens_per_second")
        for name, line in last.items():
            if "error" in line:
                answers.append(f"{name} with micro-batch {micro}: {line['error']}")
                continue
            mfu = f"{line['mfu']:.1%}" if line.get("mfu") else "unknown"
            ratio = f", {line['tokens_per_second'] / base:.2f} of RoFormer's" if base and name != "roformer" else ""
            speed = f"{line['tokens_per_second']:,.0f} tokens/s{ratio}, MFU {mfu}"
            answers.append(f"{name} with micro-batch {micro}: {speed}")
    return "; ".join(answers)


def _ratios(results: Results) -> str:
    """Return the ratio of each method and backend to its base, at the longest length. A base has no ratio to itself."""
    lines = [line for each in results.values() for line in each if "ratio" in line]
    longest = {}
    for line in sorted(lines, key=lambda line: line["length"]):
        sides = (line.get("method"), line["backend"].partition(" ")[0])
        if line["base"] not in (*sides, " ".join(filter(None, sides))):
            longest[line["kind"], *sides, line["base"]] = line
    shown, kinds = [], {line["kind"] for line in longest.values()}
    for line in longest.values():
        name = " with ".join(filter(None, (line.get("method"), line["backend"])))
        name = f"{line['kind']}, {name}" if len(kinds) > 1 else name
        shown.append(f"{name} at {line['length']:,}: {line['ratio']:.2f} x the time of {line['base']}")
    return "; ".join(shown)


def _inference(results: Results) -> str:
    lines = [line for line in results.get("memory", ()) if "case" in line]
    memory = (f"{line['peak_mib']:,} MiB" if "peak_mib" in line else line["status"] for line in lines)
    shown = (f"{line['case']}: {text}" for line, text in zip(lines, memory, strict=True))
    return "; ".join(filter(None, (_ratios(results), *shown)))


def _figures(results: Results) -> str:
    lines = [line for each in results.values() for line in each]
    hidden = {*LEFT_OUT, "ratio_quartiles"}
    shown = (f"{key} {value}" for line in lines for key, value in line.items() if key not in hidden)
    return ", ".join(shown)


ANSWERS: dict[str, Callable[[Results], str]] = {
    "smoke": _passed,
    "parity": _passed,
    "step": _step,
    "attention": _ratios,
    "inference": _inference,
}
"""Functions that answer a part's question in one sentence. For the other parts, the page lists their figures."""


# Page


def page(plan: Mapping[str, PlanPart], found: Sequence[Item], machine: Mapping[str, Any]) -> str:
    """Return the page in Markdown, from the records and results that exist at present."""
    records = {item.title: read_record(item) for item in found}
    boards = [", ".join(f"{key} {value}" for key, value in board.items()) for board in machine.get("nvidia-smi", [])]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    finished = sum(record.get("status") not in (None, RUNNING, MISSING) for record in records.values())
    spent = sum(record.get("seconds", 0.0) for record in records.values())
    lines = [f"# Measured on {machine.get('gpu', 'no GPU')}", "", *boards, "", versions, ""]
    lines += [f"{finished} of {len(found)} runs have ended, after {spent / 60:.1f} minutes.", ""]
    lines += ["## Answers so far", "", "| question | answer |", "|---|---|"]
    parts = [(name, list(group)) for name, group in groupby(found, key=lambda item: item.part)]
    for name, group in parts:
        results = {item.name: each for item in group if (each := results_of(item))}
        answer = ANSWERS.get(name, _figures)(results) if results else _state(records, group)
        if results and any(records[item.title].get("status") != DONE for item in group):
            answer = f"so far: {answer}"
        if before := sorted({text for item in group if (text := outdated(item, records[item.title], machine))}):
            answer = f"measured {', or '.join(before)}: {answer}"
        lines.append(f"| {plan[name].title} | {_cell(answer)} |")
    lines += ["", "## Runs", "", "| run | status | seconds | limit |", "|---|---|---|---|"]
    lines += [_row(item, records[item.title], machine) for item in found]
    for name, group in parts:
        lines += _section(plan[name], group, records)
    return "\n".join(lines) + "\n"


def _state(records: Mapping[str, ItemRecord], group: Sequence[Item]) -> str:
    missing = sorted({name for item in group for name in records[item.title].get("missing", [])})
    if missing:
        return f"not run: {', '.join(missing)} is not installed"
    tried = any(records[item.title] for item in group)
    return "no result" if tried else "not run yet"


def outdated(item: Item, record: ItemRecord, machine: Mapping[str, Any]) -> str:
    """Return how the GPU, the libraries and the code of a record differ from the present ones; empty if none does."""
    then, now = record.get("identity"), identity(item, machine)
    if then is None:
        return ""
    texts = {"gpu": f"on {then.get('gpu')}", "versions": "with other libraries", "content": "with other code"}
    return " and ".join(text for key, text in texts.items() if then.get(key) != now[key])


def _row(item: Item, record: ItemRecord, machine: Mapping[str, Any]) -> str:
    status = record.get("status", "not run yet")
    if status == RUNNING:
        status = "running, or interrupted"
    if status == MISSING:
        status = f"not run: {', '.join(record['missing'])} is not installed"
    if before := outdated(item, record, machine):
        status += f", {before}"
    seconds = f"{record['seconds']:.0f}" if record.get("seconds") else ""
    return f"| {item.title} | {status} | {seconds} | {item.run.seconds} |"


def _section(part: PlanPart, group: Sequence[Item], records: Mapping[str, ItemRecord]) -> list[str]:
    lines = ["", f"## {part.title}"]
    for item in group:
        results, record = results_of(item), records[item.title]
        if not results and not record:
            continue
        lines += ["", f"`python {item.run.command}`", ""]
        if results:
            keys = list(dict.fromkeys(key for line in results for key in line if key not in LEFT_OUT))
            first = ["case"] if any("case" in line for line in results) else []
            keys = [*first, *keys]
            lines += [f"| {' | '.join(keys)} |", "|---" * len(keys) + "|"]
            lines += [f"| {' | '.join(_cell(line.get(key, '')) for key in keys)} |" for line in results]
        if record.get("status") not in (DONE, RUNNING, MISSING, None) and item.log.is_file():
            end = item.log.read_text(errors="replace").splitlines()[-SHOWN:]
            lines += ["", "```text", *(line[:300] for line in end), "```"]
    return lines


def _cell(value: Any) -> str:
    if isinstance(value, float):
        value = f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, list):
        value = ", ".join(map(_cell, value))
    return str(value).replace("|", "\\|").replace("\n", " ")
