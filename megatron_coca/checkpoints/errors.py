"""Errors about checkpoints."""

from pathlib import Path

from megatron_coca.program import InputError


class CheckpointError(InputError):
    """A checkpoint is missing, damaged, in an unknown format or of another architecture; the message names the file
    and the remedy.
    """


class UnreadableError(CheckpointError):
    """A file cannot be read (I/O error, permission). The checkpoint may be valid; never move or delete it."""

    @classmethod
    def of(cls, path: Path, error: OSError) -> "UnreadableError":
        """The error for `path`, with the reason that the file system gave."""
        reason = error.strerror or str(error)
        return cls(f"{path}: cannot be read ({reason}); check the disk and the permissions. It is left unchanged")


_LFS_HEADER = b"version https://git-lfs"
"""First bytes of a git-lfs pointer (git-lfs, docs/spec.md)."""


def pointer(path: Path) -> str | None:
    """The problem with a file that is a git-lfs pointer instead of its content, None if it is not one."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        if file.read(len(_LFS_HEADER)) != _LFS_HEADER:
            return None
    return "is a git-lfs pointer without its content; run `git lfs pull` in the folder"
