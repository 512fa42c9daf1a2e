"""The page of the study of a real model follows from its results and its plan."""

import statistics
from pathlib import Path

from megatron_coca.evaluation.contrasts import power
from megatron_coca.evaluation.stretch import tables
from megatron_coca.evaluation.stretch.decision import decide
from megatron_coca.evaluation.stretch.page import _table as markdown
from megatron_coca.evaluation.stretch.page import basis_of, sentence
from megatron_coca.evaluation.stretch.plans import read_plan
from megatron_coca.evaluation.stretch.records import read_results

ROOT = Path(__file__).parents[4]
PLAN = read_plan(ROOT / "studies/real_model/plan.yml")
RESULT = read_results(ROOT / "studies/real_model", PLAN.methods)
PAGE = (ROOT / "studies/real_model/README.md").read_text()
EXAMPLE = (ROOT / "studies/real_model/stretch.md").read_text()


def test_the_tables_are_those_of_the_results() -> None:
    made = [tables.main_table(RESULT), tables.contrast_table(RESULT, PLAN)]
    for table in map(markdown, [*made, tables.comparison_table(RESULT, decide(RESULT))]):
        rows, *_ = table.split("\n\n")
        assert rows in PAGE and rows in EXAMPLE


def test_the_example_is_the_page_of_the_results() -> None:
    decision = decide(RESULT)
    assert f"# {sentence(RESULT, decision)}\n\n{' '.join(basis_of(RESULT, decision))}\n\n" in EXAMPLE
    facts, *notes = markdown(tables.fact_table(RESULT)).split("\n\n")
    assert all(part in EXAMPLE for part in (facts, *notes))
    assert "](stretch.svg)" in EXAMPLE and "](stretch.svg)" in PAGE


def test_everything_in_the_plan_is_measured_but_the_facts_at_the_training_length() -> None:
    assert RESULT.header.protocol.seed == PLAN.seed and RESULT.header.documents.count == PLAN.documents
    assert RESULT.supported == PLAN.methods
    for multiple, cases in PLAN.cases.items():
        length = round(multiple * RESULT.trained)
        for method in PLAN.methods:
            assert RESULT.windows(method, length) == PLAN.documents
            assert multiple == 1 or len(RESULT.facts(method, length)) == cases


def test_the_numbers_in_the_text() -> None:
    """Found facts and margins at 2L, and the power of the first contrast."""
    text, twice = " ".join(PAGE.split()), 2 * RESULT.trained
    hits = {method: tables.hits(RESULT, method, twice) for method in PLAN.methods}
    assert f"{hits['rerope+log_n']} and {hits['yarn:2']} of 24 facts are found" in text
    assert {method for method in hits if hits[method] == max(hits.values())} == {"self_extend", "dynamic:2"}
    close = sorted((RESULT.margin(method, twice) or 0.0, method) for method in hits)[-6:]
    low, high = close[0][0], close[-1][0]
    numbers = sorted(hits[method] for _, method in close)
    assert f"mean margins of {low:.1f} to {high:.1f} at 2L, but find {numbers[0]} to {numbers[-1]} facts" in text
    assert close[-2][1] == "yarn:2" and hits["yarn:2"] == numbers[0]
    facts = [RESULT.facts(name, twice) for name in ("rerope+log_n", "yarn:2")]
    pairs = zip(*([case.margin for case in each] for each in facts), strict=True)
    differences = [one - other for one, other in pairs]
    mean, deviation = statistics.fmean(differences), statistics.stdev(differences)
    assert f"was {deviation:.1f}. With it, a difference of {-mean:.1f} nats has a power of 0.80 with 121 facts" in text
    assert power(mean / deviation, 120, 0.05) < 0.8 <= power(mean / deviation, 121, 0.05)


def test_passkeys_and_needles_are_those_of_the_results() -> None:
    for method in PLAN.methods:
        cases = RESULT.facts(method, 2 * RESULT.trained)
        counts = [sum(case.found for case in cases if case.task == task) for task in ("passkey", "needle")]
        assert len(cases) == 24 and sum(case.task == "needle" for case in cases) == 12
        assert f"| {method:12} | {counts[0]:8} | {counts[1]:7} |" in PAGE
