"""Files and folders that are complete or absent, and locks."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from megatron_coca.support.atomic_write import (
    atomic_dir,
    complete_folder,
    exclusive_lock,
    lock_file,
    partial_folder,
    require_new,
    write_file,
)


class WriteError(Exception):
    """The class that is passed in."""


def test_a_folder_appears_when_it_is_complete(tmp_path: Path) -> None:
    with atomic_dir(tmp_path / "new" / "out", WriteError) as folder:
        (folder / "a").write_text("a")
        assert not (tmp_path / "new" / "out").exists()
    assert os.listdir(tmp_path / "new") == ["out"] and (tmp_path / "new" / "out" / "a").read_text() == "a"


@pytest.mark.parametrize("error", [KeyError("caller"), WriteError("caller")])
def test_an_exception_of_the_caller_is_kept_and_leaves_nothing(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error), match="caller"), atomic_dir(tmp_path / "out", WriteError) as folder:
        (folder / "half").write_text("half")
        raise error
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_reported_and_leaves_nothing(tmp_path: Path) -> None:
    message = "out: cannot be written .No space left on device.; free some space or name another folder"
    with pytest.raises(WriteError, match=message), atomic_dir(tmp_path / "out", WriteError):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert os.listdir(tmp_path) == []


def test_an_existing_folder_is_kept(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(WriteError, match="out: exists already; name a new folder, or remove this one"):
        require_new(tmp_path / "out", WriteError)
    with pytest.raises(WriteError, match="exists already"), atomic_dir(tmp_path / "out", WriteError):
        pass
    assert os.listdir(tmp_path) == ["out"]


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with atomic_dir(out, WriteError) as folder:
        (folder / "one").touch()
        with pytest.raises(WriteError, match="out: another process is writing it"), atomic_dir(out, WriteError):
            raise AssertionError("the second writer must not start")
        (folder / "two").touch()
    assert sorted(os.listdir(out)) == ["one", "two"] and os.listdir(tmp_path) == ["out"]


def test_leftovers_are_replaced_and_planted_links_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    (tmp_path / ".out.partial").symlink_to(tmp_path / "victim")
    with atomic_dir(tmp_path / "out", WriteError) as folder:
        (folder / "one").touch()
    assert os.listdir(tmp_path / "victim") == [] and not (tmp_path / "out").is_symlink()
    (tmp_path / ".next.partial").mkdir()
    (tmp_path / ".next.partial" / "old").touch()
    with atomic_dir(tmp_path / "next", WriteError):
        pass
    assert os.listdir(tmp_path / "next") == []


def test_a_partial_folder_is_completed(tmp_path: Path) -> None:
    folder = partial_folder(tmp_path / "out")
    assert folder == partial_folder(tmp_path / "out") and folder.parent == tmp_path
    folder.mkdir()
    (folder / "a").touch()
    complete_folder(folder, tmp_path / "out")
    assert os.listdir(tmp_path / "out") == ["a"] and not folder.exists()


def test_everything_is_flushed_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: flushed.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
    )
    with atomic_dir(tmp_path / "out", WriteError) as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "a").touch()
    assert sorted(flushed[:-1]) == [".out.partial", "a", "inner"] and flushed[-1] == tmp_path.name


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


def test_a_lock_that_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / ".out.lock").mkdir()
    with pytest.raises(WriteError, match=r"\.out\.lock: cannot be locked"), atomic_dir(tmp_path / "out", WriteError):
        raise AssertionError


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
