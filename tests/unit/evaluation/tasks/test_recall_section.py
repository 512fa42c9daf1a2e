"""The head that retrieves has the largest weight on the fact at the shortest length; its scores are shown by length."""

from megatron_coca.evaluation.tasks.recall.section import head_lines, retrieving_head
from megatron_coca.evaluation.tasks.recall.task import HeadScores, RecallEntry
from tests.unit.evaluation.report_cases import recall

LENGTHS = {512: 1.0, 1024: 0.5, 2048: 0.1}


def entries(*heads: tuple[int, int, float]) -> dict[float, RecallEntry]:
    """A seed's entries; heads of (layer, head, weight at the shortest length) have the opposite order beyond it."""
    unshifted = [entry for entry in recall("RoFormer", LENGTHS).results if not entry.shift]
    return {
        float(entry.length): entry.model_copy(
            update={
                "heads": [
                    HeadScores(
                        layer=layer,
                        head=head,
                        fact=10.0 * layer - number,
                        rest=head,
                        weight=weight if not number else -weight,
                    )
                    for layer, head, weight in heads
                ]
            }
        )
        for number, entry in enumerate(unshifted)
    }


def test_the_shortest_length_chooses_the_head() -> None:
    found = entries((0, 1, 0.2), (1, 0, 0.6), (1, 1, 0.3))
    assert retrieving_head(list(found.values())) == (1, 0)
    assert retrieving_head([entry.model_copy(update={"heads": []}) for entry in found.values()]) is None


def test_lines_are_means_over_the_heads_of_all_seeds() -> None:
    """A seed without scored heads, or with a hidden fact, is left out."""
    hidden = entries((0, 0, 0.5))
    hidden[512.0] = hidden[512.0].model_copy(
        update={"heads": [hidden[512.0].heads[0].model_copy(update={"fact": None})]}
    )
    recalls = {"a": [entries((1, 0, 0.6), (0, 3, 0.1)), entries((2, 5, 0.6))], "b": [entries()], "c": [hidden]}
    facts, rests = head_lines(recalls, "fact"), head_lines(recalls, "rest")
    assert [(line.label, line.x, line.y) for line in facts] == [
        ("a", (512.0, 1024.0, 2048.0), (15.0, 14.0, 13.0)),
        ("c", (1024.0, 2048.0), (-1.0, -2.0)),
    ]
    assert rests[0].y == (2.5, 2.5, 2.5)
