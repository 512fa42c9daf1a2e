"""The top of a report: a sentence that its numbers support, with the plot and a small table of the same numbers."""

import math
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_coca.evaluation.report.document import Headline, Table
from megatron_coca.evaluation.report.plots.figures import COLUMN, drawn, style
from megatron_coca.evaluation.report.plots.looks import NO_CHANGE
from megatron_coca.evaluation.report.reading import read_results
from megatron_coca.evaluation.report.result_tables import ReportOptions
from megatron_coca.evaluation.report.sections import report_document
from megatron_coca.evaluation.results import Result
from megatron_coca.evaluation.tasks.lm_eval.benchmarks import RULER_TASKS
from megatron_coca.methods import TABLES
from tests.unit.evaluation.report_cases import (
    DOCUMENTS,
    NTK,
    benchmark,
    harness,
    longppl,
    needle,
    passkey,
    perplexity,
    recall,
    window,
    write,
)

RULER, RULER_THREE = dict.fromkeys(RULER_TASKS, 0.5), dict.fromkeys(RULER_TASKS[:3], 0.2)
BABILONG = {f"babilong_qa{number}": 0.1 * number for number in range(1, 6)}


def top(folder: Path, results: dict[str, Result], **options: Any) -> Headline:
    found = report_document(read_results(write(folder, results)), "", ReportOptions(**options)).headline
    assert found is not None
    if "the full table has all of them" not in " ".join(found.table.notes):
        check_digits(options.get("claim") or found.sentence, found.table)
    return found


def check_digits(sentence: str, table: Table) -> None:
    """Every number with a decimal point in a sentence has the digits of the small table."""
    texts = [cell.text for row in table.rows for cell in row.cells]
    for number in re.findall(r"(?<![\w.])\d+\.\d+(?:e\+\d+)?", sentence):
        assert any(text.startswith(number) for text in texts), f"{number} is not in {texts}"


def of_weights(result: Any, identity: str, seed: int | None = None) -> Any:
    update = {"identity": identity, "seed": seed}
    return result.model_copy(update={"checkpoint": result.checkpoint.model_copy(update=update)})


def accuracies(label: str, far: float, weights: str = "", overrides: Any = None) -> Result:
    found = of_weights(recall(label, {512: 1.0, 8192: far}), weights or label)
    return found.model_copy(update={"overrides": overrides or {}})


def test_a_difference_is_named_with_the_best_model_as_trained(tmp_path: Path) -> None:
    results = {
        "a": accuracies("CoCA", 0.4, "w"),
        "b": accuracies("CoCA + NTK", 0.98, "w", NTK),
        "c": accuracies("RoFormer", 0.3, "v"),
        "d": accuracies("RoFormer + NTK", 0.97, "v", NTK),
    }
    found = top(tmp_path, results)
    assert found.sentence == (
        "At 8,192 tokens, 16 times the training length, CoCA + NTK has the highest recall, 0.98; no significant "
        "difference from RoFormer + NTK (0.97) is shown; the best model as trained, CoCA, has 0.40."
    )
    assert "Tested with 98.3% intervals: 5% for 3 comparisons" in found.basis and "one seed" in found.basis
    assert found.figure is not None and found.figure.name == "recall-1"
    assert found.table.header == ("recall at length", "512*", "8192")
    assert [row.name for row in found.table.rows] == ["CoCA + NTK", "RoFormer + NTK", "CoCA", "RoFormer"]


@pytest.mark.parametrize(
    ("far", "shown"),
    [
        (0.45, "no significant difference in recall is shown between 2 labels (0.45 to 0.50)"),
        (0.1, "A has the highest recall, 0.50; the next label, B, has 0.10"),
    ],
)
def test_two_labels_differ_only_beyond_their_intervals(tmp_path: Path, far: float, shown: str) -> None:
    found = top(tmp_path, {"a": accuracies("A", 0.5), "b": accuracies("B", far)})
    assert found.sentence == f"At 8,192 tokens, 16 times the training length, {shown}."


def test_more_comparisons_need_a_larger_difference(tmp_path: Path) -> None:
    """0.5 against 0.35 of 100 cases differ at 5%, but not at 5% for eleven comparisons together."""
    pair = {"a": accuracies("A", 0.5), "b": accuracies("B", 0.35)}
    assert "has the highest" in top(tmp_path / "two", pair).sentence
    crowd = {str(number): accuracies(f"C{number}", 0.36) for number in range(10)}
    many = top(tmp_path / "many", pair | crowd)
    assert re.search("no significant difference .* 12 labels", many.sentence)
    assert not any(cell.best for row in many.table.rows for cell in row.cells), "bold would contradict the sentence"


def test_two_seeds_show_little(tmp_path: Path) -> None:
    """t intervals of two seeds are wide: a difference of 0.2 between means is not shown."""
    results = {
        f"{label}{seed}": of_weights(recall(label, {512: 1.0, 1024: mean + spread}), f"{label}{seed}", seed)
        for label, mean in (("A", 0.5), ("B", 0.7))
        for seed, spread in ((1, -0.05), (2, 0.05))
    }
    found = top(tmp_path, results)
    assert "no significant difference in recall" in found.sentence
    assert "one seed" not in found.basis


@pytest.mark.parametrize(
    ("nlls", "expected"),
    [
        (
            (2.0, 3.0),
            "The perplexity of A rises from 7.39 at 512 tokens, the training length, to 20.09 at 1,024 tokens, 2 ",
        ),
        ((2.0, 2.0), "No significant difference in perplexity of A is shown: 7.39 at 512 tokens, "),
    ],
)
def test_a_single_label_is_compared_with_itself(tmp_path: Path, nlls: tuple[float, float], expected: str) -> None:
    cells = [window(size, nll, documents=8) for size, nll in zip((512, 1024), nlls, strict=True)]
    one = perplexity("A", {}, results=cells, documents=DOCUMENTS | {"count": 8})
    assert top(tmp_path, {"a": one}).sentence.startswith(expected)


def losses(label: str, *nlls: float, documents: int = 8, **changes: Any) -> Result:
    """Perplexities at 512 and 1,024 tokens."""
    cells = [window(size, nll, documents) for size, nll in zip((512, 1024), nlls, strict=True)]
    return perplexity(label, {}, results=cells, documents=DOCUMENTS | {"count": documents} | changes)


def trained(length: int) -> dict[str, Any]:
    """The checkpoint of a model with this training length."""
    return {"checkpoint": perplexity("B", {}, length=length).checkpoint}


@pytest.mark.parametrize(
    ("results", "sentence"),
    [
        ([("A", 2.0, 800.0), ("B", 2.1, 3.0)], "B has a perplexity of 20.09; A has no finite perplexity."),
        ([("A", 2.0, math.nan), ("B", 2.1, 3.0)], "B has a perplexity of 20.09; A has no finite perplexity."),
        ([("A", 2.0, 800.0), ("B", 2.1, 800.0)], "2 labels have no finite perplexity."),
        (
            [("A", 2.0, 800.0), ("B", 2.1, 3.0), ("C", 2.1, 2.0)],
            "C has the lowest perplexity, 7.39; the next label, B, has 20.09; A has no finite perplexity.",
        ),
        (
            [("A", 2.0, 800.0)],
            "A has a perplexity of 7.39 at 512 tokens, the training length, and no finite perplexity",
        ),
    ],
)
def test_a_perplexity_that_is_not_finite_is_not_hidden(
    tmp_path: Path, results: list[tuple[Any, ...]], sentence: str
) -> None:
    found = top(tmp_path, {each[0]: losses(*each) for each in results})
    assert sentence in found.sentence and "1,024 tokens" in found.sentence
    assert found.table.header[1:] == ("512*", "1024")


def test_nan_counts_as_measured(tmp_path: Path) -> None:
    """A perplexity that is NaN everywhere is named; the page does not pass on to the next task."""
    found = top(tmp_path, {"A": losses("A", math.nan, math.nan), "B": longppl("CoCA", {8192: 2.5})})
    assert found.sentence.startswith("A has no finite perplexity at 1,024 tokens")


def test_a_multiple_of_the_training_length_needs_one_training_length(tmp_path: Path) -> None:
    """B was not measured at its training length, so the table has no mark for it."""
    found = top(tmp_path, {"A": losses("A", 2.0, 3.0), "B": losses("B", 2.1, 2.5).model_copy(update=trained(768))})
    assert found.sentence.startswith("At 1,024 tokens, B has the lowest perplexity, 12.18")


def test_the_basis_says_if_there_was_no_test(tmp_path: Path) -> None:
    few = top(tmp_path / "few", {"a": losses("A", 2.0, 2.2, documents=4), "b": losses("B", 2.5, 6.0, documents=4)})
    assert few.basis.startswith("Not tested: ")
    assert few.sentence.endswith("B, has 403.43; this difference was not tested.")
    assert top(tmp_path / "one", {"a": recall("A", {512: 1.0})}).basis == ""
    seeds = {f"A{seed}": of_weights(recall("A", {512: 0.9 + 0.01 * seed}), f"A{seed}", seed) for seed in (1, 2, 3)}
    mixed = top(tmp_path / "mixed", seeds | {"B": of_weights(recall("B", {512: 0.3}), "B", 1)})
    assert mixed.basis.endswith("The test does not cover other seeds of B.")


def test_the_basis_names_the_documents_of_several_groups(tmp_path: Path) -> None:
    two = {"a": losses("A", 2.0, 2.0), "b": losses("B", 2.5, 3.0), "c": losses("A", 5.0, 5.0, sha256="ff")}
    assert top(tmp_path, two).basis.startswith("Results with documents (sha256) aa11")


def test_the_sentence_rounds_as_the_table(tmp_path: Path) -> None:
    """More digits than the table's show only a difference that is tested, and then the table shows them too."""
    few = {name: losses(name, 2.0, nll, documents=4) for name, nll in (("A", 2.0), ("B", 2.0000002))}
    untested = top(tmp_path / "few", few)
    assert "perplexity, 7.39; the next label, B, has the same" in untested.sentence
    assert untested.sentence.endswith("this difference was not tested.")
    tested = top(tmp_path / "many", {name: losses(name, 2.0, nll) for name, nll in (("A", 2.0), ("B", 2.0001))})
    assert [row.cells[-1].text for row in tested.table.rows] == ["7.389", "7.390"]


@pytest.mark.parametrize(
    ("nlls", "numbers"), [((2.0, 2.0001), ("7.389", "7.390")), ((100.0, 200.0), ("2.69e+43", "7.23e+86"))]
)
def test_numbers_of_the_sentence_differ_and_are_short(
    tmp_path: Path, nlls: tuple[float, float], numbers: tuple[str, str]
) -> None:
    found = top(tmp_path, {name: losses(name, 2.0, nll) for name, nll in zip("AB", nlls, strict=True)})
    assert all(number in found.sentence for number in numbers)
    assert all(len(cell.text) < 10 for row in found.table.rows for cell in row.cells)


def test_the_baseline_is_named_and_recall_comes_before_perplexity(tmp_path: Path) -> None:
    results = {name: accuracies(name, far) for name, far in (("A", 0.9), ("B", 0.5), ("C", 0.1))}
    more = {"p": perplexity("P", {512: 2.0}), "k": passkey("K", {512: 1.0})}
    assert top(tmp_path, results | more, baseline="C").sentence.endswith("; the baseline C has 0.10.")
    unlearned = {"k": passkey("K", {512: 0.02, 1024: 0.0}), "p": perplexity("P", {512: 2.0})}
    assert top(tmp_path / "no", unlearned).sentence == "P has a perplexity of 7.39 at 512 tokens, the training length."


def test_a_quantity_has_one_name_in_sentence_axis_and_table(tmp_path: Path) -> None:
    found = top(tmp_path, {"a": recall("A", {512: 1.0, 1024: 0.5})})
    with style(COLUMN):
        axes = drawn(found.figure, COLUMN).axes[0] if found.figure is not None else None
    assert axes is not None and axes.get_ylabel() == "recall" and "recall of A" in found.sentence
    assert found.table.header[0] == "recall at length"


def test_labels_with_commas_are_quoted_and_the_small_table_is_small(tmp_path: Path) -> None:
    results = {str(number): accuracies(f"C{number}, shifted", 0.01 * number) for number in range(30)}
    found = top(tmp_path, results, baseline="C3, shifted")
    assert "“C29, shifted” has the highest recall, 0.29" in found.sentence
    names = [row.name for row in found.table.rows]
    assert len(names) == 8 and names[0] == "C29, shifted" and names[-1] == "C3, shifted", "the sentence names it"
    assert any("8 of 30 labels; the full table" in note for note in found.table.notes), "also true in a paper"


@pytest.mark.parametrize(
    ("results", "sentence"),
    [
        (
            [harness("RoFormer", 0.5), harness("CoCA", 0.7)],
            "CoCA has the highest mean score over 2 tasks, 0.705; the next label, RoFormer, has 0.505.",
        ),
        (
            [harness("RoFormer", 0.5, ["copa"]), harness("CoCA", 0.52, ["copa"])],
            "No significant difference in copa acc is shown between 2 labels (0.500 to 0.520).",
        ),
        ([harness("RoFormer", 0.5)], "RoFormer has a mean score over 2 tasks of 0.505."),
        (
            [longppl("RoFormer", {8192: 2.5, 16384: 4.0}, 8), longppl("CoCA", {8192: 2.5, 16384: 3.0}, 8)],
            "At 16,384 tokens, CoCA has the lowest LongPPL, 20.09; the next label, RoFormer, has 54.60.",
        ),
        (
            [longppl("RoFormer", {8192: 2.5}, 8), longppl("CoCA", {8192: 3.0}, 8, keys="55")],
            "At 8,192 tokens, RoFormer has the lowest LongPPL, 12.18; the next label, CoCA, has 20.09; this difference "
            "was not tested.",
        ),
        (
            [benchmark("RoFormer", RULER, 8192), benchmark("CoCA", dict.fromkeys(RULER, 0.1), 8192)],
            "At 8,192 tokens, RoFormer has the highest mean RULER score, 50.0%; the next label, CoCA, has 10.0%.",
        ),
        (
            [benchmark("RoFormer", dict.fromkeys(list(RULER)[:2], 0.5), 8192), benchmark("CoCA", RULER_THREE, 8192)],
            "At 8,192 tokens, RoFormer has the highest mean RULER score over 2 tasks, 50.0%; the next label, CoCA, "
            "has 20.0%.",
        ),
        (
            [benchmark(name, {"longbench_qasper": score}) for name, score in (("RoFormer", 0.6), ("CoCA", 0.2))],
            "RoFormer has the highest LongBench score (mean of 1 task), 60.0%; the next label, CoCA, has 20.0%.",
        ),
        (
            [benchmark("RoFormer", BABILONG, None, "acc", metadata={"max_seq_lengths": each}) for each in ("0k", "4k")],
            "No significant difference in mean BABILong score of RoFormer is shown: 30.0% at a length of 0k, and 30.0% "
            "at a length of 4k.",
        ),
        (
            [needle("CoCA", [512, 1024])],
            "The mean share of needles found of CoCA falls from 1.00 at 512 tokens, the training length, to 0.68 at 1,",
        ),
    ],
)
def test_every_task_with_a_score_has_a_sentence(tmp_path: Path, results: list[Result], sentence: str) -> None:
    found = top(tmp_path, {str(number): result for number, result in enumerate(results)})
    assert found.sentence.startswith(sentence)


def test_names_of_labels_are_explained_once(tmp_path: Path) -> None:
    results = {
        "a": accuracies("RoFormer", 0.4, "w"),
        "b": accuracies("RoFormer, shifted", 0.4, "u"),
        "c": accuracies("RoFormer + NTK", 0.98, "w", NTK),
        "d": accuracies("RoFormer + both", 0.98, "w", NTK | {"logit_scaling": "log_n"}),
    }
    names = dict(top(tmp_path, results).names)
    assert list(names) == ["RoFormer", "NTK", "both", "as trained"]
    assert names["both"] == f"{names['NTK']}; {TABLES['logit_scaling']['log_n'].meaning}"
    for key, choices in TABLES.items():
        explained = {name for name, choice in choices.items() if choice.meaning}
        assert explained == {name for name in choices if (key, name) not in NO_CHANGE}, f"{key}: explained in a report"


def test_every_name_in_the_sentence_is_explained(tmp_path: Path) -> None:
    results = {"a": accuracies("RoFormer", 0.1, "w"), "b": accuracies("Shifted", 0.9, "u")}
    found = top(tmp_path, results)
    assert "Shifted has the highest recall" in found.sentence and "RoFormer" in found.sentence
    assert [name for name, _ in found.names] == ["RoFormer and Shifted"]


def test_a_given_sentence_is_kept(tmp_path: Path) -> None:
    found = top(tmp_path, {"a": accuracies("A", 0.5)}, claim="The declared contrast holds.")
    assert found.sentence == "The declared contrast holds." and not found.basis
