"""A run in stages gives the same results with any interruption, and a finished stage cannot be changed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_coca.checkpoints import native
from megatron_coca.config import load_config
from tests.integration.hooks import Hook
from tests.integration.killing import ForkServer, assert_kills_change_nothing

STEPS = 12
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
STAGES = [
    {"until": 4, "seq_length": 16, "train_batch_size": 16, "train_micro_batch_size_per_gpu": 4},
    {"until": "67%"},
    {"seq_length": 64, "rope_scaling": YARN, "optimizer.params.lr": 1e-3, "restart_schedule": True, "warmup": 0.5},
]
KEYS = {"stages": STAGES, "train_iters": STEPS, "auto_resume": True}


@pytest.mark.slow
def test_stages_that_change_nothing_leave_every_bit(
    live: Any, whole: Any, open_run: Any, assert_same_state: Any, tmp_path: Path
) -> None:
    live({"save": str(tmp_path), "stages": [{"until": 5}, {"until": "75%"}, {}]})
    run = open_run(tmp_path)
    trained = [[line for line in records if "loss" in line] for records in (run.records, whole.records)]
    assert trained[0] == trained[1] and run.weights(STEPS) == whole.weights(STEPS)
    assert_same_state(run.state(STEPS), whole.state(STEPS))
    assert [line["step"] for line in run.records if "validation_loss" in line] == [5, 6, 9, 12], "at borders too"


def layout(name: str, ranks: int, stops: Sequence[int], slow: bool = True, **changes: Any) -> Any:
    return pytest.param(ranks, stops, changes, id=name, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize(
    ("ranks", "stops", "changes"),
    [
        layout("one process", 1, (3, 4, 6, 8, 9), slow=False),
        layout("ZeRO 1, fp32 sums of bf16", 2, (4, 9), precision="bfloat16", zero_stage=1),
        layout("native engine", 1, (3, 8), engine="native"),
        layout("native engine, bf16, in two processes", 2, (4, 9), engine="native", precision="bfloat16"),
        layout("ZeRO 2", 2, (4, 9), zero_stage=2),
        layout("ZeRO 3", 2, (3, 8), zero_stage=3),
        layout("pipeline stages", 2, (4, 9), pipe_parallel_size=2, hidden_dropout=0.0),
        layout("tensor parallelism", 2, (3, 8), model_parallel_size=2),
        layout("sequence parallelism", 2, (4, 9), sequence_parallel_size=2, attention_dropout=0.0),
    ],
)
def test_stopping_in_or_between_stages_changes_no_bit(
    live: Any,
    open_run: Any,
    assert_same_state: Any,
    tmp_path: Path,
    ranks: int,
    stops: Sequence[int],
    changes: dict[str, Any],
) -> None:
    live(KEYS | changes | {"save": str(tmp_path / "whole")}, ranks=ranks)
    for stop in (*stops, STEPS):
        live(KEYS | changes | {"save": str(tmp_path / "stopped"), "exit_interval": stop}, ranks=ranks)
    whole, stopped = open_run(tmp_path / "whole"), open_run(tmp_path / "stopped")
    assert len(whole.losses) == STEPS == len(set(whole.losses))
    assert whole.records == stopped.records and whole.weights(STEPS) == stopped.weights(STEPS)
    assert_same_state(whole.state(STEPS), stopped.state(STEPS))


def test_a_checkpoint_is_of_its_stage_and_borders_are_noted(live: Any, open_run: Any, tmp_path: Path) -> None:
    live(KEYS | {"save": str(tmp_path), "checkpoint_factor": 6})
    configs = {step: load_config(tmp_path / f"global_step{step}" / "config.yml") for step in (4, 6, 8, 12)}
    assert [config.model.seq_length for config in configs.values()] == [16, 32, 32, 64]
    assert all(config.schedule.stages is None for config in configs.values()), "ready for evaluation and export"
    run = open_run(tmp_path)
    assert [event.partition(":")[0] for event in run.events] == ["stage begins", "stage begins"]
    assert [line["lr"] for line in run.records if "loss" in line][8:] == [5e-4, 1e-3, 5e-4, 0.0]
    tokens = [share["tokens"] for share in native.read_meta(tmp_path / "global_step12")["mixture"]]
    assert tokens == [4 * 16 * 16 + 4 * 4 * 32 + 4 * 4 * 64]


def test_later_stages_may_change_and_finished_ones_may_not(live: Any, open_run: Any, tmp_path: Path) -> None:
    keys = KEYS | {"save": str(tmp_path)}
    live(keys | {"exit_interval": 6})

    def changed(number: int, **values: Any) -> dict[str, Any]:
        return keys | {"stages": [stage | values if i == number else stage for i, stage in enumerate(STAGES)]}

    refused = live(changed(0, until=3), expected=2)
    assert "last (saved 4, now 3) in the finished stages[0]" in refused.output
    refused = live(changed(0, **{"optimizer.params.lr": 1.0}), expected=2)
    assert "changes (saved " in refused.output and " in the finished stages[0]" in refused.output
    refused = live(changed(1, seq_length=16), expected=2)
    assert "different seq_length (saved 32, now 16)" in refused.output
    refused = live(changed(1, until=5), expected=2)
    assert "stage 2, but is now in stage 3)" in refused.output
    refused = live(keys | {"stages": None}, expected=2)
    assert "stage 2, but is now in stage 1)" in refused.output
    live(changed(1, until=10) | {"exit_interval": 11})
    assert load_config(tmp_path / "global_step11" / "config.yml").model.seq_length == 64
    assert native.steps(tmp_path) == [4, 6, 10, 11]


@pytest.mark.slow
def test_a_stage_is_added_to_a_finished_run(live: Any, open_run: Any, tmp_path: Path) -> None:
    live({"save": str(tmp_path)})
    live({"save": str(tmp_path), "auto_resume": True, "train_iters": 14, "stages": [{"until": 12}, {"seq_length": 64}]})
    assert load_config(tmp_path / "global_step14" / "config.yml").model.seq_length == 64


@pytest.mark.slow
def test_parts_are_trained_in_turn(live: Any, open_run: Any, tmp_path: Path) -> None:
    stages = [{"until": 4, "trainable": ["key"]}, {"reset_optimizer": True, "restart_schedule": True}]
    live({"save": str(tmp_path / "whole"), "stages": stages})
    for stop in (4, 7, STEPS):
        live({"save": str(tmp_path / "run"), "stages": stages, "auto_resume": True, "exit_interval": stop})
    whole, run = open_run(tmp_path / "whole"), open_run(tmp_path / "run")
    assert whole.records == run.records and whole.weights(STEPS) == run.weights(STEPS)
    counters = [native.read_meta(tmp_path / "run" / f"global_step{step}")["counters"] for step in (4, 7)]
    assert [each["step"] for each in counters] == [4, 3], "the second stage has an optimizer of its own"


@pytest.mark.slow
def test_a_run_goes_on_with_an_optimizer_that_begins_anew(live: Any, open_run: Any, tmp_path: Path) -> None:
    """As a stage with `reset_optimizer` does, also where it is killed; another optimizer is no other run then."""
    stages = [{"until": 4}, {"reset_optimizer": True}]
    live({"save": str(tmp_path / "whole"), "stages": stages})
    live({"save": str(tmp_path / "first"), "exit_interval": 4})
    keys = {"load": str(tmp_path / "first"), "save": str(tmp_path / "run"), "no_load_optim": True, "auto_resume": True}
    for stop in (7, STEPS):
        live(keys | {"exit_interval": stop})
    whole, run = open_run(tmp_path / "whole"), open_run(tmp_path / "run")
    assert whole.losses[4:] == run.losses and whole.weights(STEPS) == run.weights(STEPS)
    assert native.read_meta(tmp_path / "run" / "global_step7")["counters"]["step"] == 3
    other = keys | {"save": str(tmp_path / "lion"), "optimizer.type": "lion", "optimizer.params.betas": [0.9, 0.99]}
    live(other)
    assert open_run(tmp_path / "lion").losses[0] == run.losses[0] != open_run(tmp_path / "lion").losses[1]
    refused = live(other | {"no_load_optim": False, "save": str(tmp_path / "none")}, expected=2)
    assert "cannot be resumed with a different" in refused.output and "optimizer.type" in refused.output
    refused = live(keys | {"save": str(tmp_path / "first")}, expected=2)
    assert "no_load_optim: load and save" in refused.output


@pytest.mark.slow
def test_a_signal_in_the_validation_at_a_border(live: Any, open_run: Any, tmp_path: Path) -> None:
    live(KEYS | {"save": str(tmp_path / "whole")})
    keys = KEYS | {"save": str(tmp_path / "run")}
    live(keys | {"eval_iters": 2}, [Hook("evaluation", "ask to leave")], expected=75)
    assert native.steps(tmp_path / "run") == [4]
    live(keys)
    whole, run = open_run(tmp_path / "whole"), open_run(tmp_path / "run")
    assert whole.records == run.records and whole.weights(STEPS) == run.weights(STEPS)


@pytest.mark.slow
def test_other_numbers_of_processes_across_a_border(live: Any, open_run: Any, tmp_path: Path) -> None:
    plain = KEYS | {"hidden_dropout": 0.0, "attention_dropout": 0.0, "zero_stage": 1}
    live(plain | {"save": str(tmp_path / "whole")})
    for stop, ranks in ((3, 2), (8, 1), (STEPS, 2)):
        live(plain | {"save": str(tmp_path / "run"), "exit_interval": stop}, ranks=ranks)
    whole, run = open_run(tmp_path / "whole"), open_run(tmp_path / "run")
    assert run.losses == pytest.approx(whole.losses, rel=1e-4)
    assert len(set(run.losses)) == STEPS


def test_errors_name_wrong_stages(live: Any, tmp_path: Path) -> None:
    refused = live({"stages": [{"until": 20}, {"num_layers": 3}], "save": str(tmp_path)}, expected=2)
    assert "stages[0].until: step 20 leaves no steps" in refused.output
    refused = live({"stages": STAGES}, expected=2)
    assert "stages: need save" in refused.output
    missing = [{"until": 6}, {"train_data_paths": ["nowhere"]}]
    refused = live({"stages": missing, "save": str(tmp_path)}, expected=2)
    assert "stages[1]: " in refused.output and "nowhere" in refused.output and not native.steps(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys", [{}, {"engine": "native", "precision": "bfloat16"}], ids=["deepspeed", "native engine"]
)
def test_a_run_killed_in_its_stages_ends_as_one_never_killed(
    keys: dict[str, Any], server: ForkServer, tmp_path: Path, open_run: Any, pytestconfig: pytest.Config
) -> None:
    kills = pytestconfig.getoption("--kills") // 5

    def start(changes: Any) -> Any:
        return server.start(KEYS | {"checkpoint_factor": 3, "keep_last_n_checkpoints": 2} | keys | dict(changes))

    assert_kills_change_nothing(start, tmp_path, kills, open_run, STEPS)
