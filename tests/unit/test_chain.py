"""Training stages: which plans are refused, and which stages are trained again."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_coca import cli
from megatron_coca.checkpoints import CheckpointError, native, open_checkpoint
from megatron_coca.commands.train_stages import plan, run_stages, run_train
from megatron_coca.config import ConfigError, load_config

ROOT = Path(__file__).parents[2]
COMMON = "num_layers: 1\nhidden_size: 8\nnum_attention_heads: 1\nseq_length: 8\ntrain_iters: 5\n"


def write(folder: Path, name: str, load: str | None, save: str | None, extra: str = "finetune: true\n") -> str:
    keys = {"load": load, "save": save}
    lines = "".join(f"{key}: {folder / value}\n" for key, value in keys.items() if value is not None)
    (folder / f"{name}.yml").write_text(COMMON + lines + extra)
    return str(folder / f"{name}.yml")


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    return [write(tmp_path, f"stage{n}", "source" if n == 1 else f"run{n - 1}", f"run{n}") for n in (1, 2, 3)]


class Trainings:
    """Stands for `megatron-coca train`: notes what it is given and leaves checkpoints."""

    def __init__(self, folder: Path, reached: int = 5, statuses: Sequence[int] = (), keys: Sequence[str] = ()) -> None:
        self.keys = keys
        self.folder, self.reached, self.statuses = folder, reached, list(statuses)
        self.given: list[tuple[str, ...]] = []

    def __call__(self, arguments: Sequence[str]) -> int:
        self.given.append(tuple(arguments))
        save = self.folder / Path(arguments[0]).stem.replace("stage", "run")
        place = native.step_folder(save, self.reached)
        place.mkdir(parents=True, exist_ok=True)
        file, *shared = (text for text in arguments if text != "auto_resume=true")
        config = load_config([file], [*shared, *self.keys])
        (place / native.CONFIG).write_text(config.to_yaml())
        loaded = Path(str(config.checkpoint.load))
        origin = open_checkpoint(loaded, verify=False).identity if loaded.is_dir() else None
        native.write_json(place / native.META, {"step": self.reached, "origin": origin})
        (place / native.WEIGHTS).write_text(f"{save.name} {self.keys}")
        files = {name: native.describe(place / name) for name in (native.CONFIG, native.META, native.WEIGHTS)}
        native.write_json(place / native.MANIFEST, {"format": 2, "holds": native.WEIGHTS_ONLY, "files": files})
        return self.statuses.pop(0) if self.statuses else 0


def test_runs_follow_each_other(tmp_path: Path, files: list[str]) -> None:
    trainings = Trainings(tmp_path)
    assert run_stages(plan(files, ["seed=9"]), trainings) == 0
    assert trainings.given == [(file, "seed=9", "auto_resume=true") for file in files]


def test_finished_runs_are_left_alone(tmp_path: Path, files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Trainings(tmp_path)([files[0]])
    trainings = Trainings(tmp_path)
    assert run_stages(plan(files), trainings) == 0
    assert [arguments[0] for arguments in trainings.given] == files[1:]
    assert "1 of 3: stage1: step 5 is already saved" in capsys.readouterr().out


def test_a_finished_run_of_other_keys_is_refused(tmp_path: Path, files: list[str]) -> None:
    trainings = Trainings(tmp_path)
    assert run_stages(plan(files, ["seed=7"]), trainings) == 0
    for changed, message in (
        ("seed=8", r"run1.global_step5: belongs to a different run from stage1: seed \(saved 7, now 8\)"),
        ("trainable=[mlp]", "trainable"),
        ("train_iters=4", r"train_iters \(step 5 is done, now 4\)"),
    ):
        with pytest.raises(CheckpointError, match=message):
            run_stages(plan(files, ["seed=7", changed]), trainings)
    assert len(trainings.given) == 3, "nothing was trained"
    assert cli.main(["train-stages", *files, "--with", "seed=8"]) == 2


def test_a_stage_of_other_weights_is_refused(tmp_path: Path, files: list[str]) -> None:
    assert run_stages(plan(files), Trainings(tmp_path)) == 0
    shutil.rmtree(tmp_path / "run1")
    anew = Trainings(tmp_path, keys=["log_interval=3"])  # trains something else into it
    with pytest.raises(CheckpointError, match="run2.global_step5: started from other weights than .*run1 holds now"):
        run_stages(plan(files), anew)
    assert len(anew.given) == 1


def test_a_failure_ends_the_chain(tmp_path: Path, files: list[str]) -> None:
    trainings = Trainings(tmp_path, statuses=[0, 75])
    assert run_stages(plan(files), trainings) == 75
    assert len(trainings.given) == 2


def test_a_run_that_ends_early_ends_the_chain(
    tmp_path: Path, files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    trainings = Trainings(tmp_path, reached=3)
    assert run_stages(plan(files), trainings) == 0
    assert len(trainings.given) == 1 and "stage1: ended before step 5" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("load", "save", "extra", "message"),
    [
        ("elsewhere", "run2", "finetune: true\n", "load: .*elsewhere is not the save folder of an earlier stage"),
        ("run1", "run1", "finetune: true\n", "save: .*run1 is the folder of an earlier stage"),
        ("run1", None, "finetune: true\n", "stage2: save: not set"),
        ("run1", "run2", "", "stage2: finetune: a stage starts from weights"),
        ("run1", "run2", "finetune: true\nnum_lairs: 2\n", r"stage2.yml:\d+: num_lairs"),
    ],
)
def test_a_chain_that_does_not_hold_is_refused_before_it_starts(
    tmp_path: Path, load: str, save: str | None, extra: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [write(tmp_path, "stage1", "source", "run1"), write(tmp_path, "stage2", load, save, extra)]
    with pytest.raises(ConfigError, match=message):
        plan(files)
    assert cli.main(["train-stages", *files]) == 2 and "megatron-coca train-stages:" in capsys.readouterr().err


def test_the_papers_chain_holds() -> None:
    files = [str(ROOT / f"configs/finetune/llama7b_coca_{name}.yml") for name in ("stage1", "stage2", "stage3")]
    runs = plan([*files, str(ROOT / "configs/finetune/llama7b_coca_pi_32k.yml")])
    assert [str(run.config.model.ffn_hidden_size) for run in runs] == ["11008"] * 4
    assert [run.config.schedule.train_iters for run in runs] == [15000, 15000, 15000, 6000]


def test_a_stage_is_a_process(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_train(["--no-such-option"]) == 2
    assert "megatron-coca train: error" in capfd.readouterr().err
