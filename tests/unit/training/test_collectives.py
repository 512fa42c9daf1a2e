"""The locks that keep two runs out of one folder."""

import logging
import shutil
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

from megatron_coca.checkpoints import CheckpointError, native
from megatron_coca.training import collectives
from megatron_coca.training.collectives import FolderLock
from megatron_coca.training.corpus import Corpus
from tests.one_rank import changed


@pytest.mark.usefixtures("one_rank")
def test_a_folder_serves_one_run_at_a_time(tmp_path: Path) -> None:
    with FolderLock(str(tmp_path)) as one, FolderLock(str(tmp_path)) as other:
        one.take()
        with pytest.raises(CheckpointError, match="another run is saving to"):
            other.take()
    with FolderLock(str(tmp_path)) as one, FolderLock(None) as none:
        one.take()
        none.take()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("key", ["log_dir", "tensorboard_dir"])
def test_figures_of_two_runs_do_not_share_a_folder(opened: Corpus, tmp_path: Path, key: str) -> None:
    """The second run would move away, or hide, the figures of the first."""
    saves = [str(tmp_path / name) for name in "ab"]
    one, other = (changed(opened, save=save, **{key: str(tmp_path / "logs")}).config for save in saves)
    with FolderLock(saves[0]) as first, FolderLock(saves[1]) as second:
        first.take_metric_folders(one)
        with pytest.raises(CheckpointError, match=rf"{key}: .*logs: in use .*such as {key}="):
            second.take_metric_folders(other)
    with FolderLock(saves[1]) as second:  # when the first has ended
        second.take_metric_folders(other)
        second.take_metric_folders(other)


@pytest.mark.usefixtures("one_rank")
def test_runs_without_a_folder_get_their_own(
    opened: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    logging.getLogger("megatron_coca").setLevel(logging.NOTSET)
    config = changed(opened, save=None).config
    with FolderLock(None) as first, FolderLock(None) as second, FolderLock(None) as third:
        assert first.choose_log_dir(config) == config
        chosen = [lock.choose_log_dir(config) for lock in (second, third)]
        assert [each.logging.log_dir for each in chosen] == ["runs/unsaved_2", "runs/unsaved_3"]
        second.take_metric_folders(chosen[0])
        assert "this run writes its metrics to runs/unsaved_2" in caplog.text
        saved = changed(opened, save="elsewhere").config
        assert third.choose_log_dir(saved) is saved
    with FolderLock(None) as again:
        assert again.choose_log_dir(config) == config


@pytest.mark.usefixtures("one_rank")
def test_a_folder_that_is_made_later_must_still_be_empty(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with FolderLock(str(run)) as locks:
        locks.take()
        run.mkdir()
        locks.take()
        with pytest.raises(Timeout):
            FileLock(run / native.LOCK, timeout=0).acquire()
    (run / native.LOCK).unlink()
    run.rmdir()
    with FolderLock(str(run)) as locks:
        locks.take()
        native.step_folder(run, 2).mkdir(parents=True)  # by another run, which has ended since
        with pytest.raises(CheckpointError, match="another run has written checkpoints"):
            locks.take()


@pytest.mark.usefixtures("one_rank")
def test_a_lock_that_is_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / native.LOCK).mkdir()
    with (
        FolderLock(str(tmp_path)) as locks,
        pytest.raises(CheckpointError, match=r"\.lock: cannot be locked \(Is a dir"),
    ):
        locks.take()


@pytest.mark.usefixtures("one_rank")
def test_a_folder_that_is_deleted_and_made_again_keeps_other_runs_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "LOOK", 0.0)
    run = tmp_path / "run"
    run.mkdir()
    with FolderLock(str(run)) as first, FolderLock(str(run)) as second:
        first.take()
        assert not first.is_lost()
        shutil.rmtree(run)
        native.step_folder(run, 1).mkdir(parents=True)  # its own save, before it has looked
        assert first.is_lost() and "run: deleted while this run was using it" in first.retake()
        assert not first.is_lost()
        with pytest.raises(CheckpointError, match="another run is saving to"):
            second.take()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("ended", [False, True])
def test_a_folder_that_another_run_has_made_again_is_left_to_it(tmp_path: Path, ended: bool) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with FolderLock(str(run)) as first, FolderLock(str(run)) as second:
        first.take()
        shutil.rmtree(run)
        run.mkdir()
        with second:
            second.take()
            native.step_folder(run, 1).mkdir()
            if not ended:
                with pytest.raises(CheckpointError, match="another run has begun there; give"):
                    first.retake()
        if ended:
            with pytest.raises(CheckpointError, match="another run has begun there and saved checkpoints"):
                first.retake()
