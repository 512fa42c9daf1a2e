"""How answers are read and counted."""

import pytest

from megatron_coca.evaluation.tasks.retrieval.cases import first_run, passkey_score, share_found
from megatron_coca.evaluation.tasks.retrieval.measure import make_entry
from megatron_coca.evaluation.tasks.retrieval.task import CaseRecord, FactRecord, PasskeyEntry, tally


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (" 12345. Remember it.", "12345"),
        ("The passkey is 54321, not 12345", "54321"),
        ("123456 12345", "12345"),
        ("0012345", None),
        ("1234", None),
        ("12 345", None),
        ("x12345y", "12345"),
        ("12345" * 2, None),
        ("\u0661\u0662\u0663\u0664\u0665 90210", "90210"),
        ("", None),
    ],
)
def test_the_first_run_of_five_digits(answer: str, found: str | None) -> None:
    assert first_run(answer, 5) == found
    assert passkey_score(answer, ("12345",)) == (found == "12345")


@pytest.mark.parametrize(
    ("answer", "expected", "share"),
    [
        ("ABCD and efgh", ("ABCD", "EFGH"), 1.0),
        ("ABCD", ("ABCD", "EFGH"), 0.5),
        ("12345678", ("1234567",), 1.0),
        ("", ("1", "2", "3"), 0.0),
    ],
)
def test_the_share_that_is_found(answer: str, expected: tuple[str, ...], share: float) -> None:
    assert share_found(answer, expected) == share


def test_a_tally_counts_right_answers_and_averages_scores() -> None:
    counted = tally([1.0, 0.5, 0.0, 1.0])
    assert counted is not None and (counted.accuracy, counted.correct, counted.count) == (0.625, 2, 4)
    assert tally([]) is None


def record(distance: int, value: float) -> CaseRecord:
    fact = FactRecord(depth=0.5, distance=distance)
    return CaseRecord(number=0, tokens=100, facts=[fact], expected=["1"], answer="", score=value)


def test_the_passkey_is_split_by_distance() -> None:
    cases = [record(10, 1), record(25, 1), record(26, 0), record(60, 1), record(61, 0), record(99, 0)]
    cell = make_entry("passkey", (100,), cases, training_length=60)
    assert isinstance(cell, PasskeyEntry)
    assert (cell.key, cell.accuracy, cell.correct, cell.count) == ((100,), 0.5, 3, 6)
    assert cell.inside is not None and (cell.inside.correct, cell.inside.count) == (3, 4)
    assert cell.beyond is not None and (cell.beyond.correct, cell.beyond.count) == (0, 2)
    assert make_entry("passkey", (100,), cases, training_length=100).model_dump()["beyond"] is None
