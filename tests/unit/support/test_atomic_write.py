"""Files that are complete or absent."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_coca.support import atomic_write
from megatron_coca.support.atomic_write import write_file


def test_a_file_is_replaced_or_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_file(path, "old")
    write_file(path, b"new")
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["file"]

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_file(path, "newer")
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["file"]


def test_a_file_does_not_follow_planted_links(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "file").symlink_to(tmp_path / "victim")
    write_file(tmp_path / "file", "mine")
    assert (tmp_path / "victim").read_text() == "precious" and (tmp_path / "file").read_text() == "mine"


def test_leftovers_of_killed_processes_are_removed(tmp_path: Path) -> None:
    """The next process that writes the file removes them, but not those that a living process is writing."""
    path = tmp_path / "results[1].json"
    code = """
import os, sys
from pathlib import Path
from megatron_coca.support import atomic_write
if sys.argv[2] == "killed":
    Path.rename = lambda *_: os.kill(os.getpid(), 9)
atomic_write.write_file(Path(sys.argv[1]), sys.argv[2])
"""
    for how in ("killed", "killed"):
        subprocess.run([sys.executable, "-c", code, str(path), how], check=False)
    assert len(list(tmp_path.iterdir())) == 1, "the second one removed what the first one left"
    living = atomic_write._new_partial(path)
    foreign = tmp_path / f".{path.name}.mine.partial"
    foreign.touch()
    subprocess.run([sys.executable, "-c", code, str(path), "written"], check=True)
    assert {each.name for each in tmp_path.iterdir()} == {path.name, Path(living.name).name, foreign.name}
    assert path.read_text() == "written"
    living.close()
