"""A run resumes with another number of processes or another ZeRO stage: same samples, same losses up to rounding.

`pytest -rP` shows the largest differences. studies/log.md has a table of them.
"""

from pathlib import Path
from typing import Any

import pytest

STEPS, STOP = 60, 12
RELATIVE = {"loss": 1e-6, "grad_norm": 2e-5}
"""Sums in another order, whose rounding grows while training goes on: see the table in studies/log.md."""
PLAIN = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "train_iters": STEPS, "train_batch_size": 8}
PLAIN |= {"num_layers": 4, "hidden_size": 64, "seq_length": 64, "eval_interval": 60}
"""Without dropout, whose masks are drawn anew where the division among processes changes."""


@pytest.fixture(scope="module")
def unstopped(live: Any, open_run: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("unstopped") / "run"
    live(PLAIN | {"save": str(folder)})
    return open_run(folder)


Layout = tuple[int, dict[str, Any]]
LAYOUTS: dict[str, tuple[Layout, Layout]] = {
    "2 x ZeRO 3 to plain": ((2, {"zero_stage": 3}), (1, {"zero_stage": 0})),
    "plain to 2 x ZeRO 2": ((1, {"zero_stage": 0}), (2, {"zero_stage": 2})),
}
SLOW: dict[str, tuple[Layout, Layout]] = {
    **{
        f"ZeRO {before} to {after}": ((1, {"zero_stage": before}), (1, {"zero_stage": after}))
        for before, after in ((0, 1), (1, 0), (0, 3), (3, 2), (2, 3))
    },
    "2 x ZeRO 1 to native": ((2, {"zero_stage": 1}), (1, {"engine": "native"})),
    "native to 2 x native": ((1, {"engine": "native"}), (2, {"engine": "native"})),
    "4 x native to ZeRO 3": ((4, {"engine": "native"}), (1, {"zero_stage": 3})),
    "2 x ZeRO 1 to 4 x ZeRO 1": ((2, {"zero_stage": 1}), (4, {"zero_stage": 1})),
    "4 x ZeRO 3 to 2 x ZeRO 0": ((4, {"zero_stage": 3}), (2, {"zero_stage": 0})),
    "2 x tensor to plain": ((2, {"model_parallel_size": 2}), (1, {})),
    "plain to 2 x tensor": ((1, {}), (2, {"model_parallel_size": 2})),
    "2 x tensor to 2 x pipeline": ((2, {"model_parallel_size": 2}), (2, {"pipe_parallel_size": 2})),
    "2 x pipeline to 2 x ZeRO 3": ((2, {"pipe_parallel_size": 2}), (2, {"zero_stage": 3})),
    "2 x sequence to plain": ((2, {"sequence_parallel_size": 2}), (1, {})),
    "2 x ring to plain": ((2, {"context_parallel_size": 2}), (1, {})),
    "plain to 3 x ring": ((1, {}), (3, {"context_parallel_size": 3})),
    "2 x ring to 4 x ring": ((2, {"context_parallel_size": 2}), (4, {"context_parallel_size": 2, "zero_stage": 3})),
    "2 x sequence to 2 x ring": ((2, {"sequence_parallel_size": 2}), (2, {"context_parallel_size": 2})),
    "2 x data to 2 x sequence": ((2, {}), (2, {"sequence_parallel_size": 2, "zero_stage": 3})),
}
CASES = [pytest.param(*each, id=name) for name, each in LAYOUTS.items()]
CASES += [pytest.param(*each, id=name, marks=pytest.mark.slow) for name, each in SLOW.items()]


@pytest.mark.parametrize(("before", "after"), CASES)
@pytest.mark.slow
def test_the_layout_may_change(
    live: Any, unstopped: Any, open_run: Any, tmp_path: Path, before: Layout, after: Layout
) -> None:
    keys = PLAIN | {"save": str(tmp_path), "auto_resume": True}
    live(keys | before[1] | {"exit_interval": STOP}, ranks=before[0])
    assert f"resuming at step {STOP}" in live(keys | after[1], ranks=after[0]).output
    run = open_run(tmp_path)
    for name in ("loss", "grad_norm"):
        found, wanted = ([record[name] for record in each.records if name in record] for each in (run, unstopped))
        differences = [abs(one / other - 1) for one, other in zip(found, wanted, strict=True)]
        print(f"{name}: {max(differences[:STOP]):.1e} before, {max(differences[STOP:]):.1e} after the change")
        assert max(differences) <= RELATIVE[name], "each step's loss is that of its samples"


@pytest.mark.slow
def test_bf16_keeps_its_float32_weights(live: Any, open_run: Any, tmp_path: Path) -> None:
    """The float32 weights are saved: a layout that read the rounded ones back would drift from the first step."""
    keys = PLAIN | {"precision": "bfloat16", "zero_stage": 1, "train_batch_size": 4}
    folders = {name: tmp_path / name for name in ("whole", "changed")}
    live(keys | {"save": str(folders["whole"])})
    live(keys | {"save": str(folders["changed"]), "exit_interval": STOP})
    live(keys | {"save": str(folders["changed"]), "auto_resume": True, "zero_stage": 2})
    one, other = (open_run(folder) for folder in folders.values())
    assert one.losses == other.losses and one.weights(STEPS) == other.weights(STEPS)


@pytest.mark.slow
def test_a_batch_that_would_change_is_an_error(live: Any, tmp_path: Path) -> None:
    keys = PLAIN | {"save": str(tmp_path), "auto_resume": True, "train_batch_size": None, "train_iters": 2}
    live(keys)
    assert "train_batch_size (saved 2, now 4)" in live(keys | {"train_iters": 4}, ranks=2, expected=2).output
