"""The plan of the first measurements on a GPU: limits, kills and continuation, reuse, and the page after every part."""

import errno
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_coca.work.locks import exclusive_lock
from tests.documents import ROOT
from tests.patience import patience
from tools import gpu_report
from tools.gpu import page as pages
from tools.gpu import runner
from tools.gpu.cases import read_lines, run_cases, write_line
from tools.gpu.contents import closure, digest
from tools.gpu.plans import EIGHT_GPUS, FIRST, ONE_GPU, PLANS, PlanPart, Run
from tools.gpu.runner import DONE, FAILED, LATE, MISSING, RUNNING, carry_caches, execute, items, read_record, waiting

HERE = {
    "gpu": "NVIDIA A100-SXM4-80GB",
    "versions": {"torch": "2.13.0", "commit": "abc"},
    "nvidia-smi": [{"uuid": "GPU-1", "driver_version": "580.1", "power.limit": "400 W"}],
}
CASES = """
import sys, time
from pathlib import Path
from tools.gpu.cases import run_cases
file = Path(sys.argv[1])
def long_at_first():
    mark = file.with_suffix(".mark")
    if not mark.exists():
        mark.touch()
        time.sleep(60)
sys.exit(run_cases({"a": lambda: None, "b": long_at_first, "c": lambda: None}, file))
"""
"""A part of three cases. The second takes a minute when it runs for the first time."""
DRIVER = """
import sys, types
sys.modules["tools.records"] = types.SimpleNamespace(machine=lambda: {here!r})
from tools import gpu_report
from tools.gpu.plans import PlanPart, Run
gpu_report.unusable = lambda *arguments: None
gpu_report.PLANS[1] = {{
    name: PlanPart(f"Does {{name}} run?", {{"cases": Run({command!r}, 20, needs=())}}) for name in {parts!r}
}}
sys.exit(gpu_report.main(["--output", {output!r}]))
"""
"""The report, with a short process in place of the process of every part."""


def plan_of(commands: dict[str, str], **options: Any) -> dict[str, PlanPart]:
    keys = {"seconds": 20, "needs": ()} | options
    return {name: PlanPart(f"Does {name} run?", {"one": Run(text, **keys)}) for name, text in commands.items()}


def shown(text: str, status: int = 0) -> str:
    return f"-c 'print(\"{text}\"); raise SystemExit({status})'"


def started(file: Path) -> list[str]:
    return [line["case"] for line in read_lines(file) if line["status"] == "started"]


def test_a_kill_in_any_part_loses_one_case_at_most(tmp_path: Path) -> None:
    """SIGKILL or Ctrl-C of the report in the second case of every part. After SIGKILL, the part's process ends when the
    report starts again.
    """
    output, script = tmp_path / "results", tmp_path / "cases.py"
    script.write_text(CASES)
    fields = {"here": HERE, "command": f"{script} FILE", "parts": tuple(ONE_GPU), "output": str(output)}
    driver = [sys.executable, "-c", DRIVER.format(**fields)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    orphans = []
    for part in ONE_GPU:
        process = subprocess.Popen(driver, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        file, deadline = output / f"{part}.cases.jsonl", time.monotonic() + patience(60)
        while not (file.with_suffix(".mark").exists() and file.with_suffix(".json").exists()):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.005)
        how = signal.SIGINT if part == "parity" else signal.SIGKILL
        process.send_signal(how)
        assert process.wait() == (130 if how == signal.SIGINT else -signal.SIGKILL)
        record = json.loads((output / f"{part}.cases.json").read_text())
        assert record["status"] == RUNNING
        orphans.append(Path(f"/proc/{record['process']}/cmdline"))
    done = subprocess.run(driver, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for part in ONE_GPU:
        assert started(output / f"{part}.cases.jsonl") == ["a", "b", "b", "c"], "only the killed case runs again"
        assert json.loads((output / f"{part}.cases.json").read_text())["status"] == DONE
    assert not any(path.exists() and path.read_bytes() for path in orphans)
    assert (output / "gpu_report.md").read_text().count("3 of 3 cases passed") == 2, "smoke and parity"


def test_a_call_ends_in_time_and_the_next_one_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A part with a limit beyond the end of the call is left. A failed part stops no other, and is tried again last."""
    from tools import records

    monkeypatch.setattr(records, "machine", lambda: HERE)
    monkeypatch.setattr(gpu_report, "unusable", lambda *arguments: None)
    commands = {"smoke": shown("no kernel", 1), "parity": shown("fine"), "step": shown("9.0 tokens/s")}
    monkeypatch.setitem(PLANS, 1, plan_of(commands))
    arguments = ["--output", str(tmp_path), "--minutes", "0.4"]
    assert gpu_report.main([*arguments, "--only", "smoke"]) == 1
    clock = iter((0.0, 0.0, *[5.0] * 50))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    assert gpu_report.main(arguments) == gpu_report.LEFT
    assert "2 of 3 runs are left" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setattr(records, "machine", lambda: HERE)
    monkeypatch.setattr(gpu_report, "unusable", lambda *arguments: None)
    monkeypatch.setitem(PLANS, 1, plan_of(commands))
    order = [item.part for item in waiting(items(PLANS[1], tmp_path), HERE)]
    assert order == ["step", "smoke"] or order == ["parity", "step", "smoke"], order
    assert gpu_report.main(["--output", str(tmp_path)]) == 1
    records_of = {item.part: read_record(item)["status"] for item in items(PLANS[1], tmp_path)}
    assert records_of == {"smoke": FAILED, "parity": DONE, "step": DONE}
    text = (tmp_path / "gpu_report.md").read_text()
    assert "no kernel" in text and "driver_version 580.1" in text and "| smoke.one | failed |" in text


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of one short process for `gpu_report.main`, on a machine that is said to have a GPU."""
    from tools import records

    monkeypatch.setattr(records, "machine", lambda: HERE)
    monkeypatch.setattr(gpu_report, "unusable", lambda *arguments: None)
    monkeypatch.setitem(PLANS, 1, plan_of({"step": shown("done")}))


@pytest.mark.usefixtures("short")
def test_the_first_check_counts_as_time_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(gpu_report, "unusable", lambda *arguments: now.__setitem__(0, 20.0))
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    assert gpu_report.main(["--output", str(tmp_path), "--minutes", "0.5"]) == gpu_report.LEFT, "20 + 20 s > 30 s"


@pytest.mark.usefixtures("short")
def test_two_calls_at_once_do_not_disturb_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second one would end the process of the first as one that a kill left behind."""
    with exclusive_lock(tmp_path / ".lock", OSError, None):
        assert gpu_report.main(["--output", str(tmp_path)]) == 2
    assert f"{tmp_path}: another call" in capsys.readouterr().err
    assert gpu_report.main(["--output", str(tmp_path)]) == 0


@pytest.mark.usefixtures("short")
def test_a_folder_that_cannot_be_written_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a full disk, the process of the part ends too."""
    (tmp_path / "file").touch()
    assert gpu_report.main(["--output", str(tmp_path / "file")]) == 2
    assert f"{tmp_path / 'file'}: File exists; " in capsys.readouterr().err
    processes, start = [], subprocess.Popen

    def full(path: Path, content: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setitem(PLANS, 1, plan_of({"step": "-c 'import time; time.sleep(60)'"}))
    monkeypatch.setattr(runner, "write_file", full)
    monkeypatch.setattr(
        subprocess, "Popen", lambda *a, **options: processes.append(start(*a, **options)) or processes[0]
    )
    assert gpu_report.main(["--output", str(tmp_path)]) == 2
    assert "step.one.json: No space left on device" in capsys.readouterr().err
    assert processes[0].poll() == -signal.SIGKILL


@pytest.mark.usefixtures("short")
def test_an_interruption_is_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "execute", interrupted)
    assert gpu_report.main(["--output", str(tmp_path)]) == 130
    assert "| step.one | not run yet |" in (tmp_path / "gpu_report.md").read_text()


@pytest.mark.parametrize("cores", [1, 4])
def test_a_case_that_crashes_the_process_stops_no_other(cores: int, tmp_path: Path) -> None:
    """In one process, and in one of several that share the cases."""
    script = tmp_path / "cases.py"
    script.write_text(
        "import os, sys\nfrom pathlib import Path\nfrom tools.gpu.cases import run_in_parallel\n"
        f"os.sched_getaffinity = lambda _: range({cores})\n"
        "cases = dict.fromkeys('abcdef', lambda: None) | {'c': os.abort}\n"
        "share = sys.argv[-1] if '--share' in sys.argv else None\n"
        "sys.exit(run_in_parallel(cases, Path(sys.argv[1]), share))\n"
    )
    (item,) = items(plan_of({"smoke": f"{script} FILE"}), tmp_path)
    assert execute(item, HERE)["status"] == FAILED
    ended = {line["case"]: line["status"] for line in read_lines(item.results) if line["status"] != "started"}
    assert ended == dict.fromkeys("abcdef", "ok") | {"c": "failed"}


def test_a_process_ends_at_its_limit_with_its_children(tmp_path: Path) -> None:
    """Also with those in other sessions, as the ranks of a training run are."""
    child = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], "
    child += "start_new_session=True); print(p.pid, flush=True); time.sleep(60)"
    plan = plan_of({"step": f'-c "{child}"'}, seconds=3)
    (item,), before = items(plan, tmp_path), time.monotonic()
    assert execute(item, HERE)["status"] == LATE and time.monotonic() - before < 20
    grandchild = Path(f"/proc/{int(item.log.read_text())}/cmdline")  # in the file although the process was killed
    while grandchild.exists() and grandchild.read_bytes():
        assert time.monotonic() - before < 20
        time.sleep(0.01)


def test_only_a_change_of_what_runs_repeats_a_part(tmp_path: Path) -> None:
    """Files that the script imports count, inside functions too. Other files and imports for types do not count."""
    package = tmp_path / "tools"
    package.mkdir()
    files = {"script": "def f():\n    from tools import used\n", "used": "x = 1\n", "other": "y = 1\n"}
    files["script"] += "if TYPE_CHECKING:\n    import tools.other\n"
    for name, text in files.items():
        (package / f"{name}.py").write_text(text)
    assert {path.stem for path in closure([package / "script.py"], tmp_path)} == {"script", "used"}
    before = digest("tools/script.py FILE", (), tmp_path)
    (package / "other.py").write_text("y = 2\n")
    assert digest("tools/script.py FILE", (), tmp_path) == before != digest("tools/script.py --x FILE", (), tmp_path)
    (package / "used.py").write_text("x = 2\n")
    assert digest("tools/script.py FILE", (), tmp_path) != before


def test_a_finished_run_counts_for_its_gpu_and_libraries(tmp_path: Path) -> None:
    (item,) = items(plan_of({"step": shown("done")}), tmp_path)
    execute(item, HERE)
    others = ({"versions": {"torch": "2.13.0", "commit": "def"}}, {"nvidia-smi": []})
    assert not any(list(waiting([item], HERE | other)) for other in others)
    assert all(
        list(waiting([item], HERE | other)) for other in ({"gpu": "NVIDIA H100"}, {"versions": {"torch": "2.14.0"}})
    )


def test_the_page_tells_old_results_from_new_ones(tmp_path: Path) -> None:
    """For example after `git pull`, or if the output folder comes from another machine."""
    plan = plan_of({"resume": shown("done")})
    (item,) = found = items(plan, tmp_path)
    execute(item, HERE)
    write_line(item.results, case="x", status="ok", speed=1.5)
    text = pages.page(plan, found, HERE)
    assert "| resume.one | done |" in text and "| status ok, speed 1.5 |" in text
    other = HERE | {"gpu": "NVIDIA H100", "versions": {"torch": "2.14.0"}}
    text = pages.page(plan, found, other)
    before = "on NVIDIA A100-SXM4-80GB and with other libraries"
    assert f"| resume.one | done, {before} |" in text and f"| measured {before}: status ok, speed 1.5 |" in text
    changed = [item._replace(run=item.run._replace(command=shown("other")))]
    assert "| resume.one | done, with other code |" in pages.page(plan, changed, HERE)


def test_parts_read_what_they_run() -> None:
    """A change of the report's own pages repeats no measurement; a change of a kernel repeats those that use it."""
    commands = {name: [run.command.split()[0] for run in part.runs.values()] for name, part in ONE_GPU.items()}
    scripts = {name: {ROOT / script for script in each if script != "-m"} for name, each in commands.items()}
    read = {name: closure(each) for name, each in scripts.items() if each}
    report = ROOT / "megatron_coca/evaluation/report/document.py"
    kernel = ROOT / "megatron_coca/kernels/operands.py"
    assert all(kernel in files for name, files in read.items() if name != "resume")
    assert report not in read["smoke"] | read["parity"]
    assert not any(file.suffix == ".yaml" for file in closure([ROOT / "configs/cluster/gpu1.yml"])), (
        "only next to modules"
    )
    model = "configs/350M/roformer_coca.yml"
    for plan in (*PLANS.values(), FIRST):
        for name in plan.keys() - {"smoke", "parity", "blocks", "tests"}:
            assert all(model in (*shlex.split(run.command), *run.reads) for run in plan[name].runs.values()), name


def test_a_part_without_its_packages_is_named_and_the_others_run(tmp_path: Path) -> None:
    """For example without DeepSpeed: kernels and models are still measured."""
    plan = plan_of({"smoke": shown("fine")}) | plan_of({"step": shown("fine")}, needs=("json", "no_such_package"))
    found = items(plan, tmp_path)
    records = [execute(item, HERE) for item in found]
    assert [record["status"] for record in records] == [DONE, MISSING]
    text = pages.page(plan, found, HERE)
    assert "| step.one | not run: no_such_package" in text and "1 of 2 runs have ended" in text
    needs = {name: run.needs for name, run in ONE_GPU["step"].runs.items()}
    assert all(("transformers" in each) == name.startswith(("llama", "gpt_neox")) for name, each in needs.items())
    assert list(waiting(found, HERE)) == found[1:], "it runs as soon as the package is installed"


@pytest.mark.parametrize(
    ("plan", "minutes"), [(ONE_GPU, 29), (EIGHT_GPUS, 15), (FIRST, 9)], ids=["1 GPU", "8 GPUs", "first"]
)
def test_limits(plan: dict[str, PlanPart], minutes: float) -> None:
    assert sum(part.seconds for part in plan.values()) == 60 * minutes
    for part in plan.values():
        for run in part.runs.values():
            assert run.seconds <= 60 * gpu_report.parser().get_default("minutes") and "FILE" in run.command
            script = run.command.split()[0]
            assert script == "-m" or (ROOT / script).is_file()


def test_the_first_plan_is_one_call() -> None:
    """With half a minute to begin. It names every file of the GPU tests."""
    assert sum(part.seconds for part in FIRST.values()) <= 60 * gpu_report.parser().get_default("minutes") - 30
    named = {ROOT / word for word in FIRST["tests"].runs["pytest"].command.split() if word.endswith(".py")}
    assert named == {*(ROOT / "tests/gpu").glob("test_*.py")}


def test_the_first_plan_has_a_folder_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_report.main(["--dry-run", "--first"]) == 0
    shown = capsys.readouterr().out
    assert "--methods rotary coca --peer llama" in shown and "blocks: " in shown and "resume: " not in shown
    with pytest.raises(SystemExit):
        gpu_report.main(["--dry-run", "--first", "--gpus", "8"])
    assert "--first --gpus 8: the first plan" in capsys.readouterr().err


def test_four_calls_are_enough() -> None:
    """If every process needs all of its time. A call needs half a minute to begin."""
    calls, left = 1, 60 * gpu_report.parser().get_default("minutes") - 30
    for seconds in (run.seconds for part in ONE_GPU.values() for run in part.runs.values()):
        calls, left = (calls, left - seconds) if seconds <= left else (calls + 1, 540 - seconds)
    assert calls == 4, "benchmarks/gpu_report.md"


# Cases


def test_cases_after_an_error_of_cuda_run_in_a_new_process(tmp_path: Path) -> None:
    """And a case in which the process ends twice is left out."""
    script, file = tmp_path / "cases.py", tmp_path / "lines.jsonl"
    script.write_text(
        "import os, sys\nfrom pathlib import Path\nfrom tools.gpu.cases import run_cases\n"
        "state = []\n"
        "def broken():\n    state.append(1)\n    raise RuntimeError('CUDA error: an illegal memory access')\n"
        "def fine():\n    assert not state, 'the same process'\n    return {'x': 1}\n"
        "cases = {'broken': broken, 'fine': fine, 'ends': lambda: os._exit(9), 'last': fine}\n"
        "sys.exit(run_cases(cases, Path(sys.argv[1])))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), str(file)]
    statuses = [subprocess.run(command, env=environment, check=False).returncode for _ in range(3)]
    assert statuses == [9, 9, 1]
    ended = {line["case"]: line["status"] for line in read_lines(file) if line["status"] != "started"}
    assert ended == {"broken": "failed", "fine": "ok", "ends": "failed", "last": "ok"}


def test_a_case_without_memory_is_no_failure(tmp_path: Path) -> None:
    def full() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    file = tmp_path / "lines.jsonl"
    write_line(file, case="cut", status="ok")
    with file.open("a") as output:
        output.write('{"case": "cut')  # by a kill
    assert run_cases({"full": full}, file) == 0
    assert [line["status"] for line in read_lines(file)] == ["ok", "started", "out of memory"]


# The page


def test_a_reader_sees_what_is_known_so_far(tmp_path: Path) -> None:
    found = items(ONE_GPU, tmp_path)
    by_title = {item.title: item for item in found}
    before = pages.page(ONE_GPU, found, HERE)
    assert before.count("| not run yet |") == len(ONE_GPU) + len(found) and "0 of 21 runs have ended" in before

    def finish(title: str, *lines: dict[str, Any], status: str = DONE) -> None:
        runner._written(by_title[title], {"status": status, "seconds": 60.0})
        for line in lines:
            write_line(by_title[title].results, **line)

    finish("smoke.kernels", {"case": "loss head", "status": "ok"}, {"case": "sdpa", "status": "failed", "error": "x"})
    full = {"case": "sdpa, CoCA", "status": "out of memory", "error": "CUDA out of memory"}
    finish("parity.eager", {"case": "coca", "status": "ok"}, full)
    text = pages.page(ONE_GPU, found, HERE)
    assert "so far: 1 of 2 cases passed; " in text and "; out of memory: sdpa, CoCA" in text
    by_title["parity.eager"].record.unlink()
    finish("step.roformer_16", {"method": "rotary", "tokens_per_second": 100000.0, "mfu": 0.41}, status=DONE)
    finish("step.coca_16", {"method": "coca", "tokens_per_second": 98000.0, "mfu": None})
    finish("step.llama_16", {"method": "llama", "error": "out of memory"})
    text = pages.page(ONE_GPU, found, HERE)
    assert "1 of 2 cases passed; failed: sdpa" in text and "4 of 21 runs have ended" in text
    assert "so far: roformer with micro-batch 16: 100,000 tokens/s, MFU 41.0%" in text
    assert "coca with micro-batch 16: 98,000 tokens/s, " in text and " 0.98 of RoFormer's, MFU unknown" in text
    assert "llama with micro-batch 16: out of memory" in text
    engines = {"deepspeed": 98000.0, "native": 99000.0, "graphs": 110000.0}
    lines = [{"method": f"coca, {name}", "tokens_per_second": speed} for name, speed in engines.items()]
    finish("step.engines_16", *lines)
    text = pages.page(ONE_GPU, found, HERE)
    assert "coca, deepspeed with micro-batch 16: 98,000 tokens/s, 0.98 of RoFormer's" in text
    assert "coca, graphs with micro-batch 16: 110,000 tokens/s, 1.10 of RoFormer's" in text
    pair = {"kind": "layer", "length": 32768, "method": "coca", "backend": "sdpa (cuDNN 9.24.0)"}
    finish(
        "attention.methods",
        pair | {"base": "rotary", "ratio": 1.2},
        pair | {"method": "rotary", "base": "rotary", "ratio": 1.0},
    )
    finish("attention.backends", pair | {"length": 8192, "base": "coca sdpa", "ratio": 1.0})
    finish("attention.backends", pair | {"length": 8192, "backend": "triton", "base": "coca sdpa", "ratio": 0.9})
    text = pages.page(ONE_GPU, found, HERE)
    triton, longest = (
        "coca with triton at 8,192: 0.90 x the time of coca sdpa",
        "coca with sdpa (cuDNN 9.24.0) at 32,768: 1.20 x",
    )
    assert f"so far: {triton}; {longest} the time of rotary" in text
    assert "1.00 x" not in text
    forward = "model forward+backward, 32768"
    finish("inference.memory", {"case": f"{forward}, rotary", "status": "ok", "peak_mib": 12345})
    finish("inference.memory", {"case": f"{forward}, coca", "status": "out of memory", "error": "CUDA out of memory"})
    text = pages.page(ONE_GPU, found, HERE)
    assert f"so far: {forward}, rotary: 12,345 MiB; {forward}, coca: out of memory" in text


def test_a_killed_test_run_names_its_failures(tmp_path: Path) -> None:
    (item,) = [each for each in items(ONE_GPU, tmp_path) if each.part == "tests"]
    log = ["[gw0] [  3%] PASSED tests/gpu/a.py::one[x] ", "[gw1] [  6%] FAILED tests/gpu/a.py::two "]
    item.log.write_text("\n".join(log))
    assert pages.results_of(item) == [
        {"case": "tests", "status": "failed", "passed": 1, "failed": 1, "error": "tests/gpu/a.py::two"}
    ]
    item.results.write_text(
        '<testsuites><testsuite><testcase name="one"/><testcase name="two"><failure/></testcase>'
        '<testcase name="three"><skipped/></testcase></testsuite></testsuites>'
    )
    (line,) = pages.results_of(item)
    kept = item.results.read_text()
    item.results.write_text(kept[:60])  # by a kill
    assert pages.results_of(item)[0]["error"] == "tests/gpu/a.py::two", "as the log says"
    assert (line["passed"], line["failure"], line["skipped"], line["error"]) == (1, 1, 1, "two")
    item.results.write_text("<testsuites><testsuite/></testsuites>")
    item.log.write_text("===== 7/9 tests collected (2 deselected) in 1.20s =====\n")  # on the stand-in device
    assert pages.results_of(item) == [{"case": "tests", "status": "ok", "collected": 7}]


# The first check and the command line


def test_what_is_missing_is_said_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert gpu_report.main(["--output", str(tmp_path / "none")]) == 2
    said = capsys.readouterr().err
    assert "nvidia-smi" in said and "too old for CUDA 13.0" in said and not (tmp_path / "none").exists()
    monkeypatch.setattr(torch.version, "cuda", None)
    problem = gpu_report.unusable() or ""
    assert "has no CUDA" in problem and "remove .venv" in problem
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert "this machine has 2" in (gpu_report.unusable(8) or "")
    failed = subprocess.CompletedProcess([], 1, "", "ptxas: error")
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: failed)
    assert "python3-dev" in (gpu_report.unusable() or "")
    monkeypatch.setattr(gpu_report, "NEEDED", ("no_such_package",))
    problem = gpu_report.unusable() or ""
    assert "no_such_package: not installed" in problem and "`make gpu-wheels`" in problem


def test_the_kernel_of_the_first_check_is_right() -> None:
    """In Triton's interpreter."""
    pytest.importorskip("triton")
    exec((gpu_report.KERNEL + gpu_report.CHECK).replace('device="cuda"', 'device="cpu"'), {})


def test_a_report_begins_with_carried_kernels(tmp_path: Path) -> None:
    """Without libraries and choices of another machine; kernels of an earlier call stay."""
    carried, output = tmp_path / "carried", tmp_path / "output"
    carry_caches(carried, output)
    assert not output.exists(), "nothing is carried"
    for name in ("triton/a/kernel.cubin", "triton/b/utils.so", "inductor/fxgraph/c", "inductor/d/e.best_config"):
        (carried / name).parent.mkdir(parents=True, exist_ok=True)
        (carried / name).write_text("carried")
    (output / "cache.part/rest").mkdir(parents=True)
    carry_caches(carried, output)
    files = {str(file.relative_to(output)) for file in output.rglob("*") if file.is_file()}
    assert files == {"cache/triton/a/kernel.cubin", "cache/inductor/fxgraph/c"}
    (output / "cache/triton/a/kernel.cubin").write_text("compiled here")
    carry_caches(carried, output)
    assert (output / "cache/triton/a/kernel.cubin").read_text() == "compiled here"


def test_a_dry_run_prints_the_selected_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_report.main(["--dry-run", "--skip", "smoke", "tests"]) == 0
    names = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines() if line[0] != " "]
    assert names == [name for name in ONE_GPU if name not in ("smoke", "tests")]


@pytest.mark.parametrize("gpus", PLANS)
def test_the_stand_in_device_compares_no_values(gpus: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_report.main(["--dry-run", "--stand-in", "--gpus", str(gpus), "--minutes", "60"]) == 0
    commands = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    wrapped = [command for command in commands if " -m tests.pretend run tools/" in command]
    assert [command for command in commands if command not in wrapped] == [
        line for line in commands if "pytest" in line
    ]
    assert all("pytest" not in line or line.endswith("--collect-only") for line in commands)
    assert all("--without-values" in line for line in wrapped if "tools/gpu/ranks" not in line and "bench" not in line)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--only smoke --skip smoke", "select no part"),
        ("--minutes 1", "a part has a limit of"),
        ("--only smoke speed", "speed: not in the plan --gpus 1"),
        ("--gpus 8 --skip smoke", "smoke: not in the plan --gpus 8"),
        ("--only step.coca_32", "step.coca_32: not in the plan --gpus 1"),
        ("--limits 0", "must be a positive number"),
        ("--limits nan", "must be a positive number"),
        ("--minutes inf", "must be a positive number"),
    ],
)
def test_wrong_options(arguments: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        gpu_report.main(["--dry-run", *arguments.split()])
    assert error.value.code == 2 and said in capsys.readouterr().err


def test_runs_are_chosen_in_the_given_order(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = "attention.packed step.coca_16 attention.methods parity"
    assert gpu_report.main(["--dry-run", "--only", *chosen.split(), "--skip", "parity.eager"]) == 0
    runs = [line.split(",")[0].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert runs == ["packed", "methods", "coca_16", "compiled"]


def test_plan_and_help_need_no_pytorch() -> None:
    code = "import sys, runpy; sys.modules['torch'] = None; sys.argv = ['x', '--dry-run', '--gpus', '8']; "
    code += "runpy.run_path('tools/gpu_report.py')['main']()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "15 in all" in done.stdout


def test_the_machine_is_described_without_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_coca.checkpoints.native import write

    monkeypatch.setattr(write, "find_spec", lambda name: None if name == "deepspeed" else object())
    assert "deepspeed" not in write.code_versions() and "torch" in write.code_versions()
