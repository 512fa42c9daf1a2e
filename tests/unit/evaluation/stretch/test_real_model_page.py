"""The page of the study of a real model follows from its results and its plan."""

import statistics
from pathlib import Path

from megatron_coca.evaluation.stretch import tables
from megatron_coca.evaluation.stretch.page import _table as markdown
from megatron_coca.evaluation.stretch.plans import read_plan
from megatron_coca.evaluation.stretch.records import StretchResult

ROOT = Path(__file__).parents[4]
RESULT = StretchResult.model_validate_json((ROOT / "benchmarks/real_model/results.json").read_text())
PLAN = read_plan(ROOT / "configs/study/real_model.yml")
PAGE = (ROOT / "docs/real_model.md").read_text()


def test_the_tables_are_those_of_the_results() -> None:
    contrasts = markdown(tables.contrast_table(RESULT, PLAN))
    for table in (markdown(tables.main_table(RESULT)), contrasts):
        rows, *_ = table.split("\n\n")
        assert rows in PAGE
    assert (ROOT / "docs/figures/real_model/stretch.svg").read_text() == (
        ROOT / "benchmarks/real_model/stretch.svg"
    ).read_text()


def test_everything_in_the_plan_is_measured_but_the_facts_at_the_training_length() -> None:
    assert RESULT.settings.seed == PLAN.seed and RESULT.settings.count == PLAN.documents
    assert [method.name for method in RESULT.methods] == PLAN.methods
    for multiple, cases in PLAN.cases.items():
        length = round(multiple * RESULT.trained)
        for method in PLAN.methods:
            losses, facts = RESULT.loss(method, length), RESULT.found(method, length)
            assert losses is not None and len(losses.nlls) == PLAN.documents
            assert multiple == 1 or (facts is not None and len(facts.cases) == cases)


def test_the_numbers_in_the_text() -> None:
    """The greatest margin at 2L, and the deviation of the first contrast."""
    margins = {method: RESULT.margin(method, 2 * RESULT.trained) for method in PLAN.methods}
    assert max(margins, key=lambda method: margins[method] or 0) == "dynamic:2"
    found = [RESULT.found(name, 2 * RESULT.trained) for name in ("rerope+log_n", "yarn:2")]
    pairs = zip(*([case.margin for case in each.cases] for each in found if each), strict=True)
    assert f"{statistics.stdev(one - other for one, other in pairs):.1f}." in PAGE
