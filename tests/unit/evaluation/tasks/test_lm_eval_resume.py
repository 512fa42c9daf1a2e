"""A file is continued only with the tasks that it has, of the same configuration."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_coca.evaluation.results import EvaluationError
from tests.parity.exported import NEOX, random_checkpoint
from tests.unit.evaluation.harness_cases import command, read, write_tasks


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("neox") / "run", **NEOX)


def edit(name: str, old: str, new: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return change


CHANGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "prompt": ("local_choice", edit("choice.yaml", "Answer:", "A:"), "the configuration of task local_choice"),
    "metrics": ("local_choice", edit("choice.yaml", ", {metric: acc_bytes}", ""), "of task local_choice changed"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_task(name: str, checkpoint: Path, tmp_path: Path) -> None:
    task, change, message = CHANGES[name]
    folder, output = write_tasks(tmp_path), tmp_path / "a.json"
    options = ["--limit", 4, "--output", output]
    assert command(checkpoint, folder, task, *options) == 0
    before = output.read_bytes()
    change(folder)
    with pytest.raises(EvaluationError, match=f"a.json: contains another measurement .*{message}.*--overwrite"):
        command(checkpoint, folder, task, *options)
    assert output.read_bytes() == before
    assert command(checkpoint, folder, task, *options, "--overwrite") == 0
    assert output.read_bytes() != before
    assert command(checkpoint, folder, task, *options) == 0


def test_a_further_task_continues_the_file(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if places and names have changed. Finished tasks are not run again."""
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    output = tmp_path / "a.json"
    assert command(checkpoint, write_tasks(tmp_path / "one"), "local_choice", "--limit", 4, "--output", output) == 0
    two = write_tasks(tmp_path / "two")
    edit("choice.yaml", "task: local_choice", "task: local_choice\ntask_alias: other\ntag: many")(two)
    cost = output.with_suffix(".cost.json")
    before = cost.read_text()
    assert command(checkpoint, two, "local_choice", "--limit", 4, "--output", output) == 0
    assert cost.read_text() == before
    assert command(checkpoint, two, "local_choice,local_rolling", "--limit", 4, "--output", output) == 0
    assert [cell.task for cell in read(output).results] == ["local_choice", "local_rolling"]
