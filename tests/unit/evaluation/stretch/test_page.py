"""The page of `megatron-coca stretch`, from results made by hand."""

import re
from pathlib import Path

import pytest

from megatron_coca.evaluation.stretch.page import sentence, write_page
from megatron_coca.evaluation.stretch.plans import difference, power_of
from tests.unit.evaluation.stretch_cases import PLAN, config_of, stretch_result


def test_both_forms_of_the_page_say_the_same(tmp_path: Path) -> None:
    result = stretch_result()
    configs = {name: config_of(name) for name in PLAN.methods}
    text = write_page(result, configs, tmp_path, PLAN)
    html = (tmp_path / "stretch.html").read_text()
    said = (
        "rerope+log_n extends this model to 32,768 tokens, 4 times its training length: it finds 0 of 8 facts there "
        "(plain: 0), and its perplexity at 1x is 1.0% higher"
    )
    assert text.startswith(f"# {said}\n") and f'<p class="claim">{said}</p>' in html
    assert html.count("<picture>") == 1 and html.count("<table>") == 3
    for shown in ("clex: rope_scaling.rope_type: clex has learned weights", "32768 tokens of ntk (about 1:23:45)"):
        assert shown in text.replace("\\_", "_") and shown in html
    assert re.search(r"\| rerope\+log_n +\| +32,768 \|", text) and "<h2>The best method</h2>" in html
    assert "transformers has no setting for this method" in text


def test_contrasts_in_sequence(tmp_path: Path) -> None:
    """The first contrast is decided, and the later ones up to one without a difference."""
    result = stretch_result()
    text = write_page(result, {name: config_of(name) for name in PLAN.methods}, tmp_path, PLAN)
    rows = [line for line in text.splitlines() if line.startswith("| ") and "2x" in line]
    assert len(rows) == len(PLAN.contrasts) == 6
    found = difference(result, PLAN.contrasts[0], 24)
    assert (
        found is not None
        and found.mean == pytest.approx(-4.0, abs=0.1)
        and difference(result, PLAN.contrasts[0], 25) is None
    )
    verdicts = [row.split("|")[-2].strip() for row in rows]
    assert verdicts == ["lower", "lower", "higher", "not decided", "not tested", "not tested"]
    assert power_of(PLAN, PLAN.contrasts[0]) == pytest.approx(0.963, abs=1e-3) and " 0.96 |" in rows[0]


def test_nothing_beyond_the_training_length() -> None:
    result = stretch_result()
    cut = result.model_copy(
        update={
            "losses": [loss for loss in result.losses if loss.length == 8192],
            "retrieval": [found.model_copy(update={"complete": False}) for found in result.retrieval],
        }
    )
    assert cut.lengths() == [8192] and sentence(cut).startswith("Nothing beyond the training length of 8,192 tokens")
