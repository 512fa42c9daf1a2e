"""SIGKILL at random moments, also during saves. The same command resumes, and the run ends like an uninterrupted run.

`--kills 100` kills a run of one process 100 times and one of two processes 20 times.
"""

from itertools import count
from pathlib import Path
from typing import Any

import pytest

from megatron_coca.checkpoints import native
from tests.integration.killing import ForkServer, kill_randomly, run_to_end

STEPS = 12
KEYS = {"auto_resume": True, "train_iters": STEPS, "checkpoint_factor": 2, "keep_last_n_checkpoints": 2}
EXPERTS = {"mlp_config": ["dense", "experts"], "moe_num_experts": 4, "moe_top_k": 2, "moe_correction_bias": True}
EXPERTS |= {"moe_bias_update_rate": 1e-3, "moe_shared_intermediate_size": 24, "precision": "bfloat16"}
IN_ONE_RUN = 5
"""Kills after which a run is left to finish."""


def final_hashes(run: Path) -> dict[str, str]:
    """The sha256 of the files with weights, optimizer and random states at the last step."""
    files = native.read_json(native.step_folder(run, STEPS) / native.MANIFEST)["files"]
    return {name: entry["sha256"] for name, entry in files.items() if name.endswith((".safetensors", ".pt"))}


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
        pytest.param(
            2,
            {"engine": "native", "precision": "bfloat16"},
            5,
            id="native engine in two processes",
            marks=pytest.mark.slow,
        ),
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

    def start(changes: Any) -> Any:
        return server.start(KEYS | keys | dict(changes), ranks)

    within = run_to_end(start, {"save": str(tmp_path / "whole")})
    whole, losses = final_hashes(tmp_path / "whole"), open_run(tmp_path / "whole").losses
    assert len(whole) > 2 and len(losses) == STEPS
    hits = inside_saves = 0
    for seed in count():
        run = tmp_path / f"run_{seed}"
        killed = kill_randomly(start, {"save": str(run)}, seed, min(IN_ONE_RUN, kills - hits), within)
        hits, inside_saves = hits + killed.hits, inside_saves + killed.inside_saves
        assert final_hashes(run) == whole and open_run(run).losses == losses, f"run {seed}, {killed}"
        if hits >= kills:
            break
    print(f"{hits} kills in {seed + 1} runs, {inside_saves} of them inside a save")
    assert kills < 100 or inside_saves
