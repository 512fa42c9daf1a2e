"""All declared contrasts of several studies, corrected once: the interval and the p-value carry the same correction."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scipy import stats

from megatron_coca.ablation.correction import entries_of, entries_of_stretch, pooled
from megatron_coca.ablation.file import DeclaredContrast
from megatron_coca.evaluation.contrasts import ContrastEntry, corrected_once

ROOT = Path(__file__).parents[3]
CLEAR, WEAK, SAME = [0.2, 0.25, 0.3, 0.22], [0.1, 0.3, 0.12, 0.2], [0.5, 0.5, 0.5, 0.5]


def entry(differences: list[float], name: str = "a against b") -> ContrastEntry:
    return ContrastEntry("study", name, 16, "recall", differences, "holds")


def test_a_study_counts_when_all_of_its_models_are_finished() -> None:
    contrast = DeclaredContrast(label="a", other="b", at=4, quantity="perplexity")
    figures: Any = SimpleNamespace(finished=3, planned=4, judged=lambda: [(contrast, CLEAR, "does not hold")])
    assert entries_of("study", figures) == []
    figures.finished = 4
    assert entries_of("study", figures) == [
        ContrastEntry("study", "a against b", 4, "perplexity, nats per byte", CLEAR, "does not hold")
    ]


def test_contrasts_of_a_real_model_are_paired_by_fact_and_by_book() -> None:
    plan, results = ROOT / "studies/real_model/plan.yml", ROOT / "studies/real_model"
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
