"""A checkpoint is complete or absent, at every point where writing it can be interrupted."""

import errno
import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_coca.checkpoints import CheckpointError, native
from megatron_coca.checkpoints.files import BLOCK, Comparison, UnreadableError
from megatron_coca.checkpoints.neox.read import find_step
from megatron_coca.checkpoints.weights import WeightEntry, Weights, write_safetensors
from tests.checkpoint_files import refuse

STATE_FILE, RANDOM_FILE = "state/rank_00000.safetensors", "rng/rank_0.pt"
WRITTEN = (native.WEIGHTS, native.CONFIG, STATE_FILE, RANDOM_FILE)


class Interrupted(BaseException):
    """The machine stops here; nothing that comes after runs."""


def save(root: Path, step: int, content: str = "weights") -> Path:
    folder = native.begin(root, step)
    for name in (native.STATE, native.RNG):
        (folder / name).mkdir(parents=True)
    for name in WRITTEN:
        (folder / name).write_text(f"{content} of step {step} in {name}")
    native.write_json(folder / native.META, {"step": step, "content": content})
    return native.commit(root, step)


def found(root: Path) -> tuple[int, str]:
    """Return the step and the content of the checkpoint that `locate` finds; all its files must be whole."""
    folder = native.locate(root)
    manifest = native.verify(folder)
    assert set(manifest["files"]) == {*WRITTEN, native.META}
    meta = native.read_json(folder / native.META)
    assert (folder / native.WEIGHTS).read_text() == f"{meta['content']} of step {meta['step']} in {native.WEIGHTS}"
    return meta["step"], meta["content"]


def interrupt_at(monkeypatch: pytest.MonkeyPatch, limit: int) -> Callable[[], int]:
    """Make the `limit`-th change to the disk raise, a write half way through; returns the counter of changes."""
    count = 0

    def guarded(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            nonlocal count
            count += 1
            if count == limit:
                if name == "write_text":
                    original(arguments[0], arguments[1][: len(arguments[1]) // 2])
                raise Interrupted
            return original(*arguments, **keywords)

        monkeypatch.setattr(owner, name, call)

    for owner, names in ((os, ("fsync", "unlink", "rmdir")), (Path, ("rename", "write_text", "mkdir"))):
        for name in names:
            guarded(owner, name)
    return lambda: count


def first_save(root: Path) -> None:
    save(root, 2, "new")


def second_save(root: Path) -> None:
    save(root, 2, "new")
    native.prune(root, 1)


def clear_and_save(root: Path) -> None:
    save(root, 3, "new")


def leave_partial(root: Path) -> None:
    save(root, 1, "old")
    native.begin(root, 2)
    (native.partial_folder(root, 2) / native.WEIGHTS).write_text("half")
    native.partial_folder(root, 2).rename(native.partial_folder(root, 7))


SCENARIOS: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any], set[tuple[int, str]]]] = {
    "a second checkpoint, the first pruned": (lambda r: save(r, 1, "old"), second_save, {(1, "old"), (2, "new")}),
    "the same step again": (
        lambda r: (save(r, 1, "old"), save(r, 2, "old")),
        first_save,
        {(1, "old"), (2, "old"), (2, "new")},
    ),
    "after an interrupted save": (leave_partial, clear_and_save, {(1, "old"), (3, "new")}),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_interrupted_anywhere(name: str, tmp_path: Path) -> None:
    before, during, allowed = SCENARIOS[name]
    outcomes, limit = set(), 0
    while True:
        limit += 1
        root = tmp_path / str(limit)
        before(root)
        with pytest.MonkeyPatch.context() as patch:
            interrupt_at(patch, limit)
            try:
                during(root)
            except Interrupted:
                interrupted = True
            else:
                interrupted = False
        outcome = found(root)
        assert outcome in allowed, f"interrupted at change {limit}"
        outcomes.add(outcome)
        save(root, 9, "later")
        assert found(root) == (9, "later") and not list(root.glob(".*")), "the next save removes the partial files"
        if not interrupted:
            break
    assert limit > 15 and outcome[1] == "new" and outcomes >= {(1, "old"), outcome}


def test_the_first_checkpoint_of_a_run_interrupted_anywhere(tmp_path: Path) -> None:
    limit, complete = 0, False
    while not complete:
        limit += 1
        root = tmp_path / str(limit)
        with pytest.MonkeyPatch.context() as patch:
            interrupt_at(patch, limit)
            try:
                save(root, 2, "new")
                complete = True
            except Interrupted:
                pass
        if (root / "global_step2").exists():
            assert found(root) == (2, "new")
        else:
            assert not complete
            with pytest.raises(CheckpointError, match="no such checkpoint folder|no complete checkpoint"):
                native.locate(root)
    assert limit > 10


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize("name", [native.WEIGHTS, native.CONFIG, native.META, STATE_FILE])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda path: rewrite(path, lambda content: content[:-1]),
            "has [0-9]+ bytes, but was written with [0-9]+",
        ),
        (lambda path: rewrite(path, lambda content: content[:-1] + b"#"), "content has changed .*sha256"),
        (lambda path: path.unlink(), "not found; copy the checkpoint"),
    ],
)
def test_damage_is_found(tmp_path: Path, name: str, damage: Callable[[Path], None], message: str) -> None:
    folder = save(tmp_path, 3)
    damage(folder / name)
    with pytest.raises(CheckpointError, match=message) as caught:
        native.verify(folder)
    assert str(folder / name) in str(caught.value)


def test_manifest_of_another_format_or_none(tmp_path: Path) -> None:
    folder = save(tmp_path, 3)
    manifest = native.read_json(folder / native.MANIFEST)
    cases = (({"format": 1}, "format 1 is not"), ({"format": 3}, "format 3 is not"), ({"holds": 0}, "holds: 0"))
    for changes, problem in cases:
        native.write_json(folder / native.MANIFEST, manifest | changes)
        with pytest.raises(CheckpointError, match=f"manifest.json: .*{problem}"):
            native.verify(folder)
    (folder / native.MANIFEST).write_text('{"format"')
    with pytest.raises(CheckpointError, match="manifest.json: not valid JSON"):
        native.verify(folder)
    (folder / native.MANIFEST).write_text("[]")
    with pytest.raises(CheckpointError, match="manifest.json: not a JSON mapping"):
        native.verify(folder)


def rewrite_manifest(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    manifest = native.read_json(folder / native.MANIFEST)
    change(manifest)
    native.write_json(folder / native.MANIFEST, manifest)


@pytest.mark.parametrize("name", [*WRITTEN, native.META])
def test_a_manifest_that_lists_too_little_is_damaged(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path, 3)
    rewrite_manifest(folder, lambda manifest: manifest["files"].pop(name))
    with pytest.raises(CheckpointError, match="manifest.json: damaged .does not list"):
        native.verify(folder)
    rewrite_manifest(folder, lambda manifest: manifest["files"].clear())
    with pytest.raises(CheckpointError, match="does not list config.yml"):
        native.verify(folder)


def test_every_rank_of_the_division_has_random_states(tmp_path: Path) -> None:
    folder = save(tmp_path, 3)
    native.write_json(folder / native.META, {"step": 3, "topology": {"data": 2, "pipe": 1}})
    rewrite_manifest(
        folder, lambda manifest: manifest["files"].update({native.META: native.describe(folder / native.META)})
    )
    with pytest.raises(CheckpointError, match=r"does not list rng/rank_1\.pt"):
        native.verify(folder)


def test_names_and_sizes_only(tmp_path: Path) -> None:
    folder = save(tmp_path, 3)
    rewrite(folder / native.WEIGHTS, lambda content: content[:-1] + b"#")
    native.verify(folder, contents=False)
    rewrite(folder / native.WEIGHTS, lambda content: content[:-1])
    with pytest.raises(CheckpointError, match="was written with"):
        native.verify(folder, contents=False)


def test_a_deeply_nested_manifest_is_damaged(tmp_path: Path) -> None:
    folder = save(tmp_path, 3)
    (folder / native.MANIFEST).write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="manifest.json: not valid JSON"):
        native.verify(folder)


def test_names_that_no_run_writes_are_left_alone(tmp_path: Path) -> None:
    save(tmp_path, 3)
    for name in ("global_step0099", "global_step٣", "global_step"):
        (tmp_path / name).mkdir()
    assert native.begun_steps(tmp_path) == native.steps(tmp_path) == [3]


def test_a_checkpoint_is_complete_without_latest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / native.LATEST).mkdir()
    logging.getLogger("megatron_coca").setLevel(logging.NOTSET)
    with caplog.at_level(logging.WARNING):
        assert found(save(tmp_path, 3).parent) == (3, "weights")
    assert "global_step3: complete, but the file `latest`" in caplog.text
    assert not list(tmp_path.glob(".*"))


def test_locate(tmp_path: Path) -> None:
    for step in (2, 10, 9):
        save(tmp_path, step)
    assert native.steps(tmp_path) == [2, 9, 10]
    assert native.locate(tmp_path) == tmp_path / "global_step9", "the last one written"
    assert native.locate(tmp_path, 2) == native.locate(tmp_path / "global_step2") == tmp_path / "global_step2"
    (tmp_path / native.LATEST).unlink()
    assert native.locate(tmp_path) == tmp_path / "global_step10", "without `latest` the highest step"
    (tmp_path / native.LATEST).write_text("global_step77")
    assert native.locate(str(tmp_path)) == tmp_path / "global_step10"
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 3; available steps: \[2, 9, 10\]"):
        native.locate(tmp_path, 3)
    (tmp_path / "global_step10" / native.MANIFEST).unlink()
    assert native.locate(tmp_path) == tmp_path / "global_step9", "a folder without a manifest is no checkpoint"


def test_locate_names_the_missing_part(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: no such checkpoint folder"):
        native.locate(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        native.locate(tmp_path)
    with pytest.raises(CheckpointError, match="no checkpoint of step 1; available steps: none"):
        native.locate(tmp_path, 1)


@pytest.mark.parametrize(
    ("keep", "left"), [(None, [9, 10, 11]), (5, [9, 10, 11]), (3, [9, 10, 11]), (2, [10, 11]), (1, [11])]
)
def test_prune(tmp_path: Path, keep: int | None, left: list[int]) -> None:
    """By the number of the step, not by the name of its folder."""
    for step in (9, 10, 11):
        save(tmp_path, step)
    native.prune(tmp_path, keep)
    assert native.steps(tmp_path) == left and not list(tmp_path.glob(".*"))


def test_prune_keeps_the_last_one_written(tmp_path: Path) -> None:
    """A run taken up again from an older step writes below the steps that it has left behind."""
    for step in (5, 10, 6):
        save(tmp_path, step)
    native.prune(tmp_path, 1)
    assert native.steps(tmp_path) == [6, 10] and native.locate(tmp_path) == tmp_path / "global_step6"


def test_abandon_leaves_nothing(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (native.begin(tmp_path, 2) / native.WEIGHTS).write_text("half")
    native.abandon(tmp_path, 2)
    native.abandon(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step1", "latest"]


def test_the_manifest_lists_every_file(tmp_path: Path) -> None:
    manifest = json.loads((save(tmp_path, 1) / native.MANIFEST).read_text())
    assert manifest["files"][native.META]["size"] == (tmp_path / "global_step1" / native.META).stat().st_size
    assert len(manifest["files"]) == 5


@pytest.mark.parametrize(
    "name",
    [
        "/etc/hostname",
        "../global_step2/config.yml",
        "state/../../x",
        ".",
        "",
        "state//x",
        "./x",
        "a\0b",
        "n" * 300,
        "\ud800",
    ],
)
def test_a_manifest_names_nothing_outside_the_checkpoint(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path, 3)
    rewrite_manifest(folder, lambda manifest: manifest["files"].update({name: {"size": 0, "sha256": ""}}))
    with pytest.raises(CheckpointError, match="manifest.json: damaged .*is not a path inside"):
        native.verify(folder)


@pytest.mark.parametrize("linked", [STATE_FILE, native.STATE])
def test_links_in_the_place_of_files(tmp_path: Path, linked: str) -> None:
    """A run never writes a link, because its target can change; a cache of downloads has links only."""
    folder = save(tmp_path, 3)
    (folder / linked).rename(tmp_path / "elsewhere")
    (folder / linked).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=f"{linked}: a symbolic link"):
        native.verify(folder)
    native.verify(folder, links=True)


def test_files_that_the_manifest_does_not_list_are_found(tmp_path: Path) -> None:
    folder = save(tmp_path, 3)
    (folder / "state/rank_0000.safetensors").write_text("of another run")
    (folder / "tokenizer").symlink_to(tmp_path)
    assert native.unlisted(folder) == ["state/rank_0000.safetensors", "tokenizer"]
    assert native.state_files(folder) == ["rank_00000.safetensors"]


UNREADABLE = {
    "state": (STATE_FILE, "open", errno.EIO, "Input/output error"),
    "size": (STATE_FILE, "stat", errno.EACCES, "Permission denied"),
    "manifest": (native.MANIFEST, "open", errno.EIO, "Input/output error"),
    "meta": (native.META, "open", errno.EACCES, "Permission denied"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_an_unreadable_file_is_not_called_damaged(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, method, number, reason = UNREADABLE[case]
    folder = save(tmp_path, 3)
    refuse(monkeypatch, folder / name, method, number)
    with pytest.raises(UnreadableError, match=rf"{name}: cannot be read \({reason}\)"):
        native.verify(folder)


@pytest.mark.parametrize("name", [STATE_FILE, native.MANIFEST])
def test_a_folder_in_the_place_of_a_file_is_not_called_damaged(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path, 3)
    (folder / name).unlink()
    (folder / name).mkdir()
    with pytest.raises(UnreadableError, match=f"{name}: cannot be read"):
        native.verify(folder)


def test_a_folder_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    save(tmp_path, 3)
    monkeypatch.setattr(os, "scandir", fail)
    with pytest.raises(UnreadableError, match=r"cannot be read \(Permission denied\)"):
        native.locate(tmp_path)


def test_a_folder_named_after_another_step_is_an_error(tmp_path: Path) -> None:
    folder = save(tmp_path, 3)
    other = folder.rename(tmp_path / "global_step8")
    with pytest.raises(CheckpointError, match=r"global_step8: named after another step .*has 3\); rename"):
        native.verify(other)
    native.verify(other.rename(tmp_path / "best"))


@pytest.mark.parametrize(
    "text",
    [
        "../other/global_step9",
        "/etc",
        "..",
        "",
        "global_step" + "9" * 400,
        "x" * 100_000,
        "global_step2/../global_step2",
    ],
)
def test_latest_names_a_step_or_nothing(tmp_path: Path, text: str) -> None:
    for step in (2, 10):
        save(tmp_path / "run", step)
    save(tmp_path / "other", 9)
    (tmp_path / "run" / native.LATEST).write_text(text.replace("/etc", str(tmp_path / "other/global_step9")))
    assert native.locate(tmp_path / "run") == tmp_path / "run/global_step10"
    native.prune(tmp_path / "run", 1)
    assert native.steps(tmp_path / "run") == [10] and find_step(tmp_path / "run") is None


def test_planted_links_are_not_followed(tmp_path: Path) -> None:
    run, victim, folder = tmp_path / "run", tmp_path / "victim", tmp_path / "folder"
    save(run, 2)
    victim.write_text("precious")
    folder.mkdir()
    (folder / "file").write_text("precious")
    (run / ".latest.partial").symlink_to(victim)
    native.partial_folder(run, 3).symlink_to(folder)
    native.partial_folder(run, 4).symlink_to(tmp_path / "nothing")
    assert found(save(run, 3).parent) == (3, "weights")
    assert victim.read_text() == (folder / "file").read_text() == "precious"
    assert not (run / native.LATEST).is_symlink() and (run / native.LATEST).read_text() == "global_step3"
    assert not list(run.glob(".*"))
    (run / ".latest.partial").mkdir()
    assert (save(run, 5).parent / native.LATEST).read_text() == "global_step5"


def test_latest_is_replaced_and_not_rewritten(tmp_path: Path) -> None:
    """A process that dies while it writes leaves the earlier name."""
    save(tmp_path, 2)
    (tmp_path / "before").hardlink_to(tmp_path / native.LATEST)
    save(tmp_path, 3)
    assert (tmp_path / "before").read_text() == "global_step2" and native.read_latest(tmp_path) == "global_step3"


def test_everything_is_flushed_before_the_checkpoint_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: set[int] = set()

    def fsync(descriptor: int) -> None:
        if not native.step_folder(tmp_path, 3).exists():
            flushed.add(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", fsync)
    folder = save(tmp_path, 3)
    assert [path for path in (folder, *folder.rglob("*")) if path.stat().st_ino not in flushed] == []


def test_a_step_that_is_written_again_is_kept(tmp_path: Path) -> None:
    """It may be one that could not be read when the run started."""
    save(tmp_path, 2, "old")
    save(tmp_path, 2, "new")
    assert found(tmp_path) == (2, "new")
    assert native.read_json(tmp_path / native.QUARANTINE / "global_step2" / native.META)["content"] == "old"


def test_a_folder_that_may_not_be_moved_into_another_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def guarded(self: Path, target: Path) -> Path:
        if target.parent.name == native.QUARANTINE:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", guarded)
    for content in ("old", "newer", "new"):
        save(tmp_path, 2, content)
    assert found(tmp_path) == (2, "new") and native.begun_steps(tmp_path) == [2]
    kept = [
        native.read_json(tmp_path / name / native.META)
        for name in ("global_step2.quarantine", "global_step2.quarantine.1")
    ]
    assert [meta["content"] for meta in kept] == ["old", "newer"]


def test_the_digest_of_written_weights_is_that_of_their_file(tmp_path: Path) -> None:
    values = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5)}
    entries = {name: WeightEntry(value.dtype, tuple(value.shape)) for name, value in values.items()}
    digest = hashlib.sha256()
    write_safetensors(tmp_path / "w", Weights(entries, values.__getitem__, tmp_path), digest=digest)
    assert digest.hexdigest() == native.describe(tmp_path / "w")["sha256"]


class TestComparison:
    """Checksums in threads."""

    def files(self, folder: Path, count: int = 6) -> dict[Path, str]:
        paths = [folder / f"{number}" for number in range(count)]
        for number, path in enumerate(paths):
            path.write_bytes(bytes([number]) * (BLOCK + number))
        return {path: native.describe(path)["sha256"] for path in paths}

    @pytest.mark.parametrize("threads", [1, 3, 50])
    def test_equal_files(self, tmp_path: Path, threads: int) -> None:
        expected = self.files(tmp_path)
        with Comparison(expected, threads) as comparison:
            assert comparison.wait() and comparison.failure is None
        assert comparison.bytes_read == sum(path.stat().st_size for path in expected)

    def test_another_content_is_named(self, tmp_path: Path) -> None:
        expected = self.files(tmp_path)
        path = list(expected)[3]
        rewrite(path, lambda content: content[:-1] + b"#")
        with Comparison(expected, 2) as comparison:
            while not comparison.wait():
                pass
            assert str(path) in str(comparison.failure) and "content has changed" in str(comparison.failure)

    def test_leaving_ends_the_threads(self, tmp_path: Path) -> None:
        before = threading.active_count()
        with Comparison(self.files(tmp_path, 40), 2) as comparison:
            comparison.wait(0.0)
        assert threading.active_count() == before

    def test_no_files(self) -> None:
        with Comparison({}, 2) as comparison:
            assert comparison.wait() and comparison.failure is None
