"""Checkpoints on an object store: complete ones, failed transfers, and their use in a run."""

import json
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from megatron_coca.checkpoints import CheckpointError, native
from megatron_coca.checkpoints.files import ServiceError
from megatron_coca.checkpoints.inspection import checkpoints_in
from megatron_coca.checkpoints.native import object_store
from megatron_coca.checkpoints.native.object_store import RemoteFolder, save_folder
from megatron_coca.config import CheckpointConfig, load_config
from megatron_coca.support import remote_files
from megatron_coca.support.remote_files import local_folder
from megatron_coca.training.checkpointing.remote_checkpoints import RemoteCheckpoints, use_local_folders
from tests.checkpoint_files import run_alone

URL = "memory://bucket/run"


@pytest.fixture(autouse=True)
def empty_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryFileSystem]:
    monkeypatch.setattr(remote_files, "FIRST_PAUSE", 0.01)
    run_alone(monkeypatch)
    store = fsspec.filesystem("memory")
    store.store.clear()
    store.pseudo_dirs[:] = [""]
    yield store
    store.store.clear()


def checkpoint(save: Path, step: int, text: str = "weights") -> Path:
    """A complete local checkpoint with placeholder files."""
    partial = native.begin(save, step)
    for folder in (native.STATE, native.RNG):
        (partial / folder).mkdir()
    for name in (native.CONFIG, native.WEIGHTS, f"{native.STATE}/rank_00000.safetensors", f"{native.RNG}/rank_0.pt"):
        (partial / name).write_text(f"{text} {name} {step}")
    (partial / native.META).write_text(json.dumps({"step": step, "run": "abc"}))
    return native.commit(save, step)


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in native.files(folder)}


def test_downloads_are_the_bytes_that_were_uploaded(tmp_path: Path) -> None:
    written = checkpoint(tmp_path / "a", 100)
    remote = RemoteFolder(URL)
    remote.upload(written)
    assert remote.steps() == [100]
    assert remote.read_json(100, native.META)["run"] == "abc"
    assert contents(remote.download(100, tmp_path / "b")) == contents(written)
    assert native.locate(tmp_path / "b").name == "global_step100"


def test_a_checkpoint_without_its_manifest_does_not_exist(tmp_path: Path, empty_store: MemoryFileSystem) -> None:
    remote = RemoteFolder(URL)
    for step in (9, 10):
        remote.upload(checkpoint(tmp_path, step))
    empty_store.rm_file("/bucket/run/global_step10/manifest.json")
    assert remote.steps() == [9]


def test_the_manifest_is_uploaded_last_and_removed_first(
    tmp_path: Path, empty_store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote, order = RemoteFolder(URL), []
    put, remove = MemoryFileSystem.put_file, MemoryFileSystem.rm_file
    monkeypatch.setattr(
        MemoryFileSystem, "put_file", lambda self, *given, **more: (order.append(given[1]), put(self, *given, **more))
    )
    monkeypatch.setattr(MemoryFileSystem, "rm_file", lambda self, path: (order.append(path), remove(self, path)))
    remote.upload(checkpoint(tmp_path, 1))
    assert order[-1].endswith(native.MANIFEST) and len(order) == 7, "and the manifest of an earlier one is removed"
    order.clear()
    remote.remove(1)
    assert order[0].endswith(native.MANIFEST) and len(order) == 6
    assert not remote.steps() and not empty_store.find("/bucket/run/global_step1")


def test_an_upload_replaces_all_of_an_earlier_checkpoint_of_its_step(tmp_path: Path) -> None:
    remote = RemoteFolder(URL)
    earlier = checkpoint(tmp_path / "a", 5)
    (earlier / "tokenizer").mkdir()
    remote.upload(earlier)
    later = checkpoint(tmp_path / "b", 5, "other weights")
    remote.upload(later)
    assert contents(remote.download(5, tmp_path / "c")) == contents(later)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda fs, at: fs.pipe_file(f"{at}/model.safetensors", b"x"), "model.safetensors: damaged"),
        (lambda fs, at: fs.rm_file(f"{at}/config.yml"), "config.yml cannot be downloaded"),
        (lambda fs, at: fs.pipe_file(f"{at}/manifest.json", b"{"), "not valid JSON"),
        (
            lambda fs, at: fs.pipe_file(f"{at}/manifest.json", b'{"format": 2, "files": {"../../x": {}}}'),
            "damaged ..../../x. is not a path inside",
        ),
    ],
)
def test_a_damaged_checkpoint_leaves_nothing_behind(
    damage, said: str, tmp_path: Path, empty_store: MemoryFileSystem
) -> None:
    remote = RemoteFolder(URL)
    remote.upload(checkpoint(tmp_path / "a", 7))
    damage(empty_store, "/bucket/run/global_step7")
    with pytest.raises(CheckpointError, match=said) as caught:
        remote.download(7, tmp_path / "b")
    assert URL in str(caught.value)
    assert not native.begun_steps(tmp_path / "b") and not list(tmp_path.glob("b/.global_step*"))


def test_failed_transfers_are_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote, put, failures = RemoteFolder(URL), MemoryFileSystem.put_file, [2]

    def flaky(self: MemoryFileSystem, source: str, target: str, **more: object) -> None:
        if target.endswith(native.WEIGHTS) and failures[0]:
            failures[0] -= 1
            raise TimeoutError("no answer")
        put(self, source, target, **more)

    monkeypatch.setattr(MemoryFileSystem, "put_file", flaky)
    remote.upload(checkpoint(tmp_path, 3))
    assert failures == [0] and remote.steps() == [3]


def test_a_transfer_that_keeps_failing_names_url_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: MemoryFileSystem, source: str, target: str, **more: object) -> None:
        raise TimeoutError("no answer")

    monkeypatch.setattr(MemoryFileSystem, "put_file", fail)
    remote = RemoteFolder(URL, timeout=0.1)
    with pytest.raises(ServiceError, match=f"{URL}: .* cannot be uploaded for .* s .TimeoutError: no answer"):
        remote.upload(checkpoint(tmp_path, 3))
    assert remote.steps() == [] and ServiceError.status == 69 != CheckpointError.status


def test_a_transfer_in_a_hurry_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was preempted during an outage must exit before the grace period is over."""
    remote, calls = RemoteFolder(URL, timeout=1e6), []

    def fail(self: MemoryFileSystem, path: str, value: bytes, **more: object) -> None:
        calls.append(path)
        if len(calls) == 2:
            remote.hurry.set()
        raise TimeoutError("no answer")

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", fail)
    with pytest.raises(ServiceError):
        remote.require_writable()
    assert len(calls) == 2


def test_a_store_that_does_not_answer_is_not_a_damaged_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = RemoteFolder(URL, timeout=0.0)
    remote.upload(checkpoint(tmp_path / "a", 10))

    def fail(self: MemoryFileSystem, source: str, target: str, **more: object) -> None:
        raise TimeoutError("no answer")

    monkeypatch.setattr(MemoryFileSystem, "get_file", fail)
    with pytest.raises(ServiceError, match="global_step10/.* cannot be downloaded now"):
        remote.download(10, tmp_path / "b")


def test_denied_access_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def deny(self: MemoryFileSystem, path: str, value: bytes, **more: object) -> None:
        calls.append(path)
        raise PermissionError("no")

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", deny)
    with pytest.raises(CheckpointError, match="cannot be written .PermissionError"):
        RemoteFolder(URL).require_writable()
    assert len(calls) == 1


def test_setting_aside_keeps_every_object(tmp_path: Path, empty_store: MemoryFileSystem) -> None:
    remote = RemoteFolder(URL)
    places = []
    for _ in range(2):
        remote.upload(checkpoint(tmp_path, 4))
        places.append(remote.set_aside(4))
    assert remote.steps() == [] and len(set(places)) == 2
    for place in places:
        assert place.startswith(f"{URL}/quarantine/global_step4.")
        assert len(empty_store.find(place.removeprefix("memory:/"))) == 6


def test_the_local_folder_of_a_url_is_below_the_cache() -> None:
    assert local_folder("s3://bucket/runs//coca/", "cache", CheckpointError) == Path("cache/s3/bucket/runs/coca")
    for url in ("s3://", "s3://bucket/../../etc"):
        with pytest.raises(CheckpointError, match="write, for example"):
            local_folder(url, "cache", CheckpointError)


def test_a_missing_package_is_named() -> None:
    with pytest.raises(CheckpointError, match="s3:// needs the package s3fs"):
        RemoteFolder("oci://bucket/run")


@pytest.mark.parametrize(
    ("save", "folder"),
    [(None, None), ("runs/a", Path("runs/a")), ("s3://bucket/a", Path("runs/object_store/s3/bucket/a"))],
)
def test_the_local_folder_of_a_run(save: str | None, folder: Path | None) -> None:
    assert save_folder(CheckpointConfig(save=save)) == folder


def change_json(store: MemoryFileSystem, name: str, **changes: object) -> None:
    path = f"/bucket/run/{name}"
    store.pipe_file(path, json.dumps(json.loads(store.cat_file(path)) | changes).encode())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 99}, "global_step10/manifest.json: checkpoint format 99"),
        ({"files": {}}, "does not list config.yml"),
    ],
)
def test_a_manifest_that_is_not_valid_is_named(
    tmp_path: Path, empty_store: MemoryFileSystem, changes: dict[str, object], message: str
) -> None:
    RemoteFolder(URL).upload(checkpoint(tmp_path / "a", 10))
    change_json(empty_store, "global_step10/manifest.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        RemoteFolder(URL).download(10, tmp_path / "b")
    assert native.begun_steps(tmp_path / "b") == []


def test_a_checkpoint_is_downloaded_once_by_step_or_as_the_newest(tmp_path: Path) -> None:
    remote = RemoteFolder(URL)
    for step in (9, 10):
        remote.upload(checkpoint(tmp_path / "a", step))
    for url, step, expected in ((URL, None, 10), (URL, 9, 9), (f"{URL}/global_step9", None, 9)):
        assert object_store.fetch(url, step, tmp_path) == tmp_path / f"read/memory/bucket/run/global_step{expected}"
    weights = tmp_path / "read/memory/bucket/run/global_step10" / native.WEIGHTS
    before = weights.stat().st_mtime_ns
    object_store.fetch(URL, cache=tmp_path)
    assert weights.stat().st_mtime_ns == before
    for url, step in ((URL, 5), (f"{URL}/global_step5", None)):
        with pytest.raises(CheckpointError, match=rf"{url}: no .* of step 5; available steps: \[9, 10\]"):
            object_store.fetch(url, step, tmp_path)


def test_a_folder_in_place_of_the_lock_or_a_file_in_place_of_the_cache_is_a_message(tmp_path: Path) -> None:
    RemoteFolder(URL).upload(checkpoint(tmp_path / "a", 10))
    lock = tmp_path / "cache/read/memory/bucket/run" / native.LOCK
    lock.mkdir(parents=True)
    with pytest.raises(CheckpointError, match="cannot be locked"):
        object_store.fetch(URL, cache=tmp_path / "cache")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be downloaded to"):
        object_store.fetch(URL, cache=tmp_path / "file")


def test_a_local_url_needs_no_folder_beforehand(tmp_path: Path) -> None:
    remote = RemoteFolder(f"file://{tmp_path}/new/run")
    remote.require_writable()
    remote.upload(checkpoint(tmp_path / "a", 10))
    assert remote.steps() == [10]
    assert remote.download(10, tmp_path / "b").name == "global_step10"


def test_a_slash_at_the_end_of_load_does_not_make_it_another_folder_than_save(tmp_path: Path) -> None:
    keys = {"save": URL, "load": f"{URL}/", "checkpoint_cache": str(tmp_path)}
    config, _ = use_local_folders(load_config(["configs/350M/roformer.yml"], keys))
    assert config.checkpoint.load == config.checkpoint.save


def test_another_checkpoint_of_the_same_step_is_kept_aside(tmp_path: Path, empty_store: MemoryFileSystem) -> None:
    config, remotes = use_local_folders(
        load_config(["configs/350M/roformer.yml"], {"save": URL, "checkpoint_cache": str(tmp_path)})
    )
    RemoteFolder(URL).upload(checkpoint(tmp_path / "newer", 10))
    change_json(empty_store, "global_step10/manifest.json", format=99)
    assert config.checkpoint.save is not None
    checkpoint(Path(config.checkpoint.save), 10, "written again")
    remotes.deliver(10)
    remotes.wait()
    assert RemoteFolder(URL).read_json(10, native.MANIFEST)["format"] == native.FORMAT
    (kept,) = empty_store.glob("/bucket/run/quarantine/global_step10.*/manifest.json")
    assert json.loads(empty_store.cat_file(kept))["format"] == 99


def test_an_address_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unresolved(url: str, **options: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr("fsspec.core.url_to_fs", unresolved)
    with pytest.raises(CheckpointError, match="ftp://nowhere/run: cannot be opened .*the address"):
        RemoteFolder("ftp://nowhere/run")


def remotes_of(folder: Path, **keys: object) -> tuple[Path, RemoteCheckpoints]:
    """The local folder of a run that saves to `URL`, and its object store."""
    given = {"save": URL, "checkpoint_cache": str(folder), "auto_resume": True, "object_store_timeout": 1e4}
    config, remotes = use_local_folders(load_config(["configs/350M/roformer.yml"], given | keys))
    return Path(str(config.checkpoint.save)), remotes


def test_checkpoints_stay_on_the_disk_and_in_order_while_the_store_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, remotes = remotes_of(tmp_path, keep_last_n_checkpoints=None)
    put, away = MemoryFileSystem.put_file, threading.Event()
    order: list[str] = []

    def fail(self: MemoryFileSystem, source: str, target: str, **more: object) -> None:
        if not away.is_set():
            raise TimeoutError("no answer")
        order.append(target)
        put(self, source, target, **more)

    monkeypatch.setattr(MemoryFileSystem, "put_file", fail)
    for step in (2, 4, 6, 8):
        checkpoint(save, step)
        remotes.deliver(step)
        native.prune(save, 1, keep=remotes.owed())
    assert native.steps(save) == [2, 4, 6, 8] and remotes.failure is None
    away.set()
    remotes.wait()
    assert RemoteFolder(URL).steps() == [2, 4, 6, 8] and not remotes.owed()
    manifests = [native.parse_step(name.split("/")[-2]) for name in order if name.endswith(native.MANIFEST)]
    assert manifests == [2, 4, 6, 8]


def test_a_start_uploads_and_prunes_checkpoints_of_the_last_launch(tmp_path: Path) -> None:
    save, remotes = remotes_of(tmp_path, keep_last_n_checkpoints=2)
    for step in (2, 4, 6, 8):
        RemoteFolder(URL).upload(checkpoint(save, step)) if step < 6 else checkpoint(save, step)
    remotes.deliver(8, catch_up=True)
    remotes.wait()
    assert RemoteFolder(URL).steps() == [6, 8]


def test_the_highest_complete_step_wins_wherever_it_is(tmp_path: Path) -> None:
    save, remotes = remotes_of(tmp_path / "cache")
    for step in (4, 8):
        RemoteFolder(URL).upload(checkpoint(tmp_path / "elsewhere", step))
    old = checkpoint(save, 4)
    remotes.prepare()
    assert native.steps(save) == [4, 8]
    checkpoint(save, 14)
    RemoteFolder(URL).upload(checkpoint(tmp_path / "elsewhere", 12))
    remotes.prepare()
    assert native.steps(save) == [4, 8, 14], "12 is not needed"
    remotes.deliver(14, catch_up=True)
    remotes.wait()
    assert RemoteFolder(URL).steps() == [4, 8, 12, 14], "those below are of the same branch"
    for step in (8, 14):
        shutil.rmtree(native.step_folder(save, step))
    (old / native.META).write_text(json.dumps({"step": 4, "run": "another"}))
    with pytest.raises(CheckpointError, match=r"contains a run \(up to step 14\) .*not in .*/run"):
        remotes.prepare()


def test_a_step_that_is_named_is_downloaded(tmp_path: Path) -> None:
    keys = {"auto_resume": False, "load": URL, "iteration": 4}
    save, remotes = remotes_of(tmp_path / "cache", **keys)
    for step in (4, 8):
        RemoteFolder(URL).upload(checkpoint(tmp_path / "elsewhere", step))
    remotes.prepare()
    assert native.steps(save) == [4]


def test_the_store_loses_checkpoints_of_an_abandoned_branch(tmp_path: Path) -> None:
    save, remotes = remotes_of(tmp_path / "cache")
    for step in (4, 8, 12):
        RemoteFolder(URL).upload(checkpoint(save, step))
    remotes.deliver(4)
    remotes.wait()
    assert RemoteFolder(URL).steps() == [4]


def test_a_pruned_step_leaves_no_folders_on_a_disk(tmp_path: Path) -> None:
    """An empty tree of an earlier version is no damaged checkpoint either."""
    remote, place = RemoteFolder(f"file://{tmp_path}/disk/run"), tmp_path / "disk" / "run"
    for step in (1, 2):
        remote.upload(checkpoint(tmp_path, step))
    remote.remove(1)
    assert sorted(path.name for path in place.iterdir()) == ["global_step2"]
    remote.upload(checkpoint(tmp_path, 1, "others"))
    assert remote.steps() == [1, 2]
    (place / "quarantine").symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match="run/quarantine: a symbolic link"):
        remote.set_aside(1)
    (place / "quarantine").unlink()
    remote.set_aside(1)
    assert sorted(path.name for path in place.iterdir()) == ["global_step2", "quarantine"]
    (place / "global_step3" / "state").mkdir(parents=True)
    assert checkpoints_in(place) == [place / "global_step2"]
    (place / "global_step3" / "state" / "a").touch()
    assert checkpoints_in(place) == [place / "global_step2", place / "global_step3"]
