"""The checkpoint that a run resumes from, and the checkpoints of another run that it must not resume from."""

import errno
import logging
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from megatron_coca.checkpoints import CheckpointError, native
from megatron_coca.checkpoints.files import UnreadableError
from megatron_coca.config import CheckpointConfig, Config, load_config
from megatron_coca.model import build_model
from megatron_coca.training.checkpointing.resume import (
    RECORDED,
    ResumePoint,
    candidates,
    check_same_run,
    continuation,
    first_valid,
    quarantine_newer,
    verify_distributed,
)
from megatron_coca.training.corpus import Corpus, open_corpus
from tests.checkpoint_files import refuse
from tests.one_rank import changed

LAYOUT = {"batch": 4, "dtype": "fp32"}


def keys(**values: Any) -> CheckpointConfig:
    return CheckpointConfig.model_validate(values)


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
    assert steps_of(candidates(keys(save=run, load=run, iteration=4))) == ["run/global_step4"], "only the named step"
    for values in ({}, {"save": run}):
        assert steps_of(candidates(keys(load=f"{run}/global_step4", **values))) == ["run/global_step4"]


def test_auto_resume_prefers_its_own_folder(tmp_path: Path) -> None:
    other, run = (str(tmp_path / name) for name in ("other", "run"))
    checkpoint(tmp_path / "other", 3)
    first = keys(save=run, load=other, auto_resume=True, finetune=True)
    assert candidates(first) == [], "the first launch takes only the weights"
    assert steps_of(candidates(keys(save=run, load=other, auto_resume=True))) == ["other/global_step3"]
    for step in (2, 6):
        checkpoint(tmp_path / "run", step)
    assert steps_of(candidates(first)) == ["run/global_step6", "run/global_step2"]
    with pytest.raises(CheckpointError, match="auto_resume: requires a save folder"):
        candidates(keys(auto_resume=True))


def test_a_start_that_would_mix_runs_is_an_error(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    checkpoint(tmp_path / "run", 8)
    for values in ({"save": run}, {"save": run, "load": run, "finetune": True}):
        with pytest.raises(CheckpointError, match="contains a run, up to step 8; .*load="):
            candidates(keys(**values))
    checkpoint(tmp_path / "other", 3)
    with pytest.raises(CheckpointError, match="run: already contains a run, up to step 8"):
        candidates(keys(save=run, load=str(tmp_path / "other")))


def test_a_start_that_cannot_be_found_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="elsewhere: no such checkpoint folder"):
        candidates(keys(load=str(tmp_path / "elsewhere"), save=str(tmp_path / "new")))
    checkpoint(tmp_path / "run", 8)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 5; available steps: \[8\]"):
        candidates(keys(load=str(tmp_path / "run"), iteration=5))
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no optimizer state; set finetune=true"):
        candidates(keys(load=str(tmp_path / "hf")))


@pytest.mark.usefixtures("one_rank")
def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folders = [checkpoint(tmp_path, step) for step in (6, 4, 2)]
    assert first_valid([]) == ResumePoint(None) and first_valid(folders) == ResumePoint(folders[0])
    (folders[0] / native.META).write_text("{}")
    logging.getLogger("megatron_coca").setLevel(logging.NOTSET)
    with caplog.at_level(logging.WARNING):
        assert first_valid(folders) == ResumePoint(folders[1])
    assert "global_step6/meta.json: has 2 bytes" in caplog.text and "falling back" in caplog.text
    with pytest.raises(CheckpointError, match="global_step6/meta.json: has 2 bytes"):
        first_valid(folders[:1])


@pytest.mark.usefixtures("one_rank")
def test_checkpoints_after_the_resumed_one_are_set_aside(tmp_path: Path) -> None:
    folders = {step: checkpoint(tmp_path / "run", step) for step in (2, 4, 6)}
    quarantine_newer(keys(), ResumePoint(folders[4]))
    quarantine_newer(keys(save=str(tmp_path / "run")), ResumePoint(None))
    assert native.steps(tmp_path / "run") == [2, 4, 6]
    quarantine_newer(keys(save=str(tmp_path / "run")), ResumePoint(folders[4]))
    assert native.steps(tmp_path / "run") == [2, 4] and native.locate(tmp_path / "run") == folders[4]
    assert (tmp_path / "run/quarantine/global_step6" / native.MANIFEST).is_file(), "nothing is lost"
    checkpoint(tmp_path / "run", 6)
    quarantine_newer(keys(save=str(tmp_path / "run")), ResumePoint(folders[4]))
    assert (tmp_path / "run/quarantine/global_step6.1" / native.MANIFEST).is_file()


@pytest.fixture
def saved(opened: Corpus, tmp_path: Path) -> Path:
    state: dict[str, Any] = {"counters": {"step": 3.0}, "topology": {}, "progress": {}}
    return checkpoint(tmp_path, 4, opened.config, {"data": opened.identity, **state, **LAYOUT})


@pytest.mark.usefixtures("one_rank")
def test_the_same_run_is_accepted(saved: Path, opened: Corpus, caplog: pytest.LogCaptureFixture) -> None:
    check_same_run(saved, opened, LAYOUT)
    check_same_run(saved, changed(opened, **{"optimizer.type": "cpu_adam"}), LAYOUT)
    assert not caplog.text
    elsewhere = {"save": "x", "load": "y", "log_interval": 5, "train_iters": 99, "attention_backend": "sdpa"}
    check_same_run(saved, changed(opened, **elsewhere), LAYOUT)


@pytest.mark.usefixtures("one_rank")
def test_keys_that_may_change_are_logged(saved: Path, opened: Corpus, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("megatron_coca").setLevel(logging.NOTSET)
    with caplog.at_level(logging.WARNING):
        check_same_run(saved, changed(opened, **{"optimizer.params.lr": 1e-5}), LAYOUT)
    assert "resuming with a different optimizer.params.lr (saved 0.003, now 1e-05)" in caplog.text


@pytest.mark.usefixtures("one_rank")
def test_another_dtype_is_named_once(saved: Path, opened: Corpus) -> None:
    with pytest.raises(CheckpointError, match="with a different precision") as caught:
        check_same_run(saved, changed(opened, precision="bfloat16"), LAYOUT | {"dtype": "bf16"})
    assert str(caught.value).count("precision (saved") == 1


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("keys", "changes"), [({"train_iters": 50}, True), ({"log_interval": 7}, False)], ids=str)
def test_a_rate_that_changes_is_logged(
    keys: dict[str, Any], changes: bool, saved: Path, opened: Corpus, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that goes on beyond its length gets the schedule of the new length, so its rate may rise again."""
    logging.getLogger("megatron_coca").setLevel(logging.NOTSET)
    with caplog.at_level(logging.WARNING):
        check_same_run(saved, changed(opened, **keys), LAYOUT)
    before, after = (
        config.run_stages()[0].learning_rate(4) for config in (opened.config, changed(opened, **keys).config)
    )
    assert (before != after) == changes
    assert (f"the learning rate of step 5 changes from {before:.4g} to {after:.4g}" in caplog.text) == changes


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"num_layers": 3, "hidden_size": 64}, ("num_layers (saved 2, now 3)", "hidden_size (saved 32, now 64)")),
        ({"pos_emb": "rotary"}, ("pos_emb (saved 'coca', now 'rotary')",)),
        ({"seed": 8}, ("seed (saved 7, now 8)",)),
        ({"optimizer.type": "sgd"}, ("optimizer.type (saved 'Adam', now 'sgd')",)),
        ({"hidden_dropout": 0.0}, ("hidden_dropout (saved 0.1, now 0.0)",)),
        ({"weight_decay": 0.0}, ("weight_decay (saved 0.1, now 0.0)",)),
        (
            {"use_mup": True, "mup_base_hidden_size": 16},
            ("use_mup (saved False, now True)", "final_logit_scale (saved 1.0, now 0.5)"),
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, ("rope_scaling (saved None, now ",)),
    ],
)
def test_an_error_about_another_run_names_the_keys(
    saved: Path, opened: Corpus, values: dict[str, Any], named: tuple[str, ...]
) -> None:
    with pytest.raises(CheckpointError) as caught:
        check_same_run(saved, changed(opened, **values), LAYOUT)
    for part in (str(saved), "cannot be resumed with a different", "finetune=true", *named):
        assert part in str(caught.value)


@pytest.mark.usefixtures("one_rank")
def test_a_loaded_run_may_change_its_form(saved: Path, opened: Corpus, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("megatron_coca").setLevel(logging.NOTSET)
    loads = {"load": str(saved.parent), "save": str(saved.parent / "other")}
    form = {"pos_emb": "none", "qk_norm": "head"}
    with caplog.at_level(logging.WARNING):
        check_same_run(saved, changed(opened, **loads, **form), LAYOUT)
    assert "different pos_emb (saved 'coca', now 'none')" in caplog.text
    stage = changed(opened, **loads, **form).config.run_stages()[0]
    how = continuation(saved, stage)
    assert (how.adds_norms, how.new_losses, how.new_optimizer) == (True, True, False)
    assert how.counters == {"step": 3.0, "added_at": 3.0}
    anew = continuation(saved, changed(opened, **loads, **form, no_load_optim=True).config.run_stages()[0])
    assert anew.adds_norms and anew.counters == {"step": 0.0}
    for values, part in (
        ({"pos_emb": "rpe"}, "(coca becomes rpe, but rpe has weights"),
        ({"pos_emb": "none", "rotary_emb_base": 500.0}, "rotary_emb_base (saved 10000.0, now 500.0)"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling (saved None, now "),
    ):
        with pytest.raises(CheckpointError) as caught:
            check_same_run(saved, changed(opened, **loads, **values), LAYOUT)
        assert part in str(caught.value) and "new stage" not in str(caught.value)
    rotates = {"rotary_frequencies": {"type": "rope_id"}, "training_positions": {"type": "shifted", "max": "4L"}}
    (saved / native.CONFIG).write_text(opened.config.override(rotates).to_yaml())
    check_same_run(saved, changed(opened, **loads, **form), LAYOUT)  # all that needs rotation goes with it
    with pytest.raises(CheckpointError, match=r"different rotary_frequencies \(saved .*, training_positions \(saved "):
        check_same_run(saved, changed(opened, **loads, pos_emb="rotary"), LAYOUT)
    own = {"load": str(saved.parent), "save": str(saved.parent)}
    with pytest.raises(CheckpointError, match="restore these values, .*in a new stage"):
        check_same_run(saved, changed(opened, **own, **form), LAYOUT)


@pytest.mark.parametrize("name", LAYOUT)
def test_another_batch_or_dtype_is_an_error(saved: Path, opened: Corpus, name: str) -> None:
    with pytest.raises(CheckpointError, match=rf"different {RECORDED[name]} \(saved "):  # the key that sets it
        check_same_run(saved, opened, LAYOUT | {name: "other"})


def test_other_data_is_an_error(saved: Path, opened: Corpus, small: dict[str, Any]) -> None:
    other = open_corpus(load_config([], small | {"train_data_paths": small["test_data_paths"]}))
    prefix = small["test_data_paths"][0]
    with pytest.raises(CheckpointError, match=rf"a different token count of {prefix} \(saved [\d,]+, now [\d,]+\)"):
        check_same_run(saved, other, LAYOUT)


@pytest.mark.usefixtures("one_rank")
def test_a_loop_of_links_beside_a_checkpoint_stays(tmp_path: Path) -> None:
    folder, loop = checkpoint(tmp_path, 4), native.step_folder(tmp_path, 9)
    loop.symlink_to(loop.name)
    chosen = first_valid([loop, folder])
    assert chosen == ResumePoint(folder, (loop,))
    quarantine_newer(keys(save=str(tmp_path)), chosen)
    assert loop.is_symlink()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("name", "method"), [("state/rank_00000.safetensors", "open"), (native.MANIFEST, "open")])
def test_an_unreadable_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, method: str
) -> None:
    folders = [checkpoint(tmp_path, step) for step in (6, 4, 2)]
    refuse(monkeypatch, folders[0] / name, method, errno.EIO)
    (folders[1] / native.WEIGHTS).write_text("damaged")
    chosen = first_valid(folders)
    assert chosen == ResumePoint(folders[2], (folders[0],))
    quarantine_newer(keys(save=str(tmp_path)), chosen)
    assert (folders[0] / name).exists() and [path.name for path in (tmp_path / native.QUARANTINE).iterdir()] == [
        "global_step4"
    ]
    with pytest.raises(UnreadableError, match=r"cannot be read \(Input/output error\)"):
        first_valid(folders[:2])
    assert candidates(keys(load=str(tmp_path), save=str(tmp_path))) == [folders[0], folders[2]]


@pytest.mark.usefixtures("one_rank")
def test_a_checkpoint_without_the_state_of_a_run_gives_way(tmp_path: Path) -> None:
    folders = [checkpoint(tmp_path, step) for step in (6, 4)]
    content = native.read_json(folders[0] / native.MANIFEST)
    native.write_json(folders[0] / native.MANIFEST, content | {"holds": native.WEIGHTS_ONLY})
    native.verify(folders[0])
    assert first_valid(folders) == ResumePoint(folders[1])
    for chosen in ({"auto_resume": True}, {"load": str(tmp_path)}):
        assert candidates(keys(save=str(tmp_path), **chosen)) == folders
    with pytest.raises(CheckpointError, match="finetune=true"):
        first_valid(folders[:1])


@pytest.mark.usefixtures("one_rank")
def test_a_rank_that_waits_for_others_beats_while_they_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of many ranks has nothing to read: the first one reads 10 bytes between two agreements."""
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
    assert len(beats) == 4, "one at the start, and none if nothing was read"


def test_a_link_as_quarantine_is_not_followed(tmp_path: Path) -> None:
    save, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    (save / "global_step7").mkdir(parents=True)
    elsewhere.mkdir()
    (save / native.QUARANTINE).symlink_to(elsewhere)
    assert native.set_aside(save / "global_step7") == save / "global_step7.quarantine"
    assert (save / "global_step7.quarantine").is_dir() and not [*elsewhere.iterdir()]
    assert native.begun_steps(save) == []
