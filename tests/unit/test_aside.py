"""Folders that are complete or absent."""

import fcntl
import os
from pathlib import Path

import pytest

from megatron_coca.data import DataError
from megatron_coca.data.aside import alone, atomic_dir, complete, partial_folder


def test_a_folder_appears_when_it_is_filled(tmp_path: Path) -> None:
    with atomic_dir(tmp_path / "out") as folder:
        (folder / "a").write_text("a")
        assert not (tmp_path / "out").exists()
    assert os.listdir(tmp_path) == ["out"] and (tmp_path / "out" / "a").read_text() == "a"


def test_other_errors_are_kept_and_nothing_stays_behind(tmp_path: Path) -> None:
    with pytest.raises(KeyError), atomic_dir(tmp_path / "out") as folder:
        (folder / "half").write_text("half")
        raise KeyError("fault in the caller")
    assert os.listdir(tmp_path) == []


def test_what_exists_is_kept(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(DataError, match="exists already"), atomic_dir(tmp_path / "out"):
        pass
    assert os.listdir(tmp_path) == ["out"]


def test_a_partial_folder_is_found_again_and_completed(tmp_path: Path) -> None:
    folder = partial_folder(tmp_path / "out")
    assert folder == partial_folder(tmp_path / "out") and folder.parent == tmp_path
    folder.mkdir()
    (folder / "a").touch()
    complete(folder, tmp_path / "out")
    assert os.listdir(tmp_path / "out") == ["a"] and not folder.exists()


def test_a_lock_that_its_holder_removed_is_not_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening the file and locking it, the holder may remove it and another process make it anew."""
    path, lock, times = tmp_path / ".out.lock", fcntl.flock, []

    def late(descriptor: int, operation: int) -> None:
        if not times:
            path.unlink()
        times.append(1)
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with alone(tmp_path / "out"):
        assert len(times) == 2 and path.exists()
        with pytest.raises(DataError, match="another process is preparing it"), alone(tmp_path / "out"):
            pass
        assert path.exists()
    assert os.listdir(tmp_path) == []
