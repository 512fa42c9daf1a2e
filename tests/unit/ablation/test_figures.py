"""Figures over seeds and differences paired by seed, against scipy."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from megatron_coca.ablation import declared, reporting
from megatron_coca.ablation.cells import CellRecord, read_cell
from megatron_coca.ablation.figures import Figures
from megatron_coca.ablation.file import DeclaredContrast
from megatron_coca.evaluation import EvaluationError
from megatron_coca.evaluation.report.curves import Curve, CurvePoint
from megatron_coca.evaluation.report.plots.figures import PAGE, drawn
from megatron_coca.evaluation.results import write_record
from megatron_coca.evaluation.statistics import bootstrap_interval, estimate
from megatron_coca.evaluation.suite import Command
from tests.unit.evaluation.report_cases import perplexity

SEEDS = (1, 2, 3)
NLLS = {
    ("RoFormer", ""): ((4.0, 5.0), (4.1, 5.4), (3.9, 5.1)),
    ("RoFormer", "+ NTK"): ((4.0, 4.2), (4.1, 4.4), (3.9, 4.0)),
    ("CoCA", ""): ((4.2, 4.9), (4.3, 5.0), (4.0, 4.8)),
}
"""At L and at 2L, by seed."""


@pytest.fixture
def figures(tmp_path: Path) -> Figures:
    models = {"RoFormer": SimpleNamespace(variants={"": [], "+ NTK": []}), "CoCA": SimpleNamespace(variants={"": []})}
    cells: list[Any] = []
    for model, entry in models.items():
        for number, seed in enumerate(SEEDS if model == "RoFormer" else SEEDS[:2]):
            folder = tmp_path / f"{model}-s{seed}"
            names = {variant: f"perplexity_{model.lower()}{'_ntk' * bool(variant)}.json" for variant in entry.variants}
            for variant, name in names.items():
                nlls = NLLS[model, variant][number]
                write_record(folder / name, perplexity(model, dict(zip((512, 1024), nlls, strict=True))))
            if model == "RoFormer":  # a second task with files of the same names in another folder
                names["again"] = f"truncated/{names['']}"
                (folder / "truncated").mkdir()
                write_record(folder / names["again"], perplexity(model, {512: NLLS[model, ""][number][0] + 1.0}))
            losses = [
                CurvePoint(step=step, tokens=8 * step, train_loss=None, validation_loss=loss)
                for step, loss in ((2, 9.0), (4, nlls[0]))
            ]
            last = CurvePoint(step=5, tokens=40, train_loss=1.0, validation_loss=None)
            write_record(folder / "curve.json", Curve(seed=seed, points=[*losses, last]))
            command = Command("perplexity", model, (), tuple(folder / name for name in names.values()))
            config = SimpleNamespace(model=SimpleNamespace(seq_length=512))
            digests = {Path(name): "digest" for name in names.values()}
            cell = SimpleNamespace(
                model=model,
                seed=seed,
                name=f"{model}-s{seed}-0",
                config=config,
                trained=config,
                results=folder,
                commands=[command],
                measurements=digests,
                inputs={},
                steps=5,
                tokens=1,
                data=None,
                parameters=SimpleNamespace(total=1, non_embedding=1),
            )
            record = read_cell(cell)  # type: ignore[arg-type]
            evaluated = {str(name): "digest" for name in digests}
            write_record(
                folder / "cell.json", CellRecord.model_validate(record.model_dump() | {"evaluated": evaluated})
            )
            cells.append(cell)
    declared = [
        DeclaredContrast(label=label, other="RoFormer", at=2, quantity="perplexity")
        for label in ("RoFormer + NTK", "CoCA", "not measured")
    ]
    return Figures(SimpleNamespace(models=models, contrasts=declared, testing="together"), cells)  # type: ignore[arg-type]


def test_a_second_task_of_perplexity_is_a_quantity_of_its_own(figures: Figures) -> None:
    once, again = (figures.logarithms(f"perplexity{word}", "RoFormer") for word in ("", " truncated"))
    assert again == pytest.approx({seed: value + 1.0 for seed, value in once.items()})
    with pytest.raises(EvaluationError, match="perplexity truncated of CoCA: unknown; .*: perplexity, ratio"):
        figures.logarithms("perplexity truncated", "CoCA")


def test_declared_contrasts_are_corrected_for_all_that_the_file_declares(figures: Figures) -> None:
    found = figures.declared()
    assert [each.contrast.label for each in found] == ["RoFormer + NTK", "CoCA"]
    for each, differences in zip(found, ([-0.8, -1.0, -1.1], [-0.1, -0.4]), strict=True):
        assert each.difference.mean == pytest.approx(np.mean(differences))
        assert each.p == pytest.approx(stats.ttest_1samp(differences, 0).pvalue)
    assert [each.holm for each in found] == pytest.approx([3 * found[0].p, min(1, 2 * found[1].p)])


def test_equal_seeds_have_no_interval() -> None:
    contrast = DeclaredContrast(label="A", other="B")
    assert declared.amount(contrast, estimate([0.1, 0.1])) == "+0.10 (no interval: the seeds do not differ)"
    assert declared.amount(contrast, estimate([-0.1, -0.3])) == "-0.20 (-1.47 to +1.07)"


def test_a_report_has_the_outcome_of_a_sequence(
    figures: Figures, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing as long as cells are missing."""
    monkeypatch.setattr(reporting, "build_report", lambda *given: f"At the top: {given[-1]}")
    contrasts = [DeclaredContrast(label="RoFormer + NTK", other="RoFormer", at=2, quantity="perplexity")]
    content = {
        "testing": "sequence",
        "contrasts": contrasts,
        "results": tmp_path / "all",
        "title": "",
        "baseline": None,
    }
    file: Any = SimpleNamespace(models=figures._file.models, seeds=list(SEEDS), **content)
    cells: Any = figures._cells
    cells[0].run = tmp_path / "removed"
    said = reporting.write_report(file, cells)
    assert "holds.\n1. RoFormer + NTK against RoFormer, perplexity at 2L: 0.380 times (" in said
    assert "); p = 0.0082, holds" in said
    assert said.startswith("At the top: At 2 times ") and "RoFormer + NTK is 0.380 times that of RoFormer" in said
    assert "); this difference is significant (two-sided p = 0.0082)." in said
    file.testing = "together"
    said = reporting.write_report(file, cells)
    assert "); this difference is significant (two-sided p = 0.0082)." in said
    file.contrasts[0] = contrasts[0].model_copy(update={"expected": 0.5, "deviation": 0.1})
    assert "but opposite to the expected one (two-sided p = 0.0082)." in reporting.write_report(file, cells)
    file.contrasts[0] = contrasts[0].model_copy(update={"expected": -0.5, "deviation": 0.1})
    assert "); this difference is significant (two-sided p = 0.0082)." in reporting.write_report(file, cells)
    file.contrasts.append(DeclaredContrast(label="RoFormer + NTK", other="RoFormer", at=1, quantity="perplexity"))
    said = reporting.write_report(file, cells)
    assert "(two-sided p = 0.016; " in said and " corrected for 2 contrasts)." in said
    file.contrasts.pop()
    file.testing = "sequence"
    (cells[0].results / "curve.json").unlink()
    said = reporting.write_report(file, cells)
    assert "Nothing is tested yet" in said


def test_a_mean_over_seeds_with_its_t_interval(figures: Figures) -> None:
    assert figures.labels == ["RoFormer", "RoFormer + NTK", "CoCA"]
    ratio = figures.estimate("ratio", "RoFormer", 2)
    logarithms = [1.0, 1.3, 1.2]
    low, high = stats.t.interval(0.95, 2, np.mean(logarithms), stats.sem(logarithms))
    assert (ratio.mean, ratio.low, ratio.high) == pytest.approx(tuple(map(math.exp, (np.mean(logarithms), low, high))))
    assert figures.estimate("perplexity", "CoCA").mean == pytest.approx(math.exp(4.25))
    assert figures.estimate("validation perplexity", "CoCA").mean == pytest.approx(math.exp(4.25))
    assert figures.estimate("validation perplexity", "CoCA", 0.5).mean == pytest.approx(math.exp(9))


def test_differences_are_of_the_seeds_that_both_have(figures: Figures) -> None:
    contrast = figures.contrast("perplexity", "CoCA", "RoFormer", 2)
    low, high = stats.t.interval(0.95, 1, -0.25, stats.sem([-0.1, -0.4]))
    found = contrast.times
    assert (found.mean, found.low, found.high, found.count) == pytest.approx((*map(math.exp, (-0.25, low, high)), 2))
    assert contrast.verdict == "not distinguishable"
    assert figures.contrast("perplexity", "RoFormer + NTK", "RoFormer", 2).verdict == "lower"
    assert figures.contrast("perplexity", "RoFormer", "RoFormer + NTK", 2).verdict == "higher"
    assert figures.contrast("perplexity", "RoFormer", "RoFormer").verdict == "no interval", "no spread, no interval"


def test_a_ratio_over_documents_resamples_their_losses_averaged_over_common_seeds(figures: Figures) -> None:
    losses = {
        "CoCA": {1: [10.0, 20.0, 33.0], 2: [12.0, 20.0, 31.0]},
        "RoFormer": {1: [9.0, 21.0, 30.0], 2: [11.0, 21.0, 30.0], 3: [99.0, 99.0, 99.0]},
    }
    figures.__dict__["_windows"] = {
        label: {seed: {(2,): SimpleNamespace(nll_by_document=sums, tokens_scored=10)} for seed, sums in by_seed.items()}
        for label, by_seed in losses.items()
    }
    found = figures.over_documents("CoCA", "RoFormer", 2)
    low, high = bootstrap_interval([0.1, -0.1, 0.2])
    assert found.mean == pytest.approx(math.exp(0.2)) and found.count == 3
    assert (found.low, found.high) == pytest.approx((math.exp(low), math.exp(high))) and found.low < 1 < found.high


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda figures: figures.estimate("ratio", "NoPE", 2),
            "ratio of NoPE: .* known labels: RoFormer, RoFormer \\+ NTK",
        ),
        (lambda figures: figures.estimate("speed", "CoCA", 2), "known quantities: perplexity, ratio, validation"),
        (lambda figures: figures.estimate("ratio", "CoCA", 4), "ratio of CoCA: not measured at 4L"),
    ],
)
def test_a_missing_measurement_is_an_error(figures: Figures, call: Any, message: str) -> None:
    with pytest.raises(EvaluationError, match=message):
        call(figures)


def test_failed_seeds_and_the_contrasts_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model below the threshold at L is named by its seed, and the other seeds are paired as before."""
    accuracies = {"a": {1: 1.0, 2: 0.95, 3: 0.2, 4: 0.9}, "b": {1: 0.5, 2: 0.6, 3: 0.6, 4: 0.7}}
    file: Any = SimpleNamespace(
        models={}, contrasts=[DeclaredContrast(label="a", other="b", at=16)], testing="sequence", seeds=[1, 2, 3, 4]
    )
    figures = Figures(file, [])
    monkeypatch.setattr(Figures, "labels", ["a", "b"])
    monkeypatch.setattr(figures, "accuracies", lambda label, multiple=1, part="": accuracies[label])
    assert figures.failed("a", 0.9) == [3] and figures.failed("b", 0.5) == []
    (whole,), (without,) = figures.sequence(), figures.sensitivity([3])
    assert (whole.difference.count, without.difference.count) == (4, 3)
    assert without.difference.mean == pytest.approx((0.5 + 0.35 + 0.2) / 3)
    assert without.verdict == "not tested" and without.p < whole.p


def test_the_results_of_contrasts_in_their_own_study(figures: Figures) -> None:
    """A contrast that is not measured does not hold; a sequence gives its own verdicts."""
    found = figures.judged()
    assert [verdict for _, _, verdict in found] == ["holds", "does not hold", "does not hold"]
    assert [len(differences) for _, differences, _ in found] == [3, 2, 0]
    assert found[0][1] == pytest.approx(figures.paired("perplexity", "RoFormer + NTK", "RoFormer", 2))
    steps = [SimpleNamespace(verdict=each) for each in ("holds", "holds in the opposite direction", "not tested")]
    file: Any = SimpleNamespace(models={}, contrasts=figures._file.contrasts, testing="sequence")
    sequence = Figures(file, [])
    sequence.sequence = lambda: steps  # type: ignore[assignment, method-assign, return-value]
    assert [verdict for _, _, verdict in sequence.judged()] == [step.verdict for step in steps]


def test_the_level_of_a_model_without_order() -> None:
    def cell(**task: Any) -> Any:
        return SimpleNamespace(trained=SimpleNamespace(data=SimpleNamespace(synthetic=SimpleNamespace(**task))))

    file: Any = SimpleNamespace(models={})
    found = Figures(file, [cell(facts=6, updates=3, values=16)]).without_order
    assert found["latest"] == found["first"] == pytest.approx(1 / 3)
    assert found["kinds"] == pytest.approx(0.288, abs=5e-4)
    for cells in ([], [cell(facts=8, updates=None, values=16)]):
        with pytest.raises(EvaluationError, match="no model was trained on ordered_recall"):
            _ = Figures(file, cells).without_order


def test_recall_of_a_kind_of_question_or_a_side(monkeypatch: pytest.MonkeyPatch) -> None:
    def tally(accuracy: float) -> Any:
        return SimpleNamespace(accuracy=accuracy)

    questions = {"latest": tally(0.7), "first": tally(0.2)}
    entry = SimpleNamespace(accuracy=0.5, inside=tally(0.6), beyond=None, questions=questions)
    figures = Figures(SimpleNamespace(models={}), [])  # type: ignore[arg-type]
    monkeypatch.setattr(Figures, "_recalls", {"a": {1: {(16, 0): entry}}})
    found = {part: figures.accuracies("a", 16, 0, part)[1] for part in ("", "inside", "latest", "kinds")}
    assert found == {"": 0.5, "inside": 0.6, "latest": 0.7, "kinds": pytest.approx(0.45)}
    for part in ("beyond", "back"):
        with pytest.raises(EvaluationError, match=f"recall of a: not measured at 16L, shift 0, {part}; add"):
            figures.accuracies("a", 16, 0, part)


def test_a_contrast_of_the_mean_over_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """`recall kinds` weights every kind the same, however many questions of it were drawn; it is compared as recall."""
    contrast = DeclaredContrast(label="a", other="b", at=16, quantity="recall kinds", expected=0.1, deviation=0.1)

    def entry(all_questions: float, *kinds: float) -> Any:
        tallies = {name: SimpleNamespace(accuracy=each) for name, each in zip(("latest", "first"), kinds, strict=True)}
        return SimpleNamespace(accuracy=all_questions, inside=None, beyond=None, questions=tallies)

    recalls = {
        "a": {1: {(16, 0): entry(0.9, 0.8, 0.4)}, 2: {(16, 0): entry(0.9, 0.6, 0.4)}},
        "b": {1: {(16, 0): entry(0.9, 0.5, 0.3)}, 2: {(16, 0): entry(0.9, 0.2, 0.2)}},
    }
    file: Any = SimpleNamespace(models={}, contrasts=[contrast], testing="sequence", seeds=[1, 2])
    figures = Figures(file, [])
    monkeypatch.setattr(Figures, "_recalls", recalls)
    monkeypatch.setattr(Figures, "labels", ["a", "b"])
    (step,) = figures.sequence()
    assert step.difference.mean == pytest.approx((0.2 + 0.3) / 2)
    assert figures.outcome()[1].startswith("1. a against b, recall kinds at 16L: +0.25 (")


def test_a_weighted_contrast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A difference of differences, and a slope over three sizes: the least-squares slope of the differences by seed."""
    recalls = {
        "a, small": [0.2, 0.3, 0.25],
        "b, small": [0.1, 0.1, 0.2],
        "a, middle": [0.5, 0.35, 0.5],
        "b, middle": [0.15, 0.2, 0.1],
        "a, large": [0.9, 0.8, 0.95],
        "b, large": [0.3, 0.1, 0.2],
    }
    by_label = {
        label: {
            seed: {(16, 0): SimpleNamespace(accuracy=each, inside=None, beyond=None, questions=None)}
            for seed, each in enumerate(values)
        }
        for label, values in recalls.items()
    }
    twice = {"a, large": 1.0, "b, large": -1.0, "a, small": -1.0, "b, small": 1.0}
    slope = {"a, large": 0.5, "b, large": -0.5, "a, small": -0.5, "b, small": 0.5}
    contrasts = [
        DeclaredContrast(weights=twice, title="a minus b, large minus small", at=16, expected=0.4, deviation=0.1),
        DeclaredContrast(weights=slope, title="slope of a minus b", at=16),
    ]
    file: Any = SimpleNamespace(models={}, contrasts=contrasts, testing="sequence", seeds=[0, 1, 2])
    figures = Figures(file, [])
    monkeypatch.setattr(Figures, "_recalls", by_label)
    monkeypatch.setattr(Figures, "labels", list(recalls))
    values = {label: np.array(each) for label, each in recalls.items()}
    small, middle, large = (values[f"a, {size}"] - values[f"b, {size}"] for size in ("small", "middle", "large"))
    fitted = np.polyfit([-1, 0, 1], np.stack([small, middle, large]), 1)[0]
    first, second = figures.sequence()
    assert (first.difference.mean, first.p) == pytest.approx(
        (np.mean(large - small), stats.ttest_1samp(large - small, 0).pvalue)
    )
    assert second.difference.mean == pytest.approx(np.mean(fitted))
    assert figures.outcome()[1].startswith("1. a minus b, large minus small, recall at 16L: +0.57 (")
    said = declared.claim(file, [], [first, second])
    assert said.startswith("At 16 times ") and ", a minus b, large minus small (recall): +0.57 (" in said
    del by_label["b, small"][1]
    assert figures.sequence() == [], "a seed that one label lacks is no pair"


def test_losses_by_learning_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only of the models that are named so. The plot has a point for every rate, from left to right."""
    losses = {"a, 64, 4e-3": {1: 2.0, 2: 3.0}, "a, 64, 1e-3": {1: 4.0}, "a, 128, 1e-3": {1: 5.0}, "64, 1e-3": {1: 9.0}}
    figures = Figures(SimpleNamespace(models={}), [])  # type: ignore[arg-type]
    monkeypatch.setattr(Figures, "labels", list(losses))
    monkeypatch.setattr(figures, "logarithms", lambda quantity, label: losses[label])
    assert figures.losses("a, 64") == {4e-3: 2.5, 1e-3: 4.0} and figures.losses("a, 12") == {}
    canvas = drawn(figures.rates({"a": {"64": "a, 64", "128": "a, 128"}, "b": {"64": "64"}}), PAGE)
    narrow, wide = canvas.axes[0].lines[:2]
    assert np.asarray(narrow.get_xydata()).round(9).tolist() == [[1.0, 4.0], [4.0, 2.5]]
    assert np.asarray(wide.get_xydata()).tolist() == [[1.0, 5.0]]
    assert [axes.get_title() for axes in canvas.axes] == ["a", "b"]
