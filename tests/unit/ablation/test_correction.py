"""All declared contrasts of several studies, corrected once: the interval and the p-value carry the same correction."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scipy import stats

from megatron_coca.ablation.correction import ContrastEntry, corrected_once, entries_of, entries_of_stretch, pooled
from megatron_coca.ablation.declared import p_text
from megatron_coca.ablation.grid import DeclaredContrast
from megatron_coca.evaluation.results import EvaluationError

ROOT = Path(__file__).parents[3]
CLEAR, WEAK, SAME = [0.2, 0.25, 0.3, 0.22], [0.1, 0.3, 0.12, 0.2], [0.5, 0.5, 0.5, 0.5]


def entry(differences: list[float], name: str = "a against b") -> ContrastEntry:
    return ContrastEntry("study", name, 16, "recall", differences, "holds")


def test_the_interval_and_the_p_value_carry_the_same_correction() -> None:
    alone, among = corrected_once([entry(WEAK)])[0], corrected_once([entry(WEAK), *[entry(CLEAR)] * 4])[0]
    p = stats.ttest_1samp(WEAK, 0).pvalue
    assert alone.corrected == alone.p == pytest.approx(p) and among.corrected == pytest.approx(5 * p)
    assert alone.significant and alone.difference.low > 0
    assert not among.significant and among.difference.low < 0
    level = stats.ttest_1samp(WEAK, 0).confidence_interval(1 - 0.05 / 5)
    assert (among.difference.low, among.difference.high) == pytest.approx(tuple(level))
    for each in corrected_once([entry(CLEAR), entry(WEAK), entry([-value for value in CLEAR])]):
        assert each.significant == (each.difference.low > 0 or each.difference.high < 0)


def test_an_undefined_test_counts_and_is_not_significant() -> None:
    found = corrected_once([entry(SAME), entry(CLEAR)])
    assert math.isnan(found[0].corrected) and not found[0].significant
    assert found[1].corrected == pytest.approx(2 * found[1].p)


def test_a_contrast_without_pairs_is_an_error() -> None:
    with pytest.raises(EvaluationError, match="study: c against d: fewer than two pairs; leave the study out"):
        corrected_once([entry(CLEAR), entry([0.1], "c against d")])


def test_a_study_counts_when_all_of_its_models_are_finished() -> None:
    contrast = DeclaredContrast(label="a", other="b", at=4, quantity="perplexity")
    figures: Any = SimpleNamespace(finished=3, planned=4, judged=lambda: [(contrast, CLEAR, "does not hold")])
    assert entries_of("study", figures) == []
    figures.finished = 4
    assert entries_of("study", figures) == [
        ContrastEntry("study", "a against b", 4, "perplexity, nats per byte", CLEAR, "does not hold")
    ]


def test_contrasts_of_a_real_model_are_paired_by_fact_and_by_book() -> None:
    plan, results = ROOT / "studies/real_model/plan.yml", ROOT / "studies/real_model/results.json"
    found = entries_of_stretch("real", plan, results)
    assert [each.quantity for each in found] == 3 * ["margin, nats"] + 3 * ["loss, nats per token"]
    assert [len(each.differences) for each in found] == [24, 24, 24, 8, 8, 8]
    page = (ROOT / "studies/real_model/README.md").read_text()
    for each in found:
        mean = corrected_once([each])[0].difference.mean
        assert f"{mean:+.3f}" in page and each.verdict in page


def test_studies_are_pooled_by_seed() -> None:
    studies: Any = [SimpleNamespace(paired=lambda *asked, found=found: found) for found in (CLEAR, WEAK)]
    both = pooled(studies, "recall", "a", "b", 16)
    assert both.difference.count == 8
    assert both.corrected == both.p == pytest.approx(stats.ttest_1samp([*CLEAR, *WEAK], 0).pvalue)


def test_a_p_value_near_rounding_is_not_shown_as_zero() -> None:
    assert [p_text(p) for p in (0.0, 2e-12, math.nan)] == ["below 1e-12", "2e-12", "undefined"]
