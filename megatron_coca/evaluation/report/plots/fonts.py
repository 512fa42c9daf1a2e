"""Fonts for labels in plots, because matplotlib's own font has no Chinese, Japanese or Korean letters."""

import logging
from functools import cache

from matplotlib import get_data_path
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager, get_font
from matplotlib.text import Text

logger = logging.getLogger(__name__)
OWN = "DejaVu Sans"
"""The font that is part of matplotlib. It has Latin, Greek, Cyrillic and Arabic letters, and symbols."""

BOXES = "Last Resort"
"""The start of the names of fonts that draw every letter as a box."""
BOX = "□"
"""The sign for a letter that no font has."""


@cache
def _letters(path: str) -> frozenset[int]:
    return frozenset(get_font(path).get_charmap())


@cache
def families(letters: frozenset[str]) -> tuple[list[str], str]:
    """Return the names of fonts that together have these letters, and the letters that no font has.

    Matplotlib's own font comes first. If no installed font has a letter, a warning names the letter and the remedy.
    """
    found, missing = [OWN], {ord(letter) for letter in letters if not letter.isspace()}
    missing -= _letters(f"{get_data_path()}/fonts/ttf/DejaVuSans.ttf")
    # Try upright fonts of normal weight. They are sorted by name, so that the same machine draws the same plot.
    entries = [
        entry
        for entry in fontManager.ttflist
        if entry.style == "normal" and entry.weight in (400, "normal") and not entry.name.startswith(BOXES)
    ]
    for entry in sorted(entries, key=lambda entry: (entry.name, entry.fname)) if missing else ():
        try:
            covered = missing & _letters(entry.fname)
        except (OSError, RuntimeError, ValueError):  # a font that was removed, or is damaged
            continue
        if covered:
            found.append(entry.name)
            missing -= covered
        if not missing:
            break
    if missing:
        logger.warning(
            "figures: no installed font has %s, so plots show boxes; install one, such as the package fonts-noto-cjk, "
            "and write the report again",
            " ".join(f"{chr(code)} (U+{code:04X})" for code in sorted(missing)[:8]),
        )
    return found, "".join(map(chr, missing))


def set_fonts(canvas: Figure) -> None:
    """Give every text of a plot fonts that have its letters.

    A text that needs several fonts has normal weight, because few of these fonts have bold letters.
    """
    for text in canvas.findobj(Text):
        assert isinstance(text, Text)
        found, missing = families(frozenset(text.get_text()))
        if missing:
            text.set_text(text.get_text().translate(dict.fromkeys(map(ord, missing), BOX)))
        if len(found) > 1:
            text.set(fontfamily=found, fontweight="normal")
