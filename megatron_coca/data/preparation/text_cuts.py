"""Cut a long text into a part for each split."""

SHORTEST_CUT = 1000
"""A text of fewer characters is not cut."""
LEAST = 4096
"""Minimum number of characters of a held-out part, but at most a tenth of the text. The minimum applies even if the
fraction of the split is smaller, because a smaller part could be shorter than one sample.
"""
_NEAR = 1000


def cut_text(text: str, valid_fraction: float, test_fraction: float) -> list[tuple[str, str]]:
    """Return (part, split) for the parts of a text, in order: first training, then validation, then test.

    The parts together are the whole text, except that a part with only white space is left out. A part ends after a
    line or, if no line ends nearby, after a word. A split with fraction 0 has no part. A short text is not cut and is
    used for training.
    """
    if len(text) < SHORTEST_CUT:
        return [(text, "train")]
    test = len(text) - _held_out(len(text), test_fraction)
    valid = test - _held_out(len(text), valid_fraction)
    ends = [_boundary(text, place) for place in (valid, test)]
    parts = zip((text[: ends[0]], text[ends[0] : ends[1]], text[ends[1] :]), ("train", "valid", "test"), strict=True)
    return [(part, split) for part, split in parts if part and not part.isspace()]


def _held_out(length: int, fraction: float) -> int:
    return max(int(length * fraction), min(LEAST, length // 10)) if fraction else 0


def _boundary(text: str, place: int) -> int:
    """Return the last end of a line shortly before `place`. If there is none, return the last end of a word shortly
    before `place`, or else `place` itself.
    """
    if place == len(text):
        return place
    for mark in ("\n", " "):
        found = text.rfind(mark, max(0, place - min(_NEAR, len(text) // 50)), place)
        if found >= 0:
            return found + 1
    return place
