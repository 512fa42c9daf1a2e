"""Conversion of models' labels for file names, plots and sentences."""

from hashlib import sha256

MAX_SLUG_BYTES = 120
"""Largest slug. File systems limit names to 255 bytes, and a file name has a task and a suffix besides the slug."""


def slug(label: str) -> str:
    """Turn a label into a lower-case part of a file name.

    Each run of characters other than letters, digits, `.` and `-` becomes one `_`. A long label is truncated, and a
    hash of the whole label is added.
    """
    kept = "".join(character if character.isalnum() or character in ".-" else " " for character in label.lower())
    name = "_".join(kept.split()) or "unnamed"
    if len(name.encode()) <= MAX_SLUG_BYTES:
        return name
    return name.encode()[: MAX_SLUG_BYTES - 9].decode(errors="ignore") + "_" + sha256(label.encode()).hexdigest()[:8]


def plot_text(label: str) -> str:
    """Escape a label for matplotlib, where `$` starts a formula and a leading `_` hides a line from the legend."""
    escaped = label.replace("$", r"\$")
    return f" {escaped}" if escaped.startswith("_") else escaped


def in_sentence(label: str) -> str:
    """Return a label for a sentence, in quotation marks if it contains a comma or a semicolon."""
    return f"“{label}”" if "," in label or ";" in label else label


def full_label(label: str | None, variant: str) -> str:
    return " ".join(filter(None, [label, variant]))
