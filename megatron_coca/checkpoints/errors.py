"""What goes wrong with checkpoints."""

from pathlib import Path


class CheckpointError(Exception):
    """A checkpoint is missing, damaged, foreign or of another architecture; the message names the place and the
    remedy.
    """


class UnreadableError(CheckpointError):
    """The file system refuses to give a file of a checkpoint (I/O error, permission). That says nothing about its
    content: the checkpoint may be valid, so nothing may move or delete it.
    """

    @classmethod
    def of(cls, path: Path, error: OSError) -> "UnreadableError":
        """The error for `path`, from what the file system said."""
        reason = error.strerror or str(error)
        return cls(f"{path}: cannot be read ({reason}); check the disk and the permissions. It is left as it is")


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
