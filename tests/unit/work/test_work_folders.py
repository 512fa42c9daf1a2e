"""Folders that are complete or absent."""

import errno
import os
from functools import partial
from pathlib import Path
from threading import Thread

import pytest

from megatron_coca.work.folders import atomic_dir, complete_folder, make_once, partial_folder, require_new
from megatron_coca.work.locks import exclusive_lock, lock_file
from tests.patience import patience


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
    with pytest.raises(WriteError, match="out: cannot be written .No space"), atomic_dir(tmp_path / "out", WriteError):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert os.listdir(tmp_path) == []


def test_an_existing_folder_is_kept(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(WriteError, match="out: exists already"):
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


def test_a_folder_is_made_once(tmp_path: Path) -> None:
    """While another process makes it, a second one does something else, or waits for it."""
    out, made = tmp_path / "out", list[str]()

    def make(folder: Path, name: str) -> None:
        made.append(name)
        assert not make_once(out, lambda _: pytest.fail("made twice"), WriteError)
        (folder / name).touch()

    assert make_once(out, partial(make, name="one"), WriteError)
    assert make_once(out, partial(make, name="two"), WriteError, wait=True)
    assert made == ["one"] and os.listdir(out) == ["one"] and os.listdir(tmp_path) == ["out"]


def test_a_waiting_process_makes_the_folder_if_the_other_has_not(tmp_path: Path) -> None:
    out, made = tmp_path / "out", list[bool]()
    with exclusive_lock(lock_file(out), WriteError, None, temporary=True):
        waiting = Thread(target=lambda: made.append(make_once(out, lambda _: None, WriteError, wait=True)))
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive() and not out.exists()
    waiting.join(patience(10))
    assert made == [True] and os.listdir(tmp_path) == ["out"]


def test_a_folder_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    def full(folder: Path) -> None:
        (folder / "half").touch()
        raise OSError(errno.ENOSPC, "No space left")

    with pytest.raises(OSError, match="No space left"):
        make_once(tmp_path / "out", full, WriteError)
    assert os.listdir(tmp_path) == []


def test_everything_is_flushed_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: flushed.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
    )
    with atomic_dir(tmp_path / "out", WriteError) as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "a").touch()
    assert sorted(flushed[:-1]) == [".out.partial", "a", "inner"] and flushed[-1] == tmp_path.name


def test_a_lock_that_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / ".out.lock").mkdir()
    with pytest.raises(WriteError, match=r"\.out\.lock: cannot be locked"), atomic_dir(tmp_path / "out", WriteError):
        raise AssertionError
