"""When a run is saved, where it starts, and what makes a checkpoint another run's."""

import errno
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from megatron_coca.checkpoints import CheckpointError, native
from megatron_coca.checkpoints.files import UnreadableError
from megatron_coca.checkpoints.native.state import WEIGHT, ParameterSlice, StatePiece, write_pieces
from megatron_coca.config import CheckpointConfig, Config, load_config
from megatron_coca.model import build_model
from megatron_coca.training.collectives import FolderLock
from megatron_coca.training.corpus import Corpus, open_corpus
from megatron_coca.training.resume import (
    Choice,
    candidates,
    first_valid,
    quarantine_newer,
    refuse_other_run,
    verify_distributed,
)
from megatron_coca.training.saving import Checkpoints, is_due
from megatron_coca.training.topology import Topology
from tests.checkpoint_files import refuse, run_alone

LAYOUT = {"batch": 4, "dtype": "fp32"}


def keys(**values: Any) -> CheckpointConfig:
    return CheckpointConfig.model_validate(values)


def due(**values: Any) -> list[int]:
    return [step for step in range(101) if is_due(step, keys(**values))]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, []),
        ({"checkpoint_factor": 40}, [40, 80]),
        ({"checkpoint_factor": 1}, list(range(1, 101))),
        ({"checkpoint_factor": 3, "checkpoint_scale": "log"}, [1, 3, 9, 27, 81]),
        ({"checkpoint_factor": 2, "checkpoint_scale": "log"}, [1, 2, 4, 8, 16, 32, 64]),
        ({"checkpoint_factor": 50, "extra_save_iters": [7, 50]}, [7, 50, 100]),
        ({"extra_save_iters": [7, 3]}, [3, 7]),
        ({"checkpoint_factor": 50.0, "extra_save_iters": [0]}, [0, 50, 100]),
        ({"checkpoint_factor": 1.5, "checkpoint_scale": "log"}, [1, 2, 3, 5, 7, 11, 17, 25, 38, 57, 86]),
    ],
)
def test_is_due(values: dict[str, Any], expected: list[int]) -> None:
    assert due(**values) == expected


@pytest.mark.parametrize("factor", [1.01, 1.3, 2**0.5, 2.0, 7.7, 100])
def test_a_logarithmic_scale_saves_where_gpt_neox_does(factor: float) -> None:
    """It multiplies a power until that passes the step, and compares the whole part."""
    powers, power = set(), 1.0
    while power < 1e6:
        powers.add(int(power))
        power *= factor
    chosen = keys(checkpoint_factor=factor, checkpoint_scale="log")
    steps = {*range(1, 3000), *powers, *(step + 1 for step in powers)}
    assert {step for step in steps if is_due(step, chosen)} == {step for step in powers if step < 1e6}


def checkpoint(root: Path, step: int, config: Config | None = None, meta: dict[str, Any] | None = None) -> Path:
    folder = native.begin(root, step)
    if config is not None:
        (folder / native.CONFIG).write_text(config.to_yaml())
        save_file(build_model(config).state_dict(), folder / native.WEIGHTS)
    for name in (native.WEIGHTS, native.CONFIG, "state/rank_00000.safetensors", "rng/rank_0.pt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    native.write_json(folder / native.META, {"step": step, "run": "one", **(meta or {})})
    return native.commit(root, step)


def steps_of(folders: list[Path]) -> list[str]:
    return [str(folder.relative_to(folder.parents[1])) for folder in folders]


def test_a_fresh_start(tmp_path: Path) -> None:
    new, both = str(tmp_path / "new"), str(tmp_path / "run")
    assert candidates(keys()) == candidates(keys(save=new)) == []
    assert candidates(keys(save=new, load=new)) == [], "the first launch of a command that can be repeated"
    assert candidates(keys(save=new, auto_resume=True)) == []
    (tmp_path / "run").mkdir()
    native.begin(tmp_path / "run", 4)
    assert candidates(keys(save=both, load=f"{both}/../run")) == [], "an interrupted first save is no checkpoint"


def test_resuming(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    for step in (4, 8, 10):
        checkpoint(tmp_path / "run", step)
    all_of_them = ["run/global_step10", "run/global_step8", "run/global_step4"]
    assert steps_of(candidates(keys(save=run, load=run))) == all_of_them
    assert steps_of(candidates(keys(save=run, auto_resume=True))) == all_of_them
    assert steps_of(candidates(keys(save=str(tmp_path / "new"), load=run))) == all_of_them
    assert steps_of(candidates(keys(save=run, load=run, iteration=4))) == ["run/global_step4"], "no other will do"
    for values in ({}, {"save": run}):
        assert steps_of(candidates(keys(load=f"{run}/global_step4", **values))) == ["run/global_step4"]


def test_what_resumes_by_itself_prefers_its_own_folder(tmp_path: Path) -> None:
    other, run = (str(tmp_path / name) for name in ("other", "run"))
    checkpoint(tmp_path / "other", 3)
    first = keys(save=run, load=other, auto_resume=True, finetune=True)
    assert candidates(first) == [], "the first launch takes the weights alone"
    assert steps_of(candidates(keys(save=run, load=other, auto_resume=True))) == ["other/global_step3"]
    for step in (2, 6):
        checkpoint(tmp_path / "run", step)
    assert steps_of(candidates(first)) == ["run/global_step6", "run/global_step2"]
    with pytest.raises(CheckpointError, match="auto_resume: needs a folder"):
        candidates(keys(auto_resume=True))


def test_a_start_that_would_mix_runs_is_refused(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    checkpoint(tmp_path / "run", 8)
    for values in ({"save": run}, {"save": run, "load": run, "finetune": True}):
        with pytest.raises(CheckpointError, match="already holds a run, up to step 8; resume it with load="):
            candidates(keys(**values))
    checkpoint(tmp_path / "other", 3)
    with pytest.raises(CheckpointError, match="run: already holds a run, up to step 8"):
        candidates(keys(save=run, load=str(tmp_path / "other")))


def test_a_start_that_cannot_be_found_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="elsewhere: no such checkpoint folder"):
        candidates(keys(load=str(tmp_path / "elsewhere"), save=str(tmp_path / "new")))
    checkpoint(tmp_path / "run", 8)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 5; there are \[8\]"):
        candidates(keys(load=str(tmp_path / "run"), iteration=5))
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no optimizer state; set finetune=true"):
        candidates(keys(load=str(tmp_path / "hf")))


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of one process, without a process group."""
    run_alone(monkeypatch)


@pytest.mark.usefixtures("alone")
def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folders = [checkpoint(tmp_path, step) for step in (6, 4, 2)]
    assert first_valid([]) == Choice(None) and first_valid(folders) == Choice(folders[0])
    (folders[0] / native.META).write_text("{}")
    logging.getLogger("megatron_coca").setLevel(logging.NOTSET)
    with caplog.at_level(logging.WARNING):
        assert first_valid(folders) == Choice(folders[1])
    assert "global_step6/meta.json: has 2 bytes" in caplog.text and "falling back" in caplog.text
    with pytest.raises(CheckpointError, match="global_step6/meta.json: has 2 bytes"):
        first_valid(folders[:1])


@pytest.mark.usefixtures("alone")
def test_what_lies_beyond_the_resumed_checkpoint_is_set_aside(tmp_path: Path) -> None:
    folders = {step: checkpoint(tmp_path / "run", step) for step in (2, 4, 6)}
    quarantine_newer(keys(), Choice(folders[4]))
    quarantine_newer(keys(save=str(tmp_path / "run")), Choice(None))
    assert native.steps(tmp_path / "run") == [2, 4, 6]
    quarantine_newer(keys(save=str(tmp_path / "run")), Choice(folders[4]))
    assert native.steps(tmp_path / "run") == [2, 4] and native.locate(tmp_path / "run") == folders[4]
    assert (tmp_path / "run/quarantine/global_step6" / native.MANIFEST).is_file(), "nothing is lost"
    checkpoint(tmp_path / "run", 6)
    quarantine_newer(keys(save=str(tmp_path / "run")), Choice(folders[4]))
    assert (tmp_path / "run/quarantine/global_step6.1" / native.MANIFEST).is_file()


@pytest.fixture(scope="module")
def opened(small: dict[str, Any]) -> Corpus:
    return open_corpus(load_config([], small))


@pytest.fixture
def saved(opened: Corpus, tmp_path: Path) -> Path:
    return checkpoint(tmp_path, 4, opened.config, {"data": opened.identity, **LAYOUT})


def changed(corpus: Corpus, **values: Any) -> Corpus:
    return replace(corpus, config=corpus.config.override(values))


@pytest.mark.usefixtures("alone")
def test_the_same_run_is_accepted(saved: Path, opened: Corpus, caplog: pytest.LogCaptureFixture) -> None:
    refuse_other_run(saved, opened, LAYOUT)
    refuse_other_run(saved, changed(opened, **{"optimizer.type": "cpu_adam"}), LAYOUT)
    assert not caplog.text
    elsewhere = {"save": "x", "load": "y", "log_interval": 5, "train_iters": 99, "attention_backend": "sdpa"}
    refuse_other_run(saved, changed(opened, **elsewhere), LAYOUT)


@pytest.mark.usefixtures("alone")
def test_what_may_change_is_said(saved: Path, opened: Corpus, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("megatron_coca").setLevel(logging.NOTSET)
    with caplog.at_level(logging.WARNING):
        refuse_other_run(saved, changed(opened, **{"optimizer.params.lr": 1e-5}), LAYOUT)
    assert "resuming with another optimizer.params.lr (saved 0.003, now 1e-05)" in caplog.text


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"num_layers": 3, "hidden_size": 64}, ("num_layers (saved 2, now 3)", "hidden_size (saved 32, now 64)")),
        ({"pos_emb": "rotary"}, ("pos_emb (saved 'coca', now 'rotary')",)),
        ({"seed": 8}, ("seed (saved 7, now 8)",)),
        ({"optimizer.type": "sgd"}, ("optimizer.type (saved 'Adam', now 'sgd')",)),
        ({"hidden_dropout": 0.0}, ("hidden_dropout (saved 0.1, now 0.0)",)),
        ({"weight_decay": 0.0}, ("weight_decay (saved 0.1, now 0.0)",)),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, ("rope_scaling (saved None, now ",)),
    ],
)
def test_another_run_is_refused_by_its_keys(
    saved: Path, opened: Corpus, values: dict[str, Any], named: tuple[str, ...]
) -> None:
    with pytest.raises(CheckpointError) as caught:
        refuse_other_run(saved, changed(opened, **values), LAYOUT)
    for part in (str(saved), "cannot be resumed with another", "finetune=true", *named):
        assert part in str(caught.value)


@pytest.mark.parametrize("name", LAYOUT)
def test_another_layout_is_refused(saved: Path, opened: Corpus, name: str) -> None:
    with pytest.raises(CheckpointError, match=rf"{name} \(saved "):
        refuse_other_run(saved, opened, LAYOUT | {name: "other"})


def test_other_data_is_refused(saved: Path, opened: Corpus, small: dict[str, Any]) -> None:
    other = open_corpus(load_config([], small | {"train_data_paths": small["test_data_paths"]}))
    prefix = small["test_data_paths"][0]
    with pytest.raises(CheckpointError, match=rf"another token count of {prefix} \(saved [\d,]+, now [\d,]+\)"):
        refuse_other_run(saved, other, LAYOUT)


@pytest.mark.usefixtures("alone")
def test_a_folder_serves_one_run_at_a_time(tmp_path: Path) -> None:
    with FolderLock(str(tmp_path)) as one, FolderLock(str(tmp_path)) as other:
        one.take()
        with pytest.raises(CheckpointError, match="another run is training into"):
            other.take()
    with FolderLock(str(tmp_path)) as one, FolderLock(None) as none:
        one.take()
        none.take()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("key", ["log_dir", "tensorboard_dir"])
def test_figures_of_two_runs_do_not_share_a_folder(opened: Corpus, tmp_path: Path, key: str) -> None:
    """The second would set aside, or hide, those of the first."""
    saves = [str(tmp_path / name) for name in "ab"]
    one, other = (changed(opened, save=save, **{key: str(tmp_path / "logs")}).config for save in saves)
    with FolderLock(saves[0]) as first, FolderLock(saves[1]) as second:
        first.take_figures(one)
        with pytest.raises(
            CheckpointError, match=rf"{key}: .*logs: another run writes its .*; name another, as {key}="
        ):
            second.take_figures(other)
    with FolderLock(saves[1]) as second:  # when the first has ended
        second.take_figures(other)
        second.take_figures(other)


@pytest.mark.usefixtures("alone")
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
        second.take_figures(chosen[0])
        assert "the figures of this one go to runs/unsaved_2" in caplog.text
        saved = changed(opened, save="elsewhere").config
        assert third.choose_log_dir(saved) is saved
    with FolderLock(None) as again:
        assert again.choose_log_dir(config) == config


@pytest.mark.usefixtures("alone")
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
        checkpoint(run, 2)  # by another run, which has ended since
        with pytest.raises(CheckpointError, match="another run has written checkpoints into it since this one started"):
            locks.take()


@pytest.mark.usefixtures("alone")
def test_a_lock_that_is_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / native.LOCK).mkdir()
    with (
        FolderLock(str(tmp_path)) as locks,
        pytest.raises(CheckpointError, match=r"\.lock: cannot be locked \(Is a dir"),
    ):
        locks.take()


def engine_of(weight: torch.Tensor) -> Any:
    """An engine with one parameter and no optimizer."""
    return SimpleNamespace(
        pieces=lambda: [StatePiece("w", WEIGHT, 0, weight)],
        parameter_slices=lambda: {"w": ParameterSlice((weight.numel(),))},
        counters=lambda: {"step": 1.0},
        restored=lambda counters: None,
        partitioned=False,
        copies=frozenset(),
    )


def checkpoints_of(corpus: Corpus, engine: Any, **values: Any) -> Checkpoints:
    return Checkpoints(changed(corpus, **values), engine, Topology(1, 1, 1, 1), LAYOUT)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("in_background", [True, False])
def test_what_is_saved_is_the_state_when_it_was_asked_for(opened: Corpus, tmp_path: Path, in_background: bool) -> None:
    weight = torch.arange(5.0)
    run = checkpoints_of(opened, engine_of(weight), save=str(tmp_path / "run"), async_save=in_background)
    run.save(3, {"skips": []})
    weight.fill_(7.0)  # training goes on
    run.wait()
    folder = native.locate(tmp_path / "run")
    native.verify(folder)
    assert load_file(folder / native.WEIGHTS)["w"].tolist() == [0, 1, 2, 3, 4]
    assert run.restore(folder)["progress"]["skips"] == [] and weight.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.usefixtures("alone")
def test_a_resumed_run_keeps_its_identity(opened: Corpus, tmp_path: Path) -> None:
    def run(name: str) -> Checkpoints:
        return checkpoints_of(opened, engine_of(torch.zeros(5)), save=str(tmp_path / name), async_save=False)

    def identity(name: str, step: int) -> str:
        return str(native.read_json(tmp_path / f"{name}/global_step{step}" / native.META)["run"])

    run("one").save(1, {})
    resumed = run("one")
    resumed.restore(tmp_path / "one/global_step1")
    resumed.save(2, {})
    run("two").save(1, {})
    assert identity("one", 1) == identity("one", 2) != identity("two", 1)


@pytest.mark.usefixtures("alone")
def test_checkpoints_are_kept_by_the_keys(opened: Corpus, tmp_path: Path) -> None:
    keep = {"keep_last_n_checkpoints": 2, "keep_every_n_steps": 4}
    run = checkpoints_of(opened, engine_of(torch.zeros(5)), save=str(tmp_path / "run"), **keep)
    for step in range(1, 8):
        run.save(step, {})
    run.wait()
    assert native.steps(tmp_path / "run") == [4, 6, 7]


@pytest.mark.usefixtures("alone")
def test_a_disk_that_fills_up_under_the_random_state_is_named(
    opened: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = native.begin

    def begin_on_a_full_disk(save: Path, step: int) -> Path:
        folder = begin(save, step)
        (folder / native.RNG).mkdir()
        (folder / native.RNG / "rank_0.pt").symlink_to("/dev/full")
        return folder

    monkeypatch.setattr(native, "begin", begin_on_a_full_disk)
    run = checkpoints_of(opened, engine_of(torch.zeros(5)), save=str(tmp_path / "run"))
    run.save(1, {})
    with pytest.raises(CheckpointError, match="step 1 could not be written .*No space left on device"):
        run.wait()


@pytest.mark.usefixtures("alone")
def test_a_disk_that_fills_up_under_the_weights_leaves_nothing_half_written(
    opened: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: No space left on device")

    run = checkpoints_of(opened, engine_of(torch.zeros(5)), save=str(tmp_path / "run"))
    run.save(2, {})
    run.wait()
    monkeypatch.setattr("megatron_coca.training.saving.write_safetensors", full)
    run.save(3, {})
    with pytest.raises(CheckpointError, match="step 3 could not be written .*No space left.*earlier ones are intact"):
        run.wait()
    assert not run.failed, "told once"
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"global_step2", native.LATEST}


@pytest.mark.usefixtures("alone")
def test_weights_are_put_together_without_reading_the_state_again(
    opened: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def destroyed(path: Path, *arguments: Any) -> None:
        write_pieces(path, *arguments)
        path.write_bytes(b"lost")

    monkeypatch.setattr("megatron_coca.training.saving.write_pieces", destroyed)
    run = checkpoints_of(opened, engine_of(torch.arange(5.0)), save=str(tmp_path))
    run.save(2, {})
    run.wait()
    folder = native.locate(tmp_path)
    assert load_file(folder / native.WEIGHTS)["w"].tolist() == [0, 1, 2, 3, 4]
    native.verify(folder)


@pytest.mark.usefixtures("alone")
def test_a_loop_of_links_beside_a_checkpoint_is_left_alone(tmp_path: Path) -> None:
    folder, loop = checkpoint(tmp_path, 4), native.step_folder(tmp_path, 9)
    loop.symlink_to(loop.name)
    chosen = first_valid([loop, folder])
    assert chosen == Choice(folder, (loop,))
    quarantine_newer(keys(save=str(tmp_path)), chosen)
    assert loop.is_symlink()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("name", "method"), [("state/rank_00000.safetensors", "open"), (native.MANIFEST, "open")])
def test_an_unreadable_checkpoint_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, method: str
) -> None:
    folders = [checkpoint(tmp_path, step) for step in (6, 4, 2)]
    refuse(monkeypatch, folders[0] / name, method, errno.EIO)
    (folders[1] / native.WEIGHTS).write_text("damaged")
    chosen = first_valid(folders)
    assert chosen == Choice(folders[2], (folders[0],))
    quarantine_newer(keys(save=str(tmp_path)), chosen)
    assert (folders[0] / name).exists() and [path.name for path in (tmp_path / native.QUARANTINE).iterdir()] == [
        "global_step4"
    ]
    with pytest.raises(UnreadableError, match=r"cannot be read \(Input/output error\)"):
        first_valid(folders[:2])
    assert candidates(keys(load=str(tmp_path), save=str(tmp_path))) == [folders[0], folders[2]]


@pytest.mark.usefixtures("alone")
def test_weights_only_give_way_to_an_older_checkpoint(tmp_path: Path) -> None:
    folders = [checkpoint(tmp_path, step) for step in (6, 4)]
    content = native.read_json(folders[0] / native.MANIFEST)
    native.write_json(folders[0] / native.MANIFEST, content | {"holds": native.WEIGHTS_ONLY})
    native.verify(folders[0])
    assert first_valid(folders) == Choice(folders[1])
    for chosen in ({"auto_resume": True}, {"load": str(tmp_path)}):
        assert candidates(keys(save=str(tmp_path), **chosen)) == folders
    with pytest.raises(CheckpointError, match="finetune=true"):
        first_valid(folders[:1])


@pytest.mark.usefixtures("alone")
def test_a_rank_that_waits_for_others_beats_while_they_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of many ranks, which has nothing to read: the first one reads 10 bytes between two agreements."""
    read = iter([10.0, 20.0, 20.0, 30.0])

    def agree(mine: list[float]) -> list[float]:
        assert mine == [0, False, False]
        total = next(read)
        return [total, float(total < 30), 0.0]

    monkeypatch.setattr("megatron_coca.training.engine.group.rank", lambda: 99)
    monkeypatch.setattr("megatron_coca.training.engine.group.world_size", lambda: 100)
    monkeypatch.setattr("megatron_coca.training.engine.group.sum_over_ranks", agree)
    beats: list[str] = []
    verify_distributed(checkpoint(tmp_path, 2), beats.append)
    assert len(beats) == 4, "one at the start, and none where nothing was read"


def test_a_link_as_quarantine_is_not_followed(tmp_path: Path) -> None:
    save, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    (save / "global_step7").mkdir(parents=True)
    elsewhere.mkdir()
    (save / native.QUARANTINE).symlink_to(elsewhere)
    assert native.set_aside(save / "global_step7") == save / "global_step7.quarantine"
    assert (save / "global_step7.quarantine").is_dir() and not [*elsewhere.iterdir()]
    assert native.begun_steps(save) == []
