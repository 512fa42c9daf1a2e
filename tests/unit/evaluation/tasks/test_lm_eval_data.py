"""Where the documents of the harness's tasks come from: metadata, the model's tokenizer, seeds, and local data sets."""

import json
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest

from megatron_coca.evaluation.results import EvaluationError
from megatron_coca.evaluation.tasks.lm_eval.benchmarks import (
    BENCHMARKS,
    READ_BY_CODE,
    SQUAD,
    bucket_of,
    place_of,
    sources_of,
)
from megatron_coca.evaluation.tasks.lm_eval.data import TaskData
from megatron_coca.evaluation.tasks.lm_eval.prompts import InputLimits
from megatron_coca.evaluation.tasks.lm_eval.ruler_lengths import SHORTEST, check_lengths
from tests.parity.exported import NEOX, random_checkpoint
from tests.unit.evaluation.benchmark_cases import write_data_set
from tests.unit.evaluation.harness_cases import command, documents, read, write_tasks

GENERATED = """
task: NAME
dataset_path: ""
custom_dataset: !function made.documents
output_type: generate_until
test_split: test
doc_to_text: "{{text}}"
doc_to_target: "x"
process_results: !function made.score
generation_kwargs: {until: [], max_gen_toks: 2, do_sample: false}
metric_list: [{metric: "16", aggregation: mean, higher_is_better: true}]
"""
CODE = '''
"""A task as those of ruler: random documents of given lengths, measured with a tokenizer of transformers."""
import random
from datasets import Dataset
from transformers import AutoTokenizer

OWN = random.Random(3)

def documents(tokenizer, max_seq_lengths=(16,), **_):
    size = len(AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=True)("the sea").input_ids)
    texts = [(f"{random.random()} {OWN.random()} {size}", length) for length in max_seq_lengths for _ in range(4)]
    return {"test": Dataset.from_list([{"text": text, "max_length": length} for text, length in texts])}

def score(doc, results):
    return {"8": -1.0, str(doc["max_length"]): float(doc["text"].split()[2])}
'''
HUB = "dataset_path: owner/data\ndataset_name: small\n"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("neox") / "run", **NEOX)


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    folder = write_tasks(tmp_path)
    (folder / "made.py").write_text(CODE)
    for name in ("one", "two"):
        (folder / f"{name}.yaml").write_text(GENERATED.replace("NAME", name))
    choice = (folder / "choice.yaml").read_text().replace("local_choice", "hub_choice")
    lines = [line for line in choice.splitlines() if not line.startswith("dataset_")]
    (folder / "hub.yaml").write_text("\n".join([HUB, *lines]))
    return folder


def write_local(folder: Path) -> Path:
    write_data_set(folder / "owner/data", {"small": {"test": documents()}})
    return folder


def lengths(*numbers: int) -> list[str]:
    return ["--metadata", json.dumps({"max_seq_lengths": numbers})]


def test_metadata_and_the_tokenizer_reach_the_code_of_a_task(checkpoint: Path, tasks: Path, tmp_path: Path) -> None:
    """`--limit` counts every length, and the metadata are part of the measurement."""
    output = ["--output", tmp_path / "a.json", "--limit", 2]
    assert command(checkpoint, tasks, "one", *lengths(16, 24), *output) == 0
    result = read(tmp_path / "a.json")
    assert result.protocol.metadata == {"max_seq_lengths": [16, 24]} and result.results[0].samples == 4
    assert {score.metric: score.value for score in result.results[0].scores} == {"8": None, "16": 7.0, "24": 7.0}, (
        "bytes"
    )
    with pytest.raises(EvaluationError, match=r"different protocol\.metadata"):
        command(checkpoint, tasks, "one", *lengths(16), *output)


def test_documents_depend_on_the_seed_only(checkpoint: Path, tasks: Path, tmp_path: Path) -> None:
    """Neither on an earlier variant nor on earlier tasks, even if the code of a task keeps a generator."""
    variants = ["--variant", "plain", "--variant", "PI", "rope_scaling.rope_type=linear", "rope_scaling.factor=2"]

    def hashes(names: str, *more: object) -> set[str | None]:
        folder = tmp_path / names / "-".join(map(str, more))
        assert command(checkpoint, tasks, names, *variants, *more, "--output", folder) == 0
        results = [read(folder / f"lm-eval_{name}.json").results for name in ("plain", "pi")]
        return {entry.documents_sha256 for entries in results for entry in entries}

    (first,) = hashes("two,one")
    assert hashes("one") == {first}
    assert hashes("one", "--seed", 7).isdisjoint({first})


@pytest.mark.parametrize("given", ["{", "[1]", "4k"])
def test_metadata_that_are_no_object(
    given: str, checkpoint: Path, tasks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command(checkpoint, tasks, "one", "--metadata", given)
    assert "--metadata: " in capsys.readouterr().err


def test_a_local_data_set(checkpoint: Path, tasks: Path, tmp_path: Path) -> None:
    """It is read as from the hub; its content belongs to the measurement, its place does not."""
    folder, output = write_local(tmp_path / "data"), tmp_path / "a.json"
    options = ["--output", output, "--limit", 3]
    assert command(checkpoint, tasks, "hub_choice", *options, "--datasets", folder) == 0
    before, result = output.read_bytes(), read(output)
    assert result.protocol.local_data and str(folder) not in output.read_text()
    assert command(checkpoint, tasks, "hub_choice", *options, "--datasets", folder.rename(tmp_path / "moved")) == 0
    assert output.read_bytes() == before
    assert command(checkpoint, tasks, "local_choice", "--limit", 3, "--output", tmp_path / "b.json") == 0
    assert read(tmp_path / "b.json").results[0].documents_sha256 == result.results[0].documents_sha256
    with (tmp_path / "moved/owner/data/small/test.jsonl").open("a") as file:
        file.write(json.dumps(documents()[0]) + "\n")
    with pytest.raises(EvaluationError, match="file of task hub_choice changed"):
        command(checkpoint, tasks, "hub_choice", *options, "--datasets", tmp_path / "moved")


def test_a_missing_data_set(
    checkpoint: Path,
    tasks: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The message names the files and the command that downloads them."""
    fetch = "tools/fetch_benchmarks.py owner/data --output DIR`"
    (tmp_path / "empty").mkdir()
    assert command(checkpoint, tasks, "hub_choice", "--datasets", tmp_path / "empty") == 2
    told = capsys.readouterr().err
    assert f"--datasets {tmp_path}/empty: has no owner/data; " in told and fetch in told

    def failing(error: Exception) -> str:
        def load(*_: Any, **__: Any) -> None:
            raise error

        monkeypatch.setattr(datasets, "load_dataset", load)
        assert command(checkpoint, tasks, "hub_choice") == 2
        return capsys.readouterr().err

    assert "failed: KeyError: 'answers'" in failing(KeyError("answers")), "an error of the task is shown as it is"
    told = failing(ConnectionError("Couldn't reach the Hub"))
    assert "data owner/data: cannot be downloaded (ConnectionError: " in told and fetch in told
    with pytest.raises(EvaluationError, match="--datasets .*none: no such folder"):
        command(checkpoint, tasks, "hub_choice", "--datasets", tmp_path / "none")


def test_the_sources_of_tasks() -> None:
    """All sources that code reads are those that the script downloads for ruler."""
    assert {source for listed in READ_BY_CODE.values() for source in listed} == set(BENCHMARKS["ruler"])
    assert sources_of("owner/data", "") == ("owner/data",) and sources_of("json", "") == ()
    assert sources_of("", "qa_utils.get_squad") == (SQUAD,)
    assert place_of(SQUAD, Path("data")) == Path("data/rajpurkar.github.io/SQuAD-explorer/dataset/dev-v2.0.json")
    assert [bucket_of(words) for words in (0, 3999, 4000, 7999, 8000)] == ["0-4k"] * 2 + ["4-8k"] * 2 + ["8k+"]


@pytest.mark.parametrize(
    ("truncate", "kept", "expected"),
    [("beginning", 1, [4, 5, 6, 7, 8]), ("middle", 1, [0, 1, 6, 7, 8]), ("middle", 4, [0, 5, 6, 7, 8])],
)
def test_the_truncated_part(truncate: Any, kept: int, expected: list[int]) -> None:
    limits = InputLimits(5, 5, truncate)
    assert limits.shortened(list(range(9)), 5, kept) == expected
    assert limits.shortened([1, 2], 5) == [1, 2]


def test_prompts_lose_their_middle(
    checkpoint: Path, tasks: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The option is part of the measurement, and the warning and the table say which part is lost."""
    given = ["--max-length", 24, "--limit", 5]
    for part in ("beginning", "middle"):
        output = tmp_path / f"{part}.json"
        assert command(checkpoint, tasks, "local_choice", *given, "--truncate", part, "--output", output) == 0
        result = read(output)
        assert result.results[0].cut > 0 and f"loses its {part}" in result.protocol.text
        assert f"lost their {part}" in caplog.text
    with pytest.raises(EvaluationError, match=r"different protocol\.text, protocol\.truncate"):
        command(checkpoint, tasks, "local_choice", *given, "--output", tmp_path / "middle.json")


def test_code_of_tasks_is_imported_again() -> None:
    """The harness's modules with data and random generators are; its own modules are not."""
    import lm_eval.tasks.babilong.common_utils as code

    with TaskData().provided(1):
        assert code.__name__ not in sys.modules and "lm_eval.tasks.manager" in sys.modules


def test_lengths_that_are_no_list() -> None:
    for function in SHORTEST:
        with pytest.raises(EvaluationError, match="max_seq_lengths '4k': is not a list of lengths"):
            check_lengths(function, {"max_seq_lengths": "4k"})
    check_lengths("common_utils.load_dataset", {"max_seq_lengths": "4k"})
