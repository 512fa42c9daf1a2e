"""The sweep of learning rates that a file declares: its models, the rates that it finds, and the file that has them."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_coca.ablation.file import AblationFile, read_ablation
from megatron_coca.ablation.grid import expand
from megatron_coca.ablation.rates import found_rates, middle_rates, sweep_of, with_rates
from megatron_coca.commands import ablate
from megatron_coca.evaluation import EvaluationError
from megatron_coca.evaluation.report.curves import Curve, CurvePoint
from megatron_coca.evaluation.results import write_record
from tests.unit.ablation.conftest import Write

RATES: dict[str, Any] = {"lr": [1e-3, 2e-3, 4e-3, 8e-3], "seeds": [7, 8], "set": ["hidden_size=16"], "min_lr": 0.1}
RATES |= {"tasks": {"recall": {"lengths": ["1L"], "shifts": [0], "cases": 8}}}
BEST = {"RoFormer": 2e-3, "NoPE": 4e-3}


@pytest.fixture
def read(write: Write, corpus: Path) -> AblationFile:
    own = {"perplexity": {"data": [f"{corpus}/words_test"], "windows": ["1L"], "stride": "1L"}}
    return read_ablation(write(rates=RATES | {"tasks": own}))


def write_losses(file: AblationFile, best: dict[str, float], left_out: str = "") -> None:
    """Write curves and records as finished runs of the sweep leave them. Each seed alone finds another rate."""
    from megatron_coca.ablation.cells import read_cell, write_cell

    for cell in expand(sweep_of(file), "cpu"):
        label, _, rate = cell.model.partition(", ")
        distance = abs(float(rate) - best[label]) + (1e-4 if cell.seed == 7 else -1e-4) * float(rate)
        points = [
            CurvePoint(step=step, tokens=8, train_loss=1.0, validation_loss=loss)
            for step, loss in ((2, 0.0), (4, 2.0 + distance), (6, None))
        ]
        if f"{cell.model}-{cell.seed}" != left_out:
            write_record(cell.results / "curve.json", Curve(seed=cell.seed, points=points))
        write_cell(cell, read_cell(cell))


def test_the_sweep_has_a_model_for_each_model_and_rate(read: AblationFile) -> None:
    sweep = sweep_of(read)
    assert (sweep.seeds, sweep.title, sweep.rates, sweep.baseline) == ([7, 8], "Two: learning rates", None, None)
    assert (sweep.results.name, sweep.runs.name) == ("results_rates", "runs_rates")
    assert list(sweep.models)[:5] == [f"RoFormer, 0.00{rate}" for rate in (1, 2, 4, 8)] + ["NoPE, 0.001"]
    cells = expand(sweep, "cpu")
    assert len(cells) == 2 * 4 * 2 == len({cell.name for cell in cells})
    assert {(cell.config.model.hidden_size, cell.config.schedule.min_lr) for cell in cells} == {
        (16, rate / 10) for rate in RATES["lr"]
    }
    assert {cell.config.position.pos_emb for cell in cells if cell.model.startswith("NoPE")} == {"none"}


def test_the_best_rate_of_each_model_is_filled_in(read: AblationFile) -> None:
    write_losses(read, BEST)
    assert found_rates(read) == BEST
    cells = expand(with_rates(read, found_rates(read)), "cpu")
    found = {(cell.model, cell.config.optimizer.lr, cell.config.schedule.min_lr) for cell in cells}
    assert found == {(label, rate, rate / 10) for label, rate in BEST.items()}
    assert {cell.config.model.hidden_size for cell in cells} != {16}, "the width is that of the file"
    plan = expand(middle_rates(read), "cpu")
    assert {cell.config.optimizer.lr for cell in plan} == {4e-3}


def test_a_best_rate_at_the_end_is_an_error(read: AblationFile) -> None:
    for rate, words in (
        (1e-3, "the smallest of the sweep; add a smaller"),
        (8e-3, "the largest of the sweep; add a la"),
    ):
        write_losses(read, BEST | {"NoPE": rate})
        with pytest.raises(EvaluationError, match=rf"rates: NoPE: the best rate, {rate:g}, is {words}"):
            found_rates(read)


def test_a_diverged_run_is_never_the_best(read: AblationFile) -> None:
    write_losses(read, BEST)
    for cell in expand(sweep_of(read), "cpu"):
        if cell.model == "RoFormer, 0.001":
            content = json.loads((cell.results / "curve.json").read_text())
            content["points"][1]["validation_loss"] = "NaN"
            (cell.results / "curve.json").write_text(json.dumps(content))
    assert found_rates(read) == BEST


def test_an_unfinished_sweep(read: AblationFile, write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(EvaluationError, match=r"rates: 16 of 16 runs .* RoFormer, 0\.001 with seed 7; run .* --rates"):
        found_rates(read)
    write_losses(read, BEST, left_out="NoPE, 0.004-8")
    with pytest.raises(EvaluationError, match=r"rates: 1 of 16 runs .* such as NoPE, 0\.004 with seed 8"):
        found_rates(read)
    path = str(write(rates=read.rates.model_dump()))  # type: ignore[union-attr]
    for options in ([], ["--report"]):
        with pytest.raises(EvaluationError, match="rates: 1 of 16 runs"):
            ablate.main([path, *options])
    assert ablate.main([path, "--dry-run"]) == 0
    assert "in the middle of the sweep. rates: 1 of" in capsys.readouterr().out
    assert ablate.main([path, "--rates", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("-s8-") == 8 and "in the middle" not in printed


def test_a_plan_shows_the_rates(read: AblationFile, write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    write_losses(read, BEST)
    path = str(write(rates=read.rates.model_dump()))  # type: ignore[union-attr]
    assert ablate.main([path, "--dry-run"]) == 0
    assert "Learning rates of the sweep:\n- RoFormer: 0.002\n- NoPE: 0.004\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": [1e-3, 2e-3]}, "lr"),
        ({"lr": [1e-3, 2e-3, 2e-3]}, "lr: needs different positive rates"),
        ({"lr": [0.0, 2e-3, 4e-3]}, "lr: needs different positive rates"),
        ({"seeds": []}, "seeds"),
        ({"tasks": {}}, "tasks"),
        ({"min_lr": 2.0}, "min_lr"),
    ],
)
def test_errors_of_the_declaration(changes: dict[str, Any], message: str, write: Write) -> None:
    with pytest.raises(EvaluationError, match=message):
        read_ablation(write(rates=RATES | changes))


def test_models_that_start_from_others_have_their_own_rates(write: Write) -> None:
    models = {"A": ["pos_emb=rotary"], "B": {"set": ["pos_emb=none"], "after": "A"}}
    with pytest.raises(EvaluationError, match=r"rates: not supported with models\.B\.after"):
        read_ablation(write(rates=RATES, models=models, baseline="A"))


def test_a_file_without_rates_has_no_sweep(write: Write) -> None:
    with pytest.raises(EvaluationError, match="--rates: the file has no `rates`"):
        ablate.main([str(write()), "--rates"])
