"""States of cells on disk, dividing a machine, and running cells with quick stand-ins for training and evaluation."""

import os
import re
import shutil
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_coca.ablation import cells as files
from megatron_coca.ablation import running
from megatron_coca.ablation.cells import CellRecord, State, read_cell, state_of, write_cell
from megatron_coca.ablation.grid import Cell, DataRecord
from megatron_coca.ablation.reporting import curves
from megatron_coca.ablation.running import Machine, divide, run_cells
from megatron_coca.config import load_config
from megatron_coca.evaluation import EvaluationError
from megatron_coca.evaluation.report.curves import CurvePoint, thinned
from megatron_coca.evaluation.results import read_record
from megatron_coca.evaluation.suite import Command
from megatron_coca.support import console
from megatron_coca.work.statuses import Preempted, status_of

DATA = DataRecord(chosen_by="{}", vocab_size=512, identity={"sha256": ["5e"]})
MACHINE = Machine(2, (), "cpu")

TRAIN = """
import json, os, sys, time
from pathlib import Path
import yaml
config = yaml.safe_load(Path(sys.argv[1]).read_text())
save = Path(config["save"])
print("threads", os.environ["OMP_NUM_THREADS"], "pos_emb", config["pos_emb"])
if config["pos_emb"] == "alibi":
    print("ValueError: no such slope\\non rank 0 of 1, a host")
    sys.exit(1)
if config["pos_emb"] == "sinusoidal" and not (save / "killed").exists():
    (save / "killed").touch()
    os.kill(os.getpid(), 9)
if config["pos_emb"] == "sandwich" and not (save / "global_step3").exists():
    (save / "global_step3").mkdir()
    (save / "global_step3" / "manifest.json").write_text("{}")
    print("[rank0]: OSError: [Errno 5] Input/output error\\n[rank0]: on rank 0 of 1, a host")
    sys.exit(1)
if config["pos_emb"] == "kerple_log":
    if (save / "ends").read_text() == "3":
        (save / "global_step3").mkdir(exist_ok=True)
        (save / "global_step3" / "manifest.json").write_text("{}")
    sys.exit(0)
lines = [{"step": 3, "loss": 5.0, "step_seconds": 2.0, "eta_seconds": 6.0}, {"step": 3, "event": "slow"}]
lines += [{"step": 6, "loss": 4.0, "step_seconds": 1.0, "eval_share": 0.5}, {"step": 6, "validation_loss": 4.5}]
(save / "metrics.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines) + '{"step"')
if config["pos_emb"] == "none":
    time.sleep(60)
folder = save / "global_step6"
folder.mkdir()
(folder / "meta.json").write_text(json.dumps({"step": 6, "progress": {}}))
(folder / "manifest.json").write_text("{}")
"""
EVALUATE = """
import json, sys
from pathlib import Path
arguments = sys.argv[1:]
folder = Path(arguments[arguments.index("--output") + 1])
folder.mkdir(parents=True, exist_ok=True)
kind = "refused" if arguments[0] == "passkey" else "not run"
missing = [] if arguments[0] == "perplexity" else [{"at": "all", "kind": kind, "reason": "x"}]
(folder / f"{arguments[0]}_m.json").write_text(json.dumps({"missing": missing}))
print("evaluate.py: m: all: x", file=sys.stderr)
sys.exit(2 if missing else 0)
"""


@pytest.fixture(autouse=True)
def _stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("TRAIN", TRAIN), ("EVALUATE", EVALUATE)):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.setattr(running, name, (sys.executable, "-u", str(tmp_path / f"{name}.py")))


def cell(tmp_path: Path, small: dict[str, Any], method: str, tasks: tuple[str, ...] = ("perplexity",)) -> Cell:
    name = f"{method}-s7-00000000"
    run, results = tmp_path / "runs" / name, tmp_path / "results" / name
    keys = {"pos_emb": method, "rotary_pct": 1.0, "train_iters": 6, "save": str(run)}
    commands = [Command(task, "m", (task, "--output", str(results)), (results / f"{task}_m.json",)) for task in tasks]
    digests = {Path(f"{task}_m.json"): "digest" for task in tasks}
    return Cell(method, 7, name, load_config([], small | keys), 1, 4, DATA, run, results, commands, digests)


@pytest.mark.always
def test_cells_are_run_seed_by_seed(tmp_path: Path, small: dict[str, Any]) -> None:
    """So that models have the same seeds whenever it ends."""
    cells = []
    for method in ("rotary", "coca"):
        for seed in (8, 7):
            one = cell(tmp_path / f"s{seed}", small, method)
            cells.append(replace(one, seed=seed, name=f"{method}-s{seed}"))
    run_cells(cells, MACHINE, 1)
    written = [(each.results / files.RECORD).stat().st_mtime_ns for each in cells]
    order = [cells[index].name for index in sorted(range(4), key=written.__getitem__)]
    assert order == ["rotary-s8", "coca-s8", "rotary-s7", "coca-s7"]


def test_a_cell_waits_for_its_start(tmp_path: Path, small: dict[str, Any]) -> None:
    """Also when a place is free, and in a later call."""
    base = cell(tmp_path, small, "rotary")
    later = [replace(cell(tmp_path / str(number), small, "coca"), start=base) for number in range(2)]
    assert run_cells([*later, base], MACHINE, 2) == []
    assert {state_of(each) for each in (base, *later)} == {State.DONE}
    trained = [(each.run / "global_step6" / "meta.json").stat().st_mtime_ns for each in (base, *later)]
    assert trained[0] < min(trained[1:])
    last = replace(cell(tmp_path / "last", small, "coca"), start=base)
    assert run_cells([last], MACHINE, 1) == [] and state_of(last) is State.DONE


def test_a_cell_without_its_start_is_a_failure(tmp_path: Path, small: dict[str, Any]) -> None:
    """Its start fails, is not among the chosen cells, or is finished and has lost its weights."""
    failing = cell(tmp_path, small, "alibi")
    after = replace(cell(tmp_path, small, "coca"), start=failing)
    failures = run_cells([failing, after], MACHINE, 2)
    assert len(failures) == 2 and "no such slope" in failures[0].reason
    assert failures[1].reason.endswith(f"and {failing.run} has none; train it first: --only {failing.name}")
    assert failures[1].temporary and state_of(after) is State.WAITING
    base = cell(tmp_path, small, "rotary")
    alone = replace(cell(tmp_path, small, "coca"), start=base)
    assert "train it first" in run_cells([alone], MACHINE, 1)[0].reason
    run_cells([base], MACHINE, 1)
    shutil.rmtree(base.run)
    (failure,) = run_cells([alone], MACHINE, 1)
    assert failure.reason.endswith(f"remove {base.results} to train it again") and not failure.temporary


def test_states_from_files(tmp_path: Path, small: dict[str, Any]) -> None:
    one = cell(tmp_path, small, "rotary")
    assert state_of(one) is State.WAITING
    folder = one.run / "global_step6"
    (one.run / "global_step3").mkdir(parents=True)
    assert state_of(one) is State.STARTED
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    (folder / "meta.json").write_text('{"step": 6, "progress": {"unvalidated": true}}')
    assert state_of(one) is State.STARTED, "it was stopped in its last validation"
    (folder / "meta.json").write_text('{"step": 6, "progress": {"unvalidated": false}}')
    assert state_of(one) is State.TRAINED
    write_cell(one, read_cell(one).model_copy(update={"status": "failed"}))
    assert state_of(one) is State.FAILED
    files.write_curve(one)
    (one.results / "perplexity_m.json").write_text("{}")
    write_cell(one, read_cell(one).model_copy(update={"evaluated": {"perplexity_m.json": "digest"}}))
    assert state_of(one) is State.DONE
    (folder / "manifest.json").unlink()
    assert state_of(one) is State.DONE, "the results are kept without the checkpoint"
    assert state_of(replace(one, measurements={Path("perplexity_m.json"): "other options"})) is State.FAILED
    on_data = replace(one, inputs={Path("perplexity_m.json"): "data"})
    assert state_of(on_data) is State.DONE, "earlier versions recorded no data"
    write_cell(one, read_cell(one).model_copy(update={"inputs": {"perplexity_m.json": "other data"}}))
    assert state_of(on_data) is State.FAILED and state_of(one) is State.DONE, "a report may not have the data"
    write_cell(one, read_cell(one).model_copy(update={"inputs": {"perplexity_m.json": "data"}}))
    assert state_of(on_data) is State.DONE
    (one.results / "perplexity_m.json").write_text('{"cells": [')
    assert state_of(one) is State.FAILED, "a truncated file is no result"
    (one.results / "perplexity_m.json").unlink()
    assert state_of(one) is State.FAILED
    (one.results / "cell.json").write_text('{"model"')
    with pytest.raises(EvaluationError, match="cell.json: is not the record of a cell"):
        state_of(one)


def test_a_failed_cell_stops_no_other(
    tmp_path: Path, small: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    methods = ("alibi", "rotary", "coca")
    grid = [cell(tmp_path, small, method, ("perplexity", "passkey")) for method in methods]
    grid[1] = replace(grid[1], inputs={Path("perplexity_m.json"): "data"})
    (failure,) = run_cells(grid, MACHINE, 2)
    assert not failure.temporary, "a traceback without a new checkpoint would come again"
    assert failure.reason == f"{grid[0].name}: training: ValueError: no such slope ({grid[0].run / 'log.txt'})"
    assert [state_of(each) for each in grid] == [State.FAILED, State.DONE, State.DONE]
    assert "threads 1 pos_emb rotary" in (grid[1].run / "log.txt").read_text()
    shown = capsys.readouterr().err
    assert f"{grid[1].name}: evaluating passkey" in shown and f"{grid[0].name}: failed: training: Val" in shown
    record = read_record(grid[1].results / "cell.json", CellRecord, "a record")
    # 3 steps of 2 s, then 3 of 1 s which are half of the time, as validation takes the other half.
    assert record.training_seconds == 12.0 and record.status == "done" and record.torch
    assert record.inputs == {"perplexity_m.json": "data"} and record.evaluated.keys() > record.inputs.keys()
    assert record.tokens == 6 * 4 * 32 and record.parameters > record.non_embedding_parameters > 0
    (curve,) = curves(grid)["rotary"]
    assert [(point.step, point.tokens) for point in curve.points] == [(3, 384), (6, 768)]
    assert (curve.points[1].train_loss, curve.points[1].validation_loss) == (4.0, 4.5)
    assert "alibi" in files.overview(grid)

    before = (grid[1].results / "cell.json").read_bytes()
    assert len(run_cells(grid, MACHINE, 1)) == 1, "a failed cell is tried again"
    assert (grid[1].results / "cell.json").read_bytes() == before
    assert "threads 2 pos_emb alibi" in (grid[0].run / "log.txt").read_text()


def test_a_failed_task_leaves_the_others(
    tmp_path: Path, small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = cell(tmp_path, small, "rotary", ("needle", "perplexity"))
    monkeypatch.setenv("LD_PRELOAD", "libm.so.6")
    (failure,) = run_cells([one], MACHINE, 1)
    assert f"{one.name}: needle: evaluate.py: m: all: x" in failure.reason and status_of([failure]) == 2
    record = read_cell(one)
    assert record.status == "failed" and record.evaluated.keys() == {"perplexity_m.json"}
    assert record.preloaded == ["libm.so.6"]
    assert record.reason in failure.reason


def test_an_error_after_a_new_checkpoint_is_worth_a_repetition(tmp_path: Path, small: dict[str, Any]) -> None:
    one = cell(tmp_path, small, "sandwich")
    (failure,) = run_cells([one], MACHINE, 1)
    assert failure.temporary and failure.reason.startswith(f"{one.name}: training: OSError: [Errno 5] Input/output")
    assert run_cells([one], MACHINE, 1) == [] and state_of(one) is State.DONE


def test_a_launch_that_ends_early_is_worth_a_repetition_after_a_new_checkpoint(
    tmp_path: Path, small: dict[str, Any]
) -> None:
    """As with `exit_interval`: the status is 0, and steps are missing."""
    one = cell(tmp_path, small, "kerple_log")
    one.run.mkdir(parents=True)
    found = []
    for end in ("none", "3", "3"):
        (one.run / "ends").write_text(end)
        (failure,) = run_cells([one], MACHINE, 1)
        assert failure.reason.startswith(f"{one.name}: training: ended before its last step")
        found.append(failure.temporary)
    assert found == [False, True, False]


def test_a_killed_training_is_worth_a_repetition(tmp_path: Path, small: dict[str, Any]) -> None:
    """The exit status says so, and the same call completes the cell."""
    killed, other = cell(tmp_path, small, "sinusoidal"), cell(tmp_path, small, "rotary", ("needle",))
    failures = run_cells([killed, other], MACHINE, 1)
    assert [failure.temporary for failure in failures] == [True, False]
    assert "killed by SIGKILL (possibly because" in failures[0].reason
    assert status_of(failures) == 1 and status_of(failures[1:]) == 2
    assert run_cells([killed], MACHINE, 1) == [] and state_of(killed) is State.DONE


def test_a_signal_ends_the_children_and_a_second_runner_is_an_error(tmp_path: Path, small: dict[str, Any]) -> None:
    one = cell(tmp_path, small, "none")
    refused = []

    def interfere() -> None:
        while not (one.run / "metrics.jsonl").is_file():
            time.sleep(0.01)
        try:
            with running.locked(one):
                pass
        except EvaluationError as error:
            refused.append(str(error))
        os.kill(os.getpid(), signal.SIGTERM)

    other = threading.Thread(target=interfere)
    other.start()
    start = time.monotonic()
    with pytest.raises(Preempted, match="preempted \\(SIGTERM\\); run the same command again"):
        run_cells([one], MACHINE, 1)
    other.join()
    assert time.monotonic() - start < 30 and "another process runs this cell" in refused[0]
    assert read_cell(one).status == "started"


def test_a_busy_cell_is_skipped(tmp_path: Path, small: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """So that several hosts share the cells of a grid."""
    busy, free = (cell(tmp_path, small, method) for method in ("rotary", "coca"))
    with running.locked(busy):
        assert run_cells([busy, free], MACHINE, 1) == []
    assert [state_of(each) for each in (busy, free)] == [State.WAITING, State.DONE]
    shown = capsys.readouterr().err
    assert f"{busy.name}: skipped (" in shown and "another process runs this cell" in shown
    assert run_cells([busy, free], MACHINE, 1) == [] and state_of(busy) is State.DONE


def test_cores_and_gpus_are_divided() -> None:
    assert [share.threads for share in divide(Machine(5, (), "cpu"), 2)] == [2, 2]
    assert divide(Machine(1, (), "cpu"), 3)[2].variables(1) == {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    four = divide(Machine(16, ("0", "2", "5", "7"), "H100"), 2)
    assert [share.gpus for share in four] == [("0", "2"), ("5", "7")]
    assert four[1].variables(2) == {"OMP_NUM_THREADS": "4", "CUDA_VISIBLE_DEVICES": "5,7"}
    with pytest.raises(EvaluationError, match="--jobs 3: this machine has 2 GPUs"):
        divide(Machine(8, ("0", "1"), "H100"), 3)


def test_more_ranks_than_gpus_are_an_error(tmp_path: Path, small: dict[str, Any]) -> None:
    one = replace(cell(tmp_path, small, "rotary"), ranks=2)
    with pytest.raises(EvaluationError, match="--jobs 2: leaves 1 GPUs to a cell that needs 2"):
        run_cells([one], Machine(8, ("0", "1"), "H100"), 2)


def test_curves_are_thinned_evenly_and_keep_validations() -> None:
    points = [CurvePoint(step=n, tokens=n, train_loss=1.0, validation_loss=None) for n in range(1, 1001)]
    assert [point.step for point in thinned(points, 4)] == [250, 500, 750, 1000]
    points[98] = points[98].model_copy(update={"validation_loss": 2.0})
    assert [point.step for point in thinned(points, 3)] == [99, 500, 1000]
    assert thinned(points[:3], 3) == points[:3]


def test_the_progress_within_a_cell_and_the_time_left(
    tmp_path: Path, small: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "FIRST_GAP", 0.0)
    monkeypatch.setattr(running, "PROGRESS_SECONDS", 0.0)
    one = cell(tmp_path, small, "none", ("perplexity", "passkey"))  # its training writes six steps, and then waits

    def end() -> None:
        while not (one.run / "metrics.jsonl").is_file():
            time.sleep(0.01)
        time.sleep(1)  # the step has been shown by then
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end).start()
    with pytest.raises(Preempted):
        run_cells([one], MACHINE, 1)
    shown = capsys.readouterr().err
    assert "ablation: 0/1 cells" in shown and f"{one.name}: step 6 of 6" in shown
    assert re.search(r"ablation: 0/1 cells, 0:00:\d\d left, none", shown)


def test_the_overview_has_states_and_sizes(tmp_path: Path, small: dict[str, Any]) -> None:
    grid = [cell(tmp_path, small, method) for method in ("rotary", "coca")]
    run_cells(grid[:1], MACHINE, 1)
    rows = [[text.strip() for text in line.split("|")] for line in files.overview(grid).splitlines()]
    assert rows[2][2] == "done" and rows[3][2] == "waiting"
    assert rows[3][5] == f"{6 * 4 * 32:,}" and rows[2][6] == "12" and rows[3][6] == "0"
