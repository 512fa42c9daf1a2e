"""Declared contrasts in a fixed sequence: the time of the test, the end of the sequence, and the sentences on it."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scipy import stats

from megatron_coca.ablation.declared import claim, level_of, outcome, plan, steps_of
from megatron_coca.ablation.figures import Figures
from megatron_coca.ablation.file import DeclaredContrast, read_ablation
from megatron_coca.evaluation import EvaluationError
from megatron_coca.evaluation.contrasts import power, power_of, together
from megatron_coca.support.safe_yaml import read_yaml

STUDIES = Path(__file__).parents[3] / "studies"
CLEAR, NOISE, SAME = [0.2, 0.25, 0.3], [0.2, -0.25, 0.3], [0.5, 0.5, 0.5]
OPPOSITE = [-each for each in CLEAR]
TINY = [0.008 * each for each in CLEAR]


def declared(*quantities: str, testing: str = "sequence") -> Any:
    contrasts = [
        DeclaredContrast(label="CoCA", other="RoFormer", at=16, quantity=quantity, expected=0.2, deviation=0.1)
        for quantity in quantities
    ]
    return SimpleNamespace(testing=testing, seeds=[1, 2, 3], contrasts=contrasts)


@pytest.mark.parametrize(
    ("values", "verdicts", "summary"),
    [
        ([CLEAR, CLEAR], ["holds", "holds"], "The primary contrast holds, and so do all 2 contrasts of the sequence."),
        (
            [CLEAR, NOISE, CLEAR],
            ["holds", "does not hold", "not tested"],
            "The primary contrast holds; the sequence ends at contrast 2 of 3, which does not hold.",
        ),
        (
            [NOISE, CLEAR],
            ["does not hold", "not tested"],
            "The primary contrast does not hold; no other contrast is tested.",
        ),
        (
            [SAME, CLEAR],
            ["cannot be tested", "not tested"],
            "The primary contrast cannot be tested; no other contrast is tested.",
        ),
        (
            [CLEAR, OPPOSITE, CLEAR],
            ["holds", "holds in the opposite direction", "not tested"],
            "The primary contrast holds; the sequence ends at contrast 2 of 3, which holds in the opposite direction.",
        ),
    ],
)
def test_a_sequence_ends_at_the_first_that_does_not_hold(
    values: list[list[float]], verdicts: list[str], summary: str
) -> None:
    file = declared(*["recall"] * len(values))
    steps = steps_of(list(zip(file.contrasts, values, strict=True)), 3)
    assert [step.verdict for step in steps] == verdicts
    expected = [math.nan if each == SAME else stats.ttest_1samp(each, 0).pvalue for each in values]
    assert [step.p for step in steps] == pytest.approx(expected, nan_ok=True)
    said = outcome(file, steps)
    assert said[0] == f"{summary} A difference of recall is that of the first model minus that of the second."
    assert [line.rpartition("; ")[2].rpartition(", ")[2] for line in said[1:]] == verdicts
    assert "CoCA against RoFormer, recall at 16L: +0.25 (+0.13 to +0.37); p = 0.013" in said[1] or (
        verdicts[0] != "holds"
    )


@pytest.mark.parametrize("testing", ["together", "sequence"])
@pytest.mark.parametrize(
    ("quantity", "values", "statement", "verdict"),
    [
        ("recall", CLEAR, "0.25 higher than that of RoFormer (95% interval: 0.13 to 0.37)", "is significant (P 0.013)"),
        ("recall", OPPOSITE, "0.25 lower", "is significant, but opposite to the expected one (P 0.013)"),
        ("recall", NOISE, "0.08 higher", "no significant difference is shown (P 0.67)"),
        ("recall", SAME, "is 0.50 higher than that of RoFormer; the t test", "all 3 seeds differ by the same amount"),
        ("recall", [0.0] * 3, "equals that of RoFormer; no significant", "difference is shown (P 1)"),
        ("perplexity", CLEAR, "is 1.284 times that of RoFormer (95% interval: 1.134 to 1.454)", "(P 0.013)"),
        ("recall", TINY, "is 0.002 higher than that of RoFormer (95% interval: 0.001 to 0.003)", "(P 0.013)"),
        ("perplexity", [0.1 * each for each in TINY], "is 1.0002 times that of RoFormer (95%", "(P 0.013)"),
    ],
)
def test_the_sentence_on_a_declared_contrast(
    testing: str, quantity: str, values: list[float], statement: str, verdict: str
) -> None:
    file = declared(quantity, testing=testing)
    found = [(file.contrasts[0], values)]
    said = claim(file, together(found, 1), steps_of(found, 3))
    assert said.startswith(f"At 16 times the training length, the {quantity} of CoCA ") and statement in said
    assert said.endswith(f"{verdict.replace('P', 'two-sided p =')}.")


@pytest.mark.parametrize(
    ("others", "interval", "p"),
    [
        ([NOISE], "97.5% interval: 0.07 to 0.43", "0.026; p-value and interval are corrected for 2 contrasts"),
        ([NOISE] * 13, "99.6% interval: -0.23 to 0.73", "0.18; p-value and interval are corrected for 14 contrasts"),
    ],
)
def test_p_value_and_interval_have_one_correction(others: list[list[float]], interval: str, p: str) -> None:
    """An interval of 0.13 to 0.37 beside a corrected p of 0.18 would be a contradiction."""
    file = declared(*["recall"] * (1 + len(others)), testing="together")
    found = together(list(zip(file.contrasts, [CLEAR, *others], strict=True)), len(file.contrasts))
    said = claim(file, found, [])
    assert f"({interval})" in said and said.endswith(f"(two-sided p = {p}).")


@pytest.mark.parametrize("testing", ["together", "sequence"])
@pytest.mark.parametrize("values", [[math.nan, 0.1, 0.2], [math.inf] * 3, [0.1, -math.inf, 0.2]])
def test_a_seed_without_a_finite_loss_is_named_in_the_sentence(testing: str, values: list[float]) -> None:
    file = declared("perplexity", "recall", testing=testing)
    found = list(zip(file.contrasts, [values, CLEAR], strict=True))
    said, steps = claim(file, together(found, 2), steps_of(found, 3)), steps_of(found, 3)
    assert said == (
        "At 16 times the training length, the perplexity of CoCA and RoFormer cannot be compared: at least one seed "
        "has no finite difference."
    )
    assert [step.verdict for step in steps] == ["cannot be tested", "not tested"]
    assert outcome(file, steps)[1].endswith("no finite difference; p = undefined, cannot be tested")


def test_nothing_is_tested_before_all_seeds_are_finished() -> None:
    file = declared("recall", "perplexity")
    steps = steps_of(list(zip(file.contrasts, [CLEAR, CLEAR[:2]], strict=True)), 3)
    assert steps == []
    (said,) = outcome(file, steps)
    assert said.startswith("Nothing is tested yet") and "all 3 seeds" in said


def test_the_plan_has_the_power_of_each_contrast() -> None:
    file = declared("recall", "perplexity")
    assert level_of(file) == 0.05
    first, recall, perplexity = plan(file)
    assert first.startswith("The first of 2 contrasts is the primary")
    assert recall.startswith(
        f"1. CoCA against RoFormer, recall at 16L: power {power(2.0, 3):.2f} for a difference of 0.2 "
    )
    assert "deviation of 0.1 " in recall and recall.endswith(f", {power(1.0, 3):.2f} for half the difference")
    assert "for a difference of logarithms of 0.2" in perplexity
    both = declared("recall", "recall", testing="together")
    assert level_of(both) == 0.025 and f"power {power(2.0, 3, 0.025):.2f} for" in plan(both)[1], "Holm's first level"
    assert "2 two-sided contrasts are corrected together (Holm)" in plan(both)[0]
    both.seeds = [1]
    assert "power not computed" in plan(both)[1]
    assert plan(SimpleNamespace(contrasts=[])) == []  # type: ignore[arg-type]


def test_a_sequence_is_not_read_as_corrected_together_nor_the_reverse() -> None:
    with pytest.raises(EvaluationError, match="tested in sequence"):
        Figures(declared("recall"), []).declared()
    with pytest.raises(EvaluationError, match="tests all of them together"):
        Figures(declared("recall", testing="together"), []).sequence()
    with pytest.raises(ValueError, match="expected and deviation: .*set both, or neither"):
        DeclaredContrast(label="a", other="b", expected=0.1)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"label": "a"}, "label and other, or weights and title"),
        ({"label": "a", "other": "b", "title": "a against b"}, "label and other, or weights and title"),
        ({"weights": {"a": 1, "b": -1}}, "label and other, or weights and title"),
        ({"weights": {"a": 1, "b": -0.9}, "title": "t"}, "whose sum is 0"),
        ({"weights": {"a": 0, "b": 0}, "title": "t"}, "not all 0"),
    ],
)
def test_weights_that_compare_nothing_are_errors(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        DeclaredContrast(**given)


def test_books_with_power_has_power_and_seeds_of_its_own() -> None:
    file = read_ablation(STUDIES / "books_power/plan.yml")
    powers = [power_of(contrast, len(file.seeds), level_of(file)) for contrast in file.contrasts]
    assert file.testing == "sequence" and all(each is not None and each > 0.99 for each in powers)
    assert "seed" in (file.tasks["recall"] or {}), "questions are drawn per seed"
    seeds: list[int] = []
    for path in sorted(STUDIES.glob("*/*.yml")):
        content, study = read_yaml(path), path.parent.name
        # `extensions` extends the models of `random_filler`, and `methods` shares no model with studies of recall.
        if isinstance(content, dict) and "seeds" in content and study not in ("extensions", "methods"):
            seeds += read_ablation(path).seeds
    assert len(seeds) == len(set(seeds)) and len(seeds) >= 10 + 6 + 1 + 14 + 3
