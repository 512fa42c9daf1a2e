"""`megatron-coca evaluate lm-eval`."""

import json
import re
import shutil
from importlib.metadata import PackageNotFoundError
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megatron_coca.checkpoints import load_checkpoint
from megatron_coca.evaluation.results import EvaluationError
from megatron_coca.evaluation.tasks.lm_eval import files as task_files
from megatron_coca.evaluation.tasks.lm_eval import model as adapter
from megatron_coca.evaluation.tasks.lm_eval.files import config_hash, inputs_hash
from megatron_coca.model import generate
from tests.parity.exported import NEOX, TRAINED, random_checkpoint
from tests.unit.evaluation.benchmark_cases import word_tokenizer
from tests.unit.evaluation.harness_cases import LENGTH, command, read, write_tasks


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of task files on one file of documents."""
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("neox") / "run", **NEOX)


def test_the_command(checkpoint: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two variants. The order of tasks changes nothing, tasks are not measured twice, and a failed task is reported."""
    variants = ["--variant", "plain", "--variant", "dynamic", "rope_scaling.rope_type=dynamic", "rope_scaling.factor=4"]
    options = [*variants, "--max-length", LENGTH, "--limit", 5]
    assert command(checkpoint, tasks, "local_choice,local_rolling", *options, "--output", tmp_path / "a") == 0
    assert "local_choice" in capsys.readouterr().out
    assert command(checkpoint, tasks, "local_rolling", *options, "--output", tmp_path / "b") == 0
    assert command(checkpoint, tasks, "local_choice", *options, "--output", tmp_path / "b") == 0
    for name in ("lm-eval_plain.json", "lm-eval_dynamic.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    result = read(tmp_path / "a" / "lm-eval_plain.json")
    assert [each.task for each in result.results] == ["local_choice", "local_rolling"]
    assert result.results[0].version == "2.5" and result.results[0].samples == 5
    assert {score.metric for score in result.results[0].scores} == {"acc", "acc_norm", "acc_bytes"}
    assert str(tasks) not in (tmp_path / "a" / "lm-eval_plain.json").read_text()
    assert command(checkpoint, tasks, "local_until", "--max-length", 12) == 2
    assert "12 new tokens leave no room" in capsys.readouterr().err


def test_ids_that_the_tokenizer_lacks_are_never_generated(tasks: Path, tmp_path: Path) -> None:
    """The vocabulary of a model can have more ids than its tokenizer."""
    tokenizer = word_tokenizer(tmp_path / "tokenizer")
    wider = random_checkpoint(tmp_path / "run", tokenizer=tokenizer, **NEOX)
    assert load_checkpoint(wider).config.model.vocab_size > tokenizer.vocab_size + 40
    assert command(wider, tasks, "local_until") == 0


@pytest.mark.slow  # the harness's own task files are read
def test_a_group(checkpoint: Path, tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path)
    mean = "aggregate_metric_list: [{metric: acc, weight_by_size: true}]"
    (tasks / "both.yaml").write_text(f"group: both\ntask: [local_choice, local_rolling]\n{mean}\n")
    assert command(checkpoint, tasks, "both", "--limit", 5, "--output", tmp_path / "c.json") == 0
    group, choice, _ = read(tmp_path / "c.json").results
    assert (group.task, group.samples, group.prompts_sha256) == ("both", 10, None)
    assert choice.task == "local_choice" and choice.prompts_sha256 and choice.config_sha256


def test_the_inputs_of_a_task_belong_to_its_result(checkpoint: Path, tmp_path: Path) -> None:
    """A file that changed in place makes another measurement, and the error says so."""
    tasks, path = write_tasks(tmp_path), tmp_path / "a.json"
    (tasks / "utils.py").write_text("def text(doc):\n    return doc['question']\n")
    choice = (tasks / "choice.yaml").read_text()
    (tasks / "choice.yaml").write_text(re.sub("doc_to_text:.*", "doc_to_text: !function utils.text", choice))
    (tasks / "both.yaml").write_text("group: both\ntask: [local_choice, local_rolling]\n")

    def hashes() -> list[str]:
        manager = adapter.TaskManager(include_path=[tasks], include_defaults=False)
        return [inputs_hash(manager, name) for name in ("local_choice", "both")]

    assert command(checkpoint, tasks, "local_choice", "--limit", 3, "--output", path) == 0
    first = hashes()
    (tasks / "utils.py").write_text("def text(doc):\n    return doc['question'].upper()\n")
    second = hashes()
    with (tasks / "documents.jsonl").open("a") as file:
        file.write("\n")
    third = hashes()
    (tasks / "choice.yaml").write_text((tasks / "choice.yaml").read_text().replace("version: 2.5", "version: 2.6"))
    last = hashes()
    assert len({first[0], second[0], third[0]}) == 3 and last[0] == third[0], "of its own file is another hash"
    assert len({first[1], second[1], third[1], last[1]}) == 4

    (tasks / "choice.yaml").write_text((tasks / "choice.yaml").read_text().replace("version: 2.6", "version: 2.5"))
    with pytest.raises(EvaluationError, match="file of task local_choice changed"):
        command(checkpoint, tasks, "local_choice", "--limit", 3, "--output", path)


def test_brackets_in_the_name_of_local_data(tmp_path: Path) -> None:
    (tmp_path / "a [1].jsonl").write_text("{}")
    found = task_files._data({"dataset_kwargs": {"data_files": {"test": f"{tmp_path}/a [1].jsonl"}}})
    assert [path.name for path in found] == ["a [1].jsonl"]


def test_code_of_an_included_file_in_another_folder_belongs_to_a_result(tmp_path: Path) -> None:
    """Its changes count, and the place of both folders does not."""
    shared, own = tmp_path / "one" / "sh\u00e4red" / "sub", tmp_path / "one" / "own"
    for folder in (shared, own):
        folder.mkdir(parents=True)
    (shared / "utils.py").write_text("def text(doc):\n    return doc['question']\n")
    base = "dataset_path: json\noutput_type: loglikelihood\ndoc_to_target: a\n"
    (shared.parent / "base.yaml").write_text(base + "doc_to_text: !function sub.utils.text\n")
    (own / "task.yaml").write_text("include: ../sh\u00e4red/base.yaml\ntask: included\n")

    def hashes(folder: Path) -> tuple[str, str]:
        manager = adapter.TaskManager(include_path=[folder], include_defaults=False)
        return config_hash(manager, "included"), inputs_hash(manager, "included")

    first = hashes(own)
    assert hashes(shutil.copytree(tmp_path / "one", tmp_path / "two") / "own") == first
    (shared / "utils.py").write_text("def text(doc):\n    return doc['question'].upper()\n")
    assert hashes(own)[0] == first[0] and hashes(own)[1] != first[1]


@pytest.mark.slow  # the harness's own task files are read
def test_an_unknown_name(checkpoint: Path, tasks: Path, tmp_path: Path) -> None:
    """At once, with similar names."""
    with pytest.raises(EvaluationError, match="local_choise: no such task.*mean local_choice"):
        command(checkpoint, tasks, "local_choice,local_choise", "--include-path", tasks)


@pytest.mark.parametrize("names", [",", "", " , "])
def test_no_name(names: str, checkpoint: Path, tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command(checkpoint, tasks, names)
    assert "names no task" in capsys.readouterr().err


def test_without_the_harness(checkpoint: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("megatron_coca.evaluation.tasks.lm_eval.measure.version", absent)
    with pytest.raises(EvaluationError, match="pip install 'lm-eval==0.4.13'"):
        command(checkpoint, tasks, "local_choice")


def test_inputs_are_read_whole_by_default_and_windows_have_the_training_length(
    checkpoint: Path, tasks: Path, tmp_path: Path
) -> None:
    """The prompts are longer than the training length. Scores equal those with a limit that keeps them whole."""
    (tasks / "long.yaml").write_text(
        (tasks / "choice.yaml").read_text().replace("local_choice", "long").replace("{{question}}", "{{text}} " * 3)
    )
    for name, options in (("whole", []), ("limited", ["--max-length", 2000])):
        assert command(checkpoint, tasks, "long", *options, "--output", tmp_path / f"{name}.json") == 0
    whole, limited = (read(tmp_path / f"{name}.json") for name in ("whole", "limited"))
    assert whole.results == limited.results and whole.results[0].cut == 0
    assert (whole.protocol.max_length, whole.protocol.rolling_window) == (None, TRAINED)
    assert (limited.protocol.max_length, limited.protocol.rolling_window) == (2000, None)


def test_a_model_with_a_table_of_positions_reads_no_more_than_it_has(tasks: Path, tmp_path: Path) -> None:
    run = random_checkpoint(tmp_path / "run", **NEOX, pos_emb="learned", max_position_embeddings=2 * TRAINED)
    assert command(run, tasks, "local_choice", "--output", tmp_path / "a.json") == 0
    result = read(tmp_path / "a.json")
    assert result.protocol.max_length == 2 * TRAINED and 0 < result.results[0].cut < result.results[0].samples


def test_results_of_earlier_versions_are_resumed(checkpoint: Path, tasks: Path, tmp_path: Path) -> None:
    """The fields that they lack have defaults that this measurement has too."""
    given = ["local_rolling", "--max-length", LENGTH, "--limit", 2, "--output", tmp_path / "a.json"]
    assert command(checkpoint, tasks, *given) == 0
    content = json.loads((tmp_path / "a.json").read_text())
    for added in ("rolling_window", "adds", "names_tokens", "prefix", "ends", "chat"):
        del content["protocol"][added]
    for added in ("cut", "logged"):
        del content["results"][0][added]
    (tmp_path / "a.json").write_text(json.dumps(content))
    cost = (tmp_path / "a.cost.json").read_bytes()
    assert command(checkpoint, tasks, *given) == 0
    assert (tmp_path / "a.cost.json").read_bytes() == cost


def test_logged_samples_are_written_and_resumed(checkpoint: Path, tasks: Path, tmp_path: Path) -> None:
    given = ["local_choice", "--limit", 3, "--output", tmp_path / "a.json"]
    with pytest.raises(EvaluationError, match="--log-samples: needs --output"):
        command(checkpoint, tasks, "local_choice", "--log_samples")
    assert command(checkpoint, tasks, *given) == 0
    cost = tmp_path / "a.cost.json"
    costs = [cost.read_bytes()]
    assert command(checkpoint, tasks, *given, "--log-samples") == 0
    (cell,) = read(tmp_path / "a.json").results
    (logged,) = cell.logged
    path = tmp_path / "a.samples" / "local_choice.jsonl"
    assert logged.file == "a.samples/local_choice.jsonl" and logged.intact(tmp_path / "a.json")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["doc_id"] for row in rows] == [0, 1, 2]
    assert rows[0]["arguments"]["gen_args_1"]["arg_1"].strip() in rows[0]["doc"]["choices"]
    assert sum(row["acc"] for row in rows) / 3 == next(each.value for each in cell.scores if each.metric == "acc")
    costs.append(cost.read_bytes())
    for remove in (lambda: None, path.unlink, lambda: path.write_text("")):
        remove()
        assert command(checkpoint, tasks, *given, "--log-samples") == 0 and logged.intact(tmp_path / "a.json")
        costs.append(cost.read_bytes())
    assert [one == other for one, other in pairwise(costs)] == [False, True, False, False]


def test_windows_of_a_fine_tuned_model_have_its_own_training_length(tasks: Path, tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 4.0, "original_max_position_embeddings": TRAINED // 4}
    run = random_checkpoint(tmp_path / "run", **NEOX, rope_scaling=scaling)
    assert command(run, tasks, "local_rolling", "--limit", 2, "--output", tmp_path / "a.json") == 0
    assert read(tmp_path / "a.json").protocol.rolling_window == TRAINED


def test_a_text_beyond_the_positions_of_a_model_is_noted_and_other_tasks_go_on(tasks: Path, tmp_path: Path) -> None:
    run = random_checkpoint(tmp_path / "run", **NEOX, pos_emb="learned", max_position_embeddings=TRAINED)
    (tasks / "short.yaml").write_text(
        (tasks / "rolling.yaml").read_text().replace("local_rolling", "short").replace("{{text}}", "a")
    )
    path = tmp_path / "a.json"
    assert command(run, tasks, "local_rolling,short", "--max-length", 4 * TRAINED, "--output", path) == 2
    result = read(path)
    assert [each.task for each in result.results] == ["short"]
    assert [(each.at, each.kind) for each in result.missing] == [("task local_rolling", "refused")]
    assert f"{TRAINED} learned positions" in result.missing[0].reason


def test_the_length_that_a_dynamic_extension_sees_is_chosen_and_told(
    checkpoint: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []

    def noted(*given: Any, **named: Any) -> Any:
        seen.append(named["dynamic_length"])
        return generate(*given, **named)

    monkeypatch.setattr(adapter, "generate", noted)
    for name, chosen in (("current", []), ("prompt", ["--dynamic-length", "prompt"])):
        path = tmp_path / f"{name}.json"
        assert (
            command(checkpoint, tasks, "local_until", "--max-length", 60, "--limit", 1, *chosen, "--output", path) == 0
        )
        assert read(path).protocol.dynamic_length == name and f"dynamic length {name}: " in capsys.readouterr().out
    assert seen == ["current", "prompt"]
