"""Letters of labels in plots: fonts that have them, or a box and a message that names them."""

import logging

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from megatron_coca.evaluation.report.plots.fonts import BOX, OWN, families, set_fonts


@pytest.fixture
def canvas() -> Figure:
    figure = Figure()
    figure.text(0, 0, "CoCA θ é Ж", fontweight="bold")
    figure.text(0, 1, "A \U0003fffd", fontweight="bold")  # a code point that no font can have a letter for
    return figure


def test_letters_without_a_font_are_named(canvas: Figure, caplog: pytest.LogCaptureFixture) -> None:
    families.cache_clear()
    with caplog.at_level(logging.WARNING):
        set_fonts(canvas)
    plain, boxed = (each for each in canvas.findobj(Text) if isinstance(each, Text) and each.get_text())
    assert boxed.get_text() == f"A {BOX}" and "U+3FFFD" in caplog.text and "install one" in caplog.text
    assert plain.get_text() == "CoCA θ é Ж" and plain.get_fontweight() == "bold"
    assert families(frozenset("CoCA θ é Ж")) == ([OWN], "")


def test_an_installed_font_with_the_letter_is_used(canvas: Figure, monkeypatch: pytest.MonkeyPatch) -> None:
    known = "megatron_coca.evaluation.report.plots.fonts.families"
    monkeypatch.setattr(known, lambda letters: ([OWN, "Han"] if len(letters) == 3 else [OWN], ""))
    set_fonts(canvas)
    texts = [each for each in canvas.findobj(Text) if isinstance(each, Text) and each.get_text()]
    assert [each.get_fontfamily() for each in texts][1] == [OWN, "Han"] and texts[1].get_fontweight() == "normal"
