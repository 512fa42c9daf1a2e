"""Locks between processes."""

import fcntl
import os
import shutil
from pathlib import Path

import pytest

from megatron_coca.work.locks import exclusive_lock, lock_file


class WriteError(Exception):
    """The class that is passed in."""


def test_a_lock_file_that_its_holder_removed_is_locked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening the file and locking it, the holder may remove it and another process create a new one."""
    path, lock, calls = lock_file(tmp_path / "out"), fcntl.flock, []

    def late(descriptor: int, operation: int) -> None:
        if not calls:
            path.unlink()
        calls.append(1)
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with exclusive_lock(path, WriteError, "busy", temporary=True):
        assert len(calls) >= 2 and path.exists()
        with pytest.raises(WriteError, match="busy"), exclusive_lock(path, WriteError, "busy", temporary=True):
            pass
        assert path.exists()
    assert os.listdir(tmp_path) == []


def test_a_lock_file_stays_unless_it_is_temporary(tmp_path: Path) -> None:
    for _ in range(2):
        with exclusive_lock(tmp_path / "lock", WriteError, None):
            pass
    assert os.listdir(tmp_path) == ["lock"]


def test_a_lock_in_a_replaced_folder_is_not_intact(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with exclusive_lock(folder / "lock", WriteError, "busy", temporary=True) as held:
        assert held.intact()
        shutil.rmtree(folder)
        assert not held.intact()
        folder.mkdir()
        with exclusive_lock(folder / "lock", WriteError, "busy") as other:
            assert other.intact() and not held.intact()
    assert (folder / "lock").exists(), "it is the lock of another process"
