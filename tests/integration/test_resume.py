"""A run that is stopped and resumed ends in the same bits as one that never stopped, whatever ended it.

Runs that do not depend on each other train at the same time, because a process spends most of its time on imports.
"""

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

STEPS = 12
STOPS = (1, 5, 7)
TWO = ("--num_gpus", "2")


def run_with_stops(
    train: Any, folder: Path, stops: tuple[int, ...], changes: dict[str, Any], options: tuple[str, ...] = ()
) -> None:
    """Train into `folder`, ending the process at every one of `stops` and starting the same command again."""
    keys = {"save": str(folder), "load": str(folder), **changes}
    for stop in (*stops, STEPS):
        finished = train(keys | {"exit_interval": stop}, options=options)
        assert finished.status == 0, finished.output


def assert_same_run(one: Any, other: Any, assert_same_state: Any) -> None:
    assert len(one.losses) == STEPS == len(set(one.losses))
    assert one.records == other.records, "losses, gradient norms, learning rates and validation losses"
    assert one.weights(STEPS) == other.weights(STEPS)
    assert_same_state(one.state(STEPS), other.state(STEPS))


def test_stopping_changes_no_bit(train: Any, whole: Any, open_run: Any, assert_same_state: Any, tmp_path: Path) -> None:
    run_with_stops(train, tmp_path, STOPS, {})
    assert sorted(path.name for path in tmp_path.glob("global_step*")) == [
        "global_step1",
        "global_step12",
        "global_step5",
        "global_step7",
    ]
    assert_same_run(open_run(tmp_path), whole, assert_same_state)


LAYOUTS = [
    pytest.param({"zero_stage": 3}, (5,), (), id="ZeRO 3"),
    pytest.param({"train_batch_size": 8, "zero_stage": 1}, (5,), TWO, id="ZeRO 1 in two processes"),
    *(
        pytest.param({"zero_stage": stage}, STOPS, (), id=f"ZeRO {stage}, three stops", marks=pytest.mark.slow)
        for stage in (1, 2, 3)
    ),
    *(
        pytest.param(
            {"train_batch_size": 8, "zero_stage": stage},
            STOPS,
            TWO,
            id=f"ZeRO {stage} in two processes, three stops",
            marks=pytest.mark.slow,
        )
        for stage in (0, 1, 2, 3)
    ),
    pytest.param({"rope_scaling": {"rope_type": "clex"}, "zero_stage": 2}, (5,), (), id="learned frequencies"),
    *(
        pytest.param(
            {"train_batch_size": 8, "zero_stage": 3, "attention_dropout": 0.0, **keys},
            (5,),
            TWO,
            id=f"{name}, ZeRO 3 in two processes",
            marks=pytest.mark.slow,
        )
        for name, keys in {
            "a bias by layer": {"pos_emb": "kerple_log"},
            "a shared bias": {"pos_emb": "rpe"},
            "a map": {"relative_positions": {"type": "inv_leaky_rerope", "target_length": 256}},
            "learned frequencies": {"rope_scaling": {"rope_type": "clex"}},
        }.items()
    ),
    pytest.param({"precision": "bfloat16", "zero_stage": 1}, STOPS, (), id="bf16", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("changes", "stops", "options"), LAYOUTS)
def test_stopping_changes_no_bit_in_other_layouts(
    train: Any,
    open_run: Any,
    assert_same_state: Any,
    tmp_path: Path,
    changes: dict[str, Any],
    stops: tuple[int, ...],
    options: tuple[str, ...],
) -> None:
    folders = {tmp_path / "whole": (), tmp_path / "stopped": stops}
    with ThreadPoolExecutor() as pool:
        running = [pool.submit(run_with_stops, train, folder, at, changes, options) for folder, at in folders.items()]
    for each in running:
        each.result()
    one, other = (open_run(folder) for folder in folders)
    assert_same_run(one, other, assert_same_state)


def test_a_killed_run_goes_on_with_the_same_command(
    start: Any, train: Any, whole: Any, open_run: Any, assert_same_state: Any, tmp_path: Path
) -> None:
    keys = {"save": str(tmp_path), "load": str(tmp_path), "checkpoint_factor": 2}
    process = start(keys)
    metrics = tmp_path / "metrics.jsonl"
    while process.poll() is None and not (metrics.is_file() and metrics.read_text().count("\n") >= 5):
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed"
    process.stdout.close()
    left = [path.name for path in tmp_path.glob("global_step*")]
    assert left and "global_step12" not in left
    with metrics.open("a") as file:
        file.write('{"step": 11, "lo')  # what a kill can leave of a line
    finished = train(keys)
    assert finished.status == 0 and "resuming at step" in finished.output, finished.output
    assert_same_run(open_run(tmp_path), whole, assert_same_state)
