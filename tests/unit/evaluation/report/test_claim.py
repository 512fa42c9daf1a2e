"""The top of a report: a sentence that its numbers support, with the plot and a small table of the same numbers."""

from pathlib import Path
from typing import Any

import pytest

from megatron_coca.evaluation.report.document import Headline
from megatron_coca.evaluation.report.reading import read_results
from megatron_coca.evaluation.report.result_tables import ReportOptions
from megatron_coca.evaluation.report.sections import report_document
from megatron_coca.evaluation.results import Result
from tests.unit.evaluation.report_cases import DOCUMENTS, NTK, harness, passkey, perplexity, recall, window, write


def top(folder: Path, results: dict[str, Result], **options: Any) -> Headline:
    found = report_document(read_results(write(folder, results)), "", ReportOptions(**options)).headline
    assert found is not None
    return found


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
        "At 8,192 tokens, 16 times the training length, CoCA + NTK has the highest recall, 0.98; no difference from "
        "RoFormer + NTK (0.97) is shown; the best model as trained, CoCA, has 0.40."
    )
    assert "3 comparisons" in found.basis and "one seed" in found.basis
    assert found.figure is not None and found.figure.name == "recall-1"
    assert found.table.header == ("accuracy at length", "512*", "8192")
    assert [row.name for row in found.table.rows] == ["CoCA + NTK", "RoFormer + NTK", "CoCA", "RoFormer"]


@pytest.mark.parametrize(
    ("far", "shown"),
    [
        (0.45, "no difference in recall is shown between 2 labels (0.50 to 0.45)"),
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
    crowd = {str(number): accuracies(f"C{number}", 0.4) for number in range(10)}
    assert "no difference in recall is shown between 12 labels" in top(tmp_path / "many", pair | crowd).sentence


def test_two_seeds_show_little(tmp_path: Path) -> None:
    """t intervals of two seeds are wide: a difference of 0.2 between means is not shown."""
    results = {
        f"{label}{seed}": of_weights(recall(label, {512: 1.0, 1024: mean + spread}), f"{label}{seed}", seed)
        for label, mean in (("A", 0.5), ("B", 0.7))
        for seed, spread in ((1, -0.05), (2, 0.05))
    }
    found = top(tmp_path, results)
    assert "no difference in recall is shown between 2 labels" in found.sentence and "one seed" not in found.basis


@pytest.mark.parametrize(
    ("nlls", "expected"),
    [
        (
            (2.0, 3.0),
            "The perplexity of A rises from 7.39 to 20.09 between 512 tokens, the training length, and ",
        ),
        ((2.0, 2.0), "No difference in perplexity of A is shown between 512 tokens, the training length, and "),
    ],
)
def test_a_single_label_is_compared_with_itself(tmp_path: Path, nlls: tuple[float, float], expected: str) -> None:
    cells = [window(size, nll, documents=8) for size, nll in zip((512, 1024), nlls, strict=True)]
    one = perplexity("A", {}, results=cells, documents=DOCUMENTS | {"count": 8})
    assert top(tmp_path, {"a": one}).sentence.startswith(expected)


def test_the_baseline_is_named_and_recall_comes_before_perplexity(tmp_path: Path) -> None:
    results = {name: accuracies(name, far) for name, far in (("A", 0.9), ("B", 0.5), ("C", 0.1))}
    more = {"p": perplexity("P", {512: 2.0}), "k": passkey("K", {512: 1.0})}
    assert top(tmp_path, results | more, baseline="C").sentence.endswith("; the baseline C has 0.10.")
    unlearned = {"k": passkey("K", {512: 0.02, 1024: 0.0}), "p": perplexity("P", {512: 2.0})}
    assert top(tmp_path / "no", unlearned).sentence == "P has a perplexity of 7.39 at 512 tokens, the training length."


def test_other_tasks_have_no_sentence_and_a_given_one_is_kept(tmp_path: Path) -> None:
    files = write(tmp_path, {"one": harness("RoFormer", 0.5)})
    assert report_document(read_results(files), "", ReportOptions()).headline is None
    found = top(tmp_path, {"a": accuracies("A", 0.5)}, claim="The declared contrast holds.")
    assert found.sentence == "The declared contrast holds." and not found.basis
