"""SIGKILL at random moments, also during saves. The same command resumes, and the run ends like an uninterrupted run.

`--kills 100` kills a run of one process 100 times and one of two processes, also a ring, 20 times. CUDA graphs are
imitated.
"""

from pathlib import Path
from typing import Any

import pytest

from megatron_coca.training.engine.passes import WARMUP
from tests.integration.graphs_train import REPLAYS
from tests.integration.killing import ForkServer, assert_kills_change_nothing

STEPS, MICRO_BATCHES = 12, 2
KEYS = {"auto_resume": True, "train_iters": STEPS, "checkpoint_factor": 2, "keep_last_n_checkpoints": 2}
EXPERTS = {"mlp_config": ["dense", "experts"], "moe_num_experts": 4, "moe_top_k": 2, "moe_correction_bias": True}
EXPERTS |= {"moe_bias_update_rate": 1e-3, "moe_shared_intermediate_size": 24, "precision": "bfloat16"}
GRAPHS = {"engine": "native", "precision": "bfloat16", "cuda_graphs": True}
RING = {"context_parallel_size": 2, "attention_dropout": 0.0, "zero_stage": 2}


@pytest.mark.parametrize(
    ("ranks", "keys", "share"),
    [
        pytest.param(1, {}, None, id="3"),
        pytest.param(1, {"engine": "native", "precision": "bfloat16"}, None, id="3, native engine"),
        pytest.param(1, EXPERTS, 10, id="experts", marks=pytest.mark.slow),
        pytest.param(2, EXPERTS | {"zero_stage": 2}, 10, id="experts, ZeRO 2 in two processes", marks=pytest.mark.slow),
        pytest.param(
            2,
            EXPERTS | {"zero_stage": 3, "moe_bias_update_rate": 0.0},
            10,
            id="experts, ZeRO 3 in two processes",
            marks=pytest.mark.slow,
        ),
        pytest.param(1, {}, 1, id="many", marks=pytest.mark.slow),
        pytest.param(1, {"engine": "native"}, 1, id="many, native engine", marks=pytest.mark.slow),
        pytest.param(2, {"zero_stage": 3}, 5, id="ZeRO 3 in two processes", marks=pytest.mark.slow),
        pytest.param(2, RING, 5, id="a ring of two processes", marks=pytest.mark.slow),
        pytest.param(3, RING | {"context_parallel_size": 3}, 10, id="a ring of three", marks=pytest.mark.slow),
        pytest.param(
            2,
            {"engine": "native", "precision": "bfloat16"},
            5,
            id="native engine in two processes",
            marks=pytest.mark.slow,
        ),
        pytest.param(1, GRAPHS, 1, id="many, graphs", marks=pytest.mark.slow),
        pytest.param(2, GRAPHS, 5, id="graphs in two processes", marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_ends_as_one_never_killed(
    ranks: int,
    keys: dict[str, Any],
    share: int | None,
    server: ForkServer,
    tmp_path: Path,
    open_run: Any,
    pytestconfig: pytest.Config,
) -> None:
    kills = 3 if share is None else pytestconfig.getoption("--kills") // share
    launches, captured = [], "cuda_graphs" in keys
    program = "tests.integration.graphs_train" if captured else "megatron_coca.commands.train"

    def start(changes: Any) -> Any:
        launches.append(server.start(KEYS | keys | dict(changes), ranks, program=program))
        return launches[-1]

    inside_saves = assert_kills_change_nothing(start, tmp_path, kills, open_run, STEPS)
    assert kills < 100 or inside_saves
    replays = [line for line in launches[0].output().splitlines() if line.startswith(REPLAYS)]
    assert replays == [f"{REPLAYS}{STEPS * MICRO_BATCHES // ranks - WARMUP}"] * ranks * captured
