"""Files that git left in place of large ones."""

from pathlib import Path

_BEGINNING = b"version https://git-lfs"
"""How a pointer begins (git-lfs, docs/spec.md)."""


def pointer(path: Path) -> str | None:
    """What to tell of a file that is a pointer of git-lfs in place of its content, or None where it is none."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        if file.read(len(_BEGINNING)) != _BEGINNING:
            return None
    return "is a pointer of git-lfs, and the content is not there; run `git lfs pull` in the folder"
